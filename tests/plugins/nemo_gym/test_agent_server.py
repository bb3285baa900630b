"""The agent server's routes, over real HTTP, against a real resources server and a scripted model server."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import yaml
from fastapi import FastAPI, Request, Response
from omegaconf import OmegaConf
from pydantic import ValidationError

from roundhouse.plugins.nemo_gym.server_sections import AgentServerConfig
from roundhouse.plugins.nemo_gym.servers.agent import build_app
from roundhouse.plugins.nemo_gym.servers.own_server import application, own_server
from roundhouse.plugins.nemo_gym.servers.resources import build_app as resources_app
from roundhouse.retry import Backoff
from tests.gym.counter import Counter, counter_row
from tests.gym.playground import Script, by_turn, calls, says, serving
from tests.gym.worlds import Mountain, climb_row
from tests.plugins.nemo_gym.models import FakeModelServer, serving_model
from tests.ports import free_port
from tests.waiting import until

TWO_TURNS = by_turn(calls(("add", {"n": 3}), ("add", {"n": 4})), says("It is 7."))
COOKIE = "RoundhouseAgent___agent"


def agent_config(**changes: Any) -> AgentServerConfig:
    tree = {
        "resources_server": {"type": "resources_servers", "name": "counter"},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
        "timeout_seconds": 20,
    }
    return AgentServerConfig.model_validate(tree | changes)


class Stage:
    """The three servers of a rollout."""

    def __init__(self, http: httpx.Client, model: FakeModelServer, environment: Any, resources_url: str) -> None:
        self.http = http
        self.model = model
        self.environment = environment
        self.resources_url = resources_url

    def run(self, row: Any) -> dict[str, Any]:
        reply = self.http.post("/run", json=row)
        assert reply.status_code == 200, reply.text
        return reply.json()


@contextmanager
def stage(
    script: Script = TWO_TURNS, environment: Any = None, app: dict[str, Any] | None = None, **changes: Any
) -> Iterator[Stage]:
    environment = Counter() if environment is None else environment
    with (
        serving(resources_app(environment, "counter")) as resources_url,
        serving_model(script) as (model, model_url),
        serving(build_app(agent_config(**changes), "agent", resources_url, model_url, **(app or {}))) as url,
        httpx.Client(base_url=url, timeout=20) as http,
    ):
        yield Stage(http, model, environment, resources_url)


@pytest.mark.parametrize("key", ["global_aiohttp_connector_limit", "global_aiohttp_connector_limit_per_host"])
@pytest.mark.parametrize(
    ("server", "route", "body"),
    [("a", "run", counter_row()), ("m", "v1/responses", {"input": "q"})],
    ids=["agent", "model"],
)
def test_a_server_of_ours_opens_no_more_connections_than_the_limit(key, server, route, body):
    at_once = [0, 0]

    async def refuse(request: Request) -> Response:
        at_once[0] += 1
        at_once[1] = max(at_once)
        await asyncio.sleep(0.02)
        at_once[0] -= 1
        return Response('"no such row"', 422)

    app = FastAPI()
    for path in ("/seed_session", "/v1/chat/completions"):
        app.add_route(path, refuse, methods=["POST"])
    with serving(app) as url:
        agent = {"resources_server": {"type": "resources_servers", "name": "r"}}
        agent["model_server"] = {"type": "responses_api_models", "name": "m"}
        place = {"host": "127.0.0.1", "port": 1}
        tree = {
            "r": {"resources_servers": {"any": {"url": url, **place}}},
            "m": {"responses_api_models": {"roundhouse_model": {"base_url": f"{url}/v1", **place}}},
            "a": {"responses_api_agents": {"roundhouse_agent": {**agent, **place}}},
            key: 2,
        }
        environ = {"NEMO_GYM_CONFIG_DICT": yaml.safe_dump(tree), "NEMO_GYM_CONFIG_PATH": server}
        with serving(own_server(environ).app) as own, ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: httpx.post(f"{own}/{route}", json=body, timeout=20), range(8)))
    assert at_once[1] == 2


def closed(sessions: list[Any]) -> bool:
    """All were closed, each once. The server closes after it has answered."""
    until(lambda: all(session.closed for session in sessions), "the end of every session")
    return bool(sessions) and all(session.closed == 1 for session in sessions)


# -- /run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["chat", "responses"])
def test_run_plays_a_row_to_the_verifiers_answer(route):
    with stage(model_route=route) as servers:
        answer = servers.run(counter_row("t", note="kept"))
    assert answer["reward"] == pytest.approx(0.7)
    assert answer["reward_components"] == {"sum": pytest.approx(0.7), "form": 0.0}
    assert (answer["task_id"], answer["note"]) == ("t", "kept")
    assert answer["responses_create_params"]["input"] == [{"role": "user", "content": "Add things up."}]
    output = answer["response"]["output"]
    assert [item["type"] for item in output] == [
        "function_call",
        "function_call",
        "function_call_output",
        "function_call_output",
        "message",
    ]
    assert json.loads(output[3]["output"]) == {"owner": "t", "total": 7}
    assert answer["response"]["status"] == "completed"
    assert "_ng_failure_class" not in answer


def test_token_fields_stand_on_the_last_item_of_each_model_call_and_the_next_prompt_begins_with_them():
    with stage() as servers:
        output = servers.run(counter_row())["response"]["output"]
    carrying = [index for index, item in enumerate(output) if "generation_token_ids" in item]
    assert carrying == [1, 4]
    first, second = (output[index] for index in carrying)
    told = first["prompt_token_ids"] + first["generation_token_ids"]
    assert second["prompt_token_ids"][: len(told)] == told
    assert len(second["generation_token_ids"]) == len(second["generation_log_probs"])


PARAMS = (
    "background include input instructions max_output_tokens max_tool_calls metadata model parallel_tool_calls "
    "previous_response_id prompt reasoning service_tier store temperature text tool_choice tools top_logprobs top_p truncation "
    "user stream"
)
RESPONSE = (
    "id created_at error incomplete_details instructions metadata model object output parallel_tool_calls temperature "
    "tool_choice tools top_p background max_output_tokens max_tool_calls previous_response_id prompt reasoning service_tier "
    "status text top_logprobs truncation usage user prompt_cache_key safety_identifier"
)
"""As NeMo Gym writes them, null where nothing is set."""


@pytest.mark.parametrize("row", [counter_row(), counter_row(verdict="raises")], ids=["judged", "failed"])
def test_an_answer_has_every_field_of_nemo_gyms_rows(row):
    with stage() as servers:
        answer = servers.run(row)
    assert set(PARAMS.split()) <= answer["responses_create_params"].keys()
    assert set(RESPONSE.split()) <= answer["response"].keys()
    assert answer["responses_create_params"]["temperature"] is None
    for item in answer["response"]["output"]:
        fields = {"function_call": "id status", "function_call_output": "id status", "message": "id status"}
        assert set(fields[item["type"]].split()) <= item.keys()
        assert "routed_experts" in item or "generation_token_ids" not in item
        assert all("logprobs" in part for part in item.get("content") or [])


def test_the_verifier_does_not_get_the_tokens_and_every_session_is_closed():
    class Watching(Counter):
        async def verify(self, session, row, response):
            assert not any("prompt_token_ids" in item for item in response["output"])
            return await super().verify(session, row, response)

    with stage(environment=Watching()) as servers:
        assert "_ng_failure_class" not in servers.run(counter_row())
        servers.run(counter_row(verdict="raises"))
        assert closed(servers.environment.accounts)


@pytest.mark.parametrize(
    ("row", "code", "terminal"),
    [
        (counter_row(seed="raises"), "seed_failed", True),
        (counter_row(seed="infra"), "environment_unavailable", False),
        (counter_row(verdict="raises"), "verifier_failed", True),
        (counter_row(verdict="infra"), "environment_unavailable", False),
        (counter_row(verdict="nan"), "bad_reward", True),
        ({"task_id": "no params"}, "bad_task_row", True),
        ({"responses_create_params": {"input": [{"type": "nonsense"}]}}, "unsupported_item", True),
        ({"responses_create_params": {"input": 5}}, "bad_task_row", True),
    ],
)
def test_a_row_that_fails_is_answered_200_with_the_marks_of_its_failure(row, code, terminal):
    with stage() as servers:
        answer = servers.run({**row, "_ng_task_index": 4})
        assert servers.run(counter_row())["reward"] == pytest.approx(0.7)
    assert answer["_ng_failure_class"] == code
    assert answer.get("_ng_failure_terminal", False) is terminal
    assert answer["_ng_failure_detail"]
    assert answer["_ng_task_index"] == 4
    assert answer["response"]["output"][0]["role"] == "assistant"


def test_a_dead_model_server_fails_the_row_and_not_the_request(monkeypatch):
    monkeypatch.setattr("roundhouse.plugins.nemo_gym.clients.model.PAUSES", Backoff(0.01))
    app = build_app(agent_config(), "agent", f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}")
    with serving(app) as url:
        reply = httpx.post(f"{url}/run", json=counter_row())
    assert (reply.status_code, reply.json()["_ng_failure_class"]) == (200, "environment_unreachable")
    with stage() as servers:
        servers.model.failures = [(500, '"boom"')]
        assert servers.run(counter_row())["_ng_failure_class"] == "engine_failed"
        assert closed(servers.environment.accounts)


@pytest.mark.parametrize("route", ["chat", "responses"])
def test_a_task_that_does_not_fit_the_context_is_judged_as_nemo_gym_does_it_or_fails_where_that_is_wanted(route):
    """NeMo Gym's servers gave such rows reward 0, ours failed them: 1.000 against 0.909 on the same rows."""
    empty = {"choices": [{"finish_reason": "length", "message": {"content": None}}], "usage": None}
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": ""}]}
    incomplete = {"output": [message], "incomplete_details": {"reason": "max_output_tokens"}, "usage": None}
    full = (200, json.dumps(empty if route == "chat" else incomplete))
    with stage(model_route=route) as servers:
        servers.model.failures = [full, full]
        answer = servers.run(counter_row())
        alone = servers.http.post("/v1/responses", json=counter_row()["responses_create_params"]).json()
        assert closed(servers.environment.accounts)
    assert (answer["reward"], "_ng_failure_class" in answer) == (0.0, False)
    for response in (answer["response"], alone):
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["content"][0]["text"] for item in response["output"]] == [""]
    with stage(model_route=route, first_turn_overflow="failed") as servers:
        servers.model.failures = [full]
        failed = servers.run(counter_row())
    assert (failed["_ng_failure_class"], failed["_ng_failure_terminal"]) == ("context_overflow", True)


