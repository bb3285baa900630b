"""`roundhouse gym start` as a process: our servers, a foreign one, one that runs elsewhere; all ways in which it ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from roundhouse.environments.calculator import Calculator
from roundhouse.errors import EXIT_CODES, InfraError
from tests.gym.playground import serving
from tests.plugins.nemo_gym.collecting import collect
from tests.plugins.programs.model_server.fake_engine import FakeEngine, say

pytestmark = pytest.mark.real

CALCULATOR = """
calc:
  resources_servers:
    roundhouse_environment: {environment: {kind: calculator}}
calc_agent:
  responses_api_agents:
    roundhouse_agent:
      resources_server: {type: resources_servers, name: calc}
      model_server: {type: responses_api_models, name: policy_model}
policy_model:
  responses_api_models:
    roundhouse_model: {base_url: "${policy_base_url}", api_key: "${policy_api_key}"}
"""
NO_WAIT = "++model_endpoint_readiness_timeout_seconds=0"
FOREIGN = """
weather:
  resources_servers:
    weather: {entrypoint: app.py, domain: agent, greeting: "${hello}"}
"""
APP = '''
"""A foreign server of the standard library alone: it has no route at /, and ends late."""
import http.server, json, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
port = int(os.environ["NEMO_GYM_CONFIG_DICT"].split("port: ")[1].split()[0])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        told = {key: os.environ[key] for key in ("NEMO_GYM_CONFIG_DICT", "NEMO_GYM_CONFIG_PATH", "NEMO_GYM_EXTRA_ROOTS")}
        told |= {"cwd": os.getcwd(), "argv": sys.argv}
        body = json.dumps(told).encode()
        self.send_response(200 if self.path == "/told" else 404)
        self.end_headers()
        self.wfile.write(body if self.path == "/told" else b"")
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
'''


class Started:
    """The command, its readiness line, and its messages."""

    def __init__(self, directory: Path, *arguments: str, environ: dict[str, str] | None = None) -> None:
        self.errors = (directory / "stderr.txt").open("wb")
        self.process = subprocess.Popen(
            _command(*arguments),
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, **(environ or {})},
            start_new_session=True,
        )

    def ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.said()
        return json.loads(line)

    def said(self) -> str:
        return Path(self.errors.name).read_text()

    def end(self, signum: int = signal.SIGTERM) -> int:
        self.process.send_signal(signum)
        return self.process.wait(40)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.end()
        self.errors.close()
        if self.process.stdout is not None:
            self.process.stdout.close()


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from roundhouse.cli import main; main()", "gym", *arguments]


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def begin(text: str, *arguments: str, **options: Any) -> Started:
        (tmp_path / "config.yaml").write_text(text)
        command = ("start", "config.yaml", *arguments, "--head-port", "0", "--json")
        started.append(Started(tmp_path, *command, **options))
        return started[-1]

    yield begin
    for one in started:
        one.stop()


def gone(pids: list[int], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while any(_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def foreign_server(directory: Path, app: str = APP) -> None:
    place = directory / "resources_servers" / "weather"
    place.mkdir(parents=True)
    (place / "app.py").write_text(app)
    (place / "requirements.txt").write_text("")


def plays_calculator(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """One call of the tool, then its result as the answer."""
    if messages[-1]["role"] == "tool":
        return say(str(messages[-1]["content"]))(messages)
    function = {"name": "calculate", "arguments": json.dumps({"expression": "2*3"})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


@pytest.mark.smoke("NeMo Gym servers")
def test_a_collector_finds_our_servers_at_the_head_and_collects_complete_rollouts(start):
    engine = FakeEngine(reply=plays_calculator)
    with serving(engine) as url:
        started = start(CALCULATOR, f"++policy_base_url={url}/v1", "++policy_api_key=sesame")
        line = started.ready()
        agent = {"type": "responses_api_agents", "name": "calc_agent"}
        tasks = Calculator().tasks("train")[:3]
        rows = [{**row, "agent_ref": agent, "_ng_task_index": i, "_ng_rollout_index": 0} for i, row in enumerate(tasks)]
        poison = {
            "agent_ref": agent,
            "_ng_task_index": 9,
            "_ng_rollout_index": 0,
            "responses_create_params": {"input": 7},
        }
        told, results, metrics = asyncio.run(collect(line["head"], [*rows, poison]))
        instances = httpx.get(f"{line['head']}/server_instances").json()
        assert httpx.get(line["head"]).json() == {"status": "ok"}
        status = subprocess.run(_command("status", "--head", line["head"], "--json"), capture_output=True, check=False)
        pids = [server["pid"] for server in line["servers"]]
        assert started.end() == 0
    for row, result in zip(rows, results[:3], strict=True):
        output = result["response"]["output"]
        assert [item["type"] for item in output] == ["function_call", "function_call_output", "message"]
        assert [index for index, item in enumerate(output) if item.get("generation_token_ids")] == [0, 2]
        assert isinstance(result["reward"], float)
        assert result["task_id"] == row["task_id"]
    assert results[3]["_ng_failure_class"] == "bad_task_row"
    assert len(metrics["group_level_metrics"]) == 3
    assert "mean/reward" in metrics["agent_metrics"]
    assert (
        told["policy_api_key"] == told["policy_model"]["responses_api_models"]["roundhouse_model"]["api_key"] == "****"
    )
    assert engine.headers[0][b"authorization"] == b"Bearer sesame"
    assert {one["process_name"]: one["server_type"] for one in instances} == {
        "calc": "resources_servers",
        "calc_agent": "responses_api_agents",
        "policy_model": "responses_api_models",
        "calc_environment_server": "environment_servers",
    }
    fields = "config_path dir_path entrypoint host name pid port process_name server_type start_time status uptime_seconds url"
    assert all(set(fields.split()) == one.keys() and one["status"] == "success" for one in instances)
    assert status.returncode == 0
    assert {one["status"] for one in json.loads(status.stdout)} == {"success"}
    assert gone(pids)


def test_a_foreign_server_is_started_as_nemo_gym_does_it_beside_one_that_runs_elsewhere(start, tmp_path):
    foreign_server(tmp_path)
    with serving(FakeEngine()) as url:
        text = FOREIGN + f"elsewhere: {{responses_api_models: {{any: {{url: '{url}'}}}}}}\n"
        started = start(text, "++hello=hi", "++api_key=sesame", "--python", sys.executable, "--no-ray")
        line = started.ready()
        urls = {server["name"]: server["url"] for server in line["servers"]}
        told = httpx.get(f"{urls['weather']}/told").json()
        assert urls["elsewhere"] == url
        (pid,) = [server["pid"] for server in line["servers"] if server["name"] == "weather"]
        command = " ".join(psutil.Process(pid).cmdline())
        assert started.end(signal.SIGINT) == 0
    assert (told["NEMO_GYM_CONFIG_PATH"], told["argv"]) == ("weather", ["app.py"])
    assert told["cwd"] == str(tmp_path / "resources_servers" / "weather")
    assert "greeting: ${hello}" in told["NEMO_GYM_CONFIG_DICT"]
    assert "api_key: sesame" in told["NEMO_GYM_CONFIG_DICT"]
    assert "sesame" not in command
    assert gone([pid])


JOINS = APP.replace(
    "class Handler",
    """import ray
