from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from roundhouse.config.algorithms import GRPOConfig, PPOConfig
from roundhouse.config.models import OptimizerConfig, TrainConfig
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.metrics import METRICS
from roundhouse.training.packing import Microbatch, build_microbatches
from roundhouse.training.service.verbs import Role, TokenBatch
from roundhouse.training.trainer import Trainer, TrainStep, plan_updates
from tests.training import reference
from tests.training.tiny import make_model, plain_model, record, records, sequences

BETA = 0.9


def _config(*, minibatches: int = 1, grpo: dict[str, Any] | None = None, **changes: Any) -> TrainConfig:
    """One update, no gradient clipping and no correction of the engine's random log-probabilities, unless set."""
    optimizer = OptimizerConfig(learning_rate=1e-3, betas=(BETA, 0.95), warmup_steps=0, max_grad_norm=1e9)
    return TrainConfig(
        algorithm=GRPOConfig(**{"mismatch_correction": "none"} | (grpo or {})),
        **{"optimizer": optimizer, "minibatches": minibatches, "threads": 1, "device": "cpu"} | changes,
    )  # fmt: skip


def _gradient(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The gradient of a first update, read back from AdamW's first moment."""
    state = trainer.engine.optimizer.state
    return {name: state[p]["exp_avg"] / (1 - BETA) for name, p in trainer.model.named_parameters()}


def _relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    difference = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    return (difference / sum(float(value.double().square().sum()) for value in expected.values())) ** 0.5


def _plain_gradient(
    model_dir: Path, rows: list[dict[str, Any]], **options: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    model = plain_model(model_dir)
    given = reference.advantages(rows, normalize=True, leave_one_out=False)
    loss = reference.loss(model, rows, given, **options)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(
    ("grpo", "plain"),
    [
        ({}, {}),
        ({"loss_aggregation": "sequence"}, {"aggregation": "sequence"}),
        ({"mismatch_correction": "tis"}, {"correction": "tis", "bounds": (0.0, 2.0)}),
        ({"mismatch_correction": "icepop"}, {"correction": "icepop"}),
        ({"entropy_coefficient": 0.02}, {"entropy_coefficient": 0.02}),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, {"kl_coefficient": 0.1, "kl_kind": "k1"}),
        ({"kl_coefficient": 0.1, "kl_estimator": "k2"}, {"kl_coefficient": 0.1, "kl_kind": "k2"}),
        ({"kl_coefficient": 0.1, "kl_estimator": "k3"}, {"kl_coefficient": 0.1, "kl_kind": "k3"}),
    ],
    ids=str,
)
def test_the_gradient_of_a_step_equals_the_plain_reference(
    model_dir: Path, reference_dir: Path, packing: bool, grpo: dict[str, Any], plain: dict[str, Any]
) -> None:
    rows = records(groups=3, size=4)
    if "kl_coefficient" in plain:
        plain = {**plain, "reference": plain_model(reference_dir)}
    loss, expected = _plain_gradient(model_dir, rows, **plain)
    config = _config(grpo=grpo, packing=packing, tokens_per_microbatch=150)
    trainer = Trainer.load(model_dir, config, reference_dir=reference_dir)
    report = trainer.step(TrainingSequences.from_records(rows), 1)
    assert report.metrics["num_microbatches"] > 1
    assert report.metrics["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert _relative(_gradient(trainer), expected) < 2e-6


@pytest.mark.parametrize("algorithm", [GRPOConfig(), PPOConfig(kind="ppo")], ids=["policy", "with a critic"])
def test_a_checkpoint_keeps_generation_defaults_that_transformers_does_not_save(
    tmp_path: Path, algorithm: GRPOConfig | PPOConfig
) -> None:
    """Many published models set a temperature without do_sample."""
    directory, saved, again = make_model(tmp_path / "model"), tmp_path / "saved", tmp_path / "again"
    given = b'{"temperature": 0.7,  "top_p": 0.8, "top_k": 20}'
    (directory / "generation_config.json").write_bytes(given)
    config = TrainConfig(threads=1, device="cpu", algorithm=algorithm)
    trainer = Trainer.load(directory, config)
    trainer.save(saved)
    assert trainer.model.generation_config.temperature == 0.7
    Trainer.load(saved, config, trainer_state=saved / "trainer").save(again)
    assert [(each / "generation_config.json").read_bytes() for each in (saved, again)] == [given, given]


def test_packed_padded_and_accumulated_gradients_agree_to_rounding(model_dir: Path) -> None:
    """Whole batch, uneven microbatches, one sequence a microbatch; packed and padded: the same gradient."""
    batch = sequences(4, 6)
    found = {}
    for packing in (True, False):
        for budget in (100_000, 170, 60, 1):
            trainer = Trainer.load(model_dir, _config(packing=packing, tokens_per_microbatch=budget))
            trainer.step(batch, 1)
            found[packing, budget] = _gradient(trainer)
    whole = found[True, 100_000]
    assert max(_relative(gradient, whole) for gradient in found.values()) < 1e-6


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(
    "saving",
    [{"logits_chunk_tokens": 5}, {"logits_chunk_tokens": 10_000}, {"activation_checkpointing": True}],
    ids=str,
)
def test_what_saves_memory_changes_neither_loss_nor_gradient(
    model_dir: Path, packing: bool, saving: dict[str, Any]
) -> None:
    found = []
    for changes in ({}, saving):
        config = _config(grpo={"entropy_coefficient": 0.02}, packing=packing, tokens_per_microbatch=170, **changes)
        trainer = Trainer.load(model_dir, config, temperature=0.8)
        report = trainer.step(sequences(4, 6), 1)
        found.append((_gradient(trainer), report.metrics))
    (plain, before), (saved, after) = found
    assert _relative(saved, plain) < 1e-6
    for metric in ("loss", "policy_loss", "entropy", "grad_norm"):
        assert after[metric] == pytest.approx(before[metric], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 2}}], ids=["all weights", "adapter"])
