"""Train: one step of an iteration, from its sequences and version k-1 to the files of version k.

Invariant: the written files do not depend on where the step runs (`train.service`).

A trainer stays open between iterations if it can (`TrainerHome`): in this process, a Ray actor or a remote server. A new
process loads the checkpoint and continues bit for bit. If it shares memory with the engine (`placement`), it is released after
each step. With `kind: process` each step is a program (`train_program`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.compute as pc

from roundhouse.config.placement import engine_sleeps, trainer_makes_room
from roundhouse.config.training import ResidentService
from roundhouse.cpu import take_seconds
from roundhouse.errors import DataError, OutOfMemory
from roundhouse.health.policy import typed
from roundhouse.stages.base_models import critic_model, reference_model
from roundhouse.stages.freshness import (
    STOPPED,
    StaleData,
    drift,
    importance_metrics,
    judge_importance,
    settle,
    staleness_metrics,
)
from roundhouse.stages.refit import put_to_sleep
from roundhouse.stages.train_program import Say, run_step
from roundhouse.stages.trainer_home import key_of, trainer_home
from roundhouse.stages.trainers import MEMORY, trainer_at
from roundhouse.stages.validate import mismatched, refuse_mismatched, tolerance_of
from roundhouse.store.directories import StoredModel, checkpoint_cache
from roundhouse.store.location import Location
from roundhouse.store.run import TRAINER, Run
from roundhouse.store.stage import (
    Attempt,
    ModelFiles,
    Reference,
    StageKind,
    read_manifest,
    read_table,
)
from roundhouse.trajectories.records import prove_trainable, untrained_tokens
from roundhouse.trajectories.schemas import tolerances
from roundhouse.weight_sync.base import load_transport

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from roundhouse.training.batch import TrainingSequences
    from roundhouse.training.service.one_shot import TrainStepResult
    from roundhouse.training.trainer import Trainer
    from roundhouse.weight_sync.replica_state import ReplicaReport


logger = logging.getLogger(__name__)


def train_iteration(
    run: Run, iteration: int, sequences: Reference, base: Reference, cache: Path, say: Say = logger.info
) -> Reference:
    """Train version `iteration` from `base` (version `iteration - 1`) on the validated sequences.

    Args:
        say: receives the log lines of a step that runs on another machine.
    """
    stage = run.stage(iteration, StageKind.TRAIN)
    if (reference := stage.reference()) is not None:
        return reference
    recorded = read_table(sequences, "sequences")
    prove_trainable(sequences.counts, recorded)
    attempt = run.begin(stage, policy_version=base.policy_version)
    began = time.monotonic()
    home = trainer_home(run)
    attempt.charge(home.wait_for_state())
    waited = time.monotonic() - began
    with _turn(run, base) as asleep:
        if run.config.train.service.runs_whole_steps:
            result, columns = run_step(run, iteration, sequences, base, cache, say, attempt.name)
        else:
            result, columns = _in_service(run, iteration, recorded, base, cache, attempt.name)
    attempt.write_table("columns", columns)
    _prove_log_probs(run, attempt, recorded, columns, base)
    drifted = _offline_drift(run, iteration, recorded, columns)
    compute = result.seconds["total"]
    attempt.charge(take_seconds(StageKind.TRAIN))
    update = attempt.commit(
        inputs={"sequences": sequences, "base": base},
        counts={"sequences": result.sequences},
        metrics={
            **{f"train/{name}": value for name, value in result.metrics.items()},
            **drifted,
            **(staleness_metrics(recorded, columns, base.policy_version) if run.config.asynchrony.staleness else {}),
            "time/compute": compute,
            "train/state_wait_seconds": waited,
            "train/checkpoint_bytes": float(sum(entry.size for entry in result.checkpoint.files)),
            "waste/untrained_tokens": untrained_tokens(recorded, columns),
        },
        details={
            **result.checkpoint.details(),
            MEMORY: run.config.train.memory_settings,
            "asleep": [{"id": one.replica_id, "placement_group": one.placement_group} for one in asleep],
        },
    )
    if has_optimizer(run, iteration) and not result.checkpoint.holds(TRAINER):
        assert home.trainer is not None, "a trainer without a written state is kept"
        home.write_later(run, update, home.trainer)
        if not load_transport(run.config.generation.weight_sync).asks_trainer:
            home.write_state()
    return update


@contextmanager
def _turn(run: Run, base: Reference) -> Iterator[list[ReplicaReport]]:
    """Give the trainer its turn at the memory that it shares with the sleeping engine; without shared memory, do
    nothing. On exit, the trainer holds no memory, unless it is the engine too."""
    if not engine_sleeps(run.config):
        yield []
        return
    asleep = put_to_sleep(run, base)
    try:
        yield asleep
    finally:
        if trainer_makes_room(run.config):
            trainer_home(run).release()


def _prove_log_probs(run: Run, attempt: Attempt, recorded: pa.Table, columns: pa.Table, base: Reference) -> None:
    """Compare the recorded log-probabilities with those of the weights of `base` (`roundhouse.stages.validate`).

    Raises:
        DataError: too many differ; the weights of this step are discarded.
    """
    if (tolerance := tolerance_of(run.config)) is None:
        return
    contradicted = mismatched(recorded, columns, policy_version=base.policy_version, tolerance=tolerance)
    if not contradicted.num_rows:
        return
    attempt.write_table("mismatched", contradicted)
    own = pc.equal(recorded["policy_version"], base.policy_version)
    judged = pc.sum(pc.and_(own.combine_chunks(), columns["trainer_logprobs"].is_valid().combine_chunks())).as_py()
    try:
        refuse_mismatched(contradicted, judged, run.config.validation, attempt.stage.location.uri)
    except DataError:
        trainer_home(run).release()
        raise
    logger.warning(
        "%d of %d sequences were masked: the weights do not give their log-probabilities", contradicted.num_rows, judged
    )


def _offline_drift(run: Run, iteration: int, recorded: pa.Table, columns: pa.Table) -> dict[str, float]:
    """Measure how far the initial weights of an offline iteration have moved from its data; empty for other runs.

    Raises:
        StaleData: too far (`offline`); the weights of this step are discarded.
    """
    if run.config.offline is None or (measured := drift(run.config, recorded, columns)) is None:
        return {}
    try:
        settle(run.config, f"The data of iteration {iteration}", judge_importance(run.config, measured), STOPPED)
    except StaleData:
        trainer_home(run).release()
        raise
    return importance_metrics(measured)


def log_probs_under(
    run: Run, base: Reference, batch: TrainingSequences, cache: Path, *, for_run: Run | None = None
) -> np.ndarray:
    """[T] log-probabilities of the generated tokens under a checkpoint; the trainer that it takes stays for the next step.

    Args:
        for_run: as of `write_with_optimizer`.
    """
    from roundhouse.training.trainer import Trainer

    with _turn(run, base):
        if run.config.train.service.runs_whole_steps:  # without the verbs: computed in this process
            config = run.config.train.model_copy(update={"service": ResidentService()})
            trainer = Trainer.load(
                StoredModel.of(base, cache),
                config,
                reference_dir=reference_model(run, cache, base.policy_version),
                critic_dir=critic_model(run, cache),
                seed=run.config.seed,
                temperature=run.config.generation.sampling.temperature,
            )
            try:
                return trainer.log_probs(batch)
            finally:
                trainer.close()
        trainer, _ = trainer_at(run, base, cache, for_run)
        try:
            log_probs = trainer.log_probs(batch)
        except BaseException:
            trainer.close()
            raise
        trainer_home(run).keep(key_of(run, base.policy_version, read_manifest(base).model_files), trainer)
        return log_probs


def lend_trainer(run: Run, base: Reference) -> None:
    """Let the engine of this process generate with the trainer that holds a version, which stays for the next step."""
    from roundhouse.generation.trainer_engine import lend

    trainer, _ = trainer_at(run, base, checkpoint_cache(run.config))
    trainer_home(run).keep(key_of(run, base.policy_version, read_manifest(base).model_files), trainer)
    lend(base.uri, trainer.learner.service)


def _in_service(
    run: Run, iteration: int, sequences: pa.Table, base: Reference, cache: Path, attempt: str
) -> tuple[TrainStepResult, pa.Table]:
    """The step by a trainer that stays open for the next one."""
    from roundhouse.training.batch import TrainingSequences
    from roundhouse.training.service.one_shot import TrainStepResult

    batch = TrainingSequences.from_table(sequences)
    with _noting_lack_of_memory(run):
        trainer, again = trainer_at(run, base, cache)
    try:
        judged = tolerances(batch.policy_versions, base.policy_version, tolerance_of(run.config))
        with _noting_lack_of_memory(run):
            report = trainer.step(batch, iteration, judged)
        began = time.monotonic()
        state = has_optimizer(run, iteration) and not _is_written_beside(run, trainer, iteration, base)
        written = trainer.store(run.checkpoint(iteration).location, attempt, state=state)
        saved = {"save_seconds": time.monotonic() - began, "retrained_iterations": float(again)}
    except BaseException:
        trainer.close()
        take_seconds(StageKind.TRAIN, as_lost=True)
        raise
    trainer_home(run).keep(key_of(run, iteration, written), trainer)
    result = TrainStepResult(
        sequences=len(batch),
        updates=report.updates,
        metrics=report.metrics | saved,
        seconds=report.seconds,
        tokens=report.tokens,
        checkpoint=written,
    )
    return result, report.columns


@contextmanager
def _noting_lack_of_memory(run: Run) -> Iterator[None]:
    """If the block runs out of memory, open the run's next trainer in a separate process."""
    try:
        yield
    except Exception as error:
        if isinstance(typed(error), OutOfMemory):
            trainer_home(run).needs_process = True
        raise


