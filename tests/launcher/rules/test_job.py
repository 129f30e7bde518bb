"""Proves the rules on name, payload and environment: what is unsafe is refused, what only looks odd is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Resolve = Callable[..., Any]
Faults = Callable[..., list[str]]

COMMAND = "name: x\ncommand: [a]\n"


@pytest.mark.parametrize("name", ["a b", 'it\'s "x"', "$(id)`id`", "x[a]{b}", "größe-7", "a.b", "a:b", "~x", "é" * 50])
def test_a_name_may_look_odd(name: str, resolve: Resolve) -> None:
    assert resolve(COMMAND, f"name={name}").spec.name == name


NAMES = {
    '""': "'' is empty",
    "-x": "'-x' starts with '-'",
    ".x": "'.x' starts with '.'",
    "..": "'..' starts with '.'",
    "a/b": "'a/b' holds '/'",
    "a\\b": "'a\\\\b' holds '\\\\'",
    "a%j": "'a%j' holds '%'",
    " a": "' a' starts or ends with a space",
    "a\u00a0": "'a\\xa0' starts or ends with a space",
    "é" * 51: f"'{'é' * 51}' is longer than 100 bytes",
    "a\tb": "holds the control character U+0009; remove it",
    "a\u202eb": "'a\\u202eb' holds an invisible character U+202E",
}


@pytest.mark.parametrize(("name", "fault"), NAMES.items(), ids=[ascii(name) for name in NAMES])
def test_an_unsafe_name_is_refused(name: str, fault: str, faults: Faults) -> None:
    found = faults(COMMAND, f"name={name}")
    assert len(found) == 1
    assert found[0].startswith(f"override name: name: {fault}")


def test_there_is_exactly_one_payload(faults: Faults) -> None:
    assert faults("name: x\n") == [
        "spec.yaml: train: neither train nor command is given; add a `train:` section or a `command: [...]`"
    ]
    assert faults("name: x\ncommand: [a]\ntrain: {task: text, epochs: 1, batch: {per_rank: 1}}\n") == [
        "spec.yaml:2:10: command: both train and command are given; keep one; `train: null` takes a base's away"
    ]
    empty = "names no program; write a list such as [python, train.py]"
    assert faults("name: x\ncommand: []\n") == [f"spec.yaml:2:10: command: {empty}"]
    assert faults("name: x\ncommand: ['', a]\n") == [f"spec.yaml:2:10: command: {empty}"]


def test_a_payload_of_the_wrong_type_is_told_once(faults: Faults) -> None:
    assert faults("name: x\ntrain: 3\n") == [
        "spec.yaml:2:8: train: '3' is not a mapping; write a mapping: keys below it, indented"
    ]


def test_names_of_variables(faults: Faults) -> None:
    found = faults(COMMAND + "env:\n  OK_1: a\n  1A: b\n  a b: c\n  RANK: 1\n  SLURM_JOB_ID: 2\n  PWD: x\n  ÄB: y\n")
    assert [[*line.split(":")[1:4], line.split(";")[1]] for line in found] == [
        ["5", "7", " env.1A", " use letters, digits and _, no digit first"],
        ["6", "8", " env.a b", " use letters, digits and _, no digit first"],
        ["7", "9", " env.RANK", " remove it"],
        ["8", "17", " env.SLURM_JOB_ID", " remove it"],
        ["9", "8", " env.PWD", " remove it"],
        ["10", "7", " env.ÄB", " use letters, digits and _, no digit first"],
    ]


def test_folders(faults: Faults) -> None:
    assert faults(COMMAND, 'runs=""') == ["override runs: runs: empty; give a folder, such as runs"]
    assert faults(COMMAND, "runs=a%j")[0].startswith("override runs: runs: 'a%j' holds % or \\; ")
    assert len(faults(COMMAND, "python_path=['', 'a:b', ok]")) == 2


def test_a_rendezvous_takes_time(faults: Faults) -> None:
    assert faults(COMMAND, "rendezvous.timeout_s=0") == [
        "override rendezvous.timeout_s: rendezvous.timeout_s: 0 s is no time to meet; give 1 to 86400"
    ]
