"""A desired state reaches running replicas at once: Serve stores it first, and its control loop is not waited for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from roundhouse.config.models import GenerationConfig
from roundhouse.generation import serve_app
from roundhouse.generation.deployment import EngineSilent, RayServeEngine, ServeEndpoint, wanted_application
from roundhouse.generation.serve_app import PolicyReplica
from roundhouse.http.asgi import read_body, reply_json
from roundhouse.http.ports import LOOPBACK, HttpThread
from roundhouse.weight_sync.replica_state import RefitOptions, application_digest, desired_state

pytestmark = pytest.mark.real

TOKEN = "secret"


class ServeWithoutControlLoop:
    """Dashboard and replicas of a deployment without a control loop: an instant engine without weights."""

    def __init__(self, config: GenerationConfig, model_dir: str) -> None:
        self.application = wanted_application(config, model_dir, {"policy_version": 0, "weights": None, "request": 1})
        self.held: dict[str, Any] = {"policy_version": 0, "weights": "before"}
        self.asked: list[str] = []

    def reports(self) -> list[dict[str, Any]]:
        own = application_digest(self.application["args"])
        count = self.application["deployments"][0]["num_replicas"]
        return [
            {"replica_id": f"r{number}", "application": own, "ready": True, **self.held, "failed_request": None}
            for number in range(count)
        ]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.asked.append(f"{scope['method']} {scope['path']}")
        match scope["method"], scope["path"]:
            case "GET", "/api/serve/applications/":
                shown = {"deployed_app_config": self.application, "status": "RUNNING", "deployments": {}}
                await reply_json(send, 200, {"applications": {"policy": shown}})
            case "PUT", _:
                (self.application,) = json.loads(await read_body(receive))["applications"]
                await reply_json(send, 200, {})
            case "POST", "/rh/desired":
                body = json.loads(await read_body(receive))
                stored = self.application["deployments"][0]["user_config"]
                assert dict(scope["headers"])[b"authorization"] == f"Bearer {TOKEN}".encode()
                assert body == {"application": application_digest(self.application["args"]), "desired": stored}
                self.held = {name: stored[name] for name in ("policy_version", "weights")}
                await reply_json(send, 200, {"replicas": self.reports()})
            case _:
                await reply_json(send, 200, {"replicas": self.reports()})


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    return str(tmp_path)


@pytest.fixture
def serve(config: GenerationConfig, model_dir: str) -> Iterator[tuple[ServeWithoutControlLoop, ServeEndpoint]]:
    app = ServeWithoutControlLoop(config.model_copy(update={"replicas": 1}), model_dir)
    server = HttpThread(app, LOOPBACK, 0)
    url = f"http://{LOOPBACK}:{server.port}"
    yield app, ServeEndpoint(url, url, TOKEN)
    server.close()


def test_one_replica_is_given_what_serve_has_stored_without_its_control_loop(
    serve: tuple[ServeWithoutControlLoop, ServeEndpoint], config: GenerationConfig, model_dir: str
) -> None:
    app, endpoint = serve
    one = config.model_copy(update={"replicas": 1})
    found = RayServeEngine(endpoint).ensure(one, model_dir, "/weights", 1)
    assert [(each.policy_version, each.weights) for each in found] == [(1, "/weights")]
    assert app.asked == [
        "GET /api/serve/applications/",
        "PUT /api/serve/applications/",
        "POST /rh/desired",
    ]


def test_several_replicas_are_left_to_the_pace_of_the_control_loop(
    serve: tuple[ServeWithoutControlLoop, ServeEndpoint], config: GenerationConfig, model_dir: str
) -> None:
    app, endpoint = serve
    several = config.model_copy(update={"replicas": 2, "start_timeout_seconds": 0.2})
    with pytest.raises(EngineSilent, match="Not all 2 replicas answered with version 1"):
        RayServeEngine(endpoint).ensure(several, model_dir, "/weights", 1)
    assert "POST /rh/desired" not in app.asked


def test_replicas_take_a_desired_state_of_their_application_from_who_has_rays_token(
    deployed: ServeEndpoint, config: GenerationConfig, policies: dict[str, Path], bare: str
) -> None:
    """Real Serve, which is left out: afterwards its own stored state is still the one before."""
    engine = RayServeEngine(deployed)
    before = engine.ensure(config, bare, str(policies["first"]), 400)
    desired = desired_state(401, str(policies["second"]), RefitOptions(), [before[0].desired])

    def give(token: str | None, application: str) -> tuple[int, list[int]]:
        headers = {"Authorization": f"Bearer {token}"}
        body = {"application": application, "desired": desired}
        reply = httpx.post(f"{deployed.http_url}/rh/desired", json=body, headers=headers, timeout=30)
        return reply.status_code, [each.policy_version or 0 for each in engine.replicas()]

    own = before[0].application
    assert give("another", own) == (401, [400, 400])
    assert give(deployed.token, "another") == (200, [400, 400])
    assert give(deployed.token, own) == (200, [401, 401])
    assert {each.digest for each in engine.replicas()}.isdisjoint({before[0].digest})
    assert {each.policy_version for each in engine.ensure(config, bare, str(policies["first"]), 402)} == {402}


class Updating:
    """A deployment that Serve counts no replica of for so many calls, as while it hands the only one a new desired state."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def broadcast(self, method: str, *_: object) -> Updating:
        return self

    async def _fetch_replica_results_async(self) -> list[Updating]:
        self.left -= 1
        if self.left >= 0:
            raise DeploymentUnavailableError(DeploymentID("policy", "policy"))
        return [self]

    async def get_async(self) -> dict[str, object]:
        return {"replica_id": "r"}


async def test_replicas_that_serve_does_not_count_for_a_moment_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the stage that asks them takes the engine for gone, and refits it again."""
    replica = object.__new__(PolicyReplica)
    replica._deployment = Updating(3)
    assert await replica.replicas() == [{"replica_id": "r"}]
    monkeypatch.setattr(serve_app, "UPDATING_SECONDS", 0.05)
    replica._deployment = Updating(10**9)
    with pytest.raises(DeploymentUnavailableError):
        await replica.replicas()
