"""Times, memory and GPU counts, read exactly as Slurm's own option parser reads them (sbatch(1), 22.05)."""

from __future__ import annotations

import re
from typing import NamedTuple

_DAY_S, _HOUR_S, _MINUTE_S = 86_400, 3_600, 60
_UNLIMITED = frozenset({"infinite", "unlimited", "-1"})
_TIME_WITH_DAYS = re.compile(r"(\d+)-(?:(\d+)(?::(\d+)(?::(\d+))?)?)?", re.ASCII)
_TIME = re.compile(r"(\d+)(?::(\d+)(?::(\d+))?)?", re.ASCII)
_MEMORY = re.compile(r"\+?(\d+)([KMGT]?)B?", re.ASCII | re.IGNORECASE)
_GPUS = re.compile(r"(?:([A-Za-z_][\w.-]*):)?(\d+)", re.ASCII)
_KB_PER_UNIT = {"K": 1, "": 1 << 10, "M": 1 << 10, "G": 1 << 20, "T": 1 << 30}

LARGEST_MINUTES = 2**31 // 60 - 1
"""Slurm keeps a limit as 32-bit seconds while it reads it; more wraps around to a negative limit."""

TIME_FORMS = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS or UNLIMITED"
MEMORY_FORMS = "a whole number with K, M, G or T (no letter: MB), such as 4G"
GPU_FORMS = "a count such as 4, or type:count such as a100:4"


class Gpus(NamedTuple):
    """A GPU request: `a100:4` is Gpus("a100", 4)."""

    kind: str | None
    number: int


def time_seconds(text: str) -> int | None:
    """Seconds of a time limit in any of Slurm's forms; None: no limit.

    `90` is minutes, `1:30` minutes and seconds, `2-12` days and hours. A part may pass its usual range: `90:00` is 90
    minutes. Errors: ValueError when Slurm would not take it, or would wrap it around.
    """
    if text.lower() in _UNLIMITED:
        return None
    if match := _TIME_WITH_DAYS.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    elif match := _TIME.fullmatch(text):
        first, second, third = match.groups()
        days = 0
        if third is not None:
            hours, minutes, seconds = int(first), int(second), int(third)
        else:
            hours, minutes, seconds = 0, int(first), int(second or 0)
    else:
        raise ValueError(f"{text!r} is no time limit; write {TIME_FORMS}")
    total = days * _DAY_S + hours * _HOUR_S + minutes * _MINUTE_S + seconds
    if total > LARGEST_MINUTES * _MINUTE_S:
        raise ValueError(f"{text!r} is more than the {LARGEST_MINUTES} minutes that Slurm can hold; write UNLIMITED")
    return total


def time_minutes(text: str) -> int | None:
    """Whole minutes of a time limit, rounded up as Slurm does; None: no limit. Errors: as `time_seconds`."""
    seconds = time_seconds(text)
    return None if seconds is None else -(-seconds // _MINUTE_S)


def time_text(seconds: int | None) -> str:
    """The inverse of `time_seconds`, in the form that squeue prints: D-HH:MM:SS or HH:MM:SS; None: UNLIMITED."""
    if seconds is None:
        return "UNLIMITED"
    days, rest = divmod(seconds, _DAY_S)
    hours, rest = divmod(rest, _HOUR_S)
    clock = f"{hours:02d}:{rest // _MINUTE_S:02d}:{rest % _MINUTE_S:02d}"
    return f"{days}-{clock}" if days else clock


def memory_mb(text: str) -> int:
    """Whole MB (2^20 bytes) of a memory request, KB rounded up as Slurm does; 0 asks for a node's whole memory.

    Errors: ValueError when Slurm would not take it.
    """
    match = _MEMORY.fullmatch(text)
    if match is None or (not match[2] and text[-1] in "bB"):
        raise ValueError(f"{text!r} is no amount of memory; write {MEMORY_FORMS}")
    kilobytes = int(match[1]) * _KB_PER_UNIT[match[2].upper()]
    if kilobytes >= 1 << 63:
        raise ValueError(f"{text!r} is more than Slurm can hold; write {MEMORY_FORMS}")
    return -(-kilobytes // 1024)


def gpus(text: str) -> Gpus:
    """A GPU request: a count, or type:count. Errors: ValueError when it is neither."""
    match = _GPUS.fullmatch(text)
    if match is None or len(match[2]) > 6:
        raise ValueError(f"{text!r} is no number of GPUs; write {GPU_FORMS}")
    return Gpus(match[1], int(match[2]))


def gpu_count(text: str) -> int:
    """The number of GPUs in a request, whatever their type. Errors: as `gpus`."""
    return gpus(text).number
