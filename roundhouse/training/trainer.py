"""The trainer: sequences and version v in, version v + 1 out, over any train service.

Invariant: the weights after a step depend only on the weights and optimizer state before it, the sequences, the
configuration, and (seed, iteration). A run that is saved and loaded between any two steps is therefore, on CPU, bit for
bit equal to an uninterrupted run.

A step: the algorithm makes per-token columns; the log-probabilities `old` are computed once; the trained rollouts are
shuffled by a seed derived from (seed, iteration, epoch) and cut into `updates` parts; each part is one optimizer step,
with a gradient that is summed over microbatches of at most `tokens_per_microbatch` positions. A critic, if the
algorithm has one, computes its values first and its updates last (`critic`). An update is applied only if its loss and
gradient norm are finite. `TrainStep` calls the verbs of a train service and holds no model and no gradient.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from roundhouse.imports import gc_paused

with gc_paused():
    import numpy as np
    import pyarrow as pa
    import torch

    from roundhouse.activity import ACTIVITY
    from roundhouse.config.models import TrainConfig
    from roundhouse.errors import ConfigError, DataError
    from roundhouse.store.directories import ModelSource
    from roundhouse.store.location import Location
    from roundhouse.store.stage import ModelFiles
    from roundhouse.training.algorithms import (
        Algorithm,
        AlgorithmInputs,
        TokenColumns,
        TokenSignals,
        build_algorithm,
        check_columns,
        no_columns,
    )
    from roundhouse.training.algorithms.policy_gradient import next_coefficient
    from roundhouse.training.batch import TrainingSequences, sequence_rows
    from roundhouse.training.checkpoint import Cursor
    from roundhouse.training.critic import CriticStep, load_critic
    from roundhouse.training.forward import sequences_with
    from roundhouse.training.loss import (
        MetricSums,
        add_correction,
        add_mismatch,
        borne_out,
        sequence_means,
        sequence_scale,
    )
    from roundhouse.training.optimizer import learning_rate
    from roundhouse.training.service.engine import TrainEngine
    from roundhouse.training.service.verbs import LossBatch, Role, TokenBatch, TrainService, check_fits, token_positions
    from roundhouse.trajectories.records import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


logger = logging.getLogger(__name__)


class Trainer:
    """A train service, an algorithm and a place in the run. Made by `load` or `over`."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._failure: str | None = None

    @classmethod
    def load(
        cls,
        model_dir: ModelSource,
        config: TrainConfig,
        *,
        trainer_state: ModelSource | None = None,
        reference_dir: ModelSource | None = None,
        critic_dir: ModelSource | None = None,
        seed: int = 0,
        temperature: float = 1.0,
    ) -> Trainer:
        """Train in this process; arguments as of `over`.

        Args:
            temperature: that the sequences were sampled at; log-probabilities are those of this distribution.
        """
        engine = TrainEngine(config, temperature=temperature)
        return cls.over(
            engine,
            model_dir,
            config,
            trainer_state=trainer_state,
            reference_dir=reference_dir,
            critic_dir=critic_dir,
            seed=seed,
        )

    @classmethod
    def over(
        cls,
        service: TrainService,
        model_dir: ModelSource,
        config: TrainConfig,
        *,
        trainer_state: ModelSource | None = None,
        reference_dir: ModelSource | None = None,
        critic_dir: ModelSource | None = None,
        seed: int = 0,
        algorithm: Algorithm | None = None,
    ) -> Trainer:
        """Load a Hugging Face directory into the service and, to continue, the `trainer/` directory that was saved in
        it.

        Args:
            model_dir: may be deleted once this returns.
            trainer_state: None starts a fresh optimizer.
            reference_dir: model of the KL term, unused without one. None with a KL term: with `lora`, the adapter's
                base if the algorithm's reference is the start; else refused.
            critic_dir: model that a new critic starts from; None: `model_dir`. Unused without a critic, or if
                `trainer_state` has the critic.
            seed: the run's seed; shuffling is derived from it and the iteration.
            algorithm: an object in place of the configured algorithm.

        Raises:
            ConfigError: a directory is missing, or device, packing or reference do not fit the configuration.
            DataError: weights or state are damaged or belong to another architecture.
            InfraError: the service cannot be reached.
        """
        algorithm = algorithm or build_algorithm(config.algorithm)
        cursor = service.load_checkpoint(model_dir, trainer_state=trainer_state)
        section = config.algorithm
        if algorithm.needs_reference and (reference_dir is not None or not config.reference_is_frozen):
            if reference_dir is None:
                if section.reference_source not in (None, "start"):
                    raise ConfigError(
                        f"train.algorithm.kind {section.kind} needs a teacher, but no reference_dir was given. Give "
                        "its directory."
                    )
                raise ConfigError(
                    f"train.algorithm.kl_coefficient is {section.kl_coefficient}, which needs a reference model, but no "
                    "reference_dir was given. Give the starting policy's directory, or set the coefficient to 0."
                )
            service.load_checkpoint(reference_dir, role=Role.REFERENCE)
        if config.algorithm.critic_section is None:
            cursor = cursor.model_copy(update={"critic_steps": 0, "critic_iterations": 0})
        else:
            load_critic(service, cursor, critic_dir or model_dir, trainer_state)
        return cls(Learner(service, algorithm, config, cursor.model_copy(update={"seed": seed})))

    @property
    def engine(self) -> TrainEngine:
        """Return the service if it is in this process."""
        service = self.learner.service
        if not isinstance(service, TrainEngine):
            raise ConfigError(f"This trainer's model is not in this process but behind {type(service).__name__}.")
        return service

    @property
    def model(self) -> PreTrainedModel:
        """Return the present policy if it is in this process."""
        return self.engine.model

    @property
    def cursor(self) -> Cursor:
        """The state of training."""
        return self.learner.cursor

    def step(self, sequences: TrainingSequences, iteration: int, tolerances: np.ndarray | None = None) -> StepReport:
        """Train on an iteration's sequences.

        Args:
            tolerances: [S] allowed difference in nats between a sequence's recorded log-probabilities and those of the
                weights (`borne_out`), 0 for any; beyond it the sequence has weight 0. None: any.

        If no group has spread, nothing can be learnt: the weights stay, `updates` is 0, and the mismatch between engine
        and trainer is measured on all sequences.

        Raises:
            DataError: the iteration was trained on before, or the sequences do not fit the model.
            NonFiniteError: an update was not finite and was not applied.
            InfraError: the service was lost.

        After an error in or after the first update the weights may not equal any version, and the trainer refuses all
        further work: load it again. (A first update refused for not being finite changed nothing and does not count.)
        """
        self._refuse_after_failure()
        last_iteration = self.cursor.iteration
        if last_iteration is not None and iteration <= last_iteration:
            raise DataError(
                f"Iteration {iteration} cannot be trained on: these weights already include iteration {last_iteration}. "
                f"Load the checkpoint from before iteration {iteration}."
            )
        check_fits(self.learner.service.facts(), sequences)
        step = TrainStep(self.learner, sequences, iteration, tolerances)
        try:
            report = step.run()
        except BaseException as error:
            if step.updating:
                self._failure = f"iteration {iteration}: {error!r}"
            raise
        self.learner.cursor = self.cursor.model_copy(update={"iteration": iteration})
        logger.info("iteration %d: %d updates in %.2f s", iteration, report.updates, report.seconds["total"])
        return report

    def store(self, place: Location, attempt: str, *, state: bool = True, weights: bool = True) -> ModelFiles:
        """Write the files of `save` to a checkpoint of the store, from the holder of the weights
        (`store_checkpoint`)."""
        self._refuse_after_failure()
        return self.learner.service.store_checkpoint(place, attempt, self.cursor if state else None, weights=weights)

    def save(self, directory: Path, *, state: bool = True) -> None:
        """Write the model's Hugging Face directory, and with `state` the trainer's under `trainer/`."""
        self._refuse_after_failure()
        self.learner.service.save_checkpoint(directory, self.cursor if state else None)

    def close(self) -> None:
        """Give the service back."""
        self.learner.service.close()

    def log_probs(self, sequences: TrainingSequences) -> np.ndarray:
        """[T] log-probabilities of the generated tokens under the weights as they are now; 0 off the loss mask."""
        check_fits(self.learner.service.facts(), sequences)
        return self.learner.log_probs(sequences, sequences.loss_mask)

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise DataError(f"This trainer stopped between two updates and has to be loaded again ({self._failure}).")


