"""Sequences that contradict the weights: found wherever a policy is certain, and without influence on the gradient."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
import torch

from roundhouse.config.loading import parse_config
from roundhouse.config.models import OptimizerConfig, TrainConfig
from roundhouse.stages.freshness import drift, staleness_metrics
from roundhouse.stages.validate import mismatched
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.trainer import Trainer
from roundhouse.trajectories.schemas import tolerances
from tests.training.bigram import BigramService, trainer_over

TOKENS, FORGED = 40, 30
CERTAIN = 60.0
"""Logits so far above the others that float32 gives the token a log-probability of exactly 0."""


def certain_policy() -> torch.Tensor:
    """After token 0 comes 1, after 1 comes 1, for certain; after 2 anything."""
    logits = torch.zeros(4, 4)
    logits[:2, 1] = CERTAIN
    return logits


def records(recorded: float) -> list[dict]:
    """Two sequences of 30 tokens that the policy is certain of and 10 that it is not; the second is recorded otherwise."""
    ids = [0] + [1] * FORGED + [2] * (TOKENS - FORGED)
    true = [0.0] * (FORGED + 1) + [-CERTAIN] + [-math.log(4)] * (TOKENS - FORGED - 1)
    forged = [0.0, *[recorded] * FORGED, *true[FORGED + 1 :]]
    return [
        {
            "sequence_id": name,
            "rollout_id": name,
            "group_id": "g",
            "token_ids": ids,
            "loss_mask": [0] + [1] * TOKENS,
            "gen_logprobs": log_probs,
            "policy_version": 0,
            "reward": reward,
        }
        for name, log_probs, reward in (("true", true, 1.0), ("forged", forged, 0.0))
    ]


def trained(rows: list[dict], **algorithm: object) -> tuple[pa.Table, Trainer]:
    config = TrainConfig.model_validate({"minibatches": 1, "algorithm": algorithm})
    trainer = trainer_over(BigramService(certain_policy()), config)
    return trainer.step(TrainingSequences.from_records(rows), 1).columns, trainer


def test_forged_tokens_that_the_policy_is_certain_of_are_all_counted() -> None:
    rows = records(-6.0)
    columns, _ = trained(rows)
    assert columns["trainer_logprobs"][1].as_py()[1 : FORGED + 1] == [0.0] * FORGED
    assert columns["trainer_logprobs"][1].as_py()[0] is None, "nothing predicts the first token"
    (found,) = mismatched(pa.Table.from_pylist(rows), columns, policy_version=0, tolerance=0.25).to_pylist()
    assert (found["sequence_id"], found["tokens"]) == ("forged", TOKENS)
    assert found["mean_difference"] == pytest.approx(6.0 * FORGED / TOKENS)


def test_certain_tokens_count_in_staleness_and_in_the_offline_refusal() -> None:
    rows = records(-2.0)
    columns, _ = trained(rows)
    sequences = pa.Table.from_pylist([row | {"version_spans": []} for row in rows])
    metrics = staleness_metrics(sequences, columns, 1)
    assert metrics["staleness/logprob_abs_diff/age_1"] == pytest.approx(2.0 * FORGED / (2 * TOKENS))
    config = parse_config({"run_id": "r", "train": {"algorithm": {"mismatch_correction": "tis"}}})
    found = drift(config, sequences, columns)
    assert found is not None
    assert found.tokens == 2 * TOKENS
    assert found.clipped == FORGED / (2 * TOKENS)


def test_columns_of_a_store_of_before_are_read_by_their_zeros() -> None:
    rows = records(-6.0)
    columns, _ = trained(rows)
    filled = [[value or 0.0 for value in row] for row in columns["trainer_logprobs"].to_pylist()]
    old = pa.table({"trainer_logprobs": pa.array(filled, pa.list_(pa.float32()))})
    changed = [row | {"gen_logprobs": [value - 1 for value in row["gen_logprobs"]]} for row in rows]
    found = mismatched(pa.Table.from_pylist(changed), old, policy_version=0, tolerance=0.25).to_pylist()
    assert [row["tokens"] for row in found] == [TOKENS - FORGED] * 2


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize(
    "algorithm",
    [
        {"kind": "grpo", "entropy_coefficient": 0.0, "kl_coefficient": 0.1},
        {"kind": "gspo", "mismatch_correction": "tis"},
        {"kind": "cross_entropy"},
    ],
    ids=str,
)
def test_a_sequence_that_the_weights_do_not_bear_out_has_no_part_in_the_gradient(
    algorithm: dict[str, object], updates: int
) -> None:
    """Whatever stands in its log-probabilities, in a first update, where they are computed in passing, and in later ones."""
    generator = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 4, 4, generator=generator)
    log_probs = torch.log_softmax(logits, -1)
    config = TrainConfig.model_validate(
        {"minibatches": updates, "algorithm": algorithm, "optimizer": OptimizerConfig(warmup_steps=0)}
    )
    found = []
    for forged in (-7.0, -30.0):
        rows = []
        for i in range(6):
            ids = torch.randint(0, 4, (21,), generator=torch.Generator().manual_seed(i)).tolist()
            own = [0.0, *log_probs[ids[:-1], ids[1:]].tolist()]
            rows.append(records(0.0)[0] | {"sequence_id": str(i), "rollout_id": str(i), "reward": float(i % 2)})
            rows[-1] |= {"token_ids": ids, "loss_mask": [0] + [1] * 20, "gen_logprobs": own}
        rows[3]["gen_logprobs"] = [0.0] + [forged] * 20
        batch = TrainingSequences.from_records(rows)
        service = BigramService(logits, reference)
        report = trainer_over(service, config).step(batch, 1, tolerances(batch.policy_versions, 0, 0.25))
        assert report.metrics["num_mismatched_seqs"] == 1
        found.append(service.gradients)
    assert found[0] == found[1]
    judged = tolerances(np.array([0, 1]), 1, 0.25)
    assert judged is not None
    assert judged.tolist() == [0, 0.25], "sequences of other versions are not judged"
