"""The engine in a separate process: refitted in place, repeatable bit for bit, and closed without its token."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from roundhouse.config.generation import TOKEN_VARIABLE
from roundhouse.config.models import GenerationConfig, Sampling
from roundhouse.errors import DeploymentFailed
from roundhouse.generation import transformers_engine
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.generation.deployment import EngineGone, ProcessEngine, engine_arguments
from roundhouse.generation.standalone import StandaloneEngine
from tests import fork_server
from tests.generation import tiny
from tests.ports import free_port
from tests.waiting import until

pytestmark = pytest.mark.real

CONFIG = GenerationConfig(backend="transformers", max_model_len=512, engine_args={"max_num_seqs": 1})
MODULE = "roundhouse.generation.standalone"


@contextmanager
def engine_process(*, fresh: bool = False, **environment: str) -> Iterator[str]:
    """Yield the URL of an engine in a separate process: a new interpreter if `fresh`, else a fork."""
    port = free_port()
    start = subprocess.Popen if fresh else fork_server.start
    process = start([sys.executable, "-m", MODULE, "--port", str(port)], env=os.environ | environment)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: _answers(url), "an engine that answers", process=process)
        yield url
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/rh/replicas", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def engine() -> Iterator[ProcessEngine]:
    with engine_process(fresh=True) as url:
        yield ProcessEngine(url)


def draw(engine: ProcessEngine, calls: int = 4) -> list[tuple[int, list[int], list[float]]]:
    """Version, tokens and log-probabilities of several calls at once."""

    async def work() -> list[tuple[int, list[int], list[float]]]:
        async with HttpPolicyClient(engine.url, CONFIG) as policy:
            sampling = Sampling(max_new_tokens=6)
            completions = await asyncio.gather(
                *(policy.complete(tiny.TOOL_MESSAGES, [tiny.ADD_TOOL], sampling, seed=seed) for seed in range(calls))
            )
        return [(c.policy_version, c.generation_token_ids, c.generation_log_probs) for c in completions]

    return asyncio.run(work())


def test_it_answers_with_the_version_it_was_refitted_to_and_repeats_itself_bit_for_bit(
    engine: ProcessEngine, policies: dict[str, Path]
) -> None:
    engine.start(CONFIG, str(policies["first"]))
    (replica,) = engine.ensure(CONFIG, str(policies["first"]), str(policies["first"]), 1)
    assert (replica.ready, replica.policy_version) == (True, 1)
    first = draw(engine)
    engine.ensure(CONFIG, str(policies["first"]), str(policies["second"]), 2)
    second = draw(engine)
    engine.ensure(CONFIG, str(policies["first"]), str(policies["first"]), 1)
    assert draw(engine) == first
    assert {version for version, *_ in second} == {2}
    assert [tokens for _, tokens, _ in second] != [tokens for _, tokens, _ in first]
    assert engine.replicas()[0].pid == replica.pid


def test_weights_that_cannot_be_loaded_are_named_and_nothing_is_answered(
    engine: ProcessEngine, policies: dict[str, Path], tmp_path: Path
) -> None:
    engine.ensure(CONFIG, str(policies["first"]), str(policies["first"]), 1)
    with pytest.raises(DeploymentFailed, match="does not exist"):
        engine.ensure(CONFIG, str(policies["first"]), str(tmp_path / "nowhere"), 2)
    assert httpx.get(f"{engine.url}/health").status_code == 503


def test_an_engine_that_is_gone_is_an_infrastructure_failure(policies: dict[str, Path]) -> None:
    with engine_process() as url:
        pass
    assert ProcessEngine(url).replicas() == []
    with pytest.raises(EngineGone, match=r"generation\.engine_url"):
        ProcessEngine(url).ensure(CONFIG, str(policies["first"]), str(policies["first"]), 1)


def test_control_calls_need_the_token_and_answers_do_not(
    policies: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with engine_process(**{TOKEN_VARIABLE: "s3cret"}) as url:
        engine, model = ProcessEngine(url), str(policies["first"])
        with pytest.raises(DeploymentFailed, match="refuses the token"):
            engine.ensure(CONFIG, model, model, 1)
        monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
        engine.ensure(CONFIG, model, model, 1)
        assert draw(engine, calls=1)[0][0] == 1


def test_control_calls_go_through_no_proxy_of_the_environment(
    engine: ProcessEngine, policies: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    (replica,) = engine.ensure(CONFIG, str(policies["first"]), str(policies["first"]), 1)
    assert replica.ready


class OneGpu(transformers_engine.TransformersEngine):
    """Its GPU has room for one engine."""

    taken, broken = False, False
    model: Any = staticmethod(lambda: None)
    """Refers weakly to that of the newest engine."""

    async def start(self) -> None:
        if OneGpu.taken or OneGpu.model() is not None:
            raise RuntimeError("out of memory")
        OneGpu.taken = True
        await super().start()
        OneGpu.model = weakref.ref(self._model)
        if OneGpu.broken:
            raise RuntimeError("cannot start")

    def shutdown(self) -> None:
        OneGpu.taken = False
        super().shutdown()


async def test_another_engine_starts_in_the_room_of_the_old_one_and_one_that_cannot_start_leaves_room(
    policies: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_engine, "TransformersEngine", OneGpu)
    model = str(policies["first"])
    transport = httpx.ASGITransport(StandaloneEngine())
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=60) as client:

        async def ask_for(max_model_len: int) -> int:
            generation = engine_arguments(CONFIG.model_copy(update={"max_model_len": max_model_len}))
            desired = {"policy_version": 1, "weights": model}
            body = {"generation": generation, "model_dir": model, "desired": desired}
            return (await client.post("/rh/desired", json=body)).status_code

        assert [await ask_for(length) for length in (512, 256)] == [200, 200]
        monkeypatch.setattr(OneGpu, "broken", True)
        assert await ask_for(128) == 500
        refused = await client.post("/v1/chat/completions", json={"messages": tiny.TOOL_MESSAGES})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "policy_unavailable")
        monkeypatch.setattr(OneGpu, "broken", False)
        assert await ask_for(128) == 200
        assert (await client.get("/health")).status_code == 200

        drawn, draw_row = list[int](), transformers_engine.draw_row

        def slow(*arguments: Any) -> tuple[int, float]:
            drawn.append(1)
            time.sleep(0.05)
            return draw_row(*arguments)

        monkeypatch.setattr(transformers_engine, "draw_row", slow)
        chat = {"messages": tiny.TOOL_MESSAGES, "max_tokens": 90}
        running = [asyncio.create_task(client.post("/v1/chat/completions", json=chat)) for _ in range(3)]
        while not drawn:  # noqa: ASYNC110 (a look into the engine, without a hook for it)
            await asyncio.sleep(0.001)
        assert await ask_for(256) == 200
        assert len(drawn) < 10
        refusals = await asyncio.wait_for(asyncio.gather(*running), 5)
        assert [(one.status_code, one.json()["error"]["code"]) for one in refusals] == [(503, "policy_unavailable")] * 3


def test_beyond_the_loopback_interface_it_does_not_start_without_a_token() -> None:
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    command = [sys.executable, "-m", MODULE, "--host", "0.0.0.0"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert TOKEN_VARIABLE in ended.stderr