def test_recomputed_activations_are_not_kept_for_backward(model_dir: Path, changes: dict[str, Any]) -> None:
    kept = []
    for recomputed in (False, True):
        config = _config(activation_checkpointing=recomputed, logits_chunk_tokens=8, **changes)
        trainer = Trainer.load(model_dir, config)
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = trainer.engine._scorer(Role.POLICY).predict(one_microbatch(sequences(2, 4))).log_probs.sum()
        weights = {parameter.untyped_storage().data_ptr() for parameter in trainer.model.parameters()}
        kept.append(sum(size for place, size in saved.items() if place not in weights))
        loss.backward()
    assert kept[1] < 0.5 * kept[0]


def one_microbatch(batch: TrainingSequences) -> Microbatch:
    tokens = TokenBatch.of(batch, list(range(len(batch))), batch.loss_mask)
    [found] = build_microbatches(tokens, range(len(tokens)), tokens.predicted, budget=100_000, packed=True, dealer=None)
    return found


def test_which_sequences_an_update_holds_does_not_depend_on_their_lengths(model_dir: Path) -> None:
    """The same rollouts with other tokens appended to their prompts are split into updates in the same way."""
    rows = records(groups=3, size=4)
    longer = [
        row
        | {
            "token_ids": [1] * (7 * i) + row["token_ids"],
            "loss_mask": [0] * (7 * i) + row["loss_mask"],
            "gen_logprobs": [0.0] * (7 * i) + row["gen_logprobs"],
        }
        for i, row in enumerate(rows)
    ]
    held = []
    for chosen in (rows, longer):
        trainer = Trainer.load(model_dir, _config(minibatches=3, tokens_per_microbatch=200))
        held.append(TrainStep(trainer.learner, TrainingSequences.from_records(chosen), 1).batches)
    assert held[0] == held[1]


def test_temperature_divides_the_logits(model_dir: Path) -> None:
    rows = records(groups=2, size=4)
    _, expected = _plain_gradient(model_dir, rows, temperature=0.7)
    trainer = Trainer.load(model_dir, _config(), temperature=0.7)
    trainer.step(TrainingSequences.from_records(rows), 1)
    assert _relative(_gradient(trainer), expected) < 2e-6


@pytest.mark.parametrize("epochs", [1, 2])
def test_several_updates_equal_a_plain_loop_with_old_log_probabilities_from_the_start(
    model_dir: Path, epochs: int
) -> None:
    rows = records(groups=3, size=5)
    updates, seed, iteration, rate = 3, 7, 4, 0.02
    model = plain_model(model_dir)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(BETA, 0.95), weight_decay=0.0)
    given = reference.advantages(rows, normalize=True, leave_one_out=False)
    old = {
        row["sequence_id"]: {p: float(v.detach()) for p, v in reference.log_probs(model, row)[0].items()}
        for row in rows
    }
    trained = [s for s, advantage in enumerate(given) if advantage is not None]
    for indices in plan_updates(trained, range(len(rows)), updates, epochs, seed, iteration):
        loss = reference.loss(model, [rows[i] for i in indices], [given[i] for i in indices], old=old)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer_config = OptimizerConfig(learning_rate=rate, betas=(BETA, 0.95), warmup_steps=0, max_grad_norm=1e9)
    trainer = Trainer.load(
        model_dir, _config(minibatches=updates, epochs=epochs, optimizer=optimizer_config), seed=seed
    )
    report = trainer.step(TrainingSequences.from_records(rows), iteration)
    assert report.updates == updates * epochs
    assert report.metrics["clip_fraction"] > 0.05  # the ratio matters in this test
    start = {name: p.detach() for name, p in plain_model(model_dir).named_parameters()}
    moved = {name: p.detach() - start[name] for name, p in trainer.model.named_parameters()}
    assert _relative(moved, {name: p.detach() - start[name] for name, p in model.named_parameters()}) < 1e-3


