"""One attempt of a run on one rank: from a run folder to an outcome."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import config as configuration
from .assemble import assemble
from .deterministic import compute_the_same_each_time
from .device import backend, open_device
from .leaving import leave_later
from .ledger import Data
from .loop import Job, Outcome, run_evaluation, train
from .manifest import Found
from .metrics import records
from .ranks import Ranks
from .rehearsal import VARIABLE, rehearse
from .runfolder import AttemptFolder, RunFolder, write_json
from .schedule import arithmetic_lines, batch_plan
from .stop import StopFlag, agreed, handlers
from .telling import tell
from .watchdog import SLOW, Watchdog

STORE_WAIT_S = 10.0
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Longest wait in a collective: longer than any save or evaluation batch, shorter than torch's half hour."""
SETTLE_S = 5.0
"""How long a save that is under way may take to end after an error in training."""
_kept: list[Any] = []
"""Process groups that were left. Their C++ destructor joins gloo's threads while it holds the GIL, which such a thread
may be waiting for to drop a tensor: a deadlock, seen in one run of about twenty. So it never runs."""

FAILED, TERMINATED = 5, 143
"""Exit codes that metrics sinks are told of; a rank ends in the same ones."""


def run(folder: RunFolder, ranks: Ranks, attempt: int, stop: StopFlag | None = None) -> Outcome:
    """Train what the folder's spec says, from its newest checkpoint on. Called by every rank; RANK and its kin are set.

    `stop`: a flag whose signal handlers the caller has installed; None installs them for the call (main thread only).
    Errors: TrainingError for what the user can act on, on every rank that meets it; others pass as they are, and the
    process group is then left as it is, because leaving it could hang.
    """
    if stop is None:
        with handlers(StopFlag()) as own:
            return run(folder, ranks, attempt, own)
    config = configuration.load(folder.spec)
    _settle(config.train)
    device = open_device(config.train.device, ranks)
    plan = batch_plan(config.train.batch, ranks.world_size)
    hang_s = config.train.health.hang_timeout_s
    with Watchdog(hang_s, folder.attempt(attempt), ranks) as watchdog, process_group(ranks, device, hang_s):
        job, found = assemble(config, folder, ranks, attempt, stop, device, plan, watchdog)
        if VARIABLE in os.environ:
            rehearse(job, folder.attempt(attempt), found.step if found else 0)
        try:
            _announce(job, folder, found, device)
            _write_down(job, folder.attempt(attempt), found)
            outcome = _finish(job, folder, found)
        except Exception:
            job.checkpoints.settle(SETTLE_S)
            job.metrics.close(FAILED)
            raise
        if job.progress is not None:
            if outcome.kind == "stopped":
                job.progress.note(f"stopped at step {outcome.step}/{job.total_steps} ({outcome.reason or 'asked'})")
            job.progress.close()
        code = 0 if outcome.kind == "done" else TERMINATED
        job.metrics.close(code)
        if code and ranks.rank == 0 and folder.attempt(attempt).path.exists():
            write_json(folder.attempt(attempt).stopped, {"step": outcome.step, "reason": outcome.reason})
        _kept.append(job.checkpoints)
        bound = leave_later(code)  # all is written: only the process group is left to leave, which may hang
    bound.cancel()
    return outcome


def _finish(job: Job, folder: RunFolder, found: Found | None) -> Outcome:
    """Train what is left; of a run whose last step is done already, at most the evaluation is."""
    if found is None or found.step < job.total_steps:
        return train(job, found.step if found else 0, found.samples if found else 0)
    done = Outcome("done", found.step, found.samples)
    if job.held_out is None or not job.config.train.eval.at_end:
        return done
    results = last_evaluation(folder, found.step) if job.ranks.rank == 0 else None
    if not agreed(StopFlag(asked=results is not None)):
        results = run_evaluation(job, found.step, found.samples)
        if results is None:
            return Outcome("stopped", found.step, found.samples, reason=job.stop.reason)
    return Outcome("done", found.step, found.samples, results or {})


