"""The site's configuration file: defaults for each cluster, under the spec.

$XDG_CONFIG_HOME/ddp-launcher/config.yaml     (else ~/.config/ddp-launcher/config.yaml)

default: laptop                    # where no profile's hosts match
profiles:
  big:
    hosts: ["login*.big.example"]  # chosen where this machine's name matches
    spec: {slurm: {partition: gpu, account: ab12}}
  laptop:
    spec: {executor: local}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from ..errors import Fault
from . import yamlfile
from .schema import did_you_mean
from .tree import Items, Origin, Scalar, Section, Tree

_NOT_IN_A_SITE = ("base", "profile", "name")


def config_path(env: Mapping[str, str]) -> Path:
    """Where the site's configuration file is, whether it exists or not (XDG Base Directory Specification)."""
    home = env.get("XDG_CONFIG_HOME", "")
    if not home.startswith("/"):
        home = os.path.join(env.get("HOME") or os.path.expanduser("~"), ".config")  # noqa: PTH111, PTH118
    return Path(home) / "ddp-launcher" / "config.yaml"


def profile_spec(
    wanted: tuple[str, Origin] | None, env: Mapping[str, str], host: str, faults: list[Fault]
) -> tuple[str, Section] | None:
    """The profile's name and its `spec` section; None without a file, or where no profile applies.

    `wanted` is a profile asked for by name, with the place that asks; else the first whose hosts match `host`, else
    the file's default. Faults of the file name the file.
    """
    path = config_path(env)
    if not os.path.exists(path):  # noqa: PTH110 - Path.exists raises where a folder may not be searched
        if wanted:
            faults.append(wanted[1].fault("profile", f"{wanted[0]!r}, but there is no {path}", "write it, or omit it"))
        return None
    tree = yamlfile.read(path, "site", faults)[1]
    if tree is None:
        return None
    _check_keys(tree, "", ("default", "profiles"), faults)
    profiles = _section(tree, "profiles", "", faults)
    for name in profiles.items:
        profile = _section(profiles, name, "profiles", faults)
        _check_keys(profile, f"profiles.{name}", ("hosts", "spec"), faults)
    return _choose(wanted or _default(tree, faults), bool(wanted), profiles, host, faults)


def _choose(
    named: tuple[str, Origin] | None, asked: bool, profiles: Section, host: str, faults: list[Fault]
) -> tuple[str, Section] | None:
    name = None if asked else _matching(profiles, host, faults)
    if name is None:
        if named is None:
            return None
        name, place = named
        if name not in profiles.items:
            field = "profile" if asked else "default"
            faults.append(place.fault(field, f"no profile {name!r}", did_you_mean(name, list(profiles.items))))
            return None
    profile = _section(profiles, name, "profiles", [])
    spec = _section(profile, "spec", f"profiles.{name}", faults)
    for key in _NOT_IN_A_SITE:
        if key in spec.items:
            right = "write it in the spec"
            faults.append(spec.keys[key].fault(f"profiles.{name}.spec.{key}", "not a site's to say", right))
            del spec.items[key], spec.keys[key]
    return name, spec


def _matching(profiles: Section, host: str, faults: list[Fault]) -> str | None:
    short = host.partition(".")[0]
    for name, profile in profiles.items.items():
        hosts = profile.items.get("hosts") if isinstance(profile, Section) else None
        for pattern in _texts(hosts, f"profiles.{name}.hosts", faults):
            if fnmatchcase(host, pattern) or fnmatchcase(short, pattern):
                return name
    return None


def _texts(tree: Tree | None, field: str, faults: list[Fault]) -> list[str]:
    if tree is None or (isinstance(tree, Scalar) and tree.value is None):
        return []
    if isinstance(tree, Items) and all(isinstance(item, Scalar) for item in tree.items):
        return [item.text for item in tree.items if isinstance(item, Scalar)]
    faults.append(tree.origin.fault(field, "not a list of host names", 'write a list such as ["login*"]'))
    return []


def _default(tree: Section, faults: list[Fault]) -> tuple[str, Origin] | None:
    value = tree.items.get("default")
    if value is None or (isinstance(value, Scalar) and value.value is None):
        return None
    if isinstance(value, Scalar):
        return value.text, value.origin
    faults.append(value.origin.fault("default", "not the name of a profile", "write one profile's name"))
    return None


def _section(tree: Section, key: str, field: str, faults: list[Fault]) -> Section:
    value = tree.items.get(key)
    if isinstance(value, Section):
        return value
    if value is not None and not (isinstance(value, Scalar) and value.value is None):
        path = f"{field}.{key}" if field else key
        faults.append(value.origin.fault(path, "not a mapping", "write keys below it, or leave it out"))
    return Section(tree.origin, {}, {})


def _check_keys(tree: Section, field: str, known: tuple[str, ...], faults: list[Fault]) -> None:
    for key, place in tree.keys.items():
        if key not in known:
            path = f"{field}.{key}" if field else key
            faults.append(place.fault(path, "unknown key", did_you_mean(key, list(known))))
