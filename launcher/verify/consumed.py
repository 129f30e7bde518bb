"""Whether each checkpoint consumed the samples that the spec says, in its order: both hashes are derived anew."""

from __future__ import annotations

from typing import Any

from training.config import TrainConfig
from training.ledger import Data, Sums, derive
from training.schedule import batch_plan

from .checkpoints import MANIFEST, Kept
from .report import Check, count


def check(kept: list[Kept], train: TrainConfig) -> list[Check]:
    """`samples`: what was consumed, whatever its order; `order`: that it was consumed in the spec's order."""
    samples, order = Check("samples"), Check("order")
    told: list[tuple[Kept, Data]] = []
    for one in kept:
        if not one.ledger:
            samples.notes.append(f"{one.name} has no ledger: it was written without one")
            continue
        try:
            data = ledger_data(one)
            faults = _arithmetic(data, one)
        except ValueError as error:
            faults = [str(error)]
        samples.faults += [f"{one.name}/{MANIFEST}: {fault}" for fault in faults]
        if not faults:
            told.append((one, data))
    _settings(told, train, samples)
    _hashes(told, samples, order)
    if told and not samples.faults:
        newest, data = told[-1]
        epochs = newest.samples / data.epoch_samples
        samples.text = (
            f"{newest.samples:,} consumed in {epochs:.4g} epochs of {data.epoch_samples:,}, none lost and none twice, "
            f"as of {count(len(told), 'checkpoint')}"
        )
    if told and not order.faults:
        data = told[-1][1]
        kind = f"shuffled with seed {data.seed}" if data.shuffle else "not shuffled"
        order.text = f"{count(len(told), 'checkpoint')} in the order of the spec ({kind})"
    return [samples, order]


def ledger_data(one: Kept) -> Data:
    """What a checkpoint's ledger says about the data. Errors: ValueError when it is no ledger."""
    try:
        data = Data(**one.ledger["data"])
        counts = (data.samples, data.epoch_samples, data.global_size)
        since = (one.ledger["since"]["step"], one.ledger["since"]["samples"])
        Sums.read(one.ledger)
        if not all(isinstance(number, int) for number in (*counts, *since, data.seed)) or min(counts) < 1:
            raise ValueError(f"{counts} are no numbers of samples")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its ledger is not valid: {type(error).__name__}: {error}") from error
    return data


def _settings(told: list[tuple[Kept, Data]], train: TrainConfig, check: Check) -> None:
    """What the order hangs on is the spec's in each ledger, unless a later ledger began anew with other settings."""
    if not told:
        return
    newest, now = told[-1]
    for one, data in told:
        differences = _against_spec(data, one, train)
        if data == now or newest.ledger["since"]["samples"] < one.samples:
            check.faults += [f"{one.name}/{MANIFEST}: {difference}" for difference in differences]
        else:
            check.notes.append(f"{one.name} was trained with other settings: {'; '.join(differences)}")


def _against_spec(data: Data, one: Kept, train: TrainConfig) -> list[str]:
    """What was used otherwise than the spec says."""
    size = train.batch.global_size or batch_plan(train.batch, one.world_size).global_size
    drop = train.data.last == "drop"
    used: dict[str, tuple[Any, Any]] = {
        "train.seed": (data.seed, train.seed),
        "train.data.shuffle": (data.shuffle, train.data.shuffle),
        "train.data.last": ("drop" if data.drop_last else "keep", train.data.last),
        "the global batch": (data.global_size, size),
        "train.data.lanes": (data.lanes or train.data.lanes, train.data.lanes),
        "train.data.window": (data.window or train.data.window, train.data.window),
        "samples of an epoch": (data.epoch_samples, data.samples // size * size if drop else data.samples),
    }
    return [f"{name} was {was}, the spec makes it {now}" for name, (was, now) in used.items() if was != now]


def _arithmetic(data: Data, one: Kept) -> list[str]:
    since = one.ledger["since"]
    due = data.consumed(one.step - since["step"], since["samples"])
    faults = []
    if one.samples != due:
        faults.append(f"{one.samples:,} samples at step {one.step:,}, but so many steps consume {due:,}")
    if (entered := since["samples"] + one.ledger["samples"]) != one.samples:
        faults.append(f"its ledger holds {entered:,} samples, but it says that {one.samples:,} were consumed")
    return faults


def _hashes(told: list[tuple[Kept, Data]], samples: Check, order: Check) -> None:
    """Derive the hashes of one checkpoint after the other: each adds to the one before it where both began alike."""
    before: tuple[Data, int] | None = None
    due, place = Sums(), 0
    for one, data in told:
        since = int(one.ledger["since"]["samples"])
        if before != (data, since) or one.samples < place:
            before, due, place = (data, since), Sums(), since
            if since:
                samples.notes.append(f"{one.name}: its ledger begins at {since:,} samples; what was before is not told")
        due += derive(data, place, one.samples)
        place = one.samples
        kept = Sums.read(one.ledger)
        where = f"{one.name}/{MANIFEST}"
        if kept.set != due.set:
            samples.faults.append(f"{where}: samples were lost, repeated or exchanged: set {kept.set}, not {due.set}")
        if kept.order != due.order:
            only = "; each sample was consumed once all the same" if kept.set == due.set else ""
            order.faults.append(f"{where}: not the order of the spec{only}: order {kept.order}, not {due.order}")
