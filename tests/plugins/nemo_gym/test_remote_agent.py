"""Agent servers as environments: requests, answers, and the classification of failures."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml
from fastapi import FastAPI, Request, Response

from roundhouse.config.models import Sampling
from roundhouse.environments.base import TaskRow
from roundhouse.errors import ConfigError
from roundhouse.plugins.nemo_gym.clients.agent import RemoteAgentClient, read_answer
from roundhouse.plugins.nemo_gym.clients.connection import server_url
from roundhouse.plugins.nemo_gym.section import AgentEnvironment
from roundhouse.plugins.nemo_gym.server_sections import AgentServerConfig
from roundhouse.plugins.nemo_gym.servers.agent import build_app as agent_app
from roundhouse.plugins.nemo_gym.servers.resources import build_app as resources_app
from roundhouse.plugins.programs.model_server.app import build_app as model_app
from roundhouse.plugins.programs.model_server.section import ModelServerConfig
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.rollout.protocol import UnknownAgent
from roundhouse.rollout.responses import response_object
from roundhouse.trajectories.records import FailureKind, Rollout, Status, digest_tokens
from tests.gym.collecting import collect
from tests.gym.counter import Counter, counter_row
from tests.gym.playground import SAMPLING, ScriptedPolicy, by_turn, rollout_config, says, serving, spec_of
from tests.plugins.programs.model_server.fake_engine import FakeEngine, call
from tests.ports import free_port

NOBODY = ScriptedPolicy(by_turn(says("the collector's policy is not asked")))


def item(kind: str = "message", **tokens: Any) -> dict[str, Any]:
    if kind == "function_call":
        return {
            "type": kind,
            "call_id": "c",
            "name": "add",
            "arguments": "{}",
            "id": "c",
            "status": "completed",
            **tokens,
        }
    content = [{"type": "output_text", "text": "hi", "annotations": []}]
    return {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content, **tokens}


def tokens(prompt: list[int], generated: list[int]) -> dict[str, Any]:
    return {
        "prompt_token_ids": prompt,
        "generation_token_ids": generated,
        "generation_log_probs": [-0.5] * len(generated),
    }


RESULT = {"type": "function_call_output", "call_id": "c", "output": "3"}
TWO_CALLS = [item("function_call", **tokens([1, 2], [3])), RESULT, item(**tokens([1, 2, 3, 4], [5, 6]))]


def answered(output: list[dict[str, Any]] = TWO_CALLS, finish: str = "stop", **fields: Any) -> dict[str, Any]:
    response = response_object("r", output, model="m", created_at=0.0, finish_reason=finish)
    return {"responses_create_params": {"input": "hi"}, "response": response, "reward": 1.0, **fields}


def server(answer: Any, journal: list[dict[str, Any]], status: int = 200) -> FastAPI:
    """An agent server of the contract that ends every rollout with `answer`, a function of the row."""
    app = FastAPI()

    @app.post("/run")
    async def run(request: Request) -> Response:
        row = await request.json()
        journal.append(row)
        told = answer(row) if callable(answer) else answer
        return Response(told if isinstance(told, str) else json.dumps(told), status)

    return app


async def play(
    answer: Any, row: TaskRow | None = None, *, status: int = 200, sampling: Sampling = SAMPLING, **options: Any
) -> tuple[Rollout, dict[str, Any]]:
    journal: list[dict[str, Any]] = []
    with serving(server(answer, journal, status)) as url:
        async with RemoteAgentClient(url, agent="solver") as client:
            rollout = await run_rollout(
                spec_of(row, seed=17), NOBODY, client, rollout_config(), sampling, **({"policy_version": 4} | options)
            )
    return rollout, journal[0] if journal else {}


# -- what is sent ---------------------------------------------------------------------------------------------------


async def test_the_row_is_sent_with_its_names_the_runs_sampling_and_the_rollouts_seed():
    row = counter_row("odd id/#2", expected=3)
    row["responses_create_params"] |= {"max_output_tokens": 50, "metadata": {"extra_body": '{"min_p": 0.1}', "x": "y"}}
    _, sent = await play(answered(), row, sampling=Sampling(temperature=0.7, top_k=5, max_new_tokens=64))
    assert sent["expected"] == 3
    assert sent["agent_ref"] == {"type": "responses_api_agents", "name": "solver"}
    assert isinstance(sent["_ng_task_index"], int)
    assert sent["_ng_rollout_index"] == 0
    assert sent["_ng_rollout_id"].startswith("r-odd-id-2-0-")
    params = sent["responses_create_params"]
    assert (params["temperature"], params["top_p"], params["max_output_tokens"]) == (0.7, 1.0, 50)
    assert params["metadata"]["x"] == "y"
    assert json.loads(params["metadata"]["extra_body"]) == {"min_p": 0.1, "seed": 17, "top_k": 5}
    assert row["responses_create_params"]["metadata"] == {"extra_body": '{"min_p": 0.1}', "x": "y"}, "the row stays"


async def test_each_attempt_has_a_name_of_its_own():
    _, first = await play(answered(), counter_row(agent_ref={"name": "solver"}))
    _, second = await play(answered())
    assert first["_ng_rollout_id"] != second["_ng_rollout_id"]
    assert first["agent_ref"] == {"name": "solver"}


async def test_a_row_for_another_agent_is_never_posted():
    rollout, sent = await play(answered(), counter_row(agent_ref={"name": "other"}))
    assert (rollout.failure_code, rollout.reward, sent) == ("bad_task_row", None, {})


@pytest.mark.parametrize(("agent", "names"), [("solver", ["solver", "other"]), (None, ["solver", "other"])])
def test_rows_of_several_agents_are_refused_before_anything_is_started(tmp_path, agent, names):
    """NeMo Gym's blended data sets have such rows; a run once posted them all to one server, which answered with rewards."""
    rows = tmp_path / "rows.jsonl"
    told = [counter_row(f"t{index}", agent_ref={"name": name}) for index, name in enumerate(names)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in told))
    with pytest.raises(ConfigError, match=r"'t1' is for the agent 'other'.*environment\.agent"):
        open_environment(AgentEnvironment(kind="agent", url="http://h:1", agent=agent, train_tasks=str(rows)))
    rows.write_text(json.dumps(told[0]) + "\n")
    assert open_environment(AgentEnvironment(kind="agent", url="http://h:1", agent=agent, train_tasks=str(rows)))


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.1}, {"metadata": {"extra_body": "[1]"}}, {"metadata": {"extra_body": "{"}}, {"input": 3}],
)
async def test_a_row_that_cannot_be_sent_is_a_data_failure_before_anything_is_sent(params: dict[str, Any]):
    row = counter_row()
    row["responses_create_params"] |= params
    rollout, sent = await play(answered(), row)
    assert (rollout.failure_kind, rollout.failure_code, sent) == (FailureKind.DATA, "bad_task_row", {})


