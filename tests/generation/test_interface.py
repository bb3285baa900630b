"""The batch interface and its backends."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import flask
import httpx
import pytest
import torch
from transformers import AutoTokenizer

from roundhouse.config.models import GenerationConfig, Sampling
from roundhouse.errors import ConfigError
from roundhouse.generation import deployment, vllm_worker
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.interface import (
    GenerationInterface,
    ListGeneration,
    VllmGeneration,
    configure_generation_config,
    create_backend,
)
from roundhouse.generation.protocol import Generated
from roundhouse.generation.serve_app import APPLICATION
from roundhouse.generation.transformers_engine import build_model
from roundhouse.generation.vllm_engine import engine_arguments
from roundhouse.generation.weights_probe import StaleWeights
from tests.generation import tiny

pytestmark = pytest.mark.real

OBJECT_OF_FLASK = flask.request
"""An engine is started in a process whose modules hold such a thing, which refuses to be looked at."""
CONFIG = GenerationConfig(kv_cache_gib=0.125, max_model_len=256, sampling=Sampling(max_new_tokens=10))
PROMPTS = [[1, 40, 50, 60], list(range(30, 180)), [7]]


@pytest.fixture(scope="module")
def tokenized(policies: dict[str, Path]):
    return configure_generation_config(CONFIG, AutoTokenizer.from_pretrained(policies["first"]))


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def backend(request, tokenized, policies) -> Iterator[GenerationInterface]:
    made = create_backend(tokenized, str(policies["untied"]), request.param)
    made.prepare_for_generation()
    made.prepare_for_generation()
    yield made
    gc.freeze()  # vLLM undoes that of tests/conftest.py as it ends


def batch(seeds=(1, 2, 3)) -> dict:
    longest = max(map(len, PROMPTS))
    ids, mask = torch.zeros(len(PROMPTS), longest, dtype=torch.long), torch.zeros(len(PROMPTS), longest)
    for row, prompt in enumerate(PROMPTS):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = torch.tensor(prompt), 1
    return {"input_ids": ids, "attention_mask": mask, "seeds": list(seeds)}


def assert_true_of(policy_dir: Path, output) -> None:
    for row, prompt in enumerate(PROMPTS):
        length, total = int(output["generation_lengths"][row]), int(output["unpadded_sequence_lengths"][row])
        assert total == len(prompt) + length
        ids = output["output_ids"][row].tolist()
        assert ids[: len(prompt)] == prompt
        expected = tiny.reference_logprobs(policy_dir, prompt, ids[len(prompt) : total])
        assert output["logprobs"][row, len(prompt) : total].tolist() == pytest.approx(expected, abs=1e-4)
        assert not output["logprobs"][row, : len(prompt)].any()
        assert not output["logprobs"][row, total:].any()


def test_rows_come_back_whole_with_true_log_probabilities(backend, policies):
    """Untied embeddings, so the head is a separate tensor."""
    assert_true_of(policies["untied"], backend.generate(batch(), greedy=False))


def test_a_rows_tokens_depend_on_its_seed_alone(backend):
    first = backend.generate(batch((5, 6, 7)), greedy=False)["output_ids"]
    other = backend.generate(batch((9, 6, 8)), greedy=False)["output_ids"]
    assert torch.equal(first[1], other[1])
    assert not torch.equal(first[0], other[0])


def test_new_weights_are_in_after_loading(backend, policies):
    backend.load_weights(str(policies["untied-second"]))
    assert_true_of(policies["untied-second"], backend.generate(batch(), greedy=False))
    backend.load_weights(str(policies["untied"]))
    assert_true_of(policies["untied"], backend.generate(batch(), greedy=False))


def test_weights_that_did_not_get_in_are_noticed(backend, policies, monkeypatch):
    """Planted: vLLM is handed the old tensors under the new name, as its own reload does with a tied head."""
    if not isinstance(backend, VllmGeneration):
        pytest.skip("transformers copies tensor by tensor; there is nothing to go stale")
    iterate = vllm_worker.iterate
    monkeypatch.setattr(vllm_worker, "iterate", lambda _: iterate(policies["untied"]))
    with pytest.raises(StaleWeights):
        backend.load_weights(str(policies["untied-second"]))
    monkeypatch.undo()
    backend.load_weights(str(policies["untied"]))


def held_tensors(worker) -> list[weakref.ref]:
    """A worker's weights, then its keys and values."""
    runner = worker.model_runner
    return [weakref.ref(tensor) for tensor in (*runner.model.parameters(), *runner.kv_caches)]


def test_a_finished_backend_gives_its_memory_back_and_prepared_again_it_has_the_weights_that_were_loaded(
    backend, policies
):
    """The allocator decides how much memory returns to the system after that."""
    backend.load_weights(str(policies["untied-second"]))
    before = backend.generate(batch(), greedy=True)["output_ids"]
    held = []
    if isinstance(backend, VllmGeneration):  # the other holds one reference to its model, and drops that
        [held] = backend._llm.collective_rpc(held_tensors)
        assert sum(tensor().nbytes for tensor in held) > 0.98 * CONFIG.kv_cache_gib * 2**30
    backend.finish_generation()
    left = [tensor().shape for tensor in held if tensor() is not None]
    backend.finish_generation()
    backend.prepare_for_generation()
    assert not left
    assert torch.equal(before, backend.generate(batch(), greedy=True)["output_ids"])
    assert_true_of(policies["untied-second"], backend.generate(batch(), greedy=False))
    backend.load_weights(str(policies["untied"]))


