"""Proves that interpolations resolve with OmegaConf's grammar and types, and that each that fails is a fault."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import OmegaConf

Resolve = Callable[..., Any]
Faults = Callable[..., list[str]]
BASE = "name: x\nresources: {nodes: 2}\ntrain: {task: 'mine:Text', epochs: 1, batch: {per_rank: 8}}\n"


def test_a_key_with_the_name_of_a_python_keyword_can_be_referred_to(resolve: Resolve) -> None:
    resolved = resolve(BASE, "train.batch={global: 128}", "train.optim.base_batch=${train.batch.global}")
    assert resolved.spec.train.optim.base_batch == 128


def test_interpolations_reach_into_lists_mappings_and_across_sections(resolve: Resolve) -> None:
    text = BASE + "env: {A: '${name}-${resources.nodes}', B: '${.A}!'}\npython_path: ['${name}', b]\n"
    resolved = resolve(text, "train.options={a: ['${train.batch.per_rank}', {b: '${env.B}'}], c: '${train.batch}'}")
    assert resolved.spec.env == {"A": "x-2", "B": "x-2!"}
    assert resolved.spec.python_path == ["x", "b"]
    assert resolved.spec.train.options == {
        "a": [8, {"b": "x-2!"}],
        "c": {"per_rank": 8, "global": None, "accumulate": None},
    }


def test_the_environment_is_read_and_converted_to_the_fields_type(resolve: Resolve) -> None:
    env = {"N": "3", "ON": "true"}
    overrides = ["resources.nodes=${oc.env:N}", "train.data.shuffle=${oc.env:ON}", "train.optim.name=${oc.env:O,sgd}"]
    spec = resolve(BASE, *overrides, env=env).spec
    assert (spec.resources.nodes, spec.train.data.shuffle, spec.train.optim.name) == (3, True, "sgd")
    assert resolve(BASE, "slurm.account=${oc.env:NONE,null}").spec.slurm.account is None
    assert resolve(BASE, "train.options.n=${oc.decode:${oc.env:N}}", env=env).spec.train.options == {"n": 3}


def test_the_given_environment_is_forgotten_afterwards(resolve: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(BASE, "name=${oc.env:ONLY_HERE}", env={"ONLY_HERE": "y"})
    monkeypatch.setenv("OF_THE_PROCESS", "z")
    assert OmegaConf.create({"a": "${oc.env:OF_THE_PROCESS}"}).a == os.environ["OF_THE_PROCESS"]


def test_an_escaped_interpolation_is_text(resolve: Resolve) -> None:
    resolved = resolve("name: x\ncommand: [sh, -c, 'echo \\${HOME} $(id) `id` $HOME']\n")
    assert resolved.spec.command == ["sh", "-c", "echo ${HOME} $(id) `id` $HOME"]


ESCAPE = r"name a key of the spec in full, as ${train.seed}; to keep the text as it is, write \${...}"
FAILING = {
    "${nope}": rf"'${{nope}}': Interpolation key 'nope' not found; {ESCAPE}",
    "a${": f"'a${{' is no interpolation (no viable alternative at input '${{'); {ESCAPE}",
    "${oc.env:NOPE}": "'${oc.env:NOPE}': Environment variable 'NOPE' not found; "
    "export it, or give a default: ${oc.env:NAME,default}",
    "${nope:1}": f"'${{nope:1}}': Unsupported interpolation type nope; {ESCAPE}",
    "${runs}": f"'${{runs}}': Recursive interpolation detected; {ESCAPE}",
    "${train}": "'${train}': ",
    "${oc.decode:'['}": "\"${oc.decode:'['}\": ",
}


@pytest.mark.parametrize(("value", "fault"), FAILING.items(), ids=list(FAILING))
def test_an_interpolation_that_fails_is_a_fault_with_its_place(value: str, fault: str, faults: Faults) -> None:
    quoted = value.replace("'", "''")
    found = faults(BASE + f"runs: '{quoted}'\nenv:\n  A: '{quoted}'\n  RANK: '1'\n")
    if value == "${runs}":
        assert found[0].startswith(f"spec.yaml:4:7: runs: {fault}")
        return
    starts = [
        f"spec.yaml:4:7: runs: {fault}",
        f"spec.yaml:6:6: env.A: {fault}",
        "spec.yaml:7:9: env.RANK: set by the launcher",
    ]
    assert len(found) == 3
    assert [line[: len(start)] for line, start in zip(found, starts, strict=True)] == starts


def test_a_result_of_the_wrong_type_is_a_fault(faults: Faults) -> None:
    assert faults(BASE, "train.seed=${name}", "train.precision=${name}") == [
        "override train.precision: train.precision: '${name}': Invalid value 'x', "
        "expected one of ['fp32', 'bf16', 'fp64']; it must give one of fp32, bf16, fp64",
        "override train.seed: train.seed: '${name}': Value 'x' of type 'str' could not be converted to Integer; "
        "it must give a whole number",
    ]


def test_a_reference_to_a_missing_value_is_told_once(faults: Faults) -> None:
    assert faults("name: ???\ncommand: ['${name}']\n") == [
        "spec.yaml:1:7: name: missing: it is ??? here; "
        "give it as name=VALUE on the command line, or in a spec that builds on this one"
    ]


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.seed='4'", 4),
        ("train.optim.base_lr=1", 1.0),
        ("train.optim.base_lr='1e-3'", 1e-3),
        ("train.seed=0x10", 16),
    ],
)
def test_numbers_are_converted_by_omegaconfs_types(override: str, value: Any, resolve: Resolve) -> None:
    key, _, _ = override.partition("=")
    found = resolve(BASE, override).plain()
    for part in key.split("."):
        found = found[part]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", ["4.0", "1e3", "true", "4 apples", "[1]", "{}", "''", "null", "9" * 5000])
def test_what_is_no_whole_number_is_refused(value: str, faults: Faults) -> None:
    assert len(found := faults(BASE, f"train.seed={value}")) == 1
    assert found[0].startswith("override train.seed: train.seed: ")
    assert "is not a whole number; write a whole number such as 4" in found[0]