class NonFiniteError(DataError):
    """A loss, gradient or log-probability is NaN or infinite; the update that showed it was not applied."""


@dataclass(slots=True)
class Learner:
    """Objects of a step, which changes the service's weights and the cursor."""

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
    """Shared state of a step's parts. Made for one iteration, run once."""

    def __init__(
        self, learner: Learner, sequences: TrainingSequences, iteration: int, tolerances: np.ndarray | None = None
    ) -> None:
        self.learner, self.sequences, self.iteration = learner, sequences, iteration
        self.tolerance = None if tolerances is None else np.repeat(tolerances, sequences.lengths)
        self.config, self.service = learner.config, learner.service
        self.old = np.zeros(len(sequences.token_ids), dtype=np.float32)
        self.ref: np.ndarray | None = None
        self.seconds = {"forward_old": 0.0, "forward_reference": 0.0, "updates": 0.0, "critic": 0.0}
        self.batches: list[list[int]] = []
        self.critic_batches: list[list[int]] = []
        self.critic: CriticStep | None = None
        self.signals = self._signals()
        self.valued = self.signals.columns.policy_weights != 0
        """[T] bool: the tokens that a critic learns from."""
        if self._warms_up:
            self.signals = replace(self.signals, columns=no_columns(sequences))
        self.trained = self.signals.columns.trained
        self.rollouts = np.unique(sequences.rollout_ids, return_inverse=True)[1]
        """[S] a number for each sequence's rollout."""
        self.batches = self._plan(self.trained)
        if self.critic is not None:
            self.critic_batches = self._plan(self.valued)
        self.measured = (self.trained if self.batches else sequences.loss_mask) & sequences.sampled
        self.sums = MetricSums()
        self.computed = {"microbatches": 0, "real": 0, "positions": 0}
        self.updating = False
        """Whether the service may hold a gradient, or weights that equal no version."""

    @property
    def _warms_up(self) -> bool:
        """Return whether only the critic learns."""
        return self.critic is not None and self.learner.cursor.critic_iterations < self.critic.config.warmup_iterations

    def _plan(self, trained: np.ndarray) -> list[list[int]]:
        """The sequences of each update on these tokens."""
        return plan_updates(
            sequences_with(self.sequences, trained),
            self.rollouts,
            self.config.minibatches,
            self.config.epochs,
            self.learner.cursor.seed,
            self.iteration,
        )

    def run(self) -> StepReport:
        start = time.perf_counter()
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
        if self.critic is not None:
            with self._timed("critic"):
                self._update_critic(self.critic)
        self._measure_mismatch()
        self._steer_kl()
        self.seconds["total"] = time.perf_counter() - start
        return self._report()

    def _signals(self) -> TokenSignals:
        """Return the algorithm's columns, from log-probabilities of all generated tokens if it reads them."""
        algorithm, mask = self.learner.algorithm, self.sequences.loss_mask
        inputs = AlgorithmInputs(kl_coefficient=self.learner.cursor.kl_coefficient)
        if algorithm.needs_log_probs:
            self.old = self._log_probs("old", mask)
            if algorithm.needs_reference:
                self.ref = self._log_probs("reference", mask, Role.REFERENCE)
            inputs = replace(inputs, old=self.old, reference=self.ref)
        if (section := self.config.algorithm.critic_section) is not None:
            with self._timed("critic"), ACTIVITY.track("train", "values"):
                self.critic = CriticStep.begin(self.service, section, self.sequences)
            self._require_finite("value", float(self.critic.values.sum() + self.critic.final_values.sum()), 0)
            inputs = replace(inputs, values=self.critic.values, final_values=self.critic.final_values)
        signals = algorithm.compute(self.sequences, inputs)
        check_columns(signals.columns, self.sequences, type(algorithm).__name__)
        return signals

    def _log_probs(self, name: str, tokens: np.ndarray, role: Role = Role.POLICY) -> np.ndarray:
        logger.info("iteration %d: %s log-probabilities", self.iteration, name)
        with self._timed(f"forward_{name}"), ACTIVITY.track("train", f"{name} log-probabilities"):
            log_probs = self.learner.log_probs(self.sequences, tokens, role)
        self._require_finite(f"{name} log-probability", float(log_probs.sum()), 0)
        return log_probs

    def _update(self, indices: list[int], number: int) -> None:
        """One optimizer step on the sequences with these indices."""
        logger.info("iteration %d: update %d of %d", self.iteration, number + 1, len(self.batches))
        learner = self.learner
        # Log-probabilities to compare are not recorded for written tokens, so no pass precedes the first update
        first = not learner.algorithm.needs_log_probs and (number == 0 or not self.sequences.sampled)
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
        shares = gradient.shares
        if (
            not self.sequences.sampled
        ):  # an average over draws, weighted by their probability; written tokens were not drawn
            shares = {name: share for name, share in shares.items() if name != "approx_entropy"}
        self.sums.merge(shares)
        measured = {"loss": gradient.loss, "policy_loss": gradient.policy_loss}
        if norm is not None:
            measured |= {"grad_norm": norm, "grad_norm_max": norm}
        for name, value in measured.items():
            self.sums.add(name, torch.tensor(value, dtype=torch.float64))
        self.computed["microbatches"] += gradient.microbatches
        self.computed["real"] += gradient.real_tokens
        self.computed["positions"] += gradient.positions

    def _update_critic(self, critic: CriticStep) -> None:
        """Run the critic's optimizer steps, on the policy's minibatches if both learn from the same sequences."""
        learner, optimizer, returns = self.learner, critic.config.optimizer, self.signals.returns
        if returns is None:
            raise DataError(f"{type(learner.algorithm).__name__} gives no returns, which its critic is to learn.")
        for number, indices in enumerate(self.critic_batches, len(self.batches)):
            with ACTIVITY.track(
                "train", f"critic update {number + 1 - len(self.batches)} of {len(self.critic_batches)}"
            ):
                self.updating = True
                gradient = critic.backward(indices, self.valued, returns, self._scale(indices, self.valued))
                self._require_finite("value_loss", gradient.loss, number)
                rate = learning_rate(optimizer, learner.cursor.critic_steps)
                norm = self.service.optim_step(rate, optimizer.max_grad_norm, Role.CRITIC).grad_norm
                assert norm is not None, "a service that trains a critic reports it"
                self._require_finite("critic_grad_norm", norm, number)
            counts = {"critic_steps": learner.cursor.critic_steps + 1}
            learner.cursor = learner.cursor.model_copy(update=counts)
            self.sums.merge(gradient.shares)
            self.sums.add("critic_grad_norm", torch.tensor(norm, dtype=torch.float64))
        if self.critic_batches:
            counts = {"critic_iterations": learner.cursor.critic_iterations + 1}
            learner.cursor = learner.cursor.model_copy(update=counts)

    def _scale(self, indices: list[int], trained: np.ndarray) -> np.ndarray:
        """Return the factor of each token of these sequences that makes their update's sum over `trained` tokens a
        mean."""
        loss = self.learner.algorithm.loss
        counts = np.add.reduceat(trained.astype(np.int64), self.sequences.offsets[:-1])[indices]
        scale = sequence_scale(
            torch.from_numpy(counts),
            loss.aggregation,
            rollouts=torch.from_numpy(self.rollouts[indices]),
            fixed_length=loss.fixed_length,
        )
        return np.repeat(scale.numpy(), self.sequences.lengths[indices])

    def _loss_batch(self, indices: list[int], chosen: np.ndarray, *, first: bool) -> LossBatch:
        """Return the update's sequences with the token loss's inputs; `chosen` are their tokens.

        `first`: the pass that computes the gradient also gives their old log-probabilities.
        """
        sequences, columns, loss = self.sequences, self.signals.columns, self.learner.algorithm.loss
        return LossBatch(
            tokens=TokenBatch.of(sequences, indices, self.trained),
            columns=TokenColumns(
                **{field.name: getattr(columns, field.name)[chosen] for field in fields(TokenColumns)}
            ),
            gen_logprobs=sequences.gen_logprobs[chosen],
            scale=self._scale(indices, self.trained),
            loss=loss,
            old_logprobs=None if first else self.old[chosen],
            ref_logprobs=None if self.ref is None else self.ref[chosen],
            tolerance=None if self.tolerance is None else self.tolerance[chosen],
        )

    def _measure_mismatch(self) -> None:
        """Measure over the trained tokens; over all generated ones if none is trained; over none if they were
        written."""
        source = np.flatnonzero(self.measured)
        if not len(source):
            return
        owner = np.unique(self.sequences.sequence_of_token[source], return_inverse=True)[1]
        old, gen = torch.from_numpy(self.old[source]), torch.from_numpy(self.sequences.gen_logprobs[source])
        loss, sequence = self.learner.algorithm.loss, torch.from_numpy(owner)
        add_mismatch(self.sums, old, gen, sequence, loss.mismatch_bounds)
        add_correction(self.sums, old, gen, loss, sequence)
        if self.tolerance is not None:
            confirmed = borne_out(old, gen, torch.from_numpy(self.tolerance[source]), sequence)
            self.sums.add("num_mismatched_seqs", sequence_means((~confirmed).double(), sequence))

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
        section = "algorithm.critic." if metric in ("value", "value_loss", "critic_grad_norm") else ""
        raise NonFiniteError(
            f"Iteration {self.iteration}, update {number + 1} of {len(self.batches) + len(self.critic_batches)}: {metric} is "
            f"{value}. The update was not applied. Look at token_mult_prob_error and grad_norm of the iterations before, and "
            f"lower train.{section}optimizer.learning_rate."
        )

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start

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
        if self.critic is not None:
            steps, optimizer = self.learner.cursor.critic_steps, self.critic.config.optimizer
            counts["critic_lr"] = learning_rate(optimizer, max(steps - 1, 0))
            counts["critic_updates"] = float(len(self.critic_batches))
            assert self.signals.returns is not None, "its updates require them"
            counts |= self.critic.metrics(self.valued, self.signals.returns)
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


