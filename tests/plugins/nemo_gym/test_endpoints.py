"""The metrics of a gym server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from roundhouse.plugins.nemo_gym.servers import endpoints
from tests.health.test_metrics_page import told


async def test_requests_of_an_environment_are_measured_by_route_and_status() -> None:
    async def app(scope: dict, receive: object, send: object) -> None:
        assert told(generate_latest(registry).decode())[("roundhouse_gym_requests_in_flight",)] == 1
        await send({"type": "http.response.start", "status": 200 if "verify" in scope["path"] else 500})  # type: ignore[operator]

    async def nothing(*_: object) -> None:
        return None

    registry = CollectorRegistry()
    measured = endpoints.MeasuredRequests(app, registry)
    for path in ("/verify", "/rollout-7/verify", "/calculator", "/what_a_policy_made_up"):
        await measured({"type": "http", "method": "POST", "path": path}, nothing, nothing)
    page = told(generate_latest(registry).decode())
    assert page["roundhouse_gym_request_seconds_count", "200", "verify"] == 2
    assert page["roundhouse_gym_request_seconds_count", "500", "tool"] == 2
