"""Workers through the rollout engine: the same collector, limits and records as for every environment."""

import json
import threading
from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq
import pytest

from roundhouse.config.models import ValidationConfig
from roundhouse.environments.base import tool
from roundhouse.errors import ConfigError
from roundhouse.generation.protocol import EngineFailed
from roundhouse.plugins.nexrl import (
    AgentRolloutWorker,
    BaseRolloutWorker,
    EvaluationRunResult,
    Evaluator,
    SimpleRolloutWorker,
    TraceRolloutWorker,
)
from roundhouse.plugins.nexrl.base import AnswerTag, BaseEvaluationTarget
from roundhouse.plugins.nexrl.built_in import hash_reward
from roundhouse.plugins.nexrl.client import WorkerClient
from roundhouse.plugins.nexrl.section import WorkerEnvironment
from roundhouse.rollout.agents import play_rollout, run_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.trajectories.records import FailureKind, Status
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from roundhouse.trajectories.validation import validate
from tests.growth import growth
from tests.gym.collecting import collect
from tests.gym.playground import SAMPLING, ScriptedPolicy, by_turn, calls, rollout_config, says, spec_of

ITEM = {"task_id": "a", "group_id": "a", "prompt": "2+2?", "ground_truth": "4"}


async def play(worker: Any, script: Any = says("<answer>4</answer>"), item: dict[str, Any] = ITEM, **config: Any):
    client = WorkerClient(worker, "test", [item])
    policy = ScriptedPolicy(script if callable(script) else by_turn(script))
    return await play_rollout(spec_of(client.tasks("train")[0]), policy, client, rollout_config(**config), SAMPLING)


class Says(Evaluator):
    """Worker that returns or raises its argument."""

    def __init__(self, told: Any) -> None:
        self.told = told
        self.targets: list[Any] = []

    def evaluate(self, data: dict[str, Any], evaluation_target: Any) -> Any:
        self.targets.append(evaluation_target)
        if isinstance(self.told, Exception):
            raise self.told
        return self.told


class Returns(BaseRolloutWorker):
    """A step with a given result."""

    told: Any = "success"

    async def run_agent(self, task: dict[str, Any]) -> str | None:
        if isinstance(self.told, Exception):
            raise self.told
        return self.told


def returning(value: Any) -> type[Returns]:
    return type("Returning", (Returns,), {"told": value})


# -- one completion -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("<answer>4</answer>", 1.0),
        ("It is <answer>5</answer>, no: <answer> 4 </answer>", 1.0),
        ("4", 0.0),
        ("<answer>5</answer>", 0.0),
    ],
)
async def test_the_simple_worker_is_judged_by_the_answer_tag(reply: str, reward: float) -> None:
    rollout = (await play(SimpleRolloutWorker, says(reply))).rollout
    assert (rollout.status, rollout.reward, len(rollout.turns)) == (Status.COMPLETED, reward, 1)
    assert rollout.metrics["llm_calls"] == 1
    assert [item.get("role") for item in rollout.items] == ["user", "assistant"]


async def test_an_item_without_a_prompt_fails_its_own_rollout_and_no_other() -> None:
    client = WorkerClient(SimpleRolloutWorker, "test", [{"task_id": "bad", "ground_truth": "4"}, ITEM])
    specs = plan_rollouts(client.tasks("train"), 2, seed=0, iteration=0)
    policy = ScriptedPolicy(by_turn(says("<answer>4</answer>")))
    rollouts = await collect(specs, policy, client, rollout_config(), SAMPLING)
    assert [rollout.status for rollout in rollouts] == [Status.FAILED] * 2 + [Status.COMPLETED] * 2
    assert {rollout.failure_code for rollout in rollouts[:2]} == {"no_trajectory"}
    assert rollouts[0].reward is None


# -- the client of the policy, and what a worker is told --------------------------------------------------------------


