"""Installing Debian's packages without starting what they bring."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from devcluster.shell import ClusterError, UnavailableError, clean_environment, run

PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
ACCOUNTING_PROGRAMS = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server"}
SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
POLICY = Path("/usr/sbin/policy-rc.d")


def missing(accounting: bool) -> list[str]:
    """Debian packages whose programs are not there."""
    wanted = {**PROGRAMS, **(ACCOUNTING_PROGRAMS if accounting else {})}
    lacking = {package for program, package in wanted.items() if shutil.which(program, path=SEARCH_PATH) is None}
    return sorted(lacking)


def install(accounting: bool, say: Callable[[str], None]) -> None:
    """Installs what is missing; a no-op without network traffic when nothing is."""
    packages = missing(accounting)
    if not packages:
        return
    if shutil.which("apt-get") is None:
        lacking = ", ".join(packages)
        raise UnavailableError(f"{lacking} not installed, and no apt-get: this needs Debian 12 or a relative")
    say(f"installing {' '.join(packages)} ({platform.freedesktop_os_release().get('PRETTY_NAME', 'unknown system')})")
    try:
        _apt_get("update", timeout_seconds=300)
        with no_service_starts():
            _apt_get("-y", "--no-install-recommends", "install", *packages, timeout_seconds=900)
    except ClusterError as error:
        raise UnavailableError(str(error)) from None
    if still := missing(accounting):
        raise UnavailableError(f"apt-get succeeded, but the programs of {', '.join(still)} are still not on PATH")


def _apt_get(*words: str, timeout_seconds: float) -> None:
    """apt-get that asks nothing and waits for whoever else is installing."""
    environment = clean_environment(DEBIAN_FRONTEND="noninteractive")
    command = ("apt-get", "-oDPkg::Lock::Timeout=300", "-qq", *words)
    run(*command, timeout_seconds=timeout_seconds, environment=environment)


@contextmanager
def no_service_starts() -> Iterator[None]:
    """Debian asks policy-rc.d before a package starts its service; for as long as this lasts the answer is no.

    A machine that has a policy of its own keeps it beside ours in the meantime.
    """
    aside = POLICY.with_name("policy-rc.d.before-ddp-cluster")
    fresh = POLICY.with_name("policy-rc.d.ddp-cluster")
    if POLICY.exists() and not aside.exists():
        shutil.copy2(POLICY, aside)
    fresh.write_text("#!/bin/sh\nexit 101\n")
    fresh.chmod(0o755)
    fresh.replace(POLICY)
    try:
        yield
    finally:
        if aside.exists():
            aside.replace(POLICY)
        else:
            POLICY.unlink(missing_ok=True)
