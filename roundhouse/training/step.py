"""One training step: columns, old log-probabilities, updates, report.

Invariant: an update is applied only when its loss and the norm of its gradient are finite, and the parts of an epoch hold
every trained sequence exactly once, in an order that depends on (seed, iteration, epoch) alone.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from roundhouse.config.models import TrainConfig
from roundhouse.errors import DataError
from roundhouse.training.algorithm import Algorithm, Stamp
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.checkpoint import Cursor
from roundhouse.training.forward import Prediction, predict, recompute_log_probs, sequences_with
from roundhouse.training.loss import Tokens, sequence_scale, token_loss
from roundhouse.training.metrics import MetricSums
from roundhouse.training.mismatch import add_mismatch
from roundhouse.training.optimizer import learning_rate, set_learning_rate
from roundhouse.training.packing import Microbatch, build_microbatches
from roundhouse.training.report import StepReport, sequence_rows
from roundhouse.trajectories.tokens import derive_seed


class NonFiniteError(DataError):
    """A loss, gradient or log-probability is NaN or infinite; the update that showed it was not applied."""


@dataclass(slots=True)
class Learner:
    """What a step works with; it changes the weights, the optimizer's state and the cursor."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    algorithm: Algorithm
    config: TrainConfig
    cursor: Cursor
    temperature: float
    reference: PreTrainedModel | None = None

    def log_probs(
        self, model: PreTrainedModel, sequences: TrainingSequences, trained: np.ndarray | None = None
    ) -> np.ndarray:
        """[T] log-probabilities of the `trained` tokens, by default all generated ones."""
        return recompute_log_probs(
            model,
            sequences,
            trained=trained,
            temperature=self.temperature,
            tokens_per_microbatch=self.config.tokens_per_microbatch,
            dtype=self.config.dtype,
        )


@dataclass(slots=True)
class _TokenTensors:
    """[T] tensors on the device, over all tokens of the iteration; microbatches take from them."""

    owner: torch.Tensor
    """Sequence of each token."""
    gen: torch.Tensor
    advantages: torch.Tensor
    policy_weights: torch.Tensor
    kl_weights: torch.Tensor
    entropy_weights: torch.Tensor
    ref: torch.Tensor | None = None

    @classmethod
    def of(cls, sequences: TrainingSequences, stamp: Stamp, device: torch.device) -> _TokenTensors:
        columns = stamp.columns
        return cls(
            *(
                torch.from_numpy(np.ascontiguousarray(values)).to(device)
                for values in (
                    sequences.sequence_of_token,
                    sequences.gen_logprobs,
                    columns.advantages,
                    columns.policy_weights,
                    columns.reference_kl_weights,
                    columns.entropy_weights,
                )
            )
        )


