"""Sandboxes as claimed pods, with a fake API server and local sandboxes as pods. Not run on a real cluster."""

import asyncio
import datetime
import functools
import itertools
import json
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.sandboxes import LocalSandbox
from roundhouse.environments import check_sandboxes, environment_config
from roundhouse.environments.sandbox import SandboxKilled, SandboxUnavailable
from roundhouse.environments.sandboxes import CommandResult, new_sandbox
from roundhouse.environments.sandboxes.local import LocalProcess
from roundhouse.errors import ConfigError
from roundhouse.plugins.kubernetes_sandbox import sandbox as pods
from roundhouse.plugins.kubernetes_sandbox.sandbox import connect
from roundhouse.plugins.kubernetes_sandbox.section import KubernetesSandbox
from tests.k8s.api_server import ApiState, Object, api_server
from tests.k8s.pod_exec import answer

CONFIG = KubernetesSandbox(
    kind="kubernetes", warm_pool="shells", namespace="play", command_seconds=5, output_bytes=1000
)


class Controller:
    """The controller of agent-sandbox: a claim gets a ready sandbox with a pod of the pool, at once."""

    def __init__(self, state: ApiState) -> None:
        self.pods: dict[str, LocalProcess] = {}
        self.runtime_class = "gvisor"
        self.ready = True
        self._create = state.create
        state.create = self.create  # type: ignore[method-assign]
        state.execute = self.execute

    def create(self, plural: str, namespace: str, body: Object) -> tuple[int, Object]:
        status, claim = self._create(plural, namespace, body)
        if plural == "sandboxclaims" and status == 201 and self.ready:
            name = claim["metadata"]["name"]
            pod = f"pod-{len(self.pods)}"
            self.pods[pod] = LocalProcess(LocalSandbox(command_seconds=30))
            self.pods[pod]._process = self.pods[pod]._started()
            metadata = {"name": name, "annotations": {"agents.x-k8s.io/pod-name": pod}}
            self._create("sandboxes", namespace, {"metadata": metadata})
            self._create(
                "pods", namespace, {"metadata": {"name": pod}, "spec": {"runtimeClassName": self.runtime_class}}
            )
            claim["status"] = {"conditions": [{"type": "Ready", "status": "True"}], "sandbox": {"name": name}}
        return status, claim

    def execute(self, request: BaseHTTPRequestHandler, pod: str) -> None:
        answer(request, self.pods[pod])


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiState]:
    with api_server() as (url, state):
        file = tmp_path / "kubeconfig"
        file.write_text(
            f"""
clusters: [{{name: fake, cluster: {{server: "{url}"}}}}]
users: [{{name: me, user: {{}}}}]
contexts: [{{name: fake, context: {{cluster: fake, user: me}}}}]
current-context: fake
"""
        )
        monkeypatch.setenv("KUBECONFIG", str(file))
        connect.cache_clear()
        yield state
    connect.cache_clear()


@pytest.fixture
def controller(state: ApiState) -> Iterator[Controller]:
    made = Controller(state)
    yield made
    for pod in made.pods.values():
        asyncio.run(pod.close())


def claims(state: ApiState) -> list[Object]:
    return [
        item
        for (plural, namespace, _), item in state.objects.items()
        if (plural, namespace) == ("sandboxclaims", "play")
    ]


async def test_commands_run_in_the_claimed_pod_and_the_claim_is_deleted(
    state: ApiState, controller: Controller
) -> None:
    sandbox = new_sandbox(CONFIG)
    await sandbox.start()
    [claim] = claims(state)
    assert claim["spec"]["warmPoolRef"] == {"name": "shells"}
    await sandbox.write_files({"notes/a.txt": b"two\none\n", "b": b"x" * 200_000})
    assert await sandbox.run("pwd; sort notes/a.txt | tee c; exit 3") == CommandResult(3, "/sandbox\none\ntwo\n")
    assert await sandbox.read_files() == {"notes/a.txt": b"two\none\n", "b": b"x" * 200_000, "c": b"one\ntwo\n"}
    await sandbox.close()
    assert claims(state) == []


async def test_a_limit_that_is_reached_is_a_result(controller: Controller) -> None:
    sandbox = new_sandbox(CONFIG.model_copy(update={"command_seconds": 0.5}))
    await sandbox.start()
    ended = await sandbox.run("seq 1000000")
    assert (len(ended.output), ended.truncated, ended.timed_out) == (1000, True, False)
    ended = await sandbox.run("sleep 4")
    assert (ended.truncated, ended.timed_out) == (False, True)
    assert await sandbox.run("echo fine") == CommandResult(0, "fine\n")
    await sandbox.close()