# -- what is read ---------------------------------------------------------------------------------------------------


async def test_turns_come_from_the_items_tokens_and_the_version_from_the_refit():
    rollout, _ = await play(answered(solved=True, accuracy=0.5, note="x", reward_components={"a": 1.0}))
    assert (rollout.status, rollout.reward, rollout.reward_components) == (Status.COMPLETED, 1.0, {"a": 1.0})
    assert rollout.metrics == {"agent_tool_calls": 1.0, "solved": 1.0, "accuracy": 0.5}
    assert [turn.parent for turn in rollout.turns] == [None, 0]
    assert rollout.turns[1].prompt_token_ids == [4]
    assert rollout.turns[1].prompt_digest == digest_tokens([1, 2, 3, 4])
    assert [turn.finish_reason for turn in rollout.turns] == ["tool_calls", "stop"]
    assert {turn.policy_version for turn in rollout.turns} == {4}
    assert [entry["type"] for entry in rollout.items] == ["message", "function_call", "function_call_output", "message"]
    assert "token_ids" not in json.dumps(rollout.items)


async def test_a_prompt_that_does_not_continue_is_a_root_for_validation_to_judge():
    broken = [item(**tokens([1, 2], [3])), item(**tokens([9, 9, 9], [5]))]
    rollout, _ = await play(answered(broken))
    assert [(turn.parent, turn.prompt_token_ids) for turn in rollout.turns] == [(None, [1, 2]), (None, [9, 9, 9])]


