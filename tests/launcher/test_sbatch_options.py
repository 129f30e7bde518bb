"""Proves that both forms of slurm.options come to the same, and that the tables of options agree with each other."""

from __future__ import annotations

import subprocess

import pytest

from launcher import sbatch_options
from launcher.sbatch_options import BARE, BARE_OR_VALUE, FREE, OWNED, SHORT, normalise
from tests.clusterfix import Cluster


def test_a_mapping_and_a_list_come_to_the_same_options() -> None:
    expected = [("exclusive", None), ("mail-type", "END"), ("comment", "a=b, c"), ("nice", "0")]
    assert normalise({"exclusive": True, "mail-type": "END", "comment": "a=b, c", "nice": 0}) == expected
    assert normalise(["--exclusive", "--mail-type=END", "--comment=a=b, c", "--nice=0"]) == expected


def test_null_and_false_leave_an_option_out() -> None:
    assert normalise({"hold": False, "nice": None, "mail_type": "END"}) == [("mail-type", "END")]
    assert normalise(None) == normalise([]) == normalise({}) == []


@pytest.mark.parametrize("options", [["exclusive"], ["-p main"], ["--mail type=END"], [3], {"nice": [1]}, "x", 3])
def test_what_is_in_neither_form_is_refused(options: object) -> None:
    with pytest.raises(ValueError, match=r"form --name|one value|neither"):
        normalise(options)


def test_the_tables_agree() -> None:
    assert not FREE & set(OWNED)
    assert BARE | BARE_OR_VALUE <= FREE
    assert not BARE & BARE_OR_VALUE
    assert set(SHORT.values()) <= FREE | set(OWNED)
    assert all(sbatch_options.OWNED.values())


NEWER = {"consolidate-segments", "container-id", "oom-kill-step", "power", "resv-ports", "segment", "stepmgr"} | {
    "tres-bind",
    "tres-per-task",
}
"""Options that came after Slurm 22.05, or that a Slurm may be built without."""


@pytest.mark.cluster
def test_a_real_sbatch_knows_every_option_of_the_tables(cluster: Cluster) -> None:
    unknown = set()
    for name in FREE | set(OWNED):
        command = ["sbatch", f"--{name}=1", "--version"]
        done = subprocess.run(
            command, capture_output=True, text=True, env=cluster.environment, stdin=subprocess.DEVNULL
        )
        if "unrecognized option" in done.stderr:
            unknown.add(name)
    assert unknown <= NEWER
