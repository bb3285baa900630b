"""Chat rows: conversations in a JSON lines file, as a dataset for supervised offline training.

Invariants: a conversation becomes exactly the tokens of an equal rollout: each assistant turn's prompt begins with all
tokens so far, and the loss covers the generated tokens, including the end of turn. Nothing was sampled, so
log-probabilities are missing (`details.written`). A row is used whole, or the file is refused with row and cause.

    demos.jsonl   {"messages": [{"role": "user", …}, {"role": "assistant", …}, …], "tools": […], "reward": 0.5}
        ->  <store>/datasets/demos/<digest>/      a group of one rollout a row

The digest covers the file, the policy's tokenizer and template, and the length limit: an equal import is a no-op, and
another template makes another version. `tools` and `reward` (default 1) are optional. An assistant message with
`"weight": 0` is shown and not learnt.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from roundhouse.environments.null_fields import arguments_without_nulls, parameters_by_name, tools_of_row
from roundhouse.errors import ConfigError, DataError
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.protocol import read_request
from roundhouse.images import image_names
from roundhouse.policy.model_directory import TEMPLATE, refuse_unfit_template, template_in
from roundhouse.rollout.conversation import TurnChain
from roundhouse.rollout.responses import chat_messages, chat_tools, items_from_chat
from roundhouse.stages.datasets import TaskDraw, dataset_stage
from roundhouse.stages.refit import engine_files
from roundhouse.stages.validate import DecodedText, image_reader, own_parser
from roundhouse.store.location import Location, NotFound
from roundhouse.store.run import Run
from roundhouse.store.stage import Reference, sha256
from roundhouse.text_files import numbered_lines, parse_json
from roundhouse.trajectories.records import Ledger, Refusal, Rollout, Status
from roundhouse.trajectories.schemas import rollouts_table, turns_table

PART_ROWS = 1024
"""Rows in one Parquet part."""

PARAMETERS = "responses_create_params"
Row = dict[str, Any]


def read_chat_rows(file: str) -> list[Row]:
    """Read the rows of a file (a path or URI), with tool-call IDs and arguments in the form of an engine's.

    Raises:
        ConfigError: the file is missing or empty.
        DataError: a row is not a conversation with an assistant turn; names row and cause.
    """
    directory, _, name = file.rpartition("/")
    try:
        data = Location(directory or ".").read(name)
    except NotFound as error:
        raise ConfigError(f"offline.datasets: {file} does not exist. Give the path of a file of chat rows.") from error
    rows = [_row(file, number, line) for number, line in numbered_lines([data], file)]
    if not rows:
        raise ConfigError(f"offline.datasets: {file} holds no row. Give one conversation a line.")
    return rows


def import_chat_rows(run: Run, file: str) -> Reference:
    """The dataset's version that these rows are for the run's policy, made if it is not there.

    Raises:
        DataError: a row does not fit the policy: its template drops something, or it is too long.
    """
    rows, conversations = read_chat_rows(file), Conversations(run)
    name = Path(file).stem
    stage = dataset_stage(run, name, conversations.label(rows), TaskDraw(0))
    if (reference := stage.reference()) is not None:
        return reference
    conversations.refuse_dropped_tools(file, rows)
    attempt = run.begin(stage, policy_version=0)
    written: list[Rollout] = []
    for start in range(0, len(rows), PART_ROWS):
        part = [_rollout(conversations, name, file, row) for row in rows[start : start + PART_ROWS]]
        attempt.write_table("turns", turns_table(part))
        attempt.write_table("rollouts", rollouts_table(part))
        written += part
    return attempt.commit(
        counts=Ledger.from_rollouts(written, requested=len(written)).counts(),
        details={"written": True, "imported": file, "tokenizer": conversations.tokenizer_digest()},
    )


class Conversations:
    """Written conversations as tokens of a run's policy."""

    def __init__(self, run: Run) -> None:
        self._files, generation = engine_files(run), run.config.generation
        self._limit, self._day = generation.max_model_len, generation.template_date
        self._parser, self._images = own_parser(run.config, self._files), image_reader(run)

    @functools.cached_property
    def _codec(self) -> ChatCodec:
        return ChatCodec(str(self._files), self._limit, template_date=self._day, images=self._images)

    @functools.cached_property
    def _proof(self) -> DecodedText:
        return DecodedText(self._files, self._parser)

    def label(self, content: Any) -> str:
        """Return a digest of JSON content and of everything of the policy that decides its tokens."""
        names = ("tokenizer.json", "tokenizer_config.json", TEMPLATE)
        parts = [(self._files / name).read_bytes() for name in names if (self._files / name).is_file()]
        day = [] if self._day is None else [str(self._day)]
        return sha256(b"\0".join([json.dumps([content, self._limit, *day]).encode(), *parts]))[:16]

    def tokenizer_digest(self) -> str:
        return hashlib.sha256((self._files / "tokenizer.json").read_bytes()).hexdigest()

    def refuse_dropped_tools(self, file: str, rows: Sequence[Row]) -> None:
        """
        Raises:
            DataError: the policy's template does not show the tools of a row.
        """
        template, known = template_in(self._files), set[str]()
        for row in rows:
            if (tools := json.dumps(row["tools"] or [])) not in known:
                known.add(tools)
                try:
                    refuse_unfit_template(template, row["tools"] or [])
                except ConfigError as error:
                    raise DataError(
                        f"{file}, row {row['number']}: {_said(error)}. Name a template that renders them "
                        "(policy.chat_template)."
                    ) from error

    def add_turns(self, rollout: Rollout, messages: Sequence[Row], tools: Any) -> None:
        """Add a turn for each assistant message to a rollout without turns.

        Raises:
            DataError: they are more tokens than `generation.max_model_len`.
            Refusal: the template changes the text of the rollout's items.
        """
        chain = TurnChain()
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            parameters = {
                "messages": messages[:index],
                "tools": tools,
                "required_prefix_token_ids": chain.tokens or None,
            }
            prompt = self._codec.prompt(read_request(parameters, "")).token_ids
            reply = self._codec.reply(read_request({"messages": messages[: index + 1], "tools": tools}, ""))
            if (length := len(prompt) + len(reply)) > self._limit:
                raise DataError(f"it has {length} tokens, and generation.max_model_len is {self._limit}")
            finish = "tool_calls" if message.get("tool_calls") else "stop"
            names = image_names(messages[:index])
            turn = chain.add(prompt, reply, [], policy_version=0, finish_reason=finish, images=names)
            turn.trained = message.get("weight", 1) != 0
        rollout.turns = chain.turns
        self._proof.prove(rollout)

    def rollout_with_turns(self, rollout: Rollout) -> Rollout:
        """Return an imported rollout without tokens with a turn for each reply after its task.

        Raises:
            DataError, ConfigError, Refusal: the policy's template cannot express it.
        """
        params = rollout.task[PARAMETERS]
        messages, tools = chat_messages(rollout.items), chat_tools(params.get("tools") or []) or None
        shown = len(chat_messages(params["input"]))
        if not shown:
            raise DataError("it begins with an assistant message, without a prompt")
        refuse_unfit_template(template_in(self._files), tools or [])
        weights = {index: {"weight": 0} for index in range(shown)}
        tokenised = replace(rollout, turns=[])
        self.add_turns(tokenised, [each | weights.get(index, {}) for index, each in enumerate(messages)], tools)
        return tokenised


