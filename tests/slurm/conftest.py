"""Makes the cluster's package importable, and gives these tests one cluster of their own to break."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusterfix import Cluster, private_cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "slurm"))


@pytest.fixture(scope="session")
def own() -> Iterator[Cluster]:
    from tests.slurm.probes import HOME, OPTIONS

    with private_cluster(HOME, *OPTIONS) as cluster:
        yield cluster
