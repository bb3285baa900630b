"""One training step, as a driver over the verbs of a train service: columns, old log-probabilities, updates, report.

Invariant: an update is applied only when its loss and the norm of its gradient are finite, and the parts of an epoch hold
every trained sequence exactly once, in an order that depends on (seed, iteration, epoch) alone. The driver holds no model
and no gradient: what it asks of the service is all that happens to the weights.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import numpy as np
import torch

from roundhouse.activity import ACTIVITY
from roundhouse.config.models import TrainConfig
from roundhouse.errors import DataError
from roundhouse.training.algorithms import Algorithm, AlgorithmInputs, TokenColumns, TokenSignals, check_columns
from roundhouse.training.algorithms.policy_gradient import next_coefficient
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.checkpoint import Cursor
from roundhouse.training.forward import sequences_with
from roundhouse.training.loss import add_correction, add_mismatch, borne_out, sequence_means, sequence_scale
from roundhouse.training.metrics import MetricSums, StepReport, sequence_rows
from roundhouse.training.optimizer import learning_rate
from roundhouse.training.service.verbs import LossBatch, Role, TokenBatch, TrainService, token_positions
from roundhouse.trajectories.records import derive_seed

log = logging.getLogger(__name__)


class NonFiniteError(DataError):
    """A loss, gradient or log-probability is NaN or infinite; the update that showed it was not applied."""


@dataclass(slots=True)
class Learner:
    """What a step works with; it changes the service's weights and the cursor."""

    service: TrainService
    algorithm: Algorithm
    config: TrainConfig
    cursor: Cursor

    def log_probs(self, sequences: TrainingSequences, predicted: np.ndarray, role: Role = Role.POLICY) -> np.ndarray:
        """[T] log-probabilities of the `predicted` tokens ([T] bool), 0 elsewhere."""
        indices = sequences_with(sequences, predicted)
        log_probs = np.zeros(len(sequences.token_ids), dtype=np.float32)
        if indices:
            batch = TokenBatch.of(sequences, indices, predicted)
            log_probs[token_positions(sequences, indices)] = self.service.forward(batch, role)
        return log_probs


