"""An agent of NexAU is played from its own file, or the key of the file that is not played is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from roundhouse.config.consent import unnamed_code
from roundhouse.config.loading import parse_config
from roundhouse.environments.operations import fields_of
from roundhouse.errors import ConfigError
from roundhouse.plugins.nexrl import EvaluationRunResult, Evaluator
from roundhouse.plugins.nexrl.section import WorkerEnvironment
from roundhouse.rollout.agents import play_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.trajectories.records import Rollout, Status
from tests.gym.playground import SAMPLING, ScriptedPolicy, by_turn, calls, rollout_config, says, spec_of, turns_of

AGENT: dict[str, Any] = {
    "type": "agent",
    "name": "deep_research_agent",
    "max_context_tokens": 20000,
    "max_iterations": 3,
    "system_prompt": "Date: {{date}}. Search, then answer.",
    "system_prompt_type": "string",
    "tool_call_mode": "openai",
    "llm_config": {
        "temperature": 1.0,
        "max_tokens": 700,
        "api_type": "openai_chat_completion",
        "logprobs": True,
        "extra_body": {"train_mode": True, "skip_special_tokens": False},
    },
    "tools": [
        {
            "name": "web_search",
            "yaml_path": "./tools/WebSearch.yaml",
            "binding": "nexau_test_tool:web_search",
            "extra_kwargs": {"site": "wiki"},
        },
        {"name": "submit", "yaml_path": "./tools/WebSearch.yaml", "binding": "nexau_test_tool:submit"},
    ],
    "stop_tools": ["submit"],
    "tracers": [{"import": "nexau.archs.tracer.adapters.in_memory:InMemoryTracer"}],
}
SEARCH = {
    "type": "tool",
    "name": "WebSearch",
    "description": "Search the web.",
    "skill_description": "How to search.",
    "input_schema": {
        "type": "object",
        "properties": {"query": {"type": "string"}, "num_results": {"type": "integer"}},
        "required": ["query"],
        "additionalProperties": False,
        "$schema": "http://json-schema.org/draft-07/schema#",
    },
}
TOOLS = """
def web_search(query, num_results=10, site=""):
    if query == "nothing":
        raise LookupError("no such page")
    return {"found": f"{query} on {site}", "results": num_results}

async def submit(query):
    return query.upper()

def picky(query, agent_state):
    return query
"""


class Judge(Evaluator):
    """Writes the target of its newest call to the file that the item names."""

    def evaluate(self, data: dict[str, Any], evaluation_target: Any) -> EvaluationRunResult:
        Path(data["seen"]).write_text(json.dumps(fields_of(evaluation_target)))
        return EvaluationRunResult(reward=float(evaluation_target.final_answer == data["ground_truth"]))


def written(directory: Path, **changes: Any) -> Path:
    (directory / "tools").mkdir(exist_ok=True)
    (directory / "nexau_test_tool.py").write_text(TOOLS)
    (directory / "tools" / "WebSearch.yaml").write_text(yaml.safe_dump(SEARCH))
    tree = {name: value for name, value in (AGENT | changes).items() if value is not None}
    (directory / "agent_config.yaml").write_text(yaml.safe_dump(tree))
    item = {
        "prompt": "Capital of France?",
        "ground_truth": "Paris",
        "date": "2026-11-23",
        "seen": str(directory / "seen.json"),
    }
    (directory / "items.jsonl").write_text(json.dumps(item) + "\n")
    return directory


def environment(directory: Path, **parameters: Any) -> WorkerEnvironment:
    own = {"nexau_agent_config_path": "agent_config.yaml", "nexau_agent_workspace": str(directory)}
    return WorkerEnvironment(
        kind="worker",
        worker="nexau",
        evaluator=f"{__name__}:Judge",
        train_data=str(directory / "items.jsonl"),
        parameters=own | parameters,
    )


async def play(directory: Path, script: Any, **parameters: Any) -> tuple[Rollout, ScriptedPolicy]:
    policy = ScriptedPolicy(script)
    async with open_environment(environment(directory, **parameters)) as client:
        attempt = await play_rollout(
            spec_of(client.tasks("train")[0]), policy, client, rollout_config(max_turns=50), SAMPLING
        )
    return attempt.rollout, policy


def target(directory: Path) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads((directory / "seen.json").read_text())
    return seen


def observation(directory: Path) -> list[dict[str, Any]]:
    [root] = target(directory)["observation"]
    assert (root["type"], root["name"]) == ("AGENT", "deep_research_agent")
    return root["children"]


async def test_prompt_tools_and_trace_are_those_of_the_file(tmp_path: Path) -> None:
    def script(messages: list[dict[str, Any]], seed: int) -> Any:
        steps = [
            calls(("web_search", {"query": "France"})),
            calls(("web_search", {"num_results": 3}), ("web_search", {"query": "nothing"}), ("guess", {})),
            says("Paris"),
        ]
        return steps[turns_of(messages)]

    rollout, _ = await play(written(tmp_path), script, task_name="search")
    assert (rollout.status, rollout.reward, len(rollout.turns)) == (Status.COMPLETED, 1.0, 3)
    spans = observation(tmp_path)
    assert [span["type"] for span in spans] == ["LLM", "TOOL", "LLM", "TOOL", "TOOL", "TOOL", "LLM"]
    assert target(tmp_path)["observation"][0]["task_name"] == "search"
    first = spans[0]["inputs"]
    assert first["messages"] == [
        {"role": "system", "content": "Date: 2026-11-23. Search, then answer."},
        {"role": "user", "content": "Capital of France?"},
    ]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["web_search", "submit"]
    assert first["tools"][0]["function"]["parameters"] == SEARCH["input_schema"]
    assert json.loads(spans[1]["outputs"]) == {"found": "France on wiki", "results": 10}
    missing, failed, unknown = (spans[place]["outputs"] for place in (3, 4, 5))
    assert "'query' is a required property" in missing
    assert "no such page" in failed
    assert unknown == "Tool 'guess' not found"
    tokens = spans[0]["outputs"]["nexrl_train"]
    assert rollout.turns[0].generation_token_ids == tokens["response_tokens"]
    assert len(tokens["response_logprobs"]) == len(tokens["response_tokens"])


OWN_WORKER = """
from nexrl.rollout_worker import BaseNexAURolloutWorker