address = os.environ["NEMO_GYM_CONFIG_DICT"].split("ray_head_node_address: ")[1].split()[0]
ray.init(address=address, logging_level="ERROR")
os.environ["NEMO_GYM_EXTRA_ROOTS"] = ray.get(ray.remote(lambda: f"a task ran at {address}").remote())
class Handler""",
)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_foreign_server_joins_the_ray_cluster_of_the_start_and_the_cluster_ends_with_it(start, tmp_path):
    foreign_server(tmp_path, JOINS)
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as ray:  # sockets have short names
        dead = Path(ray) / "ray" / "ray_current_cluster"
        dead.parent.mkdir()
        dead.write_text("127.0.0.1:9")
        environ = {"RAY_ADDRESS": "", "RAY_TMPDIR": ray}
        _joins_and_ends(start(FOREIGN, "++hello=hi", "--python", sys.executable, "--ray", environ=environ))


def _joins_and_ends(started: Started) -> None:
    line = started.ready()
    (server,) = line["servers"]
    told = httpx.get(f"{server['url']}/told").json()["NEMO_GYM_EXTRA_ROOTS"]
    address = told.removeprefix("a task ran at ")
    assert address != told
    ours = [child.pid for child in psutil.Process(started.process.pid).children(recursive=True)]
    names = {pid: " ".join(psutil.Process(pid).cmdline()) for pid in ours}
    assert any("gcs_server" in name for name in names.values()), "a cluster of its own"
    assert started.end() == 0
    assert gone(ours), [name[:30] for pid, name in names.items() if _alive(pid)]


def test_nothing_is_left_when_the_command_is_killed(start, tmp_path):
    foreign_server(tmp_path)
    started = start(FOREIGN, "++hello=hi", "--python", sys.executable, "--no-ray")
    (pid,) = [server["pid"] for server in started.ready()["servers"]]
    assert _alive(pid)
    assert started.end(signal.SIGKILL) == -signal.SIGKILL
    assert gone([pid])


def test_a_server_that_ends_by_itself_ends_the_others(start):
    started = start(CALCULATOR, "++policy_base_url=http://127.0.0.1:1/v1", "++policy_api_key=x", NO_WAIT)
    pids = {server["name"]: server["pid"] for server in started.ready()["servers"]}
    os.kill(pids["calc"], signal.SIGKILL)
    assert started.process.wait(40) == EXIT_CODES[InfraError]
    assert "calc was killed by signal 9" in started.said()
    assert gone(list(pids.values()))