class TrainStep:
    """What the parts of a step share. Made for one iteration, run once."""

    def __init__(
        self, learner: Learner, sequences: TrainingSequences, iteration: int, tolerances: np.ndarray | None = None
    ) -> None:
        self.learner, self.sequences, self.iteration = learner, sequences, iteration
        self.tolerance = None if tolerances is None else np.repeat(tolerances, sequences.lengths)
        self.config, self.service = learner.config, learner.service
        self.old = np.zeros(len(sequences.token_ids), dtype=np.float32)
        self.ref: np.ndarray | None = None
        self.seconds = {"forward_old": 0.0, "forward_reference": 0.0, "updates": 0.0}
        self.batches: list[list[int]] = []
        self.signals = self._signals()
        self.trained = self.signals.columns.trained
        self.batches = plan_updates(
            sequences_with(sequences, self.trained),
            self.config.minibatches,
            self.config.epochs,
            learner.cursor.seed,
            iteration,
        )
        self.measured = self.trained if self.batches else sequences.loss_mask
        self.rollouts = np.unique(sequences.rollout_ids, return_inverse=True)[1]
        """[S] a number for each sequence's rollout."""
        self.sums = MetricSums()
        self.computed = {"microbatches": 0, "real": 0, "positions": 0}
        self.updating = False
        """Whether the service may hold a gradient, or weights of no version."""

    def run(self) -> StepReport:
        begun = time.perf_counter()
        if not self.learner.algorithm.needs_log_probs:
            # The first update computes its own sequences' log-probabilities itself, on the same weights.
            first = self.batches[0] if self.batches else []
            self.old = self._log_probs("old", self.measured & ~np.isin(self.sequences.sequence_of_token, first))
        if self.signals.columns.reference_kl_weights.any() and self.ref is None:
            self.ref = self._log_probs("reference", self.trained, Role.REFERENCE)
        with self._timed("updates"):
            for number, indices in enumerate(self.batches):
                with ACTIVITY.track("train", f"update {number + 1} of {len(self.batches)}"):
                    self._update(indices, number)
        self._measure_mismatch()
        self._steer_kl()
        self.seconds["total"] = time.perf_counter() - begun
        return self._report()

    def _signals(self) -> TokenSignals:
        """The algorithm's columns, from log-probabilities of all generated tokens where it reads them."""
        algorithm, mask = self.learner.algorithm, self.sequences.loss_mask
        inputs = AlgorithmInputs(kl_coefficient=self.learner.cursor.kl_coefficient)
        if algorithm.needs_log_probs:
            self.old = self._log_probs("old", mask)
            if algorithm.needs_reference:
                self.ref = self._log_probs("reference", mask, Role.REFERENCE)
            inputs = AlgorithmInputs(self.old, self.ref, self.learner.cursor.kl_coefficient)
        signals = algorithm.compute(self.sequences, inputs)
        check_columns(signals.columns, self.sequences, type(algorithm).__name__)
        return signals

    def _log_probs(self, name: str, tokens: np.ndarray, role: Role = Role.POLICY) -> np.ndarray:
        log.info("iteration %d: %s log-probabilities", self.iteration, name)
        with self._timed(f"forward_{name}"), ACTIVITY.track("train", f"{name} log-probabilities"):
            log_probs = self.learner.log_probs(self.sequences, tokens, role)
        self._require_finite(f"{name} log-probability", float(log_probs.sum()), 0)
        return log_probs

    def _update(self, indices: list[int], number: int) -> None:
        """One optimizer step on the sequences with these indices."""
        log.info("iteration %d: update %d of %d", self.iteration, number + 1, len(self.batches))
        learner = self.learner
        first = number == 0 and not learner.algorithm.needs_log_probs
        chosen = token_positions(self.sequences, indices)
        self.updating = True
        gradient = self.service.forward_backward(self._loss_batch(indices, chosen, first=first))
        self._require_finite("loss", gradient.loss, number)
        if first:
            self.old[chosen] = gradient.log_probs
        rate = learning_rate(self.config.optimizer, learner.cursor.optimizer_steps)
        norm = self.service.optim_step(rate, self.config.optimizer.max_grad_norm).grad_norm
        if norm is not None:
            self._require_finite("grad_norm", norm, number)
        learner.cursor = learner.cursor.model_copy(update={"optimizer_steps": learner.cursor.optimizer_steps + 1})
        self.sums.merge(gradient.shares)
        measured = {"loss": gradient.loss, "policy_loss": gradient.policy_loss}
        if norm is not None:
            measured |= {"grad_norm": norm, "grad_norm_max": norm}
        for name, value in measured.items():
            self.sums.add(name, torch.tensor(value, dtype=torch.float64))
        self.computed["microbatches"] += gradient.microbatches
        self.computed["real"] += gradient.real_tokens
        self.computed["positions"] += gradient.positions

    def _loss_batch(self, indices: list[int], chosen: np.ndarray, *, first: bool) -> LossBatch:
        """The update's sequences, with what the token loss needs of them; `chosen` are their tokens.

        `first`: their old log-probabilities are those of the very pass that computes the gradient.
        """
        sequences, columns, loss = self.sequences, self.signals.columns, self.learner.algorithm.loss
        counts = np.add.reduceat(self.trained.astype(np.int64), sequences.offsets[:-1])[indices]
        scale = sequence_scale(
            torch.from_numpy(counts),
            loss.aggregation,
            rollouts=torch.from_numpy(self.rollouts[indices]),
            fixed_length=loss.fixed_length,
        )
        return LossBatch(
            tokens=TokenBatch.of(sequences, indices, self.trained),
            columns=TokenColumns(
                **{field.name: getattr(columns, field.name)[chosen] for field in fields(TokenColumns)}
            ),
            gen_logprobs=sequences.gen_logprobs[chosen],
            scale=np.repeat(scale.numpy(), sequences.lengths[indices]),
            loss=loss,
            old_logprobs=None if first else self.old[chosen],
            ref_logprobs=None if self.ref is None else self.ref[chosen],
            tolerance=None if self.tolerance is None else self.tolerance[chosen],
        )

    def _measure_mismatch(self) -> None:
        """Over the trained tokens; over all generated ones when none is trained."""
        source = np.flatnonzero(self.measured)
        owner = np.unique(self.sequences.sequence_of_token[source], return_inverse=True)[1]
        old, gen = torch.from_numpy(self.old[source]), torch.from_numpy(self.sequences.gen_logprobs[source])
        loss, sequence = self.learner.algorithm.loss, torch.from_numpy(owner)
        add_mismatch(self.sums, old, gen, sequence, loss.mismatch_bounds)
        add_correction(self.sums, old, gen, loss, sequence)
        if self.tolerance is not None:
            kept = borne_out(old, gen, torch.from_numpy(self.tolerance[source]), sequence)
            self.sums.add("num_mismatched_seqs", sequence_means((~kept).double(), sequence))

    def _steer_kl(self) -> None:
        """Let an adaptive controller choose the next iteration's KL coefficient."""
        controller, learner = self.config.algorithm.adaptive_kl, self.learner
        measured = (self.signals.metrics | self.sums.values()).get("kl_penalty")
        if controller is None or measured is None:
            return
        current = learner.cursor.kl_coefficient
        coefficient = self.config.algorithm.kl_coefficient if current is None else current
        following = next_coefficient(coefficient, measured, int(self.rollouts.max()) + 1, controller)
        learner.cursor = learner.cursor.model_copy(update={"kl_coefficient": following})

    def _require_finite(self, metric: str, value: float, number: int) -> None:
        if math.isfinite(value):
            return
        self.updating = number > 0  # the service has dropped the gradient
        raise NonFiniteError(
            f"Iteration {self.iteration}, update {number + 1} of {len(self.batches)}: {metric} is {value}. The update was "
            "not applied. Look at token_mult_prob_error and grad_norm of the iterations before, and lower "
            "train.optimizer.learning_rate."
        )

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - begun

    def _report(self) -> StepReport:
        sequences, trained = self.sequences, int(self.trained.sum())
        trained_sequences, steps = len(sequences_with(sequences, self.trained)), self.learner.cursor.optimizer_steps
        counts = {
            "lr": learning_rate(self.config.optimizer, max(steps - 1, 0)),
            "wd": self.config.optimizer.weight_decay,
            "optimizer_steps": float(steps),
            "num_updates": float(len(self.batches)),
            "num_valid_samples": float(trained_sequences),
            "global_valid_toks": float(trained),
            "num_microbatches": float(self.computed["microbatches"]),
        }
        if self.batches:
            counts["mean_trained_tokens"] = trained / trained_sequences
            counts["tokens_per_second"] = self.computed["real"] / self.seconds["updates"]
            counts["packing_efficiency"] = self.computed["real"] / self.computed["positions"]
        return StepReport(
            iteration=self.iteration,
            updates=len(self.batches),
            metrics={**self.signals.metrics, **self.sums.values(), **counts},
            seconds=self.seconds,
            tokens={
                "received": len(sequences.token_ids),
                "generated": int(sequences.loss_mask.sum()),
                "trained": trained,
            },
            columns=sequence_rows(sequences, self.signals, self.measured, self.old),
        )


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
