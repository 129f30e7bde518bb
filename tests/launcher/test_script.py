"""Proves what a batch script says: every option of the spec, the flags Slurm jobs need, and no value as code."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import LaunchError
from launcher.script import Submission, render, sbatch_quote
from launcher.spec import JobSpec, Resources, Restart, SlurmOptions
from training.config import TrainConfig
from training.runfolder import RunFolder


def _submission(path: str = "/home/u/runs/a-k3f9") -> Submission:
    return Submission(RunFolder(Path(path)), "0123abcd", Path("/home/u"))


def _options(text: str) -> dict[str, str | None]:
    words = [shlex.split(line)[1] for line in text.splitlines() if line.startswith("#SBATCH ")]
    parts = [word.removeprefix("--").partition("=") for word in words]
    return {name: value if sign else None for name, sign, value in parts}


def _spec(**changes: object) -> JobSpec:
    return JobSpec(name="a", command=["true"], **changes)  # type: ignore[arg-type]


def test_a_null_leaves_its_option_out() -> None:
    options = _options(render(_spec(), _submission(), ["true"]))
    assert set(options) == {
        *("job-name", "comment", "nodes", "ntasks-per-node", "cpus-per-task"),
        *("chdir", "output", "open-mode", "export", "requeue"),
    }


def test_every_resource_becomes_its_option() -> None:
    resources = Resources(2, 4, 3, "a100:4", None, "4G", None, None, "1-12")
    slurm = SlurmOptions("gpu", "acct", "high", "ib", "n[1-2]", "n3", "resv", "gpu:4", {"exclusive": True})
    options = _options(render(_spec(resources=resources, slurm=slurm), _submission(), ["true"]))
    expected = {
        "nodes": "2",
        "ntasks-per-node": "4",
        "cpus-per-task": "3",
        "gpus-per-node": "a100:4",
        "mem": "4G",
        "time": "1-12",
        "partition": "gpu",
        "account": "acct",
        "qos": "high",
        "constraint": "ib",
        "nodelist": "n[1-2]",
        "exclude": "n3",
        "reservation": "resv",
        "gres": "gpu:4",
        "exclusive": None,
    }
    assert {name: options[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("resources", "present", "absent"),
    [
        (Resources(gpus_per_task="a100:1"), {"gpus-per-task": "a100:1"}, {"gpus-per-node", "mem"}),
        (Resources(gpus_per_node="0"), {}, {"gpus-per-node", "gres"}),
        (Resources(memory_per_cpu="2G"), {"mem-per-cpu": "2G"}, {"mem", "mem-per-gpu"}),
        (Resources(memory_per_gpu="40G"), {"mem-per-gpu": "40G"}, {"mem", "mem-per-cpu"}),
        (Resources(memory="0"), {"mem": "0"}, {"mem-per-cpu"}),
    ],
)
def test_sites_of_all_kinds_are_served(resources: Resources, present: dict[str, str], absent: set[str]) -> None:
    options = _options(render(_spec(resources=resources), _submission(), ["true"]))
    assert options.items() >= present.items() and not absent & set(options)


def test_flags_that_slurm_needs_for_ranks() -> None:
    text = render(_spec(resources=Resources(cpus_per_task=3)), _submission(), ["prog"])
    srun = text[text.index("srun ") :]
    assert "--kill-on-bad-exit=1" in srun and "--cpus-per-task=3" in srun and "--open-mode=append" in srun
    assert _options(text)["open-mode"] == "append"
    assert "no-requeue" in _options(render(_spec(restart=Restart("none")), _submission(), ["prog"]))


def test_only_our_own_loop_is_signalled_ahead_of_the_time_limit() -> None:
    resources = Resources(time="30")
    assert "signal" not in _options(render(_spec(resources=resources), _submission(), ["true"]))
    train = JobSpec(name="a", train=TrainConfig(task="digits"), resources=resources)
    assert _options(render(train, _submission(), ["true"]))["signal"] == "USR2@90"
    train.resources.time = "2"
    assert _options(render(train, _submission(), ["true"]))["signal"] == "USR2@30"


@given(st.text(st.characters(min_codepoint=32, exclude_characters="\x7f", exclude_categories=["Cs", "Cc"]), min_size=1))
def test_quoting_survives_a_reader_of_quotes_and_backslashes(value: str) -> None:
    """shlex reads double quotes and backslashes as sbatch does; the cluster tests put the real one to the question."""
    assert shlex.split(f"--x={sbatch_quote(value)}") == [f"--x={value}"]


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "\x1b[2J", "a\x00b"])
def test_a_control_character_never_reaches_a_script(value: str) -> None:
    with pytest.raises(LaunchError, match="control character"):
        sbatch_quote(value)


def test_paths_with_odd_characters_are_data_to_the_shell(tmp_path: Path) -> None:
    odd = tmp_path / "a b'c\"d $(touch pwned) `touch pwned` [1-3]"
    (odd / "attempts").mkdir(parents=True)
    text = render(_spec(), _submission(str(odd)), ["printf", "%s\\n", "$(touch pwned)"])
    text = text.replace("srun --kill", "shown --kill").split("exec ")[0] + "\n"
    script = 'shown() { printf "%s\\n" "$@"; }\n' + text
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    assert f"--output={odd}/attempts/0001/rank-%4t.log" in done.stdout.splitlines()
    assert "$(touch pwned)" in done.stdout.splitlines()
    assert not list(tmp_path.glob("**/pwned"))
    assert (odd / "attempts" / "0001").stat().st_mode & 0o777 == 0o700


def test_a_second_start_of_the_same_job_takes_the_next_attempt(tmp_path: Path) -> None:
    (tmp_path / "attempts" / "0001").mkdir(parents=True)
    text = render(_spec(), _submission(str(tmp_path)), ["true"]).split("srun ")[0]
    done = subprocess.run(["bash", "-euc", text + 'echo "$DDP_ATTEMPT"'], capture_output=True, text=True, timeout=20)
    assert done.stdout == "2\n"


def test_a_path_that_slurm_would_rewrite_is_refused() -> None:
    with pytest.raises(LaunchError, match="percent sign"):
        render(_spec(), _submission("/home/u/50%j"), ["true"])
