"""Shared by all tests: the real Slurm, and an environment without this machine's own settings."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest_plugins = ["tests.clusterfix"]


@pytest.fixture(autouse=True, scope="session")
def no_settings_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A site file, an outer job or a W&B key of whoever runs the tests must not change what they see."""
    gone = [name for name in os.environ if name.startswith(("SLURM", "SBATCH", "WANDB_"))]
    with pytest.MonkeyPatch.context() as patch:
        for name in gone:
            patch.delenv(name)
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield
