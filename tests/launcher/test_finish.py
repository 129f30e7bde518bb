"""Proves the verdict of an attempt: who failed first, what is an echo of it, and what earlier attempts left open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import BAD_SPEC, DO_NOT_RESTART, DONE, JOB_FAILED, TERMINATED
from launcher.finish import close_earlier, finish, judge
from training.runfolder import AttemptFolder, RunFolder, append_json, write_json


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunFolder, AttemptFolder]:
    folder = RunFolder(tmp_path)
    return folder, folder.take_attempt()


def _failed(attempt: AttemptFolder, rank: int, time: float, text: str, **more: Any) -> None:
    exception, _, message = text.partition(": ")
    record = {"time": time, "rank": rank, "host": f"n{rank}", "exception": exception, "message": message}
    path = attempt.lost(rank) if exception == "RankLost" else attempt.failure(rank)
    write_json(path, record | {"text": text, "details": None, "exit_code": JOB_FAILED} | more)


def test_the_earliest_failure_is_the_cause(run: tuple[RunFolder, AttemptFolder]) -> None:
    _failed(run[1], 3, 10.0, "ValueError: mine")
    _failed(run[1], 0, 10.5, "KeyError: later")
    verdict = judge(*run, 5)
    assert (verdict.cause, verdict.exit_code, verdict.rank, verdict.host) == ("failed", JOB_FAILED, 3, "n3")
    assert verdict.lines()[0] == "attempt 1 failed: rank 3 on n3: ValueError: mine"


def test_a_lost_connection_is_an_echo_even_when_it_was_written_first(run: tuple[RunFolder, AttemptFolder]) -> None:
    _failed(run[1], 0, 10.0, "RuntimeError: [pair.cc:553] Connection closed by peer [10.77.0.2]:39646")
    _failed(run[1], 1, 10.1, "Killed: ended by SIGKILL (out of memory?)")
    assert judge(*run, 5).text == "Killed: ended by SIGKILL (out of memory?)"


def test_what_others_saw_counts_only_without_a_rank_s_own_word(run: tuple[RunFolder, AttemptFolder]) -> None:
    _failed(run[1], 1, 9.0, "RankLost: vanished")
    assert judge(*run, 137).text == "RankLost: vanished"
    _failed(run[1], 1, 10.0, "MemoryError: too much")
    assert judge(*run, 137).text == "MemoryError: too much"


def test_a_fault_of_the_configuration_is_exit_code_2(run: tuple[RunFolder, AttemptFolder]) -> None:
    _failed(run[1], 0, 1.0, "ConfigError: warmup is longer than the run", exit_code=BAD_SPEC)
    assert judge(*run, 2).exit_code == BAD_SPEC


def test_an_exit_code_2_of_a_command_is_a_failure_like_others(run: tuple[RunFolder, AttemptFolder]) -> None:
    _failed(run[1], 0, 1.0, "ExitCode: sh left with exit code 2", exit_code=2)
    assert judge(*run, 2).exit_code == JOB_FAILED


def test_143_is_a_clean_stop_only_when_rank_0_said_so(run: tuple[RunFolder, AttemptFolder]) -> None:
    assert judge(*run, 143).cause == "failed"
    write_json(run[1].stopped, {"step": 7})
    verdict = judge(*run, 143)
    assert verdict.lines() == ["attempt 1 stopped, as it was asked to: it saved at step 7"]
    assert (verdict.cause, verdict.exit_code) == ("stopped", TERMINATED)


def test_without_any_record_the_log_that_says_something_is_named(run: tuple[RunFolder, AttemptFolder]) -> None:
    run[1].rank_log(0).write_text("")
    run[1].rank_log(1).write_text("bash: python: command not found\n")
    assert str(run[1].rank_log(1)) in judge(*run, 127).lines()[0]


def test_finish_writes_the_steps_that_were_logged(run: tuple[RunFolder, AttemptFolder]) -> None:
    folder, attempt = run
    for step in (10, 20, 30):
        append_json(folder.metrics, {"attempt": 1, "time": 0.0, "step": step})
    append_json(folder.metrics, {"attempt": 11, "time": 0.0, "step": 99})
    write_json(attempt.finished, {})
    assert finish(folder, attempt, DONE, started=5.0, job="7", nodes="n[1-2]").exit_code == DONE
    line = json.loads(folder.attempts_jsonl.read_text())
    assert (line["first_step"], line["last_step"], line["job"], line["cause"]) == (10, 30, "7", "done")


def test_exit_code_0_without_an_end_is_no_success(run: tuple[RunFolder, AttemptFolder]) -> None:
    assert judge(*run, DONE).cause == "failed"


def test_an_attempt_that_was_killed_gets_its_verdict_from_the_next(run: tuple[RunFolder, AttemptFolder]) -> None:
    folder, first = run
    first.rank_log(0).write_text("step 1\n")
    second = folder.take_attempt()
    close_earlier(folder, second)
    close_earlier(folder, second)  # once is enough
    (line,) = [json.loads(text) for text in folder.attempts_jsonl.read_text().splitlines()]
    assert (line["attempt"], line["cause"], line["exit_code"]) == (1, "killed", JOB_FAILED)


def test_an_attempt_that_gave_way_is_not_to_be_started_again(run: tuple[RunFolder, AttemptFolder]) -> None:
    _failed(run[1], 0, 1.0, "Superseded: attempt 2 of this run has begun")
    verdict = judge(*run, 5)
    assert (verdict.cause, verdict.exit_code) == ("superseded", DO_NOT_RESTART)
    assert verdict.lines() == ["attempt 1 gave way: Superseded: attempt 2 of this run has begun"]


def test_the_verdict_that_a_newer_attempt_gave_stays(run: tuple[RunFolder, AttemptFolder]) -> None:
    folder, attempt = run
    close_earlier(folder, folder.take_attempt())
    _failed(attempt, 0, 1.0, "Superseded: attempt 2 of this run has begun")
    finish(folder, attempt, 5, started=0.0, job="local")
    assert json.loads(attempt.result.read_text())["cause"] == "killed"
    assert len(folder.attempts_jsonl.read_text().splitlines()) == 1