async def test_a_claim_ends_by_itself_at_its_shutdown_time(state: ApiState, controller: Controller) -> None:
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    await new_sandbox(CONFIG.model_copy(update={"lifetime_seconds": 600})).start()
    lifecycle = claims(state)[0]["spec"]["lifecycle"]
    end = datetime.datetime.fromisoformat(lifecycle["shutdownTime"])
    assert lifecycle["shutdownPolicy"] == "Delete"
    assert 600 <= (end - before).total_seconds() <= 660


async def test_a_pod_that_is_gone_is_a_failure_of_the_infrastructure(controller: Controller) -> None:
    sandbox = new_sandbox(CONFIG)
    await sandbox.start()
    await controller.pods["pod-0"].close()
    with pytest.raises(SandboxKilled, match="pod-0 of a sandbox is gone"):
        await sandbox.run("true")
    controller.pods.clear()
    with pytest.raises(SandboxKilled, match="pod-0 of a sandbox is gone"):
        await sandbox.run("true")
    await sandbox.close()


async def test_claims_that_wait_for_a_pod_keep_no_sandbox_from_running_and_ending(
    state: ApiState, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "_threads", functools.cache(lambda: ThreadPoolExecutor(2)))
    config = CONFIG.model_copy(update={"start_seconds": 6})
    running, *waiting = [new_sandbox(config) for _ in range(5)]
    await running.start()
    controller.ready = False
    starts = [asyncio.create_task(each.start()) for each in waiting]
    async with asyncio.timeout(4):
        while len(claims(state)) < 5:  # noqa: ASYNC110 - until all of them wait
            await asyncio.sleep(0.02)
    async with asyncio.timeout(4):
        assert await running.run("echo fine") == CommandResult(0, "fine\n")
        for start in starts:
            start.cancel()
        await asyncio.wait(starts)
        for each in (running, *waiting):
            await each.close()
    assert claims(state) == []


def without_controller(state: ApiState, controller: Controller) -> None:
    controller.ready = False


def without_resources(state: ApiState, controller: Controller) -> None:
    state.create = lambda *_: (404, {"message": "not found"})  # type: ignore[method-assign,assignment]


def without_gvisor(state: ApiState, controller: Controller) -> None:
    controller.runtime_class = "runc"


def nothing(state: ApiState, controller: Controller) -> None:
    pass


@pytest.mark.parametrize(
    ("lacking", "keys", "message"),
    [
        (without_controller, {"start_seconds": 7}, r"warm pool shells returned no sandbox within 7 s"),
        (without_resources, {}, r"refuses to create a SandboxClaim in namespace play \(404\).*Install agent-sandbox"),
        (
            without_gvisor,
            {"runtime_class": "gvisor"},
            "runtime_class is gvisor, but pods of the warm pool shells have runc",
        ),
        (nothing, {"context": "elsewhere"}, "no cluster is configured here.*environment.sandbox.context"),
    ],
    ids=["no controller", "no resources", "no gvisor", "no cluster"],
)
async def test_what_a_cluster_lacks_is_named(
    state: ApiState,
    controller: Controller,
    monkeypatch: pytest.MonkeyPatch,
    lacking: Any,
    keys: dict[str, Any],
    message: str,
) -> None:
    clock = types.SimpleNamespace(monotonic=itertools.count(0, 10**9).__next__)
    monkeypatch.setattr(pods, "time", clock)
    lacking(state, controller)
    sandbox = new_sandbox(CONFIG.model_copy(update=keys))
    with pytest.raises(SandboxUnavailable, match=message):
        await sandbox.start()
    if "context" not in keys:
        await sandbox.close()
        assert claims(state) == []


def test_a_cluster_that_is_not_configured_is_named_before_any_rollout(state: ApiState) -> None:
    section = {"kind": "kubernetes", "warm_pool": "shells", "context": "elsewhere"}
    with pytest.raises(
        ConfigError, match=r"sandbox\.kind is kubernetes: no sandbox works here: .* no cluster is configured"
    ):
        check_sandboxes(environment_config("terminal", json.dumps({"problems": 40, "sandbox": section})))