def test_a_rollout_that_takes_too_long_is_a_failed_row():
    with stage(timeout_seconds=0.5) as servers:
        servers.model.seconds = 5
        answer = servers.run(counter_row())
    assert answer["_ng_failure_class"] == "rollout_timeout"
    assert "_ng_failure_terminal" not in answer


@pytest.mark.parametrize(
    ("limit", "script", "seconds", "code"),
    [
        ({"model_timeout_seconds": 0.2}, TWO_TURNS, 1.0, "engine_timeout"),
        ({"tool_timeout_seconds": 0.2, "timeout_seconds": 3}, by_turn(calls(("hang", {}))), 0.0, "tool_timeout"),
    ],
    ids=["model", "tool"],
)
def test_a_call_that_takes_too_long_is_a_failed_row(limit, script, seconds, code):
    with stage(script, **limit) as servers:
        servers.model.seconds = seconds
        assert servers.run(counter_row())["_ng_failure_class"] == code


def test_max_tokens_end_a_rollout():
    with stage(max_tokens=200) as servers:
        answer = servers.run(counter_row())
        assert len(servers.model.bodies) == 1
    assert answer["response"]["status"] == "incomplete"


@pytest.mark.parametrize(("route", "path"), [("chat", "/v1/chat/completions"), ("responses", "/v1/responses")])
def test_the_model_server_is_asked_at_the_configured_route(route, path):
    with stage(by_turn(says("0")), model_route=route) as servers:
        servers.run(counter_row())
        assert servers.model.paths == [path]


