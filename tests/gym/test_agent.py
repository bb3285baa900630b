"""The agent loop on a real environment in process, driven by a scripted policy."""

import asyncio
import json
from typing import Any

import pytest

from roundhouse.environments.base import TaskRow
from roundhouse.generation.protocol import ContextOverflow, EngineRejected, EngineUnreachable
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import LocalEnvironmentClient
from roundhouse.rollout.conversation import Conversation
from roundhouse.trajectories.records import FailureKind, Rollout, Status, derive_seed, digest_tokens
from tests.gym.counter import Counter, counter_row
from tests.gym.playground import SAMPLING, Reply, ScriptedPolicy, by_turn, calls, rollout_config, says, spec_of


async def play(
    *replies: Reply, row: TaskRow | None = None, policy: ScriptedPolicy | None = None, **config: Any
) -> Rollout:
    policy = policy or ScriptedPolicy(by_turn(*replies))
    environment = LocalEnvironmentClient(Counter())
    return await run_rollout(spec_of(row), policy, environment, rollout_config(**config), SAMPLING)


def outputs(rollout: Rollout) -> list[str]:
    return [item["output"] for item in rollout.items if item["type"] == "function_call_output"]


def assert_failed(rollout: Rollout, kind: FailureKind, code: str) -> None:
    assert (rollout.status, rollout.failure_kind, rollout.failure_code) == (Status.FAILED, kind, code)
    assert rollout.reward is None
    assert rollout.reward_components == {}
    assert rollout.finish_reason == ""
    assert rollout.failure_detail


# -- what a rollout records -----------------------------------------------------------------------------------------


async def test_a_rollout_runs_tools_in_order_and_is_judged():
    rollout = await play(
        calls(("add", {"n": 3}), ("add", {"n": 4, "times": 2})), calls(("total", {})), says("It is 11.")
    )
    assert rollout.status is Status.COMPLETED
    assert rollout.finish_reason == "stop"
    assert rollout.reward == pytest.approx(1.1)
    assert rollout.reward_components == {"sum": 1.1, "form": 0.0}
    assert outputs(rollout) == ['{"owner":"t","total":3}', '{"owner":"t","total":11}', "11 für t"]
    assert [item["type"] for item in rollout.items] == [
        "message",
        "function_call",
        "function_call",
        "function_call_output",
        "function_call_output",
        "function_call",
        "function_call_output",
        "message",
    ]
    assert rollout.metrics["agent_tool_calls"] == 3
    assert rollout.metrics["agent_tool_failures"] == 0
    assert rollout.metrics["words"] == 3
    assert "prompt_token_ids" not in json.dumps(rollout.items)


@pytest.mark.parametrize(
    ("params", "first"),
    [
        ({}, "Be brief."),
        ({"instructions": "Be polite."}, "Be polite."),
        ({"input": [{"role": "developer", "content": "Be exact."}, {"role": "user", "content": "Go."}]}, "Be exact."),
    ],
)
async def test_the_system_prompt_stands_first_and_on_record_unless_the_row_has_one(params: dict[str, Any], first: str):
    row, seen = counter_row(), []

    def script(messages: list[dict[str, Any]], seed: int) -> Reply:
        seen.append(messages[0])
        return says("7")

    row["responses_create_params"] |= params
    rollout = await play(row=row, policy=ScriptedPolicy(script), system_prompt="Be brief.")
    assert seen == [{"role": "system", "content": first}]
    again = Conversation(rollout.task, "a replay has the text without the key")
    assert again.messages[0] == seen[0]


async def test_turns_store_only_what_a_prompt_adds_and_rebuild_to_what_the_engine_saw():
    rollout = await play(calls(("add", {"n": 3})), calls(("add", {"n": 4})), says("7"))
    assert [turn.parent for turn in rollout.turns] == [None, 0, 1]
    tokens: list[int] = []
    for turn in rollout.turns:
        prompt = tokens + turn.prompt_token_ids
        assert len(prompt) == turn.prompt_length
        assert digest_tokens(prompt) == turn.prompt_digest
        tokens = prompt + turn.generation_token_ids
    assert len(rollout.turns[2].prompt_token_ids) < rollout.turns[2].prompt_length / 2


