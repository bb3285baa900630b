from __future__ import annotations

import math

import pyarrow as pa
import pytest
import torch

from roundhouse.config.models import TrainConfig
from roundhouse.errors import DataError
from roundhouse.stages.freshness import staleness_metrics
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.trainer import Trainer
from roundhouse.trajectories.schemas import SEQUENCES
from tests.training.tiny import make_model, records


def table(rows: list[dict]) -> pa.Table:
    whole = [dict.fromkeys(SEQUENCES.names) | row for row in rows]
    return pa.Table.from_pylist(whole, schema=SEQUENCES)


def row(version: int, mask: list[int], gen: list[float], spans: list[tuple[int, int, int]] = ()) -> dict:
    return {
        "token_ids": [1] * len(mask),
        "loss_mask": mask,
        "gen_logprobs": gen,
        "policy_version": version,
        "version_spans": [{"version": v, "start": a, "end": b} for v, a, b in spans],
    }


def columns(rows: list[list[float] | None]) -> pa.Table:
    return pa.table({"trainer_logprobs": pa.array(rows, pa.list_(pa.float32()))})


def test_each_token_has_the_age_of_its_span():
    sequences = table(
        [row(3, [0, 1, 1, 1], [0, -1, -1, -1], [(3, 0, 2), (4, 2, 4)]), row(5, [0, 1], [0, -2]), row(1, [1], [-1])]
    )
    found = staleness_metrics(sequences, columns([[0, -1.5, -1, -1], [0, -2], None]), 5)
    assert found["staleness/age_max"] == 2
    assert found["staleness/age_mean"] == (2 + 1 + 1 + 0) / 4
    assert found["staleness/sequences_mixed"] == pytest.approx(1 / 3)
    assert [found[f"staleness/share/age_{age}"] for age in (0, 1, 2)] == [0.25, 0.5, 0.25]
    assert found["staleness/logprob_abs_diff/age_2"] == 0.5
    assert found["staleness/importance_ratio/age_2"] == pytest.approx(math.exp(-0.5))
    assert found["staleness/ess/age_1"] == 1


def test_a_token_newer_than_the_weights_is_an_error():
    with pytest.raises(DataError, match="version 6 is trained on from version 5"):
        staleness_metrics(table([row(6, [1], [-1])]), columns([[-1]]), 5)


def test_tables_of_two_steps_are_told_apart():
    with pytest.raises(DataError, match="2 rows of columns for 1 sequences"):
        staleness_metrics(table([row(0, [1], [-1])]), columns([[-1], [-1]]), 0)
    with pytest.raises(DataError, match="2 trainer log-probabilities for 1 tokens"):
        staleness_metrics(table([row(0, [1], [-1])]), columns([[-1, -1]]), 0)


def test_where_nothing_was_computed_there_is_nothing_to_say():
    assert staleness_metrics(table([]), columns([]), 0) == {}
    assert staleness_metrics(table([row(0, [1], [-1])]), columns([None]), 0) == {}


def test_older_weights_show_in_the_metrics_of_a_real_trainer(tmp_path):
    torch.manual_seed(0)
    rows = [record | {"policy_version": index % 2} for index, record in enumerate(records(2, 4))]
    trainer = Trainer.load(make_model(tmp_path), TrainConfig(minibatches=1, threads=1))
    before = trainer.log_probs(TrainingSequences.from_records(rows))
    at = 0
    for record in rows:  # version 1 is the trainer's own; version 0 was another policy
        count = len(record["token_ids"])
        own = before[at : at + count]
        record["gen_logprobs"] = [float(v) - (0.3 if record["policy_version"] == 0 and v else 0) for v in own]
        at += count
    report = trainer.step(TrainingSequences.from_records(rows), 2)
    found = staleness_metrics(table(rows), report.columns, 1)
    assert found["staleness/logprob_abs_diff/age_0"] == pytest.approx(0, abs=1e-5)
    assert found["staleness/logprob_abs_diff/age_1"] == pytest.approx(0.3, abs=1e-5)
