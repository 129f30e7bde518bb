"""What the rules of a spec write their findings into."""

from __future__ import annotations

from ..errors import Fault
from ..reading.fit import Fitted, touches


class Report:
    """Collects the faults that rules find, each at the place of its value.

    A rule about values that have a fault already says nothing: it would look at defaults that stand in for them.
    """

    def __init__(self, fitted: Fitted, faults: list[Fault]) -> None:
        self.fitted = fitted
        self.faults = faults
        self._before = set(fitted.bad)

    def add(self, path: str, wrong: str, right: str, *involved: str) -> None:
        """Report a fault of the value at `path`, unless it or an `involved` value had a fault before the rules ran."""
        if self.usable(path, *involved):
            self.fitted.add_fault(self.faults, path, wrong, right)

    def usable(self, *paths: str) -> bool:
        """Whether these values were free of faults before the rules ran."""
        return not any(touches(path, bad) for path in paths for bad in self._before)
