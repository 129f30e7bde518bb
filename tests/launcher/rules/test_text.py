"""Proves that control characters and secrets are refused in any text, and where newlines are free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Resolve = Callable[..., Any]
Faults = Callable[..., list[str]]

TRAIN = "name: x\ntrain: {task: text, epochs: 1, batch: {per_rank: 1}}\n"
COMMAND = "name: x\ncommand: [a]\n"


@pytest.mark.parametrize(
    "field",
    [
        "slurm.partition",
        "slurm.gres",
        "slurm.constraint",
        "runs",
        "rendezvous.interface",
        "train.task",
        "wandb.project",
        "train.checkpoint.folder",
    ],
)
@pytest.mark.parametrize("character", ["\n", "\x1b", "\x7f", "\x85", "\u2028"], ids=ascii)
def test_control_characters_are_refused_in_fields(field: str, character: str, faults: Faults) -> None:
    found = faults(TRAIN, f"{field}=a{character}b")
    assert f"override {field}: {field}: holds the control character U+{ord(character):04X}; remove it" in found


def test_control_characters_are_refused_in_lists_and_mappings(faults: Faults) -> None:
    text = (
        COMMAND + 'slurm: {setup: [ok, "a\\nb"], srun_options: ["-l\\r"], options: {mail-user: "a\\tb", "x\\ny": c}}\n'
        'python_path: ["a\\nb"]\n'
    )
    assert [line.split(": ", 1)[1].split(";")[0] for line in faults(text) if "control character" in line] == [
        "slurm.setup[1]: holds the control character U+000A",
        "slurm.srun_options[0]: holds the control character U+000D",
        "slurm.options: holds the control character U+000A",
        "slurm.options.mail-user: holds the control character U+0009",
        "python_path[0]: holds the control character U+000A",
    ]


def test_what_reaches_its_reader_through_a_file_is_free_but_for_nul(resolve: Resolve, faults: Faults) -> None:
    value = "a\n\t\x1b$(id) `id` \"' \\"
    assert resolve(COMMAND, f"env.A={value}").spec.env == {"A": value}
    assert resolve(TRAIN, "train.task=m:T", f"train.options.a={value}").spec.train.options == {"a": value}
    resolved = resolve('name: x\ncommand:\n- sh\n- -c\n- |\n  echo "$1"\n  exit 3\n- "\\e"\n')
    assert resolved.spec.command == ["sh", "-c", 'echo "$1"\nexit 3\n', "\x1b"]
    assert faults('name: x\ncommand: [a, "b\\0c"]\nenv: {A: "\\0"}\n') == [
        "spec.yaml:2:14: command[1]: holds U+0000, which no process takes; remove it",
        "spec.yaml:3:10: env.A: holds U+0000, which no process takes; remove it",
    ]


def test_a_text_that_is_no_unicode_is_refused(faults: Faults) -> None:
    assert faults(COMMAND, "env.A=x\udc80") == [
        "override env.A: env.A: holds U+DC80, which no process takes; remove it"
    ]


REMEDY = "the spec is written to the run folder: export it in the shell that launches, and the job inherits it"


def test_secrets_are_refused_with_the_remedy_and_without_their_value(faults: Faults) -> None:
    text = (
        COMMAND
        + "env:\n  WANDB_API_KEY: hunter2\n  HF_TOKEN: '${oc.env:HF_TOKEN}'\n  EMPTY_TOKEN: ''\n  DSN: pg://me:hunter2@db/x\n"
    )
    found = faults(text, "env.DB_PASSWORD=hunter2", env={"HF_TOKEN": "hunter2"})
    assert found == [
        f"spec.yaml:4:18: env.WANDB_API_KEY: looks like a secret; {REMEDY}",
        f"spec.yaml:5:13: env.HF_TOKEN: looks like a secret; {REMEDY}",
        f"spec.yaml:7:8: env.DSN: a URL with a password in it; {REMEDY}",
        f"override env.DB_PASSWORD: env.DB_PASSWORD: looks like a secret; {REMEDY}",
    ]
    assert "hunter2" not in "".join(found)


def test_an_interpolation_may_not_write_a_secret_out(faults: Faults) -> None:
    text = "name: x\ncommand: [a, '--key=${oc.env:API_KEY}']\n"
    assert faults(text, env={"API_KEY": "hunter2"}) == [
        f"spec.yaml:2:14: command[1]: writes out the secret API_KEY; {REMEDY}"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "a ${ oc.env : 'API_KEY',x}",
        "${oc.env:${env.N}}",
        "${oc.decode:${oc.env:API_KEY}}",
        "${oc.decode:'${oc.env:API_KEY}'}",
        "${oc.env:HOME,${oc.env:API_KEY}}",
    ],
)
def test_a_secret_is_known_by_the_variable_that_is_read_however_it_is_named(faults: Faults, text: str) -> None:
    spec = f'name: x\ncommand: [a, "{text}"]\nenv: {{N: API_KEY}}\n'
    found = faults(spec, env={"API_KEY": "hunter2", "HOME": "/h"})
    assert found == [f"spec.yaml:2:14: command[1]: writes out the secret API_KEY; {REMEDY}"]


def test_a_fault_of_a_value_that_is_a_secret_does_not_show_it(faults: Faults) -> None:
    found = faults(COMMAND, "resources.nodes=${oc.env:API_KEY}", env={"API_KEY": "hunter2"})
    assert found == [
        "override resources.nodes: resources.nodes: '${oc.env:API_KEY}': reads API_KEY, a secret, and does not fit "
        "here; give the value itself"
    ]


def test_a_secret_among_a_command_s_arguments_is_refused(faults: Faults) -> None:
    command = ["curl", "-H", "Authorization: Bearer abcdefghijkl", "--password", "hunter2", "--api-key=abc", "--token"]
    found = faults(f"name: x\ncommand: {command}\n")
    assert [line.split(": ")[1] for line in found] == ["command[2]", "command[4]", "command[5]"]
    harmless = ["train.py", "--tokenizer", "bpe", "--max-tokens=4", "--key-dim", "64", "--password-file", "/run/p"]
    assert faults(f"name: x\ncommand: {harmless}\n") == []