async def test_a_prompt_that_does_not_continue_the_tokens_begins_a_new_root():
    policy = ScriptedPolicy(by_turn(calls(("add", {"n": 3})), calls(("add", {"n": 4})), says("7")), breaks_prefix_at=1)
    rollout = await play(policy=policy)
    assert [turn.parent for turn in rollout.turns] == [None, None, 1]
    broken = rollout.turns[1]
    assert len(broken.prompt_token_ids) == broken.prompt_length
    assert digest_tokens(broken.prompt_token_ids) == broken.prompt_digest


async def test_earlier_replies_carry_their_tokens_and_each_turn_its_own_seed():
    seen: list[list[dict[str, Any]]] = []

    def script(messages: list[dict[str, Any]], seed: int) -> Reply:
        seen.append(list(messages))
        return by_turn(calls(("add", {"n": 3})), says("3"))(messages, seed)

    policy = ScriptedPolicy(script)
    rollout = await play(policy=policy)
    reply = seen[1][1]
    assert reply["role"] == "assistant"
    assert reply["generation_token_ids"] == rollout.turns[0].generation_token_ids
    assert len(reply["generation_log_probs"]) == len(reply["generation_token_ids"])
    assert policy.seeds == [derive_seed(5, 0), derive_seed(5, 1)]


async def test_system_and_developer_messages_and_instructions_reach_the_policy_and_the_record():
    row = counter_row()
    row["responses_create_params"]["instructions"] = "Be brief."
    row["responses_create_params"]["input"] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Use tools."}]},
        {"role": "user", "content": "Go."},
    ]
    seen: list[dict[str, Any]] = []
    rollout = await play(row=row, policy=ScriptedPolicy(lambda messages, seed: seen.extend(messages) or says("ok")))
    assert seen[0] == {"role": "system", "content": "Be brief.\n\nUse tools."}
    assert rollout.items[:2] == [{"type": "message", **item} for item in row["responses_create_params"]["input"]]


# -- observations: the rollout goes on ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (("add", "{n: 3"), '{"error":"Invalid tool call arguments: '),
        (("add", ""), '{"error":"Invalid tool call arguments: '),
        (("add", '{"n": NaN}'), '{"error":"Invalid tool call arguments: '),
        (("add", '{"n": ' + "[" * 1000 + "]" * 1000 + "}"), '{"error":"Invalid tool call arguments: they are nested'),
        (("subtract", {"n": 3}), '{"detail":"Not Found"}'),
        (("verify", {}), '{"detail":"Not Found"}'),
        (("fail", {}), '"ValueError(\'no such \\"thing\\"\')"'),
        (
            ("add", {"times": 2}),
            '{"detail":[{"type":"missing","loc":["body","n"],"msg":"Field required","input":{"times":2}}]}',
        ),
        (("add", {"n": "three"}), '{"detail":[{"type":"int_parsing","loc":["body","n"]'),
        (("add", {"n": 3, "m": 4}), '{"detail":[{"type":"extra_forbidden","loc":["body","m"]'),
        (("add", [3]), '{"detail":[{"type":"dict_type","loc":["body"]'),
    ],
)
async def test_a_bad_tool_call_is_shown_to_the_policy_and_the_rollout_goes_on(call: tuple[str, Any], text: str):
    rollout = await play(calls(call), calls(("add", {"n": 5})), says("5"))
    assert rollout.status is Status.COMPLETED
    assert rollout.reward == 0.5
    assert outputs(rollout)[0].startswith(text)
    bad = rollout.metrics["agent_tool_failures"] + rollout.metrics["agent_invalid_tool_calls"]
    assert (rollout.metrics["agent_tool_calls"], bad) == (2, 1)


# -- limits ---------------------------------------------------------------------------------------------------------


