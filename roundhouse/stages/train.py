"""Train: one step of an iteration, from its sequences and version k-1 to the files of version k.

Invariant: the written files do not depend on where the step runs (`train.service`).

A trainer stays open between iterations if it can (`_resident`): in this process, a Ray actor or a remote server. It
then holds exactly the input checkpoint, verified by the digest of its weights. A new process loads the checkpoint and
continues bit for bit. If it shares memory with the engine (`placement`), it is released after each step. With `kind:
process` each step is a process that starts from the store; on `infra.kind: kubernetes` it is a Job.

A resident trainer may write its state after its version was published, in parallel with the next refit and collection
(`_StateWriter`). The trainer does not change before this state is complete. A start without the state makes it again
from the previous version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from roundhouse import plugins
from roundhouse.activity import announce
from roundhouse.config.models import TrainConfig
from roundhouse.config.placement import engine_sleeps, trainer_launcher, trainer_makes_room
from roundhouse.config.training import ProcessService, ResidentService
from roundhouse.cpu import attribute_to_this_stage, clock, take_seconds
from roundhouse.errors import ConfigError, DataError, InfraError, OutOfMemory
from roundhouse.health.policy import typed
from roundhouse.launch.base import Program, open_launcher
from roundhouse.stages.checkpoint import reference_version
from roundhouse.stages.freshness import (
    STOPPED,
    StaleData,
    drift,
    importance_metrics,
    judge_importance,
    settle,
    staleness_metrics,
)
from roundhouse.stages.refit import place_near_engine, put_to_sleep
from roundhouse.stages.validate import mismatched, refuse_mismatched, tolerance_of
from roundhouse.store.directories import StoredModel, checkpoint_cache
from roundhouse.store.location import Location
from roundhouse.store.run import TRAINER, Run, state_of, trained_since_state
from roundhouse.store.stage import (
    WEIGHTS_DIGEST,
    Attempt,
    ModelFiles,
    Reference,
    Stage,
    StageKind,
    model_location,
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
    from roundhouse.training.service.one_shot import StepSpec, TrainStepResult
    from roundhouse.training.service.verbs import TrainService
    from roundhouse.training.trainer import Trainer
    from roundhouse.weight_sync.replica_state import ReplicaReport


Say = Callable[[str], None]

MEMORY = "memory_settings"
"""In the details of the stage's manifest: the settings of `train` that bound memory, which may change between iterations."""

STEP = "roundhouse.training.service.one_shot"

logger = logging.getLogger(__name__)

_short_of_memory: set[str] = set()
"""Uids of runs that found no memory for a trainer in this process, which may be left without threads or room. Their next
trainer has another process."""
_resident: dict[tuple[str | int | float, ...], Trainer] = {}
"""At most one trainer, by `_key`."""


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
    attempt.charge(wait_for_state())
    waited = time.monotonic() - began
    with _turn(run, base) as asleep:
        if run.config.train.service.runs_whole_steps:
            result, columns = _in_process(run, iteration, sequences, base, cache, say, attempt.name)
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
        _writing.append(_StateWriter(run, update, _resident[_key(run, iteration, result.checkpoint)]))
        if not load_transport(run.config.generation.weight_sync).asks_trainer:
            write_state()
    return update


class _StateWriter:
    """Write the state of the trainer that made a version, in a separate thread. Changes to the trainer wait for it."""

    def __init__(self, run: Run, update: Reference, trainer: Trainer) -> None:
        self._run, self._update, self._trainer = run, update, trainer
        self.error: BaseException | None = None
        self.cpu_seconds = 0.0
        self._began = threading.Lock()
        self._thread = threading.Thread(target=self._write, name="trainer state", daemon=True)

    def begin(self) -> None:
        """Write, unless that has begun."""
        if self._began.acquire(blocking=False):
            self._thread.start()

    def end(self) -> None:
        """Return when it is written, or has failed."""
        self.begin()
        self._thread.join()

    def _write(self) -> None:
        with _busy:
            if sys.platform == "linux":  # on Linux each thread has a priority, which its child threads inherit
                own = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, own, min(19, os.getpriority(os.PRIO_PROCESS, own) + _GIVES_WAY))
            run, version = self._run, self._update.iteration
            with attribute_to_this_stage():
                seconds = clock()
                began = seconds()
                try:
                    attempt = run.begin(run.trainer_state(version), policy_version=version)
                    written = self._trainer.store(attempt.stage.location, attempt.name, weights=False)
                    for entry in written.files:
                        attempt.adopt(entry)
                    attempt.commit(inputs={"train": self._update}, directory=written.directory)
                except BaseException as error:  # noqa: BLE001 - raised by `wait_for_state`
                    self.error = error
                self.cpu_seconds = seconds() - began


