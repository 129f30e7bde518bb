"""Proves that ranks meet or say why not, and that each learns of another's death, with real processes on loopback."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest

from launcher.muster import Muster, RendezvousError, addresses, port_key, ports
from launcher.muster import head as muster_head
from launcher.muster import rank as muster_rank
from launcher.rendezvous import Placement, emulated

TOKEN = ""
"""The run's secret, new for each test: a port that a test has used is not free for a minute."""
BOUND_S = 20.0
"""Longest wait for something that takes milliseconds, so that a busy machine makes no test fail."""


class Rank:
    """A process that joins a muster, tells what happens to it, and takes orders."""

    def __init__(self, place: Placement, **options: Any) -> None:
        self.place = place
        self._ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=_live, args=(place, theirs), kwargs=options, daemon=True)
        self.process.start()
        theirs.close()
        self.told: list[tuple[Any, ...]] = []

    def order(self, *words: Any) -> None:
        self._ours.send(words)

    def next(self, kind: str, seconds: float = BOUND_S) -> tuple[Any, ...]:
        """The next thing of this kind that it tells; what it tells before is kept in `told`."""
        deadline = time.monotonic() + seconds
        while self._ours.poll(max(0.0, deadline - time.monotonic())):
            event: tuple[Any, ...] = self._ours.recv()
            self.told.append(event)
            if event[0] == kind:
                return event[1:]
        raise AssertionError(f"rank {self.place.rank} told no {kind!r}, only {self.told}")

    def says(self, words: str) -> None:
        """Wait for a line that contains these words."""
        while words not in self.next("say")[0]:
            continue

    def said(self) -> list[str]:
        return [event[1] for event in self.told if event[0] == "say"]

    def leave(self) -> list[tuple[Any, ...]]:
        """Let it say goodbye; returns the losses that it has told of in all its life."""
        self.order("goodbye")
        self.next("left")
        self.process.join(BOUND_S)
        return [event[1:] for event in self.told if event[0] == "lost"]

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def _live(
    place: Placement,
    events: Connection,
    token: str = "",
    attempt: int = 1,
    timeout_s: float = BOUND_S,
    before: Callable[[], None] | None = None,
) -> None:
    lock = threading.Lock()

    def tell(*event: Any) -> None:
        with lock:
            events.send(event)

    if before is not None:
        before()
    try:
        muster = Muster.join(place, token or TOKEN, attempt, timeout_s, lambda text: tell("say", text))
    except RendezvousError as error:
        tell("error", str(error))
        return
    tell("met", muster.address, muster.port)
    tell("interface", muster.interface)
    muster.watch(lambda rank, host, reason: tell("lost", rank, host, reason))
    while True:
        match events.recv():
            case ("goodbye",):
                muster.goodbye(0)
                tell("left")
                return
            case ("failed", text, *wait_s):
                muster.failed(text, *wait_s)
                tell("failed")
                os._exit(1)
            case ("fork",):
                child = os.fork()
                if child == 0:
                    signal.pause()
                tell("forked", child)
            case ("listen",):
                tell("listening", _try_to_listen(muster.port, reuse=False), _try_to_listen(muster.port, reuse=True))


def _try_to_listen(port: int, *, reuse: bool) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        try:
            sock.bind(("", port))
            sock.listen()
        except OSError:
            return False
    return True


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TOKEN", secrets.token_hex(8))


@pytest.fixture
def start() -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def begin(place: Placement, **options: Any) -> Rank:
        ranks.append(Rank(place, **options))
        return ranks[-1]

    yield begin
    for rank in ranks:
        rank.process.kill()
        rank.process.join()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports come after a fifth of a second rather than after seconds."""
    for module in (muster_head, muster_rank):
        monkeypatch.setattr(module, "FIRST_REPORT_S", 0.2)
        monkeypatch.setattr(module, "REPORT_S", 0.2)
    monkeypatch.setattr(muster_rank, "_PATIENCE_S", 0.2)


def candidates(place: Placement, attempt: int = 1) -> list[int]:
    return ports.port_candidates(port_key(place, TOKEN), attempt)


@contextlib.contextmanager
def stranger(port: int, greeting: bytes) -> Iterator[None]:
    """A foreign program that listens on a port of this machine and greets everybody in its own way."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
        listener.listen()
        program = multiprocessing.get_context("fork").Process(target=_serve, args=(listener, greeting), daemon=True)
        program.start()
        try:
            yield
        finally:
            program.kill()
            program.join()