class Step:
    """What the parts of a step share. Made for one iteration, run once."""

    def __init__(self, learner: Learner, sequences: TrainingSequences, iteration: int) -> None:
        self.learner, self.sequences, self.iteration = learner, sequences, iteration
        self.config, self.model = learner.config, learner.model
        self.device: torch.device = self.model.device
        self.stamp = learner.algorithm.stamp(sequences)
        self.trained = self.stamp.columns.trained
        self.batches = plan_updates(
            sequences_with(sequences, self.trained),
            self.config.updates,
            self.config.epochs,
            learner.cursor.seed,
            iteration,
        )
        self.measured = self.trained if self.batches else sequences.loss_mask
        self.tokens = _TokenTensors.of(sequences, self.stamp, self.device)
        self.old = torch.zeros(len(sequences.token_ids), device=self.device)
        self.sums = MetricSums()
        self.seconds = {"forward_old": 0.0, "forward_reference": 0.0, "updates": 0.0}
        self.computed = {"microbatches": 0, "real": 0, "positions": 0}

    def run(self) -> StepReport:
        begun, learner = time.perf_counter(), self.learner
        with self._timed("forward_old"):
            self._compute_old()
        if learner.reference is not None and self.batches:
            with self._timed("forward_reference"):
                ref = learner.log_probs(learner.reference, self.sequences, self.trained)
                self._require_finite("reference log-probability", float(ref.sum()), 0)
                self.tokens.ref = torch.from_numpy(ref).to(self.device)
        with self._timed("updates"):
            for number, indices in enumerate(self.batches):
                self._update(indices, number)
        self._measure_mismatch()
        self.seconds["total"] = time.perf_counter() - begun
        return self._report()

    def _compute_old(self) -> None:
        """`old` of all but the first update's sequences: those are computed by that update itself, on the same weights."""
        first = self.batches[0] if self.batches else []
        ahead = self.measured & ~np.isin(self.sequences.sequence_of_token, first)
        if ahead.any():
            old = self.learner.log_probs(self.model, self.sequences, ahead)
            self._require_finite("old log-probability", float(old.sum()), 0)
            self.old += torch.from_numpy(old).to(self.device)

    def _update(self, indices: Sequence[int], number: int) -> None:
        """One optimizer step on the sequences with these indices."""
        learner, model = self.learner, self.model
        loss, policy_loss = self._accumulate(indices, first=number == 0)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.config.optimizer.max_grad_norm)
        self._require_finite("loss", float(loss), number)
        self._require_finite("grad_norm", float(norm), number)
        set_learning_rate(learner.optimizer, learning_rate(self.config.optimizer, learner.cursor.optimizer_steps))
        learner.optimizer.step()
        learner.optimizer.zero_grad(set_to_none=True)
        learner.cursor = learner.cursor.model_copy(update={"optimizer_steps": learner.cursor.optimizer_steps + 1})
        for name, value in (("loss", loss), ("policy_loss", policy_loss), ("grad_norm", norm), ("grad_norm_max", norm)):
            self.sums.add(name, value)

    def _accumulate(self, indices: Sequence[int], *, first: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the update's gradient up over its microbatches; return its loss and policy loss."""
        config = self.config
        microbatches = build_microbatches(
            self.sequences, indices, self.trained, budget=config.tokens_per_microbatch, packed=config.packing
        )
        scale = self._scale(indices)
        losses = torch.zeros(2, device=self.device)
        for microbatch in microbatches:
            on_device = microbatch.to(self.device)
            prediction = predict(
                self.model,
                on_device,
                temperature=self.learner.temperature,
                dtype=config.dtype,
                with_entropy=bool(self.stamp.columns.entropy_weights.any()),
            )
            source = torch.from_numpy(microbatch.source).to(self.device)
            if first:
                self.old[source] = prediction.log_probs.detach()
            tokens = self._tokens_of(source, prediction, scale)
            loss, policy_loss = token_loss(tokens, self.learner.algorithm.loss, self.sums)
            loss.backward()
            losses += torch.stack([loss.detach(), policy_loss])
            self._count(microbatch)
        return losses[0], losses[1]

    def _scale(self, indices: Sequence[int]) -> torch.Tensor:
        """[S] scale of each sequence's tokens in this update."""
        counts = np.add.reduceat(self.trained.astype(np.int64), self.sequences.offsets[:-1])[list(indices)]
        scale = torch.zeros(len(self.sequences))
        scale[list(indices)] = sequence_scale(torch.from_numpy(counts), self.learner.algorithm.loss.aggregation)
        return scale.to(self.device)

    def _tokens_of(self, source: torch.Tensor, prediction: Prediction, scale: torch.Tensor) -> Tokens:
        every = self.tokens
        return Tokens(
            cur=prediction.log_probs,
            old=self.old[source],
            gen=every.gen[source],
            advantages=every.advantages[source],
            policy_weights=every.policy_weights[source],
            scale=scale[every.owner[source]],
            ref=None if every.ref is None else every.ref[source],
            kl_weights=every.kl_weights[source],
            entropy=prediction.entropy,
            entropy_weights=every.entropy_weights[source],
        )

    def _measure_mismatch(self) -> None:
        """Over the trained tokens; over all generated ones when none is trained."""
        source = np.flatnonzero(self.measured)
        owner = np.unique(self.sequences.sequence_of_token[source], return_inverse=True)[1]
        add_mismatch(
            self.sums,
            self.old.cpu()[source],
            torch.from_numpy(self.sequences.gen_logprobs[source]),
            torch.from_numpy(owner),
            self.learner.algorithm.loss.mismatch_bounds,
        )

    def _require_finite(self, metric: str, value: float, number: int) -> None:
        if math.isfinite(value):
            return
        raise NonFiniteError(
            f"Iteration {self.iteration}, update {number + 1} of {len(self.batches)}: {metric} is {value}. The update was "
            "not applied. Look at token_mult_prob_error and grad_norm of the iterations before, and lower "
            "train.optimizer.learning_rate."
        )

    def _count(self, microbatch: Microbatch) -> None:
        self.computed["microbatches"] += 1
        self.computed["real"] += microbatch.real_tokens
        self.computed["positions"] += microbatch.input_ids.numel()

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[part] += time.perf_counter() - begun

    def _report(self) -> StepReport:
        sequences, trained = self.sequences, int(self.trained.sum())
        metrics = {**self.stamp.metrics, **self.sums.values(), **self._counts(trained)}
        return StepReport(
            iteration=self.iteration,
            updates=len(self.batches),
            metrics=metrics,
            seconds=self.seconds,
            tokens={
                "received": len(sequences.token_ids),
                "generated": int(sequences.loss_mask.sum()),
                "trained": trained,
            },
            columns=sequence_rows(sequences, self.stamp, self.measured, self.old.cpu().numpy()),
        )

    def _counts(self, trained: int) -> dict[str, float]:
        teaching = len(sequences_with(self.sequences, self.trained))
        counts = {
            "lr": self.learner.optimizer.param_groups[0]["lr"],
            "wd": self.config.optimizer.weight_decay,
            "optimizer_steps": float(self.learner.cursor.optimizer_steps),
            "num_updates": float(len(self.batches)),
            "num_valid_samples": float(teaching),
            "global_valid_toks": float(trained),
            "num_microbatches": float(self.computed["microbatches"]),
        }
        if self.batches:
            counts["mean_trained_tokens"] = trained / teaching
            counts["tokens_per_second"] = self.computed["real"] / self.seconds["updates"]
            counts["packing_efficiency"] = self.computed["real"] / self.computed["positions"]
        return counts


def plan_updates(sequences: Sequence[int], updates: int, epochs: int, seed: int, iteration: int) -> list[list[int]]:
    """The sequences of each optimizer step: `updates` parts an epoch, of sizes that differ by at most one.

    Each epoch shuffles anew, independently of length, reward or order of arrival. With fewer sequences than updates, each
    is a part of its own. The result depends on the arguments alone.
    """
    parts: list[list[int]] = []
    for epoch in range(epochs):
        order = list(sequences)
        random.Random(derive_seed(seed, "minibatches", iteration, epoch)).shuffle(order)
        count = min(updates, len(order))
        bounds = [round(part * len(order) / count) for part in range(count + 1)] if count else []
        parts += [order[start:stop] for start, stop in itertools.pairwise(bounds)]
    return parts
