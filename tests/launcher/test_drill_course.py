"""Proves how a spec is shortened for a drill, which numbers of ranks it resumes at, and what it refuses.

python -m pytest tests/launcher/test_drill_course.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import gpus, specfile
from launcher.drill.course import at, batch_at, course
from launcher.errors import UsageError
from launcher.spec import JobSpec

from .conftest import Resolve

TRAIN = "name: t\nresources: {tasks_per_node: 2}\ntrain:\n  task: digits\n  epochs: 20\n  batch: {per_rank: 32}\n"


def shortened(resolve: Resolve, text: str, steps: int | None = None, faults: int = 20) -> JobSpec:
    """The spec that a drill runs."""
    found = course(resolve(text).spec, steps, faults, {})
    return resolve(text, *found.overrides).spec


def test_a_long_run_becomes_one_of_120_steps_with_8_saves(resolve: Resolve) -> None:
    found = course(resolve(TRAIN).spec, None, 20, {})
    assert (found.steps, found.every, found.ranks, found.others) == (120, 12, 2, (1, 4))


def test_what_hangs_on_the_length_is_cut_to_it_and_the_rest_stays(resolve: Resolve) -> None:
    text = TRAIN + (
        "  schedule: {warmup_steps: 200, decay: wsd, decay_steps: 100, min_lr_ratio: 0.1}\n"
        "  checkpoint: {every_minutes: 5, keep_last: 9, keep_every: 50, keep_best: accuracy, retries: 4}\n"
        "  health: {not_finite: rollback, rollback_steps: 40}\n"
        "  eval: {every_steps: 30}\n"
        "  data: {workers: 2}\n"
        "wandb: {project: digits}\n"
    )
    spec = shortened(resolve, text)
    train = spec.train
    assert train is not None and spec.wandb is not None
    assert (train.steps, train.epochs, train.log.every_steps) == (120, None, 1)
    assert (train.schedule.warmup_steps, train.schedule.decay_steps, train.schedule.min_lr_ratio) == (30, 30, 0.1)
    saves = train.checkpoint
    assert (saves.every_steps, saves.every_minutes, saves.keep_last, saves.retries) == (12, None, 3, 1)
    assert (saves.keep_every, saves.keep_best) == (50, "accuracy")
    assert (train.health.rollback_steps, train.eval.every_steps, train.data.workers) == (12, 30, 2)
    assert (spec.executor, spec.restart.mode, spec.wandb.mode) == ("local", "none", "disabled")


def test_a_schedule_that_fits_is_left_alone(resolve: Resolve) -> None:
    text = TRAIN + "  schedule: {warmup_steps: 10, decay: cosine}\n"
    train = shortened(resolve, text).train
    assert train is not None
    assert (train.schedule.warmup_steps, train.schedule.decay_steps) == (10, None)


@pytest.mark.parametrize(
    ("own", "asked", "faults", "steps", "every"),
    [
        (30, None, 20, 30, 3),
        (3, None, 20, 8, 1),
        (5000, None, 20, 120, 12),
        (5000, 400, 20, 400, 40),
        (30, 64, 4, 64, 8),
        (5000, 800, 200, 800, 8),
    ],
)
def test_the_length_is_the_specs_own_up_to_120_or_as_asked(
    own: int, asked: int | None, faults: int, steps: int, every: int, resolve: Resolve
) -> None:
    spec = resolve(TRAIN.replace("epochs: 20", f"steps: {own}")).spec
    found = course(spec, asked, faults, {})
    assert (found.steps, found.every) == (steps, every)


@pytest.mark.parametrize(
    ("ranks", "per_rank", "others"),
    [
        (1, 12, (2, 3, 4)),
        (2, 6, (1, 3, 4)),
        (4, 3, (3, 2, 1)),
        (6, 2, (4, 3, 2, 1)),
        (1, 1, ()),
        (1, 7, ()),
        (5, 1, (1,)),
    ],
)
def test_other_numbers_of_ranks_divide_the_global_batch(
    ranks: int, per_rank: int, others: tuple[int, ...], resolve: Resolve
) -> None:
    text = TRAIN.replace("tasks_per_node: 2", f"tasks_per_node: {ranks}").replace("32", str(per_rank))
    found = course(resolve(text).spec, None, 20, {})
    assert found.others == others
    for number in others:
        kept = resolve(text, *at(number), *batch_at(resolve(text).spec.train, ranks, number)).spec  # type: ignore[arg-type]
        assert kept.train is not None
        assert kept.train.batch.global_size == ranks * per_rank


def test_where_no_other_number_of_ranks_will_do_the_figures_say_why(resolve: Resolve) -> None:
    text = TRAIN.replace("tasks_per_node: 2", "tasks_per_node: 1").replace("32", "7")
    assert course(resolve(text).spec, None, 20, {}).why_none == (
        "a global batch of 7 is a multiple of no other number of ranks up to 4 (more are not tried on the CPU)"
    )


def test_a_reproducible_run_keeps_its_micro_batches(resolve: Resolve) -> None:
    text = TRAIN + "  reproducible: true\n"
    assert course(resolve(text).spec, None, 20, {}).others == (1,)
    found = course(resolve(text.replace("{per_rank: 32}", "{per_rank: 2, accumulate: 6}")).spec, None, 20, {})
    assert found.others == (1, 3, 4)
    alone = resolve(text.replace("tasks_per_node: 2", "tasks_per_node: 1")).spec
    assert course(alone, None, 20, {}).why_none == (
        "a global batch of 1 micro-batches (train.reproducible keeps them) is a multiple of no other number of ranks "
        "up to 4 (more are not tried on the CPU)"
    )


def test_there_are_never_more_ranks_than_gpus(resolve: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    each, shared = (TRAIN.replace("{tasks", f"{{gpus_per_{unit}, tasks") for unit in ("task: 1", "node: 2"))
    for visible, others in (("0,1", (1,)), ("0,1,2,3", (1, 4))):
        assert course(resolve(each).spec, None, 20, {"CUDA_VISIBLE_DEVICES": visible}).others == others
        assert course(resolve(shared).spec, None, 20, {"CUDA_VISIBLE_DEVICES": visible}).others == (1,)
    with pytest.raises(UsageError) as caught:
        course(resolve(each).spec, None, 20, {"CUDA_VISIBLE_DEVICES": "0"})
    assert str(caught.value) == (
        "resources: 2 ranks with 1 GPU each, but this machine has 1 GPU; rehearse with fewer: "
        "resources.nodes=1 resources.tasks_per_node=1"
    )
    monkeypatch.setattr(gpus, "_DRIVER_LIST", Path("/nonexistent"))
    assert course(resolve(each).spec, None, 20, {}).others == (1, 4)


def test_what_cannot_be_rehearsed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("name: c\ncommand: [echo, hello]\n")
    spec = specfile.resolve(tmp_path / "spec.yaml", [], env={"HOME": str(tmp_path)}).spec
    with pytest.raises(UsageError) as caught:
        course(spec, None, 20, {})
    assert str(caught.value) == (
        "c: a drill compares checkpoints and losses, and a `command` has none that we know; "
        "give a spec with a `train` section"
    )
    (tmp_path / "spec.yaml").write_text(TRAIN)
    spec = specfile.resolve(tmp_path / "spec.yaml", [], env={"HOME": str(tmp_path)}).spec
    with pytest.raises(UsageError) as caught:
        course(spec, 7, 20, {})
    assert str(caught.value) == "--steps: 7 leaves no room between saves; give at least 8"
