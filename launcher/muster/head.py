"""The head's side of the muster: rank 0 listens, calls the roll, and lets all ranks go at once."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import RendezvousError
from ..rendezvous import Placement
from . import addresses
from .wire import Channel, NotOursError, Peer, WrongTokenError

FIRST_REPORT_S = 5.0
REPORT_S = 10.0
_SILENT_S = 5.0
"""A connection that has not said who it is by then is closed."""
_RETURN_S = 5.0
"""A rank that had arrived and went away may come back within this time; then the muster has failed."""
_MAX_STRANGERS = 20
"""Lines about strangers at most: a port scanner must not fill the log."""


@dataclass
class _Guest:
    """A connection of the roll call."""

    channel: Channel
    address: str
    since: float
    peer: Peer | None = None
    process: str = ""
    node_rank: int = -1


class RollCall:
    """Waits until every rank has said hello, refuses whoever does not belong, and names who is missing."""

    def __init__(self, place: Placement, token: str, attempt: int, say: Callable[[str], None]) -> None:
        self._place, self._token, self._attempt, self._say = place, token, attempt, say
        self._selector = selectors.DefaultSelector()
        self._guests: dict[socket.socket, _Guest] = {}
        self._present: dict[int, _Guest] = {}
        self._gone: dict[int, float] = {}
        self._strangers: set[str] = set()

    def gather(self, listener: socket.socket, timeout_s: float) -> dict[int, Peer]:
        """Return the peers by rank once all have arrived; they then wait for the word to go.

        Errors: RendezvousError naming the ranks that are missing after `timeout_s`, or the rank that contradicts the
        others. The ranks that are there are told the same.
        """
        self._selector.register(listener, selectors.EVENT_READ)
        listener.setblocking(False)
        now = time.monotonic()
        deadline, report = now + timeout_s, now + FIRST_REPORT_S
        try:
            while len(self._present) < self._place.world_size - 1:
                self._turn(listener, min(deadline, report))
                now = time.monotonic()
                if now >= deadline:
                    raise RendezvousError(f"after {timeout_s:g} s: {self._missing()} did not arrive")
                if now >= report:
                    report += REPORT_S
                    self._report()
        except RendezvousError as error:
            self._dismiss(str(error))
            raise
        finally:
            self._selector.close()
        for guest in [guest for guest in self._guests.values() if guest.peer is None]:
            guest.channel.close()
        return {rank: guest.peer for rank, guest in self._present.items() if guest.peer is not None}

    def _turn(self, listener: socket.socket, until: float) -> None:
        """One turn of the loop: who knocks, who speaks, who has been silent or away for too long."""
        for key, _ in self._selector.select(min(1.0, max(0.0, until - time.monotonic()))):
            if key.fileobj is listener:
                self._admit(listener)
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._guests:
                self._listen_to(self._guests[key.fileobj])
        now = time.monotonic()
        for guest in [g for g in self._guests.values() if g.peer is None and now - g.since > _SILENT_S]:
            self._stranger(guest, "has connected and says nothing")
        for rank, since in self._gone.items():
            if now - since > _RETURN_S:
                raise RendezvousError(f"{self._named([rank])} had arrived and went away before all ranks had")

    def _admit(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        try:
            channel = Channel(sock, self._token, is_head=True)
            channel.greet()
        except OSError:
            sock.close()
            return
        self._guests[sock] = _Guest(channel, addresses.plain(address[0]), time.monotonic())
        self._selector.register(sock, selectors.EVENT_READ)

    def _listen_to(self, guest: _Guest) -> None:
        try:
            messages = guest.channel.receive()
        except (EOFError, OSError):
            self._drop(guest)
            return
        except NotOursError as error:
            self._stranger(guest, f"sent {error}")
            return
        except WrongTokenError:
            with contextlib.suppress(OSError):  # it may have left; the line below says what it wanted
                guest.channel.refuse_token()
            self._stranger(guest, "has another token: a rank of another run")
            return
        for message in messages:
            if message["kind"] == "hello":
                self._greet(guest, message)

    def _greet(self, guest: _Guest, hello: dict[str, Any]) -> None:
        """Take a rank in, or refuse it. A token it has, so a contradiction means that the job is set up wrongly."""
        peer = Peer(hello["rank"], hello["host"], guest.channel)
        who = f"rank {peer.rank} on {peer.host}"
        if hello["attempt"] != self._attempt:
            text = f"this is the head of attempt {self._attempt}, not of {hello['attempt']}"
            peer.tell("refused", text=text, attempt=self._attempt)
            self._stranger(guest, f"is {who} of attempt {hello['attempt']}, this is attempt {self._attempt}")
            return
        world_size = self._place.world_size
        problem = None
        if hello["world_size"] != world_size:
            problem = f"{who} counts {hello['world_size']} ranks, rank 0 on {self._place.host} counts {world_size}"
        elif not 0 < peer.rank < world_size:
            problem = f"{who} says hello, but rank 0 on {self._place.host} is the head of ranks 1-{world_size - 1}"
        elif (twin := self._twin(peer.rank, hello["process"])) is not None:
            problem = f"two processes are rank {peer.rank}, one on {twin.host} and one on {peer.host}"
        if problem is not None:
            peer.tell("refused", text=problem)
            raise RendezvousError(problem)
        if peer.rank in self._present:
            self._drop(self._present[peer.rank])
        guest.peer, guest.process, guest.node_rank = peer, hello["process"], hello["node_rank"]
        self._present[peer.rank] = guest
        self._gone.pop(peer.rank, None)
        peer.tell("welcome")

    def _twin(self, rank: int, process: str) -> Peer | None:
        """Another living process that has arrived as this rank; the same one may come again on a new connection."""
        known = self._present.get(rank)
        if known is None or known.process == process or _has_ended(known.channel.sock):
            return None
        return known.peer

    def _stranger(self, guest: _Guest, what: str) -> None:
        line = f"ignored {guest.address}, which {what}"
        if line not in self._strangers and len(self._strangers) < _MAX_STRANGERS:
            self._strangers.add(line)
            self._say(line)
        self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        self._selector.unregister(guest.channel.sock)
        del self._guests[guest.channel.sock]
        guest.channel.close()
        if guest.peer is not None and self._present.get(guest.peer.rank) is guest:
            del self._present[guest.peer.rank]
            self._gone[guest.peer.rank] = time.monotonic()

    def _report(self) -> None:
        text = f"waiting for {self._missing()}"
        self._say(text)
        for guest in self._present.values():
            if guest.peer is not None:
                guest.peer.tell("waiting", text=text)

    def _dismiss(self, text: str) -> None:
        for guest in self._guests.values():
            if guest.peer is not None:
                guest.peer.tell("refused", text=text)
            guest.channel.close()

    def _missing(self) -> str:
        return self._named([rank for rank in range(1, self._place.world_size) if rank not in self._present])

    def _named(self, ranks: list[int]) -> str:
        """Ranks with their hosts: rank 2, 3 on n2; where the layout leaves the host open, the hosts that lack ranks."""
        place = self._place
        if all(place.node_of(rank) == guest.node_rank for rank, guest in self._present.items()) and place.block:
            by_node: dict[int, list[int]] = {}
            for rank in ranks:
                by_node.setdefault(place.node_of(rank) or 0, []).append(rank)
            return "; ".join(f"rank {_listed(some)} on {place.nodes[node]}" for node, some in by_node.items())
        here = [guest.node_rank for guest in self._present.values()] + [place.node_rank]
        short = [host for node, host in enumerate(place.nodes) if here.count(node) < place.tasks_per_node[node]]
        return f"rank {_listed(ranks)} on {' or '.join(short)}"


def _has_ended(sock: socket.socket) -> bool:
    """Whether the other end has closed the connection, though nobody has read so far yet."""
    timeout = sock.gettimeout()
    sock.setblocking(False)
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        sock.settimeout(timeout)


def _listed(numbers: list[int]) -> str:
    """Numbers for a reader, runs of three and more drawn together: 1, 2, 4-9."""
    parts: list[str] = []
    run: list[int] = []
    for number in [*sorted(numbers), -1]:
        if run and number != run[-1] + 1:
            parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(n) for n in run]
            run = []
        run.append(number)
    return ", ".join(parts)
