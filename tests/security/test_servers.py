"""Servers beyond this machine want a token, control calls reach nobody's engine by a side door, and bodies have a limit."""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.main import get_command

from roundhouse.cli import app as commands
from roundhouse.config.generation import TOKEN_VARIABLE as ENGINE_TOKEN
from roundhouse.config.included_environments import CalculatorEnvironment
from roundhouse.config.training import TOKEN_VARIABLE as TRAIN_TOKEN
from roundhouse.environments import load
from roundhouse.errors import ConfigError
from roundhouse.generation import standalone
from roundhouse.generation.chat_server import ENGINE_ROUTES, ChatServer
from roundhouse.generation.standalone import StandaloneEngine
from roundhouse.http.asgi import BodyLimit

LIMIT = 10_000
CANARY = "canary-77aa10"
App = Callable[[Any, Any, Any], Awaitable[None]]


def to(app: App) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server")


# Control calls -------------------------------------------------------------------------------------------------------


def train_server(arguments: list[str]) -> None:
    try:
        get_command(commands)(["train-server", *arguments], standalone_mode=False)
    except ConfigError as error:
        sys.exit(str(error))


def resources_server(arguments: list[str]) -> None:
    pytest.importorskip("roundhouse.plugins.nemo_gym.servers.resources").main(arguments)


def model_server(arguments: list[str]) -> None:
    pytest.importorskip("roundhouse.plugins.programs.model_server.__main__").main(arguments)


MAINS: dict[str, tuple[Callable[[list[str]], None], list[str]]] = {
    "engine": (standalone.main, []),
    "train service": (train_server, ["--model", "."]),
    "resources server": (resources_server, ["--environment", "calculator"]),
    "model server": (model_server, ["--base-url", "http://127.0.0.1:1"]),
}


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the addresses that uvicorn should listen on, without listening."""
    hosts: list[str] = []
    monkeypatch.setattr("uvicorn.run", lambda app, *, host, **_: hosts.append(host))
    for name in [name for name in os.environ if name.startswith("ROUNDHOUSE_")]:
        monkeypatch.delenv(name)
    return hosts


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.1.2.3", "example.org", "0"])
@pytest.mark.parametrize(("name", "variable"), [("engine", ENGINE_TOKEN), ("train service", TRAIN_TOKEN)])
def test_who_can_change_weights_is_not_open_to_others_without_a_token(
    name: str, variable: str, host: str, listening: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    main, arguments = MAINS[name]
    arguments = [str(tmp_path) if argument == "." else argument for argument in arguments]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--host", host])
    told = f"{ended.value} {capsys.readouterr().err}"
    assert variable in told
    assert "127.0.0.1" in told
    assert listening == []
    secret = tmp_path / "token"
    secret.write_text(CANARY)
    os.environ[f"{variable}_FILE"] = str(secret)
    try:
        main([*arguments, "--host", host])
    finally:
        del os.environ[f"{variable}_FILE"]
    assert listening == [host]


@pytest.mark.parametrize("name", MAINS)
def test_our_servers_listen_on_this_machine_unless_told_otherwise(
    name: str, listening: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    main, arguments = MAINS[name]
    main([str(tmp_path) if argument == "." else argument for argument in arguments])
    assert listening == ["127.0.0.1"]


async def test_the_engine_is_told_only_by_who_has_the_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = {"generation": {}, "model_dir": "/nowhere", "desired": {"policy_version": 1}}
    async with to(StandaloneEngine(CANARY)) as client:
        for headers in (
            {},
            {"authorization": CANARY},
            {"authorization": "Bearer "},
            {"authorization": f"Bearer {CANARY}x"},
        ):
            answer = await client.post("/rh/desired", json=body, headers=headers)
            assert answer.status_code == 401
            assert CANARY not in answer.text
        allowed = await client.post("/rh/desired", json=body, headers={"authorization": f"Bearer {CANARY}"})
        assert (allowed.status_code, "/nowhere" in allowed.text) == (400, True)
    assert CANARY not in caplog.text


class Engine:
    """An engine with a server that accepts everything."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    def openai_app(self) -> App:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            self.reached.append(scope["path"])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

        return app


