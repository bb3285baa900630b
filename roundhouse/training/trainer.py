"""The trainer: sequences and version v in, version v + 1 out.

Invariant: the weights after a step depend on nothing but the weights and optimizer state before it, the sequences, the
configuration, and (seed, iteration). So a run that is saved and loaded between any two steps is, on CPU, bit for bit the
run that was not.

A step: the algorithm stamps per-token columns; the log-probabilities `old` are computed once; the trained sequences are
shuffled by a seed derived from (seed, iteration, epoch) and cut into `updates` parts; each part is one optimizer step, whose
gradient is summed over microbatches of at most `tokens_per_microbatch` positions.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from roundhouse.config.models import TrainConfig
from roundhouse.errors import ConfigError, DataError
from roundhouse.training.algorithm import Algorithm, build_algorithm
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.checkpoint import (
    TRAINER_DIRECTORY,
    Cursor,
    load_cursor,
    load_model,
    read_side_files,
    save_cursor,
    save_model,
)
from roundhouse.training.forward import check_fits, cpu_threads, vocabulary_size
from roundhouse.training.optimizer import build_optimizer, load_optimizer, save_optimizer
from roundhouse.training.report import StepReport
from roundhouse.training.step import Learner, NonFiniteError, Step

__all__ = ["NonFiniteError", "StepReport", "Trainer"]

logger = logging.getLogger(__name__)


class Trainer:
    """A model, its optimizer and its place in the run. Made by `load`."""

    def __init__(self, learner: Learner, side_files: dict[str, bytes]) -> None:
        self.learner = learner
        self.threads = learner.config.threads or max(1, len(os.sched_getaffinity(0)) // 2)
        self._side_files = side_files
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
        """Load a Hugging Face directory and, to continue, the `trainer/` directory that was saved in it.

        Args:
            model_dir: not needed any more once this returns.
            trainer_state: None starts a fresh optimizer.
            reference_dir: model of the KL term; needed when the algorithm has one, not read when it has none.
            seed: the run's seed; shuffling is derived from it and the iteration.
            temperature: that the sequences were sampled at; log-probabilities are those of this distribution.

        Raises:
            ConfigError: a directory is missing, or device, packing or reference do not fit the configuration.
            DataError: weights or state are damaged or belong to another architecture.
        """
        if temperature <= 0:
            raise ConfigError(f"The sampling temperature is {temperature}: training needs sequences sampled above 0.")
        device = _device(config)
        algorithm = build_algorithm(config.algorithm)
        model = load_model(model_dir, packed=config.packing, device=device)
        optimizer = build_optimizer(model, config.optimizer)
        cursor = Cursor()
        if trainer_state is not None:
            cursor = load_cursor(trainer_state)
            load_optimizer(model, optimizer, trainer_state)
        learner = Learner(
            model=model,
            optimizer=optimizer,
            algorithm=algorithm,
            config=config,
            cursor=cursor.model_copy(update={"seed": seed}),
            temperature=temperature,
            reference=_load_reference(algorithm, reference_dir, config, model),
        )
        return cls(learner, read_side_files(model_dir))

    @property
    def model(self) -> PreTrainedModel:
        """The policy as it is now."""
        return self.learner.model

    @property
    def cursor(self) -> Cursor:
        """Where training stands."""
        return self.learner.cursor

    def step(self, sequences: TrainingSequences, iteration: int) -> StepReport:
        """Train on an iteration's sequences.

        When no group has spread there is nothing to learn: the weights stay, `updates` is 0, and the mismatch between engine
        and trainer is measured on all sequences.

        Raises:
            DataError: the iteration was trained on before, or the sequences do not fit the model.
            NonFiniteError: the update that showed it was not applied. If others of the iteration were, the weights belong
                to no version, and the trainer refuses all further work: load it again.
        """
        self._check(sequences, iteration)
        steps_before = self.cursor.optimizer_steps
        try:
            with cpu_threads(self.threads):
                report = Step(self.learner, sequences, iteration).run()
        except BaseException as error:
            self.learner.optimizer.zero_grad(set_to_none=True)
            if self.cursor.optimizer_steps > steps_before:
                self._failure = f"iteration {iteration}: {error!r}"
            raise
        self.learner.cursor = self.cursor.model_copy(update={"iteration": iteration})
        logger.info("iteration %d: %d updates in %.2f s", iteration, report.updates, report.seconds["total"])
        return report

    def save(self, directory: Path) -> None:
        """Write the model's Hugging Face directory, and the trainer's state under `trainer/`."""
        self._refuse_after_failure()
        save_model(self.model, self._side_files, directory)
        state = directory / TRAINER_DIRECTORY
        state.mkdir(exist_ok=True)
        save_optimizer(self.model, self.learner.optimizer, state)
        save_cursor(self.cursor, state)

    def log_probs(self, sequences: TrainingSequences) -> np.ndarray:
        """[T] log-probabilities of the generated tokens under the weights as they are now; 0 off the loss mask."""
        check_fits(self.model, sequences)
        with cpu_threads(self.threads):
            return self.learner.log_probs(self.model, sequences)

    def _check(self, sequences: TrainingSequences, iteration: int) -> None:
        self._refuse_after_failure()
        done = self.cursor.iteration
        if done is not None and iteration <= done:
            raise DataError(
                f"Iteration {iteration} cannot be trained on: these weights already include iteration {done}. "
                f"Load the checkpoint from before iteration {iteration}."
            )
        check_fits(self.model, sequences)

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise DataError(f"This trainer stopped between two updates and has to be loaded again ({self._failure}).")


def _load_reference(
    algorithm: Algorithm, directory: Path | None, config: TrainConfig, policy: PreTrainedModel
) -> PreTrainedModel | None:
    if not algorithm.needs_reference:
        return None
    if directory is None:
        raise ConfigError(
            f"train.algorithm.kl_coefficient is {config.algorithm.kl_coefficient}, which needs a reference model, but no "
            "reference_dir was given. Give the starting policy's directory, or set the coefficient to 0."
        )
    reference = load_model(directory, packed=config.packing, device=policy.device).requires_grad_(False)
    ours, theirs = (vocabulary_size(model) for model in (policy, reference))
    if ours != theirs:
        raise ConfigError(
            f"The reference in {directory} has a vocabulary of {theirs}, the policy of {ours}: their tokens differ."
        )
    return reference


def _device(config: TrainConfig) -> torch.device:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError(
            "train.device is cuda, but torch finds no GPU. Set it to auto or cpu, or install torch for CUDA."
        )
    return torch.device("cuda" if config.device != "cpu" and available else "cpu")
