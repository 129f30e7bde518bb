"""What `launch verify` found, one check after the other."""

from __future__ import annotations

from dataclasses import dataclass, field

_SHOWN = 5
"""So many faults of one check are printed; the rest is counted."""


@dataclass
class Check:
    """One check: it holds, it does not, or the run folder does not tell."""

    name: str
    text: str = ""
    """What holds, with figures. Empty: nothing is recorded that could be checked."""
    faults: list[str] = field(default_factory=list)
    """What is wrong, each with the file that says so."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know though nothing is wrong."""
    unknown: str = "not recorded"
    """What is said where nothing was checked."""

    def lines(self) -> list[str]:
        """For the terminal: `ok`, `BAD` or `--`, the check's name, and what was found."""
        found = [f"BAD  {self.name:<12} {fault}" for fault in self.faults[:_SHOWN]]
        if len(self.faults) > _SHOWN:
            found.append(f"BAD  {self.name:<12} and {len(self.faults) - _SHOWN} more of this kind")
        if not found:
            found = [f"ok   {self.name:<12} {self.text}" if self.text else f"--   {self.name:<12} {self.unknown}"]
        return found + [f"     {'':<12} {note}" for note in self.notes]


def count(number: int, thing: str, plural: str = "") -> str:
    """`1 line`, `2,000 lines`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {plural or thing + 's'}"


def ranges(numbers: list[int]) -> str:
    """Sorted numbers for people, long lists cut: `20, 40, 60 ... 200 (10 of them)`."""
    if len(numbers) <= 4:
        return ", ".join(str(number) for number in numbers)
    return f"{numbers[0]}, {numbers[1]}, {numbers[2]} ... {numbers[-1]} ({len(numbers):,} of them)"
