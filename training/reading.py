"""Reading a checkpoint's state, every file verified on the way; and the weights of another run to begin with."""

from __future__ import annotations

import json

from torch import Tensor, nn

from . import manifest
from .agree import together
from .errors import CheckpointError
from .manifest import MANIFEST, DamagedError, Found
from .ranks import Ranks
from .shelf import Keep, Shelf
from .snapshot import Snapshot, restore_model
from .storage import Folder, open_folder
from .tensorfile import decode


def read(folder: Folder, found: Found) -> Snapshot:
    """The whole state of a checkpoint. Errors: DamagedError, OSError."""
    tensors: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    for name in sorted(found.files):
        kind = name.partition("-")[0]
        if kind in tensors and name.endswith(".safetensors"):
            path = folder.local(f"{found.name}/{name}")
            if path is None:
                tensors[kind].update(decode(verified(folder, found, name)))
            else:
                manifest.verify(folder, found, name)
                tensors[kind].update(decode(path))
    return Snapshot(tensors["model"], tensors["optimizer"], json.loads(verified(folder, found, "state.json")))


def verified(folder: Folder, found: Found, name: str) -> bytes:
    """The content of one file. Errors: DamagedError, OSError."""
    content = folder.read(f"{found.name}/{name}")
    manifest.verify_content(found, name, content)
    return content


def init_from(place: str, model: nn.Module, ranks: Ranks) -> str:
    """Give the model the weights of another run; returns the checkpoint's place. A collective.

    `place`: a checkpoint (step-...), a folder of checkpoints or a run folder, of which the newest good one is taken; a
    path or any URL that fsspec opens. Errors: CheckpointError when there is none, or it does not fit the model.
    """

    def work() -> str:
        folder, found = _find(place.rstrip("/"))
        restore_model(read(folder, found), model)
        return folder.full(found.name)

    return together(ranks, f"train.init_from: {place}", work, everyone=True)[0]


def _find(place: str) -> tuple[Folder, Found]:
    parent, _, name = place.rpartition("/")
    if name.startswith("step-"):
        folder = open_folder(parent or ".")
        if folder.size(f"{name}/{MANIFEST}") is None:
            raise CheckpointError(f"no checkpoint is there: it has no {MANIFEST}")
        try:
            return folder, manifest.inspect(folder, name)
        except DamagedError as damage:
            raise CheckpointError(f"the checkpoint is damaged: {damage}") from damage
    for candidate in (f"{place}/checkpoints", place):
        folder = open_folder(candidate)
        if any(entry.startswith("step-") for entry in folder.names()):
            found = Shelf(folder, Keep()).newest(set_aside=False)
            if found is not None:
                return folder, found
    raise CheckpointError("no good checkpoint is there; give a run folder, a folder of checkpoints, or one of them")
