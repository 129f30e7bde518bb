"""Proves that `launch verify` lets a sound run pass and names what is wrong in every other, with the file that says so.

The runs here are made by hand: each rank's real share of the real order enters a real ledger, the manifest is what
training writes; only nothing is trained.

pytest tests/launcher/test_verify.py
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from launcher import cli
from launcher.verify import attempts, checkpoints, difference, replay
from launcher.verify.checkpoints import parse
from launcher.verify.report import Check
from training import config as configuration
from training.ledger import Data, Ledger
from training.manifest import describe
from training.order import Order, Share, Slots
from training.runfolder import RunFolder, append_json, write_json
from training.schedule import batch_plan, lr_at, scaled_lr
from training.storage import LocalFolder

SPEC = {
    "name": "t",
    "train": {
        "task": "synthetic",
        "seed": 3,
        "steps": 12,
        "batch": {"global": 6},
        "optim": {"base_lr": 0.1, "base_batch": 3},
        "schedule": {"warmup_steps": 2, "decay": "cosine"},
        "checkpoint": {"every_steps": 4},
        "log": {"every_steps": 2},
    },
}
SAMPLES = 20  # steps of 6, 6, 6 and 2 samples
Change = Callable[[Share], Share]


class Run:
    """A run folder, made attempt by attempt."""

    def __init__(self, path: Path, **train: Any) -> None:
        self.folder = RunFolder(path)
        path.mkdir()
        self.change(**train)
        self.store = LocalFolder(self.folder.checkpoints)
        self.kept: dict[int, tuple[int, dict[str, Any]]] = {0: (0, {})}

    def change(self, **train: Any) -> None:
        """Write another spec, as `launch resume` does."""
        self.folder.spec.write_text(yaml.safe_dump({**SPEC, "train": {**SPEC["train"], **train}}))  # type: ignore[dict-item]
        self.config = configuration.load(self.folder.spec).train

    def attempt(
        self,
        first: int,
        last: int,
        *,
        world_size: int = 2,
        saves: Iterable[int] = (),
        cause: str = "done",
        change: Change = lambda share: share,
    ) -> None:
        """An attempt from step `first` to `last`. `change` is done to each share before it is consumed."""
        number = len(list(self.folder.attempts.glob("*"))) + 1
        place = self.folder.attempt(number)
        place.path.mkdir(parents=True)
        plan = batch_plan(self.config.batch, world_size)
        samples, kept = self.kept[first]
        slots = [Slots(Order(SAMPLES, self.config.seed), plan, rank) for rank in range(world_size)]
        write_json(
            place.began,
            {
                "step": first,
                "samples": samples,
                "world_size": world_size,
                "total_steps": 12,
                "log_every_steps": self.config.log.every_steps,
                "data": asdict(Data.of(slots[0])),
                "optim": configuration.to_plain(self.config.optim),
                "schedule": configuration.to_plain(self.config.schedule),
            },
        )
        ledgers = [Ledger.resume(kept, own, first, samples) if kept else Ledger.start(own) for own in slots]
        shares = zip(*(islice(own.shares(samples), last - first) for own in slots), strict=True)
        for step, together in enumerate(shares, first + 1):
            for ledger, share in zip(ledgers, together, strict=True):
                ledger.add(change(share))
            samples = together[0].samples
            if step % self.config.log.every_steps == 0 or (step == last and cause == "stopped"):
                self.line(number, step, samples)
            if step in saves or (step == last and cause in ("done", "stopped")):
                self.save(step, samples, world_size, Ledger.total(ledger.part() for ledger in ledgers))
        code = {"done": 0, "stopped": 143}.get(cause, 5)
        if cause == "stopped":
            write_json(place.stopped, {"step": last, "reason": "SIGTERM"})
        write_json(place.result, {"attempt": number, "cause": cause, "exit_code": code})
        append_json(self.folder.attempts_jsonl, {"attempt": number, "cause": cause, "exit_code": code})

    def line(self, attempt: int, step: int, samples: int, **other: Any) -> None:
        peak = scaled_lr(self.config.optim, 6)
        lr = lr_at(step - 1, peak, self.config.schedule, 12)
        record = {"attempt": attempt, "step": step, "samples": samples, "kind": "train", "loss": 1.0, "lr": lr}
        append_json(self.folder.metrics, {**record, **other})

    def save(self, step: int, samples: int, world_size: int, ledger: dict[str, Any]) -> None:
        self.kept[step] = samples, ledger
        name = f"step-{step:09d}"
        self.store.make(name)
        files = {"model-00000.safetensors": self.store.write(f"{name}/model-00000.safetensors", [tensors(w=[step])])}
        for text in ("state.json", *(f"rng-{rank:05d}.json" for rank in range(world_size))):
            files[text] = self.store.write(f"{name}/{text}", [b"{}"])
        described = describe(step, samples, world_size, files, {}, ledger, {})
        self.store.write(f"{name}/manifest.json", [described])

    def forge(self, step: int, change: Callable[[dict[str, Any]], None]) -> None:
        """Change a manifest, and make its digest right again."""
        path = self.folder.checkpoints / f"step-{step:09d}" / "manifest.json"
        body = json.loads(path.read_text())
        del body["digest"]
        change(body)
        body["digest"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(body))

    def edit_metrics(self, change: Callable[[list[str]], list[str]]) -> None:
        lines = change(self.folder.metrics.read_text().splitlines(keepends=True))
        self.folder.metrics.write_text("".join(lines))


def tensors(**values: list[float]) -> bytes:
    """A safetensors file of float32 vectors."""
    head, data = {}, b""
    for name, value in values.items():
        raw = np.array(value, dtype="<f4").tobytes()
        head[name] = {"dtype": "F32", "shape": [len(value)], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Stopped at step 5, gone on by three ranks until they were killed after step 10, ended by one from step 8 on."""
    made = Run(tmp_path / "t-ab2c")
    made.attempt(0, 5, world_size=2, saves=[4], cause="stopped")
    made.attempt(5, 10, world_size=3, saves=[8], cause="killed")
    made.attempt(8, 12, world_size=1)
    return made


