"""Reading YAML into a tree that knows the place of every key and value. The parsing is libyaml's, through PyYAML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from ..errors import Fault
from .tree import Items, Layer, Origin, Scalar, Section, Tree, core_tag, core_value

_LARGEST_BYTES = 1 << 20
_DEEPEST = 50
_MOST_VALUES = 20_000
_TAG = "tag:yaml.org,2002:"
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's parser and composer with the core schema in place of YAML 1.1's."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode:
            return _TAG + (core_tag(value) if implicit[0] else "str")
        return _TAG + ("seq" if kind is yaml.SequenceNode else "map")


def read(path: Path, layer: Layer, faults: list[Fault]) -> tuple[str, Section | None]:
    """Read a file as (its text, its top mapping); None, with `faults` extended, when it cannot be read as one."""
    file = Origin(layer, str(path))
    try:
        with path.open("rb") as stream:
            raw = stream.read(_LARGEST_BYTES + 1)
    except FileNotFoundError:
        faults.append(file.fault("file", "no such file", "give the path of a spec"))
        return "", None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        faults.append(file.fault("file", f"cannot be read ({reason})", "give the path of a readable file"))
        return "", None
    if len(raw) > _LARGEST_BYTES:
        faults.append(file.fault("file", f"larger than {_LARGEST_BYTES} bytes", "this is no spec"))
        return "", None
    text = _decode(raw, file, faults)
    if text is None:
        return "", None
    tree = parse(text, file, faults)
    if isinstance(tree, Section):
        return text, tree
    if tree is None:
        return text, None
    if isinstance(tree, Scalar) and tree.text == "":
        faults.append(file.fault("file", "empty", "write a mapping such as `name: my-run`"))
    else:
        what = "a list" if isinstance(tree, Items) else "a single value"
        faults.append(tree.origin.fault("file", f"{what} at the top", "write a mapping such as `name: my-run`"))
    return text, None


def _decode(raw: bytes, file: Origin, faults: list[Fault]) -> str | None:
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line = before.count(b"\n") + 1
        column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8")) + 1
        place = Origin(file.layer, file.file, line, column)
        faults.append(place.fault("file", f"byte 0x{raw[error.start]:02x} is not UTF-8", "save the file as UTF-8"))
        return None


def parse(text: str, file: Origin, faults: list[Fault]) -> Tree | None:
    """Parse YAML text; None, with `faults` extended, where its syntax is wrong. A text without a value is a null.

    `file` gives layer and file of every place; one without a file of its own (an override) keeps line 0.
    """
    if match := _UNPRINTABLE.search(text):
        line = text.count("\n", 0, match.start()) + 1
        place = _at(file, line, match.start() - text.rfind("\n", 0, match.start()))
        right = f'write it in double quotes as "\\u{ord(match[0]):04x}", or remove it'
        faults.append(place.fault("file", f"unprintable character U+{ord(match[0]):04X}", right))
        return None
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = _at(file, mark.line + 1, mark.column + 1) if mark else file
        tab = text[mark.index : mark.index + 1] == "\t" if mark else False
        wrong = ", ".join(str(part) for part in (error.context, error.problem) if part)
        right = (
            "indent with spaces: YAML takes no tabs there" if tab else "mend the YAML; quote a text with : # { } [ ]"
        )
        faults.append(place.fault("syntax", wrong, right))
        return None
    except yaml.YAMLError as error:
        faults.append(file.fault("syntax", " ".join(str(error).split()), "mend the YAML"))
        return None
    if node is None:
        return Scalar(_at(file, 1, 1), "", None)
    return _Builder(file, faults).build(node, "", 0)


def _at(file: Origin, line: int, column: int) -> Origin:
    return file if file.layer == "override" else Origin(file.layer, file.file, line, column)


class _Builder:
    """Turns PyYAML's nodes into a tree, and collects what the syntax allows but a spec does not."""

    def __init__(self, file: Origin, faults: list[Fault]) -> None:
        self.file = file
        self.faults = faults
        self.values = 0
        self.open: set[int] = set()

    def build(self, node: yaml.Node, field: str, depth: int) -> Tree:
        place = _at(self.file, node.start_mark.line + 1, node.start_mark.column + 1)
        self.values += 1
        if id(node) in self.open:
            return self._refuse(place, field, "an alias that holds itself", "spell the value out")
        if depth > _DEEPEST:
            return self._refuse(place, field, f"nested more than {_DEEPEST} deep", "flatten it")
        if self.values > _MOST_VALUES:
            once = self.values == _MOST_VALUES + 1
            return self._refuse(place, field, f"more than {_MOST_VALUES} values", "use fewer aliases", once)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, place, field)
        expected = _TAG + ("map" if isinstance(node, yaml.MappingNode) else "seq")
        if node.tag != expected:
            return self._refuse(place, field, f"the tag {node.tag!r} is not supported", "remove the tag")
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._section(node, place, field, depth)
            items = [self.build(item, f"{field}[{i}]", depth + 1) for i, item in enumerate(node.value)]
            return Items(place, items)
        finally:
            self.open.remove(id(node))

    def _refuse(self, place: Origin, field: str, wrong: str, right: str, say: bool = True) -> Scalar:
        if say:
            self.faults.append(place.fault(field or "file", wrong, right))
        return Scalar(place, "", None)

    def _scalar(self, node: yaml.ScalarNode, place: Origin, field: str) -> Scalar:
        kind = node.tag.removeprefix(_TAG)
        if kind not in ("null", "bool", "int", "float", "str", "merge"):
            return self._refuse(place, field, f"the tag {node.tag!r} is not supported", "remove the tag")
        try:
            return Scalar(place, node.value, core_value(node.value, kind))
        except ValueError as error:
            return self._refuse(place, field, f"!!{kind}: {error}", "mend the value or remove the tag")

    def _section(self, node: yaml.MappingNode, place: Origin, field: str, depth: int) -> Section:
        section = Section(place, {}, {})
        merges: list[yaml.Node] = []
        for key_node, value_node in node.value:
            key_place = _at(self.file, key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            if not isinstance(key_node, yaml.ScalarNode):
                self._refuse(key_place, field, "a key that is no text", "write a name before the colon")
            elif key_node.tag == _TAG + "merge":
                merges.append(value_node)
            elif key_node.value in section.keys:
                first = section.keys[key_node.value]
                path = _join(field, key_node.value)
                self._refuse(key_place, path, f"given twice, first at line {first.line}", "keep one of the two")
            else:
                section.keys[key_node.value] = key_place
                section.items[key_node.value] = self.build(value_node, _join(field, key_node.value), depth + 1)
        for merged in merges:
            self._merge(section, merged, field, depth)
        return section

    def _merge(self, section: Section, node: yaml.Node, field: str, depth: int) -> None:
        """The merge key `<<`: keys of the mapping itself win, then those of the first merged mapping."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in sources:
            tree = self.build(source, field, depth + 1)
            if not isinstance(tree, Section):
                self._refuse(tree.origin, _join(field, "<<"), "no mapping to merge", "name an anchor of a mapping")
                continue
            for key, value in tree.items.items():
                if key not in section.items:
                    section.items[key], section.keys[key] = value, tree.keys[key]


def _join(field: str, key: str) -> str:
    return f"{field}.{key}" if field else key
