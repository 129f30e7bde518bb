"""Proves that one run over a spec reports the faults of all kinds together, each at its place, and nothing twice."""

from __future__ import annotations

from collections.abc import Callable

Faults = Callable[..., list[str]]

SPEC = """\
nme: x
name: "-a"
resources:
  nodes: 0
  tasks_per_nod: 2
  time: "0"
  nodes: 3
train:
  task: digit
  epochs: 2
  batch: {global: 127}
  optim: {name: adamv, betas: [0.9, 1.0]}
env:
  API_KEY: abc
  Q: ${nope}
"""


def test_faults_of_all_kinds_come_together_in_the_order_of_the_file(faults: Faults) -> None:
    places = [line.split(": ")[:2] for line in faults(SPEC, "train.seed=x", "foo=1")]
    assert places == [
        ["spec.yaml:1:1", "nme"],
        ["spec.yaml:2:7", "name"],
        ["spec.yaml:4:10", "resources.nodes"],
        ["spec.yaml:5:3", "resources.tasks_per_nod"],
        ["spec.yaml:6:9", "resources.time"],
        ["spec.yaml:7:3", "resources.nodes"],
        ["spec.yaml:9:9", "train.task"],
        ["spec.yaml:12:17", "train.optim.name"],
        ["spec.yaml:12:31", "train.optim.betas"],
        ["spec.yaml:14:12", "env.API_KEY"],
        ["spec.yaml:15:6", "env.Q"],
        ["override foo", "foo"],
        ["override train.seed", "train.seed"],
    ]


def test_no_rule_counts_with_a_number_that_is_wrong_itself(faults: Faults) -> None:
    """With nodes: 0 there is no world size, so the batch of 127 has no fault of its own yet."""
    assert not any("train.batch" in line for line in faults(SPEC))
