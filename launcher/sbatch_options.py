"""The options of sbatch that a spec may add by hand under `slurm.options`, and those that belong to fields of the spec.

The names are the long options of sbatch(1), Slurm 22.05 to 25.05.
"""

from __future__ import annotations

import re
from typing import Any

FREE = frozenset(
    """
    acctg-freq bb bbf begin cluster-constraint clusters consolidate-segments container container-id contiguous
    core-spec cores-per-socket cpu-freq cpus-per-gpu deadline delay-boot dependency distribution exclusive extra
    extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-socket gres-flags hint hold
    kill-on-invalid-dep licenses mail-type mail-user mcs-label mincpus network nice no-kill nodefile
    ntasks-per-core ntasks-per-gpu ntasks-per-socket oom-kill-step overcommit oversubscribe power prefer
    priority profile propagate reboot resv-ports segment sockets-per-node spread-job stepmgr switches
    thread-spec threads-per-core time-min tmp tres-bind tres-per-task uid use-min-nodes wait-all-nodes wckey
    """.split()  # noqa: SIM905 - a table reads best as one
)
"""Options that we pass on as they are."""

OWNED = {
    "account": "use slurm.account",
    "array": "job arrays are not supported; launch the spec once for each member",
    "chdir": "a job runs in the folder that launch was called in",
    "comment": "launch keeps its submission token there",
    "constraint": "use slurm.constraint",
    "cpus-per-task": "use resources.cpus_per_task",
    "error": "launch owns the log files: they are in the run folder, attempts/",
    "exclude": "use slurm.exclude",
    "export": "use env; a job inherits the variables of the shell that launches it",
    "export-file": "use env; a job inherits the variables of the shell that launches it",
    "gpus-per-node": "use resources.gpus_per_node",
    "gpus-per-task": "use resources.gpus_per_task",
    "gres": "use slurm.gres",
    "help": "it submits nothing",
    "ignore-pbs": "the script is ours and has no PBS lines",
    "input": "ranks have no standard input",
    "job-name": "use name",
    "mem": "use resources.memory",
    "mem-per-cpu": "use resources.memory_per_cpu",
    "mem-per-gpu": "use resources.memory_per_gpu",
    "no-requeue": "use restart.mode",
    "nodelist": "use slurm.nodelist",
    "nodes": "use resources.nodes",
    "ntasks": "use resources.nodes and resources.tasks_per_node",
    "ntasks-per-node": "use resources.tasks_per_node",
    "open-mode": "launch owns the log files and appends to them",
    "output": "launch owns the log files: they are in the run folder, attempts/",
    "parsable": "launch reads sbatch's answer itself",
    "partition": "use slurm.partition",
    "qos": "use slurm.qos",
    "quiet": "launch reads sbatch's answer itself",
    "requeue": "use restart.mode",
    "reservation": "use slurm.reservation",
    "signal": "launch asks for the warning that its ranks need before the time limit",
    "tasks-per-node": "use resources.tasks_per_node",
    "test-only": "use launch --dry-run",
    "time": "use resources.time",
    "usage": "it submits nothing",
    "verbose": "launch reads sbatch's answer itself",
    "version": "it submits nothing",
    "wait": "use launch --follow",
    "wrap": "use command",
}
"""Options that a field of the spec, or launch itself, sets; and what to use instead."""

SHORT = {
    "A": "account",
    "B": "extra-node-info",
    "C": "constraint",
    "D": "chdir",
    "F": "nodefile",
    "G": "gpus",
    "H": "hold",
    "J": "job-name",
    "L": "licenses",
    "M": "clusters",
    "N": "nodes",
    "O": "overcommit",
    "Q": "quiet",
    "S": "core-spec",
    "V": "version",
    "W": "wait",
    "a": "array",
    "b": "begin",
    "c": "cpus-per-task",
    "d": "dependency",
    "e": "error",
    "h": "help",
    "i": "input",
    "k": "no-kill",
    "m": "distribution",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "s": "oversubscribe",
    "t": "time",
    "v": "verbose",
    "w": "nodelist",
    "x": "exclude",
}
"""Short options; the long one is to be written."""

BARE = frozenset(
    "consolidate-segments contiguous hold overcommit oversubscribe reboot spread-job stepmgr use-min-nodes".split()  # noqa: SIM905
)
"""Options that take no value."""

BARE_OR_VALUE = frozenset("exclusive get-user-env nice no-kill propagate resv-ports".split())  # noqa: SIM905
"""Options that stand bare or with a value; every other one needs its value."""

_WRITTEN = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)


def normalise(options: Any) -> list[tuple[str, str | None]]:
    """`slurm.options` in either form as (name, value) pairs in order; a value of None is a bare flag.

    Mapping: `{exclusive: true, mail-type: END, nice: null}`; true is a bare flag, false and null leave the option out.
    List: `["--exclusive", "--mail-type=END"]`. Names keep sbatch's spelling; an underscore counts as a dash.
    Errors: ValueError naming an entry that is in neither form.
    """
    if options is None:
        return []
    if isinstance(options, dict):
        return [
            (spelled(str(key)), None if value is True else _text(key, value))
            for key, value in options.items()
            if value is not None and value is not False
        ]
    if isinstance(options, list):
        return [_written(entry) for entry in options]
    raise ValueError(f"{options!r} is neither a mapping nor a list of options")


def spelled(key: str) -> str:
    """An option's name as sbatch spells it."""
    return key.removeprefix("--").replace("_", "-")


def _text(key: object, value: object) -> str:
    if isinstance(value, (dict, list)):
        raise ValueError(f"{key}: one value is needed, not {value!r}")
    return str(value)


def _written(entry: object) -> tuple[str, str | None]:
    match = _WRITTEN.fullmatch(entry) if isinstance(entry, str) else None
    if match is None:
        raise ValueError(f"{entry!r} is not in the form --name or --name=value")
    return spelled(match[1]), match[2]
