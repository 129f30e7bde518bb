"""Slurm's short forms, written out: host lists such as gpu-a[01-03]-ib[0-1],n7 and task counts such as 2(x3),1.

Works without scontrol, which compute nodes and containers often lack. For what it accepts, the order is that of
`scontrol show hostnames` (compared with Slurm 22.05).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

MAX_HOSTS = 65536
"""More hosts than any cluster has (and Slurm's own limit for a range): a larger list is a mistake, not a wish."""

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


class HostlistError(ValueError):
    """A text that is no host list or no list of task counts: names the text, the place and the rule."""

    def __init__(self, text: str, at: int, rule: str) -> None:
        shown = text if len(text) <= 200 else f"{text[:200]}..."
        super().__init__(f"{shown!r}, character {at + 1}: {rule}")


def expand(text: str) -> list[str]:
    """Write a host list out, in scontrol's order, repeated names kept: n[1-2],n1 -> n1 n2 n1.

    Leading zeros of a range's start set the width: [08-10] -> 08 09 10. An empty text has no hosts.
    Errors: HostlistError for anything that is no host list, and for more than MAX_HOSTS hosts.
    """
    hosts: list[str] = []
    for start, end in _entries(text):
        literals, brackets = _parts(text, start, end)
        if len(hosts) + math.prod(len(b) for b in brackets) > MAX_HOSTS:
            raise HostlistError(text, start, f"more than {MAX_HOSTS} hosts")
        hosts += _names(literals, brackets)
    return hosts


def expand_tasks_per_node(text: str) -> list[int]:
    """Write out the tasks on each node: '2(x3),1' -> [2, 2, 2, 1].

    Errors: HostlistError for anything else, and for more than MAX_HOSTS nodes.
    """
    counts: list[int] = []
    at = 0
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise HostlistError(text, at, f"{item!r} is no task count; right are 4 and 4(x2)")
        repeat = int(match[2] or 1)
        if len(counts) + repeat > MAX_HOSTS:
            raise HostlistError(text, at, f"more than {MAX_HOSTS} nodes")
        counts += [int(match[1])] * repeat
        at += len(item) + 1
    return counts


def _entries(text: str) -> Iterator[tuple[int, int]]:
    """Places (start, end) of the entries between the commas that stand outside of brackets."""
    start, opened = 0, -1
    for at, char in enumerate(text):
        if char == "[":
            if opened >= 0:
                raise HostlistError(text, at, "a bracket inside a bracket")
            opened = at
        elif char == "]":
            if opened < 0:
                raise HostlistError(text, at, "closes a bracket that was not opened")
            opened = -1
        elif char == "," and opened < 0:
            yield start, at
            start = at + 1
    if opened >= 0:
        raise HostlistError(text, opened, "this bracket is not closed")
    if text:
        yield start, len(text)


def _parts(text: str, start: int, end: int) -> tuple[list[str], list[list[str]]]:
    """One entry's literals and, between them, its brackets' numbers: n[1-2]x -> (n, x), ((1, 2),)."""
    if start == end:
        raise HostlistError(text, start, "an empty host name")
    literals: list[str] = []
    brackets: list[list[str]] = []
    at = start
    for piece in re.split(r"(\[[^\]]*\])", text[start:end]):
        if piece.startswith("["):
            brackets.append(_numbers(text, at + 1, piece[1:-1]))
        else:
            if piece and not _NAME.fullmatch(piece):
                bad = next(i for i, char in enumerate(piece) if not _NAME.fullmatch(char))
                raise HostlistError(text, at + bad, f"{piece[bad]!r} is not allowed in a host name")
            literals.append(piece)
        at += len(piece)
    return literals, brackets


def _numbers(text: str, at: int, inside: str) -> list[str]:
    """A bracket's numbers as they are written in names: 01-03,7 -> 01 02 03 7."""
    numbers: list[str] = []
    for item in inside.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise HostlistError(text, at, f"{item!r} is no range of numbers; right are 7 and 1-3")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise HostlistError(text, at, f"the range {item} runs backwards")
        if len(numbers) + high - low + 1 > MAX_HOSTS:
            raise HostlistError(text, at, f"more than {MAX_HOSTS} hosts")
        numbers += [f"{number:0{len(match[1])}d}" for number in range(low, high + 1)]
        at += len(item) + 1
    return numbers


def _names(literals: list[str], brackets: list[list[str]]) -> Iterator[str]:
    """All names of one entry. scontrol varies the last bracket fastest, then the first, the second, and so on."""
    if not brackets:
        yield literals[0]
        return
    for *rest, last in itertools.product(*reversed(brackets[:-1]), brackets[-1]):
        values = [*reversed(rest), last, ""]
        yield "".join(itertools.chain.from_iterable(zip(literals, values, strict=True)))
