"""Whether all ranks hold the same parameters, bit for bit, as data parallel training takes for granted.

The words of a parameter (its raw bits, eight bytes each) are multiplied with the odd numbers 1, 3, 5, ... in turn and
added up, in 64-bit integers that wrap. A change of any single word always changes the sum, because an odd factor can be
undone modulo 2^64; the order of a device's summation never does. Only the sums travel.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import ReplicaError
from .ranks import Ranks

_BLOCK = 1 << 17
"""Words that are multiplied at a time: little memory of its own, and it stays in a CPU's cache."""
_MIX = 0x2545F4914F6CDD1D
"""An odd number, by which a parameter's place among the others enters."""


class Replicas:
    """Compares the ranks' parameters. Every method is a collective."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._named = dict(model.named_parameters())
        self._ranks = ranks

    def check(self, step: int) -> None:
        """Compare the parameters after `step` steps. It waits for the device.

        Errors: ReplicaError on all ranks, naming those that differ from most, with host and first parameter.
        """
        if self._ranks.world_size == 1:
            return
        own = torch.zeros((), dtype=torch.int64, device=next(iter(self._named.values())).device)
        for parameter in self._named.values():
            own = own * _MIX + digest(parameter)
        seen = [torch.empty_like(own) for _ in range(self._ranks.world_size)]
        dist.all_gather(seen, own)
        values = torch.stack(seen).tolist()
        if len(set(values)) > 1:
            raise ReplicaError(self._text(step, values))

    def _text(self, step: int, values: Sequence[int]) -> str:
        mine = (socket.gethostname(), [int(digest(parameter)) for parameter in self._named.values()])
        seen = [mine] * self._ranks.world_size
        dist.all_gather_object(seen, mine)
        differing = minority(values)
        ranks = ", ".join(f"rank {rank} (host {seen[rank][0]})" for rank in differing)
        columns = zip(*(digests for _, digests in seen), strict=True)
        names = [name for name, column in zip(self._named, columns, strict=True) if len(set(column)) > 1]
        rest = len(values) - len(differing)
        from_whom = f"from those of the other {rest} ranks" if rest else "from each other, and no majority agrees"
        return (
            f"step {step}: the parameters of {ranks} differ {from_whom}, in {', '.join(names[:3])}"
            f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}; no checkpoint was written after it. A device "
            "or memory is faulty, or code changes parameters on some ranks only; then resume from the newest checkpoint"
        )


def minority(values: Sequence[int]) -> list[int]:
    """Ranks whose value is not that of more than half; all ranks where no value is."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return list(range(len(values)))
    return [rank for rank, other in enumerate(values) if other != value]


def digest(tensor: Tensor) -> Tensor:
    """The weighted sum of a tensor's words, as an int64 scalar on its device."""
    data = tensor.detach().contiguous().reshape(-1)
    if data.is_complex():
        data = torch.view_as_real(data).reshape(-1)
    whole = data.numel() * data.element_size() // 8 * 8 // data.element_size()
    body, rest = data[:whole], data[whole:].view(torch.uint8)
    if body.storage_offset() * body.element_size() % 8:
        body = body.clone()
    total = nn.functional.pad(rest, (0, 8 - len(rest))).view(torch.int64)[0]
    words = body.view(torch.int64)
    weights = torch.arange(min(_BLOCK, len(words)), device=data.device).mul_(2).add_(1)
    for start in range(0, len(words), _BLOCK):
        part = words[start : start + _BLOCK]
        total = total * _MIX + (part * weights[: len(part)]).sum()
    return total
