"""Properties of estimates: unbiased, covering, deterministic."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.stages.evaluate import (
    mean_interval,
    mean_pass_at_k,
    paired_difference,
    reported_ks,
)
from roundhouse.trajectories.records import pass_at_k


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n: int, data: st.DataObject):
    passed, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    outcomes = [True] * passed + [False] * (n - passed)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_more_rollouts_than_there_are_is_refused():
    with pytest.raises(ValueError, match="pass@3 of 2"):
        pass_at_k(2, 1, 3)


def test_ks_are_powers_of_two_that_every_task_can_answer():
    assert reported_ks({"a": [1.0] * 9, "b": [0.0] * 5}) == [1, 2, 4]
    assert reported_ks({"a": [1.0]}) == [1]
    assert reported_ks({}) == []


def test_pass_at_1_is_the_mean_of_zero_one_rewards():
    rewards = {"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [0.0, 0.0]}
    assert mean_pass_at_k(rewards, 1) == pytest.approx(0.5)
    assert mean_pass_at_k(rewards, 2) == pytest.approx(2 / 3)


def test_a_wrong_answer_that_earns_something_by_its_form_does_not_pass():
    rewards = {"a": [0.2, 0.2], "b": [0.7 + 0.2 + 0.1, 0.2]}
    assert 0.7 + 0.2 + 0.1 < 1, "the right answer's reward, rounded"
    assert mean_pass_at_k(rewards, 1) == pytest.approx(0.25)
    assert mean_pass_at_k(rewards, 2) == pytest.approx(0.5)
    assert mean_pass_at_k(rewards, 1, threshold=0.2) == 1.0


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(200):
        found = mean_interval(rng.binomial(1, 0.3, 120).tolist())
        covered += found.low <= 0.3 <= found.high
    assert 180 <= covered <= 199


def test_the_paired_interval_is_narrower_where_tasks_differ_and_policies_hardly():
    rng = np.random.default_rng(1)
    hardness = rng.uniform(0, 1, 200)
    before = {str(i): [float(value)] for i, value in enumerate(hardness)}
    after = {str(i): [float(value) + 0.02 + rng.normal(0, 0.01)] for i, value in enumerate(hardness)}
    difference = paired_difference(after, before)
    assert difference.low > 0
    alone = mean_interval([values[0] for values in after.values()])
    assert difference.high - difference.low < (alone.high - alone.low) / 10
    assert paired_difference(after, before) == difference


def test_evaluations_without_a_common_task_cannot_be_compared():
    with pytest.raises(ValueError, match="no task in common"):
        paired_difference({"a": [1.0]}, {"b": [1.0]})


def test_a_constant_has_an_interval_of_no_width():
    found = mean_interval([1.0] * 10)
    assert (found.low, found.value, found.high) == (1.0, 1.0, 1.0)
    assert math.isfinite(found.value)
