"""The ranks meet before the payload starts, without torch and in milliseconds, and watch each other afterwards.

Rank 0 listens on the head (muster_head), the others find it (muster_rank), in a language of their own (muster_wire).
When all are there the head lets them go together; that is the barrier. From then on the same connections show at once
which rank has died (muster_watch).
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable

from ..errors import RendezvousError as RendezvousError
from ..rendezvous import Placement
from . import addresses, ports
from .head import RollCall
from .rank import Search
from .watch import Loss, OnLost, Watch
from .wire import Peer

_MAX_TEXT = 8000

_open: list[Muster] = []
"""Musters of this process whose sockets a forked child must let go."""
_hooked: list[bool] = []


class Muster:
    """The meeting of one attempt's ranks, as seen by one of them."""

    def __init__(
        self, place: Placement, port: int, peers: dict[int, Peer], held: socket.socket | None, interface: str | None
    ) -> None:
        self.address = place.address
        """MASTER_ADDR: the head's name, or 127.0.0.1 when all ranks are on one host."""
        self.port = port
        """MASTER_PORT: free on the head, and held there until `release_port`, `goodbye` or `close`."""
        self.interface = interface
        """The network interface that gloo and NCCL have to be told, because this host's own name leads to its loopback
        address or nowhere, and they would announce that to the others; None where they find it by themselves."""
        self.losses: list[Loss] = []
        """Ranks that failed or vanished, in the order in which this rank learned of it."""
        self._place, self._peers, self._held = place, peers, held
        self._watch: Watch | None = None
        self._process = os.getpid()
        if not _hooked:
            _hooked.append(True)
            os.register_at_fork(after_in_child=_let_go)
        _open.append(self)

    @classmethod
    def join(
        cls, placement: Placement, token: str, attempt: int, timeout_s: float, say: Callable[[str], None]
    ) -> Muster:
        """Meet the other ranks; returns on all ranks together.

        `token` is the run's secret, `attempt` its number, `say` takes lines for the rank's log.
        Errors: RendezvousError after `timeout_s`, or at once where waiting is of no use, naming ranks, hosts and ports.
        """
        key = port_key(placement, token)
        if placement.rank != 0:
            head, word = Search(placement, token, key, attempt, say).meet(timeout_s)
            interface = word["interface"] if placement.node_rank == 0 else _interface([head])
            return cls(placement, word["port"], {0: head}, None, interface)
        listener, held = ports.take_ports(ports.port_candidates(key, attempt), placement.host)
        try:
            peers = RollCall(placement, token, attempt, say).gather(listener, timeout_s)
        except BaseException:
            held.close()
            raise
        finally:
            listener.close()
        port, interface = held.getsockname()[1], _interface(list(peers.values()))
        for peer in peers.values():
            peer.tell("go", port=port, interface=interface)
        return cls(placement, port, peers, held, interface)

    def watch(self, on_lost: OnLost) -> None:
        """From now on `on_lost(rank, host, reason)` is called, once for each rank that fails or vanishes.

        A dead process is noticed at once, a host that is down or cut off after 20 to 25 s. A thread makes the call.
        """
        if self._is_here() and self._peers and self._watch is None:
            self._watch = Watch(self._peers, self.losses, on_lost, is_head=self._place.rank == 0)
            self._watch.start()

    def failed(self, text: str, wait_s: float = 0.0) -> None:
        """Tell the others why this rank fails, before it leaves. Its own `on_lost` is not called any more.

        `wait_s`: it still is, for a rank that vanished, for so many seconds or until there is one: for a failure that
        looks like what the end of another rank did to this one.
        """
        if not self._is_here():
            return
        for peer in self._peers.values():
            peer.tell("failed", text=text[:_MAX_TEXT])
        if self._watch is not None:
            self._watch.be_quiet(wait_s)

    def goodbye(self, code: int) -> None:
        """Leave well, with an exit code: the end of this rank's connection is then no loss to the others."""
        if not self._is_here():
            return
        for peer in self._peers.values():
            peer.tell("goodbye", code=code)
        self.close()

    def release_port(self) -> None:
        """Let go of MASTER_PORT on the head, for a payload that listens there without SO_REUSEADDR; torch sets it."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def close(self) -> None:
        """Close all connections. Without `goodbye` the others count this rank as lost."""
        if not self._is_here():
            return
        if self._watch is not None:
            self._watch.stop()
        self._close_sockets()
        if self in _open:
            _open.remove(self)

    def _is_here(self) -> bool:
        """False in a forked child, to which nothing of this belongs."""
        return os.getpid() == self._process

    def _close_sockets(self) -> None:
        self.release_port()
        for peer in self._peers.values():
            peer.channel.close()


def port_key(placement: Placement, token: str) -> str:
    """What the candidate ports depend on beside the attempt: the job, its step, and the run."""
    run = hashlib.sha256(token.encode()).hexdigest()[:16]
    return f"{placement.job}.{placement.step}.{run}"


def _let_go() -> None:
    """In a forked child, a data worker say: keep no copy of the connections, or the rank's death would go unseen."""
    for muster in _open:
        if muster._watch is not None:
            muster._watch.close_sockets()
        muster._close_sockets()
    _open.clear()


def _interface(peers: list[Peer]) -> str | None:
    """The interface by which this host met another, where gloo would not find it by this host's own name."""
    used = [peer.channel.sock.getsockname()[0] for peer in peers]
    outer = [address for address in used if not addresses.is_loopback(address)]
    return addresses.interface_of(outer[0]) if outer and addresses.own_name_is_loopback() else None
