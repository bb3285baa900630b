"""Retries of a collection are bounded, however many rollouts fail."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from roundhouse.collection.in_process_runner import RetryBudget


@given(st.integers(0, 50), st.floats(0, 3), st.integers(0, 200))
def test_no_more_retries_than_the_share_of_the_rollouts(rollouts: int, fraction: float, asked: int) -> None:
    budget = RetryBudget(rollouts, fraction, None)
    granted = sum(budget.take(float(now)) for now in range(asked))
    assert granted == min(asked, math.ceil(rollouts * fraction))


@given(st.lists(st.floats(0, 100), min_size=1))
def test_no_retry_later_than_the_time_limit_after_the_first(times: list[float]) -> None:
    budget = RetryBudget(len(times), None, 30.0)
    times.sort()
    assert [budget.take(now) for now in times] == [now - times[0] <= 30.0 for now in times]


def test_without_a_budget_only_the_attempts_of_each_rollout_count() -> None:
    budget = RetryBudget(1, None, None)
    assert all(budget.take(1e6 * number) for number in range(100))
