"""Imports of a rank, made ahead: by the process that forks the ranks of this machine, or by each rank itself."""

from __future__ import annotations

import gc


def preload() -> None:
    """Import torch and our loop without starting a thread or touching a device, so that a fork afterwards is safe.

    Importing makes hundreds of thousands of objects that live as long as the process: collecting garbage meanwhile
    costs a tenth of the start and frees nothing.
    """
    gc.disable()
    import torch._dynamo  # noqa: F401 - the first optimizer imports it anyway, at a second for each rank

    from . import run  # noqa: F401

    gc.enable()
    gc.freeze()
