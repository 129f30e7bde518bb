"""The rehearsal itself: undisturbed runs, disturbed ones, and what is compared between them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .. import verify
from ..errors import LaunchError
from ..screen import Screen
from ..spec import JobSpec
from ..verify.checkpoints import set_aside
from ..verify.difference import differing
from ..verify.report import Check, count
from .certificate import Certificate, told
from .child import Interrupts
from .compare import differences, distance, final, same_state
from .course import Course, at, batch_at
from .plan import ENDING, EVERY_KIND, Kind, attempts, plan
from .runs import Run, disturbed, undisturbed

_SHORTEST_LIMIT_S, _LIMIT = 300.0, 20.0
"""An attempt may take so many times as long as the undisturbed run, or that many seconds."""
_WITHIN = 10.0
"""Resumed at other numbers of ranks, the parameters may be so many times as far away as those of another number of
ranks that was never disturbed: rounding grows with each step, at a rate that is the job's own."""
_ROUNDING = {"bf16": 1e-2}
_ROUNDING_ELSE = 1e-6
"""Closer than that is rounding in any case."""
_BEYOND_ROUNDING = 1e-3


@dataclass
class Drill:
    """A drill on its way."""

    spec: JobSpec
    arguments: list[str]
    """Of `launch`: the spec, and what was set on the command line."""
    course: Course
    home: Path
    runs: str
    """The same folder as a spec's `runs` says it."""
    seed: int
    faults: int
    certificate: Certificate
    asked: Interrupts
    screen: Screen

    def checks(self) -> Iterator[Check]:
        """Each check as soon as it is done; none after one that fails.

        Errors: LaunchError when the first run, undisturbed, fails by itself.
        """
        calm, again = self._run("calm"), self._run("calm-again")
        self._undisturbed(calm, self.course.ranks)
        others = max(self.faults // 4, min(1, self.faults - 1)) if self.course.others else 0
        parts: list[tuple[str, Callable[[Check], None]]] = [
            ("repeatable", partial(self._repeatable, calm=calm, again=again)),
            ("same ranks", partial(self._same, calm=calm, faults=self.faults - others)),
            ("other ranks", partial(self._other, calm=calm, faults=others)),
        ]
        for name, work in parts:
            check = Check(name)
            try:
                work(check)
            except (LaunchError, OSError) as error:
                check.faults.append(str(error))
            yield check
            if check.faults:
                return

    def _repeatable(self, check: Check, calm: Run, again: Run) -> None:
        """Two undisturbed runs are the same; else nothing can be told bit for bit."""
        self._undisturbed(again, self.course.ranks)
        check.faults += differences(calm, again, self.course.steps)
        if check.faults:
            check.notes.append("two undisturbed runs differ, so no run can be compared bit for bit. What usually is")
            check.notes.append("behind it: a random generator that is not seeded (os.urandom, random.Random(), a numpy")
            check.notes.append(
                "Generator without a seed), the clock, the order of a set or of a folder's entries, or a"
            )
            check.notes.append("kernel that is not deterministic (see torch.use_deterministic_algorithms)")
        check.text = f"two undisturbed runs on {_ranks(self.course.ranks)}: {self._alike()} are equal bit for bit"

    def _same(self, check: Check, calm: Run, faults: int) -> None:
        """Resumed at the same number of ranks, the run is bit for bit the undisturbed one."""
        run = self._run("same-ranks")
        self._disturb(check, run, faults, EVERY_KIND, [self.course.ranks])
        check.faults += differences(calm, run, self.course.steps)
        self._verified(check, run)
        if check.faults:
            check.notes.append("what a resume does not bring back is lost with the process: state that the task keeps")
            check.notes.append("beside its model and optimizer (counters, caches, generators of its own)")
        what = f"{self._happened(run)} on {_ranks(self.course.ranks)}, {count(run.attempts, 'attempt')}"
        check.text = f"{what}: {self._alike()} are the undisturbed run's bit for bit; launch verify agrees"

    def _other(self, check: Check, calm: Run, faults: int) -> None:
        """Resumed at other numbers of ranks, it consumes the same samples in the same order, and ends near by."""
        if not faults:
            check.unknown = f"not tried: {self.course.why_none or 'one fault is too few'}"
            return
        train, ranks = self.spec.train, self.course.others[0]
        assert train is not None
        yardstick = self._run("calm-other", [*at(ranks), *batch_at(train, self.course.ranks, ranks)])
        self._undisturbed(yardstick, ranks)
        run = self._run("other-ranks")
        self._disturb(check, run, faults, ENDING, [self.course.ranks, *self.course.others])
        for one in (yardstick, run):
            check.faults += self._other_samples(calm, one)
        self._verified(check, run)
        if train.reproducible:
            check.faults += [fault for one in (yardstick, run) for fault in same_state(calm, one, self.course.steps)]
            held = f"{self.course.steps} losses, parameters and optimizer are the undisturbed run's bit for bit"
        else:
            held = self._near(check, calm, yardstick, run, train.precision)
        if len(set(run.ranks)) == 1:
            check.unknown = "not shown: the run was over before it could be resumed at another number of ranks"
            return
        way = " -> ".join(str(ranks) for ranks in run.ranks)
        check.text = f"{self._happened(run)} at {way} ranks: the ledger is the undisturbed run's; {held}"

    def _near(self, check: Check, calm: Run, yardstick: Run, run: Run, precision: str) -> str:
        """Whether its parameters are the undisturbed run's up to rounding; the figures."""
        off, due = distance(calm, run, self.course.steps), distance(calm, yardstick, self.course.steps)
        limit = max(_WITHIN * due, _ROUNDING.get(precision, _ROUNDING_ELSE))
        figures = f"{off:.1e} away (undisturbed on {_ranks(yardstick.ranks[0])} {due:.1e}; limit {limit:.1e})"
        if not off <= limit:
            check.faults.append(f"the parameters are not the undisturbed run's up to rounding: {figures}")
        if due > _BEYOND_ROUNDING:
            check.notes.append("what a rank draws or takes from its own share of a batch (dropout, batch norm) hangs")
            check.notes.append("on the number of ranks, and so do the parameters, by more than rounding")
        return f"the parameters are {figures}"

    def _other_samples(self, calm: Run, run: Run) -> list[str]:
        """Where its ledger is not the undisturbed run's: other samples, or in another order."""
        was, now = final(calm, self.course.steps).ledger, final(run, self.course.steps).ledger
        found = list(differing(was, now, "ledger"))[:1]
        return [f"{key} is {one} in {calm.name}, {other} in {run.name}" for key, one, other in found]

    def _undisturbed(self, run: Run, ranks: int) -> None:
        undisturbed(run, ranks)
        self.screen.line(
            f"{run.name:<12} {self.course.steps} steps on {_ranks(ranks)}, undisturbed: {run.wall_s:.1f} s"
        )

    def _disturb(self, check: Check, run: Run, faults: int, kinds: Sequence[Kind], counts: list[int]) -> None:
        """Run it to its end through so many faults, from attempt to attempt at another of `counts`, first the first."""
        train, met = self.spec.train, self.certificate.met.setdefault(run.name, [])
        assert train is not None
        strict, retried = train.checkpoint.on_failure == "stop", train.checkpoint.retries > 0
        run.limit_s = max(_SHORTEST_LIMIT_S, _LIMIT * self.certificate.runs[0].wall_s)
        course, seed = self.course, f"{self.seed}/{run.name}"
        parts = attempts(plan(seed, faults, course.steps, course.every, max(counts), retried, kinds), strict)
        chance, sizes = random.Random(f"ranks/{seed}"), counts[:1]
        for _ in parts:
            sizes.append(chance.choice([n for n in counts if n != sizes[-1]] or counts))
        for several in disturbed(run, parts, sizes, strict):
            for one in several:
                met.append(one)
                self.screen.line(f"{run.name:<12} {len(met)}/{faults}  {told(one)}")
        if all(one.happened is None for one in met):
            check.faults.append(f"{run.name}: no fault happened, so nothing was rehearsed; see {run.log}")

    def _verified(self, check: Check, run: Run) -> None:
        """`launch verify` finds nothing wrong, no checkpoint was ever damaged, and none was passed over."""
        for one in verify.checks(run.folder, deep=False):
            check.faults += [f"{run.name}: launch verify: {one.name}: {fault}" for fault in one.faults]
        check.faults += [f"{run.name}: {text}" for text in run.lost()]
        aside = sorted(set_aside(run.checkpoints))
        check.faults += [
            f"{run.name}: the checkpoint of step {step} was found damaged, and set aside" for step in aside
        ]

    def _run(self, name: str, overrides: list[str] | None = None) -> Run:
        """A run that has not begun."""
        train = self.spec.train
        assert train is not None
        own = [*self.course.overrides, *(overrides or []), f"runs={self.runs}/{name}"]
        if train.checkpoint.folder is not None:
            own.append(f"train.checkpoint.folder={train.checkpoint.folder.rstrip('/')}/{self.home.name}/{name}")
        run = Run(self.home / name, [*self.arguments, *own], self.asked)
        run.home.mkdir(mode=0o700)
        self.certificate.runs.append(run)
        return run

    def _happened(self, run: Run) -> str:
        return count(sum(met.happened is not None for met in self.certificate.met[run.name]), "fault")

    def _alike(self) -> str:
        return f"{self.course.steps} losses, parameters, optimizer, random states and ledger"


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"
