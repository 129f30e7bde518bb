"""The process's default random generators, each of which can be put aside, watched and seeded at little cost.

Of a Mersenne twister the 2.5 KB of its state are read as they lie in memory: the modules' own ways to ask for them take
10 us (`random`) and 40 us (numpy), which a loader that looks at every batch cannot pay.
"""

from __future__ import annotations

import ctypes
import random
import struct
from typing import Any, Protocol

import numpy as np
import torch
from numpy.random import mtrand

_TWISTER = struct.Struct("=625I")
"""A Mersenne twister in memory: 624 words and the place of the next one, which `random` has first and numpy last."""


class Generator(Protocol):
    """One default generator. `put_aside` and `put_back` enclose what must not change it."""

    name: str

    def put_aside(self) -> None: ...

    def moved(self) -> bool:
        """Whether it was drawn from, or seeded, since it was put aside."""
        ...

    def put_back(self) -> None: ...

    def seed(self, key: int) -> None:
        """Seed it with a number of 64 bits. Only between `put_aside` and `put_back`."""
        ...


def default_generators() -> list[Generator]:
    """torch's on the CPU, that of `random`, and numpy's global one."""
    return [_Torch(), _Python(), _Numpy()]


def seed_all(key: int) -> None:
    """Seed these, and that of the current CUDA device if one is in use, with a number of 63 bits."""
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(key)
    random.seed(key)
    np.random.seed(key % 2**32)


class _Torch:
    name = "torch"

    def put_aside(self) -> None:
        self._before = torch.default_generator.get_state()

    def moved(self) -> bool:
        now, size = torch.default_generator.get_state(), self._before.numel()
        return ctypes.string_at(now.data_ptr(), size) != ctypes.string_at(self._before.data_ptr(), size)

    def put_back(self) -> None:
        torch.default_generator.set_state(self._before)

    def seed(self, key: int) -> None:
        torch.default_generator.manual_seed(key)


class _Python:
    name = "random"

    def __init__(self) -> None:
        self._own: Any = random.random.__self__  # type: ignore[attr-defined]
        self._memory = _at(id(self._own) + object.__basicsize__)
        _, words, _ = self._own.getstate()
        self._readable = _TWISTER.unpack(self._memory.raw) == (words[-1], *words[:-1])
        """CPython's layout. Where it is another one, the slow way does it."""

    def put_aside(self) -> None:
        self._before = self._state()

    def moved(self) -> bool:
        return bool(self._state() != self._before)

    def put_back(self) -> None:
        if not self.moved():
            return
        state, gauss = self._before
        if self._readable:
            place, *words = _TWISTER.unpack(state)
            state = (3, (*words, place), gauss)
        random.setstate(state)

    def seed(self, key: int) -> None:
        random.seed(key)

    def _state(self) -> tuple[Any, Any]:
        if self._readable:
            return self._memory.raw, self._own.gauss_next
        return self._own.getstate(), None


class _Numpy:
    """Another bit generator takes the place of numpy's own meanwhile."""

    name = "numpy.random"

    def __init__(self) -> None:
        self._other = np.random.MT19937(0)
        self._other_memory = _at(self._other.ctypes.state_address)
        self._fresh = self._other_memory.raw
        self._own: Any = None
        self._own_memory: ctypes.Array[ctypes.c_char] | None = None
        self._seen: bytes | None = None
        self._paired: Any = None
        """The own one's whole state when it keeps the second of a pair of normal numbers, which the exchange loses."""

    def put_aside(self) -> None:
        own = mtrand.get_bit_generator()
        if own is not self._own:
            is_twister = isinstance(own, np.random.MT19937)
            self._own, self._own_memory = own, _at(own.ctypes.state_address) if is_twister else None
            self._seen = None
        words = self._own_memory.raw if self._own_memory is not None else None
        if words is None or words != self._seen or self._paired is not None:
            state: Any = np.random.get_state(legacy=False)
            self._paired, self._seen = state if state["has_gauss"] else None, words
        mtrand.set_bit_generator(self._other)

    def moved(self) -> bool:
        return self._other_memory.raw != self._fresh

    def put_back(self) -> None:
        mtrand.set_bit_generator(self._own)
        if self._paired is not None:
            np.random.set_state(self._paired)

    def seed(self, key: int) -> None:
        np.random.seed(key % 2**32)


def _at(address: int) -> ctypes.Array[ctypes.c_char]:
    """A Mersenne twister's memory, whose `raw` is a copy of what is there now."""
    return (ctypes.c_char * _TWISTER.size).from_address(address)
