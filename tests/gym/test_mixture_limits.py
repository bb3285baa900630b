"""The rollouts of each environment of a mixture are made within its own limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.config.models import RolloutConfig
from roundhouse.errors import ConfigError
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.stages.collect import collect_iteration
from roundhouse.stages.evaluate import evaluate_version
from roundhouse.stages.preflight import refuse_unready
from roundhouse.stages.validate import validate_iteration
from roundhouse.store.run import open_run
from roundhouse.store.stage import read_table
from roundhouse.trajectories.records import Rollout
from tests.generation.tiny import make_model
from tests.gym.collecting import collect
from tests.gym.playground import SAMPLING, ScriptedPolicy, calls, rollout_config
from tests.stages.scripted_engine import ScriptedEngine

CALC, WORDS = {"kind": "calculator"}, {"kind": "sort", "digits": 4}


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine().serving() as server:
        yield server


def asked(engine: ScriptedEngine) -> dict[str, set[tuple[int, str]]]:
    """By environment, the limits of a call that the engine saw, with the system prompt."""
    seen: dict[str, set[tuple[int, str]]] = {}
    for request in engine.requests:
        system = "".join(each["content"] for each in request["messages"] if each["role"] == "system")
        environment = "words" if "Sort" in request["messages"][-1]["content"] else "others"
        seen.setdefault(environment, set()).add((request["max_tokens"], system))
    engine.requests.clear()
    return seen


def test_the_engine_is_asked_within_the_limits_of_the_tasks_environment_and_validation_holds_to_them(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    environments = {"calc": CALC, "words": WORDS}
    own = {"max_new_tokens": 1, "system_prompt": "Digits alone."}
    tree = {
        "run_id": "r",
        "store": str(tmp_path),
        "environment": {"kind": "mixture", "environments": environments},
        "generation": {"sampling": {"max_new_tokens": 20}},
        "rollout": {"prompts_per_iteration": 4, "group_size": 2, "environments": {"words": own}},
        "evaluation": {"tasks": 4},
    }
    run = open_run(parse_config(tree))
    weights = run.begin(run.stage(1, "refit"), policy_version=0).commit()
    collected = collect_iteration(run, 1, weights, engine.url)
    wanted = {"words": {(1, "Digits alone.")}, "others": {(20, "")}}
    assert asked(engine) == wanted
    validated = validate_iteration(run, 1, collected, vocabulary_size=10)
    # An answer of the engine has two tokens
    refused = read_table(validated, "quarantine").select(["group_id", "reason"]).to_pylist()
    assert {(row["group_id"].partition("/")[0], row["reason"]) for row in refused} == {("words", "generation_length")}
    evaluate_version(run, 0, engine.url)
    assert asked(engine) == wanted


async def played(own: dict[str, Any], config: RolloutConfig) -> dict[str, Rollout]:
    """A rollout of each of two environments with tools, of a policy that never stops calculating, three calls at a time."""
    environments = {"own": CALC, "other": CALC}
    tree = {"run_id": "r", "environment": {"kind": "mixture", "environments": environments}}
    mixture = parse_config(tree).environment
    limits = RolloutConfig.model_validate(config.model_dump() | {"environments": {"own": own}})
    policy = ScriptedPolicy(lambda messages, seed: calls(("calculate", {"expression": "1+1"})))
    async with open_environment(mixture) as environment:
        specs = plan_rollouts(environment.tasks("train")[:1] + environment.tasks("train")[-1:], 1, 0, 1)
        found = await collect(specs, policy, environment, limits, SAMPLING)
    return {rollout.environment: rollout for rollout in found}


async def test_turns_and_tokens_of_a_rollout_are_limited_by_its_environment() -> None:
    config = rollout_config(max_turns=3)
    found = await played({"max_turns": 5}, config)
    assert {name: (len(rollout.turns), rollout.finish_reason) for name, rollout in found.items()} == {
        "own": (5, "max_turns"),
        "other": (3, "max_turns"),
    }
    found = await played({"max_tokens": 500}, config)
    assert {name: rollout.finish_reason for name, rollout in found.items()} == {
        "own": "max_tokens",
        "other": "max_turns",
    }


def test_whether_calls_of_a_reply_run_together_is_the_environments_own() -> None:
    config = RolloutConfig.model_validate({"environments": {"own": {"parallel_tool_calls": True}}})
    assert config.of_environment("own").parallel_tool_calls
    assert not config.of_environment("other").parallel_tool_calls


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"words": {"temperature": 0.7}}, r"temperature is 0\.7.*one distribution.*evaluation\.temperature"),
        ({"words": {"top_p": 0.9}}, r"top_p is 0\.9.*generation\.sampling\.top_p"),
        ({"wrods": {"max_turns": 2}}, r"rollout\.environments names wrods, but .* has calc, words, far"),
        ({"words": {"max_new_tokens": 9999}}, r"words\.max_new_tokens \(9999\) leaves no room"),
        ({"far": {"max_turns": 2}}, r"far\.max_turns is 2, but .*far\.kind is agent, and its own program"),
        ({"far": {"system_prompt": "x"}}, r"far\.system_prompt is 'x'"),
    ],
)
def test_what_an_environment_cannot_have_of_its_own_is_refused(own: dict[str, Any], message: str) -> None:
    far = {"kind": "agent", "url": "http://127.0.0.1:1", "agent": "a", "train_tasks": "rows.jsonl"}
    environments = {"calc": {"kind": "calculator"}, "words": {"kind": "sort"}, "far": far}
    tree = {"run_id": "r", "environment": {"kind": "mixture", "environments": environments}}
    with pytest.raises(ConfigError, match=message):
        parse_config(tree | {"rollout": {"environments": own}})


def test_a_template_that_drops_an_environments_system_prompt_is_refused_before_the_start(tmp_path: Path) -> None:
    model = make_model(tmp_path / "policy", seed=1)
    (model / "chat_template.jinja").write_text(
        "{{ tools }}{% for m in messages if m.role != 'system' %}{{ m.content ~ m.tool_calls }}{% endfor %}"
    )
    tree = {
        "run_id": "r",
        "store": str(tmp_path / "store"),
        "policy": {"kind": "pretrained", "path": str(model)},
        "environment": {"kind": "mixture", "environments": {"calc": CALC, "words": WORDS}},
        "rollout": {"environments": {"words": {"system_prompt": "Digits alone."}}},
    }
    with pytest.raises(ConfigError, match=r"leaves out the system prompt 'Digits alone\.'"):
        refuse_unready(parse_config(tree))


def test_limits_by_environment_are_for_mixtures() -> None:
    with pytest.raises(ConfigError, match=r"names calc, but environment\.environments has none.*kind: mixture"):
        parse_config({"run_id": "r", "rollout": {"environments": {"calc": {"max_turns": 2}}}})
