"""Several environments in one run: shares, rows, metrics, and early refusals."""

from __future__ import annotations

import json
import tracemalloc
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.consent import unnamed_code
from roundhouse.config.environments import EnvironmentConfig
from roundhouse.config.loading import parse_config
from roundhouse.config.models import WarmStartPolicy
from roundhouse.environments import demonstrating
from roundhouse.environments.base import task_row
from roundhouse.errors import ConfigError
from roundhouse.policy.warm_start import demonstration_texts
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import BLOCK, GOLDEN, WeightedTasks, plan_rollouts, sample_tasks
from roundhouse.stages.collect import collect_iteration, read_rollouts
from roundhouse.stages.evaluate import evaluate_version
from roundhouse.stages.preflight import refuse_unready
from roundhouse.store.run import open_run
from roundhouse.store.stage import read_manifest
from tests.gym.collecting import collect
from tests.gym.playground import SAMPLING, ScriptedPolicy, rollout_config, says
from tests.stages.scripted_engine import ScriptedEngine
from tests.stages.test_collect import engine  # noqa: F401 - a fixture

CALC, WORDS = {"kind": "calculator"}, {"kind": "sort", "digits": 4}


def mixture(**keys: Any) -> EnvironmentConfig:
    given = {"kind": "mixture", "environments": {"calc": CALC, "words": WORDS}} | keys
    return parse_config({"run_id": "r", "environment": given}, "here").environment


def of(rows: Any) -> Counter[str]:
    return Counter(row["task_id"].partition("/")[0] for row in rows)


def write_rows(path: Path, *names: str | None) -> str:
    rows = [
        {"task_id": f"t{index}", "answer": "1 2 3 4", "responses_create_params": {"input": "Sort 3241."}}
        | ({} if name is None else {"agent_ref": {"type": "responses_api_agents", "name": name}})
        for index, name in enumerate(names)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(("weights", "share"), [({}, 0.5), ({"calc": 3}, 0.75), ({"calc": 1, "words": 9}, 0.1)])
def test_every_iteration_has_nearly_the_shares_of_the_weights(weights: dict[str, float], share: float) -> None:
    tasks = open_environment(mixture(weights=weights)).tasks("train")
    drawn = [sample_tasks(tasks, 5, iteration, 20) for iteration in range(10)]
    assert all(abs(of(rows)["calc"] - 20 * share) <= 2 for rows in drawn)
    assert abs(of(row for rows in drawn for row in rows)["calc"] - 200 * share) <= 3
    assert drawn[3] == sample_tasks(tasks, 5, 3, 20), "a pure function of seed and iteration"


def test_each_environment_comes_in_epochs_of_its_own() -> None:
    environment = open_environment(mixture(environments={"calc": CALC, "drawn": {"kind": "countdown", "problems": 30}}))
    rows = [row for iteration in range(8) for row in sample_tasks(environment.tasks("train"), 0, iteration, 8)]
    drawn = [row["task_id"] for row in rows if row["task_id"].startswith("drawn/")]
    count = sum(row["task_id"].startswith("drawn/") for row in environment.tasks("train"))
    assert count <= len(drawn)
    assert len(set(drawn[:count])) == count, "no task twice in an epoch"


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0}, {"a": 3.0, "b": 0.7, "c": 1.3}, {"a": 0.0, "b": 2.0}])
def test_a_draw_goes_on_from_all_positions_before_it_and_lists_none_of_them(weights: dict[str, float]) -> None:
    """A scheduled collection is draw number 29 million: minutes since 1970."""
    ends = [sum(list(weights.values())[: place + 1]) / sum(weights.values()) for place in range(len(weights))]
    names = [
        list(weights)[min(bisect_right(ends, place * GOLDEN % 1.0), len(ends) - 1)] for place in range(2 * BLOCK + 99)
    ]
    own = {name: [task_row("x", task_id=f"{name}/{number}") for number in range(1000)] for name in weights}
    tasks = WeightedTasks(own, weights)
    for begin in (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK, len(names) - 1):
        [row] = sample_tasks(tasks, 0, begin, 1, shuffle=False)
        assert row["task_id"] == f"{names[begin]}/{names[:begin].count(names[begin]) % 1000}"
    tracemalloc.start()
    assert len(sample_tasks(tasks, 0, 2**21, 2)) == 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23, "bytes; a list of the names before would take four times as many"


def test_held_out_rows_of_a_file_are_evaluated_by_row(tmp_path: Path) -> None:
    environment = open_environment(mixture(heldout_tasks=write_rows(tmp_path / "held.jsonl", "words", "words")))
    assert [row["task_id"] for row in environment.tasks("heldout")] == ["words/t0", "words/t1"]
    assert of(environment.tasks("train")).keys() == {"calc", "words"}


def test_held_out_tasks_come_from_the_environments_in_turn() -> None:
    assert of(open_environment(mixture()).tasks("heldout")[:10]) == {"calc": 5, "words": 5}


