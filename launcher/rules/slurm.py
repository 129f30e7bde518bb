"""Rules about resources and Slurm's options."""

from __future__ import annotations

import re
from typing import Any

from .. import hostlist, sbatch_options, units
from ..reading.schema import did_you_mean
from ..spec import JobSpec, Resources, SlurmOptions
from .report import Report

MOST_NODES = 65_536
"""Slurm's own limit on the nodes of a job, and on the tasks of a node (16 bits)."""

_GRES = re.compile(r"(?:gres[/:])?[A-Za-z_][\w.-]*(?::[A-Za-z_][\w.-]*)*(?:[:=]\d+[KMGT]?)?", re.ASCII)
_GRES_GPUS = re.compile(r"(?:gres[/:])?gpu(?::[A-Za-z_][\w.-]*)?(?:[:=](\d+))?", re.ASCII)
_SRUN_OWNED = frozenset(
    """
    cpus-per-task error export input kill-on-bad-exit multi-prog nodes ntasks ntasks-per-node open-mode output pty
    tasks-per-node
    """.split()  # noqa: SIM905
)


def check_slurm(spec: JobSpec, report: Report) -> None:
    """Check the sections resources and slurm, whichever executor will run them: a spec runs everywhere."""
    _check_counts(spec.resources, report)
    _check_time(spec.resources.time, report)
    _check_memory(spec.resources, report)
    _check_gpus(spec.resources, spec.slurm, report)
    _check_hosts(spec.slurm, report)
    _check_options(spec.slurm.options, report)
    _check_words(spec.slurm, report)


def _check_counts(resources: Resources, report: Report) -> None:
    for key in ("nodes", "tasks_per_node", "cpus_per_task"):
        value = getattr(resources, key)
        if value < 1:
            report.add(f"resources.{key}", f"{value} is below 1", "give a whole number from 1")
        elif value > MOST_NODES:
            report.add(f"resources.{key}", f"{value} is more than Slurm's limit", f"give at most {MOST_NODES}")


def _check_time(text: str | None, report: Report) -> None:
    if text is None:
        return
    try:
        seconds = units.time_seconds(text)
    except ValueError as error:
        _unreadable("resources.time", error, report)
    else:
        if seconds == 0:
            report.add("resources.time", f"{text} leaves no time to run", "give a limit, or UNLIMITED, or leave it out")


def _check_memory(resources: Resources, report: Report) -> None:
    given = [key for key in ("memory", "memory_per_cpu", "memory_per_gpu") if getattr(resources, key) is not None]
    for key in given:
        text = getattr(resources, key)
        try:
            amount = units.memory_mb(text)
        except ValueError as error:
            _unreadable(f"resources.{key}", error, report)
        else:
            if amount == 0 and key != "memory":
                report.add(f"resources.{key}", "0 is no memory", "give an amount; memory: 0 asks for a node's all")
    for key in given[1:]:
        wrong = f"given together with {given[0]}"
        report.add(f"resources.{key}", wrong, "Slurm takes one kind of memory: keep one, set the other null")


def _check_gpus(resources: Resources, slurm: SlurmOptions, report: Report) -> None:
    parsed: dict[str, units.Gpus] = {}
    for key in ("gpus_per_node", "gpus_per_task"):
        text = getattr(resources, key)
        if text is None:
            continue
        try:
            parsed[key] = units.gpus(text)
        except ValueError as error:
            _unreadable(f"resources.{key}", error, report)
    by_gres = _gres_gpus(slurm.gres)
    node, task = parsed.get("gpus_per_node"), parsed.get("gpus_per_task")
    if node and by_gres is not None and node.number != by_gres:
        wrong = f"{node.number} GPUs a node, but slurm.gres asks for {by_gres}"
        report.add("resources.gpus_per_node", wrong, "give the GPUs in one of the two", "slurm.gres")
    if task is None:
        return
    there = node.number if node else by_gres
    wanted = task.number * resources.tasks_per_node
    if there is not None and wanted > there:
        report.add(
            "resources.gpus_per_task",
            f"{task.number} x {resources.tasks_per_node} tasks = {wanted} GPUs, more than the {there} of a node",
            "lower one of the two, or ask for more GPUs on each node",
            "resources.gpus_per_node",
            "resources.tasks_per_node",
            "slurm.gres",
        )
    if node and node.kind and task.kind and node.kind != task.kind:
        wrong = f"GPUs of type {task.kind}, but gpus_per_node of type {node.kind}"
        report.add("resources.gpus_per_task", wrong, "name one type", "resources.gpus_per_node")


