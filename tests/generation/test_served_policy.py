"""A replica answers with the wanted version or not at all. Faults are planted in the engine, which is a fake here."""

from __future__ import annotations

import asyncio
import errno
import shutil
from pathlib import Path

import httpx
import pytest
import uvicorn

from roundhouse.errors import DataError, DeploymentFailed
from roundhouse.generation import served_policy
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.chat_server import ChatServer
from roundhouse.generation.deployment import WeightsUnreachable, all_there, counted_tokens
from roundhouse.generation.protocol import Draw, EnginePoisoned, Generated
from roundhouse.generation.served_policy import PolicyUnavailable, SamplingRefused, ServedPolicy
from roundhouse.retry import Backoff
from roundhouse.store.bucket import StoreUnavailable
from roundhouse.weight_sync.replica_state import DesiredPolicy, ReplicaReport


class FaultyEngine:
    """Engine that does nothing and fails to load on request."""

    max_model_len = 64

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.fault: Exception | None = None
        self.score_of_all = -1.0
        self.slow = asyncio.Event()
        self.slow.set()

    async def start(self) -> None: ...

    async def generate(self, prompt_token_ids, draw: Draw) -> Generated:
        await self.slow.wait()
        return Generated([1], [-0.1], "stop")

    async def load_weights(self, directory, version=0, running="drain", keep_prefix_cache=False) -> None:
        if self.fault is not None:
            raise self.fault
        self.loaded.append(directory)

    async def score(self, token_ids) -> list[float]:
        return [self.score_of_all] * (len(token_ids) - 1)

    async def check_health(self) -> None: ...

    def openai_app(self):
        return None

    def shutdown(self) -> None: ...


@pytest.fixture
def engine() -> FaultyEngine:
    return FaultyEngine()


@pytest.fixture
def policy(engine: FaultyEngine, policies: dict[str, Path]) -> ServedPolicy:
    return ServedPolicy(engine, str(policies["first"]), "r1")


async def version_of(policy: ServedPolicy) -> int:
    async with policy.answering() as version:
        await policy.engine.generate([1], Draw(max_tokens=1))
        return version


async def test_without_weights_nobody_answers(policy):
    await policy.apply(DesiredPolicy(policy_version=0, request=1))
    with pytest.raises(PolicyUnavailable, match="No weights"):
        await version_of(policy)
    await policy.check_health()


async def test_a_refit_waits_for_requests_inside_and_those_that_come_wait_for_it(policy, engine, policies):
    await policy.apply(DesiredPolicy(1, str(policies["first"]), request=1))
    engine.slow.clear()
    inside = asyncio.create_task(version_of(policy))
    await asyncio.sleep(0.01)
    refit = asyncio.create_task(policy.apply(DesiredPolicy(2, str(policies["second"]), request=2)))
    while policy._gate._open.is_set():  # noqa: ASYNC110 (a look inside, without a hook for it)
        await asyncio.sleep(0.01)
    later = asyncio.create_task(version_of(policy))
    await asyncio.sleep(0.05)
    assert not refit.done()
    assert not later.done()
    engine.slow.set()
    await refit
    assert (await inside, await later) == (1, 2)


