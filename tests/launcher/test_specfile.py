"""Proves the whole way from a file to a typed spec: what arrives, what is dumped, and that nothing is a traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher import specfile
from launcher.errors import SpecError
from training import config

Resolve = Callable[..., Any]
Faults = Callable[..., list[str]]

SPEC = """\
name: digits-ddp
resources:
  nodes: 2
  tasks_per_node: 2          # one rank a task
  gpus_per_task: 0
  memory: 4G
  time: 00:30:00
slurm:
  partition: main
  options: {mail-type: END, nice: 007}
train:
  task: digits_of_mine:Digits
  epochs: 20
  batch: {global: 128}
  optim: {base_lr: 1.0e-3, base_batch: 32}
  schedule: {warmup_steps: 50, decay: cosine}
  options: {a: 1e-3, b: [x, null]}
env: {GREETING: "$(id) `id` 'q' \\"d\\"\\ttab\\nline"}
wandb: {project: digits}
"""


def test_the_spec_is_typed(resolve: Resolve) -> None:
    spec = resolve(SPEC).spec
    assert (spec.name, spec.resources.nodes, spec.resources.time) == ("digits-ddp", 2, "00:30:00")
    assert (spec.resources.gpus_per_task, spec.resources.gpus_per_node) == ("0", None)
    assert (spec.slurm.options, spec.slurm.setup) == ({"mail-type": "END", "nice": "007"}, [])
    assert (spec.train.batch.global_size, spec.train.optim.base_lr, spec.train.optim.betas) == (128, 1e-3, [0.9, 0.999])
    assert spec.train.options == {"a": 1e-3, "b": ["x", None]}
    assert spec.env == {"GREETING": "$(id) `id` 'q' \"d\"\ttab\nline"}
    assert (spec.wandb.project, spec.wandb.mode, spec.command) == ("digits", "auto", None)


def test_the_values_are_plain(resolve: Resolve) -> None:
    def check(value: Any) -> None:
        assert type(value) in (dict, list, str, int, float, bool, type(None))
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            check(item)

    check(resolve(SPEC, "name=\\???", "train.options.c=${train.batch}", "python_path=['${name}']").plain())


def test_the_dump_reads_back_equal_and_gives_the_training_package_the_same_config(
    resolve: Resolve, tmp_path: Path
) -> None:
    resolved = resolve(SPEC, "train.optim.eps=1e-9", "train.seed=${oc.env:N}", env={"N": "7"})
    assert yaml.safe_load(resolved.dump()) == resolved.plain()
    path = tmp_path / "resolved.yaml"
    path.write_text(resolved.dump(), encoding="utf-8")
    run = config.load(path)
    assert (run.name, run.train, run.wandb) == ("digits-ddp", resolved.spec.train, resolved.spec.wandb)
    assert run.train.seed == 7
    assert config.from_plain(type(resolved.spec), resolved.plain()) == resolved.spec


def test_defaults_are_in_the_dump_so_that_they_outlive_a_change(resolve: Resolve) -> None:
    plain = resolve(SPEC).plain()
    checkpoint = plain["train"]["checkpoint"]
    assert {k: checkpoint[k] for k in ("every_steps", "at_end", "keep_last", "folder")} == {
        "every_steps": None,
        "at_end": True,
        "keep_last": 3,
        "folder": None,
    }
    assert plain["restart"] == {"mode": "auto"}
    assert plain["command"] is None


def test_overrides_set_values_and_sections_that_the_file_does_not_have(resolve: Resolve) -> None:
    resolved = resolve(
        "name: x\ntrain: {task: text, epochs: 1}\n", "train.batch.per_rank=8", "wandb.mode=offline", "env.A=b=c"
    )
    assert (resolved.spec.train.batch.per_rank, resolved.spec.wandb.mode) == (8, "offline")
    assert resolved.spec.env == {"A": "b=c"}
    assert str(resolved.origin("wandb.mode")) == "override"
    assert resolved.overrides == ["train.batch.per_rank=8", "wandb.mode=offline", "env.A=b=c"]
    assert resolve(SPEC, "wandb=null", "resources.memory=").spec.wandb is None


def test_a_base_below_and_its_places(resolve: Resolve, tmp_path: Path, faults: Faults) -> None:
    (tmp_path / "low.yaml").write_text(SPEC.replace("nodes: 2", "nodes: ???"))
    resolved = resolve("base: low.yaml\nname: high\nresources: {nodes: 3}\ntrain: {batch: {global: 6}}\n")
    assert (resolved.spec.name, resolved.spec.resources.nodes, resolved.spec.resources.memory) == ("high", 3, "4G")
    assert str(resolved.origin("resources.memory")) == "low.yaml:6"
    assert resolved.source_text.startswith("base: low.yaml\n")
    assert faults("base: low.yaml\nname: ???\n") == [
        "spec.yaml:2:7: name: missing: it is ??? here; "
        "give it as name=VALUE on the command line, or in a spec that builds on this one",
        "low.yaml:3:10: resources.nodes: missing: it is ??? here; "
        "give it as resources.nodes=VALUE on the command line, or in a spec that builds on this one",
    ]


def test_the_file_itself_must_be_there(tmp_path: Path) -> None:
    for path, wrong in ((tmp_path / "none.yaml", "no such file"), (tmp_path, "cannot be read (Is a directory)")):
        with pytest.raises(SpecError, match=wrong.replace("(", r"\(").replace(")", r"\)")) as caught:
            specfile.resolve(path, ["a"], env={})
        assert caught.value.exit_code == 2


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("RUN_NAME", "from-env")
    path = tmp_path / "spec.yaml"
    path.write_text("name: ${oc.env:RUN_NAME}\ncommand: [a]\n")
    assert specfile.resolve(path, []).spec.name == "from-env"


def test_neither_torch_nor_other_slow_packages_are_imported(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    code = (
        "import sys; from pathlib import Path; from launcher import show, specfile\n"
        "show.text(specfile.resolve(Path(sys.argv[1]), ['train.seed=${train.epochs}'], env={}))\n"
        "print(sorted({'torch', 'wandb', 'submitit', 'numpy', 'asyncio', 'importlib.metadata', 'socket', 'email'}"
        " & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "spec.yaml")]
    root = Path(specfile.__file__).parent.parent
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout == "[]\n"


def _mangled(places: list[int]) -> bytes:
    """The spec with single characters taken out."""
    return "".join(character for index, character in enumerate(SPEC) if index not in places).encode()


KEYS = st.sampled_from(
    [
        "name",
        "train",
        "train.batch",
        "train.options",
        "train.options.a.b",
        "env",
        "env.A",
        "command",
        "slurm.options",
        "resources.nodes",
        "resources.time",
        "wandb",
        "base",
        "profile",
        "python_path",
        "slurm.setup",
        "x.y",
    ]
)
VALUES = st.one_of(
    st.text(max_size=20),
    st.text(alphabet="${}[]:.\\'\"? ,ab1#", max_size=12),
    st.sampled_from(
        ["${name}", "[${name}]", "['${x}', ???]", "{a: '${'}", "{a: [{b: '${name}'}]}", "\\\\???", "1e999"]
    ),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.lists(st.tuples(KEYS, VALUES), max_size=4))
def test_any_override_resolves_or_is_a_spec_error(resolve: Resolve, given_values: list[tuple[str, str]]) -> None:
    try:
        resolved = resolve(SPEC, *(f"{key}={value}" for key, value in given_values))
    except SpecError as error:
        assert error.faults
    else:
        assert yaml.safe_load(resolved.dump()) == resolved.plain()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(
    st.binary(max_size=60)
    | st.text(alphabet="ab:-[]{}#&*!|>'\"%@`,? \n\t<~.0123456789$", max_size=80).map(lambda text: text.encode())
    | st.lists(st.integers(0, len(SPEC) - 1), max_size=3).map(_mangled)
)
def test_any_file_resolves_or_is_a_spec_error(resolve: Resolve, raw: bytes) -> None:
    try:
        resolve(raw)
    except SpecError as error:
        assert error.faults
