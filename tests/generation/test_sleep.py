"""A sleeping engine holds no weights and answers no requests; after waking it is equal to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from roundhouse.config.models import GenerationConfig
from roundhouse.errors import DeploymentFailed
from roundhouse.generation.deployment import ProcessEngine
from roundhouse.generation.protocol import Draw, Generated
from roundhouse.generation.served_policy import PolicyUnavailable, ServedPolicy
from roundhouse.weight_sync.replica_state import DesiredPolicy, RefitOptions, ReplicaReport
from tests.generation import tiny
from tests.generation.test_served_policy import FaultyEngine
from tests.generation.test_standalone import CONFIG, draw, engine_process

pytestmark = pytest.mark.real

WHAT_FOR = "run r trains"
MEBIBYTE = 2**20


@pytest.fixture(scope="module")
def engine() -> Iterator[ProcessEngine]:
    with engine_process() as url:
        yield ProcessEngine(url)


def put_to_sleep(
    engine: ProcessEngine, model: str, config: GenerationConfig = CONFIG, version: int = 1
) -> ReplicaReport:
    [replica] = engine.ensure(config, model, model, version, RefitOptions(asleep=WHAT_FOR))
    return replica


def test_awake_again_it_holds_the_same_weights_and_draws_the_same_tokens(
    engine: ProcessEngine, policies: dict[str, Path]
) -> None:
    model = str(policies["first"])
    [before] = engine.ensure(CONFIG, model, model, 1)
    drawn = draw(engine)
    asleep = put_to_sleep(engine, model)
    assert (asleep.ready, asleep.asleep, asleep.pid) == (False, WHAT_FOR, before.pid)
    assert put_to_sleep(engine, model).asleep == WHAT_FOR, "twice is once"
    [after] = engine.ensure(CONFIG, model, model, 1)
    assert (after.ready, after.asleep, after.policy_version, after.pid) == (True, None, 1, before.pid)
    assert (after.digest, after.probe) == (before.digest, before.probe)
    assert draw(engine) == drawn


def test_a_refit_wakes_it_with_the_new_weights(engine: ProcessEngine, policies: dict[str, Path]) -> None:
    model, second = str(policies["first"]), str(policies["second"])
    engine.ensure(CONFIG, model, second, 2)
    drawn = draw(engine)
    engine.ensure(CONFIG, model, model, 1)
    put_to_sleep(engine, model)
    engine.ensure(CONFIG, model, second, 2)
    assert draw(engine) == drawn


def test_asleep_it_says_what_for_and_answers_nobody(engine: ProcessEngine, policies: dict[str, Path]) -> None:
    model = str(policies["first"])
    put_to_sleep(engine, model)
    body = {"model": "policy", "messages": tiny.TOOL_MESSAGES, "max_tokens": 4}
    reply = httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=60)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "policy_unavailable")
    assert WHAT_FOR in reply.json()["error"]["message"]
    assert httpx.get(f"{engine.url}/health", timeout=60).status_code == 503
    with pytest.raises(DeploymentFailed, match="does not exist"):
        engine.ensure(CONFIG, model, f"{model}/nowhere", 2)
    [awake] = engine.ensure(CONFIG, model, model, 1)
    assert awake.ready, "weights that could not be had did not break it"


def test_its_memory_is_given_back(tmp_path: Path) -> None:
    """By the size of the weights, as the kernel counts it; and taken again."""
    model = wide_model(tmp_path / "wide")
    size = (model / "model.safetensors").stat().st_size
    assert size > 45 * MEBIBYTE
    with engine_process(OMP_NUM_THREADS="1") as url:
        engine = ProcessEngine(url)
        [replica] = engine.ensure(CONFIG, str(model), str(model), 1)
        awake = own_memory(replica.pid)
        put_to_sleep(engine, str(model))
        asleep = own_memory(replica.pid)
        engine.ensure(CONFIG, str(model), str(model), 1)
        again = own_memory(replica.pid)
    assert awake - asleep > 0.9 * size
    assert again - asleep > 0.9 * size


def own_memory(pid: int) -> int:
    """Bytes that this process alone holds: no mapped file, no library."""
    return psutil.Process(pid).memory_full_info().uss


def wide_model(path: Path) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tiny.make_model(path, seed=1)
    config = Qwen3Config.from_pretrained(path)
    config.hidden_size, config.intermediate_size = 512, 4096
    torch.manual_seed(1)
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


class Sleeper(FaultyEngine):
    """Engine that counts its sleeps and fails in one on request."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.sleepless: Exception | None = None

    async def sleep(self) -> None:
        if self.sleepless is not None:
            raise self.sleepless
        self.said.append("sleep")

    async def wake(self) -> None:
        self.said.append("wake")

    async def load_weights(self, directory: str, *given: Any) -> None:
        self.said.append("load")


def asleep(request: int, weights: Path) -> DesiredPolicy:
    return DesiredPolicy(1, str(weights), request=request, asleep=WHAT_FOR)


async def test_it_sleeps_when_the_last_running_answer_is_drawn(policies: dict[str, Path]) -> None:
    engine = Sleeper()
    policy = ServedPolicy(engine, str(policies["first"]), "r1")
    await policy.apply(DesiredPolicy(1, str(policies["first"]), request=1))
    engine.slow.clear()
    answer = asyncio.create_task(policy.answer([1], Draw(max_tokens=1)))
    await asyncio.sleep(0)
    going = asyncio.create_task(policy.apply(asleep(2, policies["first"])))
    while policy._gate._open.is_set():  # noqa: ASYNC110 (a look inside, without a hook for it)
        await asyncio.sleep(0.01)
    assert engine.said == ["load"]
    engine.slow.set()
    await going
    assert isinstance(await answer, Generated)
    assert engine.said == ["load", "sleep"]
    with pytest.raises(PolicyUnavailable, match=WHAT_FOR):
        await policy.answer([1], Draw(max_tokens=1))
    await policy.apply(DesiredPolicy(1, str(policies["first"]), request=3))
    assert engine.said == ["load", "sleep", "wake", "load"]
    await policy.answer([1], Draw(max_tokens=1))


async def test_a_replica_that_starts_while_the_others_sleep_sleeps_without_weights(policies: dict[str, Path]) -> None:
    """After a crash the deployment still has the desired state, and the new process adopts it."""
    engine = Sleeper()
    policy = ServedPolicy(engine, str(policies["first"]), "r2")
    await policy.apply(asleep(7, policies["first"]))
    assert (engine.said, policy.status()["asleep"]) == (["sleep"], WHAT_FOR)
    await policy.apply(DesiredPolicy(2, str(policies["second"]), request=8))
    assert (engine.said, policy.status()["ready"]) == (["sleep", "wake", "load"], True)


async def test_one_that_cannot_sleep_is_unhealthy_and_not_half_asleep(policies: dict[str, Path]) -> None:
    engine = Sleeper()
    policy = ServedPolicy(engine, str(policies["first"]), "r1")
    await policy.apply(DesiredPolicy(1, str(policies["first"]), request=1))
    engine.sleepless = RuntimeError("no allocator")
    await policy.apply(asleep(2, policies["first"]))
    status = policy.status()
    assert (status["asleep"], status["ready"], status["failed_request"]) == (None, False, 2)
    assert "Going to sleep failed: RuntimeError: no allocator" in status["error"]
