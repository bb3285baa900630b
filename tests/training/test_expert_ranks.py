"""Ranks that have different experts of each layer train what one process trains; real ones, started by torchrun, over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from roundhouse.training.parallel import Ranks
from tests.training.ranks import train
from tests.training.test_ranks import PPO, RANKS, distance, make_case, start_ranks
from tests.training.tiny import make_model

pytestmark = pytest.mark.long

TWO, FOUR = (RANKS | {"processes": count, "expert_parallel": 2} for count in (2, 4))
MIXTRAL = "one of Mixtral's experts to a rank, reduced in each microbatch, recomputed activations"
CASES: dict[str, dict[str, Any]] = {
    "two": {"service": TWO},
    "two of four": {"service": FOUR},
    "two of four, two experts in use": {"service": FOUR},
    "two of four, critic, padded": {"service": FOUR, "algorithm": PPO, "packing": False},
    "two of four and context, adapter": {
        "service": FOUR | {"context_parallel": 2},
        "lora": {"rank": 2, "target_modules": ["q_proj", "v_proj"]},
    },
    MIXTRAL: {
        "service": FOUR | {"expert_parallel": 4},
        "reduce_gradients": "microbatch",
        "activation_checkpointing": True,
    },
}
for _settings in CASES.values():
    _settings |= {"tokens_per_microbatch": 50, "minibatches": 2}
MODELS: dict[str, dict[str, Any]] = {
    "two of four, two experts in use": {"experts": 8, "num_experts_per_tok": 1, "idle": True},
    MIXTRAL: {"mixtral": True, "experts": 4},
}
"""Of the others, six experts of Qwen3."""
RESUMED = {"two, from one": TWO, "two of four, from one": FOUR}
"""They continue what one process trained of the case `two`."""
FIRST, SECOND = {"batches": [(4, 5, 0)]}, {"batches": [(4, 5, 1)], "first": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shared = make_model(tmp_path_factory.mktemp("model"), experts=6)
    made = {name: make_model(tmp_path_factory.mktemp("model"), **shape) for name, shape in MODELS.items()}
    return {name: made.get(name, shared) for name in CASES}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> tuple[Path, Any]:
    """Every case by one process."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("alone")
    found = {
        name: train(make_case(name, models[name], out, settings), out, Ranks()) for name, settings in CASES.items()
    }
    train(make_case("first", models["two"], out, CASES["two"], **FIRST), out, Ranks())
    return out, found


@pytest.fixture(scope="module")
def together(
    tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path], alone: tuple[Path, Any]
) -> tuple[Path, Any]:
    """Every case by its ranks, and some that continue from a checkpoint."""
    out = tmp_path_factory.mktemp("together")
    cases = [make_case(name, models[name], out, settings) for name, settings in CASES.items()]
    source = alone[0] / "first"
    for name, service in RESUMED.items():
        settings = CASES["two"] | {"service": service}
        cases.append(make_case(name, source, out, settings, state=str(source / "trainer"), **SECOND))
    half, settings = out / "half", CASES["two of four"]
    cases.append(make_case("half", models["two of four"], out, settings, **FIRST))
    cases.append(make_case("rest", half, out, settings, state=str(half / "trainer"), **SECOND))
    found: dict[str, Any] = {}
    for count in (2, 4):
        found |= start_ranks(out, count, [case for case in cases if case["config"]["service"]["processes"] == count])
    return out, found


@pytest.mark.parametrize("name", CASES)
def test_they_reach_what_one_process_does(name: str, alone: tuple[Path, Any], together: tuple[Path, Any]) -> None:
    """Weights, moments, log-probabilities and metrics."""
    ours, theirs = (where[0] / name for where in (together, alone))
    found, expected = together[1], alone[1]
    files = {"model.safetensors": 1e-6, "trainer/optimizer.safetensors": 1e-5}
    if "critic" in name:
        files |= {f"trainer/critic/{file}": bound for file, bound in files.items()}
    for file, bound in files.items():
        assert distance(ours / file, theirs / file) < bound, file
    for file in ("config.json", "trainer/state.json"):
        assert (ours / file).read_text() == (theirs / file).read_text()
    log_probs = [
        np.array([value for row in where[name]["log_probs"][0] for value in row or ()], dtype=float)
        for where in (found, expected)
    ]
    assert np.isfinite(log_probs[1]).any()
    np.testing.assert_allclose(*log_probs, rtol=1e-5, atol=2e-6)
    for one, other in zip(found[name]["metrics"], expected[name]["metrics"], strict=True):
        assert other["num_microbatches"] >= 4, "two are accumulated"
        for metric in ("loss", "grad_norm", "num_updates"):
            assert one[metric] == pytest.approx(other[metric], rel=1e-5, abs=2e-6), metric


def test_experts_are_published_under_the_names_that_they_were_loaded_from(
    together: tuple[Path, Any], models: dict[str, Path]
) -> None:
    for name in ("two of four", MIXTRAL):
        found, source = (load_file(where / "model.safetensors") for where in (together[0] / name, models[name]))
        assert {key: tensor.shape for key, tensor in found.items()} == {key: w.shape for key, w in source.items()}
        assert sum(".experts.3." in key for key in found) == 2 * 3, "two layers, three matrices"


def test_a_checkpoint_continues_bit_for_bit_in_its_layout_and_to_rounding_in_another(
    alone: tuple[Path, Any], together: tuple[Path, Any], models: dict[str, Path]
) -> None:
    out = together[0]
    for file in ("model.safetensors", "trainer/optimizer.safetensors", "trainer/state.json"):
        assert (out / "rest" / file).read_bytes() == (out / "two of four" / file).read_bytes(), file
    for name in RESUMED:
        ours, theirs, begun = (where / "model.safetensors" for where in (out / name, alone[0] / "two", models["two"]))
        assert distance(ours, theirs, begun) < 1e-4
