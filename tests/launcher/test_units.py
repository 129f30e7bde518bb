"""Proves that times, memory and GPU counts mean what Slurm's own parser takes them to mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import units
from tests.clusterfix import Cluster

SECONDS = {
    "0": 0,
    "1": 60,
    "007": 420,
    "90": 5400,
    "1:30": 90,
    "0:90": 90,
    "90:00": 5400,
    "00:30:00": 1800,
    "99:99:99": 362439,
    "1-": 86400,
    "1-2": 93600,
    "1-99": 442800,
    "1-2:3": 93780,
    "1-2:3:4": 93784,
    "UNLIMITED": None,
    "infinite": None,
    "-1": None,
}
"""As `time_str2secs` of Slurm 22.05 answered."""

NO_TIMES = ["", "abc", "5m", "5.5", " 5", "5 ", "+5", "-2", "1:", ":30", "1::2", "1:2:3:4", "1-:30", "1-2-3", "-", "٣"]

MEGABYTES = {
    "0": 0,
    "0G": 0,
    "1": 1,
    "+4": 4,
    "010": 10,
    "4096": 4096,
    "4096M": 4096,
    "4MB": 4,
    "4G": 4096,
    "4g": 4096,
    "4Gb": 4096,
    "1T": 1048576,
    "1K": 1,
    "1500K": 2,
}
"""As `str_to_mbytes` of Slurm 22.05 answered."""


@pytest.mark.parametrize(("text", "seconds"), SECONDS.items())
def test_a_time_is_what_slurm_makes_of_it(text: str, seconds: int | None) -> None:
    assert units.time_seconds(text) == seconds


@pytest.mark.parametrize("text", NO_TIMES)
def test_a_time_that_slurm_refuses_is_refused_with_the_right_forms(text: str) -> None:
    with pytest.raises(ValueError, match="is no time limit; write minutes, MM:SS"):
        units.time_seconds(text)


def test_a_limit_that_would_wrap_around_in_slurm_is_refused() -> None:
    assert units.time_seconds("35791393") == 35791393 * 60
    with pytest.raises(ValueError, match="more than the 35791393 minutes"):
        units.time_seconds("35791395")


@pytest.mark.parametrize(("text", "minutes"), [("0:01", 1), ("1:00", 1), ("1:01", 2), ("00:30:01", 31), ("2", 2)])
def test_seconds_round_up_to_minutes(text: str, minutes: int) -> None:
    assert units.time_minutes(text) == minutes


@given(st.none() | st.integers(0, units.LARGEST_MINUTES * 60))
def test_time_text_is_the_inverse_of_time_seconds(seconds: int | None) -> None:
    assert units.time_seconds(units.time_text(seconds)) == seconds


@given(st.integers(0, 400), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_a_time_is_the_sum_of_its_parts(days: int, hours: int, minutes: int, seconds: int) -> None:
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert units.time_seconds(f"{days}-{hours}:{minutes}:{seconds}") == total


@pytest.mark.parametrize(("text", "megabytes"), MEGABYTES.items())
def test_memory_is_what_slurm_makes_of_it(text: str, megabytes: int) -> None:
    assert units.memory_mb(text) == megabytes


@pytest.mark.parametrize("text", ["", "G", "4 G", "4G ", " 4G", "-1", "1.5G", "1e3", "4GiB", "4GG", "4B", "1P", "0x10"])
def test_memory_that_slurm_refuses_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no amount of memory; write a whole number with K, M, G or T"):
        units.memory_mb(text)


def test_more_memory_than_slurm_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="more than Slurm can hold"):
        units.memory_mb("9" * 30)


def test_gpus_are_a_count_or_a_typed_count() -> None:
    assert units.gpus("4") == (None, 4)
    assert units.gpus("a100:4") == ("a100", 4)
    assert units.gpu_count("nvidia_h100.80gb:8") == 8
    for text in ("", "a100", "a100:", ":4", "-1", "4,2", "4.0", "a:b:4", "12345678"):
        with pytest.raises(ValueError, match="is no number of GPUs; write a count such as 4, or type:count"):
            units.gpus(text)


@given(st.text(max_size=12))
def test_any_text_is_a_value_or_a_value_error(text: str) -> None:
    for parse in (units.time_seconds, units.time_minutes, units.memory_mb, units.gpus):
        try:
            parse(text)  # type: ignore[operator]
        except ValueError as error:
            assert "; write " in str(error)


@pytest.mark.cluster
def test_a_real_slurm_reads_the_accepted_forms_alike(cluster: Cluster) -> None:
    """Submits held jobs and asks the controller what it understood."""
    asked = [("time", text, seconds) for text, seconds in SECONDS.items() if seconds != 0]
    asked += [("mem", text, megabytes) for text, megabytes in MEGABYTES.items() if 0 < megabytes <= 4096]
    for option, text, meant in asked:
        job = cluster.submit("true", "--hold", f"--{option}={text}")
        told = dict(word.partition("=")[::2] for word in cluster.run("scontrol", "show", "job", "-o", job).split())
        cluster.run("scancel", job)
        if option == "time":
            assert units.time_minutes(told["TimeLimit"]) == units.time_minutes(text), text
        else:
            assert units.memory_mb(told["MinMemoryNode"]) == meant, text


@pytest.mark.cluster
def test_a_real_slurm_refuses_what_we_refuse(cluster: Cluster) -> None:
    refused = [("time", text) for text in NO_TIMES if text not in ("", "-2")]  # Slurm takes -2 for minus two days
    refused += [("mem", text) for text in ("G", "4 G", "4G ", "-1", "1.5G", "1e3", "4GiB", "4GG", "4B", "1P", "0x10")]
    for option, text in refused:
        with pytest.raises(AssertionError, match=rf"--{option}|[Ii]nvalid"):
            cluster.run("sbatch", "--test-only", f"--{option}={text}", "--wrap=true")
