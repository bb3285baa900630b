"""Whole steps of each algorithm on a real model, against plain loops; the KL controller over a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file

from roundhouse.config.algorithms import AlgorithmConfig, PolicyGradient
from roundhouse.config.models import OptimizerConfig, TrainConfig
from roundhouse.errors import ConfigError, DataError
from roundhouse.training.algorithms import AlgorithmInputs, build_algorithm
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.metrics import METRICS
from roundhouse.training.trainer import Trainer
from tests.training import reference
from tests.training.tiny import make_model, plain_model, record, records, sequences

BETA = 0.9


def _config(algorithm: dict[str, Any], **changes: Any) -> TrainConfig:
    optimizer = {"learning_rate": 1e-3, "betas": (BETA, 0.95), "warmup_steps": 0, "max_grad_norm": 1e9}
    base = {"optimizer": OptimizerConfig(**optimizer), "minibatches": 1, "threads": 1, "device": "cpu"}
    return TrainConfig(algorithm=TypeAdapter(AlgorithmConfig).validate_python(algorithm), **base | changes)


def _gradient(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The gradient of a first update, read back from AdamW's first moment."""
    state = trainer.engine.optimizer.state
    return {name: state[p]["exp_avg"] / (1 - BETA) for name, p in trainer.model.named_parameters()}


def _relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    difference = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    return (difference / sum(float(value.double().square().sum()) for value in expected.values())) ** 0.5


def _rows() -> list[dict[str, Any]]:
    """Uneven sequences near the engine, one rollout of two sequences, one truncated rollout, one group without spread."""
    rows = records(groups=3, size=4)
    rows += [record("split/0", "g0", 1.0, rollout="split"), record("split/1", "g0", 0.0, rollout="split")]
    rows[2]["truncated"] = True
    return rows


