"""The state of a training process as named tensors and plain JSON, and back. No pickle anywhere.

Names are the model's own: optimizer state is kept under the name of its parameter, so it finds its place again even if
parameters were reordered. Tensors that share memory (tied weights) are stored once. The options of the optimizer that
the spec sets (learning rate, betas, ...) are written for the record; at a restore the spec's own values stay.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import CheckpointError
from .tensorfile import raw_bytes

# What the spec or the device decides in an optimizer's parameter group; anything else in there is state.
_BY_SPEC = ("betas", "eps", "weight_decay", "momentum", "nesterov", "dampening", "amsgrad", "maximize")
_BY_STEP_OR_DEVICE = ("lr", "initial_lr", "params", "param_names", "foreach", "fused", "capturable", "differentiable")
_REMEDY = (
    "Resume with the task, options and optimizer that the run began with, or start a new run "
    "(another run folder or train.checkpoint.folder)"
)
_SHOWN = 8


@dataclass
class Snapshot:
    """A model's and an optimizer's state."""

    model: dict[str, Tensor]
    """Parameters and persistent buffers by name, each piece of memory once."""
    optimizer: dict[str, Tensor]
    """The optimizer's tensors, named parameter:key."""
    plain: dict[str, Any]
    """JSON: names of shared tensors, and everything of the optimizer that is no tensor."""


def capture(model: nn.Module, optimizer: Optimizer) -> Snapshot:
    """Describe the state as it is now. The tensors are the live ones, not copies.

    Errors: CheckpointError naming a value that is neither tensor, number, text, list nor mapping.
    """
    state = model.state_dict()
    aliases = _aliases(state)
    tensors = {k: v for k, v in state.items() if isinstance(v, Tensor) and k not in aliases}
    inner: dict[str, Tensor] = {}
    extra = {k: pack(v, f"extra:{k}", inner) for k, v in state.items() if not isinstance(v, Tensor)}
    moments: dict[str, Tensor] = {}
    names = _parameter_names(model, optimizer)
    whole = optimizer.state_dict()
    groups = [{k: v for k, v in group.items() if k != "params"} for group in whole["param_groups"]]
    plain = {
        "model": {"aliases": aliases, "extra": extra, "extra_tensors": list(inner)},
        "optimizer": {
            "class": type(optimizer).__name__,
            "state": {names[i]: pack(values, f"{names[i]}:", moments) for i, values in whole["state"].items()},
            "groups": pack(groups, "groups:", moments),
            "params": [[names[i] for i in group["params"]] for group in whole["param_groups"]],
        },
    }
    return Snapshot({**tensors, **inner}, moments, plain)


