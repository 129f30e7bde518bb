"""Proves that the documentation is true: its commands run and print what is shown, its links and options exist.

Every command of a ```console block (a line that starts with `$ `) is run by bash, document by document, in a folder
that holds `configs` and the files that the documents bring: fences with a file name, such as ```yaml my_task.yaml. One
that stands in NOT_RUN is not run, for the reason given there; those of ON_SLURM are run on the real Slurm. A command
that comes twice is run once.

Shown output is compared line by line: each line shown must be among the lines printed, in that order; a line of three
dots stands for any. What differs from run to run (ids, job numbers, speeds, losses, times, folders) is masked on both
sides; arithmetic, scripts, faults and exit codes are compared to the letter.

python -m pytest tests/test_docs.py
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from launcher import errors, specfile
from tests.clusterfix import Cluster
from training import config, task

ROOT = Path(__file__).resolve().parent.parent
HIDDEN = ("node_modules", "runs", "build", "dist")
ALL = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in HIDDEN for part in path.relative_to(ROOT).parts)
)
WRITTEN_FOR_USERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

SHORTER = "takes minutes; the same command with fewer faults is run"
INSTALLS = "makes or changes an environment; CI itself is `make check` and `make test`"
NOT_RUN = {
    "make demo": "makes the environment that runs this test; test_local.py runs the same quickstart",
    "make check": INSTALLS,
    "make test": INSTALLS,
    'make test ARGS="tests/training/test_schedule.py -q"': INSTALLS,
    "pip install '.[examples]'": INSTALLS,
    "make cluster-up": "the fixture `cluster` does it, tests/slurm tests it",
    "make cluster-down": "others may use the cluster; tests/slurm tests it",
    'eval "$(python3 slurm/cluster.py env)"': "changes the reader's shell; here SLURM_CONF is set already",
    "python3 slurm/cluster.py preempt JOB": "stands for a job's number; tests/slurm preempts jobs",
    "launch drill configs/quickstart.yaml --kills 20 --seed 1": SHORTER,
    "for n in 1 2 3 4; do launch drill configs/quickstart.yaml resources.tasks_per_node=$n --kills 70 --seed $n "
    "|| break; done": SHORTER,
    "scontrol requeue JOB": "stands for a job's number; a requeue takes two minutes",
}
ON_SLURM = {
    "launch configs/ddp_2node.yaml --follow",
    "launch configs/ddp_2node.yaml wandb.mode=disabled",
    "sacct -X --format=JobName%15,State,ExitCode",
}

MASKS = [
    (re.compile(r"(\b[a-z0-9]+(?:-[a-z0-9]+)*)-(?:[a-hj-km-np-z2-9]{4}|[0-9a-f]{6})\b(?=[ /]|$)"), r"\1-ID"),
    (re.compile(r"\b(job|scancel) \d+"), r"\1 N"),
    (re.compile(r"(loss|test \w+) -?[\d.]+(e-\d+)?"), r"\1 N"),
    (re.compile(r"[\d.]+(e\+\d+)? samples/s  eta [-\d:]+"), "N samples/s  eta N"),
    (re.compile(r'"(start|end)": [\d.]+'), r'"\1": N'),
    (re.compile(r"\b\d\.\de-\d\d\b"), "N"),
    (re.compile(r"on n\[\d-\d\]"), "on NODES"),
    (re.compile(r"(rank \d+ on) [\w.-]+:"), r"\1 HOST:"),
]
_FENCE = re.compile(r"^```(\w*)[ ]?([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass
class Command:
    """A command of a console block, with the output that is shown under it."""

    text: str
    shown: list[str] = field(default_factory=list)


@dataclass
class File:
    """A file that a document brings. A name in ~ is the reader's home folder."""

    name: str
    text: str


