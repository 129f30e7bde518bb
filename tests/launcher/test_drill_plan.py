"""Proves that a drill's plan is a pure function, covers what a save does, and lets each of its faults be met.

python -m pytest tests/launcher/test_drill_plan.py
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from launcher.drill.plan import attempts, ends, plan, segments
from training.rehearsal import OF_OTHERS, OF_RANK_0, Fault

SIZES = st.tuples(
    st.integers(0, 10**6).map(str),
    st.integers(1, 60),
    st.integers(8, 300),
    st.integers(1, 40),
    st.integers(1, 8),
    st.booleans(),
)


@given(SIZES)
def test_a_plan_is_a_pure_function_with_as_many_faults_as_asked_for(size: tuple[str, int, int, int, int, bool]) -> None:
    _, count, steps, every, ranks, retried = size
    found = plan(*size)
    assert found == plan(*size)
    assert [fault.number for fault in found] == list(range(1, count + 1))
    for fault in found:
        assert 1 <= fault.step <= steps
        assert 0 <= fault.rank < ranks
        assert 0.0 <= fault.share < 1.0
        assert 0 <= fault.operation <= len(OF_RANK_0 if fault.rank == 0 else OF_OTHERS)
        assert fault.where == "step" or fault.step % every == 0 or fault.step == steps
        assert not fault.whole or fault.action == "full"
        assert fault.action != "full" or fault.whole or retried


@given(SIZES)
def test_what_lets_a_run_get_on_comes_last_in_its_segment(size: tuple[str, int, int, int, int, bool]) -> None:
    _, _, steps, every, _, _ = size
    last = (steps - 1) // every

    def segment(fault: Fault) -> int:
        return min((fault.step - 1) // every, last)

    free = 0
    for at, group in groupby(plan(*size), key=segment):
        faults = list(group)
        assert at >= free
        assert [segments(fault) for fault in faults[:-1]] == [0] * (len(faults) - 1)
        free = at + max(1, segments(faults[-1]))
    assert free <= last + 1


def test_another_seed_is_another_plan() -> None:
    plans = {tuple(plan(str(seed), 10, 120, 15, 2, True)) for seed in range(20)}
    assert len(plans) == 20


def test_forty_kills_in_saves_go_through_all_operations_of_all_ranks() -> None:
    found = plan("1", 120, 240, 8, 2, True)
    kills = [fault for fault in found if fault.where == "save" and fault.action in ("rank", "all", "host")]
    assert len(kills) >= 40
    points = {(fault.rank, fault.operation) for fault in kills}
    assert points == {(0, n) for n in range(len(OF_RANK_0) + 1)} | {(1, n) for n in range(len(OF_OTHERS) + 1)}


def test_a_round_has_every_kind() -> None:
    kinds = Counter((fault.action, fault.where) for fault in plan("3", 14, 240, 8, 2, True))
    assert kinds == {
        ("rank", "step"): 2,
        ("all", "step"): 1,
        ("host", "step"): 1,
        ("stop", "step"): 1,
        ("rank", "save"): 3,
        ("all", "save"): 2,
        ("host", "save"): 1,
        ("stop", "save"): 1,
        ("full", "save"): 2,
    }


def test_an_attempt_ends_with_the_fault_that_ends_it() -> None:
    full, whole = Fault(1, "full", "save", 10, 0), Fault(2, "full", "save", 20, 0, whole=True)
    kill, stop = Fault(3, "rank", "step", 35, 0), Fault(4, "stop", "step", 40, 0)
    assert attempts([full, whole, kill, stop, full], strict=False) == [[full, whole, kill], [stop], [full]]
    assert attempts([full, whole, kill], strict=True) == [[full, whole], [kill]]
    assert [ends(fault, strict=False) for fault in (full, whole, kill, stop)] == [False, False, True, True]
