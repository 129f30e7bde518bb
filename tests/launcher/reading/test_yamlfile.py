"""Proves that every fault of a file's text is named with its place, and that nothing crashes the reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import Fault
from launcher.reading import yamlfile
from launcher.reading.tree import Items, Origin, Scalar, Section, Tree

FILE = Origin("spec", "s.yaml")


def parse(text: str) -> tuple[Tree | None, list[str]]:
    faults: list[Fault] = []
    return yamlfile.parse(text, FILE, faults), [str(fault) for fault in faults]


def plain(tree: Tree | None) -> object:
    if isinstance(tree, Section):
        return {key: plain(value) for key, value in tree.items.items()}
    if isinstance(tree, Items):
        return [plain(item) for item in tree.items]
    return tree.value if isinstance(tree, Scalar) else None


def test_keys_and_values_carry_their_places_and_their_text() -> None:
    tree, faults = parse("a:\n  bé: 007\n  c: [x, 'y']\nd: |\n  two\n  lines\n")
    assert faults == []
    assert isinstance(tree, Section)
    a = tree.items["a"]
    assert isinstance(a, Section)
    assert a.keys["bé"] == Origin("spec", "s.yaml", 2, 3)
    assert a.items["bé"] == Scalar(Origin("spec", "s.yaml", 2, 7), "007", 7)
    c = a.items["c"]
    assert isinstance(c, Items)
    assert c.items[1] == Scalar(Origin("spec", "s.yaml", 3, 10), "y", "y")
    assert tree.items["d"] == Scalar(Origin("spec", "s.yaml", 4, 4), "two\nlines\n", "two\nlines\n")


def test_quoted_and_tagged_scalars_are_text() -> None:
    assert plain(parse("{a: '7', b: \"true\", c: !!str 7, d: !!float 7, e: null, f: ''}")[0]) == {
        "a": "7",
        "b": "true",
        "c": "7",
        "d": 7.0,
        "e": None,
        "f": "",
    }


def test_anchors_and_merge_keys() -> None:
    text = "x: &x {a: 1, b: 2}\ny: &y {b: 3, c: 4}\nz:\n  <<: [*x, *y]\n  a: 0\nw: *x\n"
    tree, faults = parse(text)
    assert faults == []
    assert plain(tree) == {
        "x": {"a": 1, "b": 2},
        "y": {"b": 3, "c": 4},
        "z": {"a": 0, "b": 2, "c": 4},
        "w": {"a": 1, "b": 2},
    }


FAULTS = {
    "a: 1\nb: 2\na: 3": "s.yaml:3:1: a: given twice, first at line 1; keep one of the two",
    "a:\n  b: 1\n  'b': 2": "s.yaml:3:3: a.b: given twice, first at line 2; keep one of the two",
    "a: b: c": "s.yaml:1:5: syntax: mapping values are not allowed in this context; mend the YAML",
    "a:\n\tb: 1": "s.yaml:2:1: syntax: while scanning for the next token, found character that cannot start any token; "
    "indent with spaces",
    "a: 'x": "s.yaml:1:6: syntax: while scanning a quoted scalar, found unexpected end of stream; mend",
    "a: {b: ${c}}": "s.yaml:1:9: syntax: while parsing a flow mapping, did not find expected ',' or '}'; mend",
    "a: 1\n---\nb: 2": "s.yaml:2:1: syntax: expected a single document in the stream, but found another document",
    "a: *b": "s.yaml:1:4: syntax: found undefined alias; mend",
    "a: &x [*x]": "s.yaml:1:4: a[0]: an alias that holds itself; spell the value out",
    "[a]: 1": "s.yaml:1:1: file: a key that is no text; write a name before the colon",
    "a: !foo x": "s.yaml:1:4: a: the tag '!foo' is not supported; remove the tag",
    "a: !!set {b}": "s.yaml:1:4: a: the tag 'tag:yaml.org,2002:set' is not supported; remove the tag",
    "a: !!int x": "s.yaml:1:4: a: !!int: 'x' is no int; mend the value or remove the tag",
    "<<: 3": "s.yaml:1:5: <<: no mapping to merge; name an anchor of a mapping",
    "a: x\x01y": 's.yaml:1:5: file: unprintable character U+0001; write it in double quotes as "\\u0001", or remove it',
    "a: b\nc: d\u2028e": "s.yaml:2:5: file: unprintable character U+2028; write it in double quotes",
    "a: " + "[" * 60 + "]" * 60: "s.yaml:1:54: a" + "[0]" * 50 + ": nested more than 50 deep; flatten it",
    "[" * 5000: "s.yaml:1:1001: syntax: while increasing flow level, exceeded maximum nesting depth",
}


@pytest.mark.parametrize(("text", "fault"), FAULTS.items(), ids=[text[:12] for text in FAULTS])
def test_a_fault_names_its_place(text: str, fault: str) -> None:
    found = parse(text)[1]
    assert len(found) == 1
    assert found[0].startswith(fault)


def test_a_bomb_of_aliases_is_refused_in_one_line() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    found = parse("\n".join(lines))[1]
    assert len(found) == 1
    assert found[0].endswith(": more than 20000 values; use fewer aliases")


CONTENTS: dict[bytes, str] = {
    b"": "s.yaml: file: empty; write a mapping such as `name: my-run`",
    b"# nothing\n": "s.yaml: file: empty; write a mapping such as `name: my-run`",
    b"- a\n": "s.yaml:1:1: file: a list at the top; write a mapping such as `name: my-run`",
    b"just text": "s.yaml:1:1: file: a single value at the top; write a mapping such as `name: my-run`",
    b"a: 1\nb: \xc3\xa9\xff": "s.yaml:2:5: file: byte 0xff is not UTF-8; save the file as UTF-8",
    b"\xff\xfea\x00": "s.yaml:1:1: file: byte 0xff is not UTF-8; save the file as UTF-8",
    b"a: 1\x00": 's.yaml:1:5: file: unprintable character U+0000; write it in double quotes as "\\u0000", or remove it',
    b"x" * (2 << 20): "s.yaml: file: larger than 1048576 bytes; this is no spec",
}


@pytest.mark.parametrize(("raw", "fault"), CONTENTS.items(), ids=[str(raw[:10]) for raw in CONTENTS])
def test_a_file_that_is_no_spec(raw: bytes, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(raw)
    faults: list[Fault] = []
    assert yamlfile.read(path, "spec", faults)[1] is None
    assert [str(f).replace(f"{tmp_path}/", "") for f in faults] == [fault]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for name, reason in {
        "none.yaml": "no such file",
        ".": "cannot be read (Is a directory)",
        "loop": "cannot be read (Too many levels of symbolic links)",
        "a\0b": "cannot be read (embedded null byte)",
        "n" * 300: "cannot be read (File name too long)",
    }.items():
        faults: list[Fault] = []
        assert yamlfile.read(tmp_path / name, "spec", faults) == ("", None)
        assert faults[0].wrong == reason


def test_a_byte_order_mark_and_windows_line_ends_are_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: x\r\n")
    faults: list[Fault] = []
    assert plain(yamlfile.read(path, "spec", faults)[1]) == {"a": 1, "b": "x"}
    assert faults == []


@given(st.text() | st.text(alphabet="ab:-[]{}#&*!|>'\"%@`,? \n\t<~.0123456789"))
def test_any_text_gives_a_tree_or_a_fault(text: str) -> None:
    tree, faults = parse(text)
    assert tree is not None or faults
