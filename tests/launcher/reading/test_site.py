"""Proves which profile of the site's file applies, that it lies under the spec, and that its faults name its file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import Fault
from launcher.reading import site
from launcher.reading.tree import Origin, Scalar

SITE = """
default: laptop
profiles:
  big:
    hosts: ["login*.big.example", bignode]
    spec: {slurm: {partition: gpu}}
  laptop:
    spec: {executor: local}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = site.config_path({"HOME": str(tmp_path)})
    path.parent.mkdir(parents=True)
    path.write_text(SITE)
    return tmp_path


def choose(home: Path, host: str, wanted: str | None = None) -> tuple[str | None, list[str]]:
    faults: list[Fault] = []
    asked = (wanted, Origin("override", "--profile")) if wanted else None
    found = site.profile_spec(asked, {"HOME": str(home)}, host, faults)
    return found and found[0], [str(fault).replace(f"{home}/.config/ddp-launcher/", "") for fault in faults]


def test_the_file_is_where_the_xdg_specification_says(tmp_path: Path) -> None:
    assert site.config_path({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}) == Path("/x/ddp-launcher/config.yaml")
    for relative in ("", "x"):
        env = {"XDG_CONFIG_HOME": relative, "HOME": "/h"}
        assert site.config_path(env) == Path("/h/.config/ddp-launcher/config.yaml")
    assert site.config_path({}) == Path("~/.config/ddp-launcher/config.yaml").expanduser()


def test_a_profile_is_chosen_by_name_then_host_then_default(home: Path) -> None:
    assert choose(home, "login3.big.example") == ("big", [])
    assert choose(home, "bignode.local.net") == ("big", [])
    assert choose(home, "elsewhere") == ("laptop", [])
    assert choose(home, "login3.big.example", "laptop") == ("laptop", [])


def test_without_a_file_nothing_applies_unless_a_profile_was_asked_for(tmp_path: Path) -> None:
    assert choose(tmp_path, "x") == (None, [])
    assert choose(tmp_path, "x", "big") == (
        None,
        ["--profile: profile: 'big', but there is no config.yaml; write it, or omit it"],
    )


def test_an_unknown_profile_gets_a_did_you_mean(home: Path) -> None:
    assert choose(home, "x", "bg") == (None, ["--profile: profile: no profile 'bg'; did you mean big?"])


def test_the_values_of_a_profile_carry_their_place(home: Path) -> None:
    found = site.profile_spec(None, {"HOME": str(home)}, "bignode", [])
    assert found is not None
    slurm = found[1].items["slurm"]
    assert not isinstance(slurm, Scalar)
    assert str(slurm.items["partition"].origin) == "site config.yaml:6"  # type: ignore[call-overload, union-attr]


FAULTS = {
    "defualt: x": "config.yaml:1:1: defualt: unknown key; did you mean default?",
    "profiles: 3": "config.yaml:1:11: profiles: not a mapping; write keys below it, or leave it out",
    "profiles: {a: [x]}": "config.yaml:1:15: profiles.a: not a mapping; write keys below it, or leave it out",
    "profiles: {a: {host: x}}": "config.yaml:1:16: profiles.a.host: unknown key; did you mean hosts?",
    "profiles: {a: {hosts: x}}": "config.yaml:1:23: profiles.a.hosts: not a list of host names; "
    'write a list such as ["login*"]',
    "default: [a]": "config.yaml:1:10: default: not the name of a profile; write one profile's name",
    "default: a": "config.yaml:1:10: default: no profile 'a'; nothing is known here",
    "default: a\nprofiles: {a: {spec: {base: x}}}": "config.yaml:2:23: profiles.a.spec.base: not a site's to say; "
    "write it in the spec",
    "a: b: c": "config.yaml:1:5: syntax: mapping values are not allowed in this context; "
    "mend the YAML; quote a text with : # { } [ ]",
}


@pytest.mark.parametrize(("text", "fault"), FAULTS.items(), ids=list(FAULTS))
def test_a_fault_of_the_sites_file_names_it(text: str, fault: str, home: Path) -> None:
    site.config_path({"HOME": str(home)}).write_text(text)
    assert choose(home, "somewhere")[1] == [fault]


def test_a_profile_lies_under_the_spec(home: Path, resolve: Callable[..., Any]) -> None:
    resolved = resolve("name: x\ncommand: [a]\nslurm: {account: mine}\n", profile="big")
    assert (resolved.spec.slurm.partition, resolved.spec.slurm.account) == ("gpu", "mine")
    assert resolved.spec.profile == "big"
    assert str(resolved.origin("slurm.partition")) == "site config.yaml:6"
    assert resolve("name: x\ncommand: [a]\nslurm: {partition: p}\n", profile="big").spec.slurm.partition == "p"


def test_the_spec_may_name_the_profile_and_the_command_line_wins(home: Path, resolve: Callable[..., Any]) -> None:
    text = "name: x\ncommand: [a]\nprofile: big\n"
    assert resolve(text).spec.profile == "big"
    assert resolve(text, "profile=laptop").spec.executor == "local"
    assert resolve(text, "profile=laptop", profile="big").spec.executor == "auto"


def test_this_machines_name_is_matched(home: Path, resolve: Callable[..., Any]) -> None:
    name = os.uname().nodename
    site.config_path({"HOME": str(home)}).write_text(f"profiles: {{here: {{hosts: ['{name}'], spec: {{runs: r}}}}}}")
    assert resolve("name: x\ncommand: [a]\n").spec.runs == "r"


def test_a_wrong_value_in_a_profile_is_reported_in_its_file(home: Path, faults: Callable[..., list[str]]) -> None:
    path = site.config_path({"HOME": str(home)})
    path.write_text("default: a\nprofiles:\n  a:\n    spec: {resources: {nodez: 1, nodes: x}}\n")
    name = ".config/ddp-launcher/config.yaml"
    assert faults("name: x\ncommand: [a]\n") == [
        f"{name}:4:24: resources.nodez: unknown key; did you mean resources.nodes?",
        f"{name}:4:41: resources.nodes: 'x' is not a whole number; write a whole number such as 4",
    ]