Verify = Callable[[Run], tuple[int, str]]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Verify:
    """Exit code and output of the command, without the folder's path."""

    def call(made: Run) -> tuple[int, str]:
        code = cli.main(["verify", str(made.folder.path)])
        printed = capsys.readouterr()
        assert not printed.err
        return code, printed.out.replace(f"{made.folder.path}", "RUN")

    return call


def test_a_sound_run_holds_whatever_the_numbers_of_its_ranks(run: Run, verify: Verify) -> None:
    code, out = verify(run)
    assert (code, out.splitlines()) == (
        0,
        [
            "run  t-ab2c  RUN",
            "ok   checkpoints  4 of 4 whole, the newest of step 12; 16 files with 316 bytes are as they were written",
            "ok   samples      60 consumed in 3 epochs of 20, none lost and none twice, as of 4 checkpoints",
            "ok   order        4 checkpoints in the order of the spec (shuffled with seed 3)",
            "ok   metrics      7 training lines up to step 12, no gap and no double; samples and rates are the spec's; "
            "1 more superseded by later attempts",
            "ok   attempts     3 attempts: stopped, killed, done; went on from step 5, 8",
            "                  2 steps that had been logged but not saved were taken again",
            "verdict  everything holds",
        ],
    )


def wrong(verify: Verify, run: Run) -> list[str]:
    """The lines of what is wrong; there must be some, and the exit code must say so."""
    code, out = verify(run)
    assert code == 5, out
    return [line for line in out.splitlines() if line.startswith("BAD")]


def test_one_flipped_bit_is_named_with_its_file(run: Run, verify: Verify) -> None:
    path = run.folder.checkpoints / "step-000000008/model-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert wrong(verify, run) == [
        "BAD  checkpoints  RUN/checkpoints/step-000000008/model-00000.safetensors: has other bytes than were written: "
        "its hash differs from its manifest's"
    ]


