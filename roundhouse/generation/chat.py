"""Conversations to tokens and back, the same for every engine.

Invariants: a later turn's prompt begins with exactly the tokens that earlier turns saw and generated. With R = the
prompt and generation token IDs recorded on the newest assistant message that carries them, the prompt is R +
encode(tail), in which the tail is the rendered text from that message's end of turn on. No token of R is tokenised
again, so other merges of the same text do not matter. An answer's message equals its decoded token IDs; the end-of-turn
token counts among the IDs but is not shown in the text. `tool_calls.py` reads its tool calls.

Start of the tail: the rendered conversation up to and including that message holds n ends of turn, so the tail begins
at the n-th end of turn of the whole rendered conversation. Counting still works if a template removes parts of earlier
turns (old reasoning). Only the template's ends of turn count: a message that spells one has a mark there
(`control_tokens.py`). If the recorded generation already ends with the end of turn, it is dropped from the tail; if a
length limit cut the generation, the tail supplies it.

    whole:  <user>hi<end> <assistant>he llo<end> <user>more<end> <assistant>
    prefix: <user>hi<end> <assistant>he llo<end>                                 n = 2
    tail:                                  <end> <user>more<end> <assistant>
"""

from __future__ import annotations

import inspect
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import orjson

from roundhouse.errors import ConfigError, DataError
from roundhouse.generation.control_tokens import ControlTokens
from roundhouse.generation.protocol import TOKEN_FIELDS, BadRequest, ChatRequest, ContextLengthExceeded, Draw, Generated
from roundhouse.generation.tool_calls import (
    THOUGHT_START,
    ToolCalls,
    ToolParser,
    broken_call_problem,
    parse_hermes,
)
from roundhouse.generation.tool_schemas import shown_tools
from roundhouse.pretrained import load_pretrained

Message = dict[str, Any]

PROMPT_ENDING = 8
"""Last tokens of a prompt that are searched for the beginning of a thought."""
ANSWERED = "answered-4b7e"
"""A word that no template writes by itself."""
RENDER_CACHE = 4096
"""Rendered conversations kept: the first turn of a group is rendered once for all its rollouts."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A request in tokens, ready to be answered."""

    token_ids: list[int]
    draw: Draw


