"""How far training is: a one-line bar on a terminal, plain lines elsewhere. Free of torch: the launcher uses it too.

    [==========>..............]  50/220  loss 0.4312  lr 0.004  12345 samples/s  eta 0:12     a terminal
    step 50/220  loss 0.4312  lr 0.004  12345 samples/s  eta 0:12                            a file or a pipe

Ranks write plain lines to their logs; the launcher reads them back with `parse_plain_line` and draws the bar from them.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

_REDRAW_S = 0.1
_LINE_S = 0.2
_BAR_LIMIT = 40
_NUMBER = r"[-+0-9.einfa]+"
_LINE = re.compile(
    rf"step (\d+)/(\d+)  loss ({_NUMBER})  lr ({_NUMBER})  ({_NUMBER}) samples/s  eta (-|(?:\d+:)?\d+:\d\d)"
)


@dataclass(frozen=True)
class Point:
    """A moment of training."""

    step: int
    """Optimizer steps done."""
    total: int
    """Optimizer steps of the whole run."""
    loss: float
    lr: float
    samples_per_s: float
    """Samples a second over all ranks."""
    eta_s: int | None = None
    """Seconds until the end at the present rate; None while no rate is known."""


class Progress:
    """Shows progress on a stream: a bar where it is a terminal that can move its cursor, else a line for each update.

    A stream that no longer takes output ends the display, never the training.
    """

    def __init__(self, total_steps: int, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total_steps
        self._stream = stream
        self._clock = clock
        self._bar = _is_terminal(stream) and os.environ.get("TERM", "") != "dumb"
        self._colour = self._bar and not os.environ.get("NO_COLOR")
        self._first: tuple[int, float] | None = None
        self._point: Point | None = None
        self._drawn_at = -math.inf
        self._stale = False
        self._broken = False

    def update(self, step: int, loss: float, lr: float, samples_per_s: float) -> None:
        """Show the state after `step` optimizer steps. Cheap to call at every step: a bar is drawn ten times a second
        at most, a line is printed five times a second at most; the last state is always shown."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        done, passed = step - self._first[0], now - self._first[1]
        eta_s = 0 if step >= self._total else round((self._total - step) * passed / done) if done > 0 else None
        self.show(Point(step, self._total, loss, lr, samples_per_s, eta_s))

    def show(self, point: Point) -> None:
        """Show a point that was made elsewhere, for example read from a log."""
        self._point = point
        if self._clock() - self._drawn_at >= (_REDRAW_S if self._bar else _LINE_S):
            self._draw()
        else:
            self._stale = True

    def note(self, text: str) -> None:
        """Print a line of its own, above the bar."""
        if not self._bar:
            if self._stale:
                self._draw()
            self._write(text + "\n")
            return
        self._write(f"\r\x1b[K{text}\n")
        if self._point is not None:
            self._draw()

    def close(self) -> None:
        """Show the last state and leave the cursor on a line of its own. A second call does nothing."""
        if self._stale:
            self._draw()
        if self._bar and self._point is not None:
            self._write("\n")
        self._point = None

    def _draw(self) -> None:
        assert self._point is not None
        if self._bar:
            # One column stays free: a terminal wraps when its last one is written.
            self._write(f"\r{render_bar(self._point, _columns(self._stream) - 1, self._colour)}\x1b[K")
        else:
            self._write(plain_line(self._point) + "\n")
        self._drawn_at = self._clock()
        self._stale = False

    def _write(self, text: str) -> None:
        if self._broken:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):  # gone, full or closed: there is nowhere left to say so
            self._broken = True


def plain_line(point: Point) -> str:
    """`step 50/220  loss 0.4312  lr 0.004  12345 samples/s  eta 0:12`; four digits of loss and lr."""
    return f"step {point.step}/{point.total}  {'  '.join(_facts(point))}"


def parse_plain_line(text: str) -> Point | None:
    """The point that a line of `plain_line` shows, or None for any other text."""
    match = _LINE.fullmatch(text.strip())
    if match is None:
        return None
    try:
        loss, lr, rate = float(match[3]), float(match[4]), float(match[5])
    except ValueError:
        return None
    return Point(int(match[1]), int(match[2]), loss, lr, rate, _seconds(match[6]))


def render_bar(point: Point, width: int, colour: bool) -> str:
    """A bar with its facts in at most `width` visible characters: first the bar shrinks, then facts go, ETA last.

    With `colour`, ANSI colours are added, which take no width.
    """
    count = f"{point.step}/{point.total}"
    loss, lr, rate, eta = _facts(point)
    for facts in ([loss, lr, rate, eta], [loss, rate, eta], [loss, eta], [eta], []):
        text = "  ".join([count, *facts])
        bar_width = min(_BAR_LIMIT, width - len(text) - 4)
        if bar_width >= 8:
            return f"{_bar(point, bar_width, colour)}  {text}"
        if len(text) <= width and len(facts) <= 2:
            return text
    return count[: max(width, 0)]


def _bar(point: Point, width: int, colour: bool) -> str:
    share = min(1.0, point.step / point.total) if point.total > 0 else 1.0
    full = int(share * width)
    done = "=" * full
    rest = "." * (width - full)
    if 0 < full < width:
        done = done[:-1] + ">"
    return f"[\x1b[32m{done}\x1b[0m\x1b[2m{rest}\x1b[0m]" if colour else f"[{done}{rest}]"


def _facts(point: Point) -> list[str]:
    rate = point.samples_per_s
    rate_text = f"{rate:.0f}" if rate >= 99.95 else f"{rate:.3g}"
    return [f"loss {point.loss:.4g}", f"lr {point.lr:.4g}", f"{rate_text} samples/s", f"eta {_clock_text(point.eta_s)}"]


def _clock_text(seconds: int | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _seconds(text: str) -> int | None:
    if text == "-":
        return None
    total = 0
    for part in text.split(":"):
        total = total * 60 + int(part)
    return total


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # no such method, or closed
        return False


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):
        return 80