class Passing(ScriptedPolicy):
    """Fails `failures` times, then answers."""

    failures = 1

    async def complete(self, *given: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise EngineFailed("away for a moment")
        return await super().complete(*given)


@pytest.mark.parametrize(("max_retries", "status"), [(0, Status.FAILED), (1, Status.COMPLETED)])
async def test_a_call_that_the_engine_could_not_answer_is_made_again(
    tmp_path: Any, max_retries: int, status: Status
) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text(json.dumps(ITEM))
    config = {"kind": "worker", "train_data": str(file), "max_retries": max_retries}
    client = open_environment(WorkerEnvironment.model_validate(config))
    policy = Passing(by_turn(says("<answer>4</answer>")))
    attempt = await play_rollout(spec_of(client.tasks("train")[0]), policy, client, rollout_config(), SAMPLING)
    assert attempt.rollout.status is status
    assert len(attempt.rollout.turns) == max_retries


async def test_what_a_call_was_asked_for_comes_back_with_its_answer() -> None:
    seen: list[dict[str, Any]] = []

    class Asks(SimpleRolloutWorker):
        async def run_agent(self, task: dict[str, Any]) -> str | None:
            seen.append(await self._llm_client.completion("2+2?", max_tokens=9))
            return await self.put_trajectory(task, seen[0]["response"])

    assert (await play(Asks)).rollout.status is Status.COMPLETED
    assert seen == [{"prompt": "2+2?", "response": "<answer>4</answer>", "finish_reason": "stop", "max_tokens": 9}]


async def test_which_version_drew_which_token_is_on_record() -> None:
    spans = [{"version": 3, "tokens": 1}, {"version": 4, "tokens": 10**6}]

    class Refitted(ScriptedPolicy):
        async def complete(self, *given: Any) -> Any:
            return replace(await super().complete(*given), version_spans=spans)

    client = WorkerClient(SimpleRolloutWorker, "test", [ITEM])
    policy, spec = Refitted(by_turn(says("4"))), spec_of(client.tasks("train")[0])
    attempt = await play_rollout(spec, policy, client, rollout_config(), SAMPLING)
    assert [turn.version_spans for turn in attempt.rollout.turns] == [spans]


@pytest.mark.parametrize("on_policy", [True, False])
async def test_a_worker_is_told_of_validation_and_given_the_items_of_both_splits(on_policy: bool) -> None:
    told: list[Any] = []

    class Looks(SimpleRolloutWorker):
        async def run_agent(self, task: dict[str, Any]) -> str | None:
            told.append((self.is_validate, list(self.dataloader), list(self.validate_dataloader)))
            return await super().run_agent(task)

        def end_validate(self) -> None:
            super().end_validate()
            told.append(self.is_validate)

    held_out = ITEM | {"task_id": "b"}
    client = WorkerClient(Looks, "test", [ITEM], [held_out])
    policy = ScriptedPolicy(by_turn(says("<answer>4</answer>")))
    spec = spec_of(client.tasks("train")[0])
    await play_rollout(spec, policy, client, rollout_config(), SAMPLING, on_policy=on_policy)
    assert told == [(not on_policy, [ITEM], [held_out])] + ([] if on_policy else [False])


# -- result codes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "kind", "code"),
    [
        ("fail", FailureKind.DATA, "worker_failed"),
        (None, FailureKind.DATA, "no_trajectory"),
        ("re-rollout", FailureKind.INFRA, "re_rollout"),
        ("success", FailureKind.DATA, "worker_failed"),
        ("succes", FailureKind.DATA, "worker_failed"),
        (ValueError("x"), FailureKind.DATA, "worker_failed"),
    ],
)
async def test_every_result_without_a_judged_trajectory_is_a_failure_without_a_reward(
    told: Any, kind: FailureKind, code: str
) -> None:
    rollout = (await play(returning(told))).rollout
    assert (rollout.status, rollout.failure_kind, rollout.failure_code, rollout.reward) == (
        Status.FAILED,
        kind,
        code,
        None,
    )