@pytest.mark.parametrize(
    ("fields", "status", "finish"),
    [
        ({"finish": "length"}, Status.TRUNCATED, "length"),
        ({"truncated": True}, Status.TRUNCATED, "environment"),
        ({"output": TWO_CALLS[:2]}, Status.TRUNCATED, "max_turns"),
        ({"output": TWO_CALLS[:2], "terminated": True}, Status.COMPLETED, "stop"),
        ({"mask_sample": True}, Status.MASKED, "stop"),
        ({"instance_config": {"mask_sample": True}}, Status.MASKED, "stop"),
    ],
)
async def test_what_ended_the_rollout_is_read_off_the_answer(fields: dict[str, Any], status: Status, finish: str):
    rollout, _ = await play(answered(**fields))
    assert (rollout.status, rollout.finish_reason, rollout.reward) == (status, finish, 1.0)


@pytest.mark.parametrize(
    ("answer", "status", "kind", "code"),
    [
        (answered(_ng_failure_class="remote_agent_error", error="boom"), 200, FailureKind.INFRA, "agent_failed"),
        (answered(_ng_no_persist=True), 200, FailureKind.INFRA, "agent_failed"),
        (answered(_ng_failure_class="x", _ng_failure_terminal=True), 200, FailureKind.DATA, "agent_gave_up"),
        (
            answered(_ng_failure_class="judge_failed", _ng_failure_judge_error="busy"),
            200,
            FailureKind.INFRA,
            "judge_failed",
        ),
        ('"repr of an error"', 500, FailureKind.INFRA, "agent_unavailable"),
        ("{}", 429, FailureKind.INFRA, "agent_unavailable"),
        ("{}", 408, FailureKind.INFRA, "agent_unavailable"),
        ('{"detail":[]}', 422, FailureKind.DATA, "agent_gave_up"),
        ("{}", 307, FailureKind.DATA, "agent_gave_up"),
        ("no json", 200, FailureKind.DATA, "bad_agent_answer"),
        ("[]", 200, FailureKind.DATA, "bad_agent_answer"),
        ({"reward": 1.0}, 200, FailureKind.DATA, "bad_agent_answer"),
        ('{"reward": 0.0, "reward": 1.0, "response": {"output": []}}', 200, FailureKind.DATA, "bad_agent_answer"),
        (answered(mask_sample="false"), 200, FailureKind.DATA, "verifier_failed"),
        (answered(instance_config={"mask_sample": "true"}), 200, FailureKind.DATA, "verifier_failed"),
        (answered(reward=None), 200, FailureKind.DATA, "bad_reward"),
        (answered([]), 200, FailureKind.DATA, "no_trainable_tokens"),
        (answered([item()]), 200, FailureKind.DATA, "no_trainable_tokens"),
        (answered([3]), 200, FailureKind.DATA, "bad_agent_answer"),
        (answered([item(generation_token_ids=[1])]), 200, FailureKind.DATA, "bad_agent_answer"),
        (
            answered([item(**tokens([1], [2]) | {"generation_log_probs": [None]})]),
            200,
            FailureKind.DATA,
            "bad_agent_answer",
        ),
        (answered([item(**tokens(["x"], [2]))]), 200, FailureKind.DATA, "bad_agent_answer"),  # type: ignore[list-item]
    ],
)
async def test_every_failure_has_a_kind_and_no_reward(answer: Any, status: int, kind: FailureKind, code: str):
    rollout, _ = await play(answer, status=status)
    assert (rollout.status, rollout.failure_kind, rollout.failure_code) == (Status.FAILED, kind, code)
    assert rollout.reward is None


async def test_an_evaluation_needs_no_tokens():
    rollout, _ = await play(answered([item()]), on_policy=False)
    assert (rollout.status, rollout.reward, rollout.turns) == (Status.COMPLETED, 1.0, [])


