"""Proves that the secret never travels and that nobody without it can speak, repeat or alter a message."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from launcher.muster.wire import Channel, NotOursError, WrongTokenError

Ends = tuple[socket.socket, socket.socket]


def connection() -> Ends:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rank = socket.create_connection(listener.getsockname())
        head, _ = listener.accept()
    return head, rank


@pytest.fixture
def ends() -> Iterator[Ends]:
    sockets = connection()
    yield sockets
    for sock in sockets:
        sock.close()


def greeted(ends: Ends, head_token: str = "secret", rank_token: str = "secret") -> tuple[Channel, Channel]:
    head, rank = Channel(ends[0], head_token, is_head=True), Channel(ends[1], rank_token, is_head=False)
    head.greet()
    assert rank.wait_for_greeting(5.0)
    rank.greet()
    assert head.wait_for_greeting(5.0)
    return head, rank


def test_messages_arrive_in_order_and_unread_ones_wait(ends: Ends) -> None:
    head, rank = greeted(ends)
    rank.send("hello", rank=1, host="n1")
    head.send("welcome")
    head.send("go", port=12001)
    assert head.wait(5.0) == {"kind": "hello", "rank": 1, "host": "n1"}
    assert rank.wait(5.0) == {"kind": "welcome"}
    assert rank.wait(5.0) == {"kind": "go", "port": 12001}
    assert rank.wait(0.01) is None
    head.close()
    with pytest.raises(EOFError):
        rank.receive()


def test_another_token_is_noticed_and_said(ends: Ends) -> None:
    head, rank = greeted(ends, rank_token="guessed")
    rank.send("hello")
    with pytest.raises(WrongTokenError):
        head.wait(5.0)
    head.refuse_token()
    with pytest.raises(WrongTokenError):
        rank.wait(5.0)


def test_the_token_is_not_in_what_is_sent(ends: Ends) -> None:
    head = Channel(ends[0], "secret", is_head=True)
    head.greet()
    greeting = ends[1].recv(4096)
    assert b"secret" not in greeting
    ends[1].sendall(greeting)
    assert head.wait_for_greeting(5.0)
    head.send("go", port=1)
    assert b"secret" not in ends[1].recv(4096)


def test_a_recorded_line_is_worth_nothing_again_nor_elsewhere(ends: Ends) -> None:
    head, rank = greeted(ends)
    rank.send("hello", rank=1)
    recorded = ends[0].recv(4096, socket.MSG_PEEK)
    assert head.wait(5.0) == {"kind": "hello", "rank": 1}
    ends[1].sendall(recorded)
    with pytest.raises(WrongTokenError):
        head.wait(5.0)
    others = connection()
    other_head, other_rank = greeted(others)
    other_rank.sock.sendall(recorded)
    with pytest.raises(WrongTokenError):
        other_head.wait(5.0)
    for sock in others:
        sock.close()


def test_an_altered_line_is_refused(ends: Ends) -> None:
    head, rank = greeted(ends)
    rank.send("hello", rank=1)
    line = ends[0].recv(4096)
    ends[1].sendall(line.replace(b'"rank": 1', b'"rank": 2'))
    with pytest.raises(WrongTokenError):
        head.wait(5.0)


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n", b"\n", b"ddp-muster/2 00\n", b"\x00" * 70000])
def test_another_language_is_no_rank(ends: Ends, noise: bytes) -> None:
    head = Channel(ends[0], "secret", is_head=True)
    ends[1].sendall(noise)
    with pytest.raises(NotOursError):
        head.wait_for_greeting(5.0)