def has_optimizer(run: Run, version: int) -> bool:
    """Return whether this version is saved with the trainer's state."""
    return version % run.config.checkpoint.optimizer_every == 0 or version == run.config.iterations


def _is_written_beside(run: Run, trainer: Trainer, version: int, base: Reference) -> bool:
    """Return whether a version's trainer state is written after its publication: if writing takes long, the trainer
    does not change until then, and the state can be made again. The last version's state is written at once, because
    no later work would hide the time."""
    config, least = run.config, run.config.checkpoint.optimizer_beside_mib
    if least is None or version == config.iterations or config.train.lora is not None:  # an adapter may travel alone
        return False
    if engine_sleeps(config) or config.train.algorithm.reference_every:
        return False
    size = sum(entry.size for entry in read_manifest(base).model_files.weights().values())
    return size >= least * 2**20 and trainer.learner.service.facts().reproducible


def write_with_optimizer(
    run: Run, version: Reference, place: Location, attempt: str, cache: Path, *, for_run: Run
) -> ModelFiles:
    """Write a version that was published without the trainer's state to another checkpoint, with that state.

    Args:
        for_run: run that owns the training session or the started ranks, if it is not `run`, which may be active.

    Raises:
        DataError: repeating the iterations since the newest state does not give the recorded weights.
    """
    trainer, _ = trainer_at(run, version, cache, for_run)
    try:
        return trainer.store(place, attempt)
    finally:
        trainer.close()
