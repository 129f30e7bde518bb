"""A rank's side of the muster: find the head among the candidate ports, say hello, wait for the word to go."""

from __future__ import annotations

import errno
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from ..errors import RendezvousError
from ..rendezvous import LOOPBACK, Placement
from . import addresses, ports
from .head import FIRST_REPORT_S, REPORT_S
from .wire import Channel, NotOursError, Peer, WrongTokenError

_CONNECT_S = 2.0
_GREETING_S = 1.0
"""A head greets at once; what has not greeted by then is another program."""
_WELCOME_S = 5.0
_PATIENCE_S = 3.0
"""When a rank that has not reached the head says so for the first time."""
_PAUSE_S = 0.5
"""Longest pause between two rounds over the ports."""
_LATE_S = FIRST_REPORT_S
"""How long after its own time is up a rank waits for the head's word on who is missing."""
_HOST_IS_AWAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT, None)


class Search:
    """One rank's way to the head."""

    def __init__(self, place: Placement, token: str, key: str, attempt: int, say: Callable[[str], None]) -> None:
        self._place, self._token, self._attempt, self._say = place, token, attempt, say
        self._me = f"rank {place.rank} on {place.host}"
        self._target = LOOPBACK if place.node_rank == 0 else place.address
        self._process = secrets.token_hex(8)
        self._ports = ports.port_candidates(key, attempt)
        self._more_ports = ports.foreign_candidates(key, attempt)
        self._others: dict[int, str] = {}
        self._state = "it has not been tried yet"

    def meet(self, timeout_s: float) -> tuple[Peer, dict[str, Any]]:
        """Return the head and its word to go, once all ranks have arrived.

        Errors: RendezvousError naming the head, its address, the ports and the likely reason.
        """
        started = time.monotonic()
        channel = self._reach(started, timeout_s)
        try:
            word = self._wait(channel, started, timeout_s)
        except (EOFError, OSError, NotOursError, WrongTokenError) as error:
            channel.close()
            gone = f"rank 0 on {self._place.head} went away before all ranks had arrived"
            raise RendezvousError(f"{self._me}: {gone} ({error})") from None
        except RendezvousError:
            channel.close()
            raise
        return Peer(0, self._place.head, channel), word

    def _wait(self, channel: Channel, started: float, timeout_s: float) -> dict[str, Any]:
        deadline = started + timeout_s + _LATE_S
        waiting = "it has not said for whom it waits"
        while (message := channel.wait(deadline - time.monotonic())) is not None:
            if message["kind"] == "go":
                return message
            if message["kind"] == "refused":
                raise RendezvousError(f"{self._me}: the head says: {message['text']}")
            waiting = f"it is {message['text']}"
        raise RendezvousError(f"{self._me}: reached the head, but after {timeout_s:g} s {waiting}")

    def _reach(self, started: float, timeout_s: float) -> Channel:
        """Go round the ports until the head welcomes us."""
        report, pause = started + _PATIENCE_S, 0.01
        while True:
            channel = self._round(widely=time.monotonic() - started > _PATIENCE_S)
            if channel is not None:
                return channel
            now = time.monotonic()
            if now - started >= timeout_s:
                raise RendezvousError(f"{self._me} could not reach the head within {timeout_s:g} s: {self._reason()}")
            if now >= report:
                report = now + REPORT_S
                left = timeout_s - (now - started)
                self._say(f"{self._me} cannot reach the head, trying {left:.0f} s more: {self._reason()}")
            time.sleep(min(pause, started + timeout_s - now))
            pause = min(pause * 1.5, _PAUSE_S)

    def _round(self, widely: bool) -> Channel | None:
        """Try all ports once; those where somebody else answered come last. A host that is away ends the round."""
        try:
            found = addresses.resolve(self._target)
        except OSError as error:
            self._state = f"the name {self._target} cannot be resolved on {self._place.host} ({_text(error)})"
            return None
        found.sort(key=addresses.is_loopback)
        wanted = dict.fromkeys(self._ports + (self._more_ports if widely else []))
        tried = [port for port in wanted if port not in self._others] + [p for p in wanted if p in self._others]
        for address in found:
            for port in tried:
                try:
                    channel = self._try(address, port)
                except ConnectionRefusedError:
                    self._state = f"{self._at(address)} refuses connections on {self._shown_ports()}: "
                    self._state += "it has not started there yet, or has died"
                    continue
                except OSError as error:
                    self._state = f"{self._at(address)} port {port}: {_text(error)}"
                    if error.errno in _HOST_IS_AWAY:
                        self._ports.append(self._ports.pop(0))
                        break
                    continue
                if channel is not None:
                    return channel
        return None

    def _try(self, address: str, port: int) -> Channel | None:
        """Say hello at one port; None, and a line for the log, where no head of ours answers.

        Errors: OSError when there is no connection, RendezvousError when our head sends us away.
        """
        sock = socket.create_connection((address, port), _CONNECT_S)
        channel = Channel(sock, self._token, is_head=False)
        try:
            other = self._say_hello(channel)
        except RendezvousError as error:
            channel.close()
            raise RendezvousError(f"{self._me}: {self._at(address)} port {port} says: {error}") from None
        if other is None:
            return channel
        channel.close()
        if port not in self._others:
            self._say(f"{self._me}: port {port} of {self._target} {other}; trying the next one")
        self._others[port] = other
        return None

    def _say_hello(self, channel: Channel) -> str | None:
        """None when the head welcomes us, else who is there instead. Errors: RendezvousError when it sends us away."""
        place = self._place
        who = {"rank": place.rank, "host": place.host, "node_rank": place.node_rank, "process": self._process}
        try:
            if not channel.wait_for_greeting(_GREETING_S):
                return "is open, but nobody greets there as a head does: another program"
            channel.greet()
            channel.send("hello", world_size=place.world_size, attempt=self._attempt, **who)
            answer = channel.wait(_WELCOME_S)
        except NotOursError as error:
            return f"belongs to another program, which sent {error}"
        except WrongTokenError:
            return "belongs to the head of another run: its token differs"
        except (EOFError, OSError):
            return "belongs to another program, which closed the connection"
        if answer is None:
            return f"has greeted, but did not answer the hello for {_WELCOME_S:g} s"
        if answer["kind"] == "welcome":
            return None
        if answer.get("attempt", self._attempt) < self._attempt:
            return f"belongs to the head of attempt {answer['attempt']}, and this is attempt {self._attempt}"
        raise RendezvousError(answer["text"])

    def _reason(self) -> str:
        others = "".join(f"; port {port} {what}" for port, what in self._others.items())
        return self._state + others

    def _at(self, address: str) -> str:
        if self._target == address:
            return f"the head {address}"
        hint = f", the loopback address on {self._place.host}" if addresses.is_loopback(address) else ""
        return f"the head {self._target} ({address}{hint})"

    def _shown_ports(self) -> str:
        return f"ports {', '.join(str(port) for port in self._ports[:4])} and {len(self._ports) - 4} more"


def _text(error: OSError) -> str:
    if error.errno is None and str(error) == "timed out":
        return "no answer; the host is down, or a firewall is between"
    return error.strerror or str(error)
