"""Proves that the ports of a muster are agreed upon without a word, and collide with nothing that can be foreseen."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import RendezvousError
from launcher.muster import ports

DEFAULT = range(32768, 61000)
keys = st.text(max_size=20)
attempts = st.integers(1, 10_000)


def chosen(key: str, attempt: int, ephemeral: range = DEFAULT, reserved: frozenset[int] = frozenset()) -> list[int]:
    return ports._candidates(key, attempt, 16, ephemeral, reserved)


@given(keys, attempts)
def test_ports_are_distinct_and_below_every_usual_ephemeral_range(key: str, attempt: int) -> None:
    found = chosen(key, attempt)
    assert len(set(found)) == 16
    assert all(10000 < port < 30000 and port not in {11211, 27017, 29400, 29500} for port in found)
    assert found == chosen(key, attempt)


@given(keys, attempts)
def test_nineteen_successive_attempts_share_no_port(key: str, attempt: int) -> None:
    found = [port for number in range(attempt, attempt + 19) for port in chosen(key, number)]
    assert len(set(found)) == 19 * 16


@given(keys, attempts, st.integers(1024, 65535), st.integers(0, 65535))
def test_an_ephemeral_range_that_leaves_room_is_never_entered(key: str, attempt: int, low: int, length: int) -> None:
    ephemeral = range(low, min(65536, low + length))
    found = chosen(key, attempt, ephemeral)
    room = max(
        len([port for port in region if port not in ephemeral]) for region in (range(10001, 29998), range(30000, 65533))
    )
    assert len(set(found)) == 16
    assert room < 1500 or not set(found) & set(ephemeral)


@given(keys, attempts, st.integers(10_000, 29_000), st.integers(1, 15_000))
def test_reserved_ports_are_left_alone(key: str, attempt: int, low: int, length: int) -> None:
    reserved = frozenset(range(low, low + length))
    assert not set(chosen(key, attempt, DEFAULT, reserved)) & reserved


def test_where_every_port_is_ephemeral_there_are_ports_all_the_same() -> None:
    assert chosen("4711.0", 1, range(1024, 65536)) == chosen("4711.0", 1)


@given(
    keys, attempts, st.sampled_from([range(15000, 65001), range(32768, 61000), range(1024, 65536), range(9000, 61001)])
)
def test_a_rank_with_other_settings_tries_the_heads_first_port_too(key: str, attempt: int, ephemeral: range) -> None:
    assert chosen(key, attempt, ephemeral)[0] in ports.foreign_candidates(key, attempt)


def test_this_machines_settings_are_read() -> None:
    assert ports.port_candidates("4711.0", 1, 4) == ports.port_candidates("4711.0", 1)[:4]


def test_a_port_in_use_is_passed_by_whoever_uses_it() -> None:
    with socket.socket() as on_one_address, socket.socket() as free:
        on_one_address.bind(("127.0.0.1", 0))
        on_one_address.listen()
        free.bind(("127.0.0.1", 0))
        taken, usable = on_one_address.getsockname()[1], free.getsockname()[1]
        free.close()
        with pytest.raises(
            RendezvousError, match=f"rank 0 on n1: fewer than two of the ports {taken}, {usable} are free"
        ):
            ports.take_ports([taken, usable], "n1")
    listener, held = ports.take_ports([usable, *ports.port_candidates("test", 1)], "n1")
    assert listener.getsockname()[1] == usable
    assert held.getsockname()[1] != usable
    listener.close()
    held.close()
