"""Proves that our `launcher` and `training` are found under every import path, and a user's own stay the user's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ddp_launcher

ROOT = Path(ddp_launcher.__file__).resolve().parent


def _user_folder(folder: Path) -> Path:
    for name in ("training", "launcher"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"WHOSE = 'the user\\'s {name}'\n")
        (folder / name / "config.py").write_text("THEIRS = True\n")
    return folder


def _python(program: str, folder: Path) -> str:
    env = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_command_works_where_the_import_path_holds_packages_of_the_same_names(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(_user_folder(tmp_path))}
    done = subprocess.run(
        [Path(sys.executable).parent / "launch", "check", ROOT / "configs/quickstart.yaml"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "ok" in done.stdout


def test_after_stepping_aside_the_names_are_the_users_and_ours_go_on(tmp_path: Path) -> None:
    _user_folder(tmp_path)
    program = """
import sys, ddp_launcher
ddp_launcher.open_door()
import training.config as before
import launcher.errors
assert ddp_launcher.step_aside(sys.path) == ["training", "launcher"]
import training, training.config, launcher
assert training.WHOSE == "the user's training" and training.config.THEIRS
assert launcher.WHOSE == "the user's launcher"
assert before is sys.modules["ddp_launcher.training.config"]
import ddp_launcher.training.runfolder as later  # not loaded before: found beside its siblings
assert later.__package__ == "ddp_launcher.training"
print("fine")
"""
    assert _python(program, tmp_path) == "fine"


def test_without_packages_of_the_same_names_nothing_moves(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()  # a folder of data, without code
    program = """
import sys, ddp_launcher
ddp_launcher.open_door()
import training.config as before
assert ddp_launcher.step_aside(sys.path) == []
import training.config
assert training.config is before
print("fine")
"""
    assert _python(program, tmp_path) == "fine"