def _serve(listener: socket.socket, greeting: bytes) -> None:
    while True:
        visitor, _ = listener.accept()
        visitor.send(greeting)
        visitor.recv(1)
        visitor.close()


# The meeting


def test_all_ranks_meet_and_part_without_a_loss(start: Callable[..., Rank]) -> None:
    places = emulated(2, 2)
    ranks = [start(place) for place in reversed(places)]
    ((address, port),) = {rank.next("met") for rank in ranks}
    assert address == "127.0.0.1"
    assert port in candidates(places[0])[1:]
    assert [rank.leave() for rank in ranks] == [[], [], [], []]
    assert [rank.said() for rank in ranks] == [[], [], [], []]


def test_nobody_goes_before_the_last_has_arrived(start: Callable[..., Rank]) -> None:
    places = emulated(1, 3)
    early = [start(place) for place in places[:2]]
    with pytest.raises(AssertionError, match="told no 'met', only"):
        early[0].next("met", 0.3)
    last = start(places[2])
    assert {rank.next("met") for rank in early} == {last.next("met")}


def test_one_rank_needs_nobody() -> None:
    place = emulated(1, 1)[0]
    muster = Muster.join(place, TOKEN, 1, 1.0, pytest.fail)
    assert (muster.address, muster.interface) == ("127.0.0.1", None)
    assert muster.port in candidates(place)[1:]
    muster.watch(pytest.fail)
    muster.goodbye(0)


def test_the_master_port_is_held_against_others_but_not_against_torch(start: Callable[..., Rank]) -> None:
    places = emulated(1, 2)
    ranks = [start(place) for place in places]
    ranks[0].order("listen")
    assert ranks[0].next("listening") == (False, True)


def test_each_attempt_and_each_run_has_ports_of_its_own() -> None:
    place = emulated(1, 1)[0]
    musters = [Muster.join(place, token, attempt, 1.0, pytest.fail) for token in ("a", "b") for attempt in (1, 2)]
    assert len({muster.port for muster in musters}) == 4
    for muster in musters:
        muster.close()


def test_a_silent_program_on_the_port_is_named_and_passed_by(start: Callable[..., Rank]) -> None:
    places = emulated(2, 1)
    first, second, *rest = candidates(places[0])
    with stranger(first, b""), stranger(second, b"SSH-2.0-OpenSSH_9.2\r\n"):
        ranks = [start(place) for place in places]
        ((_, port),) = {rank.next("met") for rank in ranks}
    assert port in rest[1:]
    me = "rank 1 on 127.0.0.2"
    silent = f"{me}: port {first} of 127.0.0.1 is open, but nobody greets there as a head does: another program"
    talker = f"{me}: port {second} of 127.0.0.1 belongs to another program, which sent 'SSH-2.0-OpenSSH_9.2\\r'"
    assert {f"{silent}; trying the next one", f"{talker}; trying the next one"} <= set(ranks[1].said())