def _gres_gpus(gres: str | None) -> int | None:
    """GPUs that a gres asks for on each node; None where it names none."""
    matches = [_GRES_GPUS.fullmatch(part) for part in (gres or "").split(",")]
    counts = [int(match[1] or 1) for match in matches if match]
    return sum(counts) if counts else None


def _check_hosts(slurm: SlurmOptions, report: Report) -> None:
    hosts = {}
    for key in ("nodelist", "exclude"):
        text = getattr(slurm, key)
        if text is None or "/" in text:
            continue  # with a slash it is the name of a file of hosts
        try:
            hosts[key] = set(hostlist.expand(text))
        except ValueError as error:
            report.add(f"slurm.{key}", str(error), "write host names such as n1,n[3-5]")
            continue
        if not hosts[key]:
            report.add(f"slurm.{key}", "empty", "name hosts such as n1,n[3-5], or set it null")
    if both := hosts.get("nodelist", set()) & hosts.get("exclude", set()):
        report.add(
            "slurm.exclude", f"excludes {min(both)}, which nodelist asks for", "take it out of one", "slurm.nodelist"
        )


def _check_options(options: Any, report: Report) -> None:
    entries: list[tuple[str, Any]]
    if isinstance(options, dict):
        entries = [(f"slurm.options.{key}", {key: value}) for key, value in options.items()]
    elif isinstance(options, list):
        entries = [(f"slurm.options[{index}]", [entry]) for index, entry in enumerate(options)]
    else:
        if options is not None:
            report.add("slurm.options", f"{options!r} is neither", "write a mapping or a list of sbatch options")
        return
    seen: set[str] = set()
    for path, entry in entries:
        try:
            pairs = sbatch_options.normalise(entry)
        except ValueError as error:
            report.add(path, str(error), "write name: value in a mapping, or --name=value in a list")
            continue
        if isinstance(entry, dict) and not pairs:
            _check_name(
                path, sbatch_options.spelled(str(next(iter(entry)))), report
            )  # null leaves an option out, which has to be one all the same
        for name, value in pairs:
            _check_option(path, name, value, report)
            if name in seen:
                report.add(path, f"--{name} is given twice", "keep one")
            seen.add(name)


def _check_option(path: str, name: str, value: str | None, report: Report) -> None:
    long = sbatch_options.SHORT.get(name, name)
    if not _check_name(path, name, report):
        return
    if long != name:
        report.add(path, f"-{name} is a short option", f"write {long}")
    elif value is None and name not in sbatch_options.BARE | sbatch_options.BARE_OR_VALUE:
        report.add(path, f"--{name} needs a value", f"write {name}: VALUE, or --{name}=VALUE")
    elif value is not None and name in sbatch_options.BARE:
        report.add(path, f"--{name} takes no value, but has {value!r}", f"write {name}: true, or --{name}")


def _check_name(path: str, name: str, report: Report) -> bool:
    long = sbatch_options.SHORT.get(name, name)
    if long in sbatch_options.OWNED:
        report.add(path, f"--{long} is not free", sbatch_options.OWNED[long])
    elif long not in sbatch_options.FREE:
        report.add(path, f"sbatch has no option --{name}", _near_option(name))
    else:
        return True
    return False


def _near_option(name: str) -> str:
    near = did_you_mean(name, sorted(sbatch_options.FREE | set(sbatch_options.OWNED)))
    return near if near.startswith("did") else "use the long options of `man sbatch`"


def _check_words(slurm: SlurmOptions, report: Report) -> None:
    for key in ("partition", "account", "qos", "constraint", "reservation"):
        if getattr(slurm, key) == "":
            report.add(f"slurm.{key}", "empty", "give a name, or null to leave the option out")
    if slurm.gres is not None and not all(_GRES.fullmatch(part) for part in slurm.gres.split(",")):
        report.add("slurm.gres", f"{slurm.gres!r} is no list of resources", "write name:count or name:type:count")
    for index, argument in enumerate(slurm.srun_options):
        name = argument.removeprefix("--").partition("=")[0]
        if not argument:
            report.add(f"slurm.srun_options[{index}]", "empty", "remove it")
        elif argument.startswith("--") and name in _SRUN_OWNED:
            report.add(f"slurm.srun_options[{index}]", f"--{name} is not free", "launch sets it from the spec")


def _unreadable(path: str, error: ValueError, report: Report) -> None:
    """Units say what is wrong and what is right in one sentence."""
    wrong, _, right = str(error).partition("; ")
    report.add(path, wrong, right)