_GIVES_WAY = 5
"""Nice value of the writer relative to the refit and collection that run at the same time."""
_writing: list[_StateWriter] = []
"""At most one."""
_busy = threading.Lock()
"""Held while the kept trainer is in use: for a refit, to write its state, or to close it."""


def write_state() -> None:
    """Start to write the trainer's state in the background. If the next refit reads weights from the trainer, the
    refit is first."""
    for writer in _writing:
        writer.begin()


def wait_for_state() -> float:
    """Wait until no state is being written, and return the CPU seconds of the writing.

    Raises:
        RoundhouseError: the state could not be written, and the trainer is closed; the state is made again when needed.
    """
    if not _writing:
        return 0.0
    writer = _writing[0]
    writer.end()
    _writing.clear()
    if writer.error is not None:
        release_trainer()
        raise writer.error
    return writer.cpu_seconds


_BUSY_SECONDS = 10.0
"""For a replica that is sent weights, at the end of a flow that may have failed because of it."""


@contextmanager
def trainer_released_at_end() -> Iterator[None]:
    """On exit, wait for the state writer and release the trainer."""
    try:
        yield
    finally:
        try:
            release_trainer(_BUSY_SECONDS)
        except Exception as error:  # noqa: BLE001 - what ended the block, if anything did, is the error to be told
            logger.warning("The trainer ends with this process: %s", error)


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
            release_trainer()


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
        release_trainer()
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
        release_trainer()
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
        trainer, _ = _trainer_at(run, base, cache, for_run)
        try:
            log_probs = trainer.log_probs(batch)
        except BaseException:
            trainer.close()
            raise
        _resident[_key(run, base.policy_version, read_manifest(base).model_files)] = trainer
        return log_probs


def lend_trainer(run: Run, base: Reference) -> None:
    """Let the engine of this process generate with the trainer that holds a version, which stays for the next step."""
    from roundhouse.generation.trainer_engine import lend

    trainer, _ = _trainer_at(run, base, checkpoint_cache(run.config))
    _resident[_key(run, base.policy_version, read_manifest(base).model_files)] = trainer
    lend(base.uri, trainer.learner.service)


def release_trainer(patience_seconds: float = -1) -> None:
    """Release the resources that are kept between iterations: memory, machines, a server session.

    Args:
        patience_seconds: time to wait for the trainer's present user. -1: wait until it is done.

    Raises:
        InfraError: it was not done in time.
    """
    try:
        wait_for_state()
    except Exception as error:  # noqa: BLE001 - what ends the run, if anything does, is the error to be told
        logger.warning("The trainer's state was not written: %s The next start trains that iteration again.", error)
    if not _busy.acquire(timeout=patience_seconds):
        raise InfraError(f"The trainer is in use after {patience_seconds:g} s.")
    try:
        while _resident:
            _, trainer = _resident.popitem()  # closed once, whether or not that succeeds
            trainer.close()
    finally:
        _busy.release()


@contextmanager
def trainer_holding(run: Run, version: Reference) -> Iterator[TrainService | None]:
    """Yield the service of an idle trainer that holds exactly this version, for exclusive use in the block; None if
    such a trainer does not exist or is busy."""
    if not _busy.acquire(blocking=False):
        yield None
        return
    try:
        trainer = _resident.get(_key(run, version.policy_version, read_manifest(version).model_files))
        yield None if trainer is None else trainer.learner.service
    finally:
        _busy.release()


def _in_service(
    run: Run, iteration: int, sequences: pa.Table, base: Reference, cache: Path, attempt: str
) -> tuple[TrainStepResult, pa.Table]:
    """The step by a trainer that stays open for the next one."""
    from roundhouse.training.batch import TrainingSequences
    from roundhouse.training.service.one_shot import TrainStepResult

    batch = TrainingSequences.from_table(sequences)
    with _noting_lack_of_memory(run):
        trainer, again = _trainer_at(run, base, cache)
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
    _resident[_key(run, iteration, written)] = trainer
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
            _short_of_memory.add(run.uid)
        raise


