"""Refit: bring every replica of the engine to the weights of a checkpoint.

Invariant: when a function here returns, all replicas have confirmed that they answer with the wanted version. The
wanted version is written to Serve, so a replica that starts later loads it, too.

An engine that shares its memory with the trainer sleeps during training (`placement`). Any refit wakes it, and every
end of a run leaves it awake.

A refit is always checked, because the engine may have been restarted since the last one. It is skipped only if the
rollouts that it serves are complete.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundhouse import plugins
from roundhouse.activity import ACTIVITY, announce
from roundhouse.config.engines import engine_traits
from roundhouse.config.environments import environment_traits, environments_in
from roundhouse.config.generation import inflight_requests
from roundhouse.config.operations import evaluation_sampling, with_set
from roundhouse.config.placement import reservation, served_generation, trainer_makes_room
from roundhouse.errors import ConfigError, InfraError, RoundhouseError, StoreError
from roundhouse.generation.deployment import (
    EngineService,
    ProcessEngine,
    RayServeEngine,
    ServeEndpoint,
    counted_tokens,
)
from roundhouse.generation.exchange import refuse_unfit_engine
from roundhouse.infra.services import state_directory, status
from roundhouse.policy.starting import starting_policy_of
from roundhouse.rollout.clients import first_question
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.trainer_home import trainer_holding, trainer_home
from roundhouse.store.directories import checkpoint_cache
from roundhouse.store.lease import holder
from roundhouse.store.run import Run
from roundhouse.store.stage import WEIGHTS_DIGEST, Reference, StageKind, read_file, read_manifest, sha256
from roundhouse.weight_sync.base import RunCheckpoint, WeightTransport, load_transport
from roundhouse.weight_sync.cache import NodeCache
from roundhouse.weight_sync.replica_state import SAMPLED, RefitOptions, ReplicaReport, proof_of, require_agreement

if TYPE_CHECKING:
    from roundhouse.training.service.verbs import TrainService

logger = logging.getLogger(__name__)


def engine_service(run: Run) -> EngineService:
    """Return the run's engine: the configured one, the trainer of this process, else the local services' Ray Serve.

    Raises:
        InfraError: Ray is not running.
    """
    config = run.config
    if engine_traits(config.generation.backend).in_flow:
        from roundhouse.generation.standalone import engine_of_this_process

        return ProcessEngine(engine_of_this_process())
    if config.generation.engine_url is not None:
        return ProcessEngine(config.generation.engine_url.rstrip("/"))
    if config.infra.has_engine:
        opened: EngineService = plugins.factory("infrastructure", config.infra.kind)(run)
        return opened
    services = status(state_directory(config))
    return RayServeEngine(
        ServeEndpoint(services.ray_dashboard_url, services.serve_url, services.ray_token), reservation(config)
    )


def engine_files(run: Run) -> Path:
    """A local directory with the policy's config and tokenizer, which is all that an engine needs to start.

    It is there before the starting policy is trained, and stays the same for the whole run: weights come by refit.

    Raises:
        StoreError: the directory is not the starting policy's; its tokenizer was made anew with another result.
    """
    target = checkpoint_cache(run.config) / f"engine-{run.uid}"
    if run.parent is not None:
        starting_policy(run)  # a fork's tokenizer is its parent's, whatever its environment
    start = run.checkpoint(0).reference()
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=target.parent))
        if start is None:
            starting_policy_of(run.config).write_untrained(run, staging)
        else:
            for name, entry in read_manifest(start).model_files.by_name().items():
                if "/" not in name and not name.endswith(".safetensors"):
                    (staging / name).write_bytes(read_file(start, entry))
        staging.rename(target)
    if start is not None:
        theirs = read_manifest(start).model_files.by_name().get("tokenizer.json")
        if theirs is not None and sha256((target / "tokenizer.json").read_bytes()) != theirs.sha256:
            raise StoreError(f"{target}/tokenizer.json is not the one of {start.uri}. Delete {target} and start again.")
    return target.resolve()


def engine_model(run: Run) -> str | None:
    """The policy's config and tokenizer as the engine finds them: a directory next to the flow or, for an engine with a disk of
    its own, the URI of version 0; None while that is not committed."""
    if not run.config.infra.loads_from(run.config.store):
        return str(engine_files(run))
    start = run.checkpoint(0).reference()
    return None if start is None else start.uri


def _model_to_start_from(run: Run) -> str:
    if (model := engine_model(run)) is None:
        raise StoreError(f"run {run.run_id} has no starting policy for an engine yet")
    return model


def _application(engine: EngineService, run: Run) -> str:
    """The application that replicas of this run's engine report; those of another run report another."""
    return engine.application(served_generation(run.config), _model_to_start_from(run))


