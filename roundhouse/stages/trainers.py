"""Trainers that hold exactly one version: the kept one, or a new one that trains what the state lacks again.

Invariant: a trainer is used only for the files, the section `train` and the temperature that it was made for.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from roundhouse import plugins
from roundhouse.activity import announce
from roundhouse.config.models import TrainConfig
from roundhouse.errors import ConfigError, DataError
from roundhouse.stages.base_models import critic_model, reference_model
from roundhouse.stages.checkpoint import reference_version
from roundhouse.stages.refit import place_near_engine
from roundhouse.stages.trainer_home import key_of, make_room_for, trainer_home
from roundhouse.stages.validate import tolerance_of
from roundhouse.store.directories import StoredModel
from roundhouse.store.location import Location
from roundhouse.store.run import TRAINER, Run, state_of, trained_since_state
from roundhouse.store.stage import WEIGHTS_DIGEST, Reference, Stage, StageKind, read_manifest, read_table
from roundhouse.trajectories.schemas import tolerances

if TYPE_CHECKING:
    from roundhouse.training.service.verbs import TrainService
    from roundhouse.training.trainer import Trainer

logger = logging.getLogger(__name__)


MEMORY = "memory_settings"
"""In the details of the stage's manifest: the settings of `train` that bound memory, which may change between iterations."""


def trainer_at(run: Run, base: Reference, cache: Path, for_run: Run | None = None) -> tuple[Trainer, int]:
    """Return a trainer that holds exactly `base`, the kept one (which is not kept any more) or a new one, and the
    number of iterations that it trained again."""
    from roundhouse.training.service.verbs import Role
    from roundhouse.training.trainer import Trainer

    home = trainer_home(run)
    home.wait_for_state()
    resident = home.take(key_of(run, base.policy_version, read_manifest(base).model_files))
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
    make_room_for(run)
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
        apart=home.needs_process,
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