def _row(file: str, number: int, line: bytes) -> Row:
    row = parse_json(line, f"{file}, row {number}: the line")
    try:
        if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
            raise ValueError('"messages" is missing')
        calls: list[str] = []
        tools = tools_of_row(row.get("tools"))
        parameters = parameters_by_name(tools)
        messages = [_message(message, calls, parameters) for message in row["messages"]]
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("no message has the role assistant, so nothing is to be learnt from it")
        if messages[0]["role"] == "assistant":
            raise ValueError("it begins with an assistant message, without a prompt")
        request = {"messages": messages, "tools": tools or None}
        read_request(request, "")
        return {"number": number, "reward": _reward(row.get("reward")), **request}
    except (ValueError, TypeError, KeyError, AttributeError, DataError) as error:
        raise DataError(f"{file}, row {number}: {_said(error)}. Mend or remove the row.") from error


def _reward(reward: Any) -> float:
    if reward is None:
        return 1.0
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise ValueError(f"reward is {reward!r:.80}, a {type(reward).__name__}; give a number or leave it out")
    return float(reward)


def _message(message: Any, calls: list[str], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with IDs and argument texts in its calls. A tool's output without an ID answers the oldest of
    `calls`.

    Args:
        parameters: the schema of each tool's arguments.
    """
    if not isinstance(message, dict) or message.get("role") is None:
        raise ValueError(f"a message is an object with a role, and one is {message!r:.80}")
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    if message["role"] == "tool" and "tool_call_id" not in message:
        if not calls:
            raise ValueError("a tool's output follows no call")
        message = message | {"tool_call_id": calls[0]}
    if message["role"] == "tool" and message["tool_call_id"] in calls:
        calls.remove(message["tool_call_id"])
    if message.get("tool_calls"):
        message = message | {"tool_calls": [_call(*each, parameters) for each in enumerate(message["tool_calls"])]}
        calls[:] = [call["id"] for call in message["tool_calls"]]
    return message


def _call(index: int, call: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict) or not function.get("name"):
        raise ValueError(f"a tool call is an object with function.name, and one is {call!r:.80}")
    call = {key: value for key, value in call.items() if value is not None}
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        call_arguments = arguments_without_nulls(
            {} if arguments is None else arguments, parameters.get(function["name"])
        )
        arguments = json.dumps(call_arguments, ensure_ascii=False)
    return {"id": f"call_{index}", "type": "function", **call, "function": function | {"arguments": arguments}}


def _rollout(conversations: Conversations, name: str, file: str, row: Row) -> Rollout:
    """Return the record of a row: one turn per assistant message.

    Raises:
        DataError: its decoded tokens differ from the row, or are too many.
    """
    messages = row["messages"]
    first_reply = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
    task: Row = {
        "input": items_from_chat(messages[:first_reply]),
        "tools": [{"type": "function", **tool["function"]} for tool in row["tools"] or []],
    }
    rollout = Rollout(
        group_id=f"{name}/{row['number']}",
        sample=0,
        task={"task_id": f"{name}/{row['number']}", PARAMETERS: task},
        environment="chat",
        status=Status.COMPLETED,
        reward=row["reward"],
        items=items_from_chat(messages),
        finish_reason="stop",
    )
    try:
        conversations.add_turns(rollout, messages, row["tools"])
    except (DataError, Refusal) as error:
        raise DataError(f"{file}, row {row['number']}: {_said(error)}. Mend or remove the row.") from error
    return rollout


def _said(error: Exception) -> str:
    """Return an error's text in a form that continues a sentence."""
    words = f"the chat template changes the text: {error.evidence}" if isinstance(error, Refusal) else str(error)
    return words.rstrip(".")