def _in_process(
    run: Run, iteration: int, sequences: Reference, base: Reference, cache: Path, say: Say, attempt: str
) -> tuple[TrainStepResult, pa.Table]:
    """The step by a program that reads from the store and writes to it: a process of this machine, or a Job."""
    from roundhouse.training.service.one_shot import StepSpec, read_result

    config, began = run.config, time.monotonic()
    service: Any = config.train.service
    origin, since = trained_since_state(base)
    if since:
        raise ConfigError(
            f"train.service.kind is process, but version {base.policy_version} holds weights without the optimizer's state, "
            f"which version {origin.policy_version} has (checkpoint.optimizer_every). Continue with kind resident, which "
            f"trains {len(since)} iterations again, or fork from version {origin.policy_version}."
        )
    name = trainer_launcher(config)
    assert name is not None, "a process is started"
    with open_launcher(name, "train.service.launcher", run) as launcher, tempfile.TemporaryDirectory() as scratch:
        spec = StepSpec(
            iteration=iteration,
            seed=config.seed,
            temperature=config.generation.sampling.temperature,
            train=config.train,
            sequences=sequences,
            base=base,
            state=None if (state := state_of(base)) == base else state,
            reference=reference_origin(run, base.policy_version),
            critic=critic_origin(run),
            checkpoint=run.checkpoint(iteration).location.uri,
            attempt=attempt,
            recompute_tolerance=tolerance_of(config),
            report="",
            **launcher.caches(cache),  # type: ignore[arg-type]
        )
        jobs = run.stage(iteration, StageKind.TRAIN).location / "jobs"
        place, log_line = (Location(Path(scratch).as_uri()), logger.debug) if launcher.same_machine else (jobs, say)
        result, columns = read_result(launcher.run(step_program(spec, service, place), log_line, threading.Event()))
    figures = launcher.metrics()
    if figures:
        # pods, images, imports and the cluster itself; negative for a Job that was found finished
        figures["kubernetes_seconds"] = time.monotonic() - began - result.seconds["total"]
    return result.model_copy(update={"metrics": result.metrics | figures}), columns


def step_program(spec: StepSpec, service: ProcessService, place: Location) -> Program:
    """The step as a program, which is found again by all that it depends on."""
    fleeting = ("attempt", "report", "cache", "node_cache", "node_cache_bytes")
    tree = spec.model_dump(mode="json", exclude={**dict.fromkeys(fleeting, True), "train": {"service": True}})
    # sorted: a stored reference has its counts in another order than a new one
    depends = json.dumps(tree, sort_keys=True)
    return Program(
        what="The training step",
        module=STEP,
        spec=spec,
        place=place,
        place_field="report",
        stage="train",
        timeout_seconds=service.timeout_seconds,
        timeout_key="train.service.timeout_seconds",
        ranks=service.processes,
        iteration=spec.iteration,
        digest=hashlib.sha256(depends.encode()).hexdigest()[:32],
    )


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
    trainer, _ = _trainer_at(run, version, cache, for_run)
    try:
        return trainer.store(place, attempt)
    finally:
        trainer.close()


def _trainer_at(run: Run, base: Reference, cache: Path, for_run: Run | None = None) -> tuple[Trainer, int]:
    """Return a trainer that holds exactly `base`, the kept one (which is not kept any more) or a new one, and the
    number of iterations that it trained again."""
    from roundhouse.training.service.verbs import Role
    from roundhouse.training.trainer import Trainer

    wait_for_state()
    key = _key(run, base.policy_version, read_manifest(base).model_files)
    with _busy:
        resident = _resident.pop(key, None)
    if resident is not None:
        if reference_version(run, base.policy_version) == base.policy_version > run.first_version:
            try:
                renewed = reference_model(run, cache, base.policy_version)
                assert renewed is not None, "reference_every is refused where there is no reference"
                resident.learner.service.load_checkpoint(renewed, role=Role.REFERENCE)
            except BaseException:
                resident.close()
                raise
        return resident, 0
    release_trainer()
    origin, since = trained_since_state(base)
    _refuse_other_memory_settings(run, since, base)
    config = run.config
    temperature, near = config.generation.sampling.temperature, place_near_engine(run, base)
    whose = for_run or run
    at = (whose, base.policy_version + 1)
    service = open_service(
        config.train,
        owner=whose.uid,
        temperature=temperature,
        placement_group=near,
        at=at,
        apart=run.uid in _short_of_memory,
    )
    try:
        state = state_of(origin)
        trainer = Trainer.over(
            service,
            StoredModel.of(origin, cache),
            config.train,
            trainer_state=None if state is None else StoredModel.of(state, cache) / TRAINER,
            reference_dir=reference_model(run, cache, base.policy_version),
            critic_dir=critic_model(run, cache),
            seed=config.seed,
        )
        if since:
            _train_again(run, trainer, since, base)
    except BaseException:
        service.close()
        raise
    return trainer, len(since)


def reference_origin(run: Run, base: int) -> Reference | str | None:
    """Return the reference model for training from version `base`: a checkpoint, a URI, or None if the algorithm needs
    only the policy.

    Raises:
        ConfigError: the teacher's directory is missing.
    """
    source = run.config.train.algorithm.reference_source
    if source is None or run.config.train.reference_is_frozen:
        return None
    if source == "start":
        start = run.checkpoint(reference_version(run, base)).reference()
        assert start is not None, "a run that trains has its starting policy, and keeps its reference"
        return start
    return model_at(source, "teacher")


def critic_origin(run: Run) -> str | None:
    """Return the URI of the critic's initial model, if it is configured.

    Raises:
        ConfigError: the directory is missing.
    """
    section = run.config.train.algorithm.critic_section
    return None if section is None or section.model is None else model_at(section.model, "critic.model")


