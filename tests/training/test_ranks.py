"""Two processes train what one process trains. The processes are real, started by torchrun, over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from roundhouse.launch.subprocesses import RANKS_MEET_BY_FILE, torchrun
from roundhouse.training.parallel import Ranks
from tests.training.ranks import train

ROOT = Path(__file__).parents[2]
OPTIMIZER = {"learning_rate": 1e-3, "warmup_steps": 0, "max_grad_norm": 0.05}
CASES: dict[str, dict[str, Any]] = {
    "packed": {"tokens_per_microbatch": 100, "minibatches": 2},
    "reduced in each microbatch": {
        "tokens_per_microbatch": 30,
        "minibatches": 2,
        "reduce_gradients": "microbatch",
    },
    "sequence means": {"tokens_per_microbatch": 30, "minibatches": 2, "algorithm": {"loss_aggregation": "sequence"}},
    "padded": {"tokens_per_microbatch": 100, "minibatches": 2, "packing": False},
    "one bin for two ranks": {"tokens_per_microbatch": 100_000, "minibatches": 1},
    "reference, entropy, chunks, recomputed activations": {
        "tokens_per_microbatch": 100,
        "minibatches": 2,
        "algorithm": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01},
        "logits_chunk_tokens": 7,
        "activation_checkpointing": True,
    },
    "one sequence for two ranks": {"tokens_per_microbatch": 100, "minibatches": 8},
    "adapter": {"tokens_per_microbatch": 100, "minibatches": 2, "lora": {"rank": 2}},
    "bfloat16": {"tokens_per_microbatch": 100, "minibatches": 2, "dtype": "bfloat16"},
}
BATCHES = {"one sequence for two ranks": [(1, 2, 0), (1, 2, 1)]}
SPEED = {"tokens_per_second"}


def _case(kind: str, model: Path, reference: Path, **changes: Any) -> dict[str, Any]:
    config = {"device": "cpu", "threads": 1, "optimizer": OPTIMIZER, **CASES[kind]}
    needs_reference = "kl_coefficient" in config.get("algorithm", {})
    return {
        "name": kind,
        "model": str(model),
        "state": None,
        "reference": str(reference) if needs_reference else None,
        "config": config,
        "batches": BATCHES.get(kind, [(4, 5, 0), (4, 5, 1)]),
        "first": 1,
        **changes,
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, reference_dir: Path) -> tuple[Path, Any]:
    """Every case by one process."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("alone")
    found = {name: train(_case(name, model_dir, reference_dir), out, Ranks()) for name in CASES}
    train(_case("packed", model_dir, reference_dir, name="first", batches=[(4, 5, 0)]), out, Ranks())
    return out, found


@pytest.fixture(scope="module")
def together(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, reference_dir: Path, alone: tuple[Path, Any]
) -> tuple[Path, Any]:
    """Every case by two, and one that goes on from the checkpoint of a single process."""
    out = tmp_path_factory.mktemp("together")
    first = alone[0] / "first"
    cases = [_case(name, model_dir, reference_dir) for name in CASES]
    second = {"name": "second", "state": str(first / "trainer"), "batches": [(4, 5, 1)], "first": 2}
    cases.append(_case("packed", first, reference_dir, **second))
    (out / "cases.json").write_text(json.dumps(cases))
    finished = subprocess.run(
        [sys.executable, *torchrun(2, out / "meeting"), str(ROOT / "tests/training/ranks.py"), str(out / "cases.json")],
        env=os.environ | RANKS_MEET_BY_FILE | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return out, json.loads((out / "found.json").read_text())


def _distance(found: Path, expected: Path, start: Path | None = None) -> float:
    """Relative distance of two safetensors files; of what moved since `start` when that is given."""
    ours, theirs = load_file(found), load_file(expected)
    assert ours.keys() == theirs.keys()
    base = load_file(start) if start else {name: torch.zeros(()) for name in theirs}
    difference = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in theirs)
    return (difference / sum(float((theirs[name] - base[name]).double().square().sum()) for name in theirs)) ** 0.5


