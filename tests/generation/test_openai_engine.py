"""A foreign server as the engine of a run: vLLM's own, a small equivalent one, and one that returns too little."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from transformers import AutoModelForCausalLM

from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError, RoundhouseError
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.openai_engine import OpenAIEngine
from roundhouse.generation.protocol import Draw, EnginePoisoned, EngineUnreachable, WeightsRefused
from roundhouse.generation.vllm_engine import WORKER_EXTENSION, environment
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.collect import collect_iteration
from roundhouse.stages.evaluate import evaluate_version
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.preflight import refuse_unready
from roundhouse.stages.refit import engine_at, engine_service, refit_iteration
from roundhouse.stages.train import train_iteration
from roundhouse.stages.trainer_home import release_trainers
from roundhouse.stages.validate import validate_iteration, vocabulary_size
from roundhouse.store.directories import checkpoint_cache
from roundhouse.store.run import open_run
from roundhouse.store.stage import model_location, read_manifest, read_table
from tests.generation.completions_server import completions_server
from tests.gym.playground import serving
from tests.ports import free_port

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
KEY = "a-key-of-the-servers"
POLICY = {"kind": "warm_start", "steps": 20, "hidden_size": 32, "intermediate_size": 64, "layers": 1}


def settings(directory: Path, url: str, **endpoint: Any) -> dict[str, Any]:
    return {
        "run_id": "elsewhere",
        "iterations": 2,
        "store": str(directory / "store"),
        "policy": POLICY,
        "environment": {"kind": "sort"},
        "generation": {
            "backend": "openai",
            "endpoint": {"url": url, "model": "served", "api_key_variable": "SERVER_KEY"} | endpoint,
            "max_new_tokens": 8,
            "max_model_len": 256,
            "request_timeout_seconds": 120,
        },
        "rollout": {"prompts_per_iteration": 2, "group_size": 4},
        "train": {
            "minibatches": 1,
            "threads": 1,
            "device": "cpu",
            "algorithm": {"kind": "cross_entropy", "include_truncated": True},
        },
        "evaluation": {"tasks": 2},
        "infra": {"state": str(directory / "state")},
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The starting policy of `settings`."""
    directory = tmp_path_factory.mktemp("policy")
    run = open_run(parse_config(settings(directory, "http://127.0.0.1:1")))
    starting_policy(run)
    return model_location(run.checkpoint(0).location).local_path


@pytest.fixture(scope="module")
def vllm_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of vLLM's own server, with a key and its routes for new weights."""
    port = free_port()
    arguments = ["--model", str(model), "--served-model-name", "served", "--port", str(port), "--host", "127.0.0.1"]
    refits = ["--worker-extension-cls", WORKER_EXTENSION]
    small = [
        *refits,
        "--dtype",
        "float32",
        "--max-model-len",
        "512",
        "--enforce-eager",
        "--max-num-batched-tokens",
        "4096",
    ]
    log = tmp_path_factory.mktemp("server") / "log"
    config = parse_config(settings(tmp_path_factory.mktemp("unused"), "http://127.0.0.1:1")).generation
    variables = environment(config) | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": KEY}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments, *small],
            env=os.environ | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def small_server(model: Path) -> Iterator[str]:
    with completions_server(model, "served", KEY) as url:
        yield url


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.long)])
def server(request: pytest.FixtureRequest) -> str:
    """URL of a server that wants a key and takes new weights."""
    found: str = request.getfixturevalue("vllm_server" if request.param == "vllm" else "small_server")
    return found


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)


def engine_of(model: Path, config: RunConfig) -> OpenAIEngine:
    return OpenAIEngine(config.generation, ChatCodec(str(model), config.generation.max_model_len))


def test_a_run_evaluates_collects_and_trains_with_a_server_that_takes_its_weights(server: str, tmp_path: Path) -> None:
    """Two iterations: the trainer's log-probabilities equal the server's for each version, so it held each version's
    weights."""
    run = open_run(parse_config(settings(tmp_path, server, weight_update="vllm")))
    refuse_unready(run.config)
    checkpoint = starting_policy(run)
    cache = checkpoint_cache(run.config)
    vocabulary = vocabulary_size(run)
    for k in (1, 2):
        weights = refit_iteration(run, k, checkpoint)
        rollouts = collect_iteration(run, k, weights, engine_at(run, k - 1))
        sequences = validate_iteration(run, k, rollouts, vocabulary)
        update = train_iteration(run, k, sequences, checkpoint, cache)
        metrics = read_manifest(update).metrics
        assert metrics["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
        turns = read_table(rollouts, "turns")
        assert set(turns["policy_version"].to_pylist()) == {k - 1}
        assert rollouts.counts["completed"] + rollouts.counts["truncated"] == 8
        checkpoint = publish(run, update)
    refit_iteration(run, 3, checkpoint)
    evaluated = evaluate_version(run, 2, engine_service(run).url)
    assert evaluated.counts["requested"] == 2
    release_trainers()


def noisy(model: Path, seed: int, directory: Path) -> Path:
    """The model with other weights, all of them."""
    torch.manual_seed(seed)
    changed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    changed.save_pretrained(directory)
    return directory


@pytest.mark.long
async def test_after_a_refit_the_server_computes_with_the_new_weights_the_tied_head_included(
    vllm_server: str, model: Path, tmp_path: Path
) -> None:
    engine, ids = (
        engine_of(model, parse_config(settings(tmp_path, vllm_server, weight_update="vllm"))),
        list(range(3, 35)),
    )
    assert json.loads((model / "config.json").read_text())["tie_word_embeddings"]
    for version, directory in enumerate((noisy(model, 1, tmp_path / "a"), noisy(model, 2, tmp_path / "b"), model)):
        await engine.load_weights(str(directory), version)
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(torch.tensor([ids])).logits[0]
        expected = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].tolist()
        assert await engine.score(ids) == pytest.approx(expected, abs=1e-4)