@dataclass
class Place:
    """Where the commands run, and what those that ran have printed."""

    folder: Path
    printed: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def run(self, command: str, home: Path, environment: dict[str, str]) -> list[str]:
        """The lines that a command prints, paths as the documents write them. Its failure fails the test."""
        site = home / ".config/ddp-launcher/config.yaml"
        key = (command, site.read_text() if site.exists() else "")
        if key not in self.printed:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder,
                env=environment | {"HOME": str(home)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, f"$ {command}\n{done.stdout}"
            text = done.stdout.replace(str(self.folder), "/home/me/work").replace(str(ROOT), "/home/me/ddp-launcher")
            self.printed[key] = text.splitlines()
        return self.printed[key]


def parts(document: Path) -> list[Command | File]:
    """Commands and files of a document, in its order."""
    found: list[Command | File] = []
    for kind, name, body in _FENCE.findall(document.read_text("utf-8")):
        if name:
            found.append(File(name, body))
        for line in body.splitlines() if kind == "console" else []:
            if line.startswith("$ "):
                found.append(Command(line.removeprefix("$ ")))
            else:
                assert isinstance(found[-1], Command), f"{document}: output without a command: {line}"
                found[-1].shown.append(line)
    return found


def commands(document: Path) -> list[Command]:
    return [part for part in parts(document) if isinstance(part, Command)]


def masked(line: str) -> str:
    for pattern, replacement in MASKS:
        line = pattern.sub(replacement, line)
    return line.rstrip()


def missing(shown: list[str], printed: list[str]) -> str | None:
    """The first line shown that was not printed after the ones before it; None when all were."""
    rest = iter([masked(line) for line in printed])
    for line in shown:
        if line != "..." and masked(line) not in rest:
            return masked(line)
    return None


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("docs") / "work"
    folder.mkdir()
    shutil.copytree(ROOT / "configs", folder / "configs")
    return Place(folder)


def _work_through(document: Path, place: Place, home: Path, on_slurm: bool = False, **extra: str) -> None:
    gone = ("XDG_CONFIG_HOME", "PYTHONPATH", "HOME")
    environment = {name: value for name, value in os.environ.items() if name not in gone} | extra
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for part in parts(document):
        if isinstance(part, File):
            in_home = part.name.startswith("~/")
            path = home / part.name.removeprefix("~/") if in_home else place.folder / part.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(part.text, encoding="utf-8")
        elif part.text not in NOT_RUN and (part.text in ON_SLURM) == on_slurm:
            printed = place.run(part.text, home, environment)
            lost = missing(part.shown, printed)
            assert lost is None, f"$ {part.text}\nprints no line {lost!r} where it is shown:\n" + "\n".join(printed)


RUN_HERE = [d for d in WRITTEN_FOR_USERS if {c.text for c in commands(d)} - NOT_RUN.keys() - ON_SLURM]


@pytest.mark.parametrize("document", names(RUN_HERE))
def test_the_commands_of_a_document_print_what_it_shows(document: str, place: Place, tmp_path: Path) -> None:
    _work_through(ROOT / document, place, tmp_path)


@pytest.mark.cluster
def test_the_commands_for_slurm_print_what_is_shown(place: Place, tmp_path: Path, cluster: Cluster) -> None:
    for number, document in enumerate(WRITTEN_FOR_USERS):
        home = tmp_path / str(number)
        home.mkdir()
        _work_through(document, place, home, on_slurm=True, SLURM_CONF=str(cluster.slurm_conf))


def test_no_command_is_left_out_for_a_reason_of_the_past() -> None:
    shown = {command.text for document in WRITTEN_FOR_USERS for command in commands(document)}
    assert shown >= NOT_RUN.keys() | ON_SLURM


def test_the_comparison_sees_a_wrong_line_and_a_wrong_order() -> None:
    printed = ["run a-b2cd  ->  runs/a-b2cd", "lr     0.004", "step 10/20  loss 2.5", "exit code 5"]
    assert missing(["run a-zzzz  ->  runs/a-zzzz", "...", "step 10/20  loss 2.6"], printed) is None
    assert missing(["lr     0.002"], printed) == "lr     0.002"
    assert missing(["exit code 5", "lr     0.004"], printed) == "lr     0.004"


def _anchors(path: Path) -> set[str]:
    """The names that GitHub gives to a document's headings."""
    text = _FENCE.sub("", path.read_text("utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", names(ALL))
def test_every_relative_link_leads_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"\n +", " ", path.read_text("utf-8"))):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        assert there.exists(), f"{document}: {target}"
        assert not anchor or anchor in _anchors(there), f"{document}: {target}: no such heading"


