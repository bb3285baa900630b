"""Two runs beside one another: where their configurations differ, and how their curves run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from roundhouse.config.loading import flatten
from roundhouse.query.database import QueryError, run_query
from roundhouse.query.lineage import identity_of

SHOWN = (
    "reward/mean",
    "evaluation/reward/mean",
    "rollout/generated_tokens_mean",
    "rollout/truncated_rate",
    "validate/quarantined",
    "train/approx_entropy",
    "train/clip_fraction",
    "train/grad_norm",
    "train/token_mult_prob_error",
    "time/iteration",
)
"""Metrics that are compared unless others are asked for."""

NOT_TOLD = ("run_id", "store")
"""Keys that differ between any two runs and explain nothing."""


@dataclass(slots=True)
class Comparison:
    """Two runs."""

    a: str
    b: str
    code_versions: tuple[str, str]
    differences: dict[str, tuple[Any, Any]]
    """Dotted keys of the configuration whose values differ."""
    curves: dict[str, dict[int, tuple[float | None, float | None]]]
    """By metric and iteration, the value of each run; None where it has none."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_runs(store: str, a: str, b: str, metrics: list[str] | None = None) -> Comparison:
    """Compare two runs of a store.

    Args:
        metrics: names of metrics; the usual ones when left out.

    Raises:
        StoreError: a run is not there.
        QueryError: neither has a metric of that name.
    """
    identities = [identity_of(store, run_id) for run_id in (a, b)]
    flat = [flatten(identity["config"]) for identity in identities]
    keys = sorted((flat[0].keys() | flat[1].keys()) - set(NOT_TOLD))
    found = curves(store, a, b)
    if unknown := [name for name in metrics or () if name not in found]:
        near = ", ".join(sorted(found)) or "none"
        raise QueryError(f"Neither {a} nor {b} has a metric {unknown[0]!r}. There are: {near}.")
    return Comparison(
        a,
        b,
        (identities[0]["code_version"], identities[1]["code_version"]),
        {key: (flat[0].get(key), flat[1].get(key)) for key in keys if flat[0].get(key) != flat[1].get(key)},
        {name: found[name] for name in (metrics or SHOWN) if name in found},
    )


def curves(store: str, a: str, b: str) -> dict[str, dict[int, tuple[float | None, float | None]]]:
    """Every metric of both runs, by iteration."""
    rows = run_query(store, "SELECT run_id, iteration, metrics FROM iterations ORDER BY iteration", runs=sorted({a, b}))
    found: dict[str, dict[int, tuple[float | None, float | None]]] = {}
    for row in rows.to_pylist(maps_as_pydicts="lossy"):
        for name, value in row["metrics"].items():
            by_iteration = found.setdefault(name, {})
            of_a, of_b = by_iteration.get(row["iteration"], (None, None))
            by_iteration[row["iteration"]] = (
                value if row["run_id"] == a else of_a,
                value if row["run_id"] == b else of_b,
            )
    return found
