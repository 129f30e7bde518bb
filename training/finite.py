"""Whether tensors are finite, exactly, for about the price of reading them once.

The sum of squares of a tensor is finite only if each element is: there is no cancelling among squares. It is NaN or
infinite too where finite elements are very large (above 1e19 in fp32), so a suspicion is looked into element by
element.
"""

from __future__ import annotations

import cmath
import math
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import NotFinite
from .ranks import Ranks


class Gradients:
    """The check of all gradients on the CPU, once a step."""

    def __init__(self, buckets: bool) -> None:
        """`buckets`: the gradients are views into a few buckets, as DDP makes them; each is then read in one call."""
        self._buckets = buckets
        self._places: list[int] = []
        self._flat: list[Tensor] = []

    def finite(self, gradients: Sequence[Tensor]) -> bool:
        """Whether every element of every gradient is finite: the same answer wherever the bits are the same."""
        return all(map(_squares_finite, self._pieces(gradients))) or all(map(all_finite, gradients))

    def _pieces(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        if not self._buckets:
            return gradients
        places = [gradient.data_ptr() for gradient in gradients]
        if places != self._places:  # DDP makes its buckets anew after the first step
            self._places, self._flat = places, _whole_memory(gradients)
        return self._flat


def _whole_memory(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The memory that the tensors are views of, each piece once, as flat tensors."""
    found: dict[tuple[int, torch.dtype], Tensor] = {}
    for tensor in tensors:
        memory = tensor.untyped_storage()
        place = memory.data_ptr(), tensor.dtype
        if place not in found:
            size = memory.nbytes() // tensor.element_size()
            found[place] = tensor.detach().as_strided((size,), (1,), 0)
    return list(found.values())


def _squares_finite(tensor: Tensor) -> bool:
    flat = tensor.detach().reshape(-1)
    return cmath.isfinite(torch.dot(flat, flat).item())


def all_finite(tensor: Tensor) -> bool:
    """Whether every element is finite; anything but floating and complex numbers is."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return _squares_finite(tensor) or bool(torch.isfinite(tensor).all())


def first_not_finite(named: Mapping[str, Tensor]) -> tuple[str, float] | None:
    """Name and value of the first element that is not finite; None where all are. Waits for a device."""
    for name, tensor in named.items():
        if not all_finite(tensor):
            flat = tensor.detach().reshape(-1)
            flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
            return name, float(flat[~torch.isfinite(flat)][0])
    return None


@dataclass(frozen=True)
class Watched:
    """Tensors of a state of which some must be finite before it may be kept.

    A step can spoil them though its loss and gradients were finite, as when a square overflows in Adam. Buffers may
    hold infinities, as masks do, but no NaN; frozen parameters may hold anything.
    """

    trained: Mapping[str, Tensor]
    """Parameters that are trained, and what the optimizer keeps of them."""
    buffers: Mapping[str, Tensor]

    def spoiled(self) -> tuple[str, float] | None:
        """Name and value of an element that may not be kept."""
        for name, value in self.buffers.items():
            if value.is_floating_point() and bool(torch.isnan(value).any()):
                return name, math.nan
        return first_not_finite(self.trained)


def loss_fault(step: int, own: Tensor, ranks: Ranks, model: nn.Module) -> NotFinite:
    """Name the first rank whose own loss is not finite. A collective, for when all ranks know that the sum is not."""
    mine = (float(own.item()), socket.gethostname())
    seen = [mine] * ranks.world_size
    if ranks.world_size > 1:
        dist.all_gather_object(seen, mine)
    spoiled = first_not_finite({name: p for name, p in model.named_parameters() if p.requires_grad})
    why = f", with {spoiled[0]} spoiled by an earlier gradient," if spoiled else ""
    for rank, (value, host) in enumerate(seen):
        if not math.isfinite(value):
            return NotFinite(step, rank, value, host, f"the loss{why}")
    return NotFinite(step, None, sum(value for value, _ in seen), what=f"the sum of the ranks' losses{why}")


def gradient_fault(step: int, model: nn.Module) -> NotFinite:
    """Name the gradient. It is the sum over the ranks, the same on each: who spoiled it cannot be seen any more."""
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    name, value = first_not_finite(named) or ("all parameters, its norm,", math.inf)
    return NotFinite(step, None, value, what=f"the gradient of {name}")


def scale_and_check(gradients: Sequence[Tensor], factor: Tensor, suspects: Tensor, found: Tensor) -> None:
    """On a device, without waiting for it: multiply the gradients by `factor`, and set `found` to 1.0 if one is bad.

    `factor` is a scalar, `found` a scalar of fp32 that is 0.0 before, all on the gradients' device. `suspects` are
    further numbers that have to be finite (their content is lost). In fp32 and below it is the one kernel that torch's
    GradScaler uses; its factor has to be fp32, so for fp64 there are two passes.
    """
    if factor.dtype == torch.float32:
        for part in _by_type([*gradients, suspects]):
            torch._amp_foreach_non_finite_check_and_unscale_(part, found, factor)
        return
    torch._foreach_mul_(list(gradients), factor)
    sizes = torch.stack([norm.to(factor.dtype) for norm in torch._foreach_norm([*gradients, suspects], math.inf)])
    found.copy_(torch.isfinite(sizes).logical_not_().any())


def _by_type(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The kernel takes tensors of one type at a time."""
    parts: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        parts.setdefault(tensor.dtype, []).append(tensor)
    return list(parts.values())


class KeptBuffers:
    """A model's buffers as they were before a step, such as running means, which the forward pass changes."""

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._live = list(buffers)
        self._kept = [buffer.detach().clone() for buffer in self._live]

    def keep(self) -> None:
        """Copy the buffers."""
        for kept, live in zip(self._kept, self._live, strict=True):
            kept.copy_(live, non_blocking=True)

    def bring_back(self, found: Tensor | None = None) -> None:
        """Put the copies back; with a `found` of a device only where it is 1.0, without waiting for it."""
        for kept, live in zip(self._kept, self._live, strict=True):
            live.copy_(kept if found is None else torch.where(found > 0, kept, live))