def test_a_short_file_and_a_missing_one_are_named(run: Run, verify: Verify) -> None:
    for step, damage in ((8, lambda path: path.write_bytes(path.read_bytes()[:-1])), (12, Path.unlink)):
        damage(run.folder.checkpoints / f"step-{step:09d}/model-00000.safetensors")
    assert wrong(verify, run) == [
        "BAD  checkpoints  RUN/checkpoints/step-000000008/model-00000.safetensors: has 72 bytes, its manifest says 73",
        "BAD  checkpoints  RUN/checkpoints/step-000000012/model-00000.safetensors: is missing",
    ]


def test_a_changed_manifest_does_not_match_its_digest(run: Run, verify: Verify) -> None:
    path = run.folder.checkpoints / "step-000000004/manifest.json"
    path.write_text(path.read_text().replace('"step": 4', '"step": 3'))
    assert wrong(verify, run) == [
        "BAD  checkpoints  RUN/checkpoints/step-000000004/manifest.json: does not match its own digest"
    ]


def test_a_forged_ledger_with_a_right_digest_is_seen(run: Run, verify: Verify) -> None:
    def change(body: dict[str, Any]) -> None:
        body["ledger"]["set"] = f"{int(body['ledger']['set'], 16) ^ 1:032x}"

    run.forge(8, change)
    (line,) = wrong(verify, run)
    assert line.startswith("BAD  samples      step-000000008/manifest.json: samples were lost, repeated or exchanged")


def test_a_manifest_of_another_position_is_seen(run: Run, verify: Verify) -> None:
    run.forge(8, lambda body: body.update(samples=46))
    lines = wrong(verify, run)
    assert "BAD  samples      step-000000008/manifest.json: 46 samples at step 8, but so many steps consume 40" in lines
    assert any("its ledger holds 40 samples, but it says that 46 were consumed" in line for line in lines)


@pytest.mark.parametrize("ledger", [{"data": {}}, {"data": None}, "samples"], ids=["empty", "none", "no samples"])
def test_a_ledger_that_is_none_is_a_fault_not_a_traceback(run: Run, verify: Verify, ledger: Any) -> None:
    def change(body: dict[str, Any]) -> None:
        if isinstance(ledger, str):
            body["ledger"]["data"].update(samples=0, epoch_samples=0)
        else:
            body["ledger"].update(ledger)

    run.forge(12, change)
    assert any("step-000000012/manifest.json: its ledger is not valid" in line for line in wrong(verify, run))


def _swap(share: Share) -> Share:
    """Ids of the third step of rank 0 in another order."""
    if share.position == 12 and not share.idle:
        share = share._replace(micro_batches=[part[::-1] for part in share.micro_batches])
    return share


def _repeat(share: Share) -> Share:
    if share.position == 12:
        share = share._replace(micro_batches=[np.full_like(part, part[0]) for part in share.micro_batches])
    return share


@pytest.mark.parametrize(
    ("change", "checks", "words"),
    [
        (_swap, {"order"}, "not the order of the spec; each sample was consumed once all the same"),
        (_repeat, {"samples", "order"}, "samples were lost, repeated or exchanged"),
        (lambda share: share._replace(position=share.position + 6), {"order"}, "not the order of the spec"),
    ],
    ids=["swapped", "repeated", "moved"],
)
def test_what_was_really_consumed_is_compared(
    tmp_path: Path, verify: Verify, change: Change, checks: set[str], words: str
) -> None:
    made = Run(tmp_path / "run")
    shift = change(_share_at(12)).position != 12
    made.attempt(0, 4 if shift else 12, saves=[4], cause="stopped" if shift else "done", change=change)
    lines = wrong(verify, made)
    assert {line.split()[1] for line in lines} >= checks
    if not shift:
        assert {line.split()[1] for line in lines} == checks
    assert any(words in line for line in lines)


