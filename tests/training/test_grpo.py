from __future__ import annotations

import numpy as np
import pytest

from roundhouse.config.algorithms import GRPOConfig
from roundhouse.training.algorithms.built_in import GroupRelative
from roundhouse.training.algorithms.policy_gradient import Groups
from roundhouse.training.batch import TrainingSequences
from tests.training import reference
from tests.training.tiny import record, records


def _signals(rows: list[dict[str, object]], **switches: object):
    return GroupRelative(GRPOConfig(**switches)).compute(TrainingSequences.from_records(rows))  # type: ignore[arg-type]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_advantages_equal_the_plain_reference(normalize: bool, leave_one_out: bool) -> None:
    rows = records(groups=6, size=5)
    rows += [record("split/0", "g0", 1.0, rollout="split"), record("split/1", "g0", 0.0, rollout="split")]
    signals = _signals(rows, normalize_by_std=normalize, leave_one_out=leave_one_out)
    expected = reference.advantages(rows, normalize=normalize, leave_one_out=leave_one_out)
    assert None in expected
    np.testing.assert_allclose(signals.sequence_columns["advantage"], [a or 0.0 for a in expected], rtol=1e-12)


def test_a_rollout_of_several_sequences_counts_once() -> None:
    split = [record(f"a/{i}", "g", 1.0, rollout="a") for i in range(3)] + [record("b", "g", 0.0, rollout="b")]
    groups = Groups.of(TrainingSequences.from_records(split))
    assert groups.means.tolist() == [0.5]
    assert groups.sizes.tolist() == [2]
    signals = _signals(split, normalize_by_std=False)
    np.testing.assert_allclose(signals.sequence_columns["advantage"], [0.5, 0.5, 0.5, -0.5])
    assert signals.metrics["reward"] == 0.5
    assert signals.metrics["num_rollouts"] == 2


BRANCHED = {"a": ("g", 1.0, None), "b": ("g", 0.0, None), "c": ("g", 0.0, None)} | {
    f"a@2/{sample}": ("a@2", reward, "a") for sample, reward in enumerate([0.0, 0.0, 0.5])
}


@pytest.mark.parametrize(
    ("switches", "of_tasks", "of_branches"),
    [
        # the mean of 1, 0, 0 is 1/3; that of the branches' 0, 0, 0.5 with a's 1 is 0.375
        ({"normalize_by_std": False}, [2 / 3, -1 / 3, -1 / 3], [-0.375, -0.375, 0.125]),
        # less the mean of the others: for the first branch that of 0, 0.5 and 1
        ({"normalize_by_std": False, "leave_one_out": True}, [1.0, -0.5, -0.5], [-0.5, -0.5, 1 / 6]),
        # over sqrt(1/3), and over sqrt((0.375² + 0.375² + 0.125² + 0.625²) / 3) = sqrt(0.6875 / 3)
        ({}, [2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5], [each / (0.6875 / 3) ** 0.5 for each in (-0.375, -0.375, 0.125)]),
    ],
    ids=["mean", "leave_one_out", "normalized"],
)
def test_branches_are_compared_with_each_other_and_with_the_rollout_that_they_left(
    switches: dict[str, object], of_tasks: list[float], of_branches: list[float]
) -> None:
    rows = [
        record(name, group, reward) | {"branched_from": origin} for name, (group, reward, origin) in BRANCHED.items()
    ]
    signals = _signals(rows, **switches)
    np.testing.assert_allclose(signals.sequence_columns["advantage"], of_tasks + of_branches, rtol=1e-5)
    assert signals.metrics["num_rollouts"] == 6, "the rollout that they left counts once"


def test_branches_that_all_end_alike_teach_by_the_rollout_that_they_left_and_nothing_without_it() -> None:
    rows = [record(f"a@2/{i}", "a@2", 0.0) | {"branched_from": "a"} for i in range(2)]
    assert not _signals(rows).columns.trained.any(), "it is not among the sequences"
    rows += [record("a", "g", 1.0) | {"branched_from": None}, record("b", "g", 0.0) | {"branched_from": None}]
    np.testing.assert_allclose(
        _signals(rows, normalize_by_std=False).sequence_columns["advantage"], [-1 / 3, -1 / 3, 0.5, -0.5]
    )


def test_a_group_without_spread_has_no_weight_in_any_term_and_is_counted() -> None:
    rows = [
        *(record(f"zero{i}", "zero", 0.0) for i in range(2)),
        *(record(f"one{i}", "one", 1.0) for i in range(2)),
        *(record(f"flat{i}", "flat", 0.1 + 0.2 * (i % 2) - 0.2 * (i % 2)) for i in range(2)),  # equal but for rounding
        *(record(f"mixed{i}", "mixed", float(i)) for i in range(2)),
    ]
    signals = _signals(rows, kl_coefficient=0.1, entropy_coefficient=0.01)
    batch = TrainingSequences.from_records(rows)
    mixed = np.isin(batch.sequence_of_token, [6, 7]) & batch.loss_mask
    np.testing.assert_array_equal(signals.columns.trained, mixed)
    for weights in (signals.columns.reference_kl_weights, signals.columns.entropy_weights, signals.columns.advantages):
        np.testing.assert_array_equal(weights != 0, mixed)
    for kind in ("0", "1", "flat", "mixed"):
        assert signals.metrics[f"baseline_reward/pct_{kind}"] == 25.0


def test_a_group_of_one_teaches_nothing_and_is_no_nan() -> None:
    for leave_one_out in (False, True):
        signals = _signals([record("a", "g", 0.7)], leave_one_out=leave_one_out)
        assert signals.sequence_columns["advantage"].tolist() == [0.0]
        assert not signals.columns.trained.any()


def test_a_middling_rollout_of_a_mixed_group_still_counts_although_its_advantage_is_zero() -> None:
    signals = _signals([record("a", "g", 0.0), record("b", "g", 0.5), record("c", "g", 1.0)])
    assert signals.sequence_columns["advantage"][1] == 0
    assert (
        signals.columns.trained.sum()
        == signals.columns.policy_weights.sum()
        == sum(sum(record(name, "g", 0.0)["loss_mask"]) for name in "abc")
    )
