"""A page of another site in a real browser cannot run, change or read anything in the local Prefect.

The browser resolves evil.example to this machine, as for a site with a rebound name. Only the servers themselves protect
their APIs from the site, and one of these starts commands.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.flows.served import Served

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

# What each got to know.
ATTACKS = {
    "a simple post": """async (api) => (await fetch(`${api}/variables/`, {method: "POST", mode: "no-cors",
        headers: {"content-type": "text/plain"}, body: '{"name": "simple", "value": 1}'})).type === "opaque" ? "" : "read" """,
    "a post that asks first": """async (api) => await (await fetch(`${api}/variables/`, {method: "POST",
        headers: {"content-type": "application/json"}, body: '{"name": "asked", "value": 1}'})).text()""",
    "a read": """async (api) => await (await fetch(`${api}/deployments/paginate`, {method: "POST",
        headers: {"content-type": "text/plain"}, body: "{}"})).text()""",
    "a get": "async (api) => await (await fetch(`${api}/admin/settings`)).text()",
    "a form": """(api) => new Promise((done) => {
        document.body.innerHTML = `<iframe name="into"></iframe><form target="into" method="post" enctype="text/plain"
            action="${api}/variables/"><input name='{"name": "form", "value": "' value='"}'></form>`;
        document.querySelector("iframe").onload = () => done("");
        document.querySelector("form").submit();
    })""",
    "a websocket": """(api) => new Promise((done) => {
        const socket = new WebSocket(`${api.replace("http", "ws")}/events/out`, "prefect");
        socket.onopen = () => done("open");
        socket.onerror = () => done("");
    })""",
}


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """Port of another site's server, which has a page."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<title>another site</title><body></body>")

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield str(server.server_port)
    server.shutdown()


def test_a_page_of_another_site_changes_and_reads_nothing(page: Any, served: Served, elsewhere: str) -> None:
    api = f"{served.services.prefect_ui_url}/api"
    health = served.services.state.running().services["deployments"].url
    answers: list[int] = []
    page.on("response", lambda got: answers.append(got.status) if urlsplit(got.url).port != int(elsewhere) else None)
    # Another site; and another port of this machine, which counts as the same site.
    for site in (f"http://evil.example:{elsewhere}/", f"http://127.0.0.1:{elsewhere}/"):
        for name, attack in ATTACKS.items():
            page.goto(site)
            got = page.evaluate(
                f"async (api) => {{ try {{ return await ({attack})(api) }} catch {{ return '' }} }}", api
            )
            assert got == "", f"{name} from {site}"
        page.evaluate("async (url) => { await fetch(url, {method: 'POST', mode: 'no-cors'}) }", f"{health}/shutdown")
    assert answers == [403] * 6  # the simple post, the form and the runner's; the others' the browser kept to itself
    made = {variable["name"] for variable in served.call("POST", "variables/filter")}
    assert made.isdisjoint({"simple", "asked", "form"})


def test_a_site_whose_name_points_here_is_not_taken_for_the_server(page: Any, served: Served) -> None:
    port = urlsplit(served.services.prefect_ui_url).port
    answer = page.goto(f"http://evil.example:{port}/")
    assert answer.status == 421
    got = page.evaluate("async () => (await fetch('/api/variables/filter', {method: 'POST', body: '{}'})).status")
    assert got == 421


def test_a_link_from_elsewhere_leads_to_the_page(page: Any, served: Served, elsewhere: str) -> None:
    page.goto(f"http://evil.example:{elsewhere}/")
    page.evaluate("(to) => { document.body.innerHTML = `<a href='${to}'>Prefect</a>` }", served.services.prefect_ui_url)
    with page.expect_navigation(url=f"{served.services.prefect_ui_url}/**") as led:
        page.click("a")
    assert led.value.status == 200


def test_the_runner_answers_for_its_health_only(served: Served) -> None:
    health = served.services.state.running().services["deployments"].url
    assert httpx.get(f"{health}/health").json() == {"message": "OK"}
    assert httpx.post(f"{health}/shutdown").status_code == 404
    assert httpx.get(f"{health}/health", headers={"host": "evil.example"}).status_code == 421
