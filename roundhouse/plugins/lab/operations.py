"""Operations that the Python API and the forms offer under their names.

Invariant: the caller accepts each configuration, and thus its code, before anything of it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from roundhouse.config.models import RunConfig
from roundhouse.plugins.lab import replays
from roundhouse.plugins.lab.replays.comparison import Comparison, DriftGate
from roundhouse.plugins.lab.replays.stages import Say, substituted_config
from roundhouse.plugins.lab.replays.verdicts import VerdictDiff, collections_of, judging_config
from roundhouse.store.run import load_run

Accept = Callable[[RunConfig], None]
"""Raise a ConfigError to refuse a configuration."""


def replay(
    store: str,
    run_id: str,
    iterations: Sequence[int],
    stages: Sequence[str],
    overrides: Sequence[str],
    inputs: Mapping[str, str] | None,
    name: str | None,
    accept: Accept,
    *,
    gated: bool = False,
    say: Say = lambda line: None,
) -> Comparison:
    """Run recorded stages again; arguments as of `roundhouse.plugins.lab.replays.replay`.

    Args:
        gated: stop at the default bounds of drift.

    Raises:
        StoreError, ConfigError: as `roundhouse.plugins.lab.replays.replay`, or raised by `accept`.
    """
    accept(substituted_config(load_run(store, run_id).config, overrides))
    gate = DriftGate() if gated else None
    return replays.replay(
        store, run_id, iterations, stages, overrides=overrides, inputs=inputs, name=name, gate=gate, say=say
    )


def rescore(
    store: str,
    run_id: str,
    name: str,
    iterations: range | None,
    overrides: Sequence[str],
    accept: Accept,
) -> VerdictDiff:
    """Judge stored rollouts anew; arguments as of `roundhouse.plugins.lab.replays.rescore`.

    Raises:
        StoreError, ConfigError: as `roundhouse.plugins.lab.replays.rescore`, or raised by `accept`.
    """
    for reference in collections_of(store, run_id, iterations):
        accept(judging_config(store, reference, overrides))
    return replays.rescore(store, run_id, name, iterations=iterations, overrides=overrides)