async def test_re_rollout_is_tried_again_and_fail_is_not() -> None:
    tries = {"again": 0, "never": 0}

    class Again(BaseRolloutWorker):
        async def run_agent(self, task: dict[str, Any]) -> str | None:
            tries[task["task_id"]] += 1
            if task["task_id"] == "never":
                return "fail"
            return (
                "re-rollout"
                if tries["again"] < 3
                else await self.put_trajectory(task, "", result=EvaluationRunResult(1.0))
            )

    client = WorkerClient(Again, "test", [{"task_id": "again"}, {"task_id": "never"}])
    specs = plan_rollouts(client.tasks("train"), 1, seed=0, iteration=0)
    rollouts = await collect(specs, ScriptedPolicy(by_turn(says(""))), client, rollout_config(), SAMPLING)
    assert tries == {"again": 3, "never": 1}
    assert [rollout.status for rollout in rollouts] == [Status.COMPLETED, Status.FAILED]


# -- evaluators -----------------------------------------------------------------------------------------------------


async def judged_by(evaluator: Evaluator):
    return await play(lambda llm: SimpleRolloutWorker(llm, evaluator))


@pytest.mark.parametrize(
    "told",
    [ValueError("no"), {"reward": 1.0}, None, 1.0],
)
async def test_an_evaluator_that_gives_no_result_fails_the_rollout(told: Any) -> None:
    rollout = (await judged_by(Says(told))).rollout
    assert (rollout.status, rollout.failure_code, rollout.reward) == (Status.FAILED, "verifier_failed", None)


async def test_as_many_plain_evaluators_judge_at_once_as_rollouts_are_in_flight() -> None:
    """A pool of threads would be smaller than this on any machine, and each would wait for ever for the others."""
    together = 100
    meeting = threading.Barrier(together, timeout=30)

    class Meets(Evaluator):
        def evaluate(self, data: dict[str, Any], evaluation_target: Any) -> EvaluationRunResult:
            meeting.wait()
            return EvaluationRunResult(1.0)

    client = WorkerClient(lambda llm: SimpleRolloutWorker(llm, Meets()), "test", [ITEM])
    specs = plan_rollouts(client.tasks("train"), together, seed=0, iteration=0)
    policy = ScriptedPolicy(by_turn(says("4")))
    rollouts = await collect(specs, policy, client, rollout_config(concurrency=together), SAMPLING)
    assert [rollout.reward for rollout in rollouts] == [1.0] * together


async def test_an_async_evaluator_sees_the_target_and_its_metrics_and_extra_info_arrive() -> None:
    seen = []

    class Slow(Evaluator):
        async def evaluate(self, data: dict[str, Any], evaluation_target: Any) -> EvaluationRunResult:
            seen.append((data["run_id"], evaluation_target))
            return EvaluationRunResult(0.5, "4", {"words": 3.0}, {"why": ["any", object]})

    played = await judged_by(Slow())
    ((run_id, target),) = seen
    assert (run_id, target.final_answer, target.is_truncated) == (0, "<answer>4</answer>", False)
    assert [info["response_tokens"] > 0 for info in target.observation] == [True]
    assert played.rollout.reward == 0.5
    assert played.rollout.metrics == {"llm_calls": 1.0, "words": 3.0}
    assert played.answer is not None
    assert (played.answer["ground_truth"], played.answer["extra_info"]) == ("4", {"why": ["any", object]})


@pytest.mark.parametrize(
    "fields",
    [
        {"reward": 1.5},
        {"reward": -0.1},
        {"reward": float("nan")},
        {"reward": True},
        {"reward": "1"},
        {"metrics": {"a": "b"}},
        {"metrics": {"a": float("inf")}},
        {"metrics": {"a": [1]}},
    ],
)
def test_a_result_out_of_bounds_cannot_be_made(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"reward|metrics"):
        EvaluationRunResult(**fields)


# -- several turns --------------------------------------------------------------------------------------------------


class Adder(AgentRolloutWorker):
    @tool("Add.", a="A number.", b="Another.")
    async def add(self, task: dict[str, Any], a: int, b: int) -> str:
        return str(a + b)


TWO_TURNS = by_turn(calls(("add", {"a": 2, "b": 2}), ("add", "{")), says("<answer>4</answer>"))


