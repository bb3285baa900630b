"""A real run with its own engine as judge: the trained policy judges its rollouts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from roundhouse.environments.base import Environment, Split, TaskRow, Verdict, task_row
from roundhouse.stages.collect import read_rollouts
from roundhouse.stages.cost import bill_of
from roundhouse.store.run import Run
from roundhouse.store.stage import Reference, read_manifest, read_table
from roundhouse.trajectories.records import Rollout, Status, item_text
from tests.asynchrony.place import SECONDS, Place
from tests.chaos.stand import Server

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

QUESTION = "Is it right?"


class Opinions(Environment):
    """A policy that answers every conversation with a verdict."""

    name = "opinions"

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return [task_row(f"Say {k}.", task_id=f"{split}-{k}") for k in range(4)]

    async def verify(self, session: None, row: TaskRow, response: dict[str, Any]) -> Verdict:
        return Verdict(0.0)

    def demonstrations(self, split: Split, count: int, good_fraction: float, seed: int) -> list[list[dict[str, Any]]]:
        rng = random.Random(seed)
        asked = {"role": "system", "content": "Judge."}
        return [
            [asked] * (k % 2)
            + [{"role": "user", "content": f"Say {rng.randrange(4)}." * rng.randrange(1, 12)}]
            + [{"role": "assistant", "content": f"Verdict: {rng.choice(('yes', 'no'))}"}]
            for k in range(count)
        ]


@pytest.fixture(scope="module")
def run(place: Place) -> Iterator[Run]:
    engine = Server(
        "engine-own-judge",
        ["-m", "roundhouse.generation.standalone"],
        place.directory / "engine-own-judge.log",
        "/rh/replicas",
        fork_server=place.fork_server,
    )
    engine.start()
    engine.wait_until_it_answers()
    judge = {"max_tokens": 24, "instructions": "Judge."}
    keys: dict[str, Any] = {
        "iterations": 2,
        "policy": {"kind": "warm_start", "steps": 60, "hidden_size": 32, "layers": 1, "intermediate_size": 64},
        "environment": {
            "kind": "custom",
            "target": f"{__name__}:Opinions",
            "rubric": {"criteria": {"right": {"question": QUESTION}}, "judge": judge},
        },
        "generation": {
            "backend": "transformers",
            "engine_url": engine.url,
            "max_model_len": 2048,
            "sampling": {"max_new_tokens": 24},
        },
        "rollout": {"prompts_per_iteration": 2, "group_size": 4, "concurrency": 1},
        "train": {"threads": 1, "minibatches": 1, "algorithm": {"kind": "cross_entropy"}},
        "validation": {},
        "evaluation": {"every": 2, "before_training": False, "tasks": 2},
        "asynchrony": {},
    }
    try:
        assert place.train("own-judge", **keys).wait(SECONDS) == 0, place.log("own-judge").read_text()
        yield place.run("own-judge")
    finally:
        engine.stop()


def stage_of(run: Run, k: int, kind: str) -> Reference:
    reference = run.stage(k, kind).reference()
    assert reference is not None
    return reference


def judged(run: Run, k: int, kind: str) -> dict[str, list[Rollout]]:
    """The rollouts of a stage, by their conversation."""
    found: dict[str, list[Rollout]] = {}
    for rollout in read_rollouts(stage_of(run, k, kind)):
        assert rollout.status is Status.COMPLETED, rollout.failure_detail
        said = [item_text(item) for item in rollout.items]
        found.setdefault(json.dumps(said), []).append(rollout)
    return found


@pytest.mark.parametrize(("k", "kind", "version"), [(1, "collect", 0), (2, "collect", 1), (2, "evaluate", 2)])
def test_a_verdict_is_on_record_with_the_version_that_gave_it_and_asked_for_once_per_version(
    run: Run, k: int, kind: str, version: int
) -> None:
    for same in judged(run, k, kind).values():
        assert len({rollout.reward for rollout in same}) == 1
        assert {rollout.metrics["judge_policy_version"] for rollout in same} == {version}
        assert sum(rollout.metrics.get("judge_calls", 0) > 0 for rollout in same) == 1
        assert sum(rollout.metrics.get("judge_cached", 0) for rollout in same) == len(same) - 1


def test_what_the_judge_says_is_no_token_of_the_policy_and_never_trained_on(run: Run) -> None:
    for k in (1, 2):
        rollouts = [each for same in judged(run, k, "collect").values() for each in same]
        spoken = sum(each.generated_tokens for each in rollouts)
        assert read_manifest(stage_of(run, k, "collect")).metrics["rollout/generated_tokens"] == spoken
        sequences = read_table(stage_of(run, k, "validate"), "sequences")
        assert sequences.num_rows == len(rollouts) == 8
        assert sum(sum(mask) for mask in sequences["loss_mask"].to_pylist()) == spoken
        assert max(map(len, sequences["token_ids"].to_pylist())) < min(
            each.metrics["judge_prompt_tokens"] for each in rollouts if "judge_calls" in each.metrics
        )


def test_its_tokens_are_on_the_bill_as_judged(run: Run) -> None:
    stages = [judged(run, *stage) for stage in ((1, "collect"), (2, "collect"), (2, "evaluate"))]
    rollouts = [each for found in stages for same in found.values() for each in same]
    bill = bill_of(run)["tokens"]
    said, checks = bill.pop("judged"), bill.pop("driver")
    assert 0 < checks < 50, "what a run asks its engine before it relies on it"
    assert said == sum(each.metrics.get("judge_completion_tokens", 0) for each in rollouts) > 0
    assert sum(bill.values()) == sum(each.generated_tokens for each in rollouts)