async def test_without_a_policy_version_nothing_is_trained_on():
    rollout, _ = await play(answered(), policy_version=None)
    assert (rollout.failure_code, "policy version" in rollout.failure_detail) == ("no_trainable_tokens", True)


async def test_an_agent_server_that_is_not_there_is_tried_again():
    specs = plan_rollouts([counter_row()], 1, seed=1, iteration=0)
    async with RemoteAgentClient(f"http://127.0.0.1:{free_port()}") as client:
        (rollout,) = await collect(specs, NOBODY, client, rollout_config(), SAMPLING, policy_version=4)
    assert (rollout.failure_code, rollout.attempt) == ("environment_unreachable", 3)


async def test_one_poisoned_row_costs_no_other():
    def answer(row: dict[str, Any]) -> Any:
        return "broken" if row["task_id"] == "t3" else answered()

    specs = plan_rollouts([counter_row(f"t{index}") for index in range(8)], 2, seed=1, iteration=0)
    with serving(server(answer, [])) as url:
        async with RemoteAgentClient(url) as client:
            rollouts = await collect(specs, NOBODY, client, rollout_config(), SAMPLING, policy_version=4)
    assert [rollout.group_id for rollout in rollouts if rollout.status is Status.FAILED] == ["t3", "t3"]


def test_numbers_of_the_row_and_of_the_wire_are_no_metrics():
    read = read_answer(answered(_ng_task_index=3, level=2, score=7), counter_row(level=2))
    assert read.verdict.metrics == {"score": 7.0}


# -- where it is ----------------------------------------------------------------------------------------------------


def head(entries: Callable[[], dict[str, Any]], token: str | None = None) -> FastAPI:
    app = FastAPI()

    @app.get("/global_config_dict_yaml")
    async def config(request: Request) -> Any:
        if token is not None and request.headers.get("authorization") != f"Bearer {token}":
            return Response("no token", 401)
        return yaml.safe_dump(entries())

    return app


def entry(url: str) -> dict[str, Any]:
    host, port = url.removeprefix("http://").split(":")
    return {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py", "host": host, "port": "${the_port}"}}} | {
        "unused": port
    }


async def test_an_agent_is_looked_up_by_name_and_again_when_it_moved():
    answers = answered()
    with serving(server(answers, [])) as first, serving(server(answers, [])) as second:
        ports = iter([free_port(), int(first.rsplit(":", 1)[1]), int(second.rsplit(":", 1)[1])])
        told: list[int] = []

        def entries() -> dict[str, Any]:
            told.append(next(ports))
            return {"solver": entry(first), "the_port": told[-1]}

        with serving(head(entries)) as head_url:
            async with RemoteAgentClient(head_server=head_url, agent="solver") as client:
                specs = plan_rollouts([counter_row(f"t{index}") for index in range(3)], 1, seed=1, iteration=0)
                rollouts = await collect(
                    specs, NOBODY, client, rollout_config(concurrency=1), SAMPLING, policy_version=4
                )
    assert {rollout.status for rollout in rollouts} == {Status.COMPLETED}
    assert rollouts[0].attempt == 2, "the first address was stale"
    assert len(told) == 2


@pytest.mark.parametrize("key", ["head_token_variable", "head_token_file"])
async def test_an_agent_is_looked_up_as_the_configuration_says(key: str, tmp_path, monkeypatch):
    monkeypatch.setenv("HEAD_TOKEN", "sesame")
    token, rows = tmp_path / "token", tmp_path / "rows.jsonl"
    token.write_text("sesame\n")
    rows.write_text(json.dumps(counter_row("held out")) + "\n")
    source = {"head_token_variable": "HEAD_TOKEN", "head_token_file": str(token)}[key]
    with serving(server(answered(), [])) as url:
        port = int(url.rsplit(":", 1)[1])
        with serving(head(lambda: {"solver": entry(url), "the_port": port}, "sesame")) as head_url:
            config = AgentEnvironment.model_validate(
                {"kind": "agent", "head_server": head_url, "agent": "solver", key: source}
                | {"train_tasks": str(rows), "heldout_tasks": str(rows)}
            )
            async with open_environment(config) as client:
                specs = plan_rollouts(client.tasks("heldout"), 1, seed=1, iteration=0)
                rollouts = await collect(specs, NOBODY, client, rollout_config(), SAMPLING, policy_version=4)
    assert [rollout.failure_detail for rollout in rollouts] == [""]


