"""Fitting a tree to the dataclasses: unknown keys, wrong shapes and wrong types, all of them at once."""

from __future__ import annotations

import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import Fault
from .schema import MISSING, Field, did_you_mean, did_you_mean_key, example, fields_of, words
from .tree import Items, Origin, Scalar, Section, Tree

Path = tuple[str | int, ...]


@dataclass
class Fitted:
    """What a tree says, key by key, in values that fit their fields unless an interpolation is still in them."""

    values: dict[tuple[str, ...], Any] = field(default_factory=dict)
    """Value of each field that is given, by its path."""
    sections: set[tuple[str, ...]] = field(default_factory=set)
    """Paths of the optional sections that are there."""
    interpolations: list[tuple[Path, tuple[str, ...], str]] = field(default_factory=list)
    """Each text that holds `${`: its own path, the path of its field, and the text."""
    places: dict[str, Origin] = field(default_factory=dict)
    """Place of each value and section, by dotted path, with [i] for the elements of a list."""
    origins: dict[str, Origin] = field(default_factory=dict)
    """Places of the leaves alone: a list counts as one leaf."""
    secrets: list[tuple[Path, str]] = field(default_factory=list)
    """Paths of the interpolations that read a secret environment variable, and its name."""
    bad: set[str] = field(default_factory=set)
    """Dotted paths that have a fault already: further rules about them would only repeat it."""

    def place(self, path: str) -> Origin:
        """The place of a value, or of the nearest section around it."""
        while path not in self.places:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self.places[path]

    def is_bad(self, path: str) -> bool:
        """Whether the value, a section around it or a part of it has a fault."""
        return any(touches(path, bad) for bad in self.bad)

    def is_lost(self, path: str) -> bool:
        """Whether the value itself or a section around it has a fault, so that nothing of it can be used."""
        return any(path == bad or path.startswith((f"{bad}.", f"{bad}[")) for bad in self.bad)

    def add_fault(self, faults: list[Fault], path: str, wrong: str, right: str) -> None:
        """Record a fault of a value at its place."""
        faults.append(self.place(path).fault(path, wrong, right))
        self.bad.add(path)


def touches(path: str, other: str) -> bool:
    """Whether two dotted paths are the same, or one is part of the other."""
    return path == other or path.startswith((f"{other}.", f"{other}[")) or other.startswith((f"{path}.", f"{path}["))