def _share_at(position: int) -> Share:
    return Share([np.array([0, 1, 2])], False, 6, position + 6, position)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"seed": 4}, "train.seed was 3, the spec makes it 4"),
        ({"data": {"shuffle": False}}, "train.data.shuffle was True, the spec makes it False"),
        ({"data": {"last": "drop"}}, "train.data.last was keep, the spec makes it drop"),
        ({"batch": {"global": 12}}, "the global batch was 6, the spec makes it 12"),
        ({"optim": {"base_lr": 0.2}}, "attempts/0003/began.json: train.optim.base_lr was 0.1, the spec makes it 0.2"),
    ],
    ids=["seed", "shuffle", "last", "batch", "lr"],
)
def test_a_spec_that_was_changed_afterwards_is_seen(
    run: Run, verify: Verify, train: dict[str, Any], words: str
) -> None:
    run.change(**train)
    assert any(words in line for line in wrong(verify, run))


def test_settings_that_a_resume_changed_are_told_and_hold(tmp_path: Path, verify: Verify) -> None:
    made = Run(tmp_path / "run")
    made.attempt(0, 5, saves=[4], cause="stopped")
    made.change(seed=4, optim={"base_lr": 0.2}, log={"every_steps": 3})
    made.attempt(5, 12)
    code, out = verify(made)
    assert code == 0, out
    assert "step-000000004 was trained with other settings: train.seed was 3, the spec makes it 4" in out
    assert "step-000000012: its ledger begins at 26 samples; what was before is not told" in out
    assert "ok   metrics      6 training lines up to step 12" in out
    assert "from attempt 2 on: seed 3 -> 4, base_lr 0.1 -> 0.2, base_batch 3 -> None" in out


def test_other_settings_without_a_new_ledger_are_a_fault(run: Run, verify: Verify) -> None:
    run.forge(4, lambda body: body["ledger"]["data"].update(seed=9))
    assert "BAD  samples      step-000000004/manifest.json: train.seed was 9, the spec makes it 3" in wrong(verify, run)


def test_a_replay_takes_the_newest_interval_with_one_number_of_ranks_and_one_kind_of_settings(tmp_path: Path) -> None:
    def chosen(made: Run) -> str:
        kept, _ = checkpoints.read(made.store)
        return str(replay.choose(kept, attempts.read(made.folder, Check(""))))

    one = Run(tmp_path / "one")
    one.attempt(0, 5, saves=[4], cause="stopped")
    assert chosen(one) == "steps 4 to 5 on 2 ranks"
    one.attempt(5, 12, world_size=3, saves=[6, 8])
    assert chosen(one) == "steps 8 to 12 on 3 ranks"
    for step in (6, 8):
        shutil.rmtree(one.folder.checkpoints / f"step-{step:09d}")
    assert chosen(one) == "steps 5 to 12 on 3 ranks"
    shutil.rmtree(one.folder.checkpoints / "step-000000005")
    assert chosen(one) == "steps 0 to 4 on 2 ranks"
    changed = Run(tmp_path / "changed")
    changed.attempt(0, 5, saves=[4], cause="stopped")
    changed.change(optim={"base_lr": 0.2})
    changed.attempt(5, 6, cause="killed")
    assert chosen(changed) == "None"


def test_a_missing_line_is_a_gap(run: Run, verify: Verify) -> None:
    run.edit_metrics(lambda lines: [line for line in lines if '"step": 6,' not in line])
    assert wrong(verify, run) == ["BAD  metrics      RUN/metrics.jsonl: step 6 of attempt 2 missing"]


def test_lines_missing_before_the_newest_checkpoint_are_a_gap(run: Run, verify: Verify) -> None:
    run.edit_metrics(lambda lines: [line for line in lines if '"attempt": 3' not in line])
    assert wrong(verify, run) == ["BAD  metrics      RUN/metrics.jsonl: steps 10, 12 of attempt 3 missing"]


def test_a_line_of_steps_that_were_taken_again_may_be_missing(run: Run, verify: Verify) -> None:
    run.edit_metrics(lambda lines: [line for line in lines if '"attempt": 2, "step": 10,' not in line])
    assert verify(run)[0] == 0


