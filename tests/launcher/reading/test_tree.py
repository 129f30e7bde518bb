"""Proves that scalars follow YAML 1.2's core schema and that messages are safe to print."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.reading.tree import Origin, core_value, printable

VALUES: dict[str, Any] = {
    "": None,
    "~": None,
    "null": None,
    "true": True,
    "FALSE": False,
    "42": 42,
    "-7": -7,
    "+7": 7,
    "007": 7,
    "0o17": 15,
    "0xff": 255,
    "1e-3": 0.001,
    "1.": 1.0,
    ".5": 0.5,
    "2E6": 2e6,
    "-.inf": -math.inf,
    "yes": "yes",
    "off": "off",
    "00:30:00": "00:30:00",
    "1:30": "1:30",
    "2024-01-01": "2024-01-01",
    "1_000": "1_000",
    "0b1": "0b1",
    "0o8": "0o8",
    "1e": "1e",
    "-": "-",
    "nUll": "nUll",
    "1" * 500: "1" * 500,
}


@pytest.mark.parametrize(("text", "value"), VALUES.items())
def test_plain_scalars(text: str, value: Any) -> None:
    read = core_value(text)
    assert read == value
    assert type(read) is type(value)


def test_not_a_number_is_a_float() -> None:
    assert math.isnan(core_value(".NaN"))


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.booleans())
def test_numbers_read_back(value: float | bool) -> None:
    assert core_value(str(value)) == value


@pytest.mark.parametrize(
    ("text", "tag"), [("x", "int"), ("1.5", "int"), ("yes", "bool"), ("1", "null"), ("a", "float")]
)
def test_an_explicit_tag_must_fit(text: str, tag: str) -> None:
    with pytest.raises(ValueError, match=f"is no {tag}"):
        core_value(text, tag)


def test_an_origin_names_its_layer() -> None:
    place = ("/etc/a/config.yaml", 3, 1)
    assert str(Origin("default", "")) == "default"
    assert str(Origin("site", *place)) == "site config.yaml:3"
    assert str(Origin("base", *place)) == str(Origin("spec", *place)) == "config.yaml:3"
    assert str(Origin("override", "override x")) == "override"


def test_a_fault_carries_no_escape_codes_to_the_terminal() -> None:
    fault = Origin("spec", "a\nb", 1, 2).fault("\x1b[31m", "\x07", "\udc80 é")
    assert str(fault) == r"a\nb:1:2: \x1b[31m: \x07; \udc80 é"
    assert printable("plain é") == "plain é"