async def test_the_agent_worker_calls_tools_and_its_turns_are_one_contiguous_sequence() -> None:
    played = await play(Adder, TWO_TURNS)
    rollout = played.rollout
    assert (rollout.status, rollout.reward) == (Status.COMPLETED, 1.0)
    assert [turn.parent for turn in rollout.turns] == [None, 0]
    outputs = [item["output"] for item in rollout.items if item["type"] == "function_call_output"]
    assert outputs[0] == "4"
    assert "Invalid tool call arguments" in outputs[1]
    assert played.response is not None
    assert [item["type"] for item in played.response["output"]] == ["function_call"] * 2 + [
        "function_call_output"
    ] * 2 + ["message"]
    assert played.response_with_tokens()["output"][-1]["generation_token_ids"] == rollout.turns[1].generation_token_ids  # type: ignore[index]


async def test_a_limit_ends_the_run_as_truncated_and_what_there_is_is_judged() -> None:
    for config, reason in (({"max_turns": 2}, "max_turns"), ({"max_tokens": 300}, "max_tokens")):
        rollout = (await play(Adder, calls(("add", {"a": 2, "b": 2})), **config)).rollout
        assert (rollout.status, rollout.reward, rollout.finish_reason) == (Status.TRUNCATED, 0.0, reason)
    cut = (await play(SimpleRolloutWorker, says("<answer>4</answer>", finish_reason="length"))).rollout
    assert (cut.status, cut.finish_reason, cut.reward) == (Status.TRUNCATED, "length", 1.0)


async def test_a_changed_history_begins_a_new_root_and_an_unchanged_one_continues() -> None:
    class Rewrites(SimpleRolloutWorker):
        async def run_agent(self, task: dict[str, Any]) -> str | None:
            messages = [{"role": "user", "content": "one"}]
            first = await self.llm.generate(messages)
            follow = [*messages, first["message"], {"role": "user", "content": "two"}]
            await self.llm.generate(follow)
            await self.llm.generate([{"role": "user", "content": "ONE"}, *follow[1:]])
            return await self.put_trajectory(task, "<answer>4</answer>")

    rollout = (await play(Rewrites)).rollout
    assert [turn.parent for turn in rollout.turns] == [None, 0, None]
    assert [item.get("content") for item in rollout.items if item.get("role") == "user"] == ["one", "two", "ONE", "two"]


# -- the loss mask --------------------------------------------------------------------------------------------------


class FinalOnly(Adder):
    def get_train_loss_mask(self, infos: list[dict[str, Any]]) -> list[bool]:
        return [not info["tool_calls"] for info in infos]


async def test_a_masked_call_stays_in_the_sequence_and_out_of_the_loss() -> None:
    client = WorkerClient(FinalOnly, "test", [ITEM])
    specs = plan_rollouts(client.tasks("train"), 2, seed=0, iteration=0)
    rollouts = await collect(specs, ScriptedPolicy(TWO_TURNS), client, rollout_config(), SAMPLING)
    assert [turn.trained for turn in rollouts[0].turns] == [False, True]
    valid = validate(rollouts, ValidationConfig(), vocabulary_size=256, policy_version=3)
    row = valid.sequences.to_pylist()[0]
    first, second = rollouts[0].turns
    assert sum(row["loss_mask"]) == len(second.generation_token_ids)
    assert row["loss_mask"][-len(second.generation_token_ids) :] == [1] * len(second.generation_token_ids)
    assert len(row["token_ids"]) > first.prompt_length + len(first.generation_token_ids)


@pytest.mark.parametrize("mask", [[], [True], [1, 0], [True, True, True]])
async def test_a_mask_that_does_not_fit_the_calls_fails_the_rollout(mask: list[Any]) -> None:
    worker = type("Wrong", (Adder,), {"get_train_loss_mask": lambda self, infos: mask})
    rollout = (await play(worker, TWO_TURNS)).rollout
    assert (rollout.status, rollout.failure_code) == (Status.FAILED, "worker_failed")
    assert "2 model calls" in rollout.failure_detail


# -- mock -----------------------------------------------------------------------------------------------------------


def mock_config(tmp_path: Any, **parameters: Any) -> WorkerEnvironment:
    data = tmp_path / "items.jsonl"
    data.write_text("".join(json.dumps({"task_id": str(index), "prompt": "?"}) + "\n" for index in range(20)))
    return WorkerEnvironment(kind="worker", worker="mock", train_data=str(data), parameters=parameters)


