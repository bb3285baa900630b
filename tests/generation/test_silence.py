"""A replica that Serve counts as started and that does not answer is named, and replaced within a minute."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import pytest

from roundhouse.config.models import GenerationConfig
from roundhouse.errors import InfraError
from roundhouse.generation import deployment, serve_app
from roundhouse.generation.deployment import EngineSilent, ProcessEngine, ServeEndpoint, ensure_deployed
from roundhouse.generation.silence import SilenceWatch, started_replicas
from roundhouse.weight_sync.replica_state import application_digest


def test_a_replica_is_silent_since_it_last_answered_or_was_first_seen() -> None:
    now = [0.0]
    watch = SilenceWatch(lambda: now[0])
    places = {"a": "process 1 on here", "b": "process 2 on there"}
    assert watch.silent(places) == []
    now[0] = 30.0
    watch.hear(["a"])
    assert [(one.replica_id, one.seconds) for one in watch.silent(places)] == [("b", 30.0)]
    now[0] = 70.0
    silent = watch.silent(places | {"c": "process 3"})
    assert [(one.replica_id, one.seconds) for one in silent] == [("b", 70.0), ("a", 40.0)]
    assert str(silent[0]) == "replica b (process 2 on there) has not answered for 70 s"
    assert watch.silent({"c": "process 3"}) == []
    assert (watch.is_report_due(silent), watch.is_report_due(silent), watch.is_report_due([])) == (True, False, False)


class Serve:
    """Ray's dashboard and Serve's HTTP with two replicas, of which those named in `silent_names` do not answer."""

    def __init__(self, silent_names: set[str]) -> None:
        self.silent_names = silent_names
        self.application: dict[str, Any] | None = None
        self.names = ["old-0", "old-1"]
        self.puts: list[list[str]] = []
        self.replaced: list[list[str]] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/rh/replaced":
            if len(self.silent_names) == len(self.names):
                raise httpx.ReadTimeout("Serve handed the call to a silent replica")
            actors = json.loads(request.content)["actors"]
            self.replaced.append(actors)
            self.names = [f"new-{at}" if f"SERVE_{name}" in actors else name for at, name in enumerate(self.names)]
            return httpx.Response(200, json={"actors": actors})
        if request.url.path == "/rh/replicas":
            return httpx.Response(
                200, json={"replicas": [self._report(n) for n in self.names if n not in self.silent_names]}
            )
        if request.method == "PUT":
            applications = {each["name"]: each for each in json.loads(request.content)["applications"]}
            self.puts.append(list(applications))
            if self.application is not None and serve_app.APPLICATION not in applications:
                self.names = ["new-0", "new-1"]
            self.application = applications.get(serve_app.APPLICATION)
            return httpx.Response(200)
        return httpx.Response(200, json={"applications": self._status()})

    def _status(self) -> dict[str, Any]:
        if self.application is None:
            return {}
        replicas = [
            {
                "replica_id": name,
                "actor_name": f"SERVE_{name}",
                "state": "UPDATING",
                "pid": 100 + at,
                "node_ip": "10.0.0.1",
            }
            for at, name in enumerate(self.names)
        ]
        deployments = {"policy": {"message": "", "replicas": replicas}}
        status = {"status": "DEPLOYING", "message": "", "deployments": deployments}
        return {serve_app.APPLICATION: status | {"deployed_app_config": self.application}}

    def _report(self, name: str) -> dict[str, Any]:
        assert self.application is not None
        desired = self.application["deployments"][0]["user_config"]
        return {
            "replica_id": name,
            "ready": True,
            "application": application_digest(self.application["args"]),
            "policy_version": desired["policy_version"],
            "weights": desired["weights"],
        }


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(deployment, "SERVE_STATUS_SECONDS", 0.01)


def refit(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(
        deployment,
        "_client",
        lambda url, headers: httpx.Client(base_url=url, transport=httpx.MockTransport(serve.answer)),
    )
    config = GenerationConfig(backend="transformers", replicas=2, start_timeout_seconds=1)
    endpoint = ServeEndpoint("http://dashboard.test", "http://serve.test", "token")
    return [one.replica_id for one in ensure_deployed(config, "/model", endpoint, weights="file:///w", version=1)]


def test_only_the_replica_that_holds_still_is_replaced_and_the_refit_goes_on(
    monkeypatch: pytest.MonkeyPatch, fast: None, caplog: pytest.LogCaptureFixture
) -> None:
    serve = Serve({"old-1"})
    assert refit(serve, monkeypatch) == ["old-0", "new-1"]
    assert (serve.puts, serve.replaced) == ([["policy"]], [["SERVE_old-1"]])
    assert "replica old-1 (process 101 on 10.0.0.1) has not answered for" in caplog.text


def test_all_replicas_are_restarted_if_none_answers(
    monkeypatch: pytest.MonkeyPatch, fast: None, caplog: pytest.LogCaptureFixture
) -> None:
    serve = Serve({"old-0", "old-1"})
    assert refit(serve, monkeypatch) == ["new-0", "new-1"]
    assert serve.puts == [["policy"], [], ["policy"]]
    assert all(name in caplog.text for name in serve.silent_names)


async def test_a_replica_that_answers_with_an_error_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Result:
        def __init__(self, value: Any) -> None:
            self.value = value

        async def get_async(self) -> Any:
            if isinstance(self.value, Exception):
                raise self.value
            return self.value

    class Response:
        async def _fetch_replica_results_async(self) -> list[Result]:
            return [Result({"replica_id": "a"}), Result(KeyError("weights"))]

    assert await serve_app._answers_in_time(Response(), 2) == [{"replica_id": "a"}]
    assert "KeyError('weights')" in caplog.text


def test_a_replica_that_stays_silent_is_named_by_an_error_that_is_retried(
    monkeypatch: pytest.MonkeyPatch, fast: None
) -> None:
    begun = time.monotonic()
    with pytest.raises(
        EngineSilent, match=r"Silent: replica new-1 \(process 101 on 10\.0\.0\.1\) has not answered for"
    ):
        refit(Serve({"old-1", "new-1"}), monkeypatch)
    assert issubclass(EngineSilent, InfraError)
    assert time.monotonic() - begun < 20


def test_a_standalone_engine_that_holds_still_is_named_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "REPORT_SECONDS", 0.05)
    monkeypatch.setattr(deployment, "CALL_TIMEOUT_SECONDS", 0.1)
    config = GenerationConfig(backend="transformers", start_timeout_seconds=0.5, refit_timeout_seconds=600)
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # the kernel takes its connections, and nobody answers
        engine = ProcessEngine(f"http://127.0.0.1:{stopped.getsockname()[1]}")
        with pytest.raises(EngineSilent, match=r"has not answered for .*start_timeout_seconds.*start it again"):
            engine.ensure(config, "/model", "file:///w", 1)


def test_a_replica_that_still_starts_is_not_silent() -> None:
    replicas = [
        {"replica_id": "a", "state": "STARTING"},
        {"replica_id": "b", "state": "RUNNING", "pid": 1, "node_ip": "n"},
    ]
    assert started_replicas({"deployments": {"policy": {"replicas": replicas}}}) == {"b": "process 1 on n"}
