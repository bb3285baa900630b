"""The columns of each algorithm, with the arithmetic written out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from roundhouse.config.algorithms import AdaptiveKL, AlgorithmConfig, GRPOConfig, OverlongShaping, Scaling
from roundhouse.config.loading import parse_config
from roundhouse.config.models import TrainConfig
from roundhouse.errors import ConfigError, DataError
from roundhouse.training.algorithms import AlgorithmInputs, TokenSignals, build_algorithm, check_columns
from roundhouse.training.algorithms.policy_gradient import (
    Groups,
    PolicyGradientAlgorithm,
    next_coefficient,
    overlong_penalties,
    scale,
    shape_rewards,
    to_go,
)
from roundhouse.training.batch import TrainingSequences

ONE_OF_FOUR = [1.0, 0.0, 0.0, 0.0]


def batch(rewards: dict[str, list[float]], tokens: int = 2, **columns: list[Any]) -> TrainingSequences:
    """One sequence a rollout: a prompt token, then `tokens` generated ones. Columns in order of the sequences."""
    rows = []
    for group, values in rewards.items():
        for i, reward in enumerate(values):
            row = {
                "sequence_id": f"{group}{i}",
                "rollout_id": f"{group}{i}",
                "group_id": group,
                "token_ids": [1] * (1 + tokens),
                "loss_mask": [0] + [1] * tokens,
                "gen_logprobs": [0.0] + [-1.0] * tokens,
                "policy_version": 0,
                "reward": reward,
            }
            rows.append(row | {name: values[len(rows)] for name, values in columns.items()})
    return TrainingSequences.from_records(rows)


def compute(sequences: TrainingSequences, inputs: AlgorithmInputs = AlgorithmInputs(), **config: Any) -> TokenSignals:
    section = TypeAdapter(AlgorithmConfig).validate_python(config)
    found = build_algorithm(section).compute(sequences, inputs)
    check_columns(found.columns, sequences, "test")
    return found


def advantages(sequences: TrainingSequences, **config: Any) -> list[float]:
    return compute(sequences, **config).sequence_columns["advantage"].tolist()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # mean 1/4, sample std sqrt((9/16 + 3/16) / 3) = 1/2
        ({"kind": "grpo"}, [1.5, -0.5, -0.5, -0.5]),
        ({"kind": "dapo"}, [1.5, -0.5, -0.5, -0.5]),  # rewards 1 -1 -1 -1: mean -1/2, std 1, (1 + 1/2) / 1
        ({"kind": "gspo"}, [1.5, -0.5, -0.5, -0.5]),
        ({"kind": "cispo"}, [1.5, -0.5, -0.5, -0.5]),
        ({"kind": "dr_grpo"}, [0.75, -0.25, -0.25, -0.25]),
        # the others' means: 0 and 1/3
        ({"kind": "rloo"}, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ({"kind": "grpo", "leave_one_out": True, "normalize_by_std": False}, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ({"kind": "grpo", "leave_one_out": True}, [2.0, -2 / 3, -2 / 3, -2 / 3]),
        # mean 1/4 off, then zero mean already, variance (9/16 + 3/16) / 4 = 3/16, its root 0.433
        ({"kind": "reinforce_plus_plus", "kl_coefficient": 0}, [0.75 / 0.4330127, *[-0.25 / 0.4330127] * 3]),
        ({"kind": "reinforce_plus_plus", "kl_coefficient": 0, "normalize_batch": False}, [0.75, -0.25, -0.25, -0.25]),
    ],
    ids=str,
)
def test_one_right_answer_among_four(config: dict[str, Any], expected: list[float]) -> None:
    np.testing.assert_allclose(advantages(batch({"g": ONE_OF_FOUR}), **config), expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo"])
def test_the_right_answer_among_wrong_ones_is_kept_by_every_group_algorithm(kind: str) -> None:
    """A spread over the other rollouts of the group would be 0 for this one alone, and filter out the important one."""
    found = compute(batch({"g": ONE_OF_FOUR}), kind=kind)
    assert found.columns.trained.tolist() == [False, True, True] * 4
    assert found.sequence_columns["advantage"][0] > 0


def test_a_pair_under_leave_one_out_is_normalised_and_has_spread() -> None:
    """With n - 1 = 1 others, a spread over them would divide by zero."""
    found = advantages(batch({"g": [1.0, 0.0]}), kind="grpo", leave_one_out=True)
    np.testing.assert_allclose(found, [math.sqrt(2), -math.sqrt(2)], rtol=1e-5)  # ±1 by the group's std 1/sqrt(2)


def test_two_groups_of_the_same_prompt_stay_two() -> None:
    both = batch({"g": [1.0, 0.0], "h": [1.0, 1.0]})
    assert len({tuple(tokens) for tokens in np.split(both.token_ids, both.offsets[1:-1])}) == 1, "equal prompts"
    np.testing.assert_allclose(advantages(both, kind="dr_grpo"), [0.5, -0.5, 0.0, 0.0])


def test_dapo_masks_truncated_rollouts_but_counts_them_in_the_baseline() -> None:
    sequences = batch({"g": [1.0, 0.0, 0.0, 1.0]}, truncated=[False, False, True, False])
    found = compute(sequences, kind="dapo")
    np.testing.assert_allclose(
        found.sequence_columns["advantage"], np.array([1, -1, -1, 1]) / math.sqrt(4 / 3), rtol=1e-5
    )
    assert found.columns.policy_weights.reshape(4, 3)[:, 1].tolist() == [1, 1, 0, 1]
    assert found.metrics["num_truncated_masked"] == 1


def test_gdpo_adds_up_advantages_that_were_normalised_one_component_at_a_time() -> None:
    """Components a: 1 0, and b: 0 100. GRPO would see 1 100 and forget a; here each is ±1/sqrt(2) and they cancel."""
    parts = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 100.0}]
    pair = batch({"g": [1.0, 100.0]}, reward_components=parts)
    unnormalised = advantages(pair, kind="gdpo", normalize_batch=False)
    np.testing.assert_allclose(unnormalised, [0.0, 0.0], atol=1e-5)
    weighted = advantages(pair, kind="gdpo", weights={"a": 3.0, "b": 1.0}, normalize_batch=False)
    np.testing.assert_allclose(weighted, [2 / math.sqrt(2), -2 / math.sqrt(2)], rtol=1e-4)
    whole = advantages(pair, kind="gdpo", weights={"a": 3.0, "b": 1.0})
    # zero mean, unit sample deviation over the two rollouts, like each component's over its group
    np.testing.assert_allclose(whole, [1 / math.sqrt(2), -1 / math.sqrt(2)], rtol=1e-4)


def test_gdpo_learns_from_a_group_whose_sum_is_equal_and_parts_are_not() -> None:
    parts = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0}]
    found = compute(
        batch({"g": [1.0, 1.0], "h": [2.0, 2.0]}, reward_components=parts), kind="gdpo", weights={"a": 2, "b": 1}
    )
    assert found.columns.trained.reshape(4, 3)[:, 1].tolist() == [True, True, False, False]
    assert found.sequence_columns["advantage"][0] > 0 > found.sequence_columns["advantage"][1]


def test_gdpo_refuses_rollouts_without_a_component() -> None:
    parts = [{"a": 1.0, "b": 0.0}, {"a": 0.0}]
    with pytest.raises(DataError, match=r"'g1' has no finite reward component 'b' \(1 of 2"):
        advantages(batch({"g": [1.0, 0.0]}, reward_components=parts), kind="gdpo")
    with pytest.raises(DataError, match="component 'c'"):
        advantages(batch({"g": [1.0, 0.0]}, reward_components=parts), kind="gdpo", weights={"a": 1, "c": 1})
    with pytest.raises(DataError, match="two or more reward components, but the rollouts have none"):
        advantages(batch({"g": [1.0, 0.0]}), kind="gdpo")


def test_reinforce_plus_plus_pays_each_token_for_the_kl_that_comes_after_it() -> None:
    """k1 of the two tokens: 0.3 and 0.1, coefficient 2: returns 1 - 0.8 and 1 - 0.2, and for the other rollout 0."""
    sequences = batch({"g": [1.0], "h": [0.0]})
    old = np.array([0, -1.0, -1.0, 0, -1.0, -1.0], dtype=np.float32)
    ref = np.array([0, -1.3, -1.1, 0, -1.0, -1.0], dtype=np.float32)
    config = {"kind": "reinforce_plus_plus", "minus_baseline": False, "kl_coefficient": 2.0}
    found = compute(sequences, AlgorithmInputs(old, ref), **config, normalize_batch=False)
    np.testing.assert_allclose(found.columns.advantages, [0, 0.2, 0.8, 0, 0, 0], atol=1e-6)
    assert found.metrics["kl_penalty"] == pytest.approx(0.1)  # (0.3 + 0.1 + 0 + 0) / 4
    assert not found.columns.reference_kl_weights.any(), "the KL is in the reward, not in the loss"
    normal = compute(sequences, AlgorithmInputs(old, ref), **config).columns.advantages[sequences.loss_mask]
    assert normal.mean() == pytest.approx(0, abs=1e-6)
    assert normal.var() == pytest.approx(1, rel=1e-5)


def test_reinforce_plus_plus_sees_the_reward_of_every_rollout_that_it_trains_on() -> None:
    """Less its own reward, a rollout alone in its group would teach nothing but its KL."""
    sequences = batch({"g": [1.0], "h": [0.0], "i": [1.0, 0.0]})
    old, ref = np.zeros((2, 12), dtype=np.float32)
    ref[1] = -0.5
    config = {"kind": "reinforce_plus_plus", "kl_coefficient": 0.01}
    found = compute(sequences, AlgorithmInputs(old, ref), **config)
    assert found.columns.trained.reshape(4, 3)[:, 1].tolist() == [False, False, True, True]
    taught = found.columns.advantages[6:][sequences.loss_mask[6:]]
    np.testing.assert_allclose(taught, [1, 1, -1, -1], rtol=1e-5)
    alone = compute(sequences, AlgorithmInputs(old, ref), **config, minus_baseline=False)
    np.testing.assert_allclose(np.sign(alone.sequence_columns["advantage"]), [1, -1, 1, -1])


def test_a_baseline_of_groups_of_one_is_refused() -> None:
    keys = {"rollout": {"group_size": 1, "prompts_per_iteration": 8}, "validation": {"min_group_size": 1}}
    section = {"kind": "reinforce_plus_plus"}
    with pytest.raises(
        ConfigError, match=r"group_size is 1 and train.algorithm.minus_baseline true.*minus_baseline to false"
    ):
        parse_config({"run_id": "r", "train": {"algorithm": section}} | keys)
    assert parse_config({"run_id": "r", "train": {"algorithm": section | {"minus_baseline": False}}} | keys)


def test_kl_in_the_reward_of_a_group_algorithm_is_the_whole_rollouts() -> None:
    sequences = batch({"g": [1.0, 0.0]})
    old = np.array([0, -1.0, -1.0, 0, -1.0, -1.0], dtype=np.float32)
    ref = np.array([0, -1.3, -1.1, 0, -1.0, -1.0], dtype=np.float32)
    found = compute(
        sequences, AlgorithmInputs(old, ref), kind="rloo", kl_coefficient=2.0, kl_estimator="k1", kl_placement="reward"
    )
    # rewards 1 - 2 * 0.4 = 0.2 and 0
    np.testing.assert_allclose(found.sequence_columns["advantage"], [0.2, -0.2], atol=1e-6)
    assert found.metrics["reward"] == 0.5
    assert found.metrics["reward_shaped"] == pytest.approx(0.1)


def test_kl_noise_in_the_reward_gives_no_spread_to_a_group_whose_rewards_are_equal() -> None:
    sequences = batch({"g": [1.0, 1.0]})
    old, ref = np.zeros((2, 6), dtype=np.float32)
    ref[1] = -0.5
    found = compute(sequences, AlgorithmInputs(old, ref), kind="grpo", kl_coefficient=0.1, kl_placement="reward")
    assert not found.columns.trained.any()


def test_distillation_prefers_what_the_teacher_finds_likelier_and_ignores_the_reward() -> None:
    sequences = batch({"g": [1.0, 1.0]})
    old = np.array([0, -1.0, -2.0, 0, -1.0, -1.0], dtype=np.float32)
    teacher = np.array([0, -0.5, -5.0, 0, -1.0, -1.5], dtype=np.float32)
    found = compute(sequences, AlgorithmInputs(old, teacher), kind="distillation", teacher="t")
    np.testing.assert_allclose(found.columns.advantages, [0, 0.5, -3.0, 0, 0, -0.5], rtol=1e-6)
    assert found.columns.policy_weights.tolist() == [0, 1, 1, 0, 1, 1]
    assert found.metrics["teacher_kl"] == pytest.approx((-0.5 + 3 + 0 + 0.5) / 4)
    clipped = compute(
        sequences, AlgorithmInputs(old, teacher), kind="distillation", teacher="t", advantage_clip=(-1, 1)
    )
    assert clipped.columns.advantages.min() == -1


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        ({}, [1, 1, 0, 1, 1, 1]),  # the truncated third is never learnt from
        ({"include_truncated": True}, [1, 1, 1, 1, 1, 1]),
        ({"select": "threshold", "reward_threshold": 0.5}, [0, 1, 0, 0, 1, 0]),
        ({"select": "best_of_group"}, [0, 1, 0, 0, 1, 0]),
        ({"select": "best_of_group", "reward_threshold": 0.6}, [0, 1, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_cross_entropy_learns_from_the_chosen_rollouts_alone(config: dict[str, Any], chosen: list[int]) -> None:
    sequences = batch({"g": [0.0, 1.0, 2.0, 0.4], "h": [0.5, 0.2]}, truncated=[False, False, True, False, False, False])
    found = compute(sequences, kind="cross_entropy", **config)
    assert found.columns.cross_entropy_weights.reshape(6, 3)[:, 1].tolist() == chosen
    assert not found.columns.policy_weights.any()
    assert found.metrics["num_selected"] == sum(chosen)


def test_of_equals_the_first_is_the_best_of_its_group() -> None:
    found = compute(batch({"g": [0.0, 1.0, 1.0]}), kind="cross_entropy", select="best_of_group")
    assert found.columns.cross_entropy_weights.reshape(3, 3)[:, 1].tolist() == [0, 1, 0]


def test_positive_examples_get_cross_entropy_beside_the_policy_term() -> None:
    found = compute(batch({"g": [1.0, 0.0], "flat": [1.0, 1.0]}), kind="grpo", positive_nll_weight=0.1)
    np.testing.assert_allclose(found.columns.cross_entropy_weights.reshape(4, 3)[:, 1], [0.1, 0, 0, 0], rtol=1e-6)


def test_the_overlong_penalty_grows_over_the_buffer_and_stops_at_its_floor() -> None:
    shaping = OverlongShaping(max_generated_tokens=100, buffer_tokens=20)
    lengths = np.array([0, 80, 85, 100, 101, 10_000])
    np.testing.assert_allclose(overlong_penalties(lengths, shaping, 0.5), [0, 0, -0.125, -0.5, -0.5, -0.5])


def test_the_overlong_penalty_looks_at_all_turns_and_sequences_of_a_rollout() -> None:
    """Rollout a generated 20 tokens in two sequences, the others 10: only a is beyond the limit."""
    sequences = batch({"g": [1.0, 1.0, 1.0, 0.0]}, tokens=10, rollout_id=["a", "a", "b", "c"])
    reward = {"overlong": {"max_generated_tokens": 20, "buffer_tokens": 5, "penalty": 0.25}}
    found = compute(sequences, kind="dr_grpo", reward=reward)
    assert found.metrics["reward_shaped"] == pytest.approx((0.75 + 1 + 0) / 3)
    assert found.metrics["reward"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("algorithm", "scaled", "right", "wrong"),
    [("dr_grpo", {}, 0.5, 0.0), ("dapo", {}, 0.0, -1.0), ("dr_grpo", {"scaling": {"target": (0.0, 4.0)}}, 2.0, 0.0)],
)
def test_by_default_a_right_answer_at_the_limit_beats_a_short_wrong_one(
    algorithm: str, scaled: dict[str, Any], right: float, wrong: float
) -> None:
    reward = {"overlong": {"max_generated_tokens": 10, "buffer_tokens": 5}} | scaled
    section = TypeAdapter(AlgorithmConfig).validate_python({"kind": algorithm, "reward": reward})
    assert shape_rewards(batch({"g": [1.0]}, tokens=10), section.reward).tolist() == [right]
    assert shape_rewards(batch({"g": [0.0]}, tokens=2), section.reward).tolist() == [wrong]


def test_scaling_clamps_and_maps_and_a_truncated_reward_is_multiplied() -> None:
    np.testing.assert_allclose(scale(np.array([-3, 0, 0.25, 1, 9.0]), Scaling()), [-1, -1, -0.5, 1, 1])
    np.testing.assert_allclose(scale(np.array([0.0, 1.0]), Scaling(target=(-2.0, 3.0))), [-2, 3])
    sequences = batch({"g": [1.0, 1.0, 0.0]}, truncated=[True, False, False])
    found = compute(sequences, kind="dr_grpo", reward={"truncated_factor": 0.0})
    np.testing.assert_allclose(found.sequence_columns["advantage"], [-1 / 3, 2 / 3, -1 / 3])


@pytest.mark.parametrize("rewards", [[2.0, 3.0, 5.0, 10.0], [-1.0, -0.5, 0.0, 0.0], [0.2, 0.4, 3.0, 7.0]], ids=str)
def test_dapo_learns_from_rewards_of_any_range(rewards: list[float]) -> None:
    """Clamped to 0 and 1 they would be equal or lose their order, without an error."""
    sequences = batch({"g": rewards})
    np.testing.assert_allclose(advantages(sequences, kind="dapo"), advantages(sequences, kind="grpo"))
    assert len(set(advantages(sequences, kind="dapo"))) == len(set(rewards))


def test_a_reward_outside_of_its_scale_is_refused_unless_it_is_to_be_clamped() -> None:
    """The overlong penalty brings dapo's scale with it."""
    sequences, overlong = batch({"g": [0.0, 1.0, 5.0]}), {"max_generated_tokens": 500}
    with pytest.raises(
        DataError, match=r"'g2' has the reward 5, outside of .*source \[0, 1\] \(1 of 3 .*outside to clamp"
    ):
        compute(sequences, kind="dapo", reward={"overlong": overlong})
    wider = compute(sequences, kind="dapo", reward={"overlong": overlong, "scaling": {"source": [0, 5]}})
    assert wider.metrics["reward_shaped"] == pytest.approx((-1 - 0.6 + 1) / 3)
    clamped = compute(sequences, kind="dapo", reward={"overlong": overlong, "scaling": {"outside": "clamp"}})
    assert clamped.metrics["reward_shaped"] == pytest.approx((-1 + 1 + 1) / 3)
    plain = compute(sequences, kind="dapo", reward={"overlong": overlong, "scaling": None})
    assert plain.metrics["reward_shaped"] == 2
    alone = batch({"words/g": [0.0, 1.0]})
    own = compute(alone, kind="dapo", environments={"words": {"reward": {"overlong": overlong}}})
    assert own.metrics["reward_shaped"] == 0, "an environment's own penalty brings it, too"


