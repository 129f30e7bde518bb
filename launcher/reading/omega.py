"""The only module that knows OmegaConf: its structured configs type the values, its grammar resolves `${...}`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import OmegaConf, ValidationError
from omegaconf.errors import GrammarParseError, InterpolationToMissingValueError, OmegaConfBaseException
from omegaconf.resolvers import oc

from ..errors import Fault
from ..secret import name_is_secret
from ..spec import JobSpec
from .fit import Fitted, dotted
from .schema import Field, example, fields_of, words

Keys = tuple[str, ...]
Path = tuple[str | int, ...]

_ESCAPE = "name a key of the spec in full, as ${train.seed}; to keep the text as it is, write \\${...}"


def resolve(fitted: Fitted, env: Mapping[str, str], faults: list[Fault]) -> dict[str, Any]:
    """Every value of a JobSpec as plain data in YAML keys, interpolations resolved; `${oc.env:NAME}` reads `env`.

    Each value that fails is added to `faults`, and its field keeps its default.
    """
    with _environment(env) as read:
        return _resolve(fitted, faults, read)


def _resolve(fitted: Fitted, faults: list[Fault], read: list[str]) -> dict[str, Any]:
    config = OmegaConf.structured(_twin(JobSpec, (), fitted.sections))
    values = {keys: value for keys, value in fitted.values.items() if not fitted.is_lost(dotted(keys))}
    for path, keys, text in fitted.interpolations:
        if fitted.is_lost(dotted(path)):
            continue
        try:
            OmegaConf.create({"text": text})
        except GrammarParseError as error:
            fitted.add_fault(faults, dotted(path), f"{text!r} is no interpolation ({_reason(error)})", _ESCAPE)
            _lose(values, keys, path, keys, fitted)
    for keys, value in values.items():
        if not fitted.is_lost(dotted(keys)):
            _assign(config, keys, value, fitted, faults)
    failed = []
    for path, keys, text in fitted.interpolations:
        if fitted.is_lost(dotted(path)):
            continue
        read.clear()
        if not _resolves(config, path, keys, text, fitted, faults, read):
            failed.append((path, keys))
        fitted.secrets += [(path, name) for name in dict.fromkeys(read) if name_is_secret(name)]
    for path, keys in failed:
        _lose(_parent(config, keys), keys[-1], path, keys, fitted)
    plain: Any = OmegaConf.to_container(config, resolve=False)
    for keys in {keys: None for _, keys, _ in fitted.interpolations}:
        lost = fitted.is_lost(dotted(keys))
        _parent(plain, keys)[keys[-1]] = _field(keys).default() if lost else _value_at(config, keys)
    return dict(plain)


def _lose(parent: Any, key: Any, path: Path, keys: Keys, fitted: Fitted) -> None:
    """Take a value that failed out of its mapping. In a list, or where it is the field itself, the field is lost.

    `parent[key]` holds the field at `keys`; the value that failed is at `path`, in it.
    """
    entry = path
    while len(entry) > len(keys) and isinstance(entry[-1], int):
        entry = entry[:-1]
    fitted.bad.add(dotted(entry))
    if len(entry) > len(keys):
        container = parent[key]
        for part in entry[len(keys) : -1]:
            container = container[part]
        if entry[-1] in list(container):  # a second fault in one list finds the entry gone
            del container[entry[-1]]


def _twin(section: type[Any], path: Keys, present: set[Keys]) -> type[Any]:
    """A section's dataclass in YAML keys, for OmegaConf: without the optional sections that the spec does not have.

    A key such as `global` is no Python name, so the twin has no generated methods.
    """
    members: dict[str, Any] = {}
    hints: dict[str, Any] = {}
    for key, known in fields_of(section).items():
        here = (*path, key)
        if not known.is_section:
            hints[key] = known.hint
            members[key] = dataclasses.field(default_factory=known.default)
        elif known.optional and here not in present:
            hints[key], members[key] = Any, None
        else:
            hints[key] = _twin(known.kind, here, present)
            members[key] = dataclasses.field(default_factory=hints[key])
    body = {**members, "__annotations__": hints, "__init__": _set_defaults}
    return dataclasses.dataclass(init=False, repr=False, eq=False)(type(section.__name__, (), body))


def _set_defaults(self: Any) -> None:
    for item in dataclasses.fields(self):
        factory = item.default_factory
        setattr(self, item.name, item.default if factory is dataclasses.MISSING else factory())


def _assign(config: Any, keys: Keys, value: Any, fitted: Fitted, faults: list[Fault]) -> None:
    """Set one field; OmegaConf converts the value to the field's type, or refuses it."""
    try:
        OmegaConf.update(_parent(config, keys), keys[-1], value, merge=False)
    except (OmegaConfBaseException, OverflowError):
        kind = _field(keys).kind
        wrong, right = f"{value!r} is not {words(kind)}", f"write {words(kind)}{example(kind)}"
        fitted.add_fault(faults, dotted(keys), wrong, right)


def _resolves(
    config: Any, path: Path, keys: Keys, text: str, fitted: Fitted, faults: list[Fault], read: list[str]
) -> bool:
    """Whether the interpolation at `path` gives a value of its type; else with a fault. `read`: variables it read."""
    right = _ESCAPE
    try:
        for key in path:
            config = config[key]
        if OmegaConf.is_config(config):
            OmegaConf.to_container(config, resolve=True)
        return True
    except InterpolationToMissingValueError:
        return False  # the missing value has its own fault
    except RecursionError:
        wrong = f"{text!r} refers to itself"
    except ValidationError as error:
        kind = _field(keys).kind
        wrong, right = f"{text!r}: {_reason(error)}", f"it must give {words(kind)}"
    except (OmegaConfBaseException, ValueError, TypeError, LookupError, AttributeError) as error:
        wrong = f"{text!r}: {_reason(error)}"
        if "Environment variable" in wrong:
            right = "export it, or give a default: ${oc.env:NAME,default}"
    if hidden := [name for name in read if name_is_secret(name)]:
        wrong, right = f"{text!r}: reads {hidden[0]}, a secret, and does not fit here", "give the value itself"
    fitted.add_fault(faults, dotted(path), wrong, right)
    return False


def _value_at(config: Any, keys: Keys) -> Any:
    value = _parent(config, keys)[keys[-1]]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _parent(tree: Any, keys: Keys) -> Any:
    for key in keys[:-1]:
        tree = tree[key]
    return tree


def _field(keys: Keys) -> Field:
    section: Any = JobSpec
    for key in keys[:-1]:
        section = fields_of(section)[key].kind
    return fields_of(section)[keys[-1]]


def _reason(error: BaseException) -> str:
    """The first line of OmegaConf's message, without the wrapping of what a resolver raised."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    raised = re.fullmatch(r"\w+ raised while resolving interpolation: [\"']?(.*?)[\"']?", lines[0])
    return raised[1] if raised else re.sub(r"^While dereferencing interpolation '.*?': ", "", lines[0])


@contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[list[str]]:
    """Let `${oc.env:NAME}` read `env`. Gives the list to which each name is added as it is read."""
    asked: list[str] = []

    def read(name: str, *default: Any) -> Any:
        asked.append(name)
        if name in env or not default:
            return env[name] if name in env else _not_set(name)
        return None if default[0] is None else str(default[0])

    OmegaConf.register_resolver("oc.env", read, replace=True, annotation_validation="off")
    try:
        yield asked
    finally:
        OmegaConf.register_resolver("oc.env", oc.env, replace=True, annotation_validation="off")


def _not_set(name: str) -> str:
    raise KeyError(f"Environment variable '{name}' not found")
