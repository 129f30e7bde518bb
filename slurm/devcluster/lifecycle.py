"""up and down: from nothing to a cluster that takes jobs, and back to nothing."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from devcluster import cgroups, daemons, hosts, leases, network, nodes, packages, processes, systemconf
from devcluster.layout import Layout
from devcluster.settings import Settings
from devcluster.shell import ClusterError
from devcluster.state import State, allocate, exclusive, load_state, save_state, slurm

Say = Callable[[str], None]


def up(layout: Layout, settings: Settings, say: Say, replace: bool = False, lease_pid: int | None = None) -> State:
    """Returns a cluster with these settings whose nodes take jobs.

    A running one is kept (what a test has broken in it is mended); one with other settings is replaced only when asked,
    since that ends its jobs; what a crash has left is cleared away. It stays until `down`, or with `lease_pid` until
    the last process with a lease gives it back.
    """
    settings.check()
    layout.check_reachable()
    with exclusive(str(layout.home)):
        packages.install(settings.accounting, say)
        state = _keep_or_start(layout, settings, say, replace)
        leases.take(layout, lease_pid)
        return state


def _keep_or_start(layout: Layout, settings: Settings, say: Say, replace: bool) -> State:
    running = load_state(layout)
    if running and _core_runs(layout, running):
        if running.settings == settings:
            _mend(layout, running, say)
            return running
        _may_replace(layout, running.settings.differences(settings), replace)
        say("replacing the cluster, because its settings differ")
    elif left := leftovers(layout):
        say(f"clearing what an earlier cluster left: {', '.join(left)}")
    network.check_permitted()
    hosts.refuse_taken(layout.home, settings.names)
    _remove(layout)
    return _start(layout, settings, say)


def _may_replace(layout: Layout, differences: list[str], replace: bool) -> None:
    if not replace:
        raise ClusterError(
            f"a cluster with other settings is up at {layout.home}:\n"
            + "\n".join(f"  {difference}" for difference in differences)
            + "\n`up --replace ...` restarts it, which ends its jobs; with another DDP_CLUSTER_HOME and --node-prefix a"
            " second cluster runs beside it"
        )


def _core_runs(layout: Layout, state: State) -> bool:
    return all(processes.recorded(layout, name) for name in daemons.core_processes(state))


def _start(layout: Layout, settings: Settings, say: Say) -> State:
    """Starts everything; on a failure nothing goes on running, and the logs stay for a look."""
    try:
        with exclusive("the machine's addresses"):
            layout.home.mkdir(parents=True)
            layout.home.chmod(0o755)
            state = allocate(settings)
            save_state(layout, state)
            hosts.add(layout.home, {layout.controller_name: state.controller_address, **state.addresses})
            network.create(layout, state)
        daemons.write_files(layout, state)
        _start_services(layout, state)
        for node in state.nodes:
            daemons.start_node(layout, node)
        nodes.wait_working(layout, state.nodes)
        systemconf.lend(layout)
        if settings.accounting:
            slurm(layout, "sacct", "--noheader", "--allocations")
    except BaseException:
        say(f"failed; the logs are in {layout.logs}")
        _stop(layout)
        raise
    return state


def _start_services(layout: Layout, state: State) -> None:
    """munge and the database beside each other, since the database takes longest; then the two that need them."""
    if not state.settings.accounting:
        daemons.start_munge(layout)
    else:
        with ThreadPoolExecutor() as pool:
            starts = [pool.submit(daemons.start_database, layout), pool.submit(daemons.start_munge, layout)]
            for start in starts:
                start.result()
        daemons.start_slurmdbd(layout, state)
    daemons.start_controller(layout)


def _mend(layout: Layout, state: State, say: Say) -> None:
    """Undoes whatever `pause`, `cut` and `kill-node` have done, or a test that died between doing and undoing."""
    controller = processes.recorded(layout, "slurmctld")
    if controller and processes.is_stopped(controller):
        say("resuming the controller")
        processes.send(controller, signal.SIGCONT)
    for node in state.nodes:
        if not network.links(layout).get(layout.link(state.number(node)), False):
            say(f"healing the cable of {node}")
            network.set_cable(layout, state, node, up=True)
        if not processes.recorded(layout, daemons.node_process(node)):
            say(f"reviving {node}")
            daemons.start_node(layout, node)
    nodes.wait_working(layout, state.nodes)


def down(layout: Layout) -> None:
    """Ends every process of the cluster and removes everything that it made. Does nothing when there is nothing."""
    with exclusive(str(layout.home)):
        _remove(layout)


def release(layout: Layout, pid: int) -> None:
    """Gives a process's lease back, and takes the cluster down when nobody else has one."""
    with exclusive(str(layout.home)):
        if leases.give_back(layout, pid):
            _remove(layout)


def _remove(layout: Layout) -> None:
    _stop(layout)
    if layout.home.exists():
        shutil.rmtree(layout.home)


def _stop(layout: Layout) -> None:
    """Everything but the files. Killing is safe, since no file is kept that could be left half written."""
    systemconf.take_back(layout)
    spaces = network.namespaces(layout)
    for space in spaces:
        processes.end(partial(processes.inside_namespace, space), f"namespace {space}")
    processes.end(lambda: processes.daemons_of(layout), "daemons")
    with exclusive("the machine's addresses"):
        network.remove(layout)
        hosts.remove(layout.home)
    cgroups.remove([space.removeprefix(f"{layout.tag}-") for space in spaces])


def leftovers(layout: Layout) -> list[str]:
    """What exists of a cluster, in words; empty after `down`."""
    found = {
        "processes": bool(processes.daemons_of(layout)),
        "network links": bool(network.links(layout)),
        "network namespaces": bool(network.namespaces(layout)),
        f"names in {hosts.HOSTS}": str(layout.home) in hosts.HOSTS.read_text().split(),
        f"folder {layout.home}": layout.home.exists(),
    }
    return [what for what, exists in found.items() if exists]
