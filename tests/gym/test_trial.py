"""`roundhouse env try`, and the configuration of a command without a file."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.config import from_rows
from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError
from roundhouse.rollout.trial import play_trial
from roundhouse.trajectories.records import Status
from tests.gym.kinds import having

WORLD = """
from roundhouse.environments.base import Environment, Verdict, final_text, task_row
class Words(Environment):
    name = "words"
    def tasks(self, split):
        return [task_row(f"Say {word}.", task_id=word, answer=word) for word in ("fox", "hen", "owl", "bee")]
    async def verify(self, session, row, response):
        return Verdict(float(final_text(response) == row["anser"]))
"""


def config(kind: str = "calculator", **keys: Any) -> Any:
    return parse_config({"run_id": "r", "environment": {"kind": kind}, **keys})


async def test_scripted_replies_call_tools_and_earn_the_reward_of_a_rollout() -> None:
    found = await play_trial(config(), ['calculate({"expression": "2*3"})', "6"], 2)
    assert [[item["type"] for item in each.items] for each in found] == [
        ["message", "function_call", "function_call_output", "message"]
    ] * 2
    assert [each.status for each in found] == [Status.COMPLETED] * 2, "not cut by a limit on tokens"
    assert all(each.reward is not None for each in found)


@pytest.mark.parametrize("kind", having("calculator", "sort", "warehouse", "frozen_lake"))
async def test_random_replies_play_every_kind_of_conversation_and_repeat(kind: str) -> None:
    first, second = [await play_trial(config(kind)) for _ in range(2)]
    assert [each.failure_code for each in first] == [""] * 3
    assert [each.items for each in first] == [each.items for each in second]


def test_a_trial_shows_the_error_of_a_verifier_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(WORLD)
    ended = CliRunner().invoke(app, ["env", "try", f"{tmp_path}/words.py:Words", "--reply", "fox"])
    assert ended.exit_code == 1
    assert ended.stdout.count("failed: verifier_failed") == 3
    assert "words.py, line 8: `return Verdict(" in ended.stdout
    assert "The row has: task_id, responses_create_params, answer" in ended.stdout
    assert "**user** `Say " in ended.stdout


def test_a_trial_of_a_configuration_file_follows_its_overrides(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run_id: r\nenvironment: {kind: sort}\n")
    command = ["env", "try", str(file), "--set", "environment.digits=2", "--reply", "1 2", "--rollouts", "1", "--json"]
    ended = CliRunner().invoke(app, command)
    [played] = json.loads(ended.stdout)
    assert ended.exit_code == 0
    assert len(played["task_id"]) == len("sort/12")


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("vllm", [None, object()], ids=["without vLLM", "with vLLM"])
def test_the_keys_of_a_command_without_a_file_are_a_configuration(
    gpu: bool, vllm: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_rows, "has_gpu", lambda: gpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: vllm)
    tree = from_rows.rows_tree("data/My rows.jsonl", ["rewards.py:correct"], "smollm2-135m-instruct", "question", 0.1)
    made = parse_config(yaml.safe_load(yaml.safe_dump(tree)))
    assert (made.run_id, made.policy.kind, made.train.device) == (
        "my-rows-correct",
        "bundled",
        "cuda" if gpu else "auto",
    )
    assert made.generation.backend == ("trainer" if vllm is None else "vllm")
    assert made.environment.model_dump(include={"data", "prompt", "reward", "heldout"}) == {
        "data": "data/My rows.jsonl",
        "prompt": "question",
        "reward": "rewards.py:correct",
        "heldout": 0.1,
    }


def test_a_command_without_a_file_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    def told(*words: str) -> str:
        return " ".join(CliRunner().invoke(app, ["train", *words], env={"COLUMNS": "300"}).output.split())

    assert "add --reward, --model" in told("--data", "rows.jsonl")
    assert "Give one or the other" in told("run.yaml", "--data", "rows.jsonl")


def test_rows_without_the_column_of_the_prompt_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    (tmp_path / "rewards.py").write_text("def correct(completion, answer): ...\n")
    words = ["--data", "rows.jsonl", "--reward", "rewards.py:correct", "--model", "smollm2-135m-instruct", "--dry-run"]
    ended = CliRunner().invoke(app, ["train", *words])
    assert isinstance(ended.exception, ConfigError)
    assert "environment.prompt is 'prompt'" in str(ended.exception)
    assert "Its columns: question, answer" in str(ended.exception)
    assert {each.name for each in tmp_path.iterdir()} <= {"rows.jsonl", "rewards.py", "__pycache__"}