async def collected(config: WorkerEnvironment):
    async with open_environment(config) as client:
        specs = plan_rollouts(client.tasks("train"), 2, seed=0, iteration=0)
        return await collect(
            specs, ScriptedPolicy(by_turn(AssertionError("called"))), client, rollout_config(), SAMPLING
        )


async def test_the_mock_worker_rewards_by_a_hash_calls_nothing_and_is_masked(tmp_path: Any) -> None:
    rollouts = await collected(mock_config(tmp_path))
    assert [rollout.reward for rollout in rollouts] == [
        hash_reward(rollout.group_id, rollout.sample) for rollout in rollouts
    ]
    assert 8 < sum(rollout.reward or 0 for rollout in rollouts) < 32
    assert {rollout.status for rollout in rollouts} == {Status.MASKED}


async def test_a_recording_is_played_back_by_group_and_run(tmp_path: Any) -> None:
    client = WorkerClient(Adder, "test", [ITEM | {"task_id": "7"}])
    specs = plan_rollouts(client.tasks("train"), 2, seed=0, iteration=0)
    originals = await collect(specs, ScriptedPolicy(TWO_TURNS), client, rollout_config(), SAMPLING)
    stage = tmp_path / "collect"
    stage.mkdir()
    pq.write_table(rollouts_table(originals), stage / "rollouts-00000.parquet")
    pq.write_table(turns_table(originals), stage / "turns-00000.parquet")
    by_status = {True: Status.COMPLETED, False: Status.MASKED}
    for trainable, status in by_status.items():
        played = await collected(mock_config(tmp_path, recorded=str(stage), trainable=trainable))
        again = [rollout for rollout in played if rollout.group_id == "7"]
        assert [rollout.turns for rollout in again] == [rollout.turns for rollout in originals]
        assert [(rollout.reward, rollout.status, rollout.items) for rollout in again] == [
            (rollout.reward, status, rollout.items) for rollout in originals
        ]
        assert {rollout.failure_code for rollout in played if rollout.group_id != "7"} == {"no_trajectory"}


# -- traces ---------------------------------------------------------------------------------------------------------


def llm_span(
    prompt: list[int], response: list[int], message: str, children: tuple[Any, ...] = (), **train: Any
) -> dict[str, Any]:
    tokens = {
        "prompt_tokens": prompt,
        "response_tokens": response,
        "response_logprobs": [-0.5] * len(response),
        "policy_version": 3,
    }
    return {
        "type": "LLM",
        "inputs": {"messages": [{"role": "user", "content": "go"}]},
        "outputs": {"message": {"role": "assistant", "content": message}, "nexrl_train": tokens | train},
        "children": list(children),
    }


class FakeTracer:
    def __init__(self, spans: list[dict[str, Any]]) -> None:
        self.spans = spans

    def dump_traces(self) -> list[dict[str, Any]]:
        return self.spans


def traced(*spans: dict[str, Any]) -> type[TraceRolloutWorker]:
    class Traced(TraceRolloutWorker):
        evaluator = AnswerTag()

        def make_tracer(self) -> FakeTracer:
            return FakeTracer([{"type": "AGENT", "children": list(spans)}])

        def run_traced(self, query: str, task: dict[str, Any], tracer: Any) -> str:
            return f"<answer>{query[0]}</answer>" if query == "2+2?" else ""

    return Traced


async def test_model_calls_are_found_in_the_tree_in_their_order_and_become_turns() -> None:
    sub_agent = {"type": "TOOL", "children": [llm_span([9], [8], "sub")]}
    rollout = (await play(traced(llm_span([1, 2], [3], "a"), sub_agent, llm_span([1, 2, 3, 4], [5], "b")))).rollout
    assert [(turn.parent, turn.prompt_token_ids, turn.generation_token_ids) for turn in rollout.turns] == [
        (None, [1, 2], [3]),
        (None, [9], [8]),
        (0, [4], [5]),
    ]
    spans = [{"version": 3, "tokens": 1}]
    refitted = (await play(traced(llm_span([1, 2], [3], "a", version_spans=spans)))).rollout
    assert [turn.version_spans for turn in (*rollout.turns, *refitted.turns)] == [None, None, None, spans]
    straight = (await play(traced(llm_span([1, 2], [3], "a"), llm_span([1, 2, 3, 4], [5], "b")))).rollout
    assert [turn.parent for turn in straight.turns] == [None, 0]
    assert straight.status is Status.COMPLETED


