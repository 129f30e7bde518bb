"""Rules about every text of a spec, keys included: no control characters, no secrets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from training.config import to_plain

from .. import secret
from ..reading.fit import dotted
from ..spec import JobSpec
from .report import Report

_FREE = (("command",), ("env",), ("train", "options"))
"""Texts that reach their reader through a file, never through a script: only NUL, which no process takes, is wrong."""
_SECRET_REMEDY = "the spec is written to the run folder: export it in the shell that launches, and the job inherits it"

Path = tuple[str | int, ...]


def check_texts(spec: JobSpec, report: Report) -> None:
    """Check all texts of a spec, those in lists and mappings included."""
    for path, text in _texts(to_plain(spec), ()):
        name = dotted(path)
        if found := _bad_character(text, path[:1] in _FREE or path[:2] in _FREE):
            report.add(name, found, "remove it")
        elif _is_secret(spec, path, text):
            report.add(name, "looks like a secret", _SECRET_REMEDY)
        elif secret.has_url_password(text):
            report.add(name, "a URL with a password in it", _SECRET_REMEDY)
    for path, variable in report.fitted.secrets:
        if dotted(path) not in report.fitted.bad:
            report.add(dotted(path), f"writes out the secret {variable}", _SECRET_REMEDY)


def _is_secret(spec: JobSpec, path: Path, text: str) -> bool:
    if path[:1] == ("env",) and len(path) == 2 and text and secret.name_is_secret(str(path[1])):
        return True
    return secret.has_bearer(text) or (path[:1] == ("command",) and secret.gives_secret(spec.command or [], path[1:]))


def _texts(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Every text below a value, and every key under the path of its mapping."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield path, key
            yield from _texts(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*path, index))


def _bad_character(text: str, free: bool) -> str | None:
    if text.isprintable():
        return None
    for character in text:
        code = ord(character)
        if code == 0 or 0xD800 <= code <= 0xDFFF:
            return f"holds U+{code:04X}, which no process takes"
        if not free and (code < 0x20 or 0x7F <= code <= 0x9F or code in (0x2028, 0x2029)):
            return f"holds the control character U+{code:04X}"
    return None
