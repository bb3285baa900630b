"""The Prometheus page: work in flight, announced metrics, and documented names."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from roundhouse.activity import Activity, announce, logger
from roundhouse.errors import ConfigError
from roundhouse.generation import chat_server as engine_metrics
from roundhouse.health import metrics_page
from roundhouse.health.metrics_page import Announced, InFlightCollector
from roundhouse.logs import about

PAGE = Path(__file__).parents[2] / "docs/kubernetes-reference.md"


def told(text: str) -> dict[tuple[str, ...], float]:
    """(name, label values in alphabetical order …) -> value."""
    families = text_string_to_metric_families(text)
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


def test_work_in_flight_is_counted_by_kind_when_the_page_is_read() -> None:
    now = [0.0]
    activity = Activity(lambda: now[0])
    registry = CollectorRegistry()
    registry.register(InFlightCollector(activity))
    with activity.track("collect", "stage", "iteration 1"):
        now[0] = 3.0
        rollouts = [activity.start("collect", "rollout", f"g/{i}") for i in range(2)]
        update = activity.start("train", "update 3 of 8")
        now[0] = 5.0
        activity.advance(rollouts[0])
        page = told(generate_latest(registry).decode())
        assert page["roundhouse_in_flight", "collect", "rollout"] == 2
        assert page["roundhouse_in_flight", "train", "update"] == 1
        assert page["roundhouse_oldest_seconds", "collect", "stage"] == 5
        assert page["roundhouse_silent_seconds", "collect", "rollout"] == 0
        for token in (*rollouts, update):
            activity.end(token)
    assert told(generate_latest(registry).decode()) == {}


def test_what_a_run_announces_is_counted_under_its_name() -> None:
    registry = CollectorRegistry()
    handler = Announced(registry)
    logger.addHandler(handler)
    try:
        with about(run="mine"):
            announce("stage", name="collect", about="iteration 2")
            for tokens in (3, 4):
                announce("rollout", tokens=tokens, reward=1.0)
            announce("collect", iteration=2, finished=2, planned=8)
            announce("iteration", iteration=2, metrics={"reward/mean": 0.5})
            announce("alert", name="entropy", text="…")
            announce("services", text="of no concern")
    finally:
        logger.removeHandler(handler)
    page = told(generate_latest(registry).decode())
    assert page["roundhouse_stages_total", "collect", "mine"] == 1
    assert page["roundhouse_rollouts_total", "mine"] == 2
    assert page["roundhouse_generated_tokens_total", "mine"] == 7
    assert (page["roundhouse_collect_finished", "mine"], page["roundhouse_collect_planned", "mine"]) == (2, 8)
    assert page["roundhouse_iteration", "mine"] == 2
    assert page["roundhouse_iteration_metric", "mine", "reward/mean"] == 0.5
    assert page["roundhouse_alerts_total", "entropy", "mine"] == 1


def test_the_page_is_served_once_and_a_bad_place_is_refused() -> None:
    page = metrics_page.open_metrics_page("127.0.0.1:0")
    assert metrics_page.open_metrics_page("127.0.0.1:0") is page
    with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics", timeout=10) as reply:
        assert b"roundhouse_in_flight" in reply.read()
    for place in ("here", "127.0.0.1:99999", f"127.0.0.1:{page.port}"):
        with pytest.raises(ConfigError, match="ROUNDHOUSE_METRICS_PORT"):
            metrics_page.open_metrics_page(place)


def test_an_engine_is_ready_only_with_the_wanted_version() -> None:
    status = {
        "ready": True,
        "policy_version": 3,
        "weights": "s3://b/3",
        "desired": {"policy_version": 3, "weights": "s3://b/3"},
        "generated_tokens": 70,
        "refits": 4,
        "refit_seconds": 1.5,
    }
    assert engine_metrics.holds_desired_version(status)
    assert told(engine_metrics.metrics_page(status))[("roundhouse_engine_ready",)] == 1
    fetching = status | {"desired": {"policy_version": 4, "weights": "s3://b/4"}}
    page = told(engine_metrics.metrics_page(fetching))
    assert (page[("roundhouse_engine_ready",)], page[("roundhouse_engine_wanted_version",)]) == (0, 4)
    for other in ({"ready": False}, {"desired": None}, {"desired": {"policy_version": 3, "weights": None}}):
        assert not engine_metrics.holds_desired_version(status | other)


def test_the_documentation_has_every_name_and_meaning() -> None:
    endpoints = pytest.importorskip("roundhouse.plugins.nemo_gym.servers.endpoints")
    text = PAGE.read_text()
    names = {**metrics_page.METRICS, **endpoints.METRICS, **engine_metrics.METRICS}
    for name, meaning in names.items():
        assert f"| `{name}` | {meaning} |" in text
    documented = set(re.findall(r"^\| `(roundhouse_\w+)`", text, re.MULTILINE))
    assert documented == set(names)
