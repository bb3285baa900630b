"""Rows of a file and reward functions as an environment."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from roundhouse.config.loading import parse_config
from roundhouse.environments import load_any
from roundhouse.environments.base import BadReward, Verdict
from roundhouse.errors import ConfigError
from roundhouse.rollout import environment_process
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.rollout.responses import assistant_items
from roundhouse.stages.preflight import verifier_warnings
from roundhouse.stages.task_survey import code_digests, has_local_rows
from tests.gym.collecting import collect
from tests.gym.playground import SAMPLING, ScriptedPolicy, by_turn, rollout_config, says

REWARDS = """
import asyncio, re, time

def correct(completions, answer, **kwargs):
    return [float(text == right) for text, right in zip(completions, answer)]

def plain(completion, answer):
    return completion == answer

def thinks(completions, **kwargs):
    return [float(bool(re.fullmatch("<think>.*</think>.+", text))) for text in completions]

def thought(completion):
    return completion == "<think>1+1</think>2"

def short(completion):
    return -len(completion)

async def polite(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    assert set(kwargs) == {"task_id", "question", "answer"}, kwargs
    return [None if prompt == "1+1?" else 0.5 for prompt in prompts]

def spoken(completions, **kwargs):
    return [float(completion[0]["role"] == "assistant" and completion[0]["content"] == "2") for completion in completions]

def judged(completion, how):
    if how == "raises":
        return float(how)
    if how == "regex":
        re.match(r"(a+)+$", "a" * 40 + "b")
    if how == "sleep":
        time.sleep(3600)
    return {"string": "good", "nan": float("nan"), "list": [1.0]}.get(how, 1.0)

def long(completions, **kwargs):
    return [1.0, 2.0]

def number(completions, **kwargs):
    return 1.0

def named(text, answer): ...

def ids(completions, completion_ids): ...

def wrong(completion, anser): ...
"""
ROWS: list[dict[str, Any]] = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(1, 41)]


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """Makes the environment section of these rows with these keys."""
    (tmp_path / "rewards.py").write_text(REWARDS)

    def make(rows: list[Any], reward: str | list[str] = "correct", **keys: Any) -> Any:
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        names = [f"{tmp_path}/rewards.py:{name}" for name in ([reward] if isinstance(reward, str) else reward)]
        section = {"kind": "dataset", "data": str(data), "prompt": "question", "reward": names}
        return parse_config({"run_id": "r", "environment": section | keys}).environment

    return make


async def verdict(config: Any, place: int, text: str) -> Verdict:
    environment: Any = load_any(config)
    row = next(row for split in ("train", "heldout") for row in environment.tasks(split) if row["answer"] == str(place))
    return await environment.verify(None, row, {"output": assistant_items({"content": text}, "msg_1")})


def test_files_of_each_kind_have_the_same_tasks(made: Any, tmp_path: Path) -> None:
    typed = [{"question": row["question"], "answer": int(row["answer"])} for row in ROWS]
    table = pa.Table.from_pylist(typed)
    pa.csv.write_csv(table, tmp_path / "rows.csv")
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    splits = [
        {split: list(load_any(made(typed, data=str(tmp_path / name))).tasks(split)) for split in ("train", "heldout")}
        for name in ("rows.jsonl", "rows.csv", "rows.parquet")
    ]
    assert splits[0] == splits[1] == splits[2]
    first = splits[0]["train"][0]
    assert first["responses_create_params"]["input"] == [{"role": "user", "content": first["question"]}]


def test_more_rows_and_equal_prompts_move_no_row_between_the_splits(made: Any) -> None:
    few = {split: {row["question"] for row in load_any(made(ROWS[:20])).tasks(split)} for split in ("train", "heldout")}
    rows = [*ROWS, *({"question": row["question"], "answer": "other"} for row in ROWS)]
    more = {split: {row["question"] for row in load_any(made(rows)).tasks(split)} for split in ("train", "heldout")}
    assert 4 <= len(more["heldout"]) <= 14
    assert not more["train"] & more["heldout"]
    assert few["train"] <= more["train"]
    assert few["heldout"] <= more["heldout"]


@pytest.mark.parametrize("heldout", [0.0001, 0.9999])
def test_neither_split_is_empty_if_there_are_two_prompts(made: Any, heldout: float) -> None:
    environment = load_any(made(ROWS[:3], heldout=heldout))
    assert sorted(len(environment.tasks(split)) for split in ("train", "heldout")) == [1, 2]
    assert not load_any(made(ROWS, heldout=0)).tasks("heldout")


async def test_a_function_gets_lists_or_one_completion_by_its_parameters(made: Any) -> None:
    assert await verdict(made([{**row, "completions": "3"} for row in ROWS]), 2, "2") == Verdict(1.0)
    assert await verdict(made(ROWS, "plain"), 2, "2") == Verdict(1.0)
    assert await verdict(made(ROWS, "plain"), 2, "3") == Verdict(0.0)


async def test_a_function_sees_the_whole_reply_with_its_thoughts(made: Any) -> None:
    for function in ("thinks", "thought"):
        for text, reward in (("<think>1+1</think>2", 1.0), ("2", 0.0), ("<think>1+1</think>", 0.0)):
            assert (await verdict(made(ROWS, function), 2, text)).reward == reward, (function, text)


async def test_rewards_of_several_functions_are_weighted_and_none_does_not_count(made: Any) -> None:
    config = made(ROWS, ["correct", "short", "polite"], reward_weights=[1, 0.25, 2])
    raw = {"correct": 1.0, "short": -1.0, "polite": 0.5}
    assert await verdict(config, 3, "3") == Verdict(1.75, {"correct": 1.0, "short": -0.25, "polite": 1.0}, raw)
    del raw["polite"]
    assert await verdict(config, 2, "2") == Verdict(0.75, {"correct": 1.0, "short": -0.25}, raw)
    assert (await verdict(made(ROWS, "polite"), 2, "2")).mask, "no function applied"


async def test_a_prompt_of_messages_makes_the_completion_one(made: Any) -> None:
    prompt = [{"role": "system", "content": "Short."}, {"role": "user", "content": "1+1?"}]
    rows = [{"question": prompt, "answer": "2"}, *ROWS]
    config = made(rows, ["spoken", "plain"], heldout=0)
    assert (await verdict(made(rows[:1], ["spoken", "plain"], heldout=0), 2, "2")).reward == 2.0
    [row] = [row for row in load_any(config).tasks("train") if row["question"] == prompt]
    assert row["responses_create_params"]["input"] == prompt


@pytest.mark.parametrize(
    ("rows", "reward", "keys", "message"),
    [
        (ROWS, "wrong", {}, r"wrong'.* parameter anser is not a column of environment.data .*question, answer"),
        (ROWS, "named", {}, r"with the parameters text, answer. Name one of them `completion`"),
        (ROWS, "ids", {}, "needs completion_ids: only TRL's trainer has it. Judge the text"),
        (ROWS, "missing", {}, "environment.reward is .* has no function missing. Available: correct"),
        (ROWS, "correct", {"prompt": "problem"}, "environment.prompt is 'problem'.*Its columns: question, answer"),
        ([], "correct", {}, "environment.data is .*rows.jsonl', which holds no rows"),
        ([1], "correct", {}, "rows are not objects"),
        ([{"question": 3}], "spoken", {}, r"row 1: column question is 3. Give a text, or a list of messages"),
        ([{"question": "a", "task_id": "x"}] * 2, "spoken", {}, "row 2: task_id 'x' is already used on row 1"),
        (ROWS, "correct", {"data": "rows.xlsx"}, r"ends in .jsonl, .csv, .parquet"),
        (ROWS, "correct", {"data": "nowhere.csv"}, "environment.data is 'nowhere.csv', which cannot be read"),
        (ROWS, "correct", {"reward_weights": [1, 2]}, "reward_weights has 2 numbers, but reward names 1 functions"),
        (ROWS, "correct", {"subset": "main"}, "a file, but subset is main"),
    ],
    ids=lambda each: each if isinstance(each, str) and each.isidentifier() else "",
)
def test_bad_rows_and_functions_are_refused_with_key_and_remedy(
    made: Any, rows: list[Any], reward: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_any(made(rows, reward, **keys)).tasks("train")


def test_a_missing_package_of_data_sets_is_refused_with_its_command(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'roundhouse\[datasets\]'"):
        load_any(made(ROWS, data="hf:openai/gsm8k", subset="main")).tasks("train")
    assert not has_local_rows(made(ROWS, data="hf:openai/gsm8k"))
    assert has_local_rows(made(ROWS))


def test_a_data_set_of_the_hub_is_read_by_name_subset_and_split(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("datasets")
    library.load_dataset = lambda name, subset, split, streaming: [  # type: ignore[attr-defined]
        {"question": f"{name} {subset} {split}", "answer": "2"}
    ]
    monkeypatch.setitem(sys.modules, "datasets", library)
    config = made(ROWS, data="hf:openai/gsm8k", subset="main", split="test", heldout=0)
    assert [row["question"] for row in load_any(config).tasks("train")] == ["openai/gsm8k main test"]


def test_a_limit_takes_the_first_rows_of_a_file(made: Any) -> None:
    rows = [{"question": f"{number}?", "answer": "2"} for number in range(5)]
    config = made(rows, heldout=0, limit=2)
    assert sorted(row["question"] for row in load_any(config).tasks("train")) == ["0?", "1?"]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("long", r"returned 2 rewards \(\[1.0, 2.0\]\) for 1 completion"),
        ("number", "returned 1.0, a float. A function of `completions` returns a list"),
    ],
)
async def test_a_batch_function_that_returns_no_list_of_one_is_named(made: Any, reward: str, message: str) -> None:
    with pytest.raises(BadReward, match=message):
        await verdict(made(ROWS, reward), 2, "2")


async def test_a_reward_function_that_fails_costs_its_rollout_alone(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_process, "HELD_SECONDS", 1.0)
    ways = ["fine", "raises", "string", "nan", "list", "regex", "sleep"]
    config = made([{"question": f"{how}?", "how": how} for how in ways], "judged", heldout=0)
    limits = rollout_config(retry={"attempts": 1}, timeout_seconds=6.0)
    async with open_environment(config) as environment:
        specs = plan_rollouts(environment.tasks("train"), 1, 0, 0)
        rollouts = await collect(specs, ScriptedPolicy(by_turn(says("2"))), environment, limits, SAMPLING)
    ended = {each.task["how"]: each for each in rollouts}
    assert {how: each.failure_code for how, each in ended.items()} == {
        **{"fine": "", "raises": "verifier_failed", "regex": "environment_blocked", "sleep": "rollout_timeout"},
        **dict.fromkeys(("string", "nan", "list"), "bad_reward"),
    }
    assert ended["fine"].reward == 1.0
    assert "rewards.py, line 29: `return float(how)`" in ended["raises"].failure_detail
    assert "rewards.py:" in ended["regex"].failure_detail
    assert "returned 'good', a str. Return a finite number, or None" in ended["string"].failure_detail


def test_a_dry_run_tries_the_function_on_the_first_row(made: Any) -> None:
    config = parse_config({"run_id": "r"}).model_copy(
        update={"environment": made([{"question": "a", "how": "nan"}], "judged")}
    )
    with pytest.raises(
        ConfigError, match=r"environment.reward: .*rewards.py:judged returned nan. Return a finite number"
    ):
        verifier_warnings(config)


def test_the_code_of_each_function_is_on_record(made: Any) -> None:
    config = parse_config({"run_id": "r"}).model_copy(update={"environment": made(ROWS, ["correct", "short"])})
    assert len(code_digests(config)) == 2
