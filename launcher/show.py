"""The text of `launch show`: the resolved spec as YAML, with the place that each value came from."""

from __future__ import annotations

from typing import Any

import yaml

from . import secret
from .specfile import Resolved

_COMMENT_COLUMN = 44


def text(resolved: Resolved) -> str:
    """YAML that reads back as `resolved.plain()`, but for secrets, which are masked. Each leaf has a comment:
    default, site config.yaml:3, base.yaml:7, spec.yaml:12, or override.
    """
    lines: list[str] = []
    _section(resolved.plain(), (), resolved, lines)
    return "\n".join(lines) + "\n"


def _section(values: dict[str, Any], path: tuple[str, ...], resolved: Resolved, lines: list[str]) -> None:
    indent = "  " * len(path)
    for key, value in values.items():
        here = (*path, key)
        name = _flow(key)
        if isinstance(value, dict) and value:
            lines.append(f"{indent}{name}:")
            _section(value, here, resolved, lines)
            continue
        line = f"{indent}{name}: {_flow(_masked(key, value))}"
        lines.append(f"{line:<{_COMMENT_COLUMN}}  # {resolved.origin('.'.join(here))}")


def _masked(key: str, value: Any) -> Any:
    """The value, or a copy in which each text under the name of a secret is masked."""
    if isinstance(value, list):
        return [_masked(key, item) for item in value]
    if isinstance(value, dict):
        return {name: _masked(name, item) for name, item in value.items()}
    return secret.MASK if value and isinstance(value, str) and secret.name_is_secret(key) else value


def _flow(value: Any) -> str:
    """A value on one line of YAML. A text with line breaks is double-quoted, where they are written as \\n."""
    if isinstance(value, list):
        return f"[{', '.join(_flow(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_flow(key)}: {_flow(item)}' for key, item in value.items())}}}"
    style = '"' if isinstance(value, str) and not value.isprintable() else None
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    shown = yaml.dump(
        [value], Dumper=dumper, default_flow_style=True, default_style=style, allow_unicode=True, width=2**30
    )
    return str(shown).strip()[1:-1]
