"""From a spec file and overrides to a typed, valid JobSpec.

Layers, lowest first: the dataclasses' defaults, the site's profile, the specs under `base:`, the file, overrides.
The merged tree is fitted to the dataclasses, OmegaConf resolves `${...}` and types, and the rules look at the result.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from training.config import from_plain

from . import validate
from .errors import Fault, SpecError
from .reading import layers, omega, site
from .reading.fit import fit
from .reading.tree import Origin, Scalar, Section, printable
from .spec import JobSpec


@dataclass(frozen=True)
class Resolved:
    """A valid spec, and where it came from."""

    path: Path
    overrides: list[str]
    source_text: str
    """The spec file as the user wrote it."""
    spec: JobSpec
    origins: dict[str, Origin]
    """Place of each leaf by its dotted path in YAML keys; a list is one leaf. Absent: a default."""
    _plain: dict[str, Any]

    def plain(self) -> dict[str, Any]:
        """All values in YAML keys, defaults and nulls included, so that they outlive a change of defaults."""
        return self._plain

    def origin(self, path: str) -> Origin:
        """Where the value of a leaf came from."""
        return self.origins.get(path, Origin("default", ""))

    def dump(self) -> str:
        """`plain()` as YAML text, which any YAML reader reads back equal."""
        return dumped(self._plain)


def dumped(values: dict[str, Any]) -> str:
    """YAML text of plain values."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True, width=100))


def resolve(
    path: Path, overrides: list[str], profile: str | None = None, env: Mapping[str, str] | None = None
) -> Resolved:
    """Read, merge, type and validate a spec.

    `profile` names a profile of the site's file, before the spec's own `profile`. `env` stands in for the process's
    environment, for interpolations and for finding the site's file. Errors: SpecError with all faults found.
    """
    env = os.environ if env is None else env
    faults: list[Fault] = []
    text, tree = _merged(path, overrides, profile, env, faults)
    if tree is None:
        raise SpecError(faults)
    fitted = fit(tree, JobSpec, Origin("spec", str(path)), faults)
    plain = omega.resolve(fitted, env, faults)
    spec: JobSpec = from_plain(JobSpec, plain)
    validate.check(spec, fitted, faults)
    if faults:
        raise SpecError(_ordered(faults, path))
    return Resolved(path, list(overrides), text, spec, fitted.origins, plain)


def _merged(
    path: Path, overrides: list[str], profile: str | None, env: Mapping[str, str], faults: list[Fault]
) -> tuple[str, Section | None]:
    """All layers but the defaults as one tree, and the file's own text."""
    text, tree = layers.read_with_bases(path, faults)
    above = layers.override_tree(overrides, faults)
    if tree is None:
        return text, None
    tree = layers.merge(tree, above)
    chosen = site.profile_spec(_wanted_profile(tree, profile, faults), env, os.uname().nodename, faults)
    if chosen is not None:
        name, below = chosen
        tree = layers.merge(below, tree)
        tree.items["profile"] = Scalar(below.origin, name, name)
        tree.keys["profile"] = below.origin
    return text, tree


def _wanted_profile(tree: Section, profile: str | None, faults: list[Fault]) -> tuple[str, Origin] | None:
    if profile is not None:
        return profile, Origin("override", "--profile")
    value = tree.items.get("profile")
    if not isinstance(value, Scalar) or value.value is None:
        return None
    if "${" in value.text:
        del tree.items["profile"]
        faults.append(value.origin.fault("profile", "cannot hold an interpolation", "write the profile's name"))
        return None
    return value.text, value.origin


def _ordered(faults: list[Fault], path: Path) -> list[Fault]:
    """By place in the file, the spec's own faults first; each one once."""
    return sorted(
        dict.fromkeys(faults),
        key=lambda fault: (fault.file != printable(str(path)), fault.file, fault.line, fault.column),
    )
