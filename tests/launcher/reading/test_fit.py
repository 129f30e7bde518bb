"""Proves that a tree is fitted to the dataclasses key by key: what is wrong is named at its place, the rest is kept."""

from __future__ import annotations

from typing import Any

from launcher.errors import Fault
from launcher.reading import yamlfile
from launcher.reading.fit import Fitted, dotted, fit, touches
from launcher.reading.tree import Origin, Section
from launcher.spec import JobSpec

FILE = Origin("spec", "s.yaml")


def fitted(text: str) -> tuple[Fitted, list[str]]:
    faults: list[Fault] = []
    tree = yamlfile.parse(text, FILE, faults)
    assert isinstance(tree, Section)
    return fit(tree, JobSpec, FILE, faults), [str(fault) for fault in faults]


def values(text: str) -> dict[str, Any]:
    found, faults = fitted(text)
    assert faults == []
    return {".".join(path): value for path, value in found.values.items()}


def test_texts_stay_as_they_were_written() -> None:
    assert values("name: 007\nresources: {time: 00:30:00, memory: 4096}\nenv: {A: true, B: 1e3, C: ''}\n") == {
        "name": "007",
        "resources.time": "00:30:00",
        "resources.memory": "4096",
        "env": {"A": "true", "B": "1e3", "C": ""},
    }


def test_untyped_options_are_read_as_yaml_but_those_of_sbatch_as_text() -> None:
    text = "name: x\ntrain: {task: t, options: {a: 1e3, b: [007, null], c: {1: yes}}}\n"
    assert values(text)["train.options"] == {"a": 1000.0, "b": [7, None], "c": {"1": "yes"}}
    text = "name: x\nslurm: {options: {begin: 00:30, nice: 007, exclusive: true, hold: null}}\n"
    assert values(text)["slurm.options"] == {"begin": "00:30", "nice": "007", "exclusive": True, "hold": None}


def test_a_null_leaves_an_option_out_and_empties_a_section_a_list_or_a_mapping() -> None:
    assert values("name: x\nresources: {time: }\nslurm:\nenv:\npython_path: ~\ntrain: null\ncommand: null\n") == {
        "name": "x",
        "resources.time": None,
        "command": None,
    }
    assert values("name: x\nenv: {A: null, B: b}\n")["env"] == {"B": "b"}


def test_every_fault_is_found_and_the_good_values_stay() -> None:
    text = """\
nodes: 2
resources: {nodes: null, tasks_per_nod: 2, cpus_per_task: 3}
slurm: [a]
env: {A: [x], B: ok, C: "???"}
train:
  optim: {name: adamv, betas: [x, 0.9]}
  data: {shuffle: yes}
  batch: 32
command: python train.py
"""
    found, faults = fitted(text)
    assert faults == [
        "s.yaml:1:1: nodes: unknown key; did you mean resources.nodes?",
        "s.yaml:2:20: resources.nodes: null is not a whole number; write a whole number such as 4",
        "s.yaml:2:26: resources.tasks_per_nod: unknown key; did you mean resources.tasks_per_node?",
        "s.yaml:3:8: slurm: a list is not a mapping; write a mapping: keys below it, indented",
        "s.yaml:4:10: env.A: a list is not text; write text",
        "s.yaml:4:25: env.C: missing: it is ??? here; "
        "give it as env.C=VALUE on the command line, or in a spec that builds on this one",
        "s.yaml:6:17: train.optim.name: 'adamv' is not one of adamw, adam, sgd; did you mean adam?",
        "s.yaml:7:19: train.data.shuffle: 'yes' is not true or false; write true or false",
        "s.yaml:8:10: train.batch: '32' is not a mapping; write a mapping: keys below it, indented",
        "s.yaml:5:1: train.task: missing; give it here, or as train.task=VALUE on the command line",
        "s.yaml:9:10: command: 'python train.py' is not a list; write a list such as [python, train.py]",
        "s.yaml: name: missing; give it here, or as name=VALUE on the command line",
    ]
    kept = {".".join(path): value for path, value in found.values.items()}
    assert kept == {"resources.cpus_per_task": 3, "env": {"B": "ok"}, "train.optim.betas": ["x", 0.9]}


def test_interpolations_are_listed_with_their_places() -> None:
    found, _ = fitted("name: ${a}\ncommand: [x, '${b}']\ntrain: {task: t, options: {q: [{r: 'x${c}'}]}}\n")
    assert found.interpolations == [
        (("name",), ("name",), "${a}"),
        (("command", 1), ("command",), "${b}"),
        (("train", "options", "q", 0, "r"), ("train", "options"), "x${c}"),
    ]
    assert found.place("command[1]") == Origin("spec", "s.yaml", 2, 14)
    assert found.place("train.options.q[0].nothing.here") == Origin("spec", "s.yaml", 3, 32)


def test_dotted_paths() -> None:
    assert dotted(("train", "options", "a", 0, "b")) == "train.options.a[0].b"
    assert touches("train.batch", "train.batch.global") and touches("command[0]", "command")
    assert not touches("train.batch", "train.batches")