async def test_a_caller_that_leaves_ends_its_generation_and_no_refit_waits_for_it(policy, engine, policies):
    await policy.apply(DesiredPolicy(1, str(policies["first"]), request=1))
    engine.slow.clear()
    application = ChatServer(policy, ChatCodec(str(policies["first"]), 64), "policy")
    server = uvicorn.Server(uvicorn.Config(application, port=0, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (it has no event)
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1/chat/completions"
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(url, json={"messages": [{"role": "user", "content": "hi"}]}, timeout=0.5)
        async with asyncio.timeout(10):
            await policy.apply(DesiredPolicy(2, str(policies["second"]), request=2))
        assert policy.status()["policy_version"] == 2
    finally:
        engine.slow.set()
        server.should_exit = True
        await serving


async def test_tokens_of_every_answer_are_counted_and_another_policy_counts_anew(policy, engine, policies):
    await policy.apply(DesiredPolicy(1, str(policies["first"]), request=1))
    for _ in range(3):
        await policy.answer([1], Draw(max_tokens=1))
    await policy.apply(DesiredPolicy(2, str(policies["second"]), request=2))
    [report] = counted_tokens([ReplicaReport.parse(policy.status())]).items()
    assert report == (policy.status()["token_counter"], 3)
    assert ServedPolicy(engine, str(policies["first"]), "r1").status()["token_counter"] != report[0]


async def test_a_refit_that_breaks_off_makes_the_replica_unhealthy(policy, engine, policies):
    await policy.apply(DesiredPolicy(1, str(policies["first"]), request=1))
    engine.fault = RuntimeError("half of it")
    await policy.apply(DesiredPolicy(2, str(policies["second"]), request=2))
    with pytest.raises(PolicyUnavailable, match="half of it"):
        await version_of(policy)
    with pytest.raises(EnginePoisoned):
        await policy.check_health()


async def test_an_os_error_in_the_middle_of_loading_is_not_taken_for_a_missing_file(policy, engine, policies):
    engine.fault = OSError("device lost")
    await policy.apply(DesiredPolicy(1, str(policies["first"]), request=1))
    with pytest.raises(EnginePoisoned):
        await policy.check_health()


async def test_refused_weights_leave_the_engine_untouched_and_healthy(policy, engine, policies, tmp_path):
    await policy.apply(DesiredPolicy(1, str(policies["first"]), request=1))
    await policy.apply(DesiredPolicy(2, str(tmp_path / "nowhere"), request=2))
    with pytest.raises(PolicyUnavailable, match="does not exist"):
        await version_of(policy)
    await policy.check_health()
    assert len(engine.loaded) == 1
    await policy.apply(DesiredPolicy(3, str(policies["first"]), request=3))
    assert await version_of(policy) == 3


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (StoreUnavailable("no answer"), WeightsUnreachable),
        (OSError(errno.ENOSPC, "No space left on device"), WeightsUnreachable),
        (DataError("no such tensor"), DeploymentFailed),
    ],
)
async def test_a_refit_that_fails_for_a_passing_cause_is_an_error_that_is_retried(
    policy, policies, monkeypatch, cause: Exception, kind: type[Exception]
):
    async def fail(desired: DesiredPolicy) -> None:
        raise cause

    monkeypatch.setattr(policy, "_refit", fail)
    await policy.apply(DesiredPolicy(1, str(policies["first"]), request=7))
    desired = {"request": 7, "policy_version": 1, "weights": str(policies["first"])}
    with pytest.raises(kind, match=f"cannot be refitted.*{cause.args[-1]}"):
        all_there([ReplicaReport.parse(policy.status())], 1, "", desired)


async def test_weights_that_appear_later_are_picked_up_without_a_new_wish(policy, policies, tmp_path, monkeypatch):
    monkeypatch.setattr(served_policy, "RETRIES", Backoff(0.05))
    late = tmp_path / "late"
    await policy.apply(DesiredPolicy(1, str(late), request=1))
    shutil.copytree(policies["first"], late)
    async with asyncio.timeout(10):
        while not policy.status()["ready"]:  # noqa: ASYNC110 (seen from outside, as /rh/status is)
            await asyncio.sleep(0.05)
    assert await version_of(policy) == 1


async def test_an_older_wish_that_arrives_late_is_ignored(policy, policies):
    await policy.apply(DesiredPolicy(2, str(policies["second"]), request=20))
    await policy.apply(DesiredPolicy(1, str(policies["first"]), request=10))
    assert await version_of(policy) == 2


async def test_the_same_wish_again_loads_nothing(policy, engine, policies):
    for request in (1, 2):
        await policy.apply(DesiredPolicy(1, str(policies["first"]), request=request))
    assert len(engine.loaded) == 1


async def test_a_run_of_foreign_agents_is_drawn_with_its_own_sampling_or_not_at_all(policy, policies):
    training, greedy = ({"temperature": t, "top_p": 1.0, "top_k": None} for t in (0.8, 0.0))
    weights = str(policies["first"])
    policy.require_sampling(Draw(4, temperature=0.3))
    await policy.apply(DesiredPolicy(policy_version=1, weights=weights, request=1, sampling=[training, greedy]))
    policy.require_sampling(Draw(4, temperature=0.8))
    policy.require_sampling(Draw(4, temperature=0))
    for other in (Draw(4, temperature=0.3), Draw(4, 0.8, top_p=0.9), Draw(4, 0.8, top_k=5), Draw(4)):
        with pytest.raises(SamplingRefused, match="samples with"):
            policy.require_sampling(other)
    await policy.apply(DesiredPolicy(policy_version=1, weights=weights, request=2))
    policy.require_sampling(Draw(4, temperature=0.3))


async def test_the_refusal_reaches_the_agent_as_an_error_with_a_code(policy, policies):
    wanted = [{"temperature": 0.8, "top_p": 1.0, "top_k": None}]
    await policy.apply(DesiredPolicy(policy_version=1, weights=str(policies["first"]), request=1, sampling=wanted))
    server = ChatServer(policy, ChatCodec(str(policies["first"]), 64), "policy")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://engine") as client:
        refused = await client.post("/v1/chat/completions", json=body | {"temperature": 0.5})
        filtered = await client.post("/v1/chat/completions", json=body | {"temperature": 0.8, "top_p": 0.9})
        taken = await client.post("/v1/chat/completions", json=body | {"temperature": 0.8})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "sampling_refused")
    assert [each.json()["error"]["param"] for each in (refused, filtered)] == ["temperature", "top_p"]
    assert taken.status_code == 200


def test_an_unknown_key_of_user_config_is_refused():
    with pytest.raises(ValueError, match="policy_version"):
        DesiredPolicy.parse({"policy_version": 1, "wieghts": "x"})
