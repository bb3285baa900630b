"""The smoke test of real vLLM on CPU under real Ray Serve: one replica, one refit."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from roundhouse.config.models import GenerationConfig
from roundhouse.generation import deployment
from tests.generation import tiny
from tests.generation.cluster import ray_head


@pytest.mark.real
@pytest.mark.smoke("vLLM on Ray Serve")
def test_vllm_under_ray_serve_answers_with_the_weights_of_its_refit(policies: dict[str, Path], bare: str) -> None:
    config = GenerationConfig(replicas=1, kv_cache_gib=0.125, max_model_len=512)
    with ray_head() as serve:
        (replica,) = deployment.ensure_deployed(config, bare, serve)
        assert not replica.ready
        assert os.getpriority(os.PRIO_PROCESS, replica.pid) == os.getpriority(os.PRIO_PROCESS, 0)
        deployment.RayServeEngine(serve).ensure(config, bare, str(policies["second"]), 1)
        body = {"model": "policy", "messages": tiny.TOOL_MESSAGES, "max_tokens": 12, "temperature": 1.0, "seed": 7}
        reply = httpx.post(f"{serve.http_url}/v1/chat/completions", json=body, timeout=60)
    assert reply.headers["x-policy-version"] == "1"
    message = reply.json()["choices"][0]["message"]
    prompt, generated = message["prompt_token_ids"], message["generation_token_ids"]
    expected = tiny.reference_logprobs(policies["second"], prompt, generated, 1.0)
    assert message["generation_log_probs"] == pytest.approx(expected, abs=1e-4)
