"""Rules about the job itself: its name, its payload, its environment."""

from __future__ import annotations

import re

from ..environment import is_outer_job_variable
from ..spec import JobSpec
from .report import Report

LONGEST_NAME_BYTES = 100
"""A run folder's name adds five characters to it; file systems hold 255 bytes."""

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SHELL_OWN = frozenset({"PWD", "OLDPWD", "SHLVL", "IFS", "BASH_ENV", "ENV", "_"})


def check_job(spec: JobSpec, report: Report) -> None:
    """Check everything outside of resources, slurm and train."""
    _check_name(spec.name, report)
    _check_payload(spec, report)
    _check_env(spec.env, report)
    if not spec.runs:
        report.add("runs", "empty", "give a folder, such as runs")
    elif "%" in spec.runs or "\\" in spec.runs:
        report.add(
            "runs", f"{spec.runs!r} holds % or \\", "Slurm reads these in log paths as patterns: use another name"
        )
    for index, folder in enumerate(spec.python_path):
        if not folder or ":" in folder:
            report.add(
                f"python_path[{index}]", f"{folder!r} is no folder", "write one folder an element, without a colon"
            )
    if not 1 <= spec.rendezvous.timeout_s <= 86400:
        report.add("rendezvous.timeout_s", f"{spec.rendezvous.timeout_s} s is no time to meet", "give 1 to 86400")


def _check_name(name: str, report: Report) -> None:
    """The name becomes a folder and the job's name. Slurm reads % and backslash in the log's path as a pattern."""
    if report.fitted.is_bad("name"):
        return
    wrong = None
    if not name or name.strip() != name:
        wrong = "is empty" if not name else "starts or ends with a space"
    elif name[0] in "-.":
        wrong = f"starts with {name[0]!r}"
    elif found := next((character for character in name if character in "/\\%"), None):
        wrong = f"holds {found!r}"
    elif found := next((character for character in name if not character.isprintable()), None):
        wrong = f"holds an invisible character U+{ord(found):04X}"
    elif len(name.encode("utf-8", "replace")) > LONGEST_NAME_BYTES:
        wrong = f"is longer than {LONGEST_NAME_BYTES} bytes"
    if wrong:
        report.add("name", f"{name[:60]!r} {wrong}", "it names a folder and a job: letters, digits, - and _ are safe")


def _check_payload(spec: JobSpec, report: Report) -> None:
    if spec.train is None and spec.command is None:
        report.add(
            "train", "neither train nor command is given", "add a `train:` section or a `command: [...]`", "command"
        )
    if spec.train is not None and spec.command is not None:
        report.add("command", "both train and command are given", "keep one; `train: null` takes a base's away")
    if spec.command is not None and not (spec.command and spec.command[0]):
        report.add("command", "names no program", "write a list such as [python, train.py]")


def _check_env(env: dict[str, str], report: Report) -> None:
    for name in env:
        path = f"env.{name}"
        if not _IDENTIFIER.fullmatch(name):
            report.add(path, f"{name!r} is no name of a variable", "use letters, digits and _, no digit first")
        elif is_outer_job_variable(name):
            report.add(path, "set by the launcher or by Slurm for each rank", "remove it")
        elif name in _SHELL_OWN:
            report.add(path, "belongs to the shell", "remove it")
