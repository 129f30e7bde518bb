"""After the muster the connections stay open, and each end learns at once when the other one dies.

The evidence is the kernel's: the end of a connection without a goodbye (a dead process), a reset, or a host that has
acknowledged nothing for 20 s. A rank that is busy, holds the interpreter's lock or is stopped keeps its connection and
is never called dead. Nothing is sent in between, so a watch costs no CPU time.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .wire import DEAD_AFTER_S, SEND_TIMEOUT_S, NotOursError, Peer, WrongTokenError

OnLost = Callable[[int, str, str], None]
"""Called with (rank, host, reason)."""


@dataclass(frozen=True)
class Loss:
    """A rank that failed or vanished, and why."""

    rank: int
    host: str
    reason: str
    vanished: bool = False
    """It could not say why."""


class Watch:
    """A daemon thread that reads the connections: of all ranks on the head, of the head elsewhere."""

    def __init__(self, peers: dict[int, Peer], losses: list[Loss], on_lost: OnLost, *, is_head: bool) -> None:
        self._peers, self._losses, self._on_lost, self._is_head = peers, losses, on_lost, is_head
        self._leaving, self._quiet, self._vanished = threading.Event(), threading.Event(), threading.Event()
        self._stop = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._waker, self._alarm = socket.socketpair()
        self._selector.register(self._alarm, selectors.EVENT_READ)
        self._open = {peer.channel.sock: peer for peer in peers.values()}
        for sock in self._open:
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="muster-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def be_quiet(self, wait_s: float = 0.0) -> None:
        """Report nothing more to this rank, which is leaving; the head still tells the others.

        `wait_s`: seconds in which a rank that vanished is still waited for and reported, unless one is known already:
        what the main thread saw of its end may have come here first.
        """
        self._leaving.set()
        if not any(loss.vanished for loss in self._losses):
            self._vanished.wait(wait_s)
        self._quiet.set()

    def stop(self) -> None:
        """End the thread. It may be called from the thread itself, within `on_lost`."""
        self._quiet.set()
        self._stop.set()
        with contextlib.suppress(OSError):  # the thread has ended, as it does when nobody is left to be watched
            self._waker.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(SEND_TIMEOUT_S)

    def close_sockets(self) -> None:
        """Close the watch's own sockets, and only them; in a forked child this leaves the parent's watch alone."""
        self._selector.close()
        self._waker.close()
        self._alarm.close()

    def _run(self) -> None:
        try:
            self._read_all()
        finally:
            self.close_sockets()

    def _read_all(self) -> None:
        for peer in list(self._peers.values()):
            while peer.channel.inbox:
                self._hear(peer, peer.channel.inbox.popleft())
        while self._open and not self._stop.is_set():
            for key, _ in self._selector.select():
                if isinstance(key.fileobj, socket.socket) and key.fileobj in self._open:
                    self._read(self._open[key.fileobj])
                if self._stop.is_set():
                    return

    def _read(self, peer: Peer) -> None:
        try:
            for message in peer.channel.receive():
                self._hear(peer, message)
            return
        except (EOFError, OSError) as error:
            reason = f"vanished: {_why(peer.error or error)}"
        except (NotOursError, WrongTokenError):
            reason = "vanished: its connection carried something else than our messages"
        self._selector.unregister(peer.channel.sock)
        del self._open[peer.channel.sock]
        if not peer.has_left:
            self._report(Loss(peer.rank, peer.host, reason, vanished=True))

    def _hear(self, peer: Peer, message: dict[str, Any]) -> None:
        if message["kind"] == "goodbye":
            peer.has_left = True
        elif message["kind"] == "failed":
            self._report(Loss(peer.rank, peer.host, f"failed: {message['text']}"))
        elif message["kind"] == "lost" and not self._is_head:
            reason, vanished = message["reason"], bool(message.get("vanished"))
            self._report(Loss(message["rank"], message["host"], reason, vanished))

    def _report(self, loss: Loss) -> None:
        """Tell the other ranks, then this one, whose callback may end the process. Once for each lost rank."""
        if any(known.rank == loss.rank for known in self._losses):
            return
        self._losses.append(loss)
        if self._is_head:
            for peer in self._open.values():
                if peer.rank != loss.rank and not peer.has_left:
                    peer.tell("lost", rank=loss.rank, host=loss.host, reason=loss.reason, vanished=loss.vanished)
        if not self._quiet.is_set() and (loss.vanished or not self._leaving.is_set()):
            self._on_lost(loss.rank, loss.host, loss.reason)
        if loss.vanished:
            self._vanished.set()


def _why(error: EOFError | OSError) -> str:
    if isinstance(error, EOFError):
        return "its connection ended without a goodbye, so its process has died"
    if error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"its host has not answered for {DEAD_AFTER_S} s (node down, or network cut)"
    if error.errno in (errno.ECONNRESET, errno.EPIPE):
        return "its connection was reset, so its process has died"
    return f"its connection broke: {error.strerror or error}"
