"""Proves what a person sees at a terminal: a bar that moves in place, no colour if unwanted, plain lines elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pexpect

from .conftest import LAUNCH, environment


def _shown(folder: Path, **env: str) -> str:
    child = pexpect.spawn(
        str(LAUNCH),
        ["spec.yaml", "train.options.pause=0.01", "train.steps=60"],
        cwd=str(folder),
        env=environment(**{"TERM": "xterm"} | env),
        encoding="utf-8",
        dimensions=(24, 100),
        timeout=60,
    )
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    return str(child.before)


def test_a_terminal_gets_a_bar_in_place(user: Path) -> None:
    text = _shown(user)
    assert "\x1b[2K" in text and "60/60" in text
    assert "step 10/60  loss" not in text
    lines = [re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", part) for part in re.split(r"[\r\n]", text)]
    assert max(len(line) for line in lines if "/60" in line) <= 100


def test_no_color_means_no_colour(user: Path) -> None:
    assert not re.search(r"\x1b\[[0-9;]*m", _shown(user, NO_COLOR="1"))


def test_a_dumb_terminal_gets_plain_lines(user: Path) -> None:
    text = _shown(user, TERM="dumb")
    assert "\x1b" not in text and "step 60/60  loss" in text


def test_ctrl_c_at_the_terminal_saves(user: Path) -> None:
    child = pexpect.spawn(
        str(LAUNCH),
        ["spec.yaml", "train.options.pause=0.05", "train.steps=4000", "train.log.every_steps=1"],
        cwd=str(user),
        env=environment(TERM="dumb"),
        encoding="utf-8",
        timeout=60,
    )
    child.expect("step [0-9]+/4000")
    child.sendintr()
    child.expect("stopping cleanly")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert list(user.glob("runs/*/checkpoints/step-*/manifest.json"))
