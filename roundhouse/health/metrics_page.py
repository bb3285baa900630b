"""Metrics of a run's process for Prometheus.

Invariant: the page does not slow the work: work in flight is counted on request, and events are counted when they are
announced anyway (`roundhouse.activity`). No label has more values than a run has stages, metrics or kinds of work.

`ROUNDHOUSE_METRICS_PORT=9464` opens it for this machine, `0.0.0.0:9464` for others (a pod's scraper), in flow, trainer
and gym server; an engine has `/metrics` on its serving port, together with the engine's own metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, make_asgi_app
from prometheus_client.core import GaugeMetricFamily

from roundhouse.activity import ACTIVITY, Activity
from roundhouse.errors import ConfigError, InfraError
from roundhouse.http.ports import LOOPBACK, HttpThread
from roundhouse.logs import labels

METRICS = {
    "roundhouse_in_flight": "Pieces of work that are under way, by module and kind (stage, rollout, model call, …).",
    "roundhouse_oldest_seconds": "Age of the oldest of them.",
    "roundhouse_silent_seconds": "Since the one of them that moved last has moved: a stage that hangs grows here.",
    "roundhouse_stages_total": "Stages begun, retries counted, by stage.",
    "roundhouse_rollouts_total": "Rollouts finished.",
    "roundhouse_generated_tokens_total": "Tokens that their models drew.",
    "roundhouse_collect_finished": "Rollouts of the present collection that are finished, those found in the store counted.",
    "roundhouse_collect_planned": "Rollouts of the present collection.",
    "roundhouse_iteration": "The newest finished iteration.",
    "roundhouse_iteration_metric": "Its metrics, by name (docs/metrics.md).",
    "roundhouse_recoveries_total": "Reactions of the run to a failed iteration, by step and code (docs/failures.md).",
    "roundhouse_alerts_total": "Alerts raised, by name.",
}
"""Name -> meaning; docs/kubernetes-reference.md has the same."""
_KIND_WORDS = 2
"""Number of words of a kind of work in a label: `update 3 of 8` is `update`."""


class InFlightCollector:
    """Counts the work in flight when the page is read."""

    def __init__(self, activity: Activity = ACTIVITY) -> None:
        self._activity = activity

    def collect(self) -> Iterable[GaugeMetricFamily]:
        count, oldest, silent = (
            GaugeMetricFamily(name, METRICS[name], labels=["module", "kind"])
            for name in ("roundhouse_in_flight", "roundhouse_oldest_seconds", "roundhouse_silent_seconds")
        )
        groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for work in self._activity.in_flight():
            words = work.kind.split()
            named = all(word.isalpha() for word in words[:_KIND_WORDS])
            key = (work.module, " ".join(words[: _KIND_WORDS if named else 1]))
            groups.setdefault(key, []).append((work.seconds, work.silent_seconds))
        for key, each in groups.items():
            count.add_metric(key, len(each))
            oldest.add_metric(key, max(seconds for seconds, _ in each))
            silent.add_metric(key, min(quiet for _, quiet in each))
        return count, oldest, silent


class Announced(logging.Handler):
    """Counts of announced events."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(logging.INFO)

        def counter(name: str, *by: str) -> Counter:
            return Counter(name.removesuffix("_total"), METRICS[name], ["run", *by], registry=registry)

        def gauge(name: str, *by: str) -> Gauge:
            return Gauge(name, METRICS[name], ["run", *by], registry=registry)

        self._stages = counter("roundhouse_stages_total", "stage")
        self._rollouts = counter("roundhouse_rollouts_total")
        self._tokens = counter("roundhouse_generated_tokens_total")
        self._finished = gauge("roundhouse_collect_finished")
        self._planned = gauge("roundhouse_collect_planned")
        self._iteration = gauge("roundhouse_iteration")
        self._metric = gauge("roundhouse_iteration_metric", "name")
        self._recoveries = counter("roundhouse_recoveries_total", "step", "code")
        self._alerts = counter("roundhouse_alerts_total", "name")

    def emit(self, record: logging.LogRecord) -> None:
        facts: dict[str, Any] = getattr(record, "facts", {})
        run = str(labels().get("run", ""))
        match getattr(record, "event", ""):
            case "stage":
                self._stages.labels(run, facts["name"]).inc()
            case "rollout":
                self._rollouts.labels(run).inc()
                self._tokens.labels(run).inc(facts.get("tokens") or 0)
            case "collect":
                self._finished.labels(run).set(facts["finished"])
                self._planned.labels(run).set(facts["planned"])
            case "iteration":
                self._iteration.labels(run).set(facts["iteration"])
                for name, value in facts["metrics"].items():
                    self._metric.labels(run, name).set(value)
            case "recovery":
                self._recoveries.labels(run, facts["step"], facts["code"]).inc()
            case "alert":
                self._alerts.labels(run, facts["name"]).inc()


@dataclass(frozen=True)
class MetricsPage:
    """An open page."""

    port: int
    registry: CollectorRegistry


_open: dict[str, MetricsPage] = {}


def open_metrics_page(place: str) -> MetricsPage:
    """Open the page at `port` (of the loopback interface) or `address:port`, once a process.

    Raises:
        ConfigError: it is not a port, or is taken.
    """
    if place in _open:
        return _open[place]
    host, _, port = place.rpartition(":")
    registry = registry_of_run()
    try:
        page = HttpThread(make_asgi_app(registry), host.strip("[]") or LOOPBACK, int(port))
    except (ValueError, InfraError, OverflowError) as error:
        raise ConfigError(
            f"ROUNDHOUSE_METRICS_PORT is {place!r}: {error} Name a free port, such as 9464, or 0.0.0.0:9464 for readers "
            "elsewhere."
        ) from error
    _open[place] = MetricsPage(page.port, registry)
    return _open[place]


def registry_of_run() -> CollectorRegistry:
    """All metrics of this process, from now on."""
    registry = CollectorRegistry()
    registry.register(InFlightCollector())
    logging.getLogger("roundhouse.progress").addHandler(Announced(registry))
    return registry
