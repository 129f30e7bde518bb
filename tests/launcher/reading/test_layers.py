"""Proves what wins over what: bases in order, then the file, then overrides; and that each fault names its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import Fault
from launcher.reading import layers
from launcher.reading.tree import Items, Section, Tree, core_value


def plain(tree: Tree) -> object:
    if isinstance(tree, Section):
        return {key: plain(value) for key, value in tree.items.items()}
    return [plain(item) for item in tree.items] if isinstance(tree, Items) else tree.value


def merged(folder: Path, name: str = "spec.yaml") -> tuple[object, list[str]]:
    faults: list[Fault] = []
    tree = layers.read_with_bases(folder / name, faults)[1]
    return None if tree is None else plain(tree), [str(fault).replace(f"{folder}/", "") for fault in faults]


def overridden(*overrides: str) -> tuple[object, list[str]]:
    faults: list[Fault] = []
    return plain(layers.override_tree(list(overrides), faults)), [str(fault) for fault in faults]


def test_the_file_wins_over_its_bases_and_a_later_base_over_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/root.yaml").write_text("a: {x: root, y: root, z: root}\nlist: [1, 2]\ngone: {q: 1}\n")
    (tmp_path / "site/one.yaml").write_text("base: root.yaml\na: {x: one, y: one}\n")
    (tmp_path / "two.yaml").write_text("a: {x: two}\n")
    (tmp_path / "spec.yaml").write_text("base: [site/one.yaml, two.yaml]\na: {w: spec}\nlist: [3]\ngone: null\n")
    assert merged(tmp_path) == (
        {"a": {"x": "two", "y": "one", "z": "root", "w": "spec"}, "list": [3], "gone": None},
        [],
    )


def test_places_name_the_file_that_has_the_value(tmp_path: Path) -> None:
    (tmp_path / "low.yaml").write_text("a: 1\nb: 2\n")
    (tmp_path / "spec.yaml").write_text("base: low.yaml\nb: 3\n")
    tree = layers.read_with_bases(tmp_path / "spec.yaml", [])[1]
    assert tree is not None
    assert [str(tree.items[key].origin) for key in ("a", "b")] == ["low.yaml:1", "spec.yaml:2"]
    assert [tree.items[key].origin.layer for key in ("a", "b")] == ["base", "spec"]


BASES = {
    "base: none.yaml": "spec.yaml:1:1: base: no such file: none.yaml; paths are relative to ",
    "base: spec.yaml": "spec.yaml:1:1: base: builds on itself: spec.yaml -> spec.yaml; "
    "remove one of these `base` lines",
    "base: round.yaml": "round.yaml:1:1: base: builds on itself: spec.yaml -> round.yaml -> spec.yaml; "
    "remove one of these `base` lines",
    "base: {a: b}": "spec.yaml:1:7: base: not the path of a file; write a path, or a list of paths",
    "base: [[a]]": "spec.yaml:1:8: base: not the path of a file; write a path, or a list of paths",
    "base: '${name}.yaml'": "spec.yaml:1:7: base: cannot hold an interpolation; write the path itself",
    "base: bad.yaml": "bad.yaml:1:5: syntax: mapping values are not allowed in this context; "
    "mend the YAML; quote a text with : # {{ }} [ ]",
    "base: .": "{}: file: cannot be read (Is a directory); give the path of a readable file",
}


@pytest.mark.parametrize(("text", "fault"), BASES.items(), ids=list(BASES))
def test_a_base_that_cannot_be_used(text: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(f"{text}\na: 1\n")
    (tmp_path / "round.yaml").write_text("base: spec.yaml\n")
    (tmp_path / "bad.yaml").write_text("a: b: c\n")
    tree, faults = merged(tmp_path)
    assert tree == {"a": 1}
    assert faults == [fault.format(tmp_path)]


def test_one_base_used_twice_is_no_cycle(tmp_path: Path) -> None:
    (tmp_path / "root.yaml").write_text("a: 1\n")
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(f"base: root.yaml\n{name}: 2\n")
    (tmp_path / "spec.yaml").write_text("base: [one.yaml, two.yaml]\n")
    assert merged(tmp_path) == ({"a": 1, "one": 2, "two": 2}, [])


def test_overrides_follow_the_rules_of_the_file() -> None:
    assert overridden("a.b=1e-3", "a.c=00:30:00", "d=[1, 'x y', {e: f}]", "g={h: true}", "i=", "j='1'", "k=yes") == (
        {
            "a": {"b": 0.001, "c": "00:30:00"},
            "d": [1, "x y", {"e": "f"}],
            "g": {"h": True},
            "i": None,
            "j": "1",
            "k": "yes",
        },
        [],
    )


def test_a_later_override_wins() -> None:
    assert overridden("a.b=1", "a.c=2", "a.b=3")[0] == {"a": {"b": 3, "c": 2}}
    assert overridden("a=1", "a.b=2")[0] == {"a": {"b": 2}}


@pytest.mark.parametrize("value", ["a=b", "x: y # z", "$(id) `id`", "*&!%@", " two  spaces ", "a\nb", "- a", "é\\"])
def test_a_plain_value_is_kept_to_the_letter(value: str) -> None:
    assert overridden(f"a={value}") == ({"a": value}, [])


OVERRIDES = {
    "novalue": "override novalue: override: not in the form key=value; write train.optim.base_lr=2e-3",
    "=x": "override : override: not in the form key=value; write train.optim.base_lr=2e-3",
    "a..b=x": "override a..b: override: not in the form key=value; write train.optim.base_lr=2e-3",
    "a=[1": "override a: syntax: while parsing a flow sequence, did not find expected ',' or ']'; mend the YAML",
    "a='x' y": "override a: syntax: did not find expected <document start>; mend the YAML",
    'a="\\x01" \x01': "override a: file: unprintable character U+0001; ",
    "command.0=x": "override command.0: command.0: one element of a list (.0) cannot be overridden; "
    "give the whole list: command=[a, b]",
    "command[1]=x": "override command[1]: command[1]: one element of a list ([1]) cannot be overridden; "
    "give the whole list: command=[a, b]",
    "a\x1b=[": r"override a\x1b: syntax: ",
    ".".join(["a"] * 2000) + "=x": "override " + "a." * 28 + "a...: override: not in the form key=value; ",
}


@pytest.mark.parametrize(("override", "fault"), OVERRIDES.items(), ids=[repr(o[:12]) for o in OVERRIDES])
def test_an_override_that_cannot_be_read(override: str, fault: str) -> None:
    tree, faults = overridden(override)
    assert tree == {}
    assert len(faults) == 1
    assert faults[0].startswith(fault)


def test_a_fault_does_not_print_an_overrides_value() -> None:
    assert "hunter2" not in overridden("env.API_KEY=[hunter2")[1][0]


@given(st.from_regex(r"[a-z]+(\.[a-z]+){0,3}", fullmatch=True), st.text())
def test_any_plain_override_sets_exactly_one_value(path: str, value: str) -> None:
    tree, faults = overridden(f"{path}={value}")
    if value.lstrip()[:1] in ("[", "{", '"', "'"):
        return
    assert faults == []
    for key in path.split("."):
        assert isinstance(tree, dict)
        assert list(tree) == [key]
        tree = tree[key]
    assert repr(tree) == repr(core_value(value))