def test_a_group_that_shaping_makes_equal_is_not_trained_on() -> None:
    """g's right answer is truncated and loses its reward: the group has nothing to compare, so it is in no denominator."""
    sequences = batch({"g": [1.0, 0.0], "h": [1.0, 0.0]}, truncated=[True, False, False, False])
    found = compute(sequences, kind="grpo", reward={"truncated_factor": 0.0})
    assert found.columns.trained.reshape(4, 3)[:, 1].tolist() == [False, False, True, True]
    assert found.metrics["num_groups_shaped_flat"] == 1
    assert found.metrics["baseline_reward/pct_mixed"] == 100, "of the environment's rewards"


def test_advantages_are_clipped_to_their_bounds() -> None:
    np.testing.assert_allclose(
        advantages(batch({"g": ONE_OF_FOUR}), kind="grpo", advantage_clip=(-0.25, 1.0)), [1.0, -0.25, -0.25, -0.25]
    )


def test_the_controller_moves_towards_its_target_by_at_most_a_fifth_a_horizon() -> None:
    controller = AdaptiveKL(target=0.2, horizon=1000)
    assert next_coefficient(0.5, 0.22, 100, controller) == pytest.approx(0.5 * (1 + 0.1 * 0.1))
    assert next_coefficient(0.5, 9.0, 100, controller) == pytest.approx(0.5 * (1 + 0.2 * 0.1))
    assert next_coefficient(0.5, 0.0, 100, controller) == pytest.approx(0.5 * (1 - 0.2 * 0.1))
    assert next_coefficient(0.5, 9.0, 100, None) == 0.5
    assert next_coefficient(0.5, 0.0, 5001, controller) == 0.25, "never below half of it, however many rollouts"
    found = compute(
        batch({"g": [1.0, 0.0]}), AlgorithmInputs(kl_coefficient=0.7), kind="grpo", kl_coefficient=0.1, adaptive_kl={}
    )
    assert found.columns.reference_kl_weights.max() == pytest.approx(0.7)


