"""NexAU's agents, played from their configuration files: `environment.worker: nexau`.

Invariant: each key of the file has NexAU's effect, or is refused by name. The package nexau is not needed: model calls
go to the run's policy through the worker's client, so that each becomes a turn with its tokens. `observation` of the
evaluation target is the trace, a tree of spans in the form of NexAU's in-memory tracer.

    type: agent
    name: research
    max_iterations: 10                          model calls of a rollout
    max_context_tokens: 20000                   tokens of the conversation: at this length the rollout ends truncated
    system_prompt: "Date: {{date}}. …"          its fields are those of the data item
    system_prompt_type: string                  or file, or jinja: a path from the agent's file
    tool_call_mode: openai
    llm_config: {temperature: 0.7, max_tokens: 8192}
    tools:
      - {name: web_search, yaml_path: ./tools/WebSearch.yaml, binding: "web_tool:web_search"}
    sub_agents:                                 the tool sub-agent-reader(message) plays its file; its calls are turns too
      - {name: reader, config_path: ./reader.yaml}
    skills: [./skills/citing]                   the tool LoadSkill(skill_name) returns the text of its SKILL.md

`model`, `base_url` and `api_key` of `llm_config` are for production; in a run the policy answers.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import jsonschema
import yaml
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from roundhouse.environments.base import invalid_arguments, raised, read_arguments
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.imports import add_import_path, find_file, load_function
from roundhouse.plugins.nexrl.base import BaseRolloutWorker, Evaluator, WorkerFailed
from roundhouse.plugins.nexrl.built_in import Span
from roundhouse.plugins.programs.model_calls import LlmClient, RolloutLimit
from roundhouse.rollout.protocol import call_function
from roundhouse.rollout.responses import tool_message
from roundhouse.text_files import decode_text


class _FilePart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True)


class AgentLlm(_FilePart):
    """`llm_config`."""

    model: str | None = None
    base_url: str | None = None
    api_key: str | None = None
    """These three are replaced by the run's policy."""
    temperature: float | None = None
    top_p: float | None = None
    """In training those of `generation.sampling`, or the rollout fails."""
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    """Lowers the limit of a model call."""
    api_type: Literal["openai_chat_completion"] = "openai_chat_completion"
    logprobs: Literal[True] = True
    extra_body: AgentExtraBody | None = None


class AgentExtraBody(_FilePart):
    """Keys by which NexRL's recipes ask a server for token IDs and log-probabilities; the policy always returns
    these."""

    train_mode: Literal[True] = True
    include_stop_str_in_output: Literal[True] = True
    skip_special_tokens: Literal[False] = False
    return_tokens_as_token_ids: Literal[True] = True


class AgentTool(_FilePart):
    """One of `tools`."""

    name: str
    yaml_path: str
    """From the agent's file."""
    binding: str
    """`module:function`, looked for in the workspace too."""
    extra_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments that the model does not give."""


class AgentReference(_FilePart):
    """One of `sub_agents`."""

    name: str
    config_path: str
    """From the agent's file."""


class AgentTracer(_FilePart):
    """One of `tracers`."""

    import_: Annotated[Literal["nexau.archs.tracer.adapters.in_memory:InMemoryTracer"], Field(alias="import")]


class AgentFile(_FilePart):
    """The agent's file."""

    type: Literal["agent"] = "agent"
    name: str = "agent"
    description: str = ""
    max_iterations: Annotated[int, Field(gt=0)] = 100
    max_context_tokens: Annotated[int, Field(gt=0)] = 128_000
    system_prompt: str | None = None
    system_prompt_type: Literal["string", "file", "jinja"] = "string"
    tool_call_mode: Literal["openai"] = "openai"
    llm_config: AgentLlm = AgentLlm()
    tools: tuple[AgentTool, ...] = ()
    stop_tools: tuple[str, ...] = ()
    """A call of one of these ends the rollout; its result is the answer."""
    tracers: tuple[AgentTracer, ...] = ()
    sub_agents: tuple[AgentReference, ...] = ()
    skills: tuple[str, ...] = ()
    """Folders with a SKILL.md, from the agent's file."""


class SkillHead(BaseModel):
    """The head of a SKILL.md; what else it has is for other programs."""

    name: str
    description: str


class ToolFile(_FilePart):
    """A tool's file."""

    type: Literal["tool"] = "tool"
    name: str
    description: str
    skill_description: str | None = None
    """For NexAU's skills, which are not played."""
    input_schema: dict[str, Any]