def test_a_doubled_line_is_named_with_its_number(run: Run, verify: Verify) -> None:
    run.edit_metrics(lambda lines: [*lines[:2], lines[1], *lines[2:]])
    assert wrong(verify, run) == ["BAD  metrics      RUN/metrics.jsonl:3: step 4 is there 2 times"]


def test_a_line_of_an_older_attempt_after_a_newer_began_is_seen(run: Run, verify: Verify) -> None:
    run.line(2, 12, 60)
    assert wrong(verify, run) == ["BAD  metrics      RUN/metrics.jsonl:9: attempt 2 wrote after attempt 3 had begun"]


def test_samples_and_rates_must_be_exact(run: Run, verify: Verify) -> None:
    run.edit_metrics(lambda lines: [lines[0].replace('"samples": 12', '"samples": 11'), *lines[1:]])
    run.edit_metrics(lambda lines: [lines[0], lines[1].replace('"lr": 0.', '"lr": 0.000'), *lines[2:]])
    first, second = wrong(verify, run)
    assert first == "BAD  metrics      RUN/metrics.jsonl:1: 11 samples at step 2, but 12 are due"
    assert "RUN/metrics.jsonl:2: lr 0.000" in second and "at step 4, the spec makes it 0." in second


@pytest.mark.parametrize("torn", ['{"attempt": 3, "ti', '{"attempt": 3, "ti\n'], ids=["last", "ended by the next"])
def test_half_a_line_is_noted_and_counts_for_nothing(run: Run, verify: Verify, torn: str) -> None:
    with run.folder.metrics.open("a") as out:
        out.write(torn)
    code, out_text = verify(run)
    assert code == 0 and "1 half line of a process that was killed while it wrote" in out_text


def test_a_line_that_is_json_but_no_record_is_a_fault(run: Run, verify: Verify) -> None:
    run.edit_metrics(lambda lines: [*lines, '{"kind": "train", "attempt": 3}\n', "[]\n"])
    assert len(wrong(verify, run)) == 2


def test_an_attempt_that_went_on_from_nowhere_is_seen(run: Run, verify: Verify) -> None:
    began = run.folder.attempt(2).began
    write_json(began, {**json.loads(began.read_text()), "step": 8, "samples": 40})
    lines = wrong(verify, run)
    assert any("attempt 2 went on from step 8, which no attempt before it had reached" in line for line in lines)


def test_a_clean_stop_whose_checkpoint_was_lost_is_seen(tmp_path: Path, verify: Verify) -> None:
    made = Run(tmp_path / "run")
    made.attempt(0, 5, saves=[4], cause="stopped")
    made.attempt(4, 12)
    (line,) = wrong(verify, made)
    assert "attempt 2 went on from step 4, but the attempt before it had stopped cleanly and saved at step 5" in line
    (made.folder.checkpoints / "step-000000005").rename(made.folder.checkpoints / "step-000000005.bad")
    code, out = verify(made)
    assert code == 0 and "step-000000005.bad was damaged, and set aside by a later attempt" in out


def test_verdicts_that_contradict_each_other_and_lost_folders_are_seen(run: Run, verify: Verify) -> None:
    append_json(run.folder.attempts_jsonl, {"attempt": 3, "cause": "failed", "exit_code": 5})
    for path in sorted(run.folder.attempt(2).path.iterdir(), reverse=True):
        path.unlink()
    run.folder.attempt(2).path.rmdir()
    text = "\n".join(wrong(verify, run))
    assert "RUN/attempts/0002: this attempt's folder is missing" in text
    assert "RUN/attempts.jsonl: 2 lines of attempt 3" in text
    assert "attempt 3 is failed with exit code 5, but its result.json says done" in text


def test_a_done_run_without_its_last_checkpoint_is_seen(run: Run, verify: Verify) -> None:
    (run.folder.checkpoints / "step-000000012").rename(run.folder.path / "elsewhere")
    assert wrong(verify, run) == [
        "BAD  attempts     the run is done with 12 steps, but its newest checkpoint is of step 8"
    ]