def engine_at(run: Run, version: int) -> str:
    """Return the engine's base URL after every replica answers with this run's weights of the version.

    After a refit this takes one call. If a replica has died, or the engine served another run or was replaced, bring it
    to the checkpoint.

    Raises:
        ConfigError: see `_hold_exchange`.
    """
    checkpoint = run.checkpoint(version).reference()
    if checkpoint is None:
        raise StoreError(f"run {run.run_id} has no checkpoint of version {version}")
    engine = engine_service(run)
    if not _holds(engine, run, checkpoint):
        ensure_version(run, checkpoint, engine)
    _hold_exchange(run, engine)
    return engine.url


def _hold_exchange(run: Run, engine: EngineService) -> None:
    """Before this process uses an engine for the first time: ask it as a rollout does.

    Raises:
        ConfigError: the exchange shows that rollouts cannot use it: key, value and remedy.
        EngineUnreachable: it does not answer.
    """
    known = (engine.url, run.uid, run.config.generation.tool_call_parser)
    if known not in _EXCHANGED:
        refuse_unfit_engine(engine.url, run.config.generation, *first_question(run.config.environment))
        _EXCHANGED.add(known)


_EXCHANGED: set[tuple[str, str, str]] = set()
"""Engines that this process held its exchange with, by URL, run and parser."""


def _holds(engine: EngineService, run: Run, checkpoint: Reference) -> bool:
    """Return whether all replicas of the configured engine answer with this checkpoint.

    Other runs use the same version numbers, and a recreated run has its checkpoints at the same paths, so both path and
    digest of the weights count.
    """
    digest: str | None = None
    if (proof := _recorded_proof(run, checkpoint.policy_version)) is not None:
        digest = proof["digest"]
    elif _format(run) == "checkpoint":
        digest = read_manifest(checkpoint).details.get(WEIGHTS_DIGEST)
    if digest is None:
        return False
    expected = (_application(engine, run), True, checkpoint.policy_version, checkpoint.uri, digest)
    reports = engine.replicas()
    return len(reports) == run.config.generation.replicas and all(
        (one.application, one.ready, one.policy_version, one.weights, one.digest) == expected
        and (one.desired or {}).get("sampling") == _agents_draw_with(run)
        for one in reports
    )


def _agents_draw_with(run: Run) -> list[dict[str, Any]] | None:
    """Return the sampling that the engine accepts from an agent server: that of training and of the evaluations. None
    if our own loop asks, which checks each row against `generation.sampling` itself."""
    config = run.config
    if not any(each.sends_requests for each in environments_in(config.environment).values()):
        return None
    evaluations = [config, *(with_set(config, name) for name in config.evaluation.sets)]
    accepted: list[dict[str, Any]] = []
    for sampling in (config.generation.sampling, *map(evaluation_sampling, evaluations)):
        if (drawn := sampling.model_dump(include=set(SAMPLED))) not in accepted:
            accepted.append(drawn)
    return accepted


def start_engine(run: Run) -> None:
    """Ask for the engine with the policy's architecture; it loads while the starting policy is still being made."""
    announce("engine", text="starting")
    if (model := engine_model(run)) is not None:
        engine_service(run).start(served_generation(run.config), model)