class BoundTool:
    """A tool of the agent: its description for the model, and its function."""

    def __init__(self, tool: AgentTool, directory: Path, key: str) -> None:
        described = _read(ToolFile, directory / tool.yaml_path, f"{key}.yaml_path")
        self.function: Callable[..., Any] = load_function(tool.binding, f"{key}.binding")
        self.extra = tool.extra_kwargs
        declaration = {"name": tool.name, "description": described.description, "parameters": described.input_schema}
        self.schema = {"type": "function", "function": declaration}
        try:
            jsonschema.Draft7Validator.check_schema(described.input_schema)
            required_arguments = dict.fromkeys(described.input_schema.get("required", ()))
            inspect.signature(self.function).bind(**(required_arguments | self.extra))
        except jsonschema.SchemaError as error:
            raise ConfigError(f"{directory / tool.yaml_path}: input_schema: {error.message}.") from error
        except TypeError as error:
            raise ConfigError(
                f"{key}.binding is {tool.binding!r}, which cannot be called with what input_schema requires and extra_kwargs "
                f"give: {error}. NexAU's own arguments (agent_state, global_storage) are not given."
            ) from error
        self._validator = jsonschema.Draft7Validator(described.input_schema)

    async def call(self, text: str) -> str:
        """The result of a call with these arguments (JSON), as the model is shown it.

        Raises:
            InfraError: the function reports that its infrastructure failed.
        """
        try:
            arguments = read_arguments(text or "{}")
        except ValueError as error:
            return invalid_arguments(text, error).text
        if (wrong := next(self._validator.iter_errors(arguments), None)) is not None:
            return json.dumps({"error": f"Invalid parameters: {wrong.message}"})
        try:
            value = await call_function(self.function, **(arguments | self.extra))
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        except InfraError:
            raise
        except Exception as error:  # noqa: BLE001 (a tool's failure is an observation for the policy)
            return raised(error).text


FilePart = TypeVar("FilePart", bound=BaseModel)


class Skill:
    """A folder with a SKILL.md: a head in YAML between two lines `---`, and the text."""

    def __init__(self, folder: Path, key: str) -> None:
        file = folder / "SKILL.md"
        parts = re.split(r"^---[ \t]*$", _text(file, key), maxsplit=2, flags=re.MULTILINE)
        if len(parts) != 3 or parts[0].strip():
            raise ConfigError(
                f"{key}: {file} does not begin with a head between two lines ---. Write name and description there."
            )
        self.folder, self.text = folder, parts[2].strip()
        head = _validated(SkillHead, yaml.safe_load(parts[1]), file)
        self.name, self.description = head.name, head.description

    def __str__(self) -> str:
        return f"Skill {self.name} (its paths are relative to {self.folder}):\n{self.text}"


SUB_AGENT_PREFIX = "sub-agent-"
LOAD_SKILL = "LoadSkill"