def critic_model(run: Run, cache: Path) -> StoredModel | None:
    """Return the model section under which the critic is loaded."""
    origin = critic_origin(run)
    return None if origin is None else StoredModel(uri=origin, cache=cache)


def model_at(source: str, key: str) -> str:
    """Return the URI of the model directory that this key of the algorithm names.

    Raises:
        ConfigError: it does not contain a model.
    """
    place = model_location(Location(source))
    if "config.json" not in place.tree():
        raise ConfigError(
            f"train.algorithm.{key}: {place.uri} has no config.json. Give a Hugging Face model directory."
        )
    return place.uri


def reference_model(run: Run, cache: Path, base: int) -> StoredModel | None:
    """Return the model section under which the reference is loaded."""
    origin = reference_origin(run, base)
    if isinstance(origin, Reference):
        return StoredModel.of(origin, cache)
    return None if origin is None else StoredModel(uri=origin, cache=cache)


def _train_again(run: Run, trainer: Trainer, since: list[Reference], base: Reference) -> None:
    """Train the iterations that brought about `base` again, from their recorded sequences.

    Raises:
        DataError: the weights are not those of `base`.
    """
    from roundhouse.training.batch import TrainingSequences

    versions = f"{since[0].iteration} to {base.policy_version}"
    logger.warning("Version %d holds no optimizer state: training %s again", base.policy_version, versions)
    announce("retraining", iterations=len(since), version=base.policy_version)
    for sequences in since:
        batch = TrainingSequences.from_table(read_table(sequences, "sequences"))
        judged = tolerances(batch.policy_versions, sequences.iteration - 1, tolerance_of(run.config))
        trainer.step(batch, sequences.iteration, judged)
    recorded = read_manifest(base).details.get(WEIGHTS_DIGEST)
    place = run.checkpoint(base.policy_version).location
    written = trainer.store(place, "again", state=False)
    (place / written.directory).delete_tree()
    digest = written.weights_digest
    if digest != recorded:
        raise DataError(
            f"Version {base.policy_version} holds no optimizer state (checkpoint.optimizer_every), and training iterations "
            f"{versions} again gave weights with the digest {digest}, where {recorded} is recorded. Train with the versions "
            "of Roundhouse and its libraries, the threads and the number of processes that the run had, or fork from version "
            f"{since[0].iteration - 1}, which holds the state."
        )


def _refuse_other_memory_settings(run: Run, since: list[Reference], base: Reference) -> None:
    """Refuse settings that would give iterations that are trained again other weights, by rounding, than were published.

    Raises:
        ConfigError: names each setting with the recorded value.
    """
    for sequences in since:
        place = Location(sequences.uri.rsplit("/", 1)[0]) / StageKind.TRAIN  # a fork's are in its parent
        train = Stage(place, kind=StageKind.TRAIN, run_id="", iteration=sequences.iteration).reference()
        settings = {} if train is None else read_manifest(train).details.get(MEMORY, {})
        own = run.config.train.memory_settings
        if others := [f"train.{name}={value}" for name, value in settings.items() if own[name] != value]:
            raise ConfigError(
                f"Version {base.policy_version} holds no optimizer state (checkpoint.optimizer_every), and iteration "
                f"{sequences.iteration}, which must be trained again for it, used {', '.join(others)}. Set this, or "
                f"fork from version {since[0].iteration - 1}, which holds the state."
            )


def _key(run: Run, version: int, files: ModelFiles) -> tuple[str | int | float, ...]:
    """Return the key of a kept trainer: files of its version and the `train` section. A trainer is reused only for an
    equal key."""
    weights = "+".join(entry.sha256 for entry in files.weights().values())
    return run.uid, version, weights, run.config.train.model_dump_json(), run.config.generation.sampling.temperature


def open_service(
    config: TrainConfig,
    *,
    owner: str,
    temperature: float,
    placement_group: str | None = None,
    at: tuple[Run, int] | None = None,
    apart: bool = False,
) -> TrainService:
    """Open the plug-in that `config.service` names, to be closed by the caller. All services compute the same.

    Args:
        owner: owner of the training session; a remote service distinguishes runs by it.
        placement_group: Ray ID of the group that holds the actor in its last bundle.
        at: run and iteration, for ranks that start elsewhere.
        apart: train in another process than this one.

    Raises:
        ConfigError: the service is one process per step, which does not offer the verbs, or a token cannot be read.
        InfraError: Ray cannot be reached, or ranks do not start.
    """
    from roundhouse.training.service.verbs import ServiceArguments

    opened: TrainService = plugins.factory("train_service", config.service.kind)(
        config, ServiceArguments(owner, temperature, placement_group, at, apart)
    )
    return opened
