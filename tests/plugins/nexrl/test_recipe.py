"""A recipe directory (configuration, workspace, data) is found and played; its faults are named."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from roundhouse.config.loading import load_config
from roundhouse.environments import load_any
from roundhouse.errors import ConfigError
from roundhouse.imports import load_class
from roundhouse.plugins.nexrl import Evaluator
from roundhouse.plugins.nexrl.section import WorkerEnvironment
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.stages.preflight import refuse_unready
from tests import fork_server
from tests.generation.tiny import make_model
from tests.gym.collecting import collect
from tests.gym.playground import SAMPLING, ScriptedPolicy, calls, rollout_config, says, turns_of

RECIPE = Path(__file__).parent / "recipe" / "quiz"
WORKSPACE = RECIPE / "agent_workspace"


def looks_up_then_answers(messages, seed):
    country = messages[0]["content"].removeprefix("What is the capital of ").split("?")[0]
    return calls(("capital", {"country": country})) if turns_of(messages) == 0 else says(messages[-1]["content"])


@pytest.mark.parametrize("file", ["quiz.yaml", "nexrl.yaml"])
async def test_a_recipe_is_played_from_its_configuration(file: str) -> None:
    config = load_config(RECIPE / file, ["environment.parameters={final_only: true}"])
    async with open_environment(config.environment) as client:
        assert client.name == "QuizWorker"
        rows = client.tasks("train")
        assert (
            rows[0]["responses_create_params"]["input"][0]["content"]
            == "What is the capital of France? Answer in one word."
        )
        specs = plan_rollouts(rows, config.rollout.group_size, config.seed, 0)
        rollouts = await collect(specs, ScriptedPolicy(looks_up_then_answers), client, rollout_config(), SAMPLING)
    assert [rollout.reward for rollout in rollouts] == [1.0] * 4
    assert rollouts[0].metrics == {"llm_calls": 2.0, "answer_length": 5.0}
    assert [turn.trained for turn in rollouts[0].turns] == [False, True]


def test_the_recipe_trains_as_it_is(tmp_path: Path) -> None:
    """Nothing but its policy has to be installed; it had no held-out items, and evaluated on them."""
    model = json.dumps({"kind": "pretrained", "path": str(make_model(tmp_path / "model", seed=1))})
    config = load_config(RECIPE / "quiz.yaml", [f"policy={model}", f"store={tmp_path / 'store'}"])
    refuse_unready(config)


def environment(**changes: object) -> WorkerEnvironment:
    fields = {"worker": "worker.py:QuizWorker", "workspace": str(WORKSPACE), "train_data": str(RECIPE / "train.jsonl")}
    return WorkerEnvironment.model_validate({"kind": "worker", **fields, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"worker": "clever"}, "the types are mock, simple, agent"),
        ({"worker": "worker.py:Quiz"}, "has no Quiz. Available: AgentRolloutWorker, QuizWorker"),
        ({"worker": "works.py:Quiz"}, "has: evaluator.py, grading.py, worker.py"),
        ({"worker": "no.such.module:Quiz"}, "importing no.such.module failed"),
        ({"worker": "roundhouse.errors:ConfigError"}, "which is not of type BaseRolloutWorker"),
        ({"worker": "roundhouse.plugins.nexrl:TraceRolloutWorker"}, "does not define make_tracer, run_traced"),
        ({"evaluator": "worker.py:QuizWorker"}, "has a QuizWorker, which is not of type Evaluator"),
        ({"evaluator": "evaluator"}, "write path/to/file.py:Class"),
        ({"parameters": {"finalonly": True}}, "do not fit"),
        ({"evaluator": "roundhouse.plugins.nexrl:Evaluator"}, "cannot be made"),
        ({"train_data": "nowhere.jsonl"}, "environment.train_data"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_what_is_there(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match="environment") as caught:
        open_environment(environment(**changes))
    assert said in str(caught.value)


def test_a_file_that_raises_is_refused_and_can_be_repaired(tmp_path: Path) -> None:
    file = tmp_path / "evaluator.py"
    file.write_text("1/0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_class(f"{file}:Mine", Evaluator, "environment.evaluator")
    shutil.copy(WORKSPACE / "evaluator.py", file)
    loaded = load_class(f"{file}:QuizEvaluator", Evaluator, "environment.evaluator")
    assert load_class(f"{file}:QuizEvaluator", Evaluator, "environment.evaluator") is loaded


def test_relative_paths_begin_at_the_workspace_then_at_nexrl_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.py").write_text(
        "from roundhouse.plugins.nexrl import Evaluator\nclass Other(Evaluator):\n    pass\n"
    )
    with pytest.raises(ConfigError, match=r"no file other.py"):
        load_class("other.py:Other", Evaluator, "environment.evaluator", [WORKSPACE])
    monkeypatch.setenv("NEXRL_PATH", str(tmp_path))
    assert load_class("other.py:Other", Evaluator, "environment.evaluator", [WORKSPACE]).__name__ == "Other"
    monkeypatch.setenv("NEXRL_PATH", str(WORKSPACE))
    assert load_class("evaluator.py:QuizEvaluator", Evaluator, "environment.evaluator").__name__ == "QuizEvaluator"


def test_the_recipe_is_found_from_any_working_directory(tmp_path: Path) -> None:
    code = (
        "from roundhouse.config.loading import load_config; from roundhouse.rollout.clients import open_environment; "
        "import sys; print(len(open_environment(load_config(sys.argv[1]).environment).tasks('train')))"
    )
    run = [sys.executable, "-c", code, str(RECIPE / "quiz.yaml")]
    paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    assert fork_server.run(run, cwd=tmp_path, env=paths, capture_output=True, check=True, timeout=120).stdout == b"2\n"


def test_a_worker_is_no_environment_to_warm_start_on() -> None:
    with pytest.raises(ConfigError, match=r"policy.kind to pretrained"):
        load_any(environment())
