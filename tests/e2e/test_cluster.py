"""Proves whole jobs on a real Slurm: two nodes, four ranks, failures that are named, and values that stay data.

python -m pytest tests/e2e/test_cluster.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.clusterfix import Cluster

from .conftest import Launch, environment

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def on_slurm(cluster: Cluster) -> dict[str, str]:
    """The environment of a user of the cluster."""
    return environment(SLURM_CONF=str(cluster.slurm_conf))


def _attempt(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run / "attempts" / "0001"


def _slurm_spec(user: Path, text: str = "") -> None:
    spec = (user / "spec.yaml").read_text().replace("executor: local", "executor: slurm")
    (user / "spec.yaml").write_text(spec.replace("nodes: 1", "nodes: 2") + text)


def test_two_nodes_four_ranks_learn_digits(tmp_path: Path, launch: Launch, on_slurm: dict[str, str]) -> None:
    spec = str(ROOT / "configs/ddp_2node.yaml")
    done = launch(tmp_path, spec, "--follow", "wandb.mode=disabled", env=on_slurm, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "batch  32 per rank x 1 accumulation x 4 ranks = 128" in done.stdout
    assert "lr     0.001 x 128/32 = 0.004, warmup 50 steps" in done.stdout
    assert "test accuracy 0.97" in done.stdout
    places = [json.loads((_attempt(tmp_path) / f"env-{rank:04d}.json").read_text()) for rank in range(4)]
    assert [(p["host"], p["LOCAL_RANK"], p["NODE_RANK"]) for p in places] == [
        ("n1", "0", "0"),
        ("n1", "1", "0"),
        ("n2", "0", "1"),
        ("n2", "1", "1"),
    ]
    assert {p["MASTER_ADDR"] for p in places} == {"n1"}


def test_without_follow_it_returns_after_the_submission(user: Path, launch: Launch, on_slurm: dict[str, str]) -> None:
    _slurm_spec(user)
    done = launch(user, "spec.yaml", "train.steps=1", env=on_slurm)
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.split(" job ")[1].split()[0]
    subprocess.run(["scancel", job_id], env=on_slurm, check=True, timeout=30)


def test_the_dry_run_is_the_script_that_is_submitted(
    user: Path, launch: Launch, cluster: Cluster, on_slurm: dict[str, str]
) -> None:
    _slurm_spec(user)
    shown = launch(user, "spec.yaml", "--dry-run", env=on_slurm).stdout
    done = launch(user, "spec.yaml", "train.steps=1", "--follow", env=on_slurm)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (user / "runs").iterdir()
    token = json.loads((run / "run.json").read_text())["token"]
    (script,) = (run / "submitit").glob("*_submission.sh")
    submitted = script.read_text().replace(run.name, "t-XXXX").replace(token, "TOKEN")
    assert submitted in shown


@pytest.mark.parametrize(
    ("task", "cause"),
    [
        ("Raises", "rank 1 on n1: ValueError: the user's own fault, with 50% and 'quotes'"),
        ("Dies", "rank 1 on n1: RankLost"),
        ("Exits", "rank 1 on n1: SystemExit: 7"),
    ],
)
def test_a_failing_rank_takes_the_job_down_and_is_named(
    user: Path, launch: Launch, on_slurm: dict[str, str], task: str, cause: str
) -> None:
    _slurm_spec(user)
    begun = time.monotonic()
    done = launch(user, "spec.yaml", "--follow", f"train.task=tasks:{task}", env=on_slurm)
    assert done.returncode == 5, done.stdout + done.stderr
    assert time.monotonic() - begun < 60  # the promise to users, not a measurement of speed
    assert cause in done.stderr


def test_a_refused_job_is_exit_code_3_with_slurms_reason(user: Path, launch: Launch, on_slurm: dict[str, str]) -> None:
    _slurm_spec(user)
    done = launch(user, "spec.yaml", "slurm.partition=nowhere", env=on_slurm)
    assert done.returncode == 3
    assert "invalid partition" in done.stderr and "Traceback" not in done.stderr


def test_an_absent_controller_is_exit_code_4(user: Path, launch: Launch, on_slurm: dict[str, str]) -> None:
    _slurm_spec(user)
    text = Path(on_slurm["SLURM_CONF"]).read_text()
    lines = [line for line in text.splitlines() if not line.lower().startswith(("slurmctldport", "messagetimeout"))]
    away = user / "slurm.conf"
    away.write_text("\n".join([*lines, "SlurmctldPort=9", "MessageTimeout=2"]))
    done = launch(user, "spec.yaml", env=on_slurm | {"SLURM_CONF": str(away)}, timeout=100)
    assert done.returncode == 4, done.stderr
    assert "does not answer" in done.stderr


def test_odd_values_arrive_byte_for_byte_and_run_nothing(user: Path, launch: Launch, on_slurm: dict[str, str]) -> None:
    odd = "a $(touch pwned) `touch pwned` 'q' \"d\" [1-3] #x;y"
    words = ["$(touch pwned)", "`touch pwned`", "a b", "'", '"', "[1-3]", "\\", "äöü", "", "a\nb", "%j"]
    (user / "show.py").write_text(
        "import json, os, sys\n"
        "print(json.dumps([sys.argv[1:], os.environ['ODD'], os.environ['SLURM_JOB_NAME'], os.getcwd()]))"
    )
    place = user / "a place's [1] $(touch pwned)"
    place.mkdir()
    spec = {"name": odd, "executor": "slurm", "env": {"ODD": odd}, "command": ["python3", "../show.py", *words]}
    (place / "spec.yaml").write_text(json.dumps(spec))
    done = launch(place, "spec.yaml", "--follow", env=on_slurm)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    assert json.loads(shown[0]) == [words, odd, odd, str(place)]
    assert not list(user.rglob("pwned"))


def test_a_submission_from_inside_a_job_is_a_job_of_its_own(
    user: Path, launch: Launch, on_slurm: dict[str, str]
) -> None:
    _slurm_spec(user)
    (user / "spec.yaml").write_text(
        "name: o\nexecutor: slurm\nresources: {nodes: 1, tasks_per_node: 2}\n"
        'command: [sh, -c, "echo $SLURM_NTASKS $SLURM_JOB_NAME [$SLURM_MEM_PER_CPU]"]\n'
    )
    outer = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "77", "SLURM_MEM_PER_CPU": "10", "SBATCH_PARTITION": "nowhere"}
    (user / "spec.yaml").write_text((user / "spec.yaml").read_text() + "slurm: {partition: main}\n")
    done = launch(user, "spec.yaml", "--follow", env=on_slurm | outer)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 o [" in done.stdout and "[10]" not in done.stdout


def test_uneven_ranks_and_typed_gpus_see_what_slurm_gave_them(
    user: Path, launch: Launch, on_slurm: dict[str, str]
) -> None:
    (user / "spec.yaml").write_text(
        "name: g\nexecutor: slurm\n"
        "resources: {nodes: 2, tasks_per_node: 2, gpus_per_node: 'a100:2', memory_per_cpu: 100M}\n"
        'command: [sh, -c, "echo $RANK/$WORLD_SIZE $LOCAL_RANK $CUDA_VISIBLE_DEVICES $OMP_NUM_THREADS"]\n'
    )
    done = launch(user, "spec.yaml", "--follow", env=on_slurm)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [(_attempt(user) / f"rank-{rank:04d}.log").read_text().split() for rank in range(4)]
    assert [log[:2] for log in logs] == [["0/4", "0"], ["1/4", "1"], ["2/4", "0"], ["3/4", "1"]]
    assert {log[2] for log in logs} == {"0,1"} and {log[3] for log in logs} == {"1"}


def _copy_of_the_code(site: Path) -> None:
    """What `launch` needs for a command, where everybody can read it: a checkout may lie in a private folder."""
    for name in ("launcher", "training", "ddp_launcher.py"):
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, site / name)
    for name in ("omegaconf", "submitit", "cloudpickle", "yaml", "typing_extensions"):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        origin = Path(spec.origin)
        if origin.name == "__init__.py":
            shutil.copytree(origin.parent, site / name)
        else:
            shutil.copy(origin, site / origin.name)


def _python_for_everybody(user: pwd.struct_passwd) -> str:
    """This interpreter, or Debian's where this one lies in a private folder."""
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            subprocess.run([python, "-c", ""], user=user.pw_uid, group=user.pw_gid, extra_groups=[], check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    raise AssertionError("no Python here that an ordinary user may run")


def test_an_ordinary_user_launches_too(on_slurm: dict[str, str]) -> None:
    home = Path("/var/tmp") / f"ddp-launcher-test-{os.getpid()}"
    nobody = pwd.getpwnam("nobody")
    (home / "site").mkdir(parents=True)
    try:
        _copy_of_the_code(home / "site")
        (home / "spec.yaml").write_text(
            "name: u\nexecutor: slurm\nresources: {nodes: 2}\ncommand: [sh, -c, 'id -un; umask']\n"
        )
        for path in (home, *home.rglob("*")):
            os.chown(path, nobody.pw_uid, nobody.pw_gid)
        program = "import sys, ddp_launcher; sys.argv[0] = 'launch'; sys.exit(ddp_launcher.main())"
        done = subprocess.run(
            [_python_for_everybody(nobody), "-c", program, "spec.yaml", "--follow"],
            cwd=home,
            env=on_slurm | {"HOME": str(home), "PYTHONPATH": str(home / "site")},
            user=nobody.pw_uid,
            group=nobody.pw_gid,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "nobody" in done.stdout
        assert _attempt(home).stat().st_mode & 0o777 == 0o700
    finally:
        shutil.rmtree(home)
