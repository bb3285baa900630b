"""A configuration file of NexRL and one of NeMo RL, trained as their users would: `roundhouse train FILE.yaml`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roundhouse.config.loading import load_config
from roundhouse.stages.preflight import refuse_unready
from tests.generation.tiny import make_model

TESTS = Path(__file__).parents[1]
FILES = {
    "quiz": (
        TESTS / "plugins/nexrl/recipe/quiz/nexrl.yaml",
        ("rollout.max_tokens=300", "generation.max_model_len=320"),
    ),
    "nemo-rl-small": (TESTS / "config/foreign/nemo_rl_small.yaml", ()),
}


def overrides(directory: Path, run_id: str) -> list[str]:
    """Return the settings that a user of another machine makes: model, engine, place."""
    if run_id == "nemo-rl-small":
        return ["generation.backend=trainer", *FILES[run_id][1]]
    policy = json.dumps({"kind": "pretrained", "path": str(directory / "model")})
    return [f"policy={policy}", f"store={directory / 'store'}", "generation.backend=trainer", *FILES[run_id][1]]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SMALL_MODEL", str(make_model(tmp_path / "model", seed=1)))
    monkeypatch.setenv("SMALL_STORE", str(tmp_path / "store"))
    return tmp_path


@pytest.mark.parametrize("run_id", FILES)
def test_the_file_is_ready_to_train(directory: Path, run_id: str) -> None:
    config = load_config(FILES[run_id][0], overrides(directory, run_id))
    assert (config.run_id, config.iterations, config.store) == (run_id, 2, str(directory / "store"))
    refuse_unready(config)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run_id", FILES)
def test_the_file_trains(directory: Path, run_id: str) -> None:
    program, state = Path(sys.executable).with_name("roundhouse"), f"infra.state={directory / 'state'}"
    settings = [*overrides(directory, run_id), state, "tracking.enabled=false", "rollout.timeout_seconds=300"]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    try:
        subprocess.run(
            [program, "train", str(FILES[run_id][0]), *arguments],
            check=True,
            timeout=800,
            cwd=directory,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        summary = json.loads((directory / f"store/runs/{run_id}/summary.json").read_text())
    finally:
        subprocess.run([program, "down", "--state", directory / "state"], check=False, timeout=120)
    assert summary["iterations"] == 2
    assert summary["ledger"]["requested"] == (16 if run_id == "nemo-rl-small" else 8)
    assert summary["mismatch"]["max_abs_log_prob_difference"] < 1e-3