def restore(snapshot: Snapshot, model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Copy a state into a model and its optimizer, on whatever device they are, bit for bit.

    Everything is checked before anything is changed. Returns a line for each option of the optimizer that the spec
    now sets otherwise. Errors: CheckpointError naming the tensors that do not fit, with both shapes and the remedy.
    """
    values = _model_values(snapshot, model)
    saved = snapshot.plain["optimizer"]
    names = _parameter_names(model, optimizer)
    _refuse(_unfit_optimizer(saved, optimizer, names), "does not fit the optimizer")
    model.load_state_dict(values)
    return _restore_optimizer(saved, snapshot.optimizer, optimizer, names)


def restore_model(snapshot: Snapshot, model: nn.Module) -> None:
    """Copy the model's part of a state into a model. Errors: as `restore`."""
    model.load_state_dict(_model_values(snapshot, model))


def _model_values(snapshot: Snapshot, model: nn.Module) -> dict[str, Any]:
    kept = snapshot.plain["model"]
    values: dict[str, Any] = {k: v for k, v in snapshot.model.items() if k not in kept["extra_tensors"]}
    values.update({alias: snapshot.model[target] for alias, target in kept["aliases"].items()})
    values.update({name: unpack(value, snapshot.model) for name, value in kept["extra"].items()})
    values = {k: v.clone() if k.endswith("_extra_state") and isinstance(v, Tensor) else v for k, v in values.items()}
    state = model.state_dict()
    _refuse(_unfit(state, values), "does not fit the model")
    return {name: values[name] for name in state}


def _restore_optimizer(
    saved: dict[str, Any], tensors: dict[str, Tensor], optimizer: Optimizer, names: list[str]
) -> list[str]:
    whole = optimizer.state_dict()
    notes = []
    for group, old in zip(whole["param_groups"], unpack(saved["groups"], tensors), strict=True):
        group.update({k: v for k, v in old.items() if k not in _BY_SPEC + _BY_STEP_OR_DEVICE})
        changed = [k for k in _BY_SPEC if k in group and k in old and _comparable(group[k]) != _comparable(old[k])]
        notes += [f"optimizer: {k} {old[k]} in the checkpoint, {group[k]} in the spec, which holds" for k in changed]
    whole["state"] = {
        i: unpack(saved["state"][name], tensors) for i, name in enumerate(names) if name in saved["state"]
    }
    optimizer.load_state_dict(whole)
    # load_state_dict casts to the parameter's dtype: state kept in another precision gets its own bits back.
    for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for key, value in whole["state"].get(i, {}).items():
            now = optimizer.state[parameter][key]
            if isinstance(value, Tensor) and now.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(now.device)
    return list(dict.fromkeys(notes))


def _comparable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of the optimizer's parameters in its own order; one that is not in the model is called #index."""
    known = {id(p): name for name, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [known.get(id(p), f"#{i}") for i, p in enumerate(parameters)]


def _aliases(state: dict[str, Any]) -> dict[str, str]:
    """Names that share all their memory with an earlier name: {later: earlier}."""
    first: dict[tuple[Any, ...], str] = {}
    result = {}
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.numel() == 0:
            continue
        place = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if place in first:
            result[name] = first[place]
        else:
            first[place] = name
    return result


def _unfit(state: dict[str, Any], values: dict[str, Any]) -> list[str]:
    faults = [f"{name}: not in the checkpoint" for name in state if name not in values]
    faults += [f"{name}: not in the model" for name in values if name not in state]
    for name, now in state.items():
        old = values.get(name)
        if not isinstance(old, Tensor) or not isinstance(now, Tensor) or name.endswith("_extra_state"):
            continue
        if old.shape != now.shape or old.dtype != now.dtype:
            faults.append(f"{name}: {_form(old)} in the checkpoint, {_form(now)} in the model")
    for alias, target in _aliases(state).items():
        one, other = values.get(alias), values.get(target)
        if one is not other and isinstance(one, Tensor) and isinstance(other, Tensor):  # noqa: SIM102 - costly last
            if raw_bytes(one) != raw_bytes(other):
                faults.append(f"{alias} and {target}: one tensor in the model, two different ones in the checkpoint")
    return faults


def _unfit_optimizer(saved: dict[str, Any], optimizer: Optimizer, names: list[str]) -> list[str]:
    now = type(optimizer).__name__
    if saved["class"] != now:
        return [f"{saved['class']} in the checkpoint, {now} now"]
    faults = [f"{name}: state of a parameter that is not optimized now" for name in saved["state"] if name not in names]
    if len(saved["groups"]) != len(optimizer.param_groups):
        faults.append(f"{len(saved['groups'])} parameter groups in the checkpoint, {len(optimizer.param_groups)} now")
    then = {name for group in saved["params"] for name in group}
    return faults + [f"{name}: optimized now, but not in the checkpoint" for name in names if name not in then]


def _refuse(faults: list[str], what: str) -> None:
    if faults:
        more = f" (and {len(faults) - _SHOWN} more)" if len(faults) > _SHOWN else ""
        raise CheckpointError(f"the checkpoint {what}: {'; '.join(faults[:_SHOWN])}{more}. {_REMEDY}")


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A nested value as JSON. Tensors move into `tensors` under names that start with `name`.

    Errors: CheckpointError naming the place of a value of any other kind.
    """
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"__tensor__": name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": repr(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {"__tuple__": pack(list(value), name, tensors)}
    joint = "" if name.endswith(":") else "."
    if isinstance(value, list):
        return [pack(item, f"{name}{joint}{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: pack(item, f"{name}{joint}{key}", tensors) for key, item in value.items()}
    raise CheckpointError(
        f"{name}: a {type(value).__name__} cannot be stored; "
        "keep tensors, numbers, text, lists and mappings with text keys"
    )


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `pack`. Tensors are copies, free of the file that they came from."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        return tensors[value["__tensor__"]].clone()
    if "__float__" in value:
        return float(value["__float__"])
    if "__tuple__" in value:
        return tuple(unpack(value["__tuple__"], tensors))
    return {key: unpack(item, tensors) for key, item in value.items()}


def capture_rng() -> dict[str, Any]:
    """This process's random states as JSON: torch (host, and the current CUDA device if in use), Python and NumPy."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "python": [list(part) if isinstance(part, tuple) else part for part in random.getstate()],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return states


def restore_rng(states: dict[str, Any]) -> None:
    """Set the random states that `capture_rng` described; one of a device that is absent now is left out."""
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8))
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(states["cuda"]), dtype=torch.uint8))
