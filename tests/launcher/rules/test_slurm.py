"""Proves the rules on resources and Slurm's options: what Slurm would refuse or misread is refused, with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Resolve = Callable[..., Any]
Faults = Callable[..., list[str]]

COMMAND = "name: x\ncommand: [a]\n"

GOOD = [
    "resources.time=90",
    "resources.time=1-12:30",
    "resources.time=unlimited",
    "resources.memory=0",
    "resources.memory=16g",
    "resources.memory_per_cpu=1500M",
    "resources={gpus_per_node: a100:4, gpus_per_task: 2, tasks_per_node: 2}",
    "resources={gpus_per_node: 0, gpus_per_task: 0}",
    "slurm.nodelist=n[1-3],m1",
    "slurm.nodelist=./hosts.txt",
    "slurm.gres=gpu:a100:2,lustre:1G,license",
    "slurm.options={exclusive: true, mail-type: END, nice: null, mail_user: a@b}",
    "slurm.options=[--exclusive=user, --begin=now+1hour]",
    "slurm.srun_options=[--mpi=pmix, -l]",
]


@pytest.mark.parametrize("override", GOOD)
def test_what_slurm_takes_is_taken(override: str, faults: Faults) -> None:
    assert faults(COMMAND, override) == []


BAD = {
    "resources.nodes=0": "resources.nodes: 0 is below 1; give a whole number from 1",
    "resources.tasks_per_node=-1": "resources.tasks_per_node: -1 is below 1; give a whole number from 1",
    "resources.cpus_per_task=70000": "resources.cpus_per_task: 70000 is more than Slurm's limit; give at most 65536",
    "resources.time=0": "resources.time: 0 leaves no time to run; give a limit, or UNLIMITED, or leave it out",
    "resources.time=-5": "resources.time: '-5' is no time limit; write minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, "
    "D-HH:MM:SS or UNLIMITED",
    "resources.memory=4GiB": "resources.memory: '4GiB' is no amount of memory; write a whole number with K, M, G or T "
    "(no letter: MB), such as 4G",
    "resources.memory_per_gpu=0": "resources.memory_per_gpu: 0 is no memory; "
    "give an amount; memory: 0 asks for a node's all",
    "resources={memory: 4G, memory_per_cpu: 1G}": "resources.memory_per_cpu: given together with memory; "
    "Slurm takes one kind of memory: keep one, set the other null",
    "resources.gpus_per_node=a100": "resources.gpus_per_node: 'a100' is no number of GPUs; "
    "write a count such as 4, or type:count such as a100:4",
    "resources={gpus_per_node: 3, gpus_per_task: 2, tasks_per_node: 2}": "resources.gpus_per_task: "
    "2 x 2 tasks = 4 GPUs, more than the 3 of a node; lower one of the two, or ask for more GPUs on each node",
    "resources={gpus_per_node: a100:4, gpus_per_task: v100:1}": "resources.gpus_per_task: "
    "GPUs of type v100, but gpus_per_node of type a100; name one type",
    "slurm.nodelist=n[1-": "slurm.nodelist: 'n[1-', character 2: this bracket is not closed; "
    "write host names such as n1,n[3-5]",
    'slurm.nodelist=""': "slurm.nodelist: empty; name hosts such as n1,n[3-5], or set it null",
    'slurm.partition=""': "slurm.partition: empty; give a name, or null to leave the option out",
    "slurm.gres=two gpus": "slurm.gres: 'two gpus' is no list of resources; write name:count or name:type:count",
    "slurm.options={nicee: null}": "slurm.options.nicee: sbatch has no option --nicee; did you mean nice?",
    "slurm.options={mail_typ: false}": "slurm.options.mail_typ: sbatch has no option --mail-typ; "
    "did you mean mail-type?",
    "slurm.options=exclusive": "slurm.options: 'exclusive' is neither; write a mapping or a list of sbatch options",
    "slurm.options={time: 3}": "slurm.options.time: --time is not free; use resources.time",
    "slurm.options={job_name: x}": "slurm.options.job_name: --job-name is not free; use name",
    "slurm.options={mail-typ: END}": "slurm.options.mail-typ: sbatch has no option --mail-typ; did you mean mail-type?",
    "slurm.options={qqqq: 1}": "slurm.options.qqqq: sbatch has no option --qqqq; use the long options of `man sbatch`",
    "slurm.options={p: main}": "slurm.options.p: --partition is not free; use slurm.partition",
    "slurm.options={b: now}": "slurm.options.b: -b is a short option; write begin",
    "slurm.options={begin: true}": "slurm.options.begin: --begin needs a value; write begin: VALUE, or --begin=VALUE",
    "slurm.options={hold: 7}": "slurm.options.hold: --hold takes no value, but has '7'; write hold: true, or --hold",
    "slurm.options={begin: [1]}": "slurm.options.begin: begin: one value is needed, not ['1']; "
    "write name: value in a mapping, or --name=value in a list",
    "slurm.options=[--mail-type END]": "slurm.options[0]: '--mail-type END' is not in the form --name or --name=value; "
    "write name: value in a mapping, or --name=value in a list",
    "slurm.options=[--begin=now, --begin=12:00]": "slurm.options[1]: --begin is given twice; keep one",
    "slurm.options=[--wrap=id]": "slurm.options[0]: --wrap is not free; use command",
    "slurm.srun_options=[--output=x]": "slurm.srun_options[0]: --output is not free; launch sets it from the spec",
    "slurm.srun_options=['']": "slurm.srun_options[0]: empty; remove it",
}


@pytest.mark.parametrize(("override", "fault"), BAD.items(), ids=list(BAD))
def test_what_slurm_would_refuse_or_misread_is_refused(override: str, fault: str, faults: Faults) -> None:
    assert [line.split(": ", 1)[1] for line in faults(COMMAND, override)] == [fault]


def test_gpus_by_gres_count_too(faults: Faults) -> None:
    assert faults(COMMAND, "slurm.gres=gpu:2", "resources.gpus_per_task=1", "resources.tasks_per_node=2") == []
    assert (
        "4 GPUs, more than the 2 of a node"
        in faults(COMMAND, "slurm.gres=gpu:a100:2", "resources.gpus_per_task=2", "resources.tasks_per_node=2")[0]
    )
    assert faults(COMMAND, "slurm.gres=gpu:2", "resources.gpus_per_node=4") == [
        "override resources.gpus_per_node: resources.gpus_per_node: 4 GPUs a node, but slurm.gres asks for 2; "
        "give the GPUs in one of the two"
    ]


def test_a_host_cannot_be_asked_for_and_excluded(faults: Faults) -> None:
    assert faults(COMMAND, "slurm.nodelist=n[1-3]", "slurm.exclude=n[2-4]") == [
        "override slurm.exclude: slurm.exclude: excludes n2, which nodelist asks for; take it out of one"
    ]


def test_a_value_with_a_fault_already_is_left_alone_by_other_rules(faults: Faults) -> None:
    assert faults(COMMAND, "resources={gpus_per_node: 1, gpus_per_task: 2, tasks_per_node: x}") == [
        "override resources: resources.tasks_per_node: 'x' is not a whole number; write a whole number such as 4"
    ]
