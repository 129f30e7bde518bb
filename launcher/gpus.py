"""Which GPUs a rank of a local run sees, as Slurm would hand them out on a node of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import rendezvous, units
from .spec import Resources

_DRIVER_LIST = Path("/proc/driver/nvidia/gpus")


def present(outer: str | None) -> list[str]:
    """The machine's GPUs by name or number, or those that the user's own CUDA_VISIBLE_DEVICES leaves."""
    if outer is not None:
        return [device.strip() for device in outer.split(",") if device.strip()]
    return [str(number) for number in range(len(list(_DRIVER_LIST.iterdir())))] if _DRIVER_LIST.is_dir() else []


def per_node(resources: Resources) -> int:
    """GPUs that the spec asks for on each node, 0 for none."""
    if resources.gpus_per_node is not None:
        return units.gpu_count(resources.gpus_per_node)
    if resources.gpus_per_task is not None:
        return units.gpu_count(resources.gpus_per_task) * resources.tasks_per_node
    return 0


def assign(resources: Resources, place: rendezvous.Placement, outer: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of a rank: its node's share of the machine's GPUs, or its own with gpus_per_task.

    A machine with fewer GPUs than the emulated nodes ask for gives each node what is there; none: an empty list, and
    the ranks compute on the CPU.
    """
    devices = present(outer)
    wanted = per_node(resources)
    if not devices or not wanted:
        return ""
    share = _share(devices, place.node_rank * wanted, wanted)
    if resources.gpus_per_task is not None:
        each = units.gpu_count(resources.gpus_per_task)
        share = _share(share, place.local_rank * each, each)
    return ",".join(share)


def _share(devices: Sequence[str], start: int, count: int) -> Sequence[str]:
    return devices[start : start + count] or devices[:count]