def test_the_default_target_of_the_kl_moves_the_coefficient_both_ways() -> None:
    """A healthy KL is 0.001 to 0.1 nats a token; half a nat is far from the reference."""
    assert next_coefficient(0.1, 0.5, 1024, AdaptiveKL()) > 0.1
    assert next_coefficient(0.1, 0.001, 1024, AdaptiveKL()) < 0.1


def test_a_return_is_what_comes_after_a_token_in_its_own_sequence() -> None:
    assert to_go(np.array([1.0, 2, 3, 4, 5]), np.array([0, 3, 5])).tolist() == [6, 5, 3, 9, 5]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(-1e6, 1e6, allow_nan=False, width=32), min_size=1, max_size=6), min_size=1, max_size=5),
    st.sampled_from(["grpo", "dr_grpo", "rloo", "dapo", "reinforce_plus_plus", "cross_entropy"]),
    st.data(),
)
def test_whatever_the_rewards_columns_are_finite_and_on_the_mask(
    rewards: list[list[float]], kind: str, data: st.DataObject
) -> None:
    sequences = batch({f"g{i}": values for i, values in enumerate(rewards)}, tokens=data.draw(st.integers(1, 4)))
    config: dict[str, Any] = {"kl_coefficient": 0} if kind == "reinforce_plus_plus" else {}
    found = compute(sequences, kind=kind, **config)  # checks shapes, finiteness and mask
    groups = Groups.of(sequences)
    flat = ~groups.of_sequences(groups.has_spread)
    if kind in ("grpo", "dr_grpo", "rloo", "dapo"):
        assert not found.columns.trained.reshape(len(sequences), -1)[flat].any()
        sums = np.bincount(groups.group_of_sequence, found.sequence_columns["advantage"])
        largest = max(1.0, *(abs(value) for values in rewards for value in values))
        np.testing.assert_allclose(sums, 0, atol=1e-6 * largest)