class MyNexAUWorker(BaseNexAURolloutWorker):
    def __init__(self, config):
        super().__init__(config)
        self.prefix = config.prefix

    def format_task_query(self, data_item):
        return self.prefix + data_item["prompt"]
"""


async def test_a_subclass_is_made_with_the_config_and_the_evaluator_is_a_parameter(tmp_path: Path) -> None:
    """Its constructor was refused, and so was evaluator_module_path."""
    (written(tmp_path) / "my_worker.py").write_text(OWN_WORKER)
    config = WorkerEnvironment(
        kind="worker",
        worker="my_worker.py:MyNexAUWorker",
        workspace=str(tmp_path),
        train_data=str(tmp_path / "items.jsonl"),
        parameters={
            "nexau_agent_config_path": "agent_config.yaml",
            "nexau_agent_workspace": str(tmp_path),
            "evaluator_module_path": f"{__name__}:Judge",
            "task_name": "quiz",
            "prefix": "Q: ",
        },
    )
    policy = ScriptedPolicy(by_turn(says("Paris")))
    async with open_environment(config) as client:
        row = spec_of(client.tasks("train")[0])
        attempt = await play_rollout(row, policy, client, rollout_config(max_turns=50), SAMPLING)
    assert (attempt.rollout.status, attempt.rollout.reward) == (Status.COMPLETED, 1.0)
    assert [item["content"] for item in attempt.rollout.items if item.get("role") == "user"] == [
        "Q: Capital of France?"
    ]
    assert target(tmp_path)["observation"][0]["task_name"] == "quiz"
    with pytest.raises(ConfigError, match="nexau_agent_config_path is unset"):
        open_environment(config.model_copy(update={"parameters": {"prefix": ""}}))


READER = {
    "name": "page_reader",
    "description": "Read a page.",
    "max_iterations": 1,
    "system_prompt": "Read on {{date}}.",
}


async def test_a_sub_agent_and_a_skill_are_tools_and_all_calls_are_turns(tmp_path: Path) -> None:
    def script(messages: list[dict[str, Any]], seed: int) -> Any:
        if messages[0]["content"] == "Read on 2026-11-23.":
            assert messages[1] == {"role": "user", "content": "Read about France"}
            return says("It says Paris")
        steps = [
            calls(("LoadSkill", {"skill_name": "citing"}), ("LoadSkill", {"skill_name": "x"})),
            calls(("sub-agent-reader", {"message": "Read about France"}), ("sub-agent-reader", {})),
            says("Paris"),
        ]
        return steps[turns_of(messages)]

    (tmp_path / "reader.yaml").write_text(yaml.safe_dump(READER))
    (tmp_path / "skills" / "citing").mkdir(parents=True)
    (tmp_path / "skills" / "citing" / "SKILL.md").write_text(
        "---\nname: citing\ndescription: How to cite.\n---\n\nName it.\n"
    )
    references = {"sub_agents": [{"name": "reader", "config_path": "./reader.yaml"}], "skills": ["./skills/citing"]}
    rollout, _ = await play(written(tmp_path, **references), script)
    assert (rollout.status, rollout.reward, len(rollout.turns)) == (Status.COMPLETED, 1.0, 4)
    assert [turn.parent for turn in rollout.turns] == [None, 0, None, 1], "the sub-agent's is a root of its own"
    spans = observation(tmp_path)
    assert [span["type"] for span in spans] == ["LLM", "TOOL", "TOOL", "LLM", "AGENT", "AGENT", "LLM"]
    assert spans[1]["outputs"].endswith(":\nName it.")
    assert spans[2]["outputs"] == "Skill 'x' not found"
    assert spans[4]["outputs"] == "It says Paris"
    assert [span["type"] for span in spans[4]["children"]] == ["LLM"]
    assert "'message' is a required text" in spans[5]["outputs"]
    shown = {tool["function"]["name"]: tool["function"]["description"] for tool in spans[0]["inputs"]["tools"]}
    assert shown["sub-agent-reader"] == "Read a page."
    assert "- citing: How to cite." in shown["LoadSkill"]


async def test_a_stop_tool_gives_the_answer(tmp_path: Path) -> None:
    rollout, _ = await play(written(tmp_path), lambda *_: calls(("submit", {"query": "Paris"})))
    assert (rollout.status, len(rollout.turns), target(tmp_path)["final_answer"]) == (Status.COMPLETED, 1, "PARIS")


@pytest.mark.parametrize(
    ("changes", "turns", "limit"),
    [({}, 3, "max_turns"), ({"max_iterations": 2}, 2, "max_turns"), ({"max_context_tokens": 1}, 1, "max_tokens")],
)
async def test_the_limits_of_the_file_end_a_rollout(
    tmp_path: Path, changes: dict[str, Any], turns: int, limit: str
) -> None:
    rollout, _ = await play(written(tmp_path, **changes), lambda *_: calls(("web_search", {"query": "more"})))
    assert (rollout.status, rollout.finish_reason, len(rollout.turns)) == (Status.TRUNCATED, limit, turns)


async def test_a_prompt_is_a_template_in_a_file_and_names_the_field_that_an_item_lacks(tmp_path: Path) -> None:
    (tmp_path / "prompt.md").write_text("Answer in {{language}}.")
    directory = written(tmp_path, system_prompt="./prompt.md", system_prompt_type="jinja")
    rollout, _ = await play(directory, lambda *_: says("Paris"))
    assert (rollout.status, rollout.failure_code) == (Status.FAILED, "worker_failed")
    assert "'language' is undefined" in str(rollout.failure_detail)


async def test_another_temperature_than_the_runs_fails_in_training(tmp_path: Path) -> None:
    rollout, _ = await play(written(tmp_path, llm_config={"temperature": 0.7}), lambda *_: says("Paris"))
    assert rollout.status is Status.FAILED
    assert "temperature" in str(rollout.failure_detail)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mcp_servers": [{"name": "helper"}]}, "has mcp_servers, which is not supported here"),
        ({"sub_agents": [{"name": "me", "config_path": "agent_config.yaml"}]}, "is a sub-agent of itself"),
        ({"skills": ["./skills/x"]}, "skills.0: .*SKILL.md cannot be read"),
        ({"middlewares": []}, "has middlewares"),
        ({"llm_config": {"extra_body": {"min_tokens": 2}}}, r"has llm_config\.extra_body\.min_tokens"),
        ({"tool_call_mode": "xml"}, r"tool_call_mode: Input should be 'openai'"),
        ({"tracers": [{"import": "nexau.archs.tracer.adapters.langfuse:LangfuseTracer"}]}, r"tracers\.0\.import"),
        ({"stop_tools": ["done"]}, "stop_tools names done, which tools has not"),
        ({"tools": [AGENT["tools"][0] | {"yaml_path": "tools/No.yaml"}], "stop_tools": []}, "cannot be read"),
        ({"tools": [AGENT["tools"][0] | {"binding": "nexau_test_tool:no"}], "stop_tools": []}, "has no function no"),
        (
            {"tools": [AGENT["tools"][1] | {"binding": "nexau_test_tool:picky"}], "stop_tools": []},
            "agent_state.*are not given",
        ),
        ({"tools": [AGENT["tools"][0] | {"lazy": True}], "stop_tools": []}, r"has tools\.0\.lazy"),
        ({"system_prompt_type": "file", "system_prompt": "no.md"}, "no file no.md"),
    ],
)
def test_what_is_not_played_is_refused_by_its_name(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        open_environment(environment(written(tmp_path, **changes)))


def test_a_stored_run_cannot_have_the_code_that_an_agents_file_names_executed_unasked(tmp_path: Path) -> None:
    own = environment(written(tmp_path), evaluator_module_path="evaluator.py:Exact")
    config = parse_config({"run_id": "r", "environment": own.model_dump()})
    found = unnamed_code(config, [])
    assert found["environment.parameters.evaluator_module_path"] == "evaluator.py:Exact"
    assert found["environment.parameters.nexau_agent_config_path"] == "agent_config.yaml"
    assert found["environment.parameters.nexau_agent_workspace"] == str(tmp_path)


def test_a_file_that_is_not_there_is_named_with_what_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file agent\.yaml.*has: agent_config\.yaml"):
        open_environment(environment(written(tmp_path), nexau_agent_config_path="agent.yaml"))
