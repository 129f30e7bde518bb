"""What a drill found, for people and for programs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from training.rehearsal import Fault
from training.runfolder import write_json

from ..errors import DONE, JOB_FAILED
from ..verify.report import Check, count
from .runs import Met, Run

_ACTIONS = {
    "rank": "SIGKILL of one rank",
    "all": "SIGKILL of all ranks",
    "host": "SIGKILL of the host process",
    "stop": "clean stop (SIGTERM)",
}


def kind(fault: Fault) -> str:
    """What sort of fault it is, in words."""
    if fault.action == "full":
        return f"disk full, {'all tries' if fault.whole else 'the first try'} of a save"
    return f"{_ACTIONS[fault.action]}, in a {fault.where}"


def told(met: Met) -> str:
    """What happened, or was planned and did not: `SIGKILL of rank 1 in step 37`."""
    fault, row = met.fault, met.happened
    step, rank = (fault.step, fault.rank) if row is None else (row["step"], row["rank"])
    words = f"SIGKILL of rank {rank}" if fault.action == "rank" else kind(fault).partition(",")[0]
    where = f"in step {step}" if fault.where == "step" else f"in the save of step {step}"
    if row is None:
        return f"{words} {where} was planned, and did not happen"
    by = "" if fault.action == "rank" else f"rank {rank}: "
    return f"{words} {where}" + (f" ({by}{row['point']})" if row["point"] else "")


@dataclass
class Certificate:
    """The result of a drill, as it grows."""

    head: list[str]
    """What was rehearsed."""
    command: str
    """The command line that does it all again."""
    facts: dict[str, Any]
    """The same for programs."""
    met: dict[str, list[Met]] = field(default_factory=dict)
    """What became of the faults, by the run's name."""
    runs: list[Run] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    whole: bool = False
    """Whether the drill came to its end."""
    began: float = field(default_factory=time.monotonic)

    @property
    def exit_code(self) -> int:
        return DONE if self.whole and not any(check.faults for check in self.checks) else JOB_FAILED

    @property
    def verdict(self) -> str:
        if any(check.faults for check in self.checks):
            return "it does not hold: see the line that begins with BAD"
        if not self.whole:
            return "interrupted: what is above held so far"
        some = " that was tried" if any(not check.text for check in self.checks) else ""
        return f"everything{some} held"

    def lines(self) -> list[str]:
        """For the terminal and certificate.txt."""
        table = self._tried()
        width = max([len("what was tried"), *map(len, table)])
        shown = [f"{'what was tried':<{width}}  planned  happened"] if table else []
        shown += [f"{words:<{width}}  {planned:>7}  {happened:>8}" for words, (planned, happened) in table.items()]
        missed = [f"     {told(met)}" for met in self._all() if met.happened is None]
        checks = [line for check in self.checks for line in check.lines()]
        cost = [f"cost     {self._cost()}"] if table else []
        return [*self.head, *shown, *missed, *checks, *cost, f"verdict  {self.verdict}", f"again    {self.command}"]

    def write(self, home: Path) -> None:
        """Write certificate.txt and certificate.json. Errors: OSError."""
        (home / "certificate.txt").write_text("\n".join(self.lines()) + "\n", encoding="utf-8")
        faults = [
            {"run": name, "planned": asdict(met.fault), "happened": met.happened}
            for name, several in self.met.items()
            for met in several
        ]
        runs = [
            {"run": run.name, "attempts": run.attempts, "ranks": run.ranks, "wall_s": round(run.wall_s, 3)}
            for run in self.runs
        ]
        checks = [{"name": check.name, "holds": not check.faults, **asdict(check)} for check in self.checks]
        result = {"exit_code": self.exit_code, "verdict": self.verdict, "command": self.command}
        write_json(
            home / "certificate.json", {**result, **self.facts, "checks": checks, "runs": runs, "faults": faults}
        )

    def _all(self) -> Iterable[Met]:
        return (met for several in self.met.values() for met in several)

    def _tried(self) -> dict[str, tuple[int, int]]:
        planned = Counter(kind(met.fault) for met in self._all())
        happened = Counter(kind(met.fault) for met in self._all() if met.happened is not None)
        return {words: (planned[words], happened[words]) for words in sorted(planned)}

    def _cost(self) -> str:
        runs = [run for run in self.runs if run.name in self.met]
        parts = [
            count(sum(run.attempts for run in runs), "attempt"),
            f"{count(sum(run.steps_again() for run in runs), 'step')} trained twice",
            f"{count(sum(len(run.broken) for run in runs), 'save')} broken off and the checkpoint before gone on from",
            f"{time.monotonic() - self.began:.0f} s in all",
        ]
        return ", ".join(parts)
