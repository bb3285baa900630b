"""Effects of each verb in process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from roundhouse.config.models import TrainConfig
from roundhouse.errors import DataError
from roundhouse.training.algorithms import LossSettings, TokenColumns
from roundhouse.training.checkpoint import Cursor
from roundhouse.training.service.engine import TrainEngine, unfit_for_gpu
from roundhouse.training.service.verbs import LossBatch, TokenBatch, token_positions
from tests.training.tiny import make_model, sequences

CONFIG = TrainConfig(threads=1, device="cpu")


@pytest.fixture
def engine(model_dir: Path) -> TrainEngine:
    engine = TrainEngine(CONFIG)
    engine.load_checkpoint(model_dir)
    return engine


def loss_batch(indices: list[int]) -> LossBatch:
    """These sequences of a batch, each token with the scale that all of the batch gives it."""
    every = sequences()
    chosen = token_positions(every, indices)
    mask = every.loss_mask[chosen].astype(np.float32)
    nothing = np.zeros_like(mask)
    return LossBatch(
        tokens=TokenBatch.of(every, indices, every.loss_mask),
        columns=TokenColumns(
            advantages=mask * np.where(every.sequence_of_token[chosen] % 2, 1.0, -0.5).astype(np.float32),
            policy_weights=mask,
            reference_kl_weights=nothing,
            entropy_weights=nothing,
            cross_entropy_weights=nothing,
        ),
        gen_logprobs=every.gen_logprobs[chosen],
        scale=np.full_like(mask, 1 / every.loss_mask.sum()),
        loss=LossSettings(),
    )


def gradient(engine: TrainEngine) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in engine.model.parameters() if p.grad is not None])


def weights(engine: TrainEngine) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in engine.model.parameters()])


def test_gradients_of_several_calls_add_up_to_that_of_one(engine: TrainEngine) -> None:
    whole = engine.forward_backward(loss_batch(list(range(16))))
    expected = gradient(engine).clone()
    engine.optimizer.zero_grad()
    parts = [engine.forward_backward(loss_batch(indices)) for indices in ([3, 1, 0], [2, *range(4, 16)])]
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-5)
    assert float((gradient(engine) - expected).norm() / expected.norm()) < 1e-6


def test_forward_gives_the_log_probabilities_that_forward_backward_sees(engine: TrainEngine) -> None:
    batch = loss_batch(list(range(16)))
    seen = engine.forward_backward(batch).log_probs
    np.testing.assert_array_equal(engine.forward(batch.tokens), seen)
    assert (seen[~batch.tokens.predicted] == 0).all()
    assert (seen[batch.tokens.predicted] < 0).all()


def test_a_loss_that_is_not_finite_drops_the_gradient_of_the_calls_before(engine: TrainEngine) -> None:
    batch = loss_batch(list(range(16)))
    engine.forward_backward(batch)
    spoilt = replace(batch, scale=batch.scale * np.float32("inf"))
    assert not np.isfinite(engine.forward_backward(spoilt).loss)
    before = weights(engine)
    with pytest.raises(DataError, match="no gradient to apply"):
        engine.optim_step(1e-3, 1.0)
    assert torch.equal(weights(engine), before)


def test_loading_a_checkpoint_takes_everything_back_to_it(engine: TrainEngine, tmp_path: Path) -> None:
    """Weights, moments, step count and cursor: the next steps are equal."""
    batch = loss_batch(list(range(16)))

    def update() -> None:
        engine.forward_backward(batch)
        engine.optim_step(1e-2, 1.0)

    update()
    cursor = Cursor(optimizer_steps=1, iteration=4, seed=3)
    engine.save_checkpoint(tmp_path / "saved", cursor)
    update()
    update()
    after = weights(engine)
    engine.forward_backward(batch)  # a gradient that nothing must be left of
    found = engine.load_checkpoint(tmp_path / "saved", trainer_state=tmp_path / "saved/trainer")
    assert found == cursor
    update()
    update()
    assert torch.equal(weights(engine), after)


def test_a_checkpoint_of_another_architecture_is_refused_and_the_model_stays(
    engine: TrainEngine, tmp_path: Path
) -> None:
    before = weights(engine)
    with pytest.raises(DataError, match=r"another architecture.*embed_tokens.weight is \(80, 32\).*\(64, 32\)"):
        engine.load_checkpoint(make_model(tmp_path / "other", vocabulary=80))
    assert torch.equal(weights(engine), before)


def test_without_a_policy_every_verb_says_what_is_missing() -> None:
    empty, batch = TrainEngine(CONFIG), loss_batch([0, 1])
    for call in (
        lambda: empty.forward(batch.tokens),
        lambda: empty.optim_step(1e-3, 1.0),
        lambda: empty.facts(),
        lambda: empty.forward_backward(batch),
    ):
        with pytest.raises(DataError, match="call load_checkpoint first"):
            call()


def test_defaults_that_do_not_fit_a_gpu_are_named_with_their_remedy() -> None:
    assert [advice.split(" ")[0] for advice in unfit_for_gpu(TrainConfig())] == [
        "train.dtype",
        "train.logits_chunk_tokens",
        "train.activation_checkpointing",
    ]
    assert unfit_for_gpu(TrainConfig(device="cuda")) == []
    assert unfit_for_gpu(TrainConfig(device="cuda", dtype="float32"))[0].startswith("train.dtype is float32")