def test_groups_without_spread_change_neither_the_gradient_nor_its_denominator(model_dir: Path) -> None:
    rows = records(groups=3, size=4)
    teaching = [row for row in rows if row["group_id"] != "g2"]
    gradients = []
    for chosen in (rows, teaching):
        trainer = Trainer.load(model_dir, _config())
        report = trainer.step(TrainingSequences.from_records(chosen), 1)
        assert report.metrics["num_valid_samples"] == len(teaching)
        assert report.metrics["global_valid_toks"] == sum(sum(row["loss_mask"]) for row in teaching)
        gradients.append(_gradient(trainer))
    assert _relative(*gradients) == 0


def test_without_any_spread_the_weights_stay_and_the_mismatch_is_still_measured(model_dir: Path) -> None:
    rows = [record(f"{i}", f"g{i // 2}", 1.0) for i in range(6)]
    trainer = Trainer.load(model_dir, _config(minibatches=4))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    report = trainer.step(TrainingSequences.from_records(rows), 1)
    assert report.updates == 0
    assert report.metrics["baseline_reward/pct_1"] == 100
    assert report.metrics["token_mult_prob_error"] > 1
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert report.columns.column("trained").to_pylist() == [False] * 6
    assert None not in report.columns.column("trainer_logprobs").to_pylist()


@pytest.mark.parametrize("updates", [1, 3])
def test_saved_and_loaded_between_steps_is_bit_for_bit_the_uninterrupted_run(
    model_dir: Path, reference_dir: Path, tmp_path: Path, updates: int
) -> None:
    config = TrainConfig(minibatches=updates, threads=1, device="cpu", algorithm=GRPOConfig(kl_coefficient=0.01))
    batches = [sequences(4, 6, seed=seed) for seed in range(4)]
    through = Trainer.load(model_dir, config, reference_dir=reference_dir, seed=5)
    for iteration, batch in enumerate(batches, 1):
        through.step(batch, iteration)
    through.save(tmp_path / "through")
    source = model_dir
    for part in (0, 1):
        state = source / "trainer" if part else None
        resumed = Trainer.load(source, config, trainer_state=state, reference_dir=reference_dir, seed=5)
        for iteration in (2 * part + 1, 2 * part + 2):
            resumed.step(batches[iteration - 1], iteration)
        source = tmp_path / f"part{part}"
        resumed.save(source)
    for name in ("model.safetensors", "trainer/optimizer.safetensors"):
        expected, found = load_file(tmp_path / "through" / name), load_file(source / name)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
        assert (tmp_path / "through" / name).read_bytes() == (source / name).read_bytes()
    assert (tmp_path / "through/trainer/state.json").read_text() == (source / "trainer/state.json").read_text()