class Policy:
    samples_as_wanted_only = False

    def __init__(self) -> None:
        self.engine = Engine()

    def answering(self) -> Any:
        class Held:
            async def __aenter__(self) -> int:
                return 0

            async def __aexit__(self, *_: object) -> None: ...

        return Held()


CONTROL = ["/sleep", "/wake_up", "/pause", "/resume", "/update_weights", "/start_weight_update", "/collective_rpc", "/shutdown",
           "/reset_prefix_cache", "/v1/load_lora_adapter", "/init_weight_transfer_engine", "/abort_requests", "/start_profile",
           "/server_info", "/V1/MODELS", "//sleep", "/v1/../sleep", "/rh/desired", "/docs", "/openapi.json"]  # fmt: skip


@pytest.mark.parametrize("path", CONTROL)
async def test_control_routes_of_the_engine_are_reached_by_nobody(path: str) -> None:
    policy: Any = Policy()
    async with to(ChatServer(policy, None, "policy")) as client:  # type: ignore[arg-type]
        for method in ("POST", "GET", "PUT", "DELETE"):
            request = client.build_request(method, "http://server/", json={})
            request.url = request.url.copy_with(raw_path=path.encode())
            assert (await client.send(request)).status_code == 404
    assert policy.engine.reached == []


async def test_routes_that_ask_are_passed_on() -> None:
    policy: Any = Policy()
    async with to(ChatServer(policy, None, "policy")) as client:  # type: ignore[arg-type]
        for method, path in ENGINE_ROUTES - {("POST", "/tokenize")}:
            assert (await client.request(method, path, json={} if method == "POST" else None)).status_code == 200
    assert len(policy.engine.reached) == len(ENGINE_ROUTES) - 1


# Bodies --------------------------------------------------------------------------------------------------------------


async def _chunks(total: int) -> AsyncIterator[bytes]:
    for _ in range(total // 1000):
        yield b"[" * 1000


def server(name: str) -> tuple[App, str]:
    """A server and a route that takes a body."""
    policy: Any = Policy()
    if name == "resources server":
        build_app = pytest.importorskip("roundhouse.plugins.nemo_gym.servers.resources").build_app
        return build_app(load(CalculatorEnvironment())), "/verify"
    if name == "model server":
        programs = pytest.importorskip("roundhouse.plugins.programs.model_server")
        section = pytest.importorskip("roundhouse.plugins.programs.model_server.section")
        return programs.build_app(section.ModelServerConfig(base_url=["http://127.0.0.1:1"])), "/v1/chat/completions"
    if name == "engine":
        return ChatServer(policy, None, "policy"), "/v1/chat/completions"  # type: ignore[arg-type]
    return BodyLimit(StandaloneEngine()), "/rh/desired"


@pytest.mark.parametrize("name", ["resources server", "model server", "engine", "engine control"])
async def test_a_body_beyond_the_limit_is_answered_413_and_anything_else_by_a_client_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDHOUSE_MAX_BODY_MIB", "1")
    app, path = server(name)
    json = {"content-type": "application/json"}
    async with to(app) as client:
        announced = await client.post(path, content=b"x" * (2**20 + 1), headers=json)
        unannounced = await client.post(path, content=_chunks(2 * 2**20), headers=json)
        assert (announced.status_code, unannounced.status_code) == (413, 413)
        assert "ROUNDHOUSE_MAX_BODY_MIB" in announced.text
        bomb = gzip.compress(b"0" * 2**27)
        for body, headers in (
            (b"[" * 500_000, {}),
            (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, {}),
            (bomb, {"content-encoding": "gzip"}),
            (b"9" * 500_000, {}),
            (b"\xff\xfe\x00", {}),
        ):
            answer = await client.post(path, content=body, headers=json | headers)
            assert 400 <= answer.status_code < 500, (body[:10], answer.status_code, answer.text[:200])


async def test_what_an_application_reads_stops_at_the_limit_and_its_late_answer_is_not_sent() -> None:
    read = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal read
        try:
            while True:
                read += len((await receive()).get("body", b""))
        except Exception:  # noqa: BLE001 (an application that catches everything)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async with to(BodyLimit(app, LIMIT)) as client:
        assert (await client.post("/", content=_chunks(100 * LIMIT))).status_code == 413
    assert read <= LIMIT
