"""What a task is, and how the spec's `task:` becomes one."""

from __future__ import annotations

import difflib
import importlib
import inspect
from pathlib import Path
from typing import Any, Protocol

import torch

from .bytestream import digest_of
from .config import TrainConfig
from .errors import ConfigError

BUILT_IN = {"digits": "Digits", "text": "Text", "synthetic": "Synthetic"}
"""Task names of a spec, and their classes in `tasks.NAME`."""


class Task(Protocol):
    """A model, its loss and its data. A user's class needs these methods and no import from here.

    Optional, looked up by name:
      eval_data() -> Dataset              held-out samples
      eval_metrics(model, batch) -> dict  name -> (sum, weight), such as {"accuracy": (correct, samples)}
      weight_per_sample: float            the loss's weight for one sample, where it is always the same (1 if absent).
                                          It saves a pass over the gradients; a wrong value costs time, never exactness
      find_unused_parameters: bool        True when a step may leave parameters without a gradient
    """

    def model(self) -> torch.nn.Module:
        """A new model. The random generators are seeded alike on every rank before the call."""
        ...

    def train_data(self) -> Any:
        """The training samples: a `loader.Dataset`."""
        ...

    def loss(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor | float]:
        """(sum of the loss over the batch's samples or tokens, their number or total weight)."""
        ...


def load_task(config: TrainConfig) -> Task:
    """Make the task of a spec: a built-in name, or an import path `package.module:Class`, called with the options.

    Errors: ConfigError naming what was not found or not accepted. Errors that the user's own code raises pass.
    """
    kind = _task_class(config.task)
    where = f"train.task: {config.task}"
    for name in ("model", "train_data", "loss"):
        if not callable(getattr(kind, name, None)):
            raise ConfigError(f"{where}: the class has no method {name}; a task needs model, train_data and loss")
    _check_options(kind, config)
    task: Task = kind(**config.options)
    return task


def _task_class(path: str) -> Any:
    if path in BUILT_IN:
        return getattr(importlib.import_module(f".tasks.{path}", __package__), BUILT_IN[path])
    module_name, colon, class_name = path.partition(":")
    if not colon or not module_name or not class_name:
        known = list(BUILT_IN)
        raise ConfigError(
            f"train.task: {path!r} is neither {', '.join(known)} nor package.module:Class{_near(path, known)}"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # the module is there; something that it imports is not
        raise ConfigError(
            f"train.task: {path}: there is no module {error.name!r} on the import path; "
            "put its folder into python_path, or launch from the folder that holds it"
        ) from None
    try:
        return getattr(module, class_name)
    except AttributeError:
        names = [name for name, value in vars(module).items() if inspect.isclass(value)]
        hint = _near(class_name, names)
        if module_name.partition(".")[0] == __package__.partition(".")[0]:
            hint = "; this is the launcher's own: put the folder of yours into python_path, or launch from it"
        raise ConfigError(f"train.task: {path}: {module.__file__} has no class {class_name!r}{hint}") from None


def source_of(task: Any) -> dict[str, str]:
    """Name, and XXH3 hash as `xxh3_128`, of the `file` that a task's class is in; empty where none can be read."""
    try:
        path = Path(inspect.getsourcefile(type(task)) or "")
        return {"file": path.name, "xxh3_128": digest_of(path.read_bytes())}
    except (OSError, TypeError):
        return {}


def _check_options(kind: Any, config: TrainConfig) -> None:
    parameters = inspect.signature(kind).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        valid = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for name in config.options:
            if name not in valid:
                raise ConfigError(
                    f"train.options.{name}: {config.task} has no such option{_near(name, valid)}; "
                    f"it takes {', '.join(valid) or 'none'}"
                )
    for p in parameters:
        if (
            p.default is p.empty
            and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            and p.name not in config.options
        ):
            raise ConfigError(f"train.options.{p.name}: {config.task} needs this option; give it a value")


def _near(name: str, valid: list[str]) -> str:
    close = difflib.get_close_matches(name, valid, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