def foreign_journal(script: Script, **changes: Any) -> list[str]:
    """Requests to a foreign resources server in a rollout, in order."""
    app, journal = FastAPI(), []

    @app.post("/{route}")
    async def any_route(route: str) -> dict[str, Any]:
        journal.append(f"{route} begins")
        await asyncio.sleep(0.05)
        journal.append(f"{route} ends")
        return {"reward": 1.0} if route == "verify" else {}

    with (
        serving(app) as resources_url,
        serving_model(script) as (_, model_url),
        serving(build_app(agent_config(**changes), "agent", resources_url, model_url)) as url,
    ):
        assert httpx.post(f"{url}/run", json=counter_row(), timeout=20).json()["reward"] == 1.0
    return journal


def test_a_rollout_seeds_asks_calls_asks_again_and_verifies():
    """The example of NeMo Gym's architecture: a calculation with one call of a tool."""
    app, journal = FastAPI(), []
    call = {"type": "function_call", "call_id": "c", "name": "calculate", "arguments": '{"expression": "2+2"}'}
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "The answer is 4"}]}

    @app.post("/{route:path}")
    async def any_route(route: str, request: Request) -> Any:
        journal.append(route)
        if route == "v1/responses":
            return {"id": "r", "object": "response", "output": [message if "calculate" in journal else call]}
        if route == "verify":
            output = (await request.json())["response"]["output"]
            assert [item["type"] for item in output] == ["function_call", "function_call_output", "message"]
            assert output[1]["output"] == '"4"', "the body of the reply, as NeMo Gym's agent takes it"
        return {"calculate": "4", "verify": {"reward": 1.0}}.get(route, {})

    with (
        serving(app) as both,
        serving(build_app(agent_config(model_route="responses"), "agent", both, both)) as url,
    ):
        assert httpx.post(f"{url}/run", json=counter_row(), timeout=20).json()["reward"] == 1.0
    assert journal == ["seed_session", "v1/responses", "calculate", "v1/responses", "verify"]


