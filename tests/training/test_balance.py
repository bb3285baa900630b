from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from roundhouse.training.packing import CostModel, cost_model, deal, imbalance, pack, waiting

LENGTHS = st.lists(st.integers(1, 120), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 100), st.integers(1, 9), st.sampled_from([10.0, 300.0, float("inf")]))
def test_every_sequence_is_dealt_once_within_the_budget_and_all_ranks_have_as_many_turns(
    lengths: list[int], budget: int, ranks: int, knee: float
) -> None:
    bins = pack(lengths, budget)
    dealt = deal(bins, lengths, budget, CostModel(knee), ranks)
    assert len(dealt) == ranks
    assert {len(turns) for turns in dealt} == {-(-len(bins) // ranks)}
    parts = [part for turns in dealt for part in turns if part is not None]
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(part and (len(part) == 1 or sum(lengths[i] for i in part) <= budget) for part in parts)


@given(LENGTHS, st.integers(1, 100), st.integers(1, 9))
def test_only_the_last_turn_may_be_empty_and_no_rank_waits_while_sequences_could_be_spread(
    lengths: list[int], budget: int, ranks: int
) -> None:
    dealt = deal(pack(lengths, budget), lengths, budget, CostModel(50.0), ranks)
    turns = list(zip(*dealt, strict=True))
    assert all(part is not None for turn in turns[:-1] for part in turn)
    if len(lengths) < ranks:
        assert sum(part is not None for part in turns[-1]) == len(lengths)


def test_one_bin_is_spread_over_all_ranks() -> None:
    """A batch that fits one rank's budget would leave the others idle."""
    dealt = deal([[0, 1, 2, 3]], [30, 20, 20, 10], 100, CostModel(float("inf")), 2)
    assert dealt == [[[0, 3]], [[1, 2]]]


def test_ranks_without_a_sequence_have_an_empty_turn() -> None:
    dealt = deal([[0], [1]], [10, 20], 20, CostModel(100.0), 4)
    assert dealt == [[[1]], [[0]], [None], [None]]
    assert waiting(dealt, [10, 20]) == pytest.approx(1 - 7.5 / 20)


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=80), st.integers(2, 8))
def test_ranks_differ_by_no_more_than_the_costliest_bin(lengths: list[int], ranks: int) -> None:
    """Of two ranks the one with more work takes the cheaper bin of a turn, so the difference never grows beyond that."""
    cost = CostModel(1000.0)
    costs = cost.of(np.array(lengths))
    dealt = deal(pack(lengths, 4000), lengths, 4000, cost, ranks)
    work = [sum(costs[part].sum() for part in turns if part) for turns in dealt]
    costliest = max(costs[part].sum() for turns in dealt for part in turns if part)
    assert max(work) - min(work) <= costliest * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_two_thousand_sequences_fill_the_bins_and_keep_eight_ranks_equally_busy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(7.2, 1, 2048).astype(int) + 1, 16384)
    bins = pack(lengths.tolist(), 16384)
    assert len(bins) == -(-lengths.sum() // 16384)  # no packing can do with fewer
    assert lengths.sum() / (len(bins) * 16384) > 0.995
    dealt = deal(bins, lengths, 16384, CostModel(35_000), 8)
    assert imbalance(dealt, CostModel(35_000).of(lengths)) < 0.01
    assert imbalance(dealt, np.square(lengths, dtype=np.float64)) < 0.02
    assert waiting(dealt, CostModel(35_000).of(lengths)) < 0.02


def test_balance_by_cost_beats_balance_by_count() -> None:
    lengths = np.array([4000] * 4 + [1000] * 12)
    cost = CostModel(1000.0)
    dealt = deal(pack(lengths.tolist(), 4000), lengths, 4000, cost, 2)
    by_count = [[list(range(8))], [list(range(8, 16))]]
    assert imbalance(dealt, cost.of(lengths)) < 0.05 < imbalance(by_count, cost.of(lengths))


@pytest.mark.parametrize("tied", [True, False])
def test_the_knee_is_where_attention_costs_as_much_as_the_matrices(tied: bool) -> None:
    config = Qwen3Config(
        vocab_size=10, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=48, tie_word_embeddings=tied,
    )  # fmt: skip
    layer = 32 * 64 * 2 + 32 * 32 * 2 + 3 * 32 * 48 + 2 * 32 + 2 * 16
    cost = cost_model(Qwen3ForCausalLM(config))
    assert cost.knee == (2 * layer + 32 + 10 * 32) / (2 * 4 * 16)
    alone, twice = cost.of(np.array([cost.knee, 2 * cost.knee]))
    assert alone == pytest.approx(2 * cost.knee)
    assert twice == pytest.approx(6 * cost.knee)