def _near(model: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Engine log-probabilities off the model's, token by token and sequence by sequence, so that corrections drop some.

    Those of one sequence are near enough to need no correction.
    """
    for s, row in enumerate(rows):
        far = 0.01 if s == 5 else 1.0
        for place, (position, value) in enumerate(reference.log_probs(model, row)[0].items()):
            row["gen_logprobs"][position] = float(value.detach()) + far * (
                0.6 * (place * 37 % 11 / 11 - 0.5) + 0.1 * (s % 5 - 2)
            )
    return rows


def _plain_gradient(
    directory: Path,
    rows: list[dict[str, Any]],
    algorithm: dict[str, Any],
    inputs: AlgorithmInputs = AlgorithmInputs(),
    **policy: Any,
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of one update, in loops, from the algorithm's columns."""
    model, batch = plain_model(directory), TrainingSequences.from_records(rows)
    config = TypeAdapter(AlgorithmConfig).validate_python(algorithm)
    columns = build_algorithm(config).compute(batch, inputs).columns
    if isinstance(config, PolicyGradient):
        policy = {"correction": config.mismatch_correction, "bounds": config.bounds} | policy
    terms, rollouts = [], []
    for s, row in enumerate(rows):
        first = int(batch.offsets[s])
        cur = reference.log_probs(model, row)[0]
        at = [position for position in cur if columns.trained[first + position]]
        if not at:
            continue
        policy_terms = reference.policy_terms(
            [cur[p] for p in at],
            [cur[p].detach() for p in at],
            [row["gen_logprobs"][p] for p in at],
            [float(columns.advantages[first + p]) for p in at],
            **policy,
        )
        weights = [float(columns.policy_weights[first + p]) for p in at]
        likelihood = [-float(columns.cross_entropy_weights[first + p]) * cur[p] for p in at]
        terms.append([w * a + b for w, a, b in zip(weights, policy_terms, likelihood, strict=True)])
        rollouts.append(row["rollout_id"])
    loss = reference.mean(terms, config.loss_aggregation, rollouts, length=config.fixed_length or 1)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"kind": "gspo"}, {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}),
    (
        {"kind": "gspo", "loss_aggregation": "rollout", "mismatch_correction": "icepop", "mismatch_bounds": [0.9, 1.1]},
        {"ratio": "sequence", "correction": "icepop", "bounds": (0.9, 1.1)},
    ),
    ({"kind": "cispo"}, {"kind": "cispo", "clip_low": 1.0, "clip_high": 4.0}),
    ({"kind": "dr_grpo"}, {}),
    ({"kind": "rloo", "policy_loss": "reinforce", "loss_aggregation": "rollout"}, {"kind": "reinforce"}),
    ({"kind": "dapo", "positive_nll_weight": 0.3}, {}),
    (
        {"kind": "grpo", "mismatch_correction": "seq-mask-tis", "mismatch_bounds": [0.97, 1.1]},
        {"correction": "seq-mask-tis", "bounds": (0.97, 1.1)},
    ),
    ({"kind": "grpo", "max_sequence_error": 1.2}, {"max_error": 1.2}),
    ({"kind": "reinforce_plus_plus", "kl_coefficient": 0}, {}),
    ({"kind": "cross_entropy"}, {}),
    ({"kind": "cross_entropy", "select": "best_of_group", "loss_aggregation": "sequence"}, {}),
]


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(("algorithm", "policy"), CASES, ids=[str(case[0]) for case in CASES])
def test_the_gradient_of_a_step_equals_plain_loops(
    model_dir: Path, packing: bool, algorithm: dict[str, Any], policy: dict[str, Any]
) -> None:
    rows = _near(plain_model(model_dir), _rows())
    loss, expected = _plain_gradient(model_dir, rows, algorithm, **policy)
    trainer = Trainer.load(model_dir, _config(algorithm, packing=packing, tokens_per_microbatch=40))
    report = trainer.step(TrainingSequences.from_records(rows), 1)
    assert report.metrics["num_microbatches"] > 1
    assert report.metrics["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert _relative(_gradient(trainer), expected) < 2e-6
    assert report.metrics.keys() <= METRICS.keys()
    drops = {"mismatch_correction", "max_sequence_error"} & algorithm.keys()
    dropped = report.metrics.get("correction_dropped", 0)
    assert 0 < dropped < 1 if drops else dropped == 0, "the correction drops some and keeps some"
    corrected = report.metrics.get("num_corrected_seqs")
    assert corrected is None or 0 < corrected < report.metrics["num_valid_samples"], "one sequence needs none"


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kind": "gspo", "loss_aggregation": "rollout", "mismatch_correction": "tis"},
        {"kind": "cispo"},
        {"kind": "dr_grpo", "mismatch_correction": "seq-mask-tis", "mismatch_bounds": [0.9, 1.2]},
        {"kind": "reinforce_plus_plus"},
    ],
    ids=str,
)
def test_however_an_update_is_cut_its_gradient_is_the_same(
    model_dir: Path, reference_dir: Path, algorithm: dict[str, Any]
) -> None:
    batch = TrainingSequences.from_records(_near(plain_model(model_dir), _rows()))
    found = []
    for packing in (True, False):
        for budget in (100_000, 130, 1):
            config = _config(algorithm, packing=packing, tokens_per_microbatch=budget)
            trainer = Trainer.load(model_dir, config, reference_dir=reference_dir)
            trainer.step(batch, 1)
            found.append(_gradient(trainer))
    assert max(_relative(gradient, found[0]) for gradient in found[1:]) < 1e-6


def _log_probs(model: Any, rows: list[dict[str, Any]]) -> np.ndarray:
    """[T] by plain loops."""
    found = []
    for row in rows:
        own = reference.log_probs(model, row)[0]
        found += [float(own[p].detach()) if p in own else 0.0 for p in range(len(row["token_ids"]))]
    return np.array(found, dtype=np.float32)


@pytest.mark.parametrize(
    ("algorithm", "policy"),
    [
        ({"kind": "reinforce_plus_plus", "kl_coefficient": 0.2}, {}),
        ({"kind": "rloo", "kl_coefficient": 0.2, "kl_placement": "reward"}, {}),
        ({"kind": "distillation", "teacher": "t"}, {"correction": "icepop"}),
    ],
    ids=str,
)
def test_what_an_algorithm_reads_of_policy_and_reference_is_what_they_say(
    model_dir: Path, reference_dir: Path, algorithm: dict[str, Any], policy: dict[str, Any]
) -> None:
    rows = _near(plain_model(model_dir), _rows())
    inputs = AlgorithmInputs(_log_probs(plain_model(model_dir), rows), _log_probs(plain_model(reference_dir), rows))
    loss, expected = _plain_gradient(model_dir, rows, algorithm, inputs, **policy)
    trainer = Trainer.load(model_dir, _config(algorithm), reference_dir=reference_dir)
    report = trainer.step(TrainingSequences.from_records(rows), 1)
    assert report.metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-5)
    assert _relative(_gradient(trainer), expected) < 2e-5
    assert report.seconds["forward_reference"] > 0