def test_groups_of_one_are_counted() -> None:
    assert compute(batch({"g": [1.0], "h": [1.0, 0.0]}), kind="grpo").metrics["num_groups_of_one"] == 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kind": "cispo", "dual_clip": 3.0}, "dual_clip .3.0. bounds the clipped loss.*Unset dual_clip"),
    ({"kind": "cispo", "importance_ratio": "sequence"}, "no effect with policy_loss cispo"),
    ({"kind": "cispo", "importance_ratio": "on_policy"}, "no effect with policy_loss cispo"),
    ({"kind": "cispo", "loss_aggregation": "sequence"}, "Set loss_aggregation to token"),
    ({"kind": "cispo", "policy_loss": "reinforce"}, "cispo"),
    ({"kind": "gspo", "loss_aggregation": "token"}, "sequence"),
    ({"kind": "gspo", "mismatch_correction": "seq-mask-tis"}, "Set mismatch_correction to tis or icepop"),
    ({"kind": "grpo", "importance_ratio": "sequence"}, "Set loss_aggregation to sequence or rollout"),
    ({"kind": "grpo", "policy_loss": "reinforce", "dual_clip": 3.0}, "Unset dual_clip"),
    ({"kind": "grpo", "dual_clip": 0.5}, "greater than 1"),
    ({"kind": "grpo", "loss_aggregation": "fixed_length"}, "Set both"),
    ({"kind": "grpo", "fixed_length": 10}, "leave fixed_length unset"),
    ({"kind": "dr_grpo", "normalize_by_std": True}, "False"),
    ({"kind": "rloo", "leave_one_out": False}, "True"),
    ({"kind": "grpo", "mismatch_bounds": [1.1, 2.0]}, "ratio of 1, which must lie inside"),
    ({"kind": "grpo", "adaptive_kl": {}}, "Set kl_coefficient"),
    (
        {"kind": "grpo", "kl_coefficient": 0.1, "kl_placement": "reward", "kl_importance_weighting": True},
        "Unset one of them",
    ),
    ({"kind": "grpo", "advantage_clip": [1, -1]}, "Give the lower bound first"),
    ({"kind": "gdpo", "weights": {"a": 1.0}}, "needs two or more"),
    ({"kind": "gdpo", "reward": {"scaling": {}}}, "which kind gdpo does not use"),
    ({"kind": "cross_entropy", "select": "threshold"}, "reward_threshold is not set"),
    ({"kind": "cross_entropy", "reward_threshold": 1.0}, "Set select to threshold or best_of_group"),
    ({"kind": "cross_entropy", "clip_high": 0.3}, "Extra inputs"),
    ({"kind": "distillation", "teacher": "t", "kl_coefficient": 0.1}, "less than or equal to 0"),
    ({"kind": "dapo", "reward": {"truncated_factor": 0, "overlong": {"max_generated_tokens": 500}}}, "Unset one"),
    ({"kind": "dapo", "reward": {"overlong": {"max_generated_tokens": 50}}}, "buffer_tokens .128. is above"),
    ({"kind": "dapo", "reward": {"scaling": {"source": [1, 1]}}}, "an empty range"),
]