def test_on_a_gpu_a_finished_engine_sleeps_without_a_copy_and_wakes_with_its_weights(tokenized, policies, monkeypatch):
    """Tests the calls to an engine on a GPU; no GPU is used here."""
    llm = mock.MagicMock()
    monkeypatch.setattr(VllmGeneration, "_started", lambda self: llm)
    config = CONFIG.model_copy(update={"gpus_per_replica": 1})
    made = create_backend(replace(tokenized, config=config), str(policies["untied"]), "vllm")
    made.load_weights(str(policies["untied-second"]))
    loads = llm.collective_rpc.call_count
    made.finish_generation()
    made.finish_generation()
    llm.sleep.assert_called_once_with(level=2)
    made.prepare_for_generation()
    made.prepare_for_generation()
    llm.wake_up.assert_called_once_with()
    assert llm.collective_rpc.call_args_list[loads:] == llm.collective_rpc.call_args_list[:loads]


def test_an_unknown_backend_is_refused_with_the_known_ones(tokenized, policies):
    with pytest.raises(ConfigError, match="Available: vllm, transformers"):
        create_backend(tokenized, str(policies["first"]), "sglang")


def test_rows_that_a_limit_ended_are_truncated_and_stops_are_those_of_a_run(backend, tokenized, policies):
    output = backend.generate(batch(), greedy=False)
    assert output["truncated"].dtype == torch.bool
    for row, cut in enumerate(output["truncated"].tolist()):
        last = int(output["output_ids"][row, int(output["unpadded_sequence_lengths"][row]) - 1])
        assert cut is (last not in tokenized.stop_token_ids)
    assert tokenized.stop_token_ids == ChatCodec(str(policies["first"]), 256).stop_token_ids


def test_a_prompt_that_fills_the_context_is_refused(policies):
    config = CONFIG.model_copy(update={"max_model_len": 4})
    made = create_backend(
        configure_generation_config(config, AutoTokenizer.from_pretrained(policies["first"])),
        str(policies["first"]),
        "transformers",
    )
    with pytest.raises(ValueError, match=r"generation\.max_model_len is 4"):
        made.generate(batch(), greedy=False)


def test_a_gpu_is_a_matter_of_configuration():
    config = GenerationConfig(gpus_per_replica=1, dtype="bfloat16", engine_args={"tensor_parallel_size": 2})
    arguments = engine_arguments(config, "/m")
    assert arguments["dtype"] == "bfloat16"
    assert arguments["gpu_memory_utilization"] == 0.85
    assert arguments["tensor_parallel_size"] == 2
    assert "enforce_eager" not in arguments
    assert "kv_cache_memory_bytes" not in arguments


@pytest.mark.parametrize(
    ("keys", "argument", "expected"),
    [
        ({"kv_cache_gib": 0.25}, "kv_cache_memory_bytes", 2**28),
        ({"gpus_per_replica": 1, "gpu_memory_utilization": 0.4}, "gpu_memory_utilization", 0.4),
    ],
    ids=["kv_cache_gib", "gpu_memory_utilization"],
)
def test_a_key_becomes_an_argument_of_vllm(keys, argument, expected):
    assert engine_arguments(GenerationConfig(**keys), "/m")[argument] == expected


def test_the_configured_sampling_is_what_a_backend_is_asked_for(tokenized):
    asked = []

    class Recording(ListGeneration):
        prepare_for_generation = finish_generation = load_weights = None

        def answer(self, prompts, draws):
            asked.extend(draws)
            return [Generated([1], [-0.5], "stop") for _ in prompts]

    sampling = Sampling(temperature=0.5, top_p=0.75, top_k=7, max_new_tokens=9)
    Recording(replace(tokenized, config=GenerationConfig(sampling=sampling)), "/m").generate(batch(), greedy=False)
    assert {(draw.temperature, draw.top_p, draw.top_k, draw.max_tokens) for draw in asked} == {(0.5, 0.75, 7, 9)}


def test_a_model_computes_with_the_threads_that_it_is_given(policies, monkeypatch):
    given = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    build_model(str(policies["first"]), GenerationConfig(threads=7))
    assert given == [7]


def test_serve_has_as_long_to_start_as_the_configuration_says(policies, monkeypatch):
    serve = mock.MagicMock()
    monkeypatch.setattr(deployment, "_Serve", serve)
    client = serve.return_value.__enter__.return_value
    application = {"deployments": [{"user_config": {"policy_version": 0}}]}
    client.applications.return_value = {APPLICATION: application}
    config, endpoint = GenerationConfig(start_timeout_seconds=77), mock.Mock(http_url="http://there:1")
    deployment.ensure_deployed(config, str(policies["first"]), endpoint, weights="/weights")
    assert client.put_applications.call_args.args[1] == client.wait.call_args.args[1] == 77


def test_an_engine_has_as_long_to_refit_as_the_configuration_says(policies, monkeypatch):
    reply = httpx.Response(200, json={"replicas": []})
    post = mock.AsyncMock(return_value=reply)
    monkeypatch.setattr(deployment.ProcessEngine, "_post_while_alive", post)
    monkeypatch.setattr(deployment.ProcessEngine, "replicas", lambda engine: [])
    config = GenerationConfig(start_timeout_seconds=100, refit_timeout_seconds=77)
    deployment.ProcessEngine("http://127.0.0.1:1").ensure(config, str(policies["first"]), "/weights", 1)
    assert post.call_args.args[2] == 177
