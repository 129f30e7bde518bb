"""Proves that a rule stays silent about values that had a fault before the rules ran, and about nothing else."""

from __future__ import annotations

from launcher.errors import Fault
from launcher.reading.fit import Fitted
from launcher.reading.tree import Origin
from launcher.rules.report import Report


def test_a_finding_that_involves_a_bad_value_is_left_out() -> None:
    fitted = Fitted(places={"": Origin("spec", "s.yaml"), "a.b": Origin("spec", "s.yaml", 3, 5)}, bad={"a.b"})
    faults: list[Fault] = []
    report = Report(fitted, faults)
    report.add("a.b", "w", "r")
    report.add("a", "w", "r")
    report.add("a.b[0]", "w", "r")
    report.add("c", "w", "r", "a.b")
    assert faults == []
    report.add("a.bc", "w", "r")
    report.add("a.bc", "w2", "r", "c")
    assert [str(fault) for fault in faults] == ["s.yaml: a.bc: w; r", "s.yaml: a.bc: w2; r"]
    assert fitted.bad == {"a.b", "a.bc"}
    assert report.usable("c", "a.bc") and not report.usable("c", "a.b.x")