@pytest.mark.parametrize("name", [name for name in CASES if name != "bfloat16"])
def test_two_ranks_reach_the_weights_and_the_optimizer_state_of_one(
    name: str, alone: tuple[Path, Any], together: tuple[Path, Any]
) -> None:
    for file in ("model.safetensors", "trainer/optimizer.safetensors"):
        assert _distance(together[0] / name / file, alone[0] / name / file) < 1e-6
    for file in ("config.json", "trainer/state.json", "tokenizer.json"):
        assert (together[0] / name / file).read_text() == (alone[0] / name / file).read_text()


@pytest.mark.parametrize("name", [name for name in CASES if name != "bfloat16"])
def test_two_ranks_report_the_metrics_of_one(name: str, alone: tuple[Path, Any], together: tuple[Path, Any]) -> None:
    for ours, theirs in zip(together[1][name]["metrics"], alone[1][name]["metrics"], strict=True):
        assert ours.keys() - theirs.keys() == {"idle_microbatches"}
        if name == "one sequence for two ranks":
            assert ours["idle_microbatches"] > 0
        if name == "one bin for two ranks":
            assert ours["idle_microbatches"] == 0
        counts = {"num_microbatches", "packing_efficiency"}  # bins are spread where ranks would wait
        for metric in theirs.keys() - SPEED - counts:
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-5, abs=2e-6), metric
        assert ours["num_microbatches"] >= theirs["num_microbatches"]


def test_each_rank_holds_its_part_of_the_parameters(together: tuple[Path, Any]) -> None:
    for found in together[1].values():
        assert found["local"] * 2 == found["whole"]


def test_gradients_are_added_up_once_an_update(together: tuple[Path, Any]) -> None:
    """By each of FSDP's groups of parameters; in each microbatch only where that is asked for."""
    once, each = (together[1][name] for name in ("sequence means", "reduced in each microbatch"))
    updates = sum(metrics["num_updates"] for metrics in once["metrics"])
    assert once["reductions"] == once["groups"] * updates
    assert sum(metrics["num_microbatches"] for metrics in once["metrics"]) >= 4 * updates, "both ranks accumulate"
    assert each["reductions"] >= 2 * once["reductions"]


def test_ranks_of_one_machine_listen_on_loopback_only(together: tuple[Path, Any]) -> None:
    listening = json.loads((together[0] / "listening.json").read_text())
    assert {*listening["rank"]} == {"127.0.0.1"}
    assert listening["torchrun"] == []


def test_a_checkpoint_goes_from_one_process_to_two_and_back_as_if_there_had_been_one(
    alone: tuple[Path, Any], together: tuple[Path, Any], model_dir: Path, reference_dir: Path, tmp_path: Path
) -> None:
    third = {"batches": [(4, 5, 2)], "first": 3, "name": "third"}
    for source in (alone[0] / "packed", together[0] / "second"):
        case = _case("packed", source, reference_dir, state=str(source / "trainer"), **third)
        train(case, tmp_path / source.parent.name, Ranks())
    ours, theirs = (tmp_path / source / "third" for source in (together[0].name, alone[0].name))
    assert _distance(ours / "model.safetensors", theirs / "model.safetensors") < 1e-6
    moved = _distance(ours / "model.safetensors", theirs / "model.safetensors", model_dir / "model.safetensors")
    assert moved < 1e-4
    assert (ours / "trainer/state.json").read_text() == (theirs / "trainer/state.json").read_text()


def test_bfloat16_ranks_keep_float32_weights_and_stay_near_one_process(
    alone: tuple[Path, Any], together: tuple[Path, Any], model_dir: Path
) -> None:
    found, expected = (where[0] / "bfloat16/model.safetensors" for where in (together, alone))
    assert all(tensor.dtype == torch.float32 for tensor in load_file(found).values())
    assert _distance(found, expected) < 5e-3
    ours, theirs = (where[1]["bfloat16"]["metrics"][0] for where in (together, alone))
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=0.02)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.05)
