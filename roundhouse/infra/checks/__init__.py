"""Find faults of this machine or cluster and their remedies (`roundhouse doctor`).

Invariant: every finding that is not `ok` has a `remedy`. A diagnosis changes nothing and always ends: every check has
its time limit, and a check that raises is a finding too.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from roundhouse import plugins
from roundhouse.config.models import KubernetesInfra, RunConfig

__all__ = ["Finding", "diagnose", "diagnose_cluster"]


class Finding(BaseModel):
    """Result of a check."""

    model_config = ConfigDict(frozen=True)

    name: str
    """Name of the check; stable, for programs."""
    status: Literal["ok", "warn", "fail"]
    """warn: it works, but slowly or not for everything. fail: a run will not work."""
    detail: str
    """Result of the check."""
    remedy: str = ""
    """Remedy; empty if the check is ok."""


Check = Callable[[], list[Finding]]


def diagnose(
    config: RunConfig | None = None,
    state: str | Path = ".roundhouse",
    device: str | None = None,
    gpus: int | None = None,
) -> list[Finding]:
    """All checks, in a fixed order.

    Args:
        config: a run to check for: its store, policy, environment and tracking server. None: the defaults.
        state: what `infra.state` of a run names; a configuration's own one wins. Services are in `<state>/services`.
        device: a GPU by name, to hold the configuration's memory plan against (`machine.memory_plan`).
        gpus: how many of them; None: the ranks of `train.service`.

    Raises:
        ConfigError: no such device is known, or the model cannot be planned.
    """
    from roundhouse.infra.checks import machine, reachability

    state = Path(config.infra.state if config else state)
    store = config.store if config else str(state / "store")
    local_store = [] if store.startswith("s3://") else [Path(store.removeprefix("file://"))]
    checks: list[Check] = [
        machine.python,
        machine.packages,
        machine.engine,
        machine.torch_extensions,
        machine.processor,
        machine.gpu,
        machine.memory,
        machine.shared_memory,
        partial(machine.disk, state, *local_store),
        machine.temporary_directory,
        machine.variables,
        partial(reachability.state, state),
        partial(reachability.store, store),
        partial(reachability.services, state / "services"),
        reachability.foreign,
    ]
    if config is not None:
        checks += [
            partial(reachability.configured, config),
            partial(reachability.topology, config),
            partial(machine.batch, config),
        ]
    planned = [] if config is None or device is None else machine.memory_plan(config, device, gpus)
    with ThreadPoolExecutor(len(checks)) as pool:
        return [*(finding for findings in pool.map(_guarded, checks) for finding in findings), *planned]


def diagnose_cluster(config: RunConfig | None = None) -> list[Finding]:
    """Check whether runs can work on a Kubernetes cluster: that of the configuration's `infra`, else of the
    kubeconfig."""
    from roundhouse.infra.checks import reachability

    infra = (None if config is None else config.infra.cluster) or KubernetesInfra()
    checks: list[Check] = [partial(plugins.traits("infrastructure", "kubernetes"), infra)]
    if config is not None and config.store.startswith("s3://"):
        checks.append(partial(reachability.store, config.store))
    return [finding for check in checks for finding in _guarded(check)]


def _guarded(check: Check) -> list[Finding]:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - one broken check must not hide the others
        function = getattr(check, "func", check)
        return [
            fail(function.__name__, f"the check itself broke: {type(error).__name__}: {error}", "Please report this.")
        ]


def ok(name: str, detail: str) -> Finding:
    return Finding(name=name, status="ok", detail=detail)


def warn(name: str, detail: str, remedy: str) -> Finding:
    return Finding(name=name, status="warn", detail=detail, remedy=remedy)


def fail(name: str, detail: str, remedy: str) -> Finding:
    return Finding(name=name, status="fail", detail=detail, remedy=remedy)