def test_two_runs_on_the_same_ports_do_not_disturb_each_other(
    start: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = emulated(1, 3)
    shared = candidates(places[0])
    monkeypatch.setattr(ports, "port_candidates", lambda key, attempt: shared)
    runs = [[start(place, token=token) for place in places] for token in ("one", "two")]
    met = [{rank.next("met") for rank in run} for run in runs]
    assert [len(ports_of_a_run) for ports_of_a_run in met] == [1, 1]
    assert met[0] != met[1]
    assert [rank.leave() for run in runs for rank in run] == [[]] * 6


# Who does not come, and who does not belong


@pytest.mark.usefixtures("impatient")
def test_missing_ranks_are_named_to_all_who_are_there(start: Callable[..., Rank]) -> None:
    places = emulated(2, 2)
    ranks = [start(place, timeout_s=2.0) for place in places[:2]]
    missing = "rank 2, 3 on 127.0.0.2"
    assert ranks[0].next("error") == (f"after 2 s: {missing} did not arrive",)
    assert ranks[1].next("error") == (f"rank 1 on 127.0.0.1: the head says: after 2 s: {missing} did not arrive",)
    assert f"waiting for {missing}" in ranks[0].said()


@pytest.mark.usefixtures("impatient")
def test_where_ranks_lie_in_another_order_the_hosts_that_lack_ranks_are_named(start: Callable[..., Rank]) -> None:
    head = replace(emulated(3, 2)[0], block=False)
    present = [head, replace(head, rank=1, node_rank=1), replace(head, rank=4, node_rank=1)]
    ranks = [start(place, timeout_s=2.0) for place in present]
    assert ranks[0].next("error") == ("after 2 s: rank 2, 3, 5 on 127.0.0.1 or 127.0.0.3 did not arrive",)


@pytest.mark.usefixtures("impatient")
def test_a_head_that_does_not_start_is_named_with_the_reason(start: Callable[..., Rank]) -> None:
    place = emulated(2, 1)[1]
    first = ", ".join(str(port) for port in candidates(place)[:4])
    reason = (
        f"the head 127.0.0.1 refuses connections on ports {first} and 12 more: "
        "it has not started there yet, or has died"
    )
    rank = start(place, timeout_s=1.0)
    assert rank.next("error") == (f"rank 1 on 127.0.0.2 could not reach the head within 1 s: {reason}",)
    assert rank.said()[0].startswith("rank 1 on 127.0.0.2 cannot reach the head, trying ")
    assert rank.said()[0].endswith(f" s more: {reason}")


@pytest.mark.usefixtures("impatient")
def test_a_head_name_that_leads_to_loopback_elsewhere_is_said(start: Callable[..., Rank]) -> None:
    place = replace(emulated(2, 1)[1], nodes=("localhost", "n2"))
    (error,) = start(place, timeout_s=0.5).next("error")
    assert re.search(r"the head localhost \((127\.0\.0\.1|::1), the loopback address on n2\) refuses", error)


@pytest.mark.usefixtures("impatient")
def test_a_head_name_that_nobody_knows_is_said(start: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    place = replace(emulated(2, 1)[1], nodes=("n1", "n2"))
    assert start(place, timeout_s=0.5).next("error") == (
        "rank 1 on n2 could not reach the head within 0.5 s: "
        "the name n1 cannot be resolved on n2 (Name or service not known)",
    )


def test_a_rank_with_another_token_is_refused_and_the_right_one_taken(
    start: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = emulated(1, 2)
    shared = candidates(places[0])
    monkeypatch.setattr(ports, "port_candidates", lambda key, attempt: shared)
    head = start(places[0])
    liar = start(places[1], token="guessed")
    liar.says("belongs to the head of another run: its token differs; trying the next one")
    head.says("ignored 127.0.0.1, which has another token: a rank of another run")
    honest = start(places[1])
    assert head.next("met") == honest.next("met")


def test_a_rank_that_counts_other_ranks_ends_the_muster_on_both_sides(start: Callable[..., Rank]) -> None:
    head = start(emulated(1, 3)[0])
    odd = start(emulated(1, 4)[1])
    text = "rank 1 on 127.0.0.1 counts 4 ranks, rank 0 on 127.0.0.1 counts 3"
    assert head.next("error") == (text,)
    assert text in odd.next("error")[0]


def test_two_processes_of_one_rank_end_the_muster_for_all(start: Callable[..., Rank]) -> None:
    places = emulated(1, 3)
    ranks = [start(places[0]), start(places[1]), start(places[1])]
    text = "two processes are rank 1, one on 127.0.0.1 and one on 127.0.0.1"
    assert ranks[0].next("error") == (text,)
    assert [text in rank.next("error")[0] for rank in ranks[1:]] == [True, True]


def test_an_old_attempt_is_told_so_and_the_new_one_passes_the_old_head_by(
    start: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = emulated(1, 2)
    shared = candidates(places[0])
    monkeypatch.setattr(ports, "port_candidates", lambda key, attempt: shared)
    old = start(places[0], attempt=1)
    newcomer = start(places[1], attempt=2)
    new = start(places[0], attempt=2)
    assert new.next("met") == newcomer.next("met")
    late = start(places[1], attempt=1)
    assert late.next("met") == old.next("met")
    belated = start(emulated(1, 3)[0], attempt=3)
    (error,) = start(emulated(1, 3)[1], attempt=2).next("error")
    assert error.endswith("says: this is the head of attempt 3, not of 2")
    belated.says("ignored 127.0.0.1, which is rank 1 on 127.0.0.1 of attempt 2, this is attempt 3")


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_dies_before_all_have_met_ends_the_muster(
    start: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muster_head, "_RETURN_S", 0.1)
    places = emulated(1, 3)
    head, early = start(places[0]), start(places[1])
    head.says("waiting for rank 2 on 127.0.0.1")
    early.signal(signal.SIGKILL)
    assert head.next("error") == ("rank 1 on 127.0.0.1 had arrived and went away before all ranks had",)


# The watch


def test_a_killed_rank_is_told_to_all(start: Callable[..., Rank]) -> None:
    ranks = [start(place) for place in emulated(2, 2)]
    for rank in ranks:
        rank.next("met")
    ranks[3].signal(signal.SIGKILL)
    losses = [rank.next("lost") for rank in ranks[:3]]
    assert {loss[:2] for loss in losses} == {(3, "127.0.0.2")}
    assert all(loss[2].startswith("vanished: its connection ") for loss in losses)
    assert [len(rank.leave()) for rank in (ranks[2], ranks[1], ranks[0])] == [1, 1, 1]


def test_a_killed_head_is_noticed_by_all(start: Callable[..., Rank]) -> None:
    ranks = [start(place) for place in emulated(2, 2)]
    for rank in ranks:
        rank.next("met")
    ranks[0].signal(signal.SIGKILL)
    assert {rank.next("lost")[:2] for rank in ranks[1:]} == {(0, "127.0.0.1")}


def test_a_rank_that_fails_is_told_to_all_once_and_with_its_reason(start: Callable[..., Rank]) -> None:
    ranks = [start(place) for place in emulated(1, 3)]
    for rank in ranks:
        rank.next("met")
    ranks[2].order("failed", "ValueError: täglich\n" + "x" * 9000)
    losses = [rank.next("lost") for rank in ranks[:2]]
    assert losses[0] == losses[1]
    assert losses[0][:2] == (2, "127.0.0.1")
    assert losses[0][2].startswith("failed: ValueError: täglich\nxx")
    assert [len(rank.leave()) for rank in (ranks[1], ranks[0])] == [1, 1]


def test_ranks_that_fail_first_still_learn_which_rank_vanished(start: Callable[..., Rank]) -> None:
    ranks = [start(place) for place in emulated(1, 3)]
    for rank in ranks:
        rank.next("met")
    ranks[1].order("failed", "RuntimeError: Connection reset by peer", BOUND_S)
    assert ranks[0].next("lost")[2].startswith("failed: RuntimeError")
    ranks[0].order("failed", "RuntimeError: Connection closed by peer", BOUND_S)
    time.sleep(0.3)  # if they were still at work they would report it in any case
    ranks[2].signal(signal.SIGKILL)
    for rank in ranks[:2]:
        number, _, reason = rank.next("lost")
        assert (number, reason.split(":")[0]) == (2, "vanished")
        rank.next("failed")


def test_a_rank_that_fails_by_itself_waits_for_nobody(start: Callable[..., Rank]) -> None:
    ranks = [start(place) for place in emulated(1, 2)]
    for rank in ranks:
        rank.next("met")
    ranks[0].order("failed", "ValueError: no", 0.0)
    ranks[0].next("failed")
    assert [event for event in ranks[0].told if event[0] == "lost"] == []


def test_a_data_worker_that_outlives_its_rank_hides_nothing(start: Callable[..., Rank]) -> None:
    ranks = [start(place) for place in emulated(1, 3)]
    for rank in ranks:
        rank.next("met")
    children = []
    for rank in ranks:
        rank.order("fork")
        children += rank.next("forked")
    try:
        ranks[2].signal(signal.SIGKILL)
        assert [rank.next("lost")[0] for rank in ranks[:2]] == [2, 2]
        ranks[0].signal(signal.SIGKILL)
        assert ranks[1].next("lost")[0] == 0
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_cannot_speak_for_its_rank() -> None:
    muster = Muster.join(emulated(1, 1)[0], TOKEN, 1, 1.0, pytest.fail)
    child = os.fork()
    if child == 0:
        muster.watch(pytest.fail)
        muster.failed("no")
        muster.goodbye(1)
        os._exit(7 if muster.losses == [] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not _try_to_listen(muster.port, reuse=False)
    muster.close()
    assert _try_to_listen(muster.port, reuse=False)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_host_that_is_cut_off_is_noticed_on_both_sides_and_a_stopped_process_is_not(
    start: Callable[..., Rank], two_hosts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "own_name_is_loopback", lambda: True)
    hosts = ("10.99.71.1", "10.99.71.2")
    places = [replace(place, nodes=hosts) for place in emulated(2, 2)]
    ranks = [start(place, before=lambda n=place.node_rank: _enter(two_hosts[n])) for place in places]
    for rank in ranks:
        assert rank.next("met")[0] == "10.99.71.1"
        assert rank.next("interface") == ("inner",)
    ranks[1].signal(signal.SIGSTOP)
    subprocess.run(["ip", "-n", two_hosts[1], "link", "set", "inner", "down"], check=True)
    reason = "vanished: its host has not answered for 20 s (node down, or network cut)"
    assert {ranks[0].next("lost", 30.0), ranks[0].next("lost", 5.0)} == {(n, hosts[1], reason) for n in (2, 3)}
    assert [rank.next("lost", 30.0) for rank in ranks[2:]] == [(0, hosts[0], reason)] * 2
    ranks[1].signal(signal.SIGCONT)
    assert ranks[1].next("lost")[0] in (2, 3)
    assert {loss[0] for loss in ranks[0].leave()} == {2, 3}


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with one cable between them."""
    names = (f"muster-{os.getpid()}-a", f"muster-{os.getpid()}-b")
    for name in names:
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        cable = ["ip", "link", "add", "inner", "netns", names[0], "type", "veth", "peer", "inner", "netns", names[1]]
        subprocess.run(cable, check=True)
        for number, name in enumerate(names, 1):
            address = ["addr", "add", f"10.99.71.{number}/24", "dev", "inner"]
            for command in (address, ["link", "set", "inner", "up"], ["link", "set", "lo", "up"]):
                subprocess.run(["ip", "-n", name, *command], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=True)


def _enter(namespace: str) -> None:
    with open(f"/var/run/netns/{namespace}") as handle:  # noqa: PTH123 - a descriptor is all that is needed
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def test_a_rank_on_one_host_is_told_no_interface(start: Callable[..., Rank]) -> None:
    ranks = [start(place) for place in emulated(2, 1)]
    assert [rank.next("interface") for rank in ranks] == [(None,), (None,)]


def test_an_interface_is_found_by_its_address() -> None:
    assert addresses.interface_of("127.0.0.1") == "lo"
    assert addresses.interface_of("::ffff:127.0.0.1") == "lo"
    assert addresses.interface_of("192.0.2.77") is None