def plan_updates(
    sequences: Sequence[int], rollouts: Sequence[int] | np.ndarray, updates: int, epochs: int, seed: int, iteration: int
) -> list[list[int]]:
    """Return the sequences of each optimizer step: `updates` parts an epoch, with numbers of rollouts that differ by at
    most one.

    Each epoch shuffles the rollouts anew, independently of length, reward or order of arrival; the sequences of one
    stay together, so that it counts once in the mean of one step. With fewer rollouts than updates, each is a separate
    part. The result depends on the arguments alone. `rollouts` [S] numbers the rollout of every sequence.
    """
    members: dict[int, list[int]] = {}
    for sequence in sequences:
        members.setdefault(int(rollouts[sequence]), []).append(sequence)
    parts: list[list[int]] = []
    for epoch in range(epochs):
        order = list(members.values())
        random.Random(derive_seed(seed, "minibatches", iteration, epoch)).shuffle(order)
        count = min(updates, len(order))
        bounds = [round(part * len(order) / count) for part in range(count + 1)] if count else []
        parts += [list(itertools.chain(*order[start:stop])) for start, stop in itertools.pairwise(bounds)]
    return parts


@dataclass(frozen=True, slots=True)
class StepReport:
    """One iteration's training."""

    iteration: int
    updates: int
    """Optimizer steps done; 0 if no group had spread and the weights did not change."""
    metrics: dict[str, float]
    seconds: dict[str, float]
    """Wall time: forward_old, forward_reference, critic (0 when not needed), updates, total."""
    tokens: dict[str, int]
    """received, generated (on the loss mask), trained (with a non-zero weight)."""
    columns: pa.Table
    """One row a sequence; see `sequence_rows`."""
