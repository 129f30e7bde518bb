"""Progress lines can be read back, bars fit every width, and a terminal shows a bar where a file shows lines."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.progress import Point, Progress, parse_plain_line, plain_line, render_bar

HOME = Path(__file__).parents[2]
POINT = Point(50, 220, 0.43123, 0.004, 12345.4, 12)

points = st.builds(
    Point,
    step=st.integers(0, 10**12),
    total=st.integers(0, 10**12),
    loss=st.floats(-1e300, 1e300) | st.sampled_from([math.nan, math.inf, -math.inf]),
    lr=st.floats(0, 10),
    samples_per_s=st.floats(0, 1e12),
    eta_s=st.none() | st.integers(0, 10**7),
)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_line_shows_everything_in_four_digits() -> None:
    assert plain_line(POINT) == "step 50/220  loss 0.4312  lr 0.004  12345 samples/s  eta 0:12"
    assert plain_line(Point(1, 2, math.nan, 1.5e-5, 0.1234, 3723)) == (
        "step 1/2  loss nan  lr 1.5e-05  0.123 samples/s  eta 1:02:03"
    )
    assert plain_line(Point(1, 2, 0.0, 0.0, 0.0)).endswith("eta -")


def test_a_line_is_read_back() -> None:
    assert parse_plain_line("step 50/220  loss 0.4312  lr 0.004  12345 samples/s  eta 1:00:12\n") == Point(
        50, 220, 0.4312, 0.004, 12345.0, 3612
    )


@given(points)
def test_reading_a_line_loses_nothing_that_it_shows(point: Point) -> None:
    line = plain_line(point)
    read = parse_plain_line(line)
    assert read is not None
    assert plain_line(read) == line
    assert (read.step, read.total, read.eta_s) == (point.step, point.total, point.eta_s)


@pytest.mark.parametrize(
    "text",
    ["", "step 1/2", "step 1/2  loss e  lr 1  1 samples/s  eta -", "my step 1/2  loss 1  lr 1  1 samples/s  eta -"],
)
def test_other_text_is_no_point(text: str) -> None:
    assert parse_plain_line(text) is None


@given(points, st.integers(0, 200))
def test_a_bar_fits_its_width_with_and_without_colour(point: Point, width: int) -> None:
    plain = render_bar(point, width, colour=False)
    assert len(plain) <= width
    assert re.sub(r"\x1b\[\d+m", "", render_bar(point, width, colour=True)) == plain


def test_a_bar_grows_with_the_share_done_and_gives_way_to_facts() -> None:
    assert render_bar(POINT, 80, colour=False) == (
        "[===>................]  50/220  loss 0.4312  lr 0.004  12345 samples/s  eta 0:12"
    )
    full = render_bar(Point(220, 220, 1.0, 0.1, 1.0, 0), 100, colour=False)
    assert "[========================================]" in full
    assert render_bar(POINT, 45, colour=False) == "[=>..........]  50/220  loss 0.4312  eta 0:12"
    assert render_bar(POINT, 32, colour=False) == "50/220  loss 0.4312  eta 0:12"
    assert render_bar(POINT, 4, colour=False) == "50/2"


def test_a_file_gets_a_line_for_each_update_and_note() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(100, stream, clock)
    progress.update(10, 1.0, 0.1, 320.0)
    clock.now = 5.0
    progress.note("saved step 10")
    progress.update(20, 0.5, 0.1, 320.0)
    progress.update(100, 0.5, 0.1, 320.0)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "step 10/100  loss 1  lr 0.1  320 samples/s  eta -",
        "saved step 10",
        "step 20/100  loss 0.5  lr 0.1  320 samples/s  eta 0:40",
        "step 100/100  loss 0.5  lr 0.1  320 samples/s  eta 0:00",
    ]


def test_a_terminal_gets_a_bar_at_most_ten_times_a_second_and_the_last_state() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(1000, stream, clock)
    for step in range(1, 1001):  # a step each millisecond
        clock.now = step / 1000
        progress.update(step, 1.0, 0.1, 1.0)
    progress.close()
    progress.close()
    drawn = stream.getvalue().split("\r")[1:]
    assert 10 <= len(drawn) <= 12
    assert "1000/1000" in drawn[-1]
    assert drawn[-1].endswith("\x1b[K\n")
    assert stream.getvalue().count("\n") == 1


def test_a_note_goes_above_the_bar() -> None:
    stream = Terminal()
    progress = Progress(10, stream, Clock())
    progress.update(1, 1.0, 0.1, 1.0)
    progress.note("hello")
    assert re.fullmatch(r"\r\[.*1/10.*\x1b\[K\r\x1b\[Khello\n\r\[.*1/10.*\x1b\[K", stream.getvalue())


def test_no_color_keeps_the_bar_and_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        stream = Terminal()
        Progress(10, stream).update(1, 1.0, 0.1, 1.0)
        return stream.getvalue()

    assert "\x1b[32m" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert re.findall(r"\x1b\[[0-9;]*[a-zA-Z]", shown()) == ["\x1b[K"]
    monkeypatch.setenv("TERM", "dumb")
    assert shown() == "step 1/10  loss 1  lr 0.1  1 samples/s  eta -\n"


def test_a_stream_that_is_gone_or_narrow_in_letters_never_stops_training() -> None:
    read, write = os.pipe()
    os.close(read)
    broken = os.fdopen(write, "w")
    progress = Progress(2, broken)
    progress.update(1, 1.0, 0.1, 1.0)
    progress.note("still here")
    progress.close()
    os.close(write)
    with pytest.raises(OSError, match="Bad file descriptor"):
        broken.close()
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Progress(2, ascii_only).note("naïve")
    ascii_only.seek(0)
    assert ascii_only.read() == "na\\xefve\n"


def test_on_a_real_terminal_no_line_is_wider_than_it() -> None:
    import fcntl
    import struct
    import termios

    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with os.fdopen(child, "w") as stream:
        Progress(220, stream).update(50, 0.4312, 0.004, 12345.0)
        text = os.read(parent, 4096).decode()
    os.close(parent)
    visible = re.sub(r"\x1b\[[0-9;]*[a-zA-Z]", "", text).strip("\r\n")
    assert len(visible) <= 59
    assert "50/220" in visible


def test_it_needs_no_torch() -> None:
    code = "import sys, training.progress; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=HOME, check=True, timeout=60)