@pytest.mark.parametrize(
    ("spans", "code"),
    [
        ((), "no_trajectory"),
        ((llm_span([], [3], "a"),), "worker_failed"),
        ((llm_span([1], [3], "a", response_logprobs=[]),), "worker_failed"),
        ((llm_span([1], [3], "a", policy_version=None),), "worker_failed"),
    ],
)
async def test_a_trace_that_could_not_be_trained_on_fails_the_rollout(spans: Any, code: str) -> None:
    rollout = (await play(traced(*spans))).rollout
    assert (rollout.status, rollout.failure_code) == (Status.FAILED, code)


async def test_two_rollouts_have_a_worker_each() -> None:
    made: list[BaseRolloutWorker] = []

    class Counts(SimpleRolloutWorker):
        def __init__(self, llm: Any, evaluator: Evaluator | None = None) -> None:
            super().__init__(llm, evaluator)
            if llm is not None:
                made.append(self)

    client = WorkerClient(Counts, "test", [ITEM])
    for sample in range(2):
        await run_rollout(
            spec_of(client.tasks("train")[0], sample),
            ScriptedPolicy(by_turn(says("x"))),
            client,
            rollout_config(),
            SAMPLING,
        )
    assert len(made) == 2
    assert made[0].llm is not made[1].llm


@pytest.mark.parametrize(("before", "reward"), [("", 0.0), ("<answer>3</answer><answer> 4 </answer>", 1.0)])
def test_an_answer_that_repeats_the_opening_tag_is_judged_at_once(before: str, reward: float) -> None:
    """16,000 of them took half a minute, with the interpreter's lock held."""

    def judge(count: int) -> None:
        judged = AnswerTag().evaluate({"ground_truth": "4"}, BaseEvaluationTarget(before + "<answer>" * count))
        assert judged.reward == reward

    assert growth(judge, 2000) < 24


def test_made_up_items_and_a_loader_from_outside_are_tasks(tmp_path):
    (tmp_path / "loader.py").write_text(
        "from roundhouse.plugins.nexrl import BaseDataLoader\n"
        "class Split(BaseDataLoader):\n"
        "    def __init__(self, data, is_validate=False):\n"
        "        self.data = data\n"
        "        super().__init__(data, is_validate)\n"
        "    def load(self):\n"
        "        return [{'prompt': f'{word} {self.is_validate}'} for word in self.data.split()]\n"
        "class Other: ...\n"
    )

    def prompts(**keys: str) -> list[list[str]]:
        config = {"kind": "worker", "worker": "mock", "workspace": str(tmp_path), **keys}
        client = open_environment(WorkerEnvironment.model_validate(config))
        return [[row["item"]["prompt"] for row in client.tasks(split)] for split in ("train", "heldout")]

    assert prompts(data_loader="mock", train_data="2") == [["mock prompt 0", "mock prompt 1"], []]
    own = prompts(data_loader="loader.py:Split", train_data="b a", heldout_data="c")
    assert own == [["b False", "a False"], ["c True"]]
    for data_loader, data, told in (
        ("mock", "file.jsonl", "give the number of its items"),
        ("loader.py:Split", "", "holds no rows"),
        ("loader.py:Other", "a", "is not of type BaseDataLoader. Available: BaseDataLoader, Split"),
    ):
        with pytest.raises(ConfigError, match=told):
            prompts(data_loader=data_loader, train_data=data)


def test_items_of_both_files_are_tasks(tmp_path):
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(ITEM | {"task_id": name}) + "\n")
    files = {f"{name}_data": str(tmp_path / f"{name}.jsonl") for name in ("train", "heldout")}
    client = open_environment(WorkerEnvironment.model_validate({"kind": "worker", "worker": "mock", **files}))
    assert [[row["task_id"] for row in client.tasks(split)] for split in ("train", "heldout")] == [
        ["train"],
        ["heldout"],
    ]
