"""Shared by the tests of the launcher: specs written into a folder of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher import specfile
from launcher.errors import SpecError

Resolve = Callable[..., specfile.Resolved]
Faults = Callable[..., list[str]]


@pytest.fixture
def resolve(tmp_path: Path) -> Resolve:
    """Resolve a spec text: resolve(text, *overrides, profile=None, env={...}). No site file but the test's own."""

    def resolve_text(
        text: str | bytes, *overrides: str, profile: str | None = None, env: dict[str, str] | None = None
    ) -> specfile.Resolved:
        path = tmp_path / "spec.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return specfile.resolve(path, list(overrides), profile, {"HOME": str(tmp_path), **(env or {})})

    return resolve_text


@pytest.fixture
def faults(resolve: Resolve, tmp_path: Path) -> Faults:
    """The faults of a spec text as they are printed, without the test's folder; [] for a good spec."""

    def faults_of(text: str | bytes, *overrides: str, **how: Any) -> list[str]:
        try:
            resolve(text, *overrides, **how)
        except SpecError as error:
            return [str(fault).replace(f"{tmp_path}/", "") for fault in error.faults]
        return []

    return faults_of
