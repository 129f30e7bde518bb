"""A real Slurm for tests: the fixture `cluster`, and `private_cluster` for tests that break things.

The cluster is used through its command line only, as people use it. On a machine that cannot host one the tests are
skipped with the reason, except under CI=true, where that is a failure: a test that never runs proves nothing.
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

COMMAND = Path(__file__).resolve().parent.parent / "slurm" / "cluster.py"
DEFAULT_HOME = Path("/var/lib/ddp-cluster")
CANNOT_HOST = 3
UP_SECONDS = 900  # the first time it installs packages


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    home: Path
    nodes: tuple[str, ...]

    @property
    def slurm_conf(self) -> Path:
        """What SLURM_CONF must name."""
        return self.home / "etc" / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment with SLURM_CONF, and without a surrounding job's variables."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        return {**kept, "SLURM_CONF": str(self.slurm_conf)}

    def command(self, *words: str, timeout_seconds: float = 120) -> str:
        """Runs `slurm/cluster.py WORDS` and returns what it prints; its failure fails the test."""
        done = call(self.home, *words, timeout_seconds=timeout_seconds)
        assert done.returncode == 0, f"cluster.py {' '.join(words)}: {done.stderr}"
        return done.stdout

    def run(self, *command: str, user: str | None = None, timeout_seconds: float = 60) -> str:
        """Runs a command of Slurm's from /tmp, as root or as `user`, and returns its stdout."""
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            env=self.environment,
            cwd="/tmp",
            user=user,
            group=pwd.getpwnam(user).pw_gid if user else None,
            extra_groups=[] if user else None,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr or done.stdout}"
        return done.stdout

    def submit(self, script: str, *options: str, user: str | None = None) -> str:
        """Submits a shell command with sbatch and returns its job id."""
        quiet = () if any(word.startswith("--output") for word in options) else ("--output=/dev/null",)
        return self.run("sbatch", "--parsable", *quiet, *options, f"--wrap={script}", user=user).strip()

    def job_state(self, job_id: str) -> str:
        """State of a job as squeue, or when it no longer knows it sacct, writes it; empty when neither does yet."""
        done = subprocess.run(
            ("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T"),
            capture_output=True,
            text=True,
            timeout=60,
            env=self.environment,
            check=False,
        )
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
        words = self.run(
            "sacct", "--noheader", "--allocations", f"--jobs={job_id}", "--parsable2", "--format=State"
        ).split()
        return words[0] if words else ""

    def wait_for_job(self, job_id: str, *states: str, timeout_seconds: float = 60) -> str:
        """Waits until a job is in one of `states` and returns that one."""
        found = ""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            found = self.job_state(job_id)
            if found in states:
                return found
            time.sleep(0.2)
        raise AssertionError(
            f"job {job_id} is {found or 'unknown'} after {timeout_seconds:g} s, not {' or '.join(states)}"
        )


def call(home: Path, *words: str, timeout_seconds: float = UP_SECONDS) -> subprocess.CompletedProcess[str]:
    """Runs `slurm/cluster.py WORDS` for the cluster at `home`."""
    return subprocess.run(
        (sys.executable, str(COMMAND), *words),
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        env={**os.environ, "DDP_CLUSTER_HOME": str(home)},
        check=False,
    )


def bring_up(home: Path, *options: str) -> Cluster:
    """Brings a cluster up, or skips (under CI: fails) the test where this machine cannot host one."""
    done = call(home, "up", *options)
    if done.returncode == CANNOT_HOST:
        reason = f"no Slurm here: {done.stderr.strip().splitlines()[-1]}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    assert done.returncode == 0, f"cluster.py up: {done.stderr}"
    return Cluster(home, tuple(json.loads(call(home, "status", "--json").stdout)["nodes"]))


@contextmanager
def private_cluster(home: Path, *options: str) -> Iterator[Cluster]:
    """A cluster of one's own, taken down at the end; give it node names of its own with --node-prefix."""
    try:
        yield bring_up(home, *options)
    finally:
        call(home, "down")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The default cluster, with SLURM_CONF set for the rest of the session.

    One that runs already is used and left running; otherwise the last session that uses it takes it down. Others may
    use it at the same time, so a test that breaks something does it to a `private_cluster`.
    """
    home = Path(os.environ.get("DDP_CLUSTER_HOME") or DEFAULT_HOME)
    running = bring_up(home, f"--lease={os.getpid()}")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(running.slurm_conf))
            yield running
    finally:
        running.command("release", str(os.getpid()))
