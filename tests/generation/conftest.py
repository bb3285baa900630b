"""One deployment of real vLLM on CPU under real Ray Serve, shared by the tests of this directory and ended after them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roundhouse.config.models import GenerationConfig
from roundhouse.generation import deployment
from roundhouse.generation.deployment import ServeEndpoint
from roundhouse.weight_sync.replica_state import ReplicaReport
from tests.generation import tiny
from tests.generation.cluster import ray_head


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories by name: two random ones with tied embeddings, one untied, one trained to call the tool."""
    root = tmp_path_factory.mktemp("policies")
    first = tiny.make_model(root / "first", seed=1)
    # Recommended sampling, as published models name it: no engine may sample by it
    file = first / "generation_config.json"
    sampling = {"do_sample": True, "temperature": 0.1, "top_k": 1, "top_p": 0.1, "repetition_penalty": 5.0}
    file.write_text(json.dumps(json.loads(file.read_text()) | sampling))
    return {
        "first": first,
        "second": tiny.make_model(root / "second", seed=2),
        "untied": tiny.make_model(root / "untied", seed=3, tie=False),
        "untied-second": tiny.make_model(root / "untied-second", seed=4, tie=False),
        "caller": tiny.teach_tool_call(root / "caller", seed=5),
    }


@pytest.fixture(scope="package")
def ray() -> Iterator[ServeEndpoint]:
    with ray_head() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def config() -> GenerationConfig:
    return GenerationConfig(
        replicas=2, kv_cache_gib=0.125, max_model_len=512, request_timeout_seconds=30, refit_timeout_seconds=60
    )


@pytest.fixture(scope="session")
def bare(policies: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory without any weights, from which the shared deployment starts."""
    directory = tmp_path_factory.mktemp("bare")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((policies["first"] / name).read_bytes())
    return str(directory)


@pytest.fixture(scope="package")
def deployed(ray: ServeEndpoint, config: GenerationConfig, policies: dict[str, Path], bare: str) -> ServeEndpoint:
    """Two replicas of vLLM, started without weights, then refitted to version 1."""
    started = deployment.ensure_deployed(config, bare, ray)
    assert len(started) == 2
    assert not any(replica.ready for replica in started)
    deployment.RayServeEngine(ray).ensure(config, bare, str(policies["first"]), 1)
    return ray


@pytest.fixture
def refit(
    deployed: ServeEndpoint, config: GenerationConfig, policies: dict[str, Path], bare: str
) -> Callable[[str, int], list]:
    """Bring the shared deployment to a policy by name."""

    def to(name: str, version: int) -> list[ReplicaReport]:
        return deployment.RayServeEngine(deployed).ensure(config, bare, str(policies[name]), version)

    return to
