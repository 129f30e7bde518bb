"""Attempt numbers are never shared, readers never see half a file, and half a line never spoils the next."""

from __future__ import annotations

import json
import multiprocessing
import resource
from pathlib import Path

import pytest

from training.runfolder import RunFolder, append_json, write_json


def _take(path: Path, count: int, results: multiprocessing.Queue[list[int]]) -> None:
    results.put([RunFolder(path).take_attempt().number for _ in range(count)])


def _rewrite(path: Path, count: int) -> None:
    for i in range(count):
        write_json(path, {"values": [i] * 20_000})


def _append(path: Path, writer: int, count: int) -> None:
    for i in range(count):
        append_json(path, {"writer": writer, "line": i, "text": "x" * 200})


def test_attempts_start_at_one_and_sort_as_numbers(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.last_attempt() is None
    assert run.take_attempt().path == tmp_path / "attempts/0001"
    run.attempt(9999).path.mkdir()
    assert run.take_attempt().number == 10_000
    (tmp_path / "attempts/notes").mkdir()
    last = run.last_attempt()
    assert last is not None
    assert last.number == 10_000


def test_concurrent_takers_get_distinct_numbers(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    takers = [context.Process(target=_take, args=(tmp_path, 25, results)) for _ in range(4)]
    for taker in takers:
        taker.start()
    taken = [number for _ in takers for number in results.get(timeout=60)]
    for taker in takers:
        taker.join(60)
    assert sorted(taken) == list(range(1, 101))


def test_attempts_are_private(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).take_attempt()
    assert attempt.path.stat().st_mode & 0o777 == 0o700
    write_json(attempt.result, {})
    assert attempt.result.stat().st_mode & 0o777 == 0o600


def test_failures_come_in_the_order_of_their_time(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).take_attempt()
    assert attempt.failures() == []
    for rank, moment in ((0, 30.0), (2, 9.5), (11, 10.0)):
        write_json(attempt.failure(rank), {"rank": rank, "time": moment})
    assert [record["rank"] for record in attempt.failures()] == [2, 11, 0]


def test_a_reader_sees_only_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    write_json(path, {"values": []})
    writer = multiprocessing.get_context("forkserver").Process(target=_rewrite, args=(path, 60))
    writer.start()
    seen = set()
    while writer.is_alive():
        values = json.loads(path.read_text())["values"]
        assert len(values) in (0, 20_000)
        seen.update(values)
    writer.join()
    assert json.loads(path.read_text())["values"][0] == 59
    assert [p.name for p in tmp_path.iterdir()] == ["f.json"]


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    write_json(path, 1)
    with pytest.raises(TypeError):
        write_json(path, {1, 2})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_json(path, "x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "1\n"
    assert [p.name for p in tmp_path.iterdir()] == ["f.json"]


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    context = multiprocessing.get_context("forkserver")
    writers = [context.Process(target=_append, args=(path, n, 200)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted((r["writer"], r["line"]) for r in records) == [(n, i) for n in range(3) for i in range(200)]


def test_half_a_line_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a"')
    append_json(path, {"a": 2})
    append_json(path, {"a": 3})
    assert path.read_text() == '{"a": 1}\n{"a"\n{"a": 2}\n{"a": 3}\n'


def test_a_line_that_was_cut_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match=r"only 10 of 23 bytes were written: .*a\.jsonl"):
            append_json(path, {"text": "0123456789"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
