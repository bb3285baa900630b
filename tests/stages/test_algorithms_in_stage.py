"""The train stage with algorithms that need a second model or keep state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError
from roundhouse.stages import trainer_home
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.train import train_iteration
from roundhouse.store.directories import local_directory
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, read_manifest
from tests.stages.test_train import sequences, weights_digest

pytestmark = pytest.mark.usefixtures("no_resident_trainer")


def make_run(store: Path, tmp_path: Path, algorithm: dict[str, Any]) -> Run:
    tree = {
        "run_id": "r",
        "store": str(store),
        "policy": {"kind": "warm_start", "steps": 3, "hidden_size": 32, "intermediate_size": 64, "layers": 1},
        "rollout": {"prompts_per_iteration": 2, "group_size": 4},
        "train": {"minibatches": 2, "algorithm": algorithm},
        "infra": {"kind": "local", "state": str(tmp_path / "state")},
        "validation": {"recompute_tolerance": None},  # the tokens are made up
    }
    return open_run(parse_config(tree))


def two_iterations(run: Run, tmp_path: Path, *, restart: bool) -> tuple[Reference, list[dict[str, float]]]:
    checkpoint, metrics = starting_policy(run), []
    for iteration in (1, 2):
        if restart:
            trainer_home.release_trainers()
        update = train_iteration(run, iteration, sequences(run, iteration), checkpoint, tmp_path / "cache")
        metrics.append(read_manifest(update).metrics)
        checkpoint = publish(run, update)
    return checkpoint, metrics


def test_an_adaptive_kl_in_the_reward_goes_on_after_a_restart_where_it_stood(tmp_path: Path) -> None:
    adaptive = {"target": 1e-4, "horizon": 16}
    algorithm = {"kind": "reinforce_plus_plus", "kl_coefficient": 0.1, "adaptive_kl": adaptive}
    resident, told = two_iterations(make_run(tmp_path / "a", tmp_path, algorithm), tmp_path, restart=False)
    restarted, again = two_iterations(make_run(tmp_path / "b", tmp_path, algorithm), tmp_path, restart=True)
    assert weights_digest(resident) == weights_digest(restarted)
    # no KL at all before the first update, so the coefficient falls: 0.1 * (1 - 0.2 * 8 / 16)
    assert [m["train/kl_coefficient"] for m in told] == [m["train/kl_coefficient"] for m in again]
    assert told[1]["train/kl_coefficient"] == pytest.approx(0.09)
    assert told[0]["train/kl_penalty"] == pytest.approx(0, abs=1e-3)  # rounding of improbable tokens
    assert told[1]["train/kl_penalty"] != 0


def test_a_teacher_is_read_from_its_directory(tmp_path: Path) -> None:
    other = make_run(tmp_path / "teacher", tmp_path, {"kind": "grpo"})
    teacher = local_directory(publish_after_training(other, tmp_path), tmp_path / "cache")
    run = make_run(tmp_path / "student", tmp_path, {"kind": "distillation", "teacher": str(teacher)})
    _, metrics = two_iterations(run, tmp_path, restart=True)
    assert all("train/teacher_kl" in told for told in metrics)
    assert metrics[0]["train/num_updates"] == 2
    assert metrics[0]["train/teacher_kl"] != 0


def test_another_train_section_does_not_get_the_kept_trainer(tmp_path: Path) -> None:
    run, cache = make_run(tmp_path / "store", tmp_path, {"kind": "grpo"}), tmp_path / "cache"
    base = starting_policy(run)
    first = publish(run, train_iteration(run, 1, sequences(run, 1), base, cache))
    train = run.config.train.model_copy(update={"minibatches": 1})
    other = replace(run, config=run.config.model_copy(update={"train": train}))
    second = train_iteration(other, 2, sequences(other, 2), first, cache)
    assert read_manifest(second).metrics["train/num_updates"] == 1, "those of its own section, not 2"


def publish_after_training(run: Run, tmp_path: Path) -> Reference:
    return two_iterations(run, tmp_path, restart=False)[0]


def test_a_teacher_that_is_not_there_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "s", tmp_path, {"kind": "distillation", "teacher": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match=r"train.algorithm.teacher: .*nowhere has no config.json"):
        two_iterations(run, tmp_path, restart=True)