def last_evaluation(folder: RunFolder, step: int) -> dict[str, float] | None:
    """Results of an evaluation at a step that the metrics file already has. A torn last line counts as none."""
    at = [record for record in records(folder.metrics, "eval") if record.get("step") == step]
    known = ("step", "samples", "attempt", "time")
    return {k: v for k, v in at[-1].items() if isinstance(v, float) and k not in known} if at else None


def _wait_for_store(address: str, port: int) -> None:
    """Wait a few seconds until rank 0 listens: torch's own client, refused once, comes back only after half a second.

    Whatever is wrong here is left to torch, which says it better.
    """
    deadline = time.monotonic() + STORE_WAIT_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.005)


@contextmanager
def process_group(ranks: Ranks, device: torch.device, hang_s: float | None = None) -> Iterator[None]:
    """The default process group, from MASTER_ADDR and MASTER_PORT; none for a single process.

    A watchdog that takes `hang_s` seconds of silence for a hang speaks before a collective gives up: it knows more.

    It is left only when the block ends well: after an error, other ranks may be stuck in a collective.
    """
    if ranks.world_size == 1:
        yield
        return
    if ranks.rank != 0 and "MASTER_ADDR" in os.environ:
        _wait_for_store(os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", "29500")))
    dist.init_process_group(
        backend(device),
        init_method="env://",
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=max(COLLECTIVE_TIMEOUT, timedelta(seconds=(SLOW + 1.0) * (hang_s or 0.0))),
        device_id=device if device.type == "cuda" else None,
    )
    yield
    _kept.append(dist.group.WORLD)
    dist.destroy_process_group()


def _announce(job: Job, folder: RunFolder, found: Found | None, device: torch.device) -> None:
    if job.progress is None:
        return
    world = job.ranks.world_size
    job.progress.note(f"run    {folder.run_id}  {folder.path}")
    for line in arithmetic_lines(job.config.train, job.slots.plan, job.total_steps):
        job.progress.note(line)
    kind = device.type if device.type == "cpu" else torch.cuda.get_device_name(device)
    job.progress.note(f"ranks  {world} on {kind}, {job.config.train.precision}, {len(job.loader.dataset)} samples")
    if found is not None:
        job.progress.note(f"resume {found.name}: step {found.step}/{job.total_steps}, {found.samples} samples seen")
        before = found.extra.get("code", {})
        if before.get("file") == job.code.get("file") and before.get("xxh3_128") != job.code.get("xxh3_128"):
            job.progress.note(f"note   {before['file']} is not what it was when {found.name} was saved")
    elif (trained := max((int(line["step"]) for line in records(folder.metrics, "train")), default=0)) > 0:
        job.progress.note(f"note   earlier attempts came to step {trained}, but no checkpoint is there: begins anew")


def _write_down(job: Job, attempt: AttemptFolder, found: Found | None) -> None:
    """For `launch verify`: what the attempt went on from, and what its steps and learning rates hang on."""
    if job.ranks.rank != 0 or not attempt.path.exists():
        return
    settings = job.config.train
    begun = {
        "step": found.step if found else 0,
        "samples": found.samples if found else 0,
        "checkpoint": found.name if found else None,
        "set_aside": job.checkpoints.aside,
        "world_size": job.ranks.world_size,
        "total_steps": job.total_steps,
        "log_every_steps": settings.log.every_steps,
        "data": asdict(Data.of(job.slots)),
        "optim": configuration.to_plain(settings.optim),
        "schedule": configuration.to_plain(settings.schedule),
    }
    try:
        write_json(attempt.began, begun)
    except OSError as error:
        tell(f"{attempt.began}: {error.strerror}; training goes on without it")


def _settle(settings: configuration.TrainConfig) -> None:
    """OMP_NUM_THREADS once more: a rank forked from a process that had torch already would not have read it."""
    if settings.reproducible:
        compute_the_same_each_time()
        return
    count = os.environ.get("OMP_NUM_THREADS", "")
    if count.isdigit() and int(count) > 0:
        torch.set_num_threads(int(count))
