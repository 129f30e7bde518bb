"""The `train:` and `wandb:` sections of a spec, as plain typed dataclasses. Free of torch: the launcher reads them too.

A field whose YAML key is a Python keyword carries the key in its metadata (`key`). Choices are `Literal` types.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml


@dataclass
class BatchConfig:
    """How many samples make one optimizer step. Give `per_rank`, or `global`, or both."""

    per_rank: int | None = None
    """Samples in one micro-batch of one rank (the micro-batch size)."""
    global_size: int | None = field(default=None, metadata={"key": "global"})
    """Samples in one optimizer step over all ranks: per_rank x accumulate x world_size."""
    accumulate: int | None = None
    """Micro-batches a rank adds up before a step; 1 unless `global` and `per_rank` ask for more."""


@dataclass
class OptimConfig:
    """Optimizer, and the rule that carries its learning rate from one batch size to another."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    base_lr: float = 1.0e-3
    """Learning rate at a global batch of `base_batch` samples."""
    base_batch: int | None = None
    """Global batch for which base_lr was tuned; null: the run's own global batch, so nothing is scaled."""
    scaling: Literal["linear", "sqrt", "none"] = "linear"
    """linear: lr = base_lr x global / base_batch (Goyal et al. 2017); sqrt: base_lr x sqrt(global / base_batch)."""
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of Adam's two moments."""
    eps: float = 1.0e-8
    momentum: float = 0.0
    """For sgd."""
    nesterov: bool = False
    """For sgd."""
    clip_norm: float | None = None
    """Largest 2-norm of the whole gradient; null: no clipping."""


@dataclass
class ScheduleConfig:
    """Learning rate as a pure function of the step: warmup, then decay."""

    warmup_steps: int = 0
    """Optimizer steps in which the rate rises linearly to the scaled rate."""
    decay: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    decay_steps: int | None = None
    """For wsd (warmup, stable, decay): length of the final linear decay; null: a tenth of the run."""
    min_lr_ratio: float = 0.0
    """Rate at the end of the decay, as a share of the scaled rate."""


@dataclass
class DataConfig:
    """Order and loading of samples."""

    shuffle: bool = True
    last: Literal["keep", "drop"] = "keep"
    """The last, smaller global batch of an epoch: used with its exact weight, or left out."""
    workers: int = 0
    """Loader processes for each rank; 0 loads in the rank itself."""
    prefetch: int = 2
    """Micro-batches that each worker keeps ready; more where they are made in less than milliseconds."""
    lanes: int = 64
    """For data in shards: sequences of shards that are read side by side. At least the number of nodes."""
    window: int = 16384
    """For data in shards: samples of a lane among which one is shuffled."""


@dataclass
class EvalConfig:
    """Evaluation on the task's held-out data; each sample counts once at every world size."""

    every_steps: int | None = None
    """Optimizer steps between evaluations; null: only at the end."""
    at_end: bool = True
    per_rank: int = 256
    """Samples in one evaluation batch of one rank."""


@dataclass
class CheckpointConfig:
    """When to save, where, and what to keep."""

    every_steps: int | None = None
    """Optimizer steps between checkpoints; null: only at the end or at a stop, unless one of the next two is set."""
    every_minutes: float | None = None
    """Minutes between checkpoints; with every_steps: whichever comes first."""
    auto: bool = False
    """As often as loses the least time, from what a save costs and how often the run fails."""
    at_end: bool = True
    keep_last: int = 3
    """Newest checkpoints that are kept; the newest good one is never removed."""
    keep_every: int | None = None
    """Checkpoints at multiples of so many steps are kept for ever."""
    keep_best: str | None = None
    """Also the one with the best result of this evaluation metric is kept; `-loss`: the lowest loss is the best."""
    folder: str | None = None
    """A path or any URL that fsspec opens, this run's own and shared by its ranks; null: in the run folder."""
    behind: bool = True
    """Write while training goes on; false: training waits until the checkpoint is durable."""
    retries: int = 2
    """Further tries of a write that failed, after 2 s, 4 s, 8 s and so on."""
    on_failure: Literal["continue", "stop"] = "continue"
    """When a checkpoint could not be written: train on until the next one, or end the run. The last one must do."""


