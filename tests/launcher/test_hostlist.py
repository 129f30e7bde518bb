"""Proves that Slurm's short forms of hosts and task counts are written out as scontrol does, and refused otherwise."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.hostlist import MAX_HOSTS, HostlistError, expand, expand_tasks_per_node

FORMS = {
    "": "",
    "n1": "n1",
    "n1,n2,n1": "n1 n2 n1",
    "login.site-a.example,x_1": "login.site-a.example x_1",
    "n[1-3,7]": "n1 n2 n3 n7",
    "n[7,1-3,2]": "n7 n1 n2 n3 n2",
    "n[08-11]": "n08 n09 n10 n11",
    "n[8-011]": "n8 n9 n10 n11",
    "n[99-101],n[099-101]": "n99 n100 n101 n099 n100 n101",
    "n[1,01,001]": "n1 n01 n001",
    "n[5]": "n5",
    "[1-3]": "1 2 3",
    "n1-3": "n1-3",
    "n[1-2][3-4]": "n13 n14 n23 n24",
    "gpu-a[01-02]-ib[0-1],n[1-3,7]": "gpu-a01-ib0 gpu-a01-ib1 gpu-a02-ib0 gpu-a02-ib1 n1 n2 n3 n7",
    "n[1-2]a[3-4]b[5-6]": "n1a3b5 n1a3b6 n2a3b5 n2a3b6 n1a4b5 n1a4b6 n2a4b5 n2a4b6",
}


@pytest.mark.parametrize("text", FORMS)
def test_each_form_is_written_out(text: str) -> None:
    assert expand(text) == FORMS[text].split()


def test_a_suffix_after_the_bracket_is_kept() -> None:
    assert expand("n[1-2]-ib,r[1-2]n[01]x") == ["n1-ib", "n2-ib", "r1n01x", "r2n01x"]


@pytest.mark.cluster
def test_scontrol_agrees(cluster: Any) -> None:
    for text, names in FORMS.items():
        assert cluster.run("scontrol", "show", "hostnames", text or ",").split() == names.split(), text


@pytest.mark.parametrize(
    ("text", "place", "rule"),
    [
        ("n[1-3", 2, "this bracket is not closed"),
        ("n1]", 3, "closes a bracket that was not opened"),
        ("n[[1]]", 3, "a bracket inside a bracket"),
        ("n[3-1]", 3, "the range 3-1 runs backwards"),
        ("n[1,a-b]", 5, "'a-b' is no range of numbers; right are 7 and 1-3"),
        ("n[]", 3, "'' is no range of numbers; right are 7 and 1-3"),
        ("n[1-4:2]", 3, "'1-4:2' is no range of numbers; right are 7 and 1-3"),
        ("n[1-]", 3, "'1-' is no range of numbers; right are 7 and 1-3"),
        ("n[١]", 3, "'١' is no range of numbers; right are 7 and 1-3"),
        ("n1,,n2", 4, "an empty host name"),
        ("n1,", 4, "an empty host name"),
        ("n1, n2", 4, "' ' is not allowed in a host name"),
        ("n1;reboot", 3, "';' is not allowed in a host name"),
        ("n[0-99999999999999999]", 3, "more than 65536 hosts"),
        ("n[1-999]m[1-999]", 1, "more than 65536 hosts"),
        ("n[1-60000],m[1-60000]", 12, "more than 65536 hosts"),
    ],
)
def test_a_fault_is_named_with_its_place(text: str, place: int, rule: str) -> None:
    with pytest.raises(HostlistError) as caught:
        expand(text)
    assert str(caught.value) == f"{text!r}, character {place}: {rule}"


def test_the_largest_list_is_accepted() -> None:
    assert len(expand(f"n[1-{MAX_HOSTS}]")) == MAX_HOSTS


def test_task_counts_are_written_out() -> None:
    assert expand_tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks_per_node("4") == [4]


@pytest.mark.parametrize("text", ["", "2(x3", "2x3", "-1", "2,,1", "2 (x3)", "1(x99999999)"])
def test_a_wrong_task_count_is_refused(text: str) -> None:
    with pytest.raises(HostlistError, match="character"):
        expand_tasks_per_node(text)


numbers = st.tuples(st.integers(0, 300), st.integers(0, 12), st.integers(0, 5))


@given(st.lists(st.tuples(st.sampled_from(["n", "gpu-a1-", "x.y"]), numbers), min_size=1, max_size=8))
def test_ranges_and_their_names_are_the_same(items: list[tuple[str, tuple[int, int, int]]]) -> None:
    names: list[str] = []
    entries: list[str] = []
    for prefix, (low, length, width) in items:
        names += [f"{prefix}{low + i:0{width}d}" for i in range(length + 1)]
        entries.append(f"{prefix}[{low:0{width}d}-{low + length}]" if length else f"{prefix}{low:0{width}d}")
    assert expand(",".join(entries)) == names
    assert expand(",".join(names)) == names


@given(st.lists(st.integers(1, 3), min_size=1, max_size=40))
def test_compressed_task_counts_come_back(counts: list[int]) -> None:
    runs = [(count, len(list(same))) for count, same in groupby(counts)]
    text = ",".join(f"{count}(x{repeat})" if repeat > 1 else str(count) for count, repeat in runs)
    assert expand_tasks_per_node(text) == counts


@given(st.text(alphabet="n1-9[],. x(", max_size=14))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        hosts = expand(text)
    except HostlistError:
        return
    assert all(host and not set(host) & set("[], (") for host in hosts)
