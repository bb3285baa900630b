"""The models that a training step needs in addition to the policy: the reference and the critic.

Invariant: a checkpoint of the store is read by its manifest, any other model by the URI of its directory.
"""

from __future__ import annotations

from pathlib import Path

from roundhouse.errors import ConfigError
from roundhouse.stages.checkpoint import reference_version
from roundhouse.store.directories import StoredModel
from roundhouse.store.location import Location
from roundhouse.store.run import Run
from roundhouse.store.stage import Reference, model_location


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
