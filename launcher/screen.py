"""The terminal: rank 0's log as it grows, as plain lines or as a bar that is redrawn in place."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from training.progress import parse_plain_line, render_bar
from training.runfolder import RunFolder


@dataclass
class Screen:
    """The terminal: plain lines, or a bar that is redrawn in place under them."""

    out: TextIO
    bar: bool
    said: str = ""
    """The start of a line in rank 0's log that the launcher said already."""
    _drawn: bool = False
    _gone: bool = False

    @classmethod
    def of(cls, folder: RunFolder, out: TextIO | None = None) -> Screen:
        """A run's screen, with a bar where `out` (stdout) is a terminal that can redraw a line."""
        out = out or sys.stdout
        return cls(out, out.isatty() and os.environ.get("TERM") != "dumb", f"run    {folder.run_id} ")

    def line(self, text: str) -> None:
        """Show one line of rank 0's log, or move the bar. A reader that left ends the showing, not the run."""
        if self._gone or (self.said and text.startswith(self.said)):
            return
        try:
            self._show(text)
        except OSError as error:
            self._gone = True
            tell(f"launch: nothing more can be shown ({error.strerror}); the run goes on")
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python complains once more at its exit

    def _show(self, text: str) -> None:
        point = parse_plain_line(text) if self.bar else None
        if point is not None:
            width = shutil.get_terminal_size().columns
            self.out.write("\r\x1b[2K" + render_bar(point, width, "NO_COLOR" not in os.environ))
            self._drawn = True
        else:
            self.clear()
            self.out.write(text + "\n")
        self.out.flush()

    def clear(self) -> None:
        """End the bar's line, leaving it as it is."""
        if self._drawn:
            self.out.write("\n")
            self._drawn = False


def tell(text: str) -> None:
    """A line on standard error, where anybody still reads it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@dataclass
class Tail:
    """Whole lines of a file that grows."""

    path: Path
    _offset: int = 0
    _rest: bytes = b""

    def lines(self) -> list[str]:
        """Lines that were completed since the last call."""
        try:
            with self.path.open("rb") as log:
                log.seek(self._offset)
                fresh = log.read()
        except FileNotFoundError:
            return []
        self._offset += len(fresh)
        *whole, self._rest = (self._rest + fresh).split(b"\n")
        return [line.decode("utf-8", "replace").rstrip("\r") for line in whole]

    def remainder(self) -> list[str]:
        """A last line without its end."""
        rest, self._rest = self._rest, b""
        return [rest.decode("utf-8", "replace")] if rest else []