def test_distillation_takes_the_policy_to_its_teacher(tmp_path: Path) -> None:
    """On its own samples, with every reward 0."""
    policy_dir, teacher_dir = make_model(tmp_path / "policy"), make_model(tmp_path / "teacher", seed=1)
    optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=0)
    config = _config({"kind": "distillation", "teacher": str(teacher_dir)}, optimizer=optimizer, minibatches=2)
    trainer = Trainer.load(policy_dir, config, reference_dir=teacher_dir)
    distances = []
    for iteration in range(1, 16):
        torch.manual_seed(iteration)
        tokens = torch.zeros((64, 1), dtype=torch.long)
        log_probs = torch.zeros((64, 1))
        sampler = plain_model(policy_dir)
        sampler.load_state_dict(trainer.model.state_dict())
        with torch.no_grad():
            for _ in range(4):
                distribution = torch.log_softmax(sampler(input_ids=tokens).logits[:, -1], -1)
                drawn = torch.multinomial(distribution.exp(), 1)
                tokens = torch.cat([tokens, drawn], 1)
                log_probs = torch.cat([log_probs, distribution.gather(1, drawn)], 1)
        rows = [
            record(f"{i}", "g", 0.0) | {"token_ids": ids, "loss_mask": [0, 1, 1, 1, 1], "gen_logprobs": values}
            for i, (ids, values) in enumerate(zip(tokens.tolist(), log_probs.tolist(), strict=True))
        ]
        distances.append(trainer.step(TrainingSequences.from_records(rows), iteration).metrics["teacher_kl"])
    assert sum(distances[-3:]) < 0.5 * sum(distances[:3]), distances


@pytest.mark.parametrize(("placement", "factor"), [("loss", 1.24), ("reward", 0.76)])
def test_the_adaptive_kl_coefficient_survives_a_restart_bit_for_bit(
    model_dir: Path, reference_dir: Path, tmp_path: Path, placement: str, factor: float
) -> None:
    algorithm = {"kind": "grpo", "kl_coefficient": 0.1, "kl_placement": placement}
    config = _config(algorithm | {"adaptive_kl": {"target": 0.01, "horizon": 20}}, minibatches=2)
    batches = [sequences(4, 6, seed=seed) for seed in range(3)]
    through = Trainer.load(model_dir, config, reference_dir=reference_dir, seed=5)
    coefficients = [through.step(batch, i).metrics["kl_coefficient"] for i, batch in enumerate(batches, 1)]
    through.save(tmp_path / "through")
    # 24 rollouts, far from the target: a factor of 1 ± 0.2 * 24 / 20. k3 is above it; k1 below 0 on tokens that are nobody's
    assert coefficients == pytest.approx([0.1, 0.1 * factor, 0.1 * factor**2])
    source = model_dir
    for i, batch in enumerate(batches, 1):
        state = source / "trainer" if i > 1 else None
        resumed = Trainer.load(source, config, trainer_state=state, reference_dir=reference_dir, seed=5)
        resumed.step(batch, i)
        source = tmp_path / f"part{i}"
        resumed.save(source)
    assert (source / "trainer/state.json").read_text() == (tmp_path / "through/trainer/state.json").read_text()
    expected, found = (load_file(path / "model.safetensors") for path in (tmp_path / "through", source))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_rejection_sampling_without_a_good_rollout_makes_no_update(model_dir: Path) -> None:
    trainer = Trainer.load(
        model_dir, _config({"kind": "cross_entropy", "select": "threshold", "reward_threshold": 5.0})
    )
    report = trainer.step(sequences(), 1)
    assert report.updates == 0
    assert report.metrics["num_selected"] == 0


def test_supervised_training_lowers_the_cross_entropy_of_its_sequences(model_dir: Path) -> None:
    config = _config(
        {"kind": "cross_entropy"}, optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0), minibatches=2
    )
    trainer = Trainer.load(model_dir, config)
    values = [trainer.step(sequences(), iteration).metrics["nll"] for iteration in range(1, 9)]
    assert values[-1] < 0.7 * values[0]


def test_a_distillation_without_its_teacher_is_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="needs a teacher"):
        Trainer.load(model_dir, _config({"kind": "distillation", "teacher": "t"}))


def test_columns_that_are_not_finite_stop_the_step_before_any_update(model_dir: Path) -> None:
    target = "tests.training.test_algorithms:Broken"
    trainer = Trainer.load(model_dir, _config({"kind": "custom", "target": target}))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(DataError, match="Broken: column advantages"):
        trainer.step(sequences(), 1)
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert trainer.cursor.iteration is None
