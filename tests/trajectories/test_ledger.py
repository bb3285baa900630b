"""The ledger: the number of requests equals the sum of the outcomes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.trajectories.records import Ledger, LedgerError, Rollout, Status

outcomes = st.lists(st.tuples(st.sampled_from(list(Status)), st.sampled_from(["tool_timeout", "engine_unreachable"])))


def rollouts_of(drawn: list[tuple[Status, str]]) -> list[Rollout]:
    return [
        Rollout("g", sample, {}, "e", status, failure_code=code if status is Status.FAILED else "")
        for sample, (status, code) in enumerate(drawn)
    ]


@given(outcomes)
def test_a_ledger_of_rollouts_balances_and_counts_each_once(drawn: list[tuple[Status, str]]):
    ledger = Ledger.from_rollouts(rollouts_of(drawn), requested=len(drawn))
    counts = ledger.counts()
    assert counts.pop("requested") == sum(counts.values()) == len(drawn)
    for status in Status:
        assert counts[status.value] == sum(found is status for found, _ in drawn)
    assert sum(ledger.failures.values()) == counts["failed"]


@given(outcomes, st.integers(-3, 3).filter(bool))
def test_a_ledger_with_lost_or_doubled_rollouts_cannot_be_made(drawn: list[tuple[Status, str]], off: int):
    requested = max(0, len(drawn) + off)
    if requested == len(drawn):
        return
    with pytest.raises(LedgerError, match=f"requested {requested}, but completed .* = {len(drawn)}"):
        Ledger.from_rollouts(rollouts_of(drawn), requested=requested)


def test_failures_by_code_must_add_up():
    with pytest.raises(LedgerError, match="failed 2, but its failures by code are"):
        Ledger(requested=2, failed=2, failures={"tool_timeout": 1})


def test_a_ledger_survives_json():
    ledger = Ledger.from_outcomes([Status.FAILED, Status.MASKED], ["tool_timeout", ""])
    assert Ledger.model_validate_json(ledger.model_dump_json()) == ledger
    assert ledger.failures == {"tool_timeout": 1}