def agent_at(**address: Any) -> dict[str, Any]:
    """A head server's configuration with one agent."""
    return {"solver": {"responses_api_agents": {"x": address}}}


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        (
            {"solver": {"resources_servers": {"x": {}}}, "other": {"responses_api_agents": {"x": {}}}},
            "It knows: other.",
        ),
        (None, "It knows: none."),
        ({"solver": {"responses_api_agents": {"x": {"host": "h"}}}}, "no host and port yet"),
        ({"solver": {"responses_api_agents": {"x": {"host": "h", "port": "${gone}"}}}}, "has no gone"),
        ({"solver": {"responses_api_agents": {"x": None}}}, "It knows: none."),
        (agent_at(url="http://h/${oc.env:SECRET_CANARY}"), "Only references such as"),
        (agent_at(host="${oc.env:SECRET_CANARY}", port=1), "Only references such as"),
        (agent_at(host="h", port="${oc.decode:'1'}"), "Only references such as"),
        (agent_at(url="${a}") | {"a": "${oc.env:${b}}", "b": "SECRET_CANARY"}, "Only references such as"),
        (agent_at(url="${a}") | {"a": "${a}"}, "more than 20 references"),
        (agent_at(url="${a}") | {"a": ["http://h"]}, "is a list"),
        (agent_at(url="file:///etc/passwd"), "Give an http"),
        (agent_at(url="http://user@h:1"), "Give an http"),
        (agent_at(host="h/x?", port=1), "Give the name of a host"),
    ],
)
def test_an_agent_that_cannot_be_found_is_named(tree: Any, told: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_CANARY", "hunter2")
    with pytest.raises(UnknownAgent) as refused:
        server_url(tree, "solver", "http://head:11000")
    assert told in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_the_parts_of_an_address_may_refer_to_each_other() -> None:
    tree = agent_at(url="http://${place.host}:${place.port}/") | {"place": {"host": "${name}", "port": 8}, "name": "h"}
    assert server_url(tree, "solver", "http://head:11000") == "http://h:8"
    assert server_url(agent_at(host="::1", port=8), "solver", "http://head:11000") == "http://[::1]:8"


def test_an_agent_bound_to_all_addresses_is_reached_at_the_heads():
    tree = {"solver": {"responses_api_agents": {"x": {"host": "0.0.0.0", "port": 8}}}}
    assert server_url(tree, "solver", "http://head:11000") == "http://head:8"


def test_a_configuration_that_cannot_work_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"set environment\.model_server"):
        AgentEnvironment(kind="agent", url="http://h:1", tokens="captured", train_tasks="x")
    with pytest.raises(ValueError, match="head_server and agent"):
        AgentEnvironment(kind="agent", head_server="http://h:1", train_tasks="x")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_environment(AgentEnvironment(kind="agent", url="http://h:1", train_tasks=str(tmp_path / "none")))


# -- all of our servers together ------------------------------------------------------------------------------------


@contextmanager
def our_servers(engine: FakeEngine, captures: bool, **model_fields: Any) -> Iterator[tuple[str, str, Counter]]:
    """Agent, resources and model server; the agent's URL and the model server's."""
    counter = Counter()
    config = AgentServerConfig.model_validate(
        {
            "resources_server": {"type": "resources_servers", "name": "counter"},
            "model_server": {"type": "responses_api_models", "name": "policy_model"},
        }
    )
    with (
        serving(engine) as engine_url,
        serving(resources_app(counter, "counter")) as resources,
        serving(model_app(ModelServerConfig(base_url=[engine_url], **model_fields))) as model,
        serving(agent_app(config, "agent", resources, model, captures=captures)) as agent,
    ):
        yield agent, model, counter