async def test_a_rows_agent_ref_says_which_environment_plays_it(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "blend.jsonl", "words", "calc", "words")
    async with open_environment(mixture(train_tasks=rows)) as environment:
        tasks = environment.tasks("train")
        assert [row["task_id"] for row in tasks] == ["words/t0", "calc/t1", "words/t2"]
        specs = plan_rollouts(tasks, 1, seed=0, iteration=1)
        rollouts = await collect(
            specs, ScriptedPolicy(lambda messages, seed: says("1 2 3 4")), environment, rollout_config(), SAMPLING
        )
    assert [rollout.environment for rollout in rollouts] == ["words", "calc", "words"]
    assert [rollout.reward for rollout in rollouts if rollout.environment == "words"] == [1.0, 1.0]


@pytest.mark.parametrize("name", ["stranger", None])
def test_a_row_of_an_unknown_agent_is_refused_before_the_start(tmp_path: Path, name: str | None) -> None:
    rows = write_rows(tmp_path / "blend.jsonl", "words", name)
    config = parse_config(
        {"run_id": "r", "store": str(tmp_path / "store")}
        | {"environment": {"kind": "mixture", "environments": {"calc": CALC, "words": WORDS}, "train_tasks": rows}}
    )
    with pytest.raises(ConfigError, match=rf"train_tasks: row 2 names {name!r}.*has calc, words"):
        refuse_unready(config)


REMOTE = {"kind": "remote", "url": "http://127.0.0.1:1"}
WORKER = {"kind": "worker", "train_data": "items.jsonl"}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"weights": {"clac": 2}}, r"weights names clac, but .* has calc, words"),
        ({"weights": {"calc": 2}, "train_tasks": "rows.jsonl"}, r"weights is set, but environment\.train_tasks"),
        ({"environments": {"far": REMOTE}}, r"environments\.far\.train_tasks is unset"),
        (
            {"environments": {"far": REMOTE | {"train_tasks": "own.jsonl"}}, "train_tasks": "rows.jsonl"},
            r"environments\.far\.train_tasks is own\.jsonl, but environment\.train_tasks",
        ),
        ({"environments": {"mine": WORKER}, "train_tasks": "rows.jsonl"}, r"environments\.mine\.kind is worker"),
        ({"environments": {}}, "environments"),
        ({"environments": {"all": {"kind": "mixture", "environments": {"calc": CALC}}}}, "kind"),
        ({"environments": {"a/b": CALC}}, "environments"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_with_the_key(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        mixture(**keys)


def test_one_environment_still_needs_training_tasks_and_sets_need_names_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"environment\.train_tasks is unset"):
        parse_config({"run_id": "r", "environment": REMOTE})
    given = {"kind": "mixture", "environments": {"calc": CALC}}
    with pytest.raises(ConfigError, match=r"evaluation\.sets has calc"):
        parse_config({"run_id": "r", "environment": given, "evaluation": {"sets": {"calc": {}}}})


def test_collection_and_evaluation_have_metrics_of_each_environment(
    tmp_path: Path,
    engine: ScriptedEngine,  # noqa: F811
) -> None:
    config = parse_config(
        {
            "run_id": "r",
            "store": str(tmp_path),
            "environment": {"kind": "mixture", "environments": {"calc": CALC, "words": WORDS}},
            "rollout": {"prompts_per_iteration": 4, "group_size": 2},
            "evaluation": {"tasks": 4},
        }
    )
    run = open_run(config)
    weights = run.begin(run.stage(1, "refit"), policy_version=0).commit()
    collected = collect_iteration(run, 1, weights, engine.url)
    assert {rollout.environment for rollout in read_rollouts(collected)} == {"calc", "words"}
    metrics = read_manifest(collected).metrics
    assert metrics["mixture/words/reward/mean"] == 0.0
    assert metrics["mixture/calc/rollout/completed_rate"] == 1.0
    evaluated = read_manifest(evaluate_version(run, 0, engine.url)).metrics
    assert (evaluated["evaluation/tasks"], evaluated["evaluation/calc/tasks"], evaluated["evaluation/words/tasks"]) == (
        4,
        2,
        2,
    )


def test_a_warm_start_sees_the_demonstrations_of_all_that_have_some() -> None:
    config = WarmStartPolicy(steps=1, batch_size=2)
    both = demonstration_texts(config, demonstrating(mixture()), 0)
    assert "Sort" in both[1]
    assert "Sort" not in both[0]
    assert demonstration_texts(
        config, demonstrating(mixture(environments={"calc": CALC, "far": REMOTE | {"train_tasks": "x"}})), 0
    ) == (demonstration_texts(config, demonstrating(mixture(environments={"calc": CALC})), 0))


def test_code_that_a_stored_mixture_names_is_not_run_unnamed() -> None:
    custom = {"kind": "custom", "target": "mine.py:Mine"}
    config = parse_config({"run_id": "r", "environment": {"kind": "mixture", "environments": {"mine": custom}}})
    assert unnamed_code(config, []) == {"environment.environments.mine.target": "mine.py:Mine"}
