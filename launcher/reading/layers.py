"""The layers of a spec, one over the other: the specs it builds on (`base:`), the file itself, overrides."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import Fault
from . import yamlfile
from .tree import Items, Layer, Origin, Scalar, Section, Tree, core_value, printable

_MOST_BASES = 20
_MOST_KEYS = 20


def read_with_bases(path: Path, faults: list[Fault]) -> tuple[str, Section | None]:
    """A spec file over the specs it names under `base:`, as (the file's own text, the merged tree).

    A base's path is relative to the file that names it; of several, a later one wins over an earlier one. None, with
    `faults` extended, when the file itself cannot be read.
    """
    return _read(path, "spec", faults, [])


def _read(path: Path, layer: Layer, faults: list[Fault], chain: list[str]) -> tuple[str, Section | None]:
    text, tree = yamlfile.read(path, layer, faults)
    if tree is None:
        return text, None
    place = tree.keys.get("base", tree.origin)
    bases = _base_paths(tree.items.pop("base", None), path, faults)
    tree.keys.pop("base", None)
    chain = [*chain, os.path.realpath(path)]
    below = Section(tree.origin, {}, {})
    for base in bases:
        if os.path.realpath(base) in chain:
            names = " -> ".join(Path(name).name for name in [*chain, str(base)])
            faults.append(place.fault("base", f"builds on itself: {names}", "remove one of these `base` lines"))
        elif len(chain) > _MOST_BASES:
            faults.append(place.fault("base", f"a chain of more than {_MOST_BASES} files", "shorten it"))
        elif not os.path.exists(base):  # noqa: PTH110 - Path.exists raises on a name that is too long
            faults.append(place.fault("base", f"no such file: {base}", f"paths are relative to {path.parent}/"))
        else:
            found = _read(base, "base", faults, chain)[1]
            below = merge(below, found) if found else below
    return text, merge(below, tree)


def _base_paths(tree: Tree | None, path: Path, faults: list[Fault]) -> list[Path]:
    if tree is None or (isinstance(tree, Scalar) and tree.value is None):
        return []
    paths = []
    for item in tree.items if isinstance(tree, Items) else [tree]:
        if not isinstance(item, Scalar) or not item.text or "\0" in item.text:
            faults.append(item.origin.fault("base", "not the path of a file", "write a path, or a list of paths"))
        elif "${" in item.text:
            faults.append(item.origin.fault("base", "cannot hold an interpolation", "write the path itself"))
        else:
            try:
                paths.append(path.parent / Path(item.text).expanduser())
            except RuntimeError:
                faults.append(item.origin.fault("base", f"no home folder for {item.text!r}", "write the path in full"))
    return paths


def merge(below: Section, above: Section) -> Section:
    """`above` over `below`: mappings merge key by key; anything else, a list or a null too, replaces what is below."""
    merged = Section(above.origin, dict(below.items), dict(below.keys))
    for key, value in above.items.items():
        old = merged.items.get(key)
        both = isinstance(old, Section) and isinstance(value, Section)
        merged.items[key] = merge(old, value) if both else value  # type: ignore[arg-type]
        merged.keys[key] = above.keys[key]
    return merged


def override_tree(overrides: list[str], faults: list[Fault]) -> Section:
    """Command-line overrides `key.path=value` as one tree, a later one over an earlier one.

    A value that starts with a bracket, a brace or a quote is YAML; any other is one plain scalar, kept to the letter.
    `key=` is a null.
    """
    result = Section(Origin("override", "command line"), {}, {})
    for override in overrides:
        path, equals, text = override.partition("=")
        # The value stays out of the place's name: it may be a secret.
        origin = Origin("override", f"override {_shown(path)}")
        keys = path.split(".")
        if not equals or not all(keys) or len(keys) > _MOST_KEYS:
            faults.append(origin.fault("override", "not in the form key=value", "write train.optim.base_lr=2e-3"))
            continue
        if bracket := re.search(r"\[[^]]*\]|\.\d+(\.|$)", path):
            wrong = f"one element of a list ({bracket[0]}) cannot be overridden"
            faults.append(origin.fault(path, wrong, f"give the whole list: {path[: bracket.start()]}=[a, b]"))
            continue
        tree = _override_value(text, origin, faults)
        if tree is not None:
            for key in reversed(keys):
                tree = Section(origin, {key: tree}, {key: origin})
            assert isinstance(tree, Section)
            result = merge(result, tree)
    return result


def _override_value(text: str, origin: Origin, faults: list[Fault]) -> Tree | None:
    if text.lstrip()[:1] in ("[", "{", '"', "'"):
        return yamlfile.parse(text, origin, faults)
    return Scalar(origin, text, core_value(text))


def _shown(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