def test_a_run_under_way_and_one_without_a_ledger_are_not_called_wrong(tmp_path: Path, verify: Verify) -> None:
    made = Run(tmp_path / "run")
    code, out = verify(made)
    assert code == 5 and "--   checkpoints  not recorded" in out and "nothing is recorded, so nothing is proved" in out
    made.attempt(0, 6, saves=[4], cause="killed")
    made.folder.attempt(1).result.unlink()
    made.forge(4, lambda body: body.update(ledger={}))
    code, out = verify(made)
    assert code == 0 and "step-000000004 has no ledger" in out and "1 attempt: no verdict" in out


def test_a_run_whose_checkpoints_are_all_gone_is_wrong(tmp_path: Path, verify: Verify) -> None:
    for cause, words in (
        ("done", "the run is done, and its spec saves at the end, but it has no checkpoint"),
        ("stopped", "the run stopped cleanly and saved at step 12, but it has no checkpoint"),
    ):
        made = Run(tmp_path / cause)
        made.attempt(0, 12, saves=[12], cause=cause)
        shutil.rmtree(made.folder.checkpoints)
        assert f"BAD  attempts     {words}" in wrong(verify, made)


def test_a_run_is_found_by_its_id_and_its_absence_is_a_usage_error(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = run.folder.path.parent / "home"
    (home / "runs").mkdir(parents=True)
    run.folder.path.rename(home / "runs" / "t-ab2c")
    monkeypatch.chdir(home)
    assert cli.main(["verify", "t-ab2c"]) == 0
    assert cli.main(["verify", "t-zzzz"]) == 2
    assert "t-zzzz: no run folder" in capsys.readouterr().err
    assert cli.main(["verify"]) == 2


def test_nothing_slow_is_imported(tmp_path: Path) -> None:
    made = Run(tmp_path / "run")
    made.attempt(0, 12)
    program = (
        "import sys; from launcher import cli\n"
        f"assert cli.main(['verify', {str(made.folder.path)!r}]) == 0\n"
        "assert not {'torch', 'submitit', 'omegaconf', 'fsspec'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True)


def test_the_first_difference_of_two_checkpoints_is_named(tmp_path: Path) -> None:
    places = []
    for name, values in (("a", [1.0, 2.0, 3.0]), ("b", [1.0, 2.5, 4.0])):
        store = LocalFolder(tmp_path / name)
        store.make("step-000000004")
        files = {
            "model-00000.safetensors": store.write(
                "step-000000004/model-00000.safetensors", [tensors(same=[0.0], w=values)]
            )
        }
        store.write("step-000000004/manifest.json", [describe(4, 20, 1, files, {}, {}, {})])
        places.append(store)
    one = parse(places[0], "step-000000004")
    assert difference.first_difference(places[0], one, places[0]) is None
    assert difference.first_difference(places[0], one, places[1]) == (
        "model-00000.safetensors: w[1]: 2.0 in the run, 2.5 in the replay (2 of 3 values differ)"
    )


def test_a_damaged_file_is_a_difference_though_both_manifests_name_the_same_hash(tmp_path: Path) -> None:
    store = LocalFolder(tmp_path / "a")
    store.make("step-000000004")
    name = "step-000000004/model-00000.safetensors"
    files = {"model-00000.safetensors": store.write(name, [tensors(w=[1.0, 2.0])])}
    store.write("step-000000004/manifest.json", [describe(4, 20, 1, files, {}, {}, {})])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    content = bytearray((tmp_path / "b" / name).read_bytes())
    content[-1] ^= 0x40
    (tmp_path / "b" / name).write_bytes(content)
    found = difference.first_difference(store, parse(store, "step-000000004"), LocalFolder(tmp_path / "b"))
    assert found is not None
    assert found.startswith("model-00000.safetensors: w[1]: 2.0 in the run, ")