async def test_the_turn_limit_truncates_after_the_last_tools_ran_and_is_judged():
    rollout = await play(calls(("add", {"n": 1})), max_turns=3)
    assert (rollout.status, rollout.finish_reason) == (Status.TRUNCATED, "max_turns")
    assert (len(rollout.turns), rollout.reward) == (3, pytest.approx(0.3))


async def test_a_cut_reply_is_returned_to_the_policy_where_the_run_asks_for_it():
    cut = says("and and and", finish_reason="length")
    rollout = await play(cut, calls(("add", {"n": 1})), says("1"), cut_replies="return")
    assert (rollout.status, rollout.finish_reason, rollout.reward) == (Status.COMPLETED, "stop", 0.1)
    assert [turn.finish_reason for turn in rollout.turns] == ["length", "tool_calls", "stop"]
    assert [turn.parent for turn in rollout.turns] == [None, 0, 1]
    assert rollout.items[2]["content"] == "Your last reply was cut off at its limit of tokens."
    assert rollout.metrics["agent_cut_replies"] == 1
    rollout = await play(cut, cut, cut, cut_replies="return", max_turns=2)
    assert (rollout.status, rollout.finish_reason, len(rollout.turns)) == (Status.TRUNCATED, "max_turns", 2)


async def test_a_reply_that_never_ends_truncates_and_is_judged():
    rollout = await play(calls(("add", {"n": 1})), says("and and and", finish_reason="length"))
    assert (rollout.status, rollout.finish_reason) == (Status.TRUNCATED, "length")
    assert rollout.reward == pytest.approx(0.1)
    assert rollout.metrics["status"] == 0, "the verifier sees an incomplete response"


async def test_tool_calls_of_a_cut_reply_are_not_run():
    rollout = await play(calls(("add", {"n": 1}), finish_reason="length"))
    assert (rollout.finish_reason, rollout.reward, outputs(rollout)) == ("length", 0.0, [])


async def test_the_token_limit_truncates_and_lowers_the_limit_of_a_call_to_the_room_left():
    whole = await play(calls(("add", {"n": 1})))
    first = whole.turns[0].prompt_length + len(whole.turns[0].generation_token_ids)
    policy = ScriptedPolicy(by_turn(calls(("add", {"n": 1}))))
    rollout = await play(policy=policy, max_tokens=first + 150)
    assert (rollout.status, rollout.finish_reason) == (Status.TRUNCATED, "max_tokens")
    assert policy.limits[1] == 150
    assert rollout.reward is not None


async def test_a_reply_cut_by_the_room_left_ends_for_the_token_limit():
    rollout = await play(says("and", finish_reason="length"), max_tokens=500)
    assert rollout.finish_reason == "max_tokens"


async def test_context_overflow_truncates_later_and_fails_on_the_first_turn():
    rollout = await play(calls(("add", {"n": 1})), ContextOverflow("too long"))
    assert (rollout.status, rollout.finish_reason) == (Status.TRUNCATED, "max_tokens")
    assert rollout.reward == pytest.approx(0.1)
    assert_failed(await play(ContextOverflow("too long")), FailureKind.DATA, "context_overflow")


# -- failures -------------------------------------------------------------------------------------------------------


async def test_a_tool_that_hangs_fails_the_rollout_at_its_time_limit():
    rollout = await play(calls(("add", {"n": 1})), calls(("hang", {})), tool_timeout_seconds=0.05)
    assert_failed(rollout, FailureKind.INFRA, "tool_timeout")
    assert len(rollout.turns) == 2, "what had happened is kept as evidence"
    assert rollout.seconds < 5


async def test_a_rollout_ends_at_its_time_limit_wherever_it_is():
    rollout = await play(policy=ScriptedPolicy(by_turn(says("late")), seconds=3600), timeout_seconds=0.05)
    assert_failed(rollout, FailureKind.INFRA, "rollout_timeout")


