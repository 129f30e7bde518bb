"""What happens to a real cluster, done on purpose: preemption, dead nodes, cut cables, a controller that hangs."""

from __future__ import annotations

import signal

from devcluster import daemons, network, nodes, processes
from devcluster.layout import Layout
from devcluster.shell import ClusterError
from devcluster.state import require_state, slurm


def preempt(layout: Layout, job_id: str, hold_seconds: int) -> str:
    """Takes a running job's nodes for an urgent job, and returns that job's id.

    The urgent job asks for the very same nodes, whole, so Slurm itself must preempt what runs there: the signal, the
    grace and the requeue are real. It holds the nodes for `hold_seconds` and ends.
    """
    state = require_state(layout)
    if state.settings.preempt_mode == "OFF":
        raise ClusterError("this cluster never preempts: it was brought up with --preempt-mode OFF")
    found = slurm(layout, "squeue", "--noheader", f"--jobs={job_id}", "--format=%T %D %N %P").split()
    if len(found) != 4 or found[0] != "RUNNING":
        raise ClusterError(
            f"job {job_id} is {found[0] if found else 'unknown'}, and only a running job can be preempted"
        )
    _, count, where, partition = found
    if partition == "urgent":
        raise ClusterError(f"job {job_id} is in partition urgent itself, which nothing preempts")
    request = [f"--nodes={count}", f"--nodelist={where}", "--exclusive", "--partition=urgent", "--no-requeue"]
    quiet = ["--job-name=preemptor", "--output=/dev/null", "--chdir=/"]
    return slurm(layout, "sbatch", "--parsable", *request, *quiet, f"--wrap=sleep {hold_seconds}").strip()


def kill_node(layout: Layout, node: str) -> None:
    """Kills slurmd and every process of the node's jobs at once; nobody tells the controller.

    The node's kernel lives on and closes the connections. For a node that loses power, `cut` it first.
    """
    state = require_state(layout)
    state.number(node)
    processes.end(lambda: processes.inside_namespace(layout.namespace(node)), f"node {node}")


def revive_node(layout: Layout, node: str) -> None:
    """Starts a dead node's slurmd again; returns when the controller would give it jobs."""
    state = require_state(layout)
    state.number(node)
    if not processes.recorded(layout, daemons.node_process(node)):
        daemons.start_node(layout, node)
    nodes.wait_working(layout, (node,))


def cut(layout: Layout, node: str) -> None:
    """Pulls the node's cable: it lives on, and hears and reaches nobody."""
    network.set_cable(layout, require_state(layout), node, up=False)


def heal(layout: Layout, node: str) -> None:
    """Plugs the cable in again; returns when the controller would give the node jobs."""
    state = require_state(layout)
    network.set_cable(layout, state, node, up=True)
    nodes.wait_working(layout, (node,))


def pause(layout: Layout) -> None:
    """The controller hangs: it accepts connections and answers nothing."""
    processes.send(_controller(layout), signal.SIGSTOP)


def resume(layout: Layout) -> None:
    """The controller goes on where it hung."""
    processes.send(_controller(layout), signal.SIGCONT)


def restart_controller(layout: Layout) -> None:
    """Ends the controller as an update of the site would (it saves its state), and starts it again."""
    controller = _controller(layout)
    processes.send(controller, signal.SIGCONT)
    processes.send(controller, signal.SIGTERM)
    processes.wait_gone(controller, "slurmctld")
    daemons.start_controller(layout)
    state = require_state(layout)
    links = network.links(layout)
    alive = [node for node in state.nodes if processes.recorded(layout, daemons.node_process(node))]
    if reachable := [node for node in alive if links.get(layout.link(state.number(node)), False)]:
        nodes.wait_working(layout, reachable)


def _controller(layout: Layout) -> processes.Process:
    require_state(layout)
    controller = processes.recorded(layout, "slurmctld")
    if controller is None:
        raise ClusterError("the controller does not run; `up` starts the cluster anew")
    return controller
