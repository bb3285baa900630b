"""Refusals of the trainer, which leave the weights unchanged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from roundhouse.config.algorithms import GRPOConfig
from roundhouse.config.models import OptimizerConfig, TrainConfig
from roundhouse.errors import ConfigError, DataError
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.trainer import NonFiniteError, Trainer
from tests.training.tiny import make_model, record, records, sequences

CONFIG = TrainConfig(threads=1, device="cpu", minibatches=2)


def _weights(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.parametrize("updates", [1, 3])
def test_a_model_that_gives_nan_is_refused_before_any_weight_changes(model_dir: Path, updates: int) -> None:
    trainer = Trainer.load(model_dir, TrainConfig(threads=1, device="cpu", minibatches=updates))
    with torch.no_grad():
        trainer.model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    before = _weights(trainer)
    with pytest.raises(NonFiniteError, match=r"Iteration 9, update 1 of \d: (loss|old log-probability) is nan"):
        trainer.step(sequences(), 9)
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(_weights(trainer), before, strict=True))
    assert trainer.cursor.optimizer_steps == 0
    assert all(p.grad is None for p in trainer.model.parameters())


def test_an_infinite_gradient_is_refused_and_names_the_metric(model_dir: Path) -> None:
    trainer = Trainer.load(model_dir, CONFIG)
    before = _weights(trainer)
    trainer.model.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(NonFiniteError, match=r"Iteration 2, update 1 of 2: grad_norm is (nan|inf).*learning_rate"):
        trainer.step(sequences(), 2)
    assert all(torch.equal(a, b) for a, b in zip(_weights(trainer), before, strict=True))


def test_a_trainer_that_stopped_between_two_updates_refuses_to_go_on(model_dir: Path, tmp_path: Path) -> None:
    """Its weights belong to no version: neither a checkpoint nor another step may be made of them."""
    optimizer = OptimizerConfig(learning_rate=1e30, warmup_steps=0)
    trainer = Trainer.load(model_dir, TrainConfig(threads=1, device="cpu", minibatches=2, optimizer=optimizer))
    with pytest.raises(NonFiniteError, match="update 2 of 2"):
        trainer.step(sequences(), 1)
    for refused in (lambda: trainer.save(tmp_path), lambda: trainer.step(sequences(), 1)):
        with pytest.raises(DataError, match=r"loaded again.*iteration 1"):
            refused()


def test_the_same_iteration_is_not_trained_twice_on_the_same_weights(model_dir: Path, tmp_path: Path) -> None:
    trainer = Trainer.load(model_dir, CONFIG)
    trainer.step(sequences(), 3)
    trainer.save(tmp_path)
    resumed = Trainer.load(tmp_path, CONFIG, trainer_state=tmp_path / "trainer")
    for each in (trainer, resumed):
        with pytest.raises(DataError, match="already include iteration 3"):
            each.step(sequences(), 3)


def test_tokens_outside_the_vocabulary_and_sequences_beyond_the_positions_are_refused_by_name(model_dir: Path) -> None:
    trainer = Trainer.load(model_dir, CONFIG)
    foreign = record("foreign", "g", 1.0)
    foreign["token_ids"][2] = 64
    with pytest.raises(DataError, match=r"'foreign' has token id 64.*ends at 63"):
        trainer.step(TrainingSequences.from_records([record("a", "g", 0.0), foreign]), 1)
    long = record("long", "g", 1.0)
    long |= {"token_ids": [1] * 257, "loss_mask": [0] + [1] * 256, "gen_logprobs": [0.0] + [-1.0] * 256}
    with pytest.raises(DataError, match=r"'long' has 257 tokens.*256 positions"):
        trainer.step(TrainingSequences.from_records([record("a", "g", 0.0), long]), 1)


def test_a_sequence_longer_than_the_microbatch_budget_still_trains(model_dir: Path) -> None:
    config = TrainConfig(threads=1, device="cpu", minibatches=1, tokens_per_microbatch=8)
    report = Trainer.load(model_dir, config).step(sequences(), 1)
    assert report.metrics["num_microbatches"] >= report.metrics["num_valid_samples"] / 2


def test_a_missing_or_damaged_model_is_refused_with_its_path(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere has no config.json"):
        Trainer.load(tmp_path / "nowhere", CONFIG)
    damaged = make_model(tmp_path / "damaged")
    whole = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="damaged cannot be loaded"):
        Trainer.load(damaged, CONFIG)
    (damaged / "model.safetensors").unlink()
    with pytest.raises(DataError, match="damaged has no safetensors files"):
        Trainer.load(damaged, CONFIG)


def test_weights_that_lack_a_tensor_are_refused_instead_of_made_up(model_dir: Path, tmp_path: Path) -> None:
    """transformers would initialise the missing tensor at random and only warn."""
    directory = make_model(tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"missing keys model.layers.1.mlp.up_proj.weight"):
        Trainer.load(directory, CONFIG)


def test_an_lm_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    """transformers would untie the two and only warn, while the engine ties them: a silent mismatch."""
    directory = make_model(tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    for shift, refused in ((0.0, False), (0.1, True)):
        head = tensors["model.embed_tokens.weight"] + shift
        save_file({**tensors, "lm_head.weight": head}, directory / "model.safetensors", metadata={"format": "pt"})
        if refused:
            with pytest.raises(DataError, match="tie_word_embeddings"):
                Trainer.load(directory, CONFIG)
        else:
            Trainer.load(directory, CONFIG)


def test_trainer_state_that_is_damaged_or_of_another_model_is_refused(model_dir: Path, tmp_path: Path) -> None:
    trainer = Trainer.load(model_dir, CONFIG)
    trainer.step(sequences(), 1)
    trainer.save(tmp_path / "saved")
    other = make_model(tmp_path / "other", vocabulary=80)
    state = tmp_path / "saved/trainer"
    with pytest.raises(DataError, match=r"embed_tokens.*another architecture"):
        Trainer.load(other, CONFIG, trainer_state=state)
    (state / "state.json").write_text('{"optimizer_steps": "many"}')
    with pytest.raises(DataError, match=r"state.json cannot be read"):
        Trainer.load(tmp_path / "saved", CONFIG, trainer_state=state)
    (state / "state.json").write_text("{}")
    (state / "optimizer.safetensors").write_bytes(b"short")
    with pytest.raises(DataError, match=r"The optimizer state in .* cannot be read"):
        Trainer.load(tmp_path / "saved", CONFIG, trainer_state=state)


def test_a_kl_term_without_its_reference_or_with_another_vocabulary_is_refused(model_dir: Path, tmp_path: Path) -> None:
    config = TrainConfig(threads=1, device="cpu", algorithm=GRPOConfig(kl_coefficient=0.1))
    with pytest.raises(ConfigError, match=r"kl_coefficient is 0.1.*reference_dir"):
        Trainer.load(model_dir, config)
    other = make_model(tmp_path / "other", vocabulary=80)
    with pytest.raises(ConfigError, match="vocabulary of 80, the policy of 64"):
        Trainer.load(model_dir, config, reference_dir=other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.device is cuda"):
        Trainer.load(model_dir, TrainConfig(device="cuda"))


def test_retention_may_delete_the_directory_that_a_trainer_was_loaded_from(tmp_path: Path) -> None:
    """The trainer stays in memory between iterations, longer than the checkpoint it began with."""
    source = make_model(tmp_path / "source")
    trainer = Trainer.load(source, CONFIG)
    shutil.rmtree(source)
    trainer.step(TrainingSequences.from_records(records()), 1)
    trainer.save(tmp_path / "saved")
    assert (tmp_path / "saved/tokenizer.json").is_file()
