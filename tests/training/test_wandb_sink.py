"""One W&B run over all attempts, offline for real where no key is found; no secret reaches it, and a dead or slow
server holds neither start nor end beyond the bound. Logging to a working server is not tested: it needs one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from training import wandb_sink
from training.config import RunConfig, TrainConfig, WandbConfig
from training.runfolder import RunFolder
from training.wandb_sink import WandbSink, masked, open_sink

HOME = Path(__file__).parents[2]
ATTEMPT = """
import sys
from pathlib import Path
from training import wandb_sink
from training.config import RunConfig, TrainConfig, WandbConfig
from training.runfolder import RunFolder
wandb_sink.INIT_LIMIT_S = 2
config = RunConfig("demo", TrainConfig(task="synthetic", options={"hf_token": "s3cr3t"}), WandbConfig(tags=["a"]))
sink = wandb_sink.open_sink(config, RunFolder(Path(sys.argv[1])), int(sys.argv[2]), {"resources": {"nodes": 2}})
sink.log({"attempt": int(sys.argv[2]), "time": 1.0, "step": 10, "samples": 320, "loss": float("nan")})
sink.finish(0)
"""


def attempt(folder: Path, number: int, **env: str) -> str:
    """Run an attempt in a process of its own, without any W&B settings of the person who runs the tests."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") and k != "NETRC"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ATTEMPT, str(folder), str(number)],
        cwd=HOME,
        env={**clean, "HOME": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr


def offline_runs(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


def test_without_a_key_two_attempts_are_one_offline_run_without_secrets(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    said = [attempt(folder, number) for number in (1, 2)]
    run_id = (folder / "wandb-id").read_text().strip()
    assert len(run_id) == 8
    assert [path.name.rpartition("-")[2] for path in offline_runs(folder)] == [run_id, run_id]
    for text in said:
        assert text.splitlines() == [
            "wandb: no API key: WANDB_API_KEY is not set and `wandb login` has left none in netrc",
            f"wandb: logging offline; upload later with: wandb sync '{folder}/wandb'/*run-*-{run_id}",
        ]
    for path in offline_runs(folder):
        (content,) = [log.read_bytes() for log in path.glob("run-*.wandb")]
        assert b"loss" in content
        assert b"***" in content
        assert b"s3cr3t" not in content


def test_a_server_that_cannot_be_reached_ends_in_an_offline_run(tmp_path: Path) -> None:
    text = attempt(tmp_path, 1, WANDB_API_KEY="x" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    assert "wandb: no answer (" in text
    assert "logging offline; upload later with: wandb sync" in text
    assert len(offline_runs(tmp_path)) == 1


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return monkeypatch


@pytest.mark.parametrize(
    ("asked", "variables", "netrc", "mode"),
    [
        ("auto", {}, "", "offline"),
        ("auto", {"WANDB_API_KEY": "k"}, "", "online"),
        ("auto", {}, "machine api.wandb.ai login user password k\n", "online"),
        ("auto", {}, "machine elsewhere.org login user password k\n", "offline"),
        ("auto", {"WANDB_BASE_URL": "https://w.org"}, "machine w.org login user password k\n", "online"),
        ("auto", {}, "machine is not a netrc file\n", "offline"),
        ("auto", {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "", "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, "", "disabled"),
        ("online", {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "", "online"),
        ("online", {}, "", "offline"),
        ("offline", {"WANDB_API_KEY": "k"}, "", "offline"),
        ("disabled", {"WANDB_API_KEY": "k"}, "", "disabled"),
    ],
)
def test_the_mode_follows_the_spec_then_the_variable_then_the_key(
    env: pytest.MonkeyPatch, tmp_path: Path, asked: Any, variables: Mapping[str, str], netrc: str, mode: str
) -> None:
    (tmp_path / "netrc").write_text(netrc)
    (tmp_path / "netrc").chmod(0o600)
    assert wandb_sink._mode(WandbConfig(mode=asked), {"NETRC": str(tmp_path / "netrc"), **variables}) == mode


def test_where_it_is_off_wandb_is_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from training.wandb_sink import open_sink;"
        "from training.config import *; from training.runfolder import RunFolder; f = RunFolder(Path(sys.argv[1]));"
        "assert open_sink(RunConfig('a', TrainConfig()), f, 1, {}) is None;"
        "assert open_sink(RunConfig('a', TrainConfig(), WandbConfig(mode='disabled')), f, 1, {}) is None;"
        "assert not {'wandb', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=HOME, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_an_installation_that_does_not_work_leaves_training_alone(
    env: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env.setitem(sys.modules, "wandb", None)  # makes the import fail
    config = RunConfig("a", TrainConfig(), WandbConfig(mode="offline"))
    assert open_sink(config, RunFolder(tmp_path), 1, {}) is None
    assert "wandb: not used: ModuleNotFoundError" in capsys.readouterr().err


def test_the_run_id_is_kept_and_a_users_own_wins(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = wandb_sink._run_id(folder, {})
    assert wandb_sink._run_id(folder, {}) == first
    assert wandb_sink._run_id(folder, {"WANDB_RUN_ID": "mine"}) == "mine"
    assert wandb_sink._run_id(folder, {}) == "mine"


def test_secrets_are_masked_by_whole_words() -> None:
    config = {
        "api_key": "a",
        "hfToken": "b",
        "AWS-SECRET": ["c"],
        "password": 1234,
        "nested": [{"token": "d"}],
        "token": None,
        "tokenizer": "gpt2",
        "max_tokens": 5,
        "key_heads": 8,
        "monkey": "e",
        "url": "s3://user:pw@host/x and https://plain.org:80/y",
    }
    assert masked(config) == {
        **config,
        "api_key": "***",
        "hfToken": "***",
        "AWS-SECRET": "***",
        "password": "***",
        "nested": [{"token": "***"}],
        "url": "s3://user:***@host/x and https://plain.org:80/y",
    }


class Run:
    """Stands for W&B's run object."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.may_finish = threading.Event()
        self._fails = fails

    def log(self, record: Mapping[str, Any]) -> None:
        if self._fails:
            raise OSError("service died")
        self.calls.append(("log", record["step"]))

    def mark_preempting(self) -> None:
        self.calls.append(("mark_preempting", None))

    def finish(self, exit_code: int) -> None:
        self.may_finish.wait(30)
        self.calls.append(("finish", exit_code))


def sink_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> WandbSink:
    monkeypatch.setattr(WandbSink, "_init", lambda self, mode: run)
    return WandbSink("online", {}, "wandb sync X")


def test_a_terminated_attempt_is_marked_as_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.may_finish.set()
    sink = sink_of(run, monkeypatch)
    sink.log({"step": 1})
    sink.log({"step": 2})
    sink.finish(143)
    assert run.calls == [("log", 1), ("log", 2), ("mark_preempting", None), ("finish", 143)]


def test_an_upload_that_does_not_end_is_left_with_the_command_for_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_sink, "FINISH_LIMIT_S", 0.1)
    monkeypatch.setattr(wandb_sink, "INIT_LIMIT_S", 0)
    run = Run()
    sink = sink_of(run, monkeypatch)
    sink.finish(0)
    assert run.calls == []
    assert "upload what is missing with: wandb sync X" in capsys.readouterr().err
    run.may_finish.set()
    sink._thread.join(30)


def test_a_failure_is_said_and_later_records_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = sink_of(Run(fails=True), monkeypatch)
    sink.log({"step": 1})
    sink._thread.join(30)
    with pytest.raises(RuntimeError, match="service died"):
        sink.log({"step": 2})
    sink.finish(0)
    assert capsys.readouterr().err == "wandb: stopped: OSError: service died\n"