def test_every_yaml_fragment_is_valid(tmp_path: Path) -> None:
    """One without a name or a payload counts as a part of a spec that has them."""
    bare = "name: x\n", "train: {task: digits, epochs: 1, batch: {per_rank: 1}}\n"
    for document in WRITTEN_FOR_USERS:
        for kind, name, body in _FENCE.findall(document.read_text("utf-8")):
            if kind != "yaml" or name:
                continue
            keys = yaml.safe_load(body)
            text = body + ("" if "name" in keys else bare[0]) + ("" if {"train", "command"} & keys.keys() else bare[1])
            (tmp_path / "spec.yaml").write_text(text)
            specfile.resolve(tmp_path / "spec.yaml", [], env={"HOME": str(tmp_path)})
        for fragment in re.findall(r"`((?:resources|slurm|rendezvous|restart): \{.*?\})`", document.read_text("utf-8")):
            (tmp_path / "spec.yaml").write_text(f"{fragment}\n{''.join(bare)}")
            specfile.resolve(tmp_path / "spec.yaml", [], env={"HOME": str(tmp_path)})


@pytest.mark.parametrize("spec", names(CONFIGS))
def test_every_config_is_valid_and_its_task_takes_its_options(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = specfile.resolve(ROOT / spec, [], env={"HOME": str(tmp_path)})
    if resolved.spec.train is None:
        return
    for folder in resolved.spec.python_path:
        monkeypatch.syspath_prepend(str(ROOT / "configs" / folder))
    assert isinstance(resolved.spec.train, config.TrainConfig)
    task.load_task(resolved.spec.train)


CLI = (ROOT / "docs/reference/cli.md").read_text("utf-8")


@pytest.fixture(scope="module")
def help_text() -> str:
    command = [str(Path(sys.executable).parent / "launch"), "--help"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def _cells(first: str) -> set[str]:
    """Words in backticks in the first column of the table whose head is `first`."""
    (table,) = re.findall(rf"^\| {first} \|[^\n]*\n\|[ -|]+\n((?:\|[^\n]*\n)+)", CLI, re.MULTILINE)
    return {word for row in table.splitlines() for word in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_the_reference_names_the_options_that_the_help_names(help_text: str) -> None:
    in_help = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*\b", help_text))
    assert {cell.split()[0] for cell in _cells("option")} == in_help


def test_the_reference_names_the_commands_that_the_help_names(help_text: str) -> None:
    (block,) = re.findall(r"^commands\n((?:  .*\n)+)", help_text, re.MULTILINE)
    assert _cells("command") - {"launch SPEC"} == {line.split()[0] for line in block.splitlines()}


def test_readme_and_reference_name_the_exit_codes_that_the_help_names(help_text: str) -> None:
    (block,) = re.findall(r"^exit codes\n((?:  .*\n)+)", help_text, re.MULTILINE)
    in_help = {int(number) for number in re.findall(r"(?:^|  )(\d+) ", block, re.MULTILINE)}
    for text in (CLI, (ROOT / "README.md").read_text("utf-8")):
        (table,) = re.findall(r"^\| exit code \|[^\n]*\n\|[ -|]+\n((?:\| \d[^\n]*\n)+)", text, re.MULTILINE)
        assert {int(row.split("|")[1]) for row in table.splitlines()} == in_help
    assert in_help == {
        errors.DONE,
        errors.BAD_SPEC,
        errors.REJECTED,
        errors.UNREACHABLE,
        errors.JOB_FAILED,
        errors.DO_NOT_RESTART,
        errors.INTERRUPTED,
        errors.TERMINATED,
    }
