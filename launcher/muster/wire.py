"""What ranks say to each other before and beside the payload: one line of JSON a message, each with a keyed hash.

Both ends open with a greeting that holds a random number. The connection's key is a hash of the run's secret token and
of both numbers: the token itself never travels, a recorded line is worth nothing in another connection, and a program
without the token is taken neither for a rank nor for the head.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

SEND_TIMEOUT_S = 5.0
KEEPALIVE_S = 5
DEAD_AFTER_S = 20
"""The kernels of two hosts speak to each other every KEEPALIVE_S seconds; a host whose kernel has acknowledged nothing
for DEAD_AFTER_S is gone. No Python runs for that, so a busy or stopped process never counts as dead."""

_GREETING = re.compile(rb"ddp-muster/1 ([0-9a-f]{32})")
_WRONG_TOKEN = b"ddp-muster/1 wrong token"
_MAX_LINE = 65536


class NotOursError(Exception):
    """The other end does not speak this language."""


class WrongTokenError(Exception):
    """The other end speaks it, with another token: it belongs to another run."""


class Channel:
    """One connection between the head and a rank."""

    def __init__(self, sock: socket.socket, token: str, *, is_head: bool) -> None:
        self.sock = sock
        self._token = token
        self._is_head = is_head
        self._nonce = secrets.token_hex(16)
        self._key: bytes | None = None
        self._buffer = b""
        self._sent = self._received = 0
        self._lock = threading.Lock()
        self.inbox: deque[dict[str, Any]] = deque()
        """Messages that `wait` has read beyond the one it returned."""
        sock.settimeout(SEND_TIMEOUT_S)
        _keep_alive(sock)

    def greet(self) -> None:
        """Send the greeting: the head at once, a rank when it has seen the head's, so that strangers hear nothing."""
        self.sock.sendall(b"ddp-muster/1 %s\n" % self._nonce.encode())

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message. Errors: OSError when the other end is gone."""
        body = json.dumps({"kind": kind, **fields}).encode()
        with self._lock:
            line = self._hash(self._is_head, self._sent, body).encode() + b" " + body + b"\n"
            self._sent += 1
            self.sock.sendall(line)

    def refuse_token(self) -> None:
        """Tell the other end that its token is another one. Errors: OSError when it is gone."""
        self.sock.sendall(_WRONG_TOKEN + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Read once from the socket: the messages that are now complete, often none.

        Errors: EOFError at the end of the connection, OSError when it broke, NotOursError, WrongTokenError.
        """
        try:
            data = self.sock.recv(_MAX_LINE)
        except TimeoutError as error:
            if error.errno is None:
                return []  # our own waiting time, not the kernel's ETIMEDOUT
            raise
        if not data:
            raise EOFError("the connection was closed")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        messages = [message for line in lines if (message := self._read(line)) is not None]
        if len(self._buffer) > _MAX_LINE:
            raise NotOursError(_shown(self._buffer))
        return messages

    def wait_for_greeting(self, seconds: float) -> bool:
        """Whether the other end's greeting comes within this time. Errors: as `receive`."""
        deadline = time.monotonic() + seconds
        while self._key is None and (left := deadline - time.monotonic()) > 0:
            self.sock.settimeout(left)
            self.inbox += self.receive()
        self.sock.settimeout(SEND_TIMEOUT_S)
        return self._key is not None

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """The next message, or None if none comes within this time. Errors: as `receive`."""
        deadline = time.monotonic() + seconds
        while not self.inbox and (left := deadline - time.monotonic()) > 0:
            self.sock.settimeout(left)
            self.inbox += self.receive()
        self.sock.settimeout(SEND_TIMEOUT_S)
        return self.inbox.popleft() if self.inbox else None

    def close(self) -> None:
        self.sock.close()

    def _read(self, line: bytes) -> dict[str, Any] | None:
        if self._key is None:
            greeting = _GREETING.fullmatch(line)
            if greeting is None:
                raise NotOursError(_shown(line))
            nonces = [self._nonce.encode(), greeting[1]] if self._is_head else [greeting[1], self._nonce.encode()]
            self._key = hmac.digest(self._token.encode(), b"|".join(nonces), hashlib.sha256)
            return None
        code, _, body = line.partition(b" ")
        if line == _WRONG_TOKEN or not hmac.compare_digest(
            code, self._hash(not self._is_head, self._received, body).encode()
        ):
            raise WrongTokenError
        self._received += 1
        message: dict[str, Any] = json.loads(body)
        return message

    def _hash(self, from_head: bool, number: int, body: bytes) -> str:
        assert self._key is not None, "a message before the greeting"
        side = b"head" if from_head else b"rank"
        return hmac.new(self._key, b"%s %d %s" % (side, number, body), hashlib.sha256).hexdigest()


@dataclass
class Peer:
    """The other end of a connection, once it has said who it is."""

    rank: int
    host: str
    channel: Channel
    has_left: bool = False
    """It said goodbye: the end of its connection is no loss."""
    error: OSError | None = None
    """Why a message could not be sent. The kernel tells a connection's error once only, to whoever asks first."""

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a message to a peer that may be gone already; that it is shows when the connection is read."""
        try:
            self.channel.send(kind, **fields)
        except OSError as error:
            self.error = self.error or error


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, DEAD_AFTER_S // KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)


def _shown(line: bytes) -> str:
    return repr(line[:40].decode("ascii", "replace"))