def ensure_version(run: Run, checkpoint: Reference, engine: EngineService | None = None) -> list[ReplicaReport]:
    """Deploy or refit, until all replicas answer with this checkpoint and have proved to hold the same weights."""
    announce("engine", text=f"refit to version {checkpoint.policy_version}")
    engine = engine or engine_service(run)
    generation, version = run.config.generation, checkpoint.policy_version
    patience = generation.start_timeout_seconds + generation.refit_timeout_seconds
    transport = load_transport(run.config.generation.weight_sync)
    try:
        transport.check(run.config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    model = _model_to_start_from(run)
    if engine_traits(generation.backend).train_service is not None:
        from roundhouse.stages.train import lend_trainer  # which imports this module

        lend_trainer(run, checkpoint)
    cache = NodeCache(checkpoint_cache(run.config).resolve() / "weights", int(generation.weights_cache_gib * 2**30))
    with (
        ACTIVITY.track("refit", "engine", f"to version {version}", engine.url, patience),
        _lent_trainer(run, checkpoint, transport) as trainer,
        transport.publish(
            RunCheckpoint(run, checkpoint, cache, engine.url, trainer),
            engine.replicas() if transport.asks_replicas else [],
        ) as published,
    ):
        options = RefitOptions(
            published.digest,
            None if published.source is None else published.source.model_dump(),
            inflight_requests(run.config),
            generation.keep_prefix_cache,
            _agents_draw_with(run),
        )
        replicas = engine.ensure(served_generation(run.config), model, checkpoint.uri, version, options)
    require_agreement(replicas, generation.dtype, _recorded_proof(run, version))
    _hold_exchange(run, engine)
    return replicas


@contextmanager
def _lent_trainer(run: Run, checkpoint: Reference, transport: WeightTransport) -> Iterator[TrainService | None]:
    """Yield the trainer for transports that read its memory. On exit, its state may be written."""
    if not transport.asks_trainer:
        yield None
        return
    try:
        with trainer_holding(run, checkpoint) as trainer:
            yield trainer
    finally:
        trainer_home(run).write_state()


def place_near_engine(run: Run, checkpoint: Reference) -> str | None:
    """Return the ID of the placement group that holds the trainer's place; None without a reservation.

    Raises:
        InfraError: the engine's replica does not report one.
    """
    if reservation(run.config) is None:
        return None
    engine = engine_service(run)
    own = _application(engine, run)
    reports = [each for each in engine.replicas() if each.application == own] or ensure_version(run, checkpoint, engine)
    groups = [replica.placement_group for replica in reports if replica.placement_group is not None]
    if len(groups) != 1:
        raise InfraError(
            f"The engine's replicas name {len(groups)} placement groups, and the trainer has its place in one: the replica is "
            "being replaced."
        )
    return groups[0]


def put_to_sleep(run: Run, checkpoint: Reference) -> list[ReplicaReport]:
    """Let every replica release its memory until the next refit; `checkpoint` is the engine's present one.

    Returns:
        Each replica's report when it slept.
    """
    model = _model_to_start_from(run)
    announce("engine", text="asleep")
    engine, generation = engine_service(run), served_generation(run.config)
    patience = generation.start_timeout_seconds + generation.refit_timeout_seconds
    with ACTIVITY.track("sleep", "engine", "", engine.url, patience):
        options = RefitOptions(asleep=_what_for(run))
        return engine.ensure(generation, model, checkpoint.uri, checkpoint.policy_version, options)


@contextmanager
def own_gym(run: Run) -> Iterator[None]:
    """Within the block the own servers of an environment run, such as those of `kind: nemo_gym`, with the engine as their
    model; all are healthy at its beginning.

    Raises:
        ConfigError, InfraError: they cannot be started.
    """
    environments = [
        each
        for each in environments_in(run.config.environment).values()
        if environment_traits(each).servers is not None
    ]
    if not environments:
        yield
        return
    section: Any = environments[0]
    servers = plugins.resolve(environment_traits(section).servers)
    announce("gym", text="starting")
    logs = (Path(run.config.infra.state) / "gym" / run.run_id).resolve()
    patience = section.start_timeout_seconds
    with ExitStack() as stack:
        with ACTIVITY.track("gym", "servers", run.run_id, str(logs), patience):
            url = stack.enter_context(servers(run, section, engine_service(run).url, logs))
        announce("gym", text=f"ready at {url}")
        yield


@contextmanager
def awake_at_end(run: Run) -> Iterator[None]:
    """On exit, wake every engine that sleeps for this run."""
    try:
        yield
    finally:
        if trainer_makes_room(run.config):
            try:
                sleeping = any(replica.asleep == _what_for(run) for replica in engine_service(run).replicas())
                if sleeping and (newest := run.latest_checkpoint()) is not None:
                    ensure_version(run, newest)
            except RoundhouseError as error:  # the block's exception, if any, is the error to report
                logger.warning("The engine sleeps, and cannot be woken: %s The next run's refit wakes it.", error)


def release_engine(run: Run, *, next_pod_resumes: bool = False) -> None:
    """Release the engine's replicas at the end of a run, or of its process (`EngineService.release`). Log a failure."""
    infra = run.config.infra
    if not infra.has_engine:
        return
    try:
        engine_service(run).release(next_pod_resumes=next_pod_resumes)
    except RoundhouseError as error:
        logger.warning(
            "The engine is not released, and its replicas hold their GPUs: %s %s", error, infra.release_remedy
        )


@contextmanager
def engine_released_after_use(run: Run) -> Iterator[None]:
    """On exit, release the engine's replicas, unless a process drives the run: it keeps its engine."""
    is_driven = holder(run.location) is not None
    try:
        yield
    finally:
        if not is_driven:
            release_engine(run)


def _what_for(run: Run) -> str:
    return f"run {run.run_id} trains with the memory that it gave back."


def _recorded_proof(run: Run, version: int) -> dict[str, Any] | None:
    """Return the replicas' recorded proof of this version; None before it exists, or if weights now travel in another
    format."""
    reference = run.stage(version + 1, StageKind.REFIT).reference()
    proof: dict[str, Any] | None = None if reference is None else read_manifest(reference).details.get("proof")
    if proof is None or proof.get("format") != _format(run):
        return None
    return proof


def _format(run: Run) -> str:
    """Return the subject of a proof's digest: the checkpoint's tensors, or the engine's."""
    generation = run.config.generation
    return generation.dtype if load_transport(generation.weight_sync).publishes_engine_format else "checkpoint"


def refit_iteration(run: Run, iteration: int, checkpoint: Reference) -> Reference:
    """Refit for an iteration and record every replica's report."""
    stage = run.stage(iteration, StageKind.REFIT)
    reference = stage.reference()
    if reference is not None and run.stage(iteration, StageKind.COLLECT).reference() is not None:
        return reference
    attempt = run.begin(stage, policy_version=checkpoint.policy_version)
    engine = engine_service(run)
    replicas = ensure_version(run, checkpoint, engine)
    if reference is not None:
        return reference
    _hold_exchange(run, engine)  # before tokens are counted: refit requests do not belong to rollouts
    generated = counted_tokens(engine.replicas())
    return attempt.commit(
        inputs={"checkpoint": checkpoint},
        counts={"replicas": len(replicas)},
        metrics={
            "refit/replica_seconds_max": max(replica.refit_seconds for replica in replicas),
            **{f"refit/{name}": value for name, value in engine.metrics().items()},
        },
        details={
            "replicas": [
                {"id": one.replica_id, "pid": one.pid, "way": one.transport, "note": one.transport_note}
                for one in replicas
            ],
            "proof": {**proof_of(replicas), "format": _format(run)},
            "engine_tokens": generated,
        },
    )
