"""The resolved spec of a run, as its ranks read it: without the spec reader, whose work is done."""

from __future__ import annotations

import yaml

from training.config import from_plain
from training.runfolder import RunFolder

from .spec import JobSpec


def load_spec(folder: RunFolder) -> JobSpec:
    """The resolved spec of a run folder, as typed. Errors: OSError; ValueError, TypeError for what is no such spec."""
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        values = yaml.load(folder.spec.read_text(encoding="utf-8"), Loader=loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{folder.spec}: {' '.join(str(error).split())}") from error
    spec: JobSpec = from_plain(JobSpec, values)
    return spec
