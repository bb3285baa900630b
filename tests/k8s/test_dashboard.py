"""The board for Grafana asks for metrics that exist, and a real Prometheus answers each of its queries."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import tarfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, make_asgi_app

from roundhouse.activity import ACTIVITY, announce
from roundhouse.generation import chat_server
from roundhouse.health import metrics_page
from roundhouse.http.ports import HttpThread
from roundhouse.logs import about
from roundhouse.stages.metric_catalogue import meaning_of
from roundhouse.stages.report import iteration_manifests, iteration_metrics
from roundhouse.store.run import load_run
from tests.ports import free_port
from tests.waiting import until

ROOT = Path(__file__).parents[2]
COMPONENT = ROOT / "k8s/components/grafana-dashboard"
BOARD = json.loads((COMPONENT / "roundhouse.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
HISTOGRAM = re.compile(r"_(bucket|count|sum)$")


def catalogue() -> dict[str, str]:
    """Meanings of the metrics of all pages."""
    endpoints = pytest.importorskip("roundhouse.plugins.nemo_gym.servers.endpoints")
    return {**metrics_page.METRICS, **chat_server.METRICS, **endpoints.METRICS}


def metrics_in(query: str) -> set[str]:
    return {HISTOGRAM.sub("", name) for name in re.findall(r"\broundhouse_\w+", query)}


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_a_query_names_metrics_of_the_catalogue(title: str, query: str) -> None:
    assert metrics_in(query)
    assert metrics_in(query) <= catalogue().keys()
    for opening, closing in ("()", "[]", "{}"):
        assert query.count(opening) == query.count(closing)
    for names in re.findall(r'name=~"([^"]+)"', query):
        for name in names.split("|"):
            assert meaning_of(name) is not None, f"docs/metrics.md lacks {name}"


def test_the_board_shows_each_metric_of_the_pages() -> None:
    assert set().union(*(metrics_in(query) for _, query in QUERIES)) == catalogue().keys()
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert all(panel["description"] for panel in PANELS)


def test_the_component_makes_a_config_map_of_the_board() -> None:
    [made] = yaml.safe_load((COMPONENT / "kustomization.yaml").read_text())["configMapGenerator"]
    assert made["files"] == ["roundhouse.json"]
    assert made["options"]["labels"] == {"grafana_dashboard": "1"}
    assert len((COMPONENT / "roundhouse.json").read_bytes()) < 2**20, "the limit of a ConfigMap"


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[list[int]]:
    """Ports of the pages of a run, an engine and a gym server."""
    status = {"ready": True, "policy_version": 3, "weights": "w", "desired": {"policy_version": 3, "weights": "w"}}
    counts = {"generated_tokens": 70, "refits": 4, "refit_seconds": 1.5}

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": chat_server.metrics_page(status | counts).encode()})

    async def verified(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ignored(message: Any = None) -> None:
        """Take a message."""

    registry = CollectorRegistry()
    endpoints = pytest.importorskip("roundhouse.plugins.nemo_gym.servers.endpoints")
    gym = endpoints.MeasuredRequests(verified, registry)
    asyncio.run(gym({"type": "http", "path": "/verify", "method": "POST"}, ignored, ignored))
    applications = (make_asgi_app(metrics_page.registry_of_run()), engine, make_asgi_app(registry))
    servers = [HttpThread(each, "127.0.0.1", 0) for each in applications]
    with tarfile.open(ROOT / "tests/fixtures/earlier-store.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    run = load_run(str(next(tmp_path.glob("**/runs")).parent), "earlier")
    with about(run="earlier"), ACTIVITY.track("collect", "rollout"):
        announce("stage", name="collect", about="iteration 2")
        announce("rollout", tokens=3, reward=1.0)
        announce("collect", iteration=2, finished=2, planned=8)
        announce("iteration", iteration=2, metrics=iteration_metrics(iteration_manifests(run, 2)))
        announce("recovery", step="retry", code="engine_timeout", text="…")
        announce("alert", name="entropy", text="…")
        yield [each.port for each in servers]
    for each in servers:
        each.close()


@pytest.mark.real
def test_prometheus_answers_each_query_with_data(pages: list[int], tmp_path: Path) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (apt-get install prometheus)")
    port = free_port()
    targets = [f"127.0.0.1:{page}" for page in pages]
    settings = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "roundhouse", "static_configs": [{"targets": targets}]}],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(settings))
    places = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("wb") as log:
        command = [program, *places, f"--web.listen-address=127.0.0.1:{port}"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            for title, query in QUERIES:
                concrete = query.replace("$__rate_interval", "1m").replace("$run", ".*")
                until(lambda query=concrete: values_of(port, query), f"data of {title}: {concrete}", process=process)
            learnt = values_of(port, 'roundhouse_iteration_metric{name="reward/mean"}')
            assert [each["metric"]["run"] for each in learnt] == ["earlier"]
        finally:
            process.terminate()
            process.wait(60)


def values_of(port: int, query: str) -> list[Any]:
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)["data"]["result"]
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise AssertionError(error.read().decode()) from error  # it cannot parse the query
        return []  # it starts
    except OSError:
        return []  # it does not listen yet