def dotted(path: Path) -> str:
    """`("command", 0)` -> `command[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


class _NoFit(Exception):
    """The value at hand has a fault, which is recorded."""


def fit(tree: Section, top: type[Any], file: Origin, faults: list[Fault]) -> Fitted:
    """Fit a merged tree to the dataclass `top`; `file` is the place of what has none."""
    return _Fitter(top, file, faults).run(tree)


class _Fitter:
    def __init__(self, top: type[Any], file: Origin, faults: list[Fault]) -> None:
        self.top = top
        self.faults = faults
        self.fitted = Fitted(places={"": file})

    def run(self, tree: Section) -> Fitted:
        self._section(tree, self.top, ())
        return self.fitted

    def _fault(self, path: Path, wrong: str, right: str, place: Origin | None = None) -> _NoFit:
        name = dotted(path)
        if place is not None:
            self.fitted.places.setdefault(name, place)
        self.fitted.add_fault(self.faults, name, wrong, right)
        return _NoFit()

    def _section(self, tree: Section, section: type[Any], path: tuple[str, ...]) -> None:
        fields = fields_of(section)
        for key, value in tree.items.items():
            place = tree.keys[key]
            if key not in fields:
                prefix = "".join(f"{part}." for part in path)
                right = did_you_mean_key(key, section, prefix, self.top)
                self._fault((*path, key), "unknown key", right, place)
                continue
            self.fitted.places[dotted((*path, key))] = place if isinstance(value, Section) else value.origin
            try:
                self._field(value, fields[key], (*path, key))
            except _NoFit:
                continue
        for key, known in fields.items():
            if key not in tree.items and known.item.default == MISSING:
                right = f"give it here, or as {dotted((*path, key))}=VALUE on the command line"
                self._fault((*path, key), "missing", right)
            if known.is_section and not known.optional and not isinstance(tree.items.get(key), Section):
                self._section(Section(tree.origin, {}, {}), known.kind, (*path, key))

    def _field(self, tree: Tree, known: Field, path: tuple[str, ...]) -> None:
        null = isinstance(tree, Scalar) and tree.value is None
        if known.is_section:
            if isinstance(tree, Section):
                if known.optional:
                    self.fitted.sections.add(path)
                self._section(tree, known.kind, path)
            elif null and known.optional:
                self.fitted.origins[dotted(path)] = tree.origin
            elif not null:
                raise self._not_a(tree, known.kind, path)
            return
        if null and known.optional:
            self.fitted.values[path] = None
        elif not (null and typing.get_origin(known.kind) in (list, dict)):
            self.fitted.values[path] = self._value(tree, known.kind, path, path, known.raw_text)
        if not isinstance(tree, Section):
            self.fitted.origins[dotted(path)] = tree.origin
            return
        for key, value in tree.items.items():
            self.fitted.origins[dotted((*path, key))] = value.origin

    def _value(self, tree: Tree, kind: Any, path: Path, of: tuple[str, ...], raw_text: bool = False) -> Any:
        """A value of type `kind`, or the text of an interpolation. `of` is the path of the field that it is part of."""
        self.fitted.places.setdefault(dotted(path), tree.origin)
        if isinstance(tree, Scalar) and tree.text == MISSING:
            right = f"give it as {dotted(path)}=VALUE on the command line, or in a spec that builds on this one"
            raise self._fault(path, "missing: it is ??? here", right)
        if isinstance(tree, Scalar) and isinstance(tree.value, str) and "${" in tree.text:
            self.fitted.interpolations.append((path, of, tree.text))
            return tree.text
        shape = typing.get_origin(kind)
        if shape is list or (kind is Any and isinstance(tree, Items)):
            return self._list(tree, kind, path, of, raw_text)
        if shape is dict or (kind is Any and isinstance(tree, Section)):
            return self._mapping(tree, kind, path, of, raw_text)
        return self._scalar(tree, kind, path, raw_text)

    def _list(self, tree: Tree, kind: Any, path: Path, of: tuple[str, ...], raw_text: bool) -> list[Any]:
        """Fit every element, so that each one's fault is found; a list with a fault is lost as a whole."""
        if not isinstance(tree, Items):
            raise self._not_a(tree, kind, path)
        values = []
        for index, item in enumerate(tree.items):
            try:
                values.append(self._value(item, (*typing.get_args(kind), Any)[0], (*path, index), of, raw_text))
            except _NoFit:
                self.fitted.bad.add(dotted(path))
        if dotted(path) in self.fitted.bad:
            raise _NoFit
        return values

    def _mapping(self, tree: Tree, kind: Any, path: Path, of: tuple[str, ...], raw_text: bool) -> dict[str, Any]:
        """Fit every entry; one with a fault is left out, and so is a null where a value is needed."""
        if not isinstance(tree, Section):
            raise self._not_a(tree, kind, path)
        element = typing.get_args(kind)[1] if kind is not Any else Any
        values = {}
        for key, item in tree.items.items():
            if element is not Any and isinstance(item, Scalar) and item.value is None:
                continue
            try:
                values[key] = self._value(item, element, (*path, key), of, raw_text)
            except _NoFit:
                continue
        return values

    def _scalar(self, tree: Tree, kind: Any, path: Path, raw_text: bool) -> Any:
        """Numbers are left to OmegaConf's own types; texts and booleans are stricter here than there."""
        if kind is Any and isinstance(tree, Scalar):
            number = isinstance(tree.value, (int, float)) and not isinstance(tree.value, bool)
            return tree.text if raw_text and number else tree.value
        if not isinstance(tree, Scalar) or tree.value is None:
            raise self._not_a(tree, kind, path)
        if typing.get_origin(kind) is Literal:
            choices = list(typing.get_args(kind))
            if tree.text not in choices:
                right = did_you_mean(tree.text, choices).replace("known here:", "one of")
                raise self._fault(path, f"{tree.text!r} is not {words(kind)}", right)
            return tree.text
        if kind is str:
            return tree.text
        if kind is bool and not isinstance(tree.value, bool):
            raise self._not_a(tree, kind, path)
        return tree.value

    def _not_a(self, tree: Tree, kind: Any, path: Path) -> _NoFit:
        if isinstance(tree, Scalar):
            given = "null" if tree.value is None else f"{_short(tree.text)}"
        else:
            given = "a list" if isinstance(tree, Items) else "a mapping"
        return self._fault(path, f"{given} is not {words(kind)}", f"write {words(kind)}{example(kind)}")


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
