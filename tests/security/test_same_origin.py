"""A page of another site in the user's browser cannot read or change anything through our servers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from roundhouse.health import metrics_page
from roundhouse.http import ports
from roundhouse.http.asgi import ALLOWED_HOSTS, SameOrigin, is_loopback
from tests.security.test_servers import MAINS

OWN = "127.0.0.1:4200"


class Reached:
    """An application that notes what came through."""

    def __init__(self) -> None:
        self.scopes: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def status(app: Any, method: str = "GET", **headers: str | None) -> int:
    """Return the status of a request with the headers; `sec_fetch_site` is `sec-fetch-site`, and None omits one."""
    given = {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
    scope = {
        "type": "http",
        "method": method,
        "path": "/",
        "headers": [(k.encode(), v.encode()) for k, v in given.items()],
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return int(sent[0]["status"])


@pytest.fixture(autouse=True)
def nothing_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOWED_HOSTS, raising=False)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:1", "127.0.0.1", "localhost:4200", "LOCALHOST", "[::1]:4200", "[::1]", "127.8.0.1:80", None]
)
async def test_a_local_server_answers_to_its_own_names(host: str | None) -> None:
    assert await status(SameOrigin(Reached(), "127.0.0.1"), host=host) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:4200", "127.0.0.1.evil.example", "localhost.evil.example", "localhost@evil:80",
     "127.0.0.1:x", "10.0.0.1", "[::2]:80", "[::1", "", ":4200", "0.0.0.0:4200", "127.0.0.1, evil.example", "é"],
)  # fmt: skip
async def test_a_name_that_a_site_lets_point_here_is_refused(host: str) -> None:
    reached = Reached()
    assert await status(SameOrigin(reached, "localhost"), host=host) == 421
    assert reached.scopes == []


async def test_every_one_of_several_hosts_must_be_known() -> None:
    reached, sent = Reached(), list[dict[str, Any]]()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    for hosts in ((OWN, "evil.example"), ("evil.example", OWN)):
        scope = {"type": "http", "method": "GET", "headers": [(b"host", host.encode()) for host in hosts]}
        await SameOrigin(reached, "127.0.0.1")(scope, None, send)
    assert [message["status"] for message in sent[::2]] == [421, 421]
    assert reached.scopes == []


FOREIGN = [
    {"origin": "https://evil.example"},
    {"origin": "http://127.0.0.1:8080"},  # another port of this machine
    {"origin": "http://localhost:4200"},  # another name of this machine: another origin
    {"origin": "null"},  # of a sandboxed frame or a file
    {"origin": ""},
    {"origin": OWN},
    {"sec_fetch_site": "cross-site"},
    {"sec_fetch_site": "same-site"},
    {"sec_fetch_site": ""},
    {"origin": f"http://{OWN}", "sec_fetch_site": "cross-site"},
    {"origin": "https://evil.example", "sec_fetch_site": "same-origin"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
async def test_what_a_page_of_another_origin_asks_is_refused(method: str, headers: dict[str, str]) -> None:
    reached = Reached()
    assert await status(SameOrigin(reached, "127.0.0.1"), method, host=OWN, **headers) == 403
    assert reached.scopes == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "none"},
        {"origin": f"http://{OWN}", "sec_fetch_site": "same-origin"},
        {"origin": f"HTTPS://{OWN}"},  # TLS ends before it
    ],
    ids=str,
)
async def test_its_own_page_and_programs_are_answered(headers: dict[str, str]) -> None:
    assert await status(SameOrigin(Reached(), "127.0.0.1"), "POST", host=OWN, **headers) == 200


@pytest.mark.parametrize(
    ("changed", "answer"),
    [
        ({}, 200),
        ({"method": "POST", "origin": "https://evil.example"}, 403),  # a form
        ({"sec_fetch_dest": "iframe"}, 403),
        ({"sec_fetch_dest": "object"}, 403),
        ({"sec_fetch_mode": "no-cors"}, 403),
        ({"sec_fetch_mode": None}, 403),
        ({"host": "evil.example"}, 421),
    ],
    ids=str,
)
async def test_a_link_may_be_followed_and_nothing_else(changed: dict[str, Any], answer: int) -> None:
    followed = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    asked = {"method": "GET", "host": OWN, **followed, **changed}
    assert await status(SameOrigin(Reached(), "127.0.0.1"), **asked) == answer


@pytest.mark.parametrize(
    "headers", [{"origin": "https://evil.example"}, {"origin": "null"}, {"host": "evil.example"}], ids=str
)
async def test_a_websocket_of_another_site_is_closed_before_it_is_open(headers: dict[str, str]) -> None:
    reached, sent = Reached(), list[dict[str, Any]]()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    given = {"host": OWN, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document", **headers}
    scope = {"type": "websocket", "path": "/", "headers": [(k.encode(), v.encode()) for k, v in given.items()]}
    await SameOrigin(reached, "127.0.0.1")(scope, None, send)
    assert [message["type"] for message in sent] == ["websocket.close"]
    assert reached.scopes == []


async def test_beyond_loopback_names_are_the_operators_and_origins_still_count(monkeypatch: pytest.MonkeyPatch) -> None:
    service = "roundhouse-engine.roundhouse.svc:8000"
    for host in ("0.0.0.0", "10.1.2.3", "::", "gym.internal"):
        app = SameOrigin(Reached(), host)
        assert await status(app, host=service) == 200
        assert await status(app, host=service, origin="https://evil.example") == 403
    monkeypatch.setenv(ALLOWED_HOSTS, "Hub.example.org, roundhouse-engine.roundhouse.svc")
    for host in ("0.0.0.0", "127.0.0.1"):
        app = SameOrigin(Reached(), host)
        assert await status(app, host=service) == 200
        assert await status(app, host="hub.example.org", origin="https://hub.example.org") == 200
        assert await status(app, host="evil.example") == 421
    assert await status(SameOrigin(Reached(), "0.0.0.0"), host="10.1.2.3:8000") == 200


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("", False), ("0", False)],
)  # fmt: skip
def test_what_counts_as_this_machine(host: str, local: bool) -> None:
    assert is_loopback(host) is local


# Each of our servers -------------------------------------------------------------------------------------------------


async def _refuses_other_sites(app: Any) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        assert await status(app, method, host="evil.example:1") == 421
        assert await status(app, method, host="127.0.0.1:1", origin="https://evil.example") == 403
        assert await status(app, method, host="127.0.0.1:1", sec_fetch_site="cross-site") == 403


@pytest.mark.parametrize("name", [*MAINS, "gym server"])
async def test_each_of_our_servers_refuses_other_sites(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served: list[Any] = []
    monkeypatch.setattr("uvicorn.run", lambda app, **_: served.append(app))
    for variable in [variable for variable in os.environ if variable.startswith("ROUNDHOUSE_")]:
        monkeypatch.delenv(variable)
    (tmp_path / "config.json").write_text("{}")
    if name == "gym server":
        from roundhouse.plugins.nemo_gym.servers import own_server as gym_serve
        from roundhouse.plugins.nemo_gym.servers.own_server import OwnServer

        monkeypatch.setattr(gym_serve, "own_server", lambda environ: OwnServer("own", "127.0.0.1", 1, Reached()))
        gym_serve.main()
    else:
        main, arguments = MAINS[name]
        main([str(tmp_path) if argument == "." else argument for argument in arguments])
    [app] = served
    await _refuses_other_sites(app)


async def test_the_viewer_refuses_other_sites(tmp_path: Path) -> None:
    viewer = pytest.importorskip("roundhouse.plugins.view.server")
    await _refuses_other_sites(viewer.create_app(str(tmp_path)))


def test_the_metrics_page_refuses_other_sites_and_is_this_machines_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound: list[str] = []
    made: Callable[..., None] = ports.HttpThread.__init__
    monkeypatch.setattr(
        ports.HttpThread,
        "__init__",
        lambda self, app, host, port: bound.append(host) or made(self, app, host, port),
    )
    address = f"http://127.0.0.1:{metrics_page.open_metrics_page('0').port}/metrics"
    assert metrics_page.open_metrics_page("0.0.0.0:0").port
    assert bound == ["127.0.0.1", "0.0.0.0"]
    assert "roundhouse_in_flight" in httpx.get(address).text
    assert httpx.get(address, headers={"host": "evil.example"}).status_code == 421
    assert httpx.get(address, headers={"origin": "https://evil.example"}).status_code == 403


async def test_an_engine_under_ray_serve_refuses_other_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    from roundhouse.generation.serve_app import PolicyReplica

    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    replica: Any = object.__new__(PolicyReplica)
    replica.server = Reached()
    await _refuses_other_sites(replica.__serve_build_asgi_app__())