@pytest.mark.parametrize(("config", "says"), REFUSED, ids=[str(config) for config, _ in REFUSED])
def test_combinations_that_cannot_be_right_are_refused_at_load(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        TypeAdapter(AlgorithmConfig).validate_python(config)


def test_a_forced_on_policy_ratio_is_refused_with_several_updates() -> None:
    algorithm = {"importance_ratio": "on_policy"}
    with pytest.raises(ValidationError, match=r"minibatches x epochs is 4\. Set minibatches and epochs to 1"):
        TrainConfig.model_validate({"algorithm": algorithm})
    assert TrainConfig.model_validate({"algorithm": algorithm, "minibatches": 1}).algorithm.kind == "grpo"


@pytest.mark.parametrize(
    "algorithm",
    [
        {"policy_loss": "reinforce"},
        {"kind": "rloo", "policy_loss": "reinforce"},
        {"kind": "distillation", "teacher": "t", "policy_loss": "reinforce"},
    ],
    ids=str,
)
def test_reinforce_is_refused_with_several_updates(algorithm: dict[str, Any]) -> None:
    """Three of four updates would learn from tokens of another policy, with nothing to correct for it."""
    with pytest.raises(
        ValidationError, match=r"policy_loss: reinforce.*minibatches x epochs is 4\. Set .* policy_loss to clipped"
    ):
        TrainConfig.model_validate({"algorithm": algorithm})
    assert TrainConfig.model_validate({"algorithm": algorithm, "minibatches": 1})


def test_distillation_out_of_the_box_corrects_for_the_policy_of_its_later_updates() -> None:
    config = TrainConfig.model_validate({"algorithm": {"kind": "distillation", "teacher": "t"}})
    loss = build_algorithm(config.algorithm).loss
    assert (config.minibatches, loss.policy_loss, loss.importance_ratio) == (4, "clipped", "token")


def test_a_section_without_a_kind_is_grpo() -> None:
    config = TrainConfig.model_validate({"algorithm": {"clip_low": 0.1}})
    assert config.algorithm == GRPOConfig(clip_low=0.1)


class SignOnly(PolicyGradientAlgorithm):
    """+1 above the group's mean, −1 below; the example of docs/algorithms.md."""

    def __init__(self, config: Any, size: float = 1.0) -> None:
        super().__init__(config)
        self.size = size

    def advantages(self, sequences: TrainingSequences, rewards: Any, groups: Groups) -> np.ndarray:
        return self.size * np.sign(rewards.values - groups.of_sequences(groups.means))


def test_an_algorithm_of_ones_own_is_imported_by_name_with_its_parameters() -> None:
    target = f"{__name__}:SignOnly"
    found = advantages(batch({"g": ONE_OF_FOUR}), kind="custom", target=target, parameters={"size": 2.0})
    assert found == [2.0, -2.0, -2.0, -2.0]


@pytest.mark.parametrize(
    ("target", "parameters", "says"),
    [
        ("no_such_module:A", {}, "importing no_such_module failed"),
        (f"{__name__}:Nothing", {}, "has no Nothing"),
        ("pathlib:Path", {}, "has no loss, needs_reference, needs_log_probs, compute"),
        (f"{__name__}:SignOnly", {"colour": 1}, "cannot be made with train.algorithm.parameters"),
    ],
)
def test_what_is_wrong_with_a_custom_algorithm_is_said(target: str, parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        compute(batch({"g": ONE_OF_FOUR}), kind="custom", target=target, parameters=parameters)


class Broken(SignOnly):
    """Gives a value that is not finite."""

    def advantages(self, sequences: TrainingSequences, rewards: Any, groups: Groups) -> np.ndarray:
        return np.full(len(sequences), np.nan)


def test_columns_that_are_not_finite_are_refused_with_the_algorithms_name() -> None:
    sequences = batch({"g": [1.0, 0.0]})
    config = TypeAdapter(AlgorithmConfig).validate_python({"kind": "custom", "target": f"{__name__}:Broken"})
    with pytest.raises(DataError, match="Broken: column advantages of sequence 'g0' is nan"):
        check_columns(build_algorithm(config).compute(sequences).columns, sequences, "Broken")