@dataclass
class LogConfig:
    """Metrics and progress lines."""

    every_steps: int = 10


@dataclass
class HealthConfig:
    """What is watched while a run trains, and what follows when it is not well."""

    not_finite: Literal["stop", "skip", "rollback"] = "stop"
    """A loss or gradient that is not finite. stop: the run ends with an error that names the step and the rank; skip:
    the step changes nothing; rollback: an older checkpoint's state comes back; both: batches count as consumed."""
    rollback_steps: int = 1
    """For rollback: the checkpoint is at least this many steps older than the bad step."""
    max_skips: int = 10
    """For skip and rollback: how often, in the whole run, before it stops."""
    replica_every_steps: int | None = 1000
    """Steps between comparisons of the ranks' parameters, bit for bit; null: never."""
    hang_timeout_s: int | None = 600
    """Seconds without a sign of life until a run counts as hanging; null: never. In the first step and a save: x 3."""


@dataclass
class TrainConfig:
    """The built-in training loop."""

    task: str = "???"
    """`digits`, `text`, `synthetic`, or the import path of your own: `my_package.my_module:MyTask`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the task's class."""
    seed: int = 0
    init_from: str | None = None
    """A run folder or a checkpoint, whose weights this run begins with."""
    epochs: int | None = None
    """Passes over the training data. Give `epochs` or `steps`."""
    steps: int | None = None
    """Optimizer steps of the whole run."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """fp32; bf16: autocast, parameters stay fp32; fp64: for numerical proofs."""
    reproducible: bool = False
    """The same bits at every number of ranks, by adding up the micro-batches (`batch.per_rank`) in a fixed order."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    health: HealthConfig = field(default_factory=HealthConfig)


@dataclass
class WandbConfig:
    """Weights & Biases. No `wandb:` section: off."""

    project: str | None = None
    """null: the run's name."""
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online where an API key is found, else offline."""
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    """Display name; null: the run id."""
    tags: list[str] = field(default_factory=list)


@dataclass
class RunConfig:
    """What the training package reads of a resolved spec; the launcher's own sections are ignored here."""

    name: str
    train: TrainConfig
    wandb: WandbConfig | None = None


def key_of(item: dataclasses.Field[Any]) -> str:
    """The YAML key of a dataclass field."""
    return str(item.metadata.get("key", item.name))


def inner_types(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a (possibly optional) type, None left out: `int | None` -> (int,)."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return tuple(a for a in typing.get_args(annotation) if a is not type(None))
    return (annotation,)


def from_plain(cls: type[Any], values: dict[str, Any]) -> Any:
    """Build a config dataclass from a plain mapping in YAML keys. Unknown keys are ignored: the spec was validated.

    Errors: TypeError when a value for a nested section is no mapping.
    """
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        if key_of(item) not in values:
            continue
        value = values[key_of(item)]
        kind = inner_types(hints[item.name])[0]
        if dataclasses.is_dataclass(kind) and value is not None:
            if not isinstance(value, dict):
                raise TypeError(f"{key_of(item)}: a section is needed, not {value!r}")
            value = from_plain(kind, value)  # type: ignore[arg-type]
        arguments[item.name] = value
    return cls(**arguments)


def to_plain(config: Any) -> dict[str, Any]:
    """The inverse of `from_plain`: nested plain dicts in YAML keys, in the order of the fields."""
    result: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        result[key_of(item)] = to_plain(value) if dataclasses.is_dataclass(value) else value
    return result


def load(path: Path) -> RunConfig:
    """Read a resolved spec (`spec.yaml` of a run folder).

    Errors: OSError when it cannot be read, ValueError when it has no `train` section.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    values = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    if not isinstance(values, dict) or not isinstance(values.get("train"), dict):
        raise ValueError(f"{path}: no `train` section")
    config: RunConfig = from_plain(RunConfig, values)
    return config
