"""What both benchmarks need: a venv of their own with the peers in it, commands run in turn, medians, a table."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
VENV = ROOT / ".bench-venv"
PEERS = ("lightning==2.6.6", "accelerate==1.15.0")
PIP_TIMEOUT_S = 1800
TERM_GRACE_S = 15.0
_NOT_PASSED_ON = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables that would change what is measured: without compiled files on disk each start would compile anew."""

T = TypeVar("T")


class Failed(Exception):
    """A measured command failed; the text says which and shows the end of its output."""


@dataclass(frozen=True)
class Finished:
    """A command that ended well, with times from the clock that all processes of this machine share."""

    started: float
    """time.monotonic() just before the command was started, in seconds."""
    seconds: float
    output: str


def bin_folder() -> Path:
    """The `bin` of the benchmarks' venv, made or made anew when its requirements have changed.

    Errors: SystemExit when pip fails.
    """
    stamp, wanted = VENV / ".installed", _fingerprint()
    if not (stamp.exists() and stamp.read_text() == wanted):
        print(f"making {VENV} with {', '.join(PEERS)} (once; some minutes)", file=sys.stderr, flush=True)
        _install()
        stamp.write_text(wanted)
    return VENV / "bin"


def _fingerprint() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    parts = [project["dependencies"], project["optional-dependencies"]["examples"], project["scripts"], PEERS]
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return hashlib.sha256(json.dumps([parts, constraints, str(ROOT)]).encode()).hexdigest()


def _install() -> None:
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constrained = ["--constraint", str(ROOT / "constraints.txt"), "--editable", f"{ROOT}[examples]", *PEERS]
    for command in ([sys.executable, "-m", "venv", "--clear", str(VENV)], [*pip, *constrained]):
        try:
            code = subprocess.run(command, timeout=PIP_TIMEOUT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if code != 0:
            sys.exit(f"{' '.join(command)}: failed (exit code {code}); {VENV} is not complete")


def environment(scratch: Path, **more: str) -> dict[str, str]:
    """The environment of every measured command: one thread a process, no settings of the user's for any peer."""
    env = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    env["PATH"] = f"{VENV / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
    ours = {"OMP_NUM_THREADS": "1", "HF_HOME": str(scratch / "hf"), "XDG_CONFIG_HOME": str(scratch / "config")}
    return env | ours | more


def run(command: Sequence[str], env: Mapping[str, str], folder: Path, timeout_s: float) -> Finished:
    """Run a command to its end in `folder`. It and all that it started are ended after `timeout_s`.

    Errors: Failed for an exit code other than 0, or the time-out.
    """
    late = threading.Event()

    def too_late() -> None:
        late.set()
        _end_tree(child)

    with tempfile.TemporaryFile() as out:
        started = time.monotonic()
        child = subprocess.Popen(
            command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        timer = threading.Timer(timeout_s, too_late)
        timer.start()
        try:
            code = child.wait()  # with a time-out of its own it would poll, and round to 50 ms
        except BaseException:
            _end_tree(child)
            raise
        finally:
            seconds = time.monotonic() - started
            timer.cancel()
            timer.join()
        out.seek(0)
        text = out.read().decode(errors="replace")
    if code != 0 or late.is_set():
        how = f"not done after {timeout_s:.0f} s" if late.is_set() else f"exit code {code}"
        raise Failed(f"{' '.join(command)}: {how}\n{text[-2000:]}")
    return Finished(started, seconds, text)


def _end_tree(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM for a command, and SIGKILL for whatever is left of it and its descendants."""
    family = _descendants(child.pid)
    child.terminate()
    deadline = time.monotonic() + TERM_GRACE_S
    while Path(f"/proc/{child.pid}").exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in family | _descendants(child.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _descendants(root: int) -> set[int]:
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(text.rpartition(")")[2].split()[1])
    family = {root}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return family


def free_port() -> int:
    """A TCP port of the loopback address that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def in_turn(ways: Mapping[str, Callable[[], T]], rounds: int) -> tuple[dict[str, list[T]], dict[str, str]]:
    """Measure A B C, A B C, ... after one round that does not count: compiled files are then there for all.

    Returns the results of the ways that never failed, and why each of the others did; that one is left out from then
    on. The end of its output goes to standard error.
    """
    results: dict[str, list[T]] = {name: [] for name in ways}
    failed: dict[str, str] = {}
    for number in range(rounds + 1):
        print(f"round {number}/{rounds}" if number else "warm-up", file=sys.stderr, flush=True)
        for name, measure in ways.items():
            if name in failed:
                continue
            try:
                result = measure()
            except Failed as error:
                failed[name] = str(error).partition("\n")[0]
                print(f"{name} failed: {error}", file=sys.stderr, flush=True)
                continue
            if number:
                results[name].append(result)
    return {name: values for name, values in results.items() if name not in failed}, failed


def ratios(results: Mapping[str, Sequence[float]], reference: str) -> dict[str, float]:
    """Median over the rounds of a way's time over the reference's in the same round, so that drift cancels."""
    if reference not in results:
        return {}
    base = results[reference]
    return {
        name: statistics.median(a / b for a, b in zip(values, base, strict=True)) for name, values in results.items()
    }


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder, removed at the end."""
    return tempfile.TemporaryDirectory(prefix="ddp-launcher-bench-", ignore_cleanup_errors=True)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: first column to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    print(f"\n{title}")
    for row in [head, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells]))


def json_line(name: str, rounds: int, values: Mapping[str, Any]) -> None:
    """Print all figures and the machine that they are from as one line of JSON."""
    machine = {"cores": os.cpu_count(), "python": _python(), "load": round(os.getloadavg()[0], 2)}
    versions = {"torch": _version("torch"), **{p.partition("==")[0]: p.partition("==")[2] for p in PEERS}}
    print("\n" + json.dumps({"benchmark": name, "rounds": rounds, "machine": machine, "versions": versions, **values}))


def _python() -> str:
    settings = (VENV / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    return next(line.partition("=")[2].strip() for line in settings if line.startswith("version"))


def _version(package: str) -> str:
    found = sorted(VENV.glob(f"lib/python*/site-packages/{package}-*.dist-info"))
    return found[0].name.split("-")[1].removesuffix(".dist") if found else "?"


def remove(folder: Path) -> None:
    """Remove a folder of a measured run; what is still being written to it does not matter."""
    shutil.rmtree(folder, ignore_errors=True)
