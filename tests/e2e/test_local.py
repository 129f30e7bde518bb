"""Proves whole runs on this machine: they train, they fail with a name, they stop when asked, and nothing leaks.

python -m pytest tests/e2e/test_local.py
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .conftest import LAUNCH, Launch, environment

ROOT = Path(__file__).resolve().parents[2]


def _run_folder(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def _metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _processes_of(run: Path) -> list[str]:
    """Command lines of living processes that have the run's folder in their environment."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            if f"DDP_RUN_FOLDER={run}".encode() in (proc / "environ").read_bytes():
                found.append((proc / "cmdline").read_text())
        except OSError:
            continue
    return found


def _wait_for(condition: object, what: str, within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"{what} did not come within {within_s} s"
        time.sleep(0.05)


def test_the_quickstart_learns_real_digits(tmp_path: Path, launch: Launch) -> None:
    done = launch(tmp_path, str(ROOT / "configs/quickstart.yaml"), "executor=local")
    assert done.returncode == 0, done.stderr
    assert "batch  32 per rank x 1 accumulation x 2 ranks = 64" in done.stdout
    assert "test accuracy 0.97" in done.stdout.splitlines()[-1]
    run = _run_folder(tmp_path)
    assert run.stat().st_mode & 0o777 == 0o700
    assert json.loads((run / "attempts.jsonl").read_text())["cause"] == "done"


def test_the_worked_example_32_per_rank_on_4_ranks(tmp_path: Path, launch: Launch) -> None:
    done = launch(tmp_path, str(ROOT / "configs/ddp_2node.yaml"), "executor=local", "wandb.mode=disabled")
    assert done.returncode == 0, done.stderr
    assert "2 emulated nodes x 2 ranks" in done.stdout
    assert "batch  32 per rank x 1 accumulation x 4 ranks = 128" in done.stdout
    assert "lr     0.001 x 128/32 = 0.004, warmup 50 steps, cosine to 0" in done.stdout
    env = json.loads((_run_folder(tmp_path) / "attempts/0001/env-0003.json").read_text())
    assert [env[name] for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")] == ["3", "1", "1", "4"]


def test_a_user_with_a_training_and_a_launcher_folder_of_their_own(user: Path, launch: Launch) -> None:
    for name in ("training", "launcher"):
        (user / name).mkdir()
        (user / name / "__init__.py").write_text("")
        (user / name / "config.py").write_text(f"WHOSE = 'my own {name}'\n")
    (user / "training" / "mine.py").write_text(
        "from tasks import Good\nimport training.config, launcher.config\n"
        "class Mine(Good):\n"
        "    def model(self):\n"
        "        print(training.config.WHOSE, '|', launcher.config.WHOSE, flush=True)\n"
        "        return super().model()\n"
    )
    env = environment(PYTHONPATH=str(user))
    done = launch(user, "spec.yaml", "train.task=training.mine:Mine", "train.data.workers=1", env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "my own training | my own launcher" in done.stdout


@pytest.mark.parametrize(
    ("task", "cause"),
    [
        ("Raises", "rank 1 on {host}: ValueError: the user's own fault, with 50% and 'quotes'"),
        ("Dies", "rank 1 on {host}: Killed: ended by SIGKILL"),
        ("Exits", "rank 1 on {host}: SystemExit: 7"),
        ("ExitsWell", "rank 1 on {host}: SystemExit: 0"),
        ("Vanishes", "rank 1 on {host}: RankLost"),
        ("Interrupted", "rank 1 on {host}: KeyboardInterrupt"),
        ("Nan", "NotFinite"),
    ],
)
def test_a_failing_rank_ends_the_run_and_is_named(user: Path, launch: Launch, task: str, cause: str) -> None:
    done = launch(user, "spec.yaml", f"train.task=tasks:{task}")
    assert done.returncode == 5, done.stderr
    assert cause.format(host=os.uname().nodename) in done.stderr
    run = _run_folder(user)
    assert json.loads((run / "attempts/0001/result.json").read_text())["cause"] == "failed"
    assert _processes_of(run) == []


def test_a_single_rank_that_just_leaves_is_no_success(user: Path, launch: Launch) -> None:
    done = launch(user, "spec.yaml", "train.task=tasks:AllVanish", "resources.tasks_per_node=1")
    assert done.returncode == 5, done.stdout
    assert "ended before any rank came to its end or said why" in done.stderr
    assert json.loads((_run_folder(user) / "attempts/0001/result.json").read_text())["cause"] == "failed"


def test_a_rank_leaves_though_its_clean_up_hangs(user: Path, launch: Launch) -> None:
    done = launch(user, "spec.yaml", "train.task=tasks:HangsAtExit", "train.steps=1")
    assert done.returncode == 0, done.stderr
    assert _processes_of(_run_folder(user)) == []


def test_a_wrong_option_of_a_task_is_the_users_to_mend(user: Path, launch: Launch) -> None:
    done = launch(user, "spec.yaml", "train.options.sampels=3")
    assert done.returncode == 2
    assert "sampels" in done.stderr and "samples" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def _start(user: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [str(LAUNCH), "spec.yaml", "train.options.pause=0.05", "train.steps=4000", *arguments]
    started = subprocess.Popen(
        command, cwd=user, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _wait_for(lambda: any(user.glob("runs/*/metrics.jsonl")), "the first step")
    return started


def test_ctrl_c_saves_and_the_same_run_would_go_on(user: Path) -> None:
    run = _start(user)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130, errors
    assert "stopping cleanly" in errors and "stopped, as it was asked to" in errors
    folder = _run_folder(user)
    last = _metrics(folder)[-1]["step"]
    (saved,) = (folder / "checkpoints").glob("step-*")
    assert int(saved.name.removeprefix("step-")) >= last
    assert _processes_of(folder) == []


def test_ctrl_c_twice_ends_the_ranks_at_once(user: Path) -> None:
    run = _start(user)
    run.send_signal(signal.SIGINT)
    time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=20)
    assert run.returncode == 130
    _wait_for(lambda: _processes_of(_run_folder(user)) == [], "the end of all ranks", 10)


def test_ctrl_c_before_the_ranks_are_there(user: Path) -> None:
    run = subprocess.Popen(
        [str(LAUNCH), "spec.yaml", "train.steps=100000", "train.options.pause=0.05"],
        cwd=user,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _wait_for(lambda: any(user.glob("runs/*/submitit/*")), "the start")
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode == 130
    assert _processes_of(_run_folder(user)) == []


def test_ranks_do_not_outlive_a_killed_host(user: Path) -> None:
    run = _start(user)
    folder = _run_folder(user)
    host = json.loads((folder / "attempts/0001/host.json").read_text())["pid"]
    os.kill(host, signal.SIGKILL)
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 5, errors
    assert "attempt 1 was killed before it could say why" in errors
    assert json.loads((folder / "attempts.jsonl").read_text())["cause"] == "killed"
    _wait_for(lambda: _processes_of(folder) == [], "the end of all ranks", 10)


def test_a_command_s_children_do_not_outlive_a_killed_host(user: Path) -> None:
    (user / "spec.yaml").write_text("name: c\nexecutor: local\ncommand: [sh, -c, 'sleep 300 & touch up; wait']\n")
    run = subprocess.Popen([str(LAUNCH), "spec.yaml"], cwd=user, env=environment(), stderr=subprocess.PIPE, text=True)
    _wait_for((user / "up").exists, "the command")
    folder = _run_folder(user)
    os.kill(json.loads((folder / "attempts/0001/host.json").read_text())["pid"], signal.SIGKILL)
    run.communicate(timeout=30)
    assert run.returncode == 5
    _wait_for(lambda: _processes_of(folder) == [], "the end of the command's children", 10)


def test_a_run_saves_and_ends_when_submitits_controller_was_killed(user: Path) -> None:
    run = _start(user)
    folder = _run_folder(user)
    host = json.loads((folder / "attempts/0001/host.json").read_text())["pid"]
    controller = int(Path(f"/proc/{host}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(controller, signal.SIGKILL)
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 143, errors
    assert "it saved at step" in errors and _processes_of(folder) == []


def test_a_reader_that_leaves_ends_the_showing_and_not_the_run(user: Path) -> None:
    command = f"{LAUNCH} spec.yaml train.options.pause=0.02 train.steps=60 | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=user, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1), done.stderr
    assert "nothing more can be shown" in done.stderr and "Traceback" not in done.stderr
    assert json.loads((_run_folder(user) / "attempts/0001/result.json").read_text())["cause"] == "done"


def test_a_users_files_named_like_pythons_own_modules_do_no_harm(user: Path, launch: Launch) -> None:
    for name in ("logging", "queue", "submitit", "cloudpickle"):
        (user / f"{name}.py").write_text("raise RuntimeError('the file of a user')\n")
    (user / "command.yaml").write_text("name: c\nexecutor: local\ncommand: [sh, -c, 'echo safe=$PYTHONSAFEPATH.']\n")
    done = launch(user, "command.yaml")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "safe=."


def test_a_run_whose_folder_was_removed_ends(user: Path) -> None:
    run = _start(user)
    folder = _run_folder(user)
    shutil.rmtree(folder)
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 5, errors
    _wait_for(lambda: _processes_of(folder) == [], "the end of all ranks", 10)


def test_a_run_saves_and_ends_when_its_launch_was_killed(user: Path) -> None:
    run = _start(user)
    run.kill()
    run.communicate(timeout=30)
    folder = _run_folder(user)
    _wait_for(lambda: _processes_of(folder) == [], "the end of all ranks", 30)
    assert json.loads((folder / "attempts/0001/result.json").read_text())["cause"] == "stopped"
    assert list((folder / "checkpoints").glob("step-*/manifest.json"))


def test_arguments_arrive_byte_for_byte_and_run_nothing(user: Path, launch: Launch) -> None:
    words = [
        "$(touch pwned)",
        "`touch pwned`",
        "a b",
        "'",
        '"',
        "[1-3]",
        "*",
        "\\",
        "äöü",
        "",
        "a\nb",
        ";touch pwned",
        "%j",
    ]
    (user / "show.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    (user / "command.yaml").write_text(
        json.dumps(
            {
                "name": "a $(touch pwned) `x` 'q' \"d\" [1]",
                "executor": "local",
                "env": {"ODD": "$(touch pwned) 'x' \"y\" `z`"},
                "command": ["python3", "show.py", *words],
            }
        )
    )
    done = launch(user, "command.yaml")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == words
    assert not list(user.rglob("pwned"))


def test_two_launches_at_the_same_moment(user: Path) -> None:
    both = [
        subprocess.Popen([str(LAUNCH), "spec.yaml"], cwd=user, env=environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for run in both:
        run.communicate(timeout=120)
    assert [run.returncode for run in both] == [0, 0]
    assert len(list((user / "runs").iterdir())) == 2


def test_a_command_that_fails_gives_its_exit_code_and_rank(user: Path, launch: Launch) -> None:
    (user / "command.yaml").write_text(
        'name: c\nexecutor: local\nresources: {tasks_per_node: 2}\ncommand: [sh, -c, "exit $((RANK * 9))"]\n'
    )
    done = launch(user, "command.yaml")
    assert done.returncode == 5
    assert "rank 1" in done.stderr and "sh left with exit code 9" in done.stderr


def test_a_program_that_is_not_there(user: Path, launch: Launch) -> None:
    (user / "command.yaml").write_text("name: c\nexecutor: local\ncommand: [no-such-program]\n")
    done = launch(user, "command.yaml")
    assert done.returncode == 5
    assert "no-such-program: No such file or directory" in done.stderr and "Traceback" not in done.stderr


def test_a_dry_run_writes_nothing(user: Path, launch: Launch) -> None:
    before = sorted(user.rglob("*"))
    env = environment(MY_API_KEY="hush-hush", SLURM_JOB_ID="99")
    done = launch(user, "spec.yaml", "--dry-run", "executor=slurm", env=env)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --ntasks-per-node=2" in done.stdout and "# rank 1, node 0, local rank 1" in done.stdout
    assert "hush-hush" not in done.stdout and "MY_API_KEY" in done.stdout
    assert "outer job: SLURM_JOB_ID" in done.stdout
    assert sorted(user.rglob("*")) == before


def test_a_paths_spaces_do_no_harm(tmp_path: Path, launch: Launch) -> None:
    folder = tmp_path / "my work"
    folder.mkdir()
    (folder / "spec.yaml").write_text("name: s\nexecutor: local\ncommand: [pwd]\n")
    done = launch(folder, "spec.yaml", "runs=my runs")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(folder)