def test_a_model_is_saved_over_the_files_that_it_was_loaded_from(model_dir: Path, tmp_path: Path) -> None:
    """Its weights are views of them until they are trained; this once ended the process."""
    config, place = TrainConfig(threads=1, device="cpu"), tmp_path / "place"
    Trainer.load(model_dir, config).save(place)
    expected = load_file(model_dir / "model.safetensors")
    Trainer.load(place, config, trainer_state=place / "trainer").save(place)
    found = load_file(place / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_step_does_not_touch_or_depend_on_global_random_state_or_thread_count_of_others(model_dir: Path) -> None:
    batch, weights = sequences(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        before = torch.get_rng_state()
        torch.set_num_threads(2)
        threads = torch.get_num_threads()  # 1 where another library of this process keeps OpenMP to one
        trainer = Trainer.load(model_dir, _config(minibatches=3))
        trainer.step(batch, 1)
        assert torch.get_num_threads() == threads
        assert torch.equal(torch.get_rng_state(), before)
        weights.append({name: p.detach() for name, p in trainer.model.named_parameters()})
    assert _relative(*weights) == 0


def test_shuffling_depends_on_seed_iteration_and_epoch_and_covers_every_sequence_each_epoch() -> None:
    plan = plan_updates(range(10), range(10), 4, 2, seed=0, iteration=3)
    assert [len(part) for part in plan] == [2, 3, 3, 2] * 2
    for epoch in (plan[:4], plan[4:]):
        assert sorted(i for part in epoch for i in part) == list(range(10))
    assert plan[:4] != plan[4:]
    assert plan == plan_updates(range(10), range(10), 4, 2, seed=0, iteration=3)
    assert plan != plan_updates(range(10), range(10), 4, 2, seed=1, iteration=3)
    assert plan != plan_updates(range(10), range(10), 4, 2, seed=0, iteration=4)
    assert [len(part) for part in plan_updates([4, 5], range(6), 4, 1, 0, 0)] == [1, 1]
    assert plan_updates([], [], 4, 2, 0, 0) == []


def test_the_sequences_of_a_rollout_stay_in_one_update() -> None:
    rollouts = [0, 1, 0, 2, 1, 0]
    plan = plan_updates(range(6), rollouts, 3, 1, seed=0, iteration=1)
    assert sorted(plan) == [[0, 2, 5], [1, 4], [3]]


def test_gradients_are_clipped_to_the_norm_and_the_rate_warms_up_over_the_whole_run(
    model_dir: Path, tmp_path: Path
) -> None:
    optimizer = OptimizerConfig(learning_rate=1e-3, betas=(BETA, 0.95), warmup_steps=4, max_grad_norm=1e-3)
    config = _config(minibatches=3, optimizer=optimizer)
    trainer = Trainer.load(model_dir, config)
    first = trainer.step(sequences(), 1)
    assert first.metrics["lr"] == pytest.approx(0.75e-3)
    assert first.metrics["grad_norm"] > 1e-3
    moments = [trainer.engine.optimizer.state[p]["exp_avg"] for p in trainer.model.parameters()]
    assert sum(float(m.square().sum()) for m in moments) ** 0.5 < 1e-3
    trainer.save(tmp_path)
    resumed = Trainer.load(tmp_path, config, trainer_state=tmp_path / "trainer")
    assert resumed.step(sequences(seed=1), 2).metrics["lr"] == pytest.approx(1e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_loads_in_transformers_with_the_trainers_log_probabilities(tmp_path: Path, tied: bool) -> None:
    source = make_model(tmp_path / "source", tied=tied)
    trainer = Trainer.load(source, _config(minibatches=2))
    rows = records()
    trainer.step(TrainingSequences.from_records(rows), 1)
    trainer.save(tmp_path / "saved")
    stored = load_file(tmp_path / "saved/model.safetensors")
    assert ("lm_head.weight" in stored) is not tied
    assert stored.keys() == load_file(source / "model.safetensors").keys()
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "saved" / name).read_text() == (source / name).read_text()
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert config == json.loads((source / "config.json").read_text())
    batch = TrainingSequences.from_records(rows)
    ours = trainer.log_probs(batch)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager").eval()
    with torch.no_grad():
        theirs = [float(v) for row in rows for v in reference.log_probs(plain, row)[0].values()]
    np.testing.assert_allclose(ours[batch.loss_mask], theirs, rtol=0, atol=1e-5)


def test_a_report_explains_every_metric_and_has_a_row_for_every_sequence(model_dir: Path) -> None:
    rows = records()
    trainer = Trainer.load(model_dir, _config(minibatches=2))
    report = trainer.step(TrainingSequences.from_records(rows), 1)
    assert report.metrics.keys() <= METRICS.keys()
    assert all(np.isfinite(value) for value in report.metrics.values())
    table = report.columns.to_pylist()
    given = reference.advantages(rows, normalize=True, leave_one_out=False)
    assert [row["sequence_id"] for row in table] == [row["sequence_id"] for row in rows]
    assert [row["trained"] for row in table] == [advantage is not None for advantage in given]
    assert [row["advantage"] for row in table] == pytest.approx([advantage or 0.0 for advantage in given])
    for row, source in zip(table, rows, strict=True):
        if row["trained"]:
            assert [value is not None for value in row["trainer_logprobs"]] == [bool(m) for m in source["loss_mask"]]
    assert report.seconds["total"] >= report.seconds["updates"] > 0
    assert report.tokens["received"] == sum(len(row["token_ids"]) for row in rows)


def test_bfloat16_computes_nearly_the_same_gradient_with_float32_weights(model_dir: Path) -> None:
    gradients = []
    for dtype in ("float32", "bfloat16"):
        trainer = Trainer.load(model_dir, _config(dtype=dtype))
        trainer.step(sequences(), 1)
        assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
        gradients.append(_gradient(trainer))
    assert 0 < _relative(gradients[1], gradients[0]) < 0.05
