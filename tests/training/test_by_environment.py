"""The environments of a mixture, each learnt from with its own settings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from roundhouse.config.algorithms import AlgorithmConfig, PolicyGradient
from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError
from roundhouse.training.algorithms import AlgorithmInputs, TokenColumns, TokenSignals, build_algorithm
from roundhouse.training.algorithms.policy_gradient import Groups, PolicyGradientAlgorithm, Rewards
from roundhouse.training.batch import TrainingSequences


def section(**keys: Any) -> PolicyGradient:
    found: PolicyGradient = TypeAdapter(AlgorithmConfig).validate_python({"kind": "grpo"} | keys)
    return found


def rows(environment: str) -> list[dict[str, Any]]:
    """Three groups of four rollouts, with rewards, lengths and truncation of all kinds."""
    random = np.random.default_rng(len(environment))
    made = []
    for number in range(12):
        tokens = 2 + number % 5
        made.append(
            {
                "sequence_id": f"{environment}-{number}",
                "rollout_id": f"{environment}-{number}",
                "group_id": f"{environment}/t{number // 4}",
                "token_ids": [1] * (1 + tokens),
                "loss_mask": [0] + [1] * tokens,
                "gen_logprobs": [0.0, *random.uniform(-3, -0.1, tokens).tolist()],
                "policy_version": 0,
                "reward": float(random.uniform()),
                "truncated": number % 5 == 0,
            }
        )
    return made


def mixed(*environments: str) -> TrainingSequences:
    """Their rollouts, one of each in turn."""
    return TrainingSequences.from_records([row for each in zip(*map(rows, environments), strict=True) for row in each])


def inputs_of(sequences: TrainingSequences) -> AlgorithmInputs:
    """Log-probabilities of a policy and its reference, the same of a rollout wherever it stands."""
    old = sequences.gen_logprobs * np.float32(0.9)
    return AlgorithmInputs(old, old * np.float32(1.1))


def computed(algorithm: PolicyGradient, sequences: TrainingSequences) -> TokenSignals:
    return build_algorithm(algorithm).compute(sequences, inputs_of(sequences))


def of_environment(sequences: TrainingSequences, name: str) -> np.ndarray:
    """[S] bool."""
    return np.array([group_id.startswith(f"{name}/") for group_id in sequences.group_ids])


RUN: dict[str, Any] = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}
OWN: list[dict[str, Any]] = [
    {"normalize_by_std": False},
    {"normalize_by_std": False, "leave_one_out": True},
    {"advantage_clip": [-0.2, 0.3]},
    {"positive_nll_weight": 0.5},
    {"mask_truncated": True},
    {"reward": {"overlong": {"max_generated_tokens": 5, "buffer_tokens": 3}}},
    {"kl_coefficient": 0.0},
    {"entropy_coefficient": 0.2},
]


@pytest.mark.parametrize("own", OWN, ids=lambda own: "-".join(own))
@pytest.mark.parametrize("run", [RUN, RUN | {"kl_placement": "reward"}], ids=["kl in the loss", "kl in the reward"])
def test_a_mixture_has_column_for_column_what_each_environment_has_alone(
    run: dict[str, Any], own: dict[str, Any]
) -> None:
    sequences = mixed("calc", "words")
    joined = computed(section(**run, environments={"words": own}), sequences)
    differs = False
    for name, settings in (("calc", {}), ("words", own)):
        chosen = of_environment(sequences, name)
        tokens = np.repeat(chosen, sequences.lengths)
        alone = TrainingSequences.from_records(rows(name))
        expected, plain = computed(section(**run | settings), alone), computed(section(**run), alone)
        for column in (field.name for field in fields(TokenColumns)):
            found = getattr(joined.columns, column)[tokens]
            assert np.array_equal(found, getattr(expected.columns, column)), (name, column)
            assert found.dtype == np.float32
            differs |= not np.array_equal(found, getattr(plain.columns, column))
        for column, values in expected.sequence_columns.items():
            assert np.array_equal(joined.sequence_columns[column][chosen], values), (name, column)
    assert differs, "the setting acts"


def test_a_critic_values_each_environment_by_its_own_rewards() -> None:
    """Values of tokens, values after truncated sequences, and the critic's targets: each at its sequences' places."""

    def with_values(algorithm: PolicyGradient, sequences: TrainingSequences) -> TokenSignals:
        values = sequences.gen_logprobs * np.float32(0.1) + np.float32(0.5)
        final = np.where(sequences.truncated, sequences.lengths, 0).astype(np.float32) / 10
        inputs = AlgorithmInputs(values=values, final_values=final)
        return build_algorithm(algorithm).compute(sequences, inputs)

    run, own = {"kind": "ppo", "gae_lambda": 0.9}, {"mask_truncated": True}
    sequences = mixed("calc", "words")
    joined = with_values(section(**run, environments={"words": own}), sequences)
    assert joined.returns is not None
    for name, settings in (("calc", {}), ("words", own)):
        tokens = np.repeat(of_environment(sequences, name), sequences.lengths)
        alone = with_values(section(**run, **settings), TrainingSequences.from_records(rows(name)))
        assert np.array_equal(joined.columns.advantages[tokens], alone.columns.advantages)
        assert np.array_equal(joined.columns.policy_weights[tokens], alone.columns.policy_weights)
        assert alone.returns is not None
        assert np.array_equal(joined.returns[tokens], alone.returns)


def test_environments_without_settings_are_computed_together_as_ever() -> None:
    """Visible with REINFORCE++, which normalises over the whole batch."""
    run = {"kind": "reinforce_plus_plus", "kl_coefficient": 0.0}
    three = mixed("calc", "lakes", "words")
    joined = computed(section(**run, environments={"words": {"advantage_clip": [-9.0, 9.0]}}), three)
    rest = ~of_environment(three, "words")
    together = computed(section(**run), three.select(rest))
    found = joined.columns.advantages[np.repeat(rest, three.lengths)]
    assert np.array_equal(found, together.columns.advantages)
    assert not np.array_equal(found, computed(section(**run), three).columns.advantages[np.repeat(rest, three.lengths)])


def test_gdpo_weighs_the_components_that_each_environment_gives() -> None:
    given = {"calc": ("right", "short"), "words": ("format", "order", "spelling")}

    def with_components(environment: str) -> list[dict[str, Any]]:
        draw = np.random.default_rng(1)
        return [
            row | {"reward_components": {name: draw.uniform() for name in given[environment]}}
            for row in rows(environment)
        ]

    sequences = TrainingSequences.from_records([*with_components("calc"), *with_components("words")])
    joined = computed(section(kind="gdpo", environments={"words": {"mask_truncated": True}}), sequences)
    for name, settings in (("calc", {}), ("words", {"mask_truncated": True})):
        alone = computed(section(kind="gdpo", **settings), TrainingSequences.from_records(with_components(name)))
        tokens = np.repeat(of_environment(sequences, name), sequences.lengths)
        assert np.array_equal(joined.columns.advantages[tokens], alone.columns.advantages)


def test_metrics_of_the_whole_are_what_one_algorithm_reports() -> None:
    sequences = mixed("calc", "words")
    run = {"kl_coefficient": 0.1, "kl_placement": "reward"}
    joined = computed(section(**run, environments={"words": {"advantage_clip": [-9, 9]}}), sequences).metrics
    assert joined == pytest.approx(computed(section(**run), sequences).metrics)


def test_an_iteration_without_rollouts_of_an_environment_is_computed_all_the_same() -> None:
    sequences = mixed("calc")
    joined = computed(section(environments={"words": {"mask_truncated": True}}), sequences)
    assert np.array_equal(joined.columns.advantages, computed(section(), sequences).columns.advantages)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"environments": {"w": {"clip_high": 0.3}}}, "clip_high"),
        ({"environments": {"w": {"kl_coefficient": 0.1}}}, r"w\.kl_coefficient is 0\.1, but kl_coefficient is 0"),
        ({"environments": {"w": {"entropy_coefficient": 0.1}}}, "but entropy_coefficient is 0"),
        (
            {"kl_coefficient": 0.1, "adaptive_kl": {}, "environments": {"w": {"kl_coefficient": 0.2}}},
            "adaptive_kl steers one coefficient",
        ),
        (
            {"kind": "reinforce_plus_plus", "environments": {"w": {"leave_one_out": True}}},
            "the run's algorithm has no key leave_one_out",
        ),
        ({"kind": "rloo", "environments": {"w": {"normalize_by_std": True}}}, "normalize_by_std"),
        ({"environments": {"w": {"advantage_clip": [1, 0]}}}, "an empty range"),
    ],
)
def test_what_cannot_be_of_one_environment_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        section(**keys)


def test_settings_of_an_environment_that_is_not_in_the_mixture_are_refused() -> None:
    tree = {"run_id": "r", "train": {"algorithm": {"environments": {"calc": {"mask_truncated": True}}}}}
    with pytest.raises(ConfigError, match=r"train\.algorithm\.environments names calc, but .* has none"):
        parse_config(tree)
    mixture = {"kind": "mixture", "environments": {"calc": {"kind": "calculator"}}}
    assert parse_config(tree | {"environment": mixture}).train.algorithm.environments["calc"].mask_truncated


class ClipsByTruncation(PolicyGradientAlgorithm):
    """A custom algorithm with a loss that depends on a key of an environment."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.model_copy(update={"clip_high": 0.1 + config.mask_truncated}))

    def advantages(self, sequences: TrainingSequences, rewards: Rewards, groups: Groups) -> np.ndarray:
        return rewards.values


def test_an_algorithm_of_ones_own_whose_loss_would_differ_is_refused() -> None:
    own = section(
        kind="custom",
        target="tests.training.test_by_environment:ClipsByTruncation",
        environments={"words": {"mask_truncated": True}},
    )
    with pytest.raises(ConfigError, match=r"environments\.words changes the loss on tokens"):
        build_algorithm(own)
