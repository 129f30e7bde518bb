"""What a spec file holds before it is typed: a tree of mappings, lists and scalars, each with its place.

Scalars follow YAML 1.2's core schema, so `00:30:00`, `yes` and `2024-01-01` are text: only true and false are
booleans, octal is 0o17, and 1e-3 is a number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from ..errors import Fault

Layer = Literal["default", "site", "base", "spec", "override"]


class Origin(NamedTuple):
    """Where a value was written. Line and column are 1-based; 0: it has none."""

    layer: Layer
    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        if self.layer in ("default", "override"):
            return self.layer
        name = f"{Path(self.file).name}:{self.line}"
        return f"site {name}" if self.layer == "site" else name

    def fault(self, field: str, wrong: str, right: str) -> Fault:
        """A fault here, safe to print: what a file says may hold escape codes for a terminal."""
        return Fault(printable(self.file), self.line, self.column, printable(field), printable(wrong), printable(right))


def printable(text: str) -> str:
    """The text with every unprintable character written as an escape."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@dataclass
class Scalar:
    """One value: `text` as written, `value` as YAML 1.2 reads it (None, bool, int, float or str)."""

    origin: Origin
    text: str
    value: Any


@dataclass
class Items:
    """A list."""

    origin: Origin
    items: list[Tree]


@dataclass
class Section:
    """A mapping. Keys are text as written, whatever they look like."""

    origin: Origin
    items: dict[str, Tree]
    keys: dict[str, Origin]
    """The place of each key."""


Tree: TypeAlias = Scalar | Items | Section

_LONGEST_NUMBER = 400
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def core_tag(text: str) -> str:
    """The core schema's tag of a plain scalar: null, bool, int, float, str; `merge` for the key `<<`."""
    if text in ("", "~", "null", "Null", "NULL"):
        return "null"
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return "bool"
    if text == "<<":
        return "merge"
    if text[0] in "+-.0123456789" and len(text) <= _LONGEST_NUMBER:
        if _INT.fullmatch(text):
            return "int"
        if _FLOAT.fullmatch(text) or _SPECIAL_FLOAT.fullmatch(text):
            return "float"
    return "str"


def core_value(text: str, tag: str | None = None) -> Any:
    """A plain scalar's value under the core schema. Errors: ValueError when `text` does not fit an explicit `tag`."""
    found = core_tag(text)
    tag = tag or found
    if tag == "str" or tag == "merge":
        return text
    if tag != found and not (tag == "float" and found == "int"):
        raise ValueError(f"{text!r} is no {tag}")
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() == "true"
    if tag == "int":
        return int(text[2:], {"o": 8, "x": 16}[text[1]]) if text[:2] in ("0o", "0x") else int(text)
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
