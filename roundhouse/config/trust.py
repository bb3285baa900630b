"""Code that a configuration names, where the configuration comes from a store.

Whoever can write to a store can write a run's run.json, so what stands there is executed only when the person who starts the
run has named it too, or says that the store is trusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from roundhouse.config.kubernetes import CollectorPods, TrainerPods
from roundhouse.config.loading import flatten
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError

_CODE = re.compile(
    r"environment\.(target|worker|evaluator|workspace)|train\.algorithm\.target|generation\.weight_sync\.target|infra\..+\.image"
)
_OURS = {
    None, "simple", "agent", "mock", TrainerPods.model_fields["image"].default, CollectorPods.model_fields["image"].default
}  # fmt: skip
"""Values of these keys that name no code but Roundhouse's own."""


def unnamed_code(config: RunConfig, overrides: Iterable[str]) -> dict[str, str]:
    """Keys of the configuration that name code (classes, files, images), with their values, but for those that `overrides`
    (`key=value`) give."""
    given = [override.partition("=")[0].strip() for override in overrides]
    return {
        key: str(value)
        for key, value in flatten(config.model_dump(mode="json")).items()
        if _CODE.fullmatch(key)
        and value not in _OURS
        and not any(key == one or key.startswith(f"{one}.") for one in given)
    }


def refuse_unnamed_code(config: RunConfig, overrides: Iterable[str]) -> None:
    """Refuse to run what only the store names.

    Raises:
        ConfigError: with the keys, and how to accept them.
    """
    if found := unnamed_code(config, overrides):
        lines = "\n".join(f"  {key}: {value}" for key, value in found.items())
        named = " ".join(f"--set {key}={value}" for key, value in found.items())
        raise ConfigError(
            f"The store's configuration of run {config.run_id!r} names code that would be executed here:\n{lines}\n"
            "Whoever can write to the store can have written that. If it is what you expect, say so with --trust-store, or "
            f"name it yourself: {named}"
        )
