"""Deployments served on this machine as by `roundhouse up`, with an engine that does not need Ray; and a client for them."""

from __future__ import annotations

import base64
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from roundhouse.config.models import CalculatorEnvironment, WarmStartPolicy
from roundhouse.environments import load
from roundhouse.infra import services
from roundhouse.infra.services import Services
from roundhouse.policy.warm_start import make_starting_policy
from roundhouse.store.run import Run, load_run
from tests import fork_server
from tests.ports import free_port
from tests.waiting import until

CHROMIUM = Path("/usr/bin/chromium")
PAGE_SECONDS = 120_000
"""Milliseconds; Prefect's page takes long to load on a busy machine."""
POLICY = WarmStartPolicy(steps=20, hidden_size=32, intermediate_size=64, layers=1)
PRESET = {
    "run_id": "small",
    "iterations": 16,
    "rollout": {"prompts_per_iteration": 2, "group_size": 2, "max_turns": 2},
    "train": {"minibatches": 1, "threads": 1, "device": "cpu", "optimizer": {"learning_rate": 3e-4}},
    "evaluation": {"every": 0, "tasks": 2},
    "tracking": {"enabled": False, "labels": {"team": "search"}},
}


@dataclass
class Served:
    """The served deployments and their server."""

    directory: Path
    services: Services
    engine_url: str

    @property
    def store(self) -> str:
        return str(self.directory / "store")

    @property
    def auth(self) -> httpx.BasicAuth:
        """For Prefect's API."""
        return httpx.BasicAuth(*self.services.prefect_auth_string.split(":"))

    def sign_in(self, page: Any) -> None:
        """Store the sign-in state of Prefect's page in the browser."""
        kept = base64.b64encode(self.services.prefect_auth_string.encode()).decode()
        page.add_init_script(f"localStorage.setItem('prefect-password', '{kept}')")

    @contextlib.contextmanager
    def at_prefect(self) -> Iterator[None]:
        """Prefect's client in this process talks to the server."""
        from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

        variables = self.services.environment()
        with temporary_settings({each: variables[each.name] for each in (PREFECT_API_URL, PREFECT_API_AUTH_STRING)}):
            yield

    def run(self, run_id: str) -> Run:
        return load_run(self.store, run_id)

    def call(self, method: str, path: str, items: list[Any] | None = None, **body: Any) -> Any:
        """Call Prefect's API, with a list or an object as the body. Retry while its database is busy (503 or no answer)."""
        url = f"{self.services.prefect_ui_url}/api/{path}"
        for _ in range(20):
            try:
                reply = httpx.request(
                    method, url, json=(items or body) if method == "POST" else None, auth=self.auth, timeout=60
                )
            except httpx.ReadTimeout:
                if method != "GET":
                    raise
                continue
            if reply.status_code != 503:
                break
            time.sleep(0.5)
        assert reply.status_code < 400, f"{method} {path}: {reply.status_code} {reply.text}"
        return reply.json() if reply.content else None

    def deployment(self, name: str) -> dict[str, Any]:
        return self.call("GET", f"deployments/name/{name}/{name}")

    def start(self, name: str, /, **settings: Any) -> str:
        """Start a flow run as the UI's *Run* does; return its id."""
        deployment = self.deployment(name)["id"]
        asked = {"parameters": {"settings": settings}, "state": {"type": "SCHEDULED"}}
        return self.call("POST", f"deployments/{deployment}/create_flow_run", **asked)["id"]

    def ask(self, flow_run: str, **state: Any) -> None:
        """Request a state as the UI's buttons do."""
        reply = self.call("POST", f"flow_runs/{flow_run}/set_state", state=state, force=False)
        assert reply["status"] == "ACCEPT", reply

    def state(self, flow_run: str) -> str:
        return self.call("GET", f"flow_runs/{flow_run}")["state"]["type"]

    def wait(self, flow_run: str, *wanted: str) -> dict[str, Any]:
        """The flow run, once its state is one of those."""
        until(
            lambda: self.state(flow_run) in wanted,
            f"{wanted} of {flow_run}",
            evidence=lambda: self.evidence_of(flow_run),
        )
        return self.call("GET", f"flow_runs/{flow_run}")

    def processes(self) -> list[psutil.Process]:
        """All processes of the flow runs, however deep."""
        return psutil.Process(services.status(self.services.state.path).records["deployments"].pid).children(
            recursive=True
        )

    def evidence_of(self, flow_run: str) -> str:
        log = self.services.state.log("deployments").read_text()[-6000:]
        return f"{self.call('GET', f'flow_runs/{flow_run}')['state']}\n{log}"


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[Served]:
    """Prefect, the deployments and an engine, with `small` as the preset; all its runs begin with one policy."""
    (directory / "presets").mkdir()
    port = free_port()
    engine_url = f"http://127.0.0.1:{port}"
    make_starting_policy(POLICY, load(CalculatorEnvironment()), 0, directory / "policy")
    settings = PRESET | {
        "policy": {"kind": "pretrained", "path": str(directory / "policy")},
        "store": str(directory / "store"),
        "generation": {"backend": "transformers", "max_model_len": 256, "engine_url": engine_url}
        | {"sampling": {"max_new_tokens": 8}},
    }
    (directory / "presets" / "small.yaml").write_text(yaml.safe_dump(settings))
    state = directory / "state" / "services"
    command = [sys.executable, "-m", "roundhouse.generation.standalone", "--port", str(port)]
    with (directory / "engine.log").open("wb") as log:
        engine = fork_server.start(command, stdout=log, stderr=log)
    before = os.environ.get("ROUNDHOUSE_PRESETS")
    os.environ["ROUNDHOUSE_PRESETS"] = str(directory / "presets")
    try:
        yield Served(directory, services.up(state, ("prefect", "deployments")), engine_url)
    finally:
        if before is None:
            del os.environ["ROUNDHOUSE_PRESETS"]
        services.down(state)
        engine.kill()
        engine.wait()
