"""A published checkpoint is complete and good whatever happens: a kill -9 at any moment, a full disk, a torn file, an
error on one rank. The newest good one is found on every rank alike, and it is never removed before a newer one exists.

Run as a program, this file plays the processes that are killed and the ranks of a process group (see `main`).
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, AdamW

from training import checkpoint, manifest
from training.checkpoint import Checkpoints
from training.config import RunConfig, TrainConfig
from training.errors import CheckpointError
from training.ranks import Ranks
from training.shelf import Keep
from training.storage import LocalFolder, open_folder

HOME = Path(__file__).parents[2]
CONFIG = RunConfig(name="run", train=TrainConfig(task="synthetic", options={"when": "now", 1: 2}))  # type: ignore[dict-item]
FILES = ["manifest.json", "model-00000.safetensors", "optimizer-00000.safetensors", "rng-00000.json", "state.json"]


class Run:
    """A model whose every weight is the step that it was saved at, so that a mix of two checkpoints shows."""

    def __init__(self, folder: Path | str, keep_last: int = 3, ranks: Ranks = Ranks(), width: int = 4) -> None:  # noqa: B008
        self.store = Checkpoints(str(folder), Keep(keep_last), ranks)
        self.model = nn.Linear(width, width)
        self.optimizer = SGD(self.model.parameters(), lr=0.0, momentum=0.9)
        for parameter in self.model.parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def save(self, step: int) -> None:
        self._fill(step)
        self.store.save(step, step * 32, self.model, self.optimizer, CONFIG)

    def resume(self) -> int | None:
        """Load the newest checkpoint, check that all of it is of one step, and return that step."""
        found = self.store.newest()
        if found is None:
            return None
        self._fill(-1)
        self.store.load(found, self.model, self.optimizer)
        values = [*self.model.parameters(), *(s["momentum_buffer"] for s in self.optimizer.state.values())]
        assert {float(v) for tensor in values for v in tensor.detach().unique()} == {float(found.step)}
        assert found.samples == found.step * 32
        return found.step

    def _fill(self, step: int) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(step)
                self.optimizer.state[parameter]["momentum_buffer"].fill_(step)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))  # noqa: PTH208


def test_a_checkpoint_is_readable_files_and_a_manifest_of_all(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1200)
    folder = tmp_path / "step-000001200"
    assert names(tmp_path) == ["step-000001200"]
    assert names(folder) == FILES
    body = json.loads((folder / "manifest.json").read_text())
    assert (body["step"], body["samples"], body["world_size"], body["format"]) == (1200, 38400, 1, 1)
    assert body["config"]["train"]["options"] == {"when": "now", "1": 2}
    assert body["versions"]["torch"] == torch.__version__
    assert {name: entry["size"] for name, entry in body["files"].items()} == {
        name: (folder / name).stat().st_size for name in FILES[1:]
    }
    assert load_file(folder / "model-00000.safetensors")["weight"].unique().tolist() == [1200.0]
    assert "lr" not in json.loads((folder / "state.json").read_text())["optimizer"]["state"]


@pytest.mark.parametrize("place", ["path", "file://", "memory://"])
def test_the_newest_is_found_and_the_oldest_go(place: str, tmp_path: Path) -> None:
    url = {"path": str(tmp_path), "file://": f"file://{tmp_path}"}.get(place, f"memory://{uuid.uuid4()}/c")
    run = Run(url, keep_last=2)
    assert run.resume() is None
    for step in (9, 100, 999_999_999, 1_000_000_000):
        run.save(step)
    assert open_folder(url).names() == ["step-1000000000", "step-999999999"]
    assert Run(url).resume() == 1_000_000_000


def test_an_optimizer_that_has_no_state_yet_and_random_numbers_come_back(tmp_path: Path) -> None:
    model, store = nn.Linear(2, 2), Checkpoints(str(tmp_path), Keep(), Ranks())
    optimizer = AdamW(model.parameters())
    store.save(0, 0, model, optimizer, CONFIG)
    expected = torch.rand(3)
    found = store.newest()
    assert found is not None
    store.load(found, model, optimizer)
    assert torch.equal(torch.rand(3), expected)
    assert optimizer.state_dict()["state"] == {}


def test_random_numbers_stay_where_they_are_at_another_world_size(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1)
    found = run.store.newest()
    assert found is not None
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run.store.load(manifest.Found(1, 32, found.name, 2, found.files), run.model, run.optimizer)
    assert torch.equal(torch.get_rng_state(), before)


def test_saving_a_step_again_leaves_the_good_one_and_replaces_a_damaged_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(5)
    made = (tmp_path / "step-000000005").stat().st_ino
    run.save(5)
    assert (tmp_path / "step-000000005").stat().st_ino == made
    (tmp_path / "step-000000005/state.json").write_bytes(b"{}")
    run.save(5)
    assert names(tmp_path) == ["step-000000005", "step-000000005.bad"]
    assert run.resume() == 5


def test_a_step_saved_by_another_run_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(5)
    with pytest.raises(CheckpointError, match="exists with 160 samples, this run has seen 7: another run writes here"):
        run.store.save(5, 7, run.model, run.optimizer, CONFIG)
    assert run.resume() == 5


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run = Run(folder)
    run.save(10)
    run.save(20)
    return folder


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    file=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), cut=st.booleans(), flip=st.integers(1, 255)
)
def test_any_torn_or_flipped_byte_falls_back_to_the_older_one(
    two_checkpoints: Path, tmp_path: Path, file: str, place: float, cut: bool, flip: int
) -> None:
    folder = tmp_path / uuid.uuid4().hex
    shutil.copytree(two_checkpoints, folder)
    path = folder / "step-000000020" / file
    content = bytearray(path.read_bytes())
    at = int(place * len(content))
    if cut:
        del content[at:]
    else:
        content[at] ^= flip
    same = file == "manifest.json" and not cut and _same_json(path.read_bytes(), bytes(content))
    path.write_bytes(content)
    assert Run(folder).resume() == (20 if same else 10)
    assert ("step-000000020.bad" in names(folder)) is not same


def _same_json(one: bytes, other: bytes) -> bool:
    """A flipped space between two values changes nothing."""
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def test_a_damaged_checkpoint_is_named_and_a_missing_file_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    run.save(10)
    (tmp_path / "step-000000010/state.json").unlink()
    assert run.resume() is None
    text = capsys.readouterr().err
    assert f"{tmp_path}/step-000000010 is damaged (state.json is missing); set aside as step-000000010.bad" in text
    assert "no good checkpoint is left, so training starts from step 0" in text
    (tmp_path / "step-000000010").mkdir()
    assert run.resume() is None
    assert names(tmp_path) == ["step-000000010.bad", "step-000000010.bad-2"]


def test_a_manifest_that_names_foreign_files_is_not_followed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1)
    path = tmp_path / "step-000000001/manifest.json"
    body = json.loads(path.read_text())
    del body["digest"]
    body["files"]["../../etc/passwd"] = body["files"]["state.json"]
    path.write_text(json.dumps({**body, "digest": manifest._digest(body)}))
    assert run.store.newest() is None


def test_a_format_of_the_future_is_refused_and_not_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    monkeypatch.setattr(manifest, "FORMAT", 2)
    run.save(1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 2, this version reads up to 1: update"):
        run.store.newest()
    assert names(tmp_path) == ["step-000000001"]


def test_storage_that_does_not_answer_is_an_error_not_a_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.save(1)

    def refuse(self: LocalFolder, name: str) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", name)

    monkeypatch.setattr(LocalFolder, "read", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be read.*Permission denied.*make it readable"):
        run.store.newest()
    assert names(tmp_path) == ["step-000000001"]


def test_a_full_disk_is_named_and_leaves_older_checkpoints_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, keep_last=1)
    run.save(1)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError) as caught:
        run.save(2)
    monkeypatch.undo()
    assert str(caught.value).startswith("the checkpoint of step 2 was not written, older ones are intact: ")
    assert f"intact: {tmp_path}" in str(caught.value)
    assert "No space left on device; free some space, or keep fewer checkpoints" in str(caught.value)
    assert names(tmp_path) == ["step-000000001"]
    assert run.resume() == 1


def test_a_write_that_the_system_cuts_short_is_an_error(tmp_path: Path) -> None:
    run = Run(tmp_path, width=128)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"model-00000\.safetensors: File too large"):
            run.save(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []
    run.save(1)
    assert run.resume() == 1


def test_an_old_checkpoint_that_cannot_be_removed_is_reported_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, keep_last=1)
    run.save(1)

    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(shutil, "rmtree", busy)
    run.save(2)
    monkeypatch.undo()
    assert "was not removed" in capsys.readouterr().err
    assert run.resume() == 2
    run.save(3)
    assert names(tmp_path) == ["step-000000003"]


def test_an_upload_that_did_not_end_is_passed_over_and_cleaned_up(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"memory://{uuid.uuid4()}/c"
    run, folder = Run(url), open_folder(url)
    run.save(1)
    folder.write("step-000000002/model-00000.safetensors", [b"half"])
    assert run.resume() == 1
    assert "step-000000002: no manifest.json, its writing did not end" in capsys.readouterr().err
    run.save(3)
    assert folder.names() == ["step-000000001", "step-000000003"]
    folder.remove("step-000000003/state.json")
    assert run.resume() == 1
    assert folder.names() == ["step-000000001", "step-000000003.bad"]


def test_keeping_none_and_unknown_urls_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"train\.checkpoint\.keep_last: 0: at least 1"):
        Checkpoints(str(tmp_path), Keep(0), Ranks())
    with pytest.raises(CheckpointError, match=r"train\.checkpoint\.folder: nosuch://x"):
        Checkpoints("nosuch://x", Keep(), Ranks())


def test_a_kill_at_any_moment_of_a_save_leaves_a_good_newest_checkpoint(tmp_path: Path) -> None:
    _play("killed", tmp_path)
    assert all(not name.endswith(".bad") for name in names(tmp_path))
    Run(tmp_path, width=300).save(10**6)
    assert len(names(tmp_path)) == 3
    assert all(not name.startswith(".") for name in names(tmp_path))


def test_two_ranks_write_together_and_end_together(tmp_path: Path) -> None:
    _play("ranks", tmp_path)


def _play(part: str, folder: Path) -> None:
    command = [sys.executable, __file__, part, str(folder)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(HOME)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _play_killed(folder: Path) -> None:
    """Kill fifteen children while they save without pause. After each, the newest checkpoint must be good and no older
    than the last one that `save` returned from."""
    moments = random.Random(1)
    for _ in range(15):
        done, reports = os.pipe()
        child = os.fork()
        if child == 0:
            run = Run(folder, width=300)
            step = run.resume() or 0
            while True:
                step += 1
                run.save(step)
                os.write(reports, f"{step}\n".encode())
        os.close(reports)
        with os.fdopen(done) as saved:
            first = int(saved.readline())
            time.sleep(moments.uniform(0, 0.05))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            last = max([first, *map(int, saved)])
        newest = Run(folder, width=300).resume()
        assert newest in (last, last + 1), (newest, last)


def _play_ranks(folder: Path) -> None:
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _rank(folder, Ranks(rank, rank, 2, 2))
                code = 0
            except BaseException:  # noqa: BLE001 - a forked child must not return into the parent's program
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]


def _rank(folder: Path, ranks: Ranks) -> None:
    import datetime

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=ranks.rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=30),
    )
    saved = folder / "saved"
    run = Run(saved, ranks=ranks)
    torch.manual_seed(ranks.rank)
    assert run.resume() is None
    run.save(1)
    expected = torch.rand(2)
    assert {"rng-00000.json", "rng-00001.json"} <= set(names(saved / "step-000000001"))
    assert run.resume() == 1
    assert torch.equal(torch.rand(2), expected)

    def fails(words: str, work: Callable[[], object]) -> None:
        with pytest.raises(CheckpointError, match=words):
            work()
        dist.barrier()
        assert names(saved) == ["step-000000001"]
        dist.barrier()

    def broken() -> dict[str, object]:
        raise RuntimeError("out of memory")

    good = checkpoint.capture_rng
    if ranks.rank == 1:
        checkpoint.capture_rng = broken
    fails("step 2 was not written, older ones are intact: rank 1: RuntimeError: out of memory", lambda: run.save(2))
    checkpoint.capture_rng = good

    publish = LocalFolder.publish
    if ranks.rank == 0:
        LocalFolder.publish = lambda *_: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale file handle", "x"))  # type: ignore[method-assign]
    fails("rank 0: x: Stale file handle", lambda: run.save(2))
    LocalFolder.publish = publish  # type: ignore[method-assign]

    found = run.store.newest()
    assert found is not None
    if ranks.rank == 1:
        run.model = nn.Linear(3, 3)
        run.optimizer = SGD(run.model.parameters(), lr=0.0, momentum=0.9)
    fails("was not loaded: rank 1: .*weight", lambda: run.store.load(found, run.model, run.optimizer))

    run = Run(saved, ranks=ranks)
    run.save(2)
    if ranks.rank == 0:
        os.truncate(saved / "step-000000002/rng-00001.json", 10)
    assert run.resume() == 1
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)  # no thread pool, so that a fork is whole
    parts = {"killed": _play_killed, "ranks": _play_ranks}
    parts[sys.argv[1]](Path(sys.argv[2]))


if __name__ == "__main__":
    main()


@pytest.mark.parametrize(
    "change",
    [
        {"format": None},
        {"world_size": 2},
        {"samples": 63},
        {"files": {}},
        {"ledger": {"data": None, "since": {"samples": 0}, "samples": 64}},
        {"extra": {"health": 7}},
        {"extra": 5},
    ],
    ids=str,
)
def test_a_manifest_that_no_save_writes_is_set_aside_though_its_digest_is_right(
    change: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    run.save(1)
    run.save(2)
    path = tmp_path / "step-000000002/manifest.json"
    body = json.loads(path.read_text())
    del body["digest"]
    body["ledger"] = {"data": {}, "since": {"step": 0, "samples": 0}, "samples": 64}
    body.update(change)
    path.write_text(json.dumps({**body, "digest": manifest._digest(body)}))
    assert run.resume() == 1
    assert "set aside as step-000000002.bad" in capsys.readouterr().err


def test_a_result_that_is_no_number_is_no_best_one(tmp_path: Path) -> None:
    store = Checkpoints(str(tmp_path), Keep(1, best=True), Ranks())
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    for step, value in ((1, float("nan")), (2, -1.0), (3, -5.0), (4, -3.0)):
        store.save(step, step, model, optimizer, CONFIG)
        store.score(step, value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000002", "step-000000004"]