class NexAUAgent:
    """An agent's file with its tools, skills and sub-agents, read once for all rollouts."""

    def __init__(self, path: Path, above: tuple[Path, ...] = ()) -> None:
        """`above`: the files of the agents that have this one as a sub-agent."""
        path = path.resolve()
        if path in above:
            raise ConfigError(f"{path} is a sub-agent of itself. Leave it out of sub_agents.")
        self.file = _read(AgentFile, path, "nexau_agent_config_path")
        self.tools = {
            tool.name: BoundTool(tool, path.parent, f"{path}: tools.{number}")
            for number, tool in enumerate(self.file.tools)
        }
        if unknown := set(self.file.stop_tools) - self.tools.keys():
            raise ConfigError(f"{path}: stop_tools names {', '.join(sorted(unknown))}, which tools has not.")
        self.sub_agents = {
            f"{SUB_AGENT_PREFIX}{each.name}": NexAUAgent(path.parent / each.config_path, (*above, path))
            for each in self.file.sub_agents
        }
        skills = [
            Skill(path.parent / folder, f"{path}: skills.{number}") for number, folder in enumerate(self.file.skills)
        ]
        self.skills = {skill.name: skill for skill in skills}
        text = self.file.system_prompt
        if text is not None and self.file.system_prompt_type != "string":
            text = _text(find_file(text, f"{path}: system_prompt", [path.parent]), f"{path}: system_prompt")
        self._prompt = None if text is None else SandboxedEnvironment(undefined=StrictUndefined).from_string(text)

    @functools.cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools of a model call."""
        schemas = [tool.schema for tool in self.tools.values()]
        for name, agent in self.sub_agents.items():
            text = agent.file.description or f"Ask the agent {agent.file.name}."
            schemas.append(_text_tool(name, text, "message", "The task for the agent, with all that it has to know."))
        if self.skills:
            listed = "".join(f"\n- {skill.name}: {skill.description}" for skill in self.skills.values())
            schemas.append(
                _text_tool(LOAD_SKILL, f"Return the text of a skill. Skills:{listed}", "skill_name", "Its name.")
            )
        return schemas

    def first_messages(self, query: str, task: dict[str, Any]) -> list[dict[str, Any]]:
        """The system prompt, its fields filled in from the data item, and the query.

        Raises:
            WorkerFailed: the item lacks a field of the prompt.
        """
        try:
            system = [] if self._prompt is None else [{"role": "system", "content": self._prompt.render(task)}]
        except TemplateError as error:
            raise WorkerFailed(f"The system prompt of {self.file.name} cannot be filled in: {error}.") from error
        return [*system, {"role": "user", "content": query}]


@functools.cache
def read_agent(path: Path) -> NexAUAgent:
    """The agent of a file.

    Raises:
        ConfigError: the file cannot be read, names a tool that cannot be called, or has a key that is not played.
    """
    return NexAUAgent(path)


def _text_tool(name: str, description: str, argument: str, meaning: str) -> dict[str, Any]:
    """Return the schema of a tool with one text as its argument."""
    properties = {argument: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _text(path: Path, key: str) -> str:
    try:
        return decode_text(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}.") from error
    except DataError as error:
        raise ConfigError(f"{key}: {error}") from None


def _read(kind: type[FilePart], path: Path, key: str) -> FilePart:
    try:
        return _validated(kind, yaml.safe_load(_text(path, key)), path)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}.") from error


def _validated(kind: type[FilePart], tree: Any, path: Path) -> FilePart:
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        wrong = error.errors(include_url=False)
        unknown = [".".join(map(str, each["loc"])) for each in wrong if each["type"] == "extra_forbidden"]
        if unknown:
            raise ConfigError(
                f"{path} has {', '.join(unknown)}, which is not supported here. Remove it, or run the agent with NexAU in a "
                "subclass of TraceRolloutWorker."
            ) from error
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in wrong)
        raise ConfigError(f"{path}: {problems}.") from error


@dataclass(slots=True)
class _Dialog:
    """The conversation of one agent of a rollout."""

    agent: NexAUAgent
    messages: list[dict[str, Any]]
    spans: list[Span]
    calls: int = 0
    """Model calls so far."""
    answer: str = ""


class NexAURolloutWorker(BaseRolloutWorker):
    """Plays the agent of a NexAU file; another format of queries or loss mask is a subclass.

    Args:
        nexau_agent_config_path: the agent's file: absolute, or relative to the workspace, NEXRL_PATH or the working directory.
        nexau_agent_workspace: directory from which the agent's tools are imported; unset: that of the file.
        evaluator_module_path: class of the evaluator, if `environment.evaluator` does not name it.
        task_name: stands in the trace.
    """

    calls_user_code = True

    def __init__(
        self,
        llm: LlmClient | Mapping[str, Any],
        evaluator: Evaluator | None = None,
        *,
        nexau_agent_config_path: str = "",
        nexau_agent_workspace: str | None = None,
        evaluator_module_path: str | None = None,
        task_name: str = "",
    ) -> None:
        """A subclass with the one argument `config` hands it on; it holds the same names.

        Raises:
            ConfigError: the agent's file is not named, or cannot be played.
        """
        super().__init__(llm, evaluator)
        if isinstance(llm, Mapping):
            nexau_agent_config_path = llm.get("nexau_agent_config_path", "")
            nexau_agent_workspace, task_name = llm.get("nexau_agent_workspace"), llm.get("task_name", "")
        if not nexau_agent_config_path:
            raise ConfigError("environment.parameters.nexau_agent_config_path is unset: name the agent's file.")
        bases = [] if nexau_agent_workspace is None else [nexau_agent_workspace]
        path = find_file(nexau_agent_config_path, "environment.parameters.nexau_agent_config_path", bases)
        add_import_path(nexau_agent_workspace or path.parent)
        self.agent, self.task_name = read_agent(path), task_name
        self.spans: list[Span] = []

    async def run_agent(self, task: dict[str, Any]) -> str | None:
        messages = self.agent.first_messages(self.format_task_query(task), task)
        dialog = _Dialog(self.agent, messages, self.spans)
        try:
            limit = await self._converse(dialog, task)
        except RolloutLimit as reached:
            limit = str(reached)
        self.llm.limit = limit or self.llm.limit
        return await self._finished(task, dialog.answer)

    async def _converse(self, dialog: _Dialog, task: dict[str, Any]) -> str:
        """Play an agent to its answer; return the limit that ended it, or an empty text.

        Raises:
            RolloutLimit: a limit of the rollout is reached, in this agent or below it.
        """
        agent = dialog.agent.file
        while dialog.calls < agent.max_iterations:
            message = await self._asked(dialog)
            dialog.calls += 1
            cut, used = self.llm.limit, self.llm.infos[-1]["prompt_tokens"] + self.llm.infos[-1]["response_tokens"]
            dialog.answer = message.get("content") or ""
            calls, final = message.get("tool_calls") or [], []
            for call in calls:
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                result = await self._result(dialog, name, arguments, task)
                dialog.messages.append(tool_message(call["id"], result))
                final += [result] if name in agent.stop_tools else []
            self.llm.limit = cut  # a sub-agent's cut reply does not end this agent
            if final:
                dialog.answer = final[0]
                return ""
            if cut or not calls:
                return ""
            if used >= agent.max_context_tokens:
                return "max_tokens"
        return "max_turns"

    async def _result(self, dialog: _Dialog, name: str, arguments: str, task: dict[str, Any]) -> str:
        """Return the result of a tool call, as the model is shown it, and add its span."""
        agent, children = dialog.agent, list[Span]()
        span: Span = {"type": "TOOL", "name": name, "inputs": arguments}
        dialog.spans.append(span)
        result = f"Tool '{name}' not found"
        if name in agent.tools:
            result = await agent.tools[name].call(arguments)
        elif name in agent.sub_agents:
            below = agent.sub_agents[name]
            span |= {"type": "AGENT", "name": below.file.name, "children": children}
            result = await self._ask_below(below, arguments, task, children)
        elif name == LOAD_SKILL and agent.skills:
            skill = _argument(arguments, "skill_name")
            result = str(agent.skills.get(skill, f"Skill '{skill}' not found"))
        span["outputs"] = result
        return result

    async def _ask_below(self, agent: NexAUAgent, arguments: str, task: dict[str, Any], spans: list[Span]) -> str:
        """Return a sub-agent's answer; the newest one if the sub-agent reaches its limit."""
        if not (message := _argument(arguments, "message")):
            return json.dumps({"error": "Invalid parameters: 'message' is a required text"})
        dialog = _Dialog(agent, agent.first_messages(message, task), spans)
        await self._converse(dialog, task)
        return dialog.answer

    async def _asked(self, dialog: _Dialog) -> dict[str, Any]:
        """The policy's next message, which is added to the conversation."""
        config, tools, messages = dialog.agent.file.llm_config, dialog.agent.schemas, dialog.messages
        sampling: dict[str, Any] = {
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
        }
        completion = await self.llm.ask(messages, tools, **sampling)
        outputs = {
            "message": completion.message,
            "finish_reason": completion.finish_reason,
            "nexrl_train": {
                "prompt_tokens": completion.prompt_token_ids,
                "response_tokens": completion.generation_token_ids,
                "response_logprobs": completion.generation_log_probs,
            },
        }
        dialog.spans.append({"type": "LLM", "inputs": {"messages": [*messages], "tools": tools}, "outputs": outputs})
        messages.append(completion.message)
        return completion.message

    async def _finished(self, task: dict[str, Any], answer: str) -> str:
        root = {"type": "AGENT", "name": self.agent.file.name, "task_name": self.task_name, "children": self.spans}
        return await self.put_trajectory(task, answer, observation=[root])


def _argument(arguments: str, name: str) -> str:
    """Return a text among a call's arguments; empty if it is missing or the arguments are not JSON."""
    try:
        value = read_arguments(arguments or "{}").get(name)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


BaseNexAURolloutWorker = DefaultNexAURolloutWorker = NexAURolloutWorker
"""The names that NexRL's recipes know."""