async def test_a_server_that_keeps_its_weights_answers_for_version_0_alone(
    server: str, model: Path, tmp_path: Path
) -> None:
    config = parse_config(settings(tmp_path, server))
    engine = engine_of(model, config)
    await engine.start()
    await engine.load_weights(str(model))
    with pytest.raises(WeightsRefused, match=r"version 1 because generation\.endpoint\.weight_update is unset"):
        await engine.load_weights(str(model), 1)
    with pytest.raises(ConfigError, match=r"weight_update is unset, so .* --version 0"):
        refuse_unready(config)
    refuse_unready(config, trains=False)


async def test_a_directory_that_the_server_cannot_read_leaves_it_in_doubt_and_names_what_it_needs(
    server: str, model: Path, tmp_path: Path
) -> None:
    engine = engine_of(model, parse_config(settings(tmp_path, server, weight_update="vllm")))
    with pytest.raises(EnginePoisoned, match=r"VLLM_SERVER_DEV_MODE=1, --worker-extension-cls .* the same path"):
        await engine.load_weights(str(tmp_path / "nowhere"), 1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "other"}, r"endpoint\.model is 'other', but .* serves served"),
        ({"api_key_variable": None}, "answered 401"),
        ({"url": "http://127.0.0.1:1"}, "does not answer"),
    ],
    ids=["model", "key", "url"],
)
async def test_what_cannot_be_served_is_named_at_the_start(
    server: str, model: Path, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    engine = engine_of(model, parse_config(settings(tmp_path, **{"url": server} | keys)))
    with pytest.raises(RoundhouseError, match=message):
        await engine.start()


@pytest.mark.parametrize(
    ("keys", "message"),
    [({"api_key_variable": None}, "answered 401"), ({"url": "http://127.0.0.1:1"}, "does not answer")],
    ids=["key", "url"],
)
def test_a_run_does_not_begin_before_the_server_answers(
    server: str, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    tree = settings(tmp_path, **{"url": server, "weight_update": "vllm"} | keys)
    with pytest.raises(ConfigError, match=f"endpoint.url is .*/v1/models {message}"):
        refuse_unready(parse_config(tree))
    refuse_unready(parse_config(tree), remote=False)


async def test_more_context_than_the_server_has_is_refused(server: str, model: Path, tmp_path: Path) -> None:
    tree = settings(tmp_path, server)
    tree["generation"]["max_model_len"] = 1024
    with pytest.raises(ConfigError, match=r"max_model_len is 1024, but .* with 512 tokens"):
        await engine_of(model, parse_config(tree)).start()


async def test_a_server_without_token_ids_is_refused(model: Path, tmp_path: Path) -> None:
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": "served"}]}

    @app.post("/v1/completions")
    def completions(body: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [{"text": "four", "finish_reason": "stop"}]}

    with serving(app) as url:
        engine = engine_of(model, parse_config(settings(tmp_path, url)))
        with pytest.raises(ConfigError, match=r"0 token IDs with 0 log-probabilities.*return_token_ids"):
            await engine.start()


async def test_a_server_that_is_gone_is_an_infrastructure_failure(model: Path, tmp_path: Path) -> None:
    engine = engine_of(model, parse_config(settings(tmp_path, f"http://127.0.0.1:{free_port()}")))
    with pytest.raises(EngineUnreachable, match=r"generation\.endpoint\.url"):
        await engine.generate([0, 1], Draw(max_tokens=1))


@pytest.mark.parametrize(
    ("generation", "more", "message"),
    [
        ({"endpoint": None}, {}, "backend is openai, but endpoint is not given"),
        ({"backend": "vllm"}, {}, "backend is vllm, but endpoint is given"),
        ({"engine_args": {"max_num_seqs": 4}}, {}, "engine_args.max_num_seqs: the server has its own"),
        ({"engine_url": "http://127.0.0.1:9"}, {}, r"generation\.engine_url is http"),
        ({"replicas": 2}, {}, r"generation\.replicas is 2"),
        (
            {"temperature": 0.7},
            {},
            r"sampling\.temperature is 0\.7\. Set it to 1: .* log-probabilities of the model itself",
        ),
        ({"weight_sync": "trainer"}, {}, r"weight_sync is trainer\. Set it to store"),
        ({"inflight_requests": "continue"}, {}, r"inflight_requests is continue\. Set it"),
        ({}, {"placement": {"colocation": "node"}}, r"placement\.colocation is node"),
    ],
    ids=[
        "none",
        "backend",
        "arguments",
        "engine_url",
        "replicas",
        "temperature",
        "weight_sync",
        "inflight",
        "placement",
    ],
)
def test_what_a_server_of_others_cannot_do_is_refused_at_load(
    tmp_path: Path, generation: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    tree = settings(tmp_path, "http://127.0.0.1:1") | more
    tree["generation"] |= generation
    with pytest.raises(ConfigError, match=message):
        parse_config(tree)