def two_turns(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": "It is 3."}
    return {"role": "assistant", "content": None, "tool_calls": [call()]}


@pytest.mark.parametrize("source", ["items", "captured"])
async def test_a_rollout_through_agent_model_and_resources_server_is_on_policy(source: str, tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(json.dumps(counter_row(f"t{index}")) for index in range(4)))
    with our_servers(FakeEngine(two_turns), captures=source == "captured") as (agent, model, counter):
        config = AgentEnvironment(kind="agent", url=agent, tokens=source, model_server=model, train_tasks=str(tasks))
        async with open_environment(config) as client:
            specs = plan_rollouts(client.tasks("train"), 2, seed=1, iteration=0)
            rollouts = await collect(specs, NOBODY, client, rollout_config(), SAMPLING, policy_version=3)
    assert {rollout.failure_detail for rollout in rollouts} == {""}
    assert {(rollout.status, rollout.reward) for rollout in rollouts} == {(Status.COMPLETED, 0.3)}
    for rollout in rollouts:
        assert [turn.parent for turn in rollout.turns] == [None, 0]
        assert {turn.policy_version for turn in rollout.turns} == {3}
        first, second = rollout.turns
        whole = first.prompt_token_ids + first.generation_token_ids + second.prompt_token_ids
        assert (len(whole), digest_tokens(whole)) == (second.prompt_length, second.prompt_digest)
    assert len(counter.accounts) == 8


@pytest.mark.parametrize("key", ["model_server_token_variable", "model_server_token_file"])
async def test_records_that_want_a_token_are_read_with_the_configured_one(key: str, tmp_path, monkeypatch):
    monkeypatch.setenv("CAPTURES_TOKEN", "sesame")
    token, rows = tmp_path / "token", tmp_path / "rows.jsonl"
    token.write_text("sesame\n")
    rows.write_text(json.dumps(counter_row()) + "\n")
    source = {"model_server_token_variable": "CAPTURES_TOKEN", "model_server_token_file": str(token)}[key]
    with our_servers(FakeEngine(two_turns), captures=True, capture_token="sesame") as (agent, model, _):
        tree = {"kind": "agent", "url": agent, "tokens": "captured", "model_server": model, "train_tasks": str(rows)}
        async with open_environment(AgentEnvironment.model_validate(tree | {key: source})) as client:
            rollout = await run_rollout(spec_of(), NOBODY, client, rollout_config(), SAMPLING, policy_version=3)
    assert (rollout.failure_detail, len(rollout.turns)) == ("", 2)


async def test_calls_whose_order_is_ambiguous_are_masked_with_the_reason():
    class FakeTwins(RemoteAgentClient):
        """An agent that continued what two of its calls end in, one of which generated more of it."""

        async def captured_calls(self, rollout_name: str) -> dict[str, Any]:
            made = [([1, 2], [3, 4]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6])]
            calls = [
                {"call": number, **tokens(*each), "policy_version": 4, "finish_reason": "stop"}
                for number, each in enumerate(made)
            ]
            return {"calls": calls, "complete": True}

    with serving(server(answered([item()]), [])) as url:
        async with FakeTwins(url, model_server=url) as client:
            rollout = await run_rollout(spec_of(), NOBODY, client, rollout_config(), SAMPLING, policy_version=4)
            evaluated = await run_rollout(spec_of(), NOBODY, client, rollout_config(), SAMPLING, on_policy=False)
    assert (rollout.status, rollout.reward) == (Status.MASKED, 1.0)
    assert rollout.failure_code == "token_capture_equal_parents"
    assert rollout.failure_detail
    assert rollout.metrics["token_capture_masked"] == 1.0
    assert evaluated.status is Status.COMPLETED


async def test_an_agent_whose_calls_nobody_recorded_fails_by_name():
    with our_servers(FakeEngine(two_turns), captures=False) as (agent, model, _):
        async with RemoteAgentClient(agent, model_server=model) as client:
            rollout = await run_rollout(spec_of(), NOBODY, client, rollout_config(), SAMPLING, policy_version=3)
    assert (rollout.failure_kind, rollout.failure_code) == (FailureKind.DATA, "no_trainable_tokens")
    assert "training-token-capture" in rollout.failure_detail