def test_calls_of_one_reply_run_together_where_that_is_configured():
    begins, ends = "add begins", "add ends"
    for parallel, order in ((False, [begins, ends, begins, ends]), (True, [begins, begins, ends, ends])):
        asked = foreign_journal(TWO_TURNS, parallel_tool_calls=parallel)
        assert [each for each in asked if each.startswith("add")] == order


def test_a_foreign_session_is_closed_at_the_configured_route():
    asked = foreign_journal(by_turn(says("0")), close_route="/end_session")
    assert asked[-1] == "end_session ends"


def instance(kind: str, url: str) -> dict[str, Any]:
    host, port = url.removeprefix("http://").split(":")
    return {kind: {"x": {"host": host, "port": int(port)}}}


def test_an_instance_finds_the_servers_that_it_refers_to_and_asks_for_captures_where_it_wants_them():
    with (
        serving(resources_app(Counter(), "counter")) as resources_url,
        serving_model(by_turn(says("0"))) as (model, model_url),
    ):
        servers = {
            "counter": instance("resources_servers", resources_url),
            "policy_model": instance("responses_api_models", model_url),
        }
        config = OmegaConf.create(servers | {"token_id_capture": {"enabled": True}})
        row = {**counter_row(), "_ng_task_index": 2, "_ng_rollout_index": 1}
        for captures in (False, True):
            own = agent_config().model_copy(update={"token_id_capture": captures})
            with serving(application(config, "agent", own)) as url:
                assert httpx.post(f"{url}/run", json=row, timeout=20).json()["reward"] == 0.0
    assert ["training-token-capture" in path for path in model.paths] == [False, True]


@pytest.mark.parametrize("key", ["resources_server", "model_server"])
def test_a_reference_to_a_server_of_another_type_is_refused(key):
    assert agent_config()
    with pytest.raises(ValidationError, match=f"{key}.type is responses_api_agents"):
        agent_config(**{key: {"type": "responses_api_agents", "name": "x"}})


def test_a_row_cannot_bring_a_reward_or_a_failure_mark_along():
    with stage() as servers:
        failed = servers.run({**counter_row(verdict="raises"), "reward": 5.0, "_ng_no_persist": True})
        good = servers.run({**counter_row(), "_ng_failure_class": "x", "error": "y"})
    assert (failed["reward"], "_ng_no_persist" in failed) == (0.0, False)
    assert ("_ng_failure_class" in good, "error" in good) == (False, False)


def test_max_steps_ends_a_rollout_that_would_go_on():
    adds = [calls(("add", {"n": 1}))] * 6
    with stage(by_turn(*adds, says("done")), max_steps=3) as servers:
        answer = servers.run(counter_row())
        assert len(servers.model.bodies) == 3
    assert answer["reward"] == pytest.approx(0.3)


def test_verification_can_be_skipped_for_a_fixed_reward():
    with stage(skip_verification=True, skip_verification_reward=0.25) as servers:
        answer = servers.run(counter_row(verdict="raises"))
        assert (
            servers.http.post("/aggregate_metrics", json={"verify_responses": [answer]}).json()["agent_metrics"] == {}
        )
        assert closed(servers.environment.accounts)
    assert (answer["reward"], answer["verification_skipped"]) == (0.25, True)


