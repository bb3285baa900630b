"""Tasks drawn by the store's records: after a kill, ahead of training, and over a skipped iteration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest

from roundhouse.collection.asynchronous.plan import Plan
from roundhouse.config.loading import parse_config
from roundhouse.rollout.plan import recorded_draw
from roundhouse.stages.collect import collect_dataset, collect_iteration, read_rollouts
from roundhouse.stages.datasets import TaskDraw
from roundhouse.stages.metric_catalogue import meaning_of
from roundhouse.store.run import SKIPPED, Run, Skip, open_run
from roundhouse.store.stage import Reference, read_manifest
from roundhouse.trajectories.records import Rollout, Status
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from tests import fork_server
from tests.gym.playground import written
from tests.stages.scripted_engine import ScriptedAnswer, ScriptedEngine
from tests.stages.test_dynamic_sampling import sorted_sometimes

TASKS, GROUP, ITERATIONS = 3, 4, 4


class KillingEngine(ScriptedEngine):
    """Before its answer number `healthy`, it kills the process that asks, and is healthy from then on."""

    victim: subprocess.Popen[bytes]

    def fail(self, answer: ScriptedAnswer) -> None:
        self.healthy = 10**6
        self.victim.kill()
        self.victim.wait()


@pytest.fixture
def engine() -> Iterator[KillingEngine]:
    with KillingEngine(sorted_sometimes).serving() as server:
        yield server


def settings(store: Path, **keys: Any) -> dict[str, Any]:
    """A run on twelve tasks to sort digits; tasks that begin with an odd digit are never solved."""
    rows = store.parent / "rows.jsonl"
    digits = [f"{first} {(first + 3) % 10} {number} 7" for number in range(6) for first in (2, 5)]
    made = [
        {
            "task_id": f"t{number}",
            "answer": " ".join(sorted(each.split())),
            "responses_create_params": {"input": f"Sort {each} ."},
            "agent_ref": {"name": "words"},
        }
        for number, each in enumerate(digits)
    ]
    rows.write_bytes(b"\n".join(map(orjson.dumps, made)))
    environments = {"words": {"kind": "sort", "digits": 4}}
    return {
        "run_id": "r",
        "store": str(store),
        "iterations": 9,
        "environment": {"kind": "mixture", "environments": environments, "train_tasks": str(rows)},
        "rollout": {
            "prompts_per_iteration": TASKS,
            "group_size": GROUP,
            "concurrency": 2,
            "curriculum": {"kind": "success_band", "window": 3, "outside_weight": 0.01},
        },
    } | keys


COLLECTING = """
import json, sys
from roundhouse.collection import collector
from roundhouse.config.loading import parse_config
from roundhouse.store.run import open_run
from tests.stages.test_curriculum import iterate
collector.FLUSH_SECONDS = 0.0
iterate(open_run(parse_config(json.loads(sys.argv[1]))), sys.argv[2])
"""


def iterate(run: Run, url: str) -> list[Reference]:
    """Refit and collect, iteration after iteration; complete stages are not repeated."""
    done = []
    for k in range(1, ITERATIONS + 1):
        weights = run.stage(k, "refit").reference() or run.begin(run.stage(k, "refit"), policy_version=k - 1).commit()
        done.append(collect_iteration(run, k, weights, url))
    return done


def collected(references: list[Reference]) -> bytes:
    """Return the collected data without clocks, and the records that the draw used."""
    rollouts = [written(r) for each in references for r in sorted(read_rollouts(each), key=lambda r: r.rollout_id)]
    manifests = [read_manifest(each) for each in references]
    drawn = [
        (
            sorted(each.inputs),
            {name: value for name, value in each.metrics.items() if name.startswith("curriculum/")},
        )
        for each in manifests
    ]
    return json.dumps([rollouts, drawn], sort_keys=True, default=str).encode()


def test_a_run_that_was_killed_draws_and_makes_byte_for_byte_what_it_would_have_made(
    tmp_path: Path, engine: KillingEngine
) -> None:
    alone = iterate(open_run(parse_config(settings(tmp_path / "alone"))), engine.url)
    everything = sorted(engine.seeds)
    engine.requests.clear()
    engine.healthy = 2 * TASKS * GROUP + 5  # amid iteration 3
    tree = settings(tmp_path / "killed")
    command = [sys.executable, "-c", COLLECTING, json.dumps(tree), engine.url]
    engine.victim = fork_server.start(command, env=os.environ)
    assert engine.victim.wait(120) == -9
    run = open_run(parse_config(tree))
    assert [run.stage(k, "collect").reference() is not None for k in (1, 2, 3)] == [True, True, False]
    resumed = iterate(run, engine.url)
    assert collected(resumed) == collected(alone)
    assert sorted(set(engine.seeds)) == everything

    manifests = [read_manifest(each) for each in resumed]
    counted = [sorted(name for name in each.inputs if name.startswith("drawn_by_")) for each in manifests]
    assert counted == [[f"drawn_by_{j}" for j in range(1, k)] for k in range(1, ITERATIONS + 1)]
    assert manifests[0].metrics["curriculum/unseen"] == 1.0
    assert all(meaning_of(name) for each in manifests for name in each.metrics)


def test_a_dataset_is_drawn_by_what_its_policy_version_was_trained_on(tmp_path: Path, engine: KillingEngine) -> None:
    run = open_run(parse_config(settings(tmp_path / "store")))
    iterate(run, engine.url)
    version_2 = run.begin(run.stage(3, "refit"), policy_version=2).commit()
    made = read_manifest(collect_dataset(run, "nightly", TaskDraw(10_000), version_2, engine.url))
    assert {name for name in made.inputs if name.startswith("drawn_by_")} == {"drawn_by_1", "drawn_by_2"}


def record(run: Run, iteration: int, task: str, rewards: list[float | None], window: bool = False) -> None:
    """The collect stage of an iteration with one group."""
    group = f"{task}@{iteration}" if window else task
    rollouts = [
        Rollout(group, sample, {"task_id": task}, "e", Status.COMPLETED, reward=reward)
        if reward is not None
        else Rollout(group, sample, {"task_id": task}, "e", Status.FAILED, failure_code="timeout")
        for sample, reward in enumerate(rewards)
    ]
    attempt = run.begin(run.stage(iteration, "collect"), policy_version=iteration - 1)
    attempt.write_table("turns", turns_table(rollouts))
    attempt.write_table("rollouts", rollouts_table(rollouts))
    attempt.commit()


OVERLAPPED = {"mode": "batch-async", "staleness": 2}
WINDOWED = {"mode": "windowed", "staleness": 3, "window": 4}


@pytest.mark.parametrize("asynchrony", [OVERLAPPED, WINDOWED], ids=["own groups", "window"])
def test_ahead_of_training_only_iterations_count_that_are_trained_before_the_rollouts_can_begin(
    tmp_path: Path, asynchrony: dict[str, Any]
) -> None:
    run = open_run(parse_config(settings(tmp_path / "store", asynchrony=asynchrony)))
    for k in range(1, 5):
        record(run, k, f"words/t{k}", [0.0, 1.0, None], window=asynchrony is WINDOWED)
    plan = Plan(run)
    before = [spec.rollout_id for spec in plan.specs(7)]
    assert plan.draw_of(7).history == {f"words/t{k}": [(0.0, 1.0)] for k in (2, 3, 4)}
    for k in (5, 6):
        record(run, k, f"words/t{k}", [0.0, 0.0])
    assert [spec.rollout_id for spec in Plan(run).specs(7)] == before, "whatever was collected meanwhile"
    assert list(Plan(run).draw_of(8).inputs) == ["drawn_by_3", "drawn_by_4", "drawn_by_5"]


def test_skipped_iterations_and_groups_without_a_reward_do_not_count(tmp_path: Path) -> None:
    run = open_run(parse_config(settings(tmp_path / "store")))
    record(run, 1, "words/t1", [0.0, 0.0])
    record(run, 2, "words/t2", [1.0, 1.0])
    record(run, 3, "words/t3", [None, None])
    skip = Skip("too_few_rollouts", "data", "2 of 3", "failures.on_too_few is skip")
    run.begin(run.stage(2, "train"), policy_version=1).commit(details={SKIPPED: asdict(skip)})
    draw = recorded_draw(run, 3)
    assert draw.history == {"words/t1": [(0.0, 0.0)]}
    assert list(draw.inputs) == ["drawn_by_1", "drawn_by_3"]


def test_a_curriculum_of_ones_own_looks_back_as_far_as_its_window(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from roundhouse.rollout.plan import Curriculum\n"
        "class Even(Curriculum):\n"
        "    def weights(self, tasks, history):\n"
        "        return [1.0] * len(tasks)\n"
    )
    tree = settings(tmp_path / "store")
    tree["rollout"]["curriculum"] = {"kind": "custom", "target": f"{tmp_path / 'own.py'}:Even", "window": 1}
    run = open_run(parse_config(tree))
    record(run, 1, "words/t1", [0.0, 0.0])
    record(run, 2, "words/t2", [1.0, 1.0])
    assert recorded_draw(run, 2).history == {"words/t2": [(1.0, 1.0)]}