@pytest.mark.parametrize(
    ("row", "kind", "code"),
    [
        ({"verdict": "raises"}, FailureKind.DATA, "verifier_failed"),
        ({"verdict": "nothing"}, FailureKind.DATA, "verifier_failed"),
        ({"verdict": "nan"}, FailureKind.DATA, "bad_reward"),
        ({"verdict": "text"}, FailureKind.DATA, "bad_reward"),
        ({"verdict": "bool"}, FailureKind.DATA, "bad_reward"),
        ({"verdict": "wrong sum"}, FailureKind.DATA, "bad_reward"),
        ({"verdict": "infra"}, FailureKind.INFRA, "sandbox_down"),
        ({"seed": "raises"}, FailureKind.DATA, "seed_failed"),
        ({"seed": "infra"}, FailureKind.INFRA, "sandbox_down"),
    ],
)
async def test_an_environment_that_cannot_judge_gives_a_typed_failure_and_no_reward(row, kind, code):
    assert_failed(await play(says("done"), row=counter_row(**row)), kind, code)


async def test_a_tool_whose_infrastructure_failed_is_no_observation():
    assert_failed(await play(calls(("crash", {})), says("done")), FailureKind.INFRA, "sandbox_down")


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (EngineUnreachable("connection refused"), FailureKind.INFRA, "engine_unreachable"),
        (EngineRejected("bad request"), FailureKind.DATA, "engine_rejected"),
        (KeyError("defect"), FailureKind.DATA, "unexpected_error"),
        (asyncio.CancelledError(), FailureKind.DATA, "unexpected_error"),
    ],
)
async def test_an_engine_that_fails_gives_a_typed_failure(error, kind, code):
    assert_failed(await play(error), kind, code)


@pytest.mark.parametrize("params", [None, {}, {"input": 3}, {"input": [3]}, {"input": "x", "tools": [3]}])
async def test_a_malformed_task_row_is_a_data_failure(params):
    row = {"task_id": "t", "responses_create_params": params}
    assert_failed(await play(says("done"), row=row), FailureKind.DATA, "bad_task_row")


async def test_an_input_that_cannot_be_shown_is_a_data_failure():
    row = {"task_id": "t", "responses_create_params": {"input": [{"type": "computer_call"}]}}
    assert_failed(await play(says("done"), row=row), FailureKind.DATA, "unsupported_item")


NO_CALL = {"role": "assistant", "tool_calls": [{}], "finish_reason": None}


@pytest.mark.parametrize("reply", [says("x", finish_reason="abort"), NO_CALL])
async def test_a_malformed_answer_of_the_engine_is_a_data_failure(reply):
    assert_failed(await play(reply), FailureKind.DATA, "bad_completion")


async def test_the_verifier_can_mask_a_rollout_and_keep_its_reward():
    rollout = await play(calls(("add", {"n": 5})), says("5"), row=counter_row(verdict="mask"))
    assert (rollout.status, rollout.reward, rollout.finish_reason) == (Status.MASKED, 0.5, "stop")


async def test_cancelling_a_rollout_cancels_it():
    task = asyncio.create_task(play(policy=ScriptedPolicy(by_turn(says("late")), seconds=3600)))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# -- what must not loop or lie --------------------------------------------------------------------------------------


async def test_a_reply_of_reasoning_alone_ends_the_rollout_and_is_judged():
    rollout = await play(says("<think>I wonder.</think>"), says("never asked again"))
    assert (rollout.status, len(rollout.turns)) == (Status.COMPLETED, 1)
    assert [item["type"] for item in rollout.items] == ["message", "reasoning"]


async def test_a_history_that_grows_to_the_limit_is_truncated_there():
    whole = await play(calls(("add", {"n": 1})), max_turns=8)
    limit = whole.turns[4].prompt_length + 10
    rollout = await play(calls(("add", {"n": 1})), max_turns=8, max_tokens=limit)
    assert (rollout.status, rollout.finish_reason) == (Status.TRUNCATED, "max_tokens")
    assert len(rollout.turns) < 8
    assert rollout.reward is not None
