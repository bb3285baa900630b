"""Starting the servers of a configuration, in this process."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from roundhouse.errors import InfraError
from roundhouse.plugins.nemo_gym.config.resolve import resolve
from roundhouse.plugins.nemo_gym.config.sources import SearchRoots
from roundhouse.plugins.nemo_gym.servers.commands import Foreign, commands
from roundhouse.plugins.nemo_gym.servers.start import GymServers, StartOptions
from tests.gym.playground import serving_counter
from tests.ports import free_port

pytestmark = pytest.mark.real

ANSWERS = """
import http.server, os
port = int(os.environ["NEMO_GYM_CONFIG_DICT"].split("port: ")[1].split()[0])
http.server.HTTPServer(("127.0.0.1", port), http.server.BaseHTTPRequestHandler).serve_forever()
"""


LOADS = """
import http.server, os
port = int(os.environ["NEMO_GYM_CONFIG_DICT"].split("port: ")[1].split()[0])
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(503 if Handler.asked < 4 else 200)
        self.send_header("X-Asked", str(Handler.asked))
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def servers(tmp_path) -> Callable[..., GymServers]:
    """Configuration of one foreign server with the given code."""

    def make(app: str, *overrides: str, **options: Any) -> GymServers:
        place = tmp_path / "resources_servers" / "weather"
        place.mkdir(parents=True)
        (place / "app.py").write_text(app)
        (place / "requirements.txt").write_text("")
        (tmp_path / "w.yaml").write_text("w: {resources_servers: {weather: {entrypoint: app.py, domain: agent}}}\n")
        roots = SearchRoots.of(cwd=tmp_path, environ={})
        resolution = resolve(["w.yaml"], [f"++head_server.port={free_port()}", *overrides], roots)
        found, problems = commands(resolution, roots, Foreign(python=Path(sys.executable)))
        assert (resolution.problems, problems) == ([], [])
        return GymServers(resolution, found, StartOptions(logs=tmp_path / "logs", ray=False, **options))

    return make


async def starting(servers: GymServers) -> str:
    """Return the error of the start."""
    async with servers:
        with pytest.raises(InfraError) as caught:
            await servers.start()
    return str(caught.value)


async def test_a_server_that_ends_at_its_start_is_told_with_the_end_of_its_log(servers):
    told = await starting(servers("raise SystemExit('the model of the weather is missing')"))
    assert "w ended with exit code 1" in told
    assert "the model of the weather is missing" in told


async def test_a_server_that_stays_silent_is_named_when_the_time_is_over(servers):
    silent = "import time\nprint('loading', flush=True)\ntime.sleep(600)"
    told = await starting(servers(silent, start_seconds=2.0))
    assert "Not everything answered within 2 s" in told
    assert "loading" in told


async def test_a_taken_port_is_named_with_its_owner(servers):
    with serving_counter() as url:
        port = url.rsplit(":", 1)[1]
        told = await starting(servers(ANSWERS, f"++w.resources_servers.weather.port={port}"))
    assert told.startswith(f"w: port {port} is taken by process")


async def test_a_head_port_that_is_taken_is_named(servers):
    with serving_counter() as url:
        port = url.rsplit(":", 1)[1]
        assert f":{port} cannot be bound" in await starting(servers(ANSWERS, f"++head_server.port={port}"))


async def test_any_http_answer_counts_as_ready_and_the_head_tells_of_an_end(servers):
    group = servers(ANSWERS)
    async with group:
        await group.start()
        async with httpx.AsyncClient() as http:
            (told,) = (await http.get(f"{group.head_url}/server_instances")).json()
            assert (await http.get(told["url"])).status_code == 501
            assert told["status"] == "success"
            (one,) = group.running()
            assert one.pid is not None
            psutil.Process(one.pid).kill()
            with pytest.raises(InfraError, match="was killed by signal 9"):
                await asyncio.wait_for(group.until(asyncio.Event()), 20)
            (told,) = (await http.get(f"{group.head_url}/server_instances")).json()
            assert told["status"] == "connection_error"


async def test_a_server_that_answers_503_is_not_ready_yet(servers):
    """It was ready with "loading the model"."""
    group = servers(LOADS)
    async with group:
        await group.start()
        async with httpx.AsyncClient() as http:
            reply = await http.get(group.running()[0].url)
    assert (reply.status_code, reply.headers["X-Asked"]) == (200, "5")


async def test_until_returns_when_it_is_told_to(servers):
    group = servers(ANSWERS)
    async with group:
        await group.start()
        stop = asyncio.Event()
        stop.set()
        await asyncio.wait_for(group.until(stop), 5)
    assert group.running()[0].pid is None


@pytest.mark.parametrize(
    ("given", "trusted"), [(None, False), ("Bearer wrong", False), ("sesame", False), ("Bearer sesame", True)]
)
async def test_secrets_leave_the_head_for_its_bearer_token_alone(servers, given, trusted):
    group = servers(ANSWERS, "++policy_api_key=hush", head_token="sesame")
    async with group:
        await group.start()
        async with httpx.AsyncClient() as http:
            headers = {} if given is None else {"Authorization": given}
            told = (await http.get(f"{group.head_url}/global_config_dict_yaml", headers=headers)).json()
    assert ("hush" in told) is trusted


async def test_engines_behind_model_servers_are_waited_for_and_one_that_stays_silent_is_told(servers):
    told: list[str] = []
    with serving_counter() as url:
        model = f"++m.responses_api_models={{roundhouse_model: {{base_url: ['{url}/v1', 'http://127.0.0.1:{free_port()}/v1']}}}}"
        group = servers(ANSWERS, model, "++model_endpoint_readiness_timeout_seconds=1", announce=told.append)
        async with group:
            await group.start()
    assert [text for text in told if text.startswith("waiting up to 1 s for http") and url not in text]
    assert [text for text in told if text.startswith("no answer from http") and "(m.base_url)" in text]
