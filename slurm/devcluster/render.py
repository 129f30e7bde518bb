"""The text of every configuration file, as pure functions of settings and names."""

from __future__ import annotations

from devcluster.layout import Layout
from devcluster.state import State

SLURM_USER = "slurm"  # Debian's packages make it; a controller that is not root is what sites have


def slurm_conf(layout: Layout, state: State) -> str:
    """slurm.conf: the global keys, then nodes and partitions; `extra` lines replace a global key or are added."""
    keys = {**_identity(layout, state), **_resources(state), **_scheduling(state), **_accounting(layout, state)}
    added: list[str] = []
    for line in state.settings.extra:
        key, _, value = line.partition("=")
        if key.lower() in ("nodename", "partitionname", "nodeset", "downnodes", "include"):
            added.append(line)
        else:
            known = {name.lower(): name for name in keys}
            keys[known.get(key.strip().lower(), key.strip())] = value.strip()
    lines = [f"{key}={value}" for key, value in keys.items()]
    return "\n".join([*lines, *_nodes(state), *_partitions(state), *added]) + "\n"


def _identity(layout: Layout, state: State) -> dict[str, str]:
    """Who is who, where files lie, how the parts trust one another."""
    return {
        "ClusterName": state.settings.cluster_name,
        "SlurmctldHost": f"{layout.controller_name}({state.controller_address})",
        "SlurmctldPort": str(state.first_port),
        "SlurmdPort": str(state.first_port + 1),
        "SlurmUser": SLURM_USER,
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={layout.munge_socket},cred_expire={state.settings.requeue_delay}",
        "CommunicationParameters": "NoCtldInAddrAny",  # listen on the bridge only, not on the machine's own network
        "StateSaveLocation": str(layout.controller_state),
        "SlurmctldPidFile": str(layout.controller_state / "slurmctld.pid"),
        "SlurmdSpoolDir": str(layout.spool / "%n"),
        "SlurmdPidFile": str(layout.spool / "%n.pid"),
        "SlurmdLogFile": str(layout.logs / "slurmd-%n.steps.log"),
        "SlurmctldSyslogDebug": "quiet",
        "SlurmdSyslogDebug": "quiet",
    }


