"""Every rule that a typed spec must keep. All of them run, and each fault names its place."""

from __future__ import annotations

from .errors import Fault
from .reading.fit import Fitted
from .rules.job import check_job
from .rules.report import Report
from .rules.slurm import check_slurm
from .rules.text import check_texts
from .rules.train import check_train
from .spec import JobSpec


def check(spec: JobSpec, fitted: Fitted, faults: list[Fault]) -> None:
    """Add the faults of a spec to `faults`.

    Fields with a fault already hold their default in `spec`; rules that involve them are left out.
    """
    report = Report(fitted, faults)
    check_texts(spec, report)
    check_job(spec, report)
    check_slurm(spec, report)
    check_train(spec, report)
