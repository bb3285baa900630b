"""The trainer: sequences and version v in, version v + 1 out, over any train service.

Invariant: the weights after a step depend on nothing but the weights and optimizer state before it, the sequences, the
configuration, and (seed, iteration). So a run that is saved and loaded between any two steps is, on CPU, bit for bit the
run that was not.

A step: the algorithm stamps per-token columns; the log-probabilities `old` are computed once; the trained sequences are
shuffled by a seed derived from (seed, iteration, epoch) and cut into `updates` parts; each part is one optimizer step, whose
gradient is summed over microbatches of at most `tokens_per_microbatch` positions.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from roundhouse.config.models import TrainConfig
from roundhouse.errors import ConfigError, DataError
from roundhouse.training.algorithms import build_algorithm
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.checkpoint import Cursor
from roundhouse.training.metrics import StepReport
from roundhouse.training.service.engine import TrainEngine
from roundhouse.training.service.verbs import Role, TrainService, check_fits
from roundhouse.training.step import Learner, NonFiniteError, TrainStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["NonFiniteError", "StepReport", "Trainer"]

logger = logging.getLogger(__name__)


class Trainer:
    """A train service, an algorithm and a place in the run. Made by `load` or `over`."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._failure: str | None = None

    @classmethod
    def load(
        cls,
        model_dir: Path,
        config: TrainConfig,
        *,
        trainer_state: Path | None = None,
        reference_dir: Path | None = None,
        seed: int = 0,
        temperature: float = 1.0,
    ) -> Trainer:
        """Train in this process; arguments as of `over`.

        Args:
            temperature: that the sequences were sampled at; log-probabilities are those of this distribution.
        """
        engine = TrainEngine(config, temperature=temperature)
        return cls.over(engine, model_dir, config, trainer_state=trainer_state, reference_dir=reference_dir, seed=seed)

    @classmethod
    def over(
        cls,
        service: TrainService,
        model_dir: Path,
        config: TrainConfig,
        *,
        trainer_state: Path | None = None,
        reference_dir: Path | None = None,
        seed: int = 0,
    ) -> Trainer:
        """Give the service a Hugging Face directory and, to continue, the `trainer/` directory that was saved in it.

        Args:
            model_dir: not needed any more once this returns.
            trainer_state: None starts a fresh optimizer.
            reference_dir: model of the KL term; needed when the algorithm has one, not read when it has none.
            seed: the run's seed; shuffling is derived from it and the iteration.

        Raises:
            ConfigError: a directory is missing, or device, packing or reference do not fit the configuration.
            DataError: weights or state are damaged or belong to another architecture.
            InfraError: the service cannot be reached.
        """
        algorithm = build_algorithm(config.algorithm)
        cursor = service.load_checkpoint(model_dir, trainer_state=trainer_state)
        if algorithm.needs_reference:
            if reference_dir is None:
                section = config.algorithm
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
        return cls(Learner(service, algorithm, config, cursor.model_copy(update={"seed": seed})))

    @property
    def engine(self) -> TrainEngine:
        """The service, where it is this process."""
        service = self.learner.service
        if not isinstance(service, TrainEngine):
            raise ConfigError(f"This trainer's model is not in this process but behind {type(service).__name__}.")
        return service

    @property
    def model(self) -> PreTrainedModel:
        """The policy as it is now, where it is in this process."""
        return self.engine.model

    @property
    def cursor(self) -> Cursor:
        """Where training stands."""
        return self.learner.cursor

    def step(self, sequences: TrainingSequences, iteration: int, tolerances: np.ndarray | None = None) -> StepReport:
        """Train on an iteration's sequences.

        Args:
            tolerances: [S] nats that a sequence's recorded log-probabilities may be off those of the weights (`borne_out`), 0
                for any: beyond it the sequence has weight 0. None: any.

        When no group has spread there is nothing to learn: the weights stay, `updates` is 0, and the mismatch between engine
        and trainer is measured on all sequences.

        Raises:
            DataError: the iteration was trained on before, or the sequences do not fit the model.
            NonFiniteError: the update that showed it was not applied.
            InfraError: the service was lost.

        After an error in or after the first update the weights may belong to no version, and the trainer refuses all further
        work: load it again. (A first update refused for not being finite changed nothing, and is no such error.)
        """
        self._refuse_after_failure()
        done = self.cursor.iteration
        if done is not None and iteration <= done:
            raise DataError(
                f"Iteration {iteration} cannot be trained on: these weights already include iteration {done}. "
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
