"""What a spec may hold, read from the dataclasses: the keys of each section, their types, and words for them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

from training.config import inner_types, key_of

MISSING = "???"
"""Stands for a value that must be given."""


class Field(NamedTuple):
    """One key of a section."""

    key: str
    kind: Any
    """Its type without None: int, float, bool, str, a Literal, list[X], dict[str, X], Any, or a section's class."""
    hint: Any
    """Its whole type."""
    optional: bool
    """Whether null is a value of it."""
    raw_text: bool
    """Of an Any: numbers inside stay the text that was written."""
    item: dataclasses.Field[Any]

    @property
    def is_section(self) -> bool:
        return dataclasses.is_dataclass(self.kind)

    def default(self) -> Any:
        """A fresh default, `???` for a value that must be given."""
        factory = self.item.default_factory
        return self.item.default if factory is dataclasses.MISSING else factory()


_known: dict[type[Any], dict[str, Field]] = {}


def fields_of(section: type[Any]) -> dict[str, Field]:
    """The fields of a section's dataclass by their YAML keys, in order. Read once: type hints are slow to evaluate."""
    if section not in _known:
        _known[section] = _read_fields(section)
    return _known[section]


def _read_fields(section: type[Any]) -> dict[str, Field]:
    hints = typing.get_type_hints(section)
    fields = {}
    for item in dataclasses.fields(section):
        hint = hints[item.name]
        kind = inner_types(hint)[0]
        optional = kind is Any or type(None) in typing.get_args(hint)
        key = key_of(item)
        fields[key] = Field(key, kind, hint, optional, item.metadata.get("scalars") == "text", item)
    return fields


def all_paths(section: type[Any], prefix: str = "") -> Iterator[str]:
    """The dotted path of every key below a section, sections themselves included."""
    for key, field in fields_of(section).items():
        yield prefix + key
        if field.is_section:
            yield from all_paths(field.kind, f"{prefix}{key}.")


def words(kind: Any) -> str:
    """What a value of this type is, for a message."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        return f"one of {', '.join(typing.get_args(kind))}"
    if origin is list:
        return "a list"
    if origin is dict or dataclasses.is_dataclass(kind):
        return "a mapping"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, "a value")


def example(kind: Any) -> str:
    """How a value of this type is written, to follow `words` in a message."""
    if typing.get_origin(kind) is list:
        return " such as [0.9, 0.999]" if typing.get_args(kind)[0] is float else " such as [python, train.py]"
    if words(kind) == "a mapping":
        return ": keys below it, indented"
    return {int: " such as 4", float: " such as 1e-3"}.get(kind, "")


_OTHER_WORDS = {
    "lr": "base_lr",
    "learning_rate": "base_lr",
    "type": "name",
    "warmup": "warmup_steps",
    "lr_decay": "decay",
    "gpus": "gpus_per_node",
    "gpu": "gpus_per_node",
    "cpus": "cpus_per_task",
    "mem": "memory",
    "ntasks_per_node": "tasks_per_node",
    "walltime": "time",
    "timeout": "time",
    "queue": "partition",
    "batch_size": "batch",
    "fp16": "bf16",
    "half": "bf16",
    "float16": "bf16",
    "bfloat16": "bf16",
    "float32": "fp32",
}
"""What other tools call what we have, by no likeness of letters."""


def did_you_mean(given: str, known: list[str]) -> str:
    """The remedy for a name that is not known: the closest one, else all."""
    if _OTHER_WORDS.get(given) in known:
        return f"did you mean {_OTHER_WORDS[given]}?"
    if close := get_close_matches(given, known, n=1):
        return f"did you mean {close[0]}?"
    return f"known here: {', '.join(known)}" if known else "nothing is known here"


def did_you_mean_key(given: str, section: type[Any], prefix: str, top: type[Any]) -> str:
    """The remedy for an unknown key: a sibling of a similar name, a key of that name elsewhere, else all siblings."""
    siblings = list(fields_of(section))
    name = given.replace("-", "_")
    if _OTHER_WORDS.get(name) in siblings:
        return f"did you mean {prefix}{_OTHER_WORDS[name]}?"
    if not get_close_matches(name, siblings, n=1, cutoff=0.8):
        elsewhere = [path for path in all_paths(top) if path.rpartition(".")[2] == name]
        if elsewhere:
            return f"did you mean {' or '.join(elsewhere)}?"
    close = get_close_matches(name, siblings, n=1)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    return f"known here: {', '.join(siblings)}"