class ChatCodec:
    """Renders conversations with the model's own template and reads answers back."""

    def __init__(
        self,
        model_dir: str,
        max_model_len: int,
        parse_tool_calls: ToolParser = parse_hermes,
        template_date: date | None = None,
    ) -> None:
        """
        Args:
            template_date: the day that the chat template writes as today; None: the day of the rendering.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = load_pretrained(AutoTokenizer, model_dir)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"The model directory {model_dir} has no tokenizer: {error}. Add tokenizer.json and tokenizer_config.json "
                f"to it."
            ) from error
        if not tokenizer.chat_template:
            raise ConfigError(
                f"The tokenizer in {model_dir} has no chat template. Add chat_template to tokenizer_config.json."
            )
        self.tokenizer: Any = tokenizer
        self.max_model_len = max_model_len
        self.parse_tool_calls = parse_tool_calls
        self.stop_token_ids = stop_token_ids(self.tokenizer, model_dir)
        written = end_of_turn_id(self.tokenizer)
        self._continues = written is not None
        self.end_of_turn_id = min(self.stop_token_ids) if written is None else written
        self.end_of_turn: str = self.tokenizer.convert_ids_to_tokens(self.end_of_turn_id)
        config = json.loads((Path(model_dir) / "config.json").read_text())
        self.vocabulary = max(len(self.tokenizer), int(config.get("vocab_size", 0)))
        self._backend = self.tokenizer.backend_tokenizer
        self.control = ControlTokens(self._backend, self.stop_token_ids)
        self._special = frozenset(self.tokenizer.all_special_ids)
        self._template = str(self.tokenizer.chat_template)
        # What rendering is called with: an argument of the caller must not take its place
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters
        self._own_arguments = {*own, *self.tokenizer.special_tokens_map, "messages", "raise_exception", "strftime_now"}
        self._clock: dict[str, Any] = {} if template_date is None else {"strftime_now": template_date.strftime}
        self._empty_content = "" if breaks_on_null(self.tokenizer) else None
        self._rendered: OrderedDict[bytes, list[int]] = OrderedDict()

    def encode(self, text: str) -> list[int]:
        """Text to token IDs, with nothing added."""
        return self.control.encode(text)

    def render(self, request: ChatRequest, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """The conversation as text, in which marks stand for control tokens that the messages spell (`ControlTokens`).

        Raises:
            BadRequest: the model's template refuses the messages, or a tool's schema cannot be shown.
        """
        try:
            text: str = self.tokenizer.apply_chat_template(
                self.control.escape(list(messages)),
                tools=self.control.escape(shown_tools(request.tools)) or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self.control.escape(request.template_arguments),
                **self._clock,
            )
        except BadRequest:
            raise
        except Exception as error:
            reason = self.control.unescape(str(error))
            raise BadRequest(f"The chat template refuses these messages: {reason}", "messages") from error
        return text

    def prompt(self, request: ChatRequest) -> RenderedPrompt:
        """The tokens of a request.

        Raises:
            BadRequest: recorded token IDs are outside the vocabulary, or the template refuses the messages or does not know
                an argument.
            ContextLengthExceeded: no room is left to generate.
        """
        for name in request.template_arguments:
            if name in self._own_arguments or re.search(rf"\b{re.escape(name)}\b", self._template) is None:
                raise BadRequest(
                    f"{name} is given, and it is not a variable of this model's chat template. Leave it out.",
                    name if name == "reasoning_effort" else "chat_template_kwargs",
                )
        # The message up to which the prompt's tokens are fixed, and those tokens
        index = newest_recorded(request.messages)
        if request.required_prefix is not None:
            roles = [message["role"] for message in request.messages]
            newest = len(roles) - 1 - roles[::-1].index("assistant")
            token_ids = self._continued(request, newest, request.required_prefix)
        elif index is not None:
            message = request.messages[index]
            recorded = [*message["prompt_token_ids"], *message["generation_token_ids"]]
            token_ids = self._continued(request, index, recorded)
        else:
            key = orjson.dumps([request.messages, request.tools, request.template_arguments])
            cached = self._rendered.get(key)
            if cached is None:
                messages = template_messages(request.messages, self._empty_content)
                cached = self.encode(self.render(request, messages, generation_prompt=True))
                self._rendered[key] = cached
                if len(self._rendered) > RENDER_CACHE:
                    self._rendered.popitem(last=False)
            token_ids = list(cached)
        room = self.max_model_len - len(token_ids)
        if room <= 0:
            raise ContextLengthExceeded(len(token_ids), self.max_model_len)
        limit = room if request.draw.max_tokens <= 0 else min(request.draw.max_tokens, room)
        draw = request.draw
        return RenderedPrompt(token_ids, Draw(limit, draw.temperature, draw.top_p, draw.top_k, draw.seed))

    def reply(self, request: ChatRequest) -> list[int]:
        """Return the newest message of a conversation, an assistant's, as generated tokens: the template's text after
        its generation prompt, up to the end of the turn.

        Raises:
            BadRequest: the template refuses the messages, or writes them differently.
        """
        messages = template_messages(request.messages, self._empty_content)
        prompt = self.render(request, messages[:-1], generation_prompt=True)
        text = self.render(request, messages, generation_prompt=False)
        end = text.find(self.end_of_turn, len(prompt))
        if not text.startswith(prompt) or end < 0:
            raise BadRequest(
                "The chat template does not write an assistant message as its generation prompt, the text and an end of turn.",
                "messages",
            )
        return self.encode(text[len(prompt) : end + len(self.end_of_turn)])

    def _continued(self, request: ChatRequest, index: int, recorded: list[int]) -> list[int]:
        if min(recorded) < 0 or max(recorded) >= self.vocabulary:
            raise BadRequest(f"messages[{index}] carries token IDs outside 0..{self.vocabulary - 1}.", "messages")
        messages = template_messages(request.messages, self._empty_content)
        for message in messages[: index + 1]:  # they are only counted, and some templates refuse arguments as text
            for call in message.get("tool_calls") or ():
                if isinstance(call["function"].get("arguments"), str):
                    call["function"] = call["function"] | {"arguments": {}}
        if not self._continues:
            raise ContinuationBroken(_NO_END.format("a token"))
        return continue_prompt(
            recorded,
            self.render(request, messages[: index + 1], generation_prompt=False),
            self.render(request, messages, generation_prompt=True),
            end_of_turn=self.end_of_turn,
            end_of_turn_id=self.end_of_turn_id,
            encode=self.encode,
        )

    def message(
        self,
        generated: Generated,
        tools: list[dict[str, Any]],
        *,
        prompt_token_ids: Sequence[int] = (),
        only_first_call: bool = False,
    ) -> tuple[Message, str]:
        """The assistant message (without token fields) and the finish reason of an answer.

        Args:
            prompt_token_ids: of the request; a prompt may end inside the policy's thought.
        """
        ids = generated.token_ids
        if ids and (ids[-1] in self.stop_token_ids or ids[-1] in self._special):
            ids = ids[:-1]
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        if tools:
            ending = self._backend.decode(prompt_token_ids[-PROMPT_ENDING:], skip_special_tokens=False)
            content, calls = calls_of_reply(text, ending, generated.finish_reason, tools, self.parse_tool_calls)
            if calls:
                message_calls = calls[:1] if only_first_call else calls
                return {"role": "assistant", "content": content, "tool_calls": message_calls}, "tool_calls"
        if not self._special.isdisjoint(ids):
            text = self._backend.decode(ids, skip_special_tokens=True)
        return {"role": "assistant", "content": text}, generated.finish_reason

    def written(self, message: Message, tools: ToolCalls) -> str:
        """Return an assistant message as the chat template writes it, without the start and end of its turn.

        Raises:
            BadRequest: the template refuses it.
        """
        request = ChatRequest([{"role": "user", "content": "?"}], tools, Draw(0), "")
        messages = template_messages([*request.messages, message], self._empty_content)
        opened = self.render(request, messages[:1], generation_prompt=True)
        whole = self.render(request, messages, generation_prompt=False)
        begins = next((k for k, (a, b) in enumerate(zip(opened, whole, strict=False)) if a != b), len(opened))
        return self.control.unescape(whole[begins:].split(self.end_of_turn)[0])

    def log_probs(self, generated: Generated) -> dict[str, Any]:
        """An answer's log-probabilities in OpenAI's form, one entry a token."""
        entries = []
        for token, log_prob in zip(generated.token_ids, generated.log_probs, strict=True):
            text: str = self._backend.decode([token], skip_special_tokens=False)
            entries.append({"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": entries}


def calls_of_reply(
    text: str, prompt_ending: str, finish_reason: str, tools: list[dict[str, Any]], parse: ToolParser
) -> tuple[str | None, ToolCalls]:
    """The content before the calls of a reply, and its calls.

    Args:
        prompt_ending: text of the prompt's last tokens (`PROMPT_ENDING`); it may open the policy's thought.
        finish_reason: length if the token limit cut the reply. A call that the cut broke is not the policy's fault: the reply
            stays text.
    """
    opened = THOUGHT_START if prompt_ending.rstrip().endswith(THOUGHT_START) else ""
    content, calls = parse(opened + text, tools)
    if calls and finish_reason == "length" and broken_call_problem(calls[-1]["function"]["arguments"]) is not None:
        return text, []
    return (content.removeprefix(opened) or None if calls and content is not None else content), calls


def template_messages(messages: Sequence[Message], empty: str | None = None) -> list[Message]:
    """Convert messages for chat templates: text content as a string (`empty` if it is missing, as next to a tool call),
    tool-call arguments as an object."""
    rendered = []
    for message in messages:
        out = {key: value for key, value in message.items() if not key.endswith(("_token_ids", "_log_probs"))}
        content = message.get("content")
        if isinstance(content, list):
            out["content"] = "".join(part.get("text", "") for part in content)
        elif content is None and "content" in message:
            out["content"] = empty
        if calls := message.get("tool_calls"):
            out["tool_calls"] = [_template_call(call) for call in calls]
        rendered.append(out)
    return rendered


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return call
        if isinstance(parsed, dict):
            return {**call, "function": {**function, "arguments": parsed}}
    return call


def stop_token_ids(tokenizer: Any, model_dir: str) -> frozenset[int]:
    """Every token ID that ends an answer: the tokenizer's, those of generation_config.json, and the chat template's.

    Raises:
        ConfigError: none is named, or the template ends turns with a text that is not a token.
    """
    ids: set[int] = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    path = Path(model_dir) / "generation_config.json"
    if path.is_file():
        eos = json.loads(path.read_text()).get("eos_token_id")
        ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if tokenizer.chat_template and (written := end_of_turn_id(tokenizer)) is not None:
        ids.add(written)
    if not ids:
        raise ConfigError(f"Neither tokenizer nor generation_config.json in {model_dir} names an end-of-turn token.")
    return frozenset(ids)


def end_of_turn_id(tokenizer: Any) -> int | None:
    """Return the token that the chat template writes after an assistant's message; None if it writes nothing.

    It often differs from the model's end of text: base models are trained with one token, and chat templates end turns
    with another.

    Raises:
        ConfigError: the template writes text without a token.
    """
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ANSWERED}]
    _, answer, ending = tokenizer.apply_chat_template(turn, tokenize=False).rpartition(ANSWERED)
    if not answer:
        return None
    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder()
    ids = backend.encode(ending, add_special_tokens=False).ids
    token = next((token_id for token_id in ids if token_id in added), None)
    if token is None and ending.strip():
        raise ConfigError(
            f"The chat template in {tokenizer.name_or_path} ends an assistant's turn with {ending.strip()!r}, and the "
            "tokenizer has no such token, so no reply would end. Add the token to the tokenizer, or name another template "
            "(policy.chat_template)."
        )
    return token


def breaks_on_null(tokenizer: Any) -> bool:
    """Return whether the chat template fails on `content: null` next to a tool call, or writes it as the word None."""
    call = {"id": "call_0", "type": "function", "function": {"name": "a", "arguments": {}}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    try:
        text: str = tokenizer.apply_chat_template([{"role": "user", "content": "a"}, turn], tokenize=False)
    except Exception:  # noqa: BLE001 - a template may raise anything
        return True
    return "None" in text


class ContinuationBroken(DataError):
    """The rendered conversation cannot be joined to the recorded tokens."""


_NO_END = (
    "The chat template does not end turns with {}, so a recorded turn cannot be continued. Use a template that does, or send "
    "the messages without token fields."
)


def newest_recorded(messages: Sequence[dict[str, Any]]) -> int | None:
    """Index of the newest message that carries recorded tokens."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get(TOKEN_FIELDS[0]):
            return index
    return None


def continue_prompt(
    recorded: Sequence[int],
    prefix_text: str,
    whole_text: str,
    *,
    end_of_turn: str,
    end_of_turn_id: int,
    encode: Callable[[str], list[int]],
) -> list[int]:
    """Token IDs of the prompt that continues `recorded`.

    Args:
        recorded: prompt and generation token IDs of the newest recorded message.
        prefix_text: the conversation up to and including that message, rendered without generation prompt. As in
            `whole_text`, only the template spells the end of turn (`ControlTokens.escape`).
        whole_text: the whole conversation, rendered with generation prompt.
        end_of_turn: text of the end-of-turn token.
        end_of_turn_id: its token ID.
        encode: text to token IDs, without added special tokens.

    Raises:
        ContinuationBroken: the template writes no end of turn after an assistant message.
    """
    turns = prefix_text.count(end_of_turn)
    position = -1
    for _ in range(turns):
        position = whole_text.find(end_of_turn, position + 1)
        if position < 0:
            break
    if turns == 0 or position < 0:
        raise ContinuationBroken(_NO_END.format(repr(end_of_turn)))
    if recorded[-1] == end_of_turn_id:
        position += len(end_of_turn)
    return [*recorded, *encode(whole_text[position:])]