@pytest.mark.parametrize(
    ("switches", "path"),
    [
        ({}, "/v1/chat/completions"),
        ({"names_calls": True}, "/ng-rollout/2-1/v1/chat/completions"),
        ({"captures": True}, "/ng-rollout/2-1/training-token-capture/v1/chat/completions"),
    ],
)
def test_model_calls_are_filed_under_the_rollout_where_that_is_switched_on(switches, path):
    with stage(by_turn(says("0")), app=switches) as servers:
        servers.run({**counter_row(), "_ng_task_index": 2, "_ng_rollout_index": 1})
        assert servers.model.paths == [path]


def test_the_model_servers_cookie_stays_with_the_rollout():
    with stage() as servers:
        servers.run(counter_row())
        servers.run(counter_row())
        assert servers.model.cookies == [{}, {"model": "1"}, {}, {"model": "3"}]


def test_a_gymnasium_environment_is_played_by_its_own_protocol():
    with stage(by_turn(says("2")), environment=Mountain(), protocol="gymnasium") as servers:
        answer = servers.run(climb_row(top=3))
        assert (answer["reward"], answer["terminated"], answer["truncated"]) == (pytest.approx(0.4), True, False)
        assert closed(servers.environment.climbs)
        failed = servers.run(climb_row(plan="step raises"))
        assert failed["_ng_failure_class"] == "step_failed"
        refused = servers.http.post("/v1/responses", json={"input": "x"})
    assert refused.status_code == 501


# -- /v1/responses and the rest -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "/ng-rollout/7-0", "/ng-rollout/7-0/training-token-capture"])
def test_responses_plays_the_loop_in_the_session_whose_cookies_it_got(prefix):
    row = counter_row("joined")
    with stage() as servers, httpx.Client(base_url=servers.resources_url) as resources:
        resources.post("/seed_session", json=row)
        seeded = dict(resources.cookies)
        reply = servers.http.post(f"{prefix}/v1/responses", json=row["responses_create_params"], cookies=seeded)
        assert reply.status_code == 200, reply.text
        assert {*seeded, "model", COOKIE} == reply.cookies.keys()
        verified = resources.post("/verify", json={**row, "response": reply.json()})
        assert servers.model.paths[0] == f"{prefix}/v1/chat/completions"
    assert verified.json()["reward"] == pytest.approx(0.7)
    output = reply.json()["output"]
    assert json.loads(output[3]["output"]) == {"owner": "joined", "total": 7}
    assert [index for index, item in enumerate(output) if "generation_token_ids" in item] == [1, 4]


def test_responses_without_a_session_says_so():
    with stage() as servers:
        reply = servers.http.post("/v1/responses", json=counter_row()["responses_create_params"])
    assert (reply.status_code, "session" in reply.json()) == (503, True)


def test_responses_says_when_the_model_server_fails(monkeypatch):
    monkeypatch.setattr("roundhouse.plugins.nemo_gym.clients.model.PAUSES", Backoff(0.01))
    with stage() as servers:
        servers.model.failures = [(503, "busy")] * 3
        reply = servers.http.post("/v1/responses", json={"input": "Add."})
    assert (reply.status_code, "busy" in reply.json()) == (503, True)


def test_every_answer_sends_the_session_cookie_again():
    with stage() as servers:
        for reply in (
            servers.http.get("/"),
            servers.http.get("/nowhere"),
            servers.http.post("/run", content=b"no json"),
            servers.http.post("/run", json=counter_row()),
        ):
            assert COOKIE in reply.headers["set-cookie"]


def test_a_body_that_is_no_row_is_refused_in_fastapis_shape():
    with stage() as servers:
        for body in (b"no json", b"[1]"):
            reply = servers.http.post("/run", content=body)
            assert reply.status_code == 422
            assert reply.json()["detail"][0]["loc"][0] == "body"


def test_statistics_come_from_the_resources_server_and_from_here_when_it_is_gone():
    rows = [{"reward": 1.0, "_ng_task_index": 0}, {"reward": 0.0, "_ng_task_index": 0}]
    with stage() as servers:
        theirs = servers.http.post("/aggregate_metrics", json={"verify_responses": rows}).json()
    app = build_app(agent_config(), "agent", f"http://127.0.0.1:{free_port()}", "http://127.0.0.1:1")
    with serving(app) as url:
        ours = httpx.post(f"{url}/aggregate_metrics", json={"verify_responses": rows}).json()
    assert theirs["agent_metrics"]["mean/reward"] == ours["agent_metrics"]["mean/reward"] == 0.5