def _resources(state: State) -> dict[str, str]:
    """How jobs are placed, watched and ended."""
    settings = state.settings
    resources = {
        "SlurmdParameters": "config_overrides",  # nodes may claim more than the machine has
        "ProctrackType": f"proctrack/{settings.proctrack}",
        "TaskPlugin": "task/cgroup" if settings.proctrack == "cgroup" else "task/none",
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": "task=5",
        "MpiDefault": "none",
        "ReturnToService": "2",
        "SlurmdTimeout": str(settings.slurmd_timeout),
        "KillWait": str(settings.kill_wait),
        "UnkillableStepTimeout": "60",
        "MessageTimeout": "20",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "DefMemPerCPU": str(settings.memory_mib // settings.cpus),
    }
    return resources | ({"GresTypes": "gpu"} if settings.gpus else {})


def _scheduling(state: State) -> dict[str, str]:
    """Preemption between partitions, and a scheduler that looks every two seconds, so that tests do not wait for it."""
    settings = state.settings
    off = settings.preempt_mode == "OFF"
    scheduling = {
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "bf_interval=2,sched_interval=2",
        "PreemptType": "preempt/none" if off else "preempt/partition_prio",
        "PreemptMode": settings.preempt_mode,
    }
    return scheduling | ({"SlurmctldParameters": "preempt_send_user_signal"} if settings.preempt_signal else {})


def _accounting(layout: Layout, state: State) -> dict[str, str]:
    """Accounting through slurmdbd, reached by the bridge's address so that jobs may call sacct too."""
    settings = state.settings
    if not settings.accounting:
        return {"AccountingStorageType": "accounting_storage/none"}
    accounting = {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": state.controller_address,
        "AccountingStoragePort": str(state.first_port + 2),
        "AccountingStoragePass": str(layout.munge_socket),  # not a password: slurmdbd's clients do not heed AuthInfo
    }
    accounting |= {"AccountingStorageTRES": "gres/gpu"} if settings.gpus else {}
    return accounting | ({"AccountingStoreFlags": "job_comment"} if settings.store_comment else {})


def _nodes(state: State) -> list[str]:
    settings = state.settings
    gres = f" Gres=gpu:{settings.gpu_type}:{settings.gpus}" if settings.gpus else ""
    shape = f"CPUs={settings.cpus} SocketsPerBoard=1 CoresPerSocket={settings.cpus} ThreadsPerCore=1"
    return [
        f"NodeName={node} NodeHostname={node} NodeAddr={state.address(number)} {shape}"
        f" RealMemory={settings.memory_mib}{gres} State=UNKNOWN"
        for number, node in enumerate(state.nodes, start=1)
    ]


def _partitions(state: State) -> list[str]:
    settings = state.settings
    preempts = settings.preempt_mode != "OFF"
    never = " PreemptMode=OFF" if preempts else ""
    grace = f" GraceTime={settings.grace_time}" if preempts else ""
    return [
        f"PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1{grace} State=UP",
        f"PartitionName=short Nodes=ALL MaxTime={settings.short_minutes} PriorityTier=1{grace} State=UP",
        f"PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10{never} State=UP",
    ]


def gres_conf(layout: Layout, state: State) -> str:
    """gres.conf: pretend GPUs are device files; a bare Count= would leave the nodes in state INVAL."""
    settings = state.settings
    if not settings.gpus:
        return ""
    return f"Name=gpu Type={settings.gpu_type} File={layout.devices}/gpu[0-{settings.gpus - 1}]\n"


def cgroup_conf(state: State) -> str:
    """cgroup.conf.

    Only a cluster that tracks by cgroup limits memory, and without systemd, which may not be there. Any other is told
    that it has version 1, as slurmd otherwise looks for itself and ends where it finds none, as in many a container.
    """
    if state.settings.proctrack == "linuxproc":
        return "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"
    return "CgroupAutomount=no\nIgnoreSystemd=yes\nConstrainRAMSpace=yes\nConstrainSwapSpace=no\n"


def slurmdbd_conf(layout: Layout, state: State) -> str:
    """slurmdbd.conf: no password, because the database knows the user at the other end of its socket."""
    return f"""AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
DbdHost={layout.controller_name}
DbdAddr={state.controller_address}
DbdPort={state.first_port + 2}
SlurmUser={SLURM_USER}
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={SLURM_USER}
StorageLoc=slurm_acct_db
PidFile={layout.controller_state / "slurmdbd.pid"}
"""


def database_conf(layout: Layout) -> str:
    """MariaDB's settings: no network, and no care for the disk, because nothing here outlives the cluster."""
    return f"""[mysqld]
datadir={layout.database}/data
socket={layout.database_socket}
pid-file={layout.database}/db.pid
init-file={layout.database}/init.sql
skip-networking
skip-log-bin
skip-name-resolve
performance-schema=OFF
innodb-buffer-pool-size=32M
innodb-log-file-size=8M
innodb-lock-wait-timeout=900
innodb-flush-log-at-trx-commit=0
innodb-flush-method=nosync
innodb-doublewrite=OFF
innodb-stats-persistent=OFF
max-allowed-packet=16M
key-buffer-size=1M
aria-pagecache-buffer-size=1M
aria-log-file-size=8M
"""


DATABASE_INIT = f"""CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE USER IF NOT EXISTS {SLURM_USER}@localhost IDENTIFIED VIA unix_socket;
GRANT ALL ON slurm_acct_db.* TO {SLURM_USER}@localhost;
"""
"""Runs at each start of MariaDB: the accounting database, and the user that slurmdbd is."""
