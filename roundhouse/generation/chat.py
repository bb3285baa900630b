"""Conversations to tokens and back, the same for every engine.

Invariants: a later turn's prompt begins with exactly the tokens that earlier turns saw and drew. With R = the prompt and
generation token IDs recorded on the newest assistant message that carries them, the prompt is R + encode(tail), where the tail
is the rendered text from that message's end of turn on. Nothing of R is ever tokenised again, so it does not matter that a
tokenizer would merge the same text differently. The message of an answer is what its token IDs say, with the end-of-turn token
counted among the IDs but never shown in the text; a text that is not wholly well-formed calls stays text.

Where the tail begins: the rendered conversation up to and including that message holds n ends of turn, so the tail begins at
the n-th end of turn of the whole rendered conversation. Counting, instead of taking a position, survives templates that cut
something out of earlier turns (old reasoning). If the recorded generation already ends with the end of turn it is dropped from
the tail; if it was cut by its length limit, the tail supplies it.

    whole:  <user>hi<end> <assistant>he llo<end> <user>more<end> <assistant>
    prefix: <user>hi<end> <assistant>he llo<end>                                 n = 2
    tail:                                  <end> <user>more<end> <assistant>
"""

from __future__ import annotations

import json
import re
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from roundhouse.errors import ConfigError, DataError
from roundhouse.generation.protocol import TOKEN_FIELDS, BadRequest, ChatRequest, ContextLengthExceeded, Draw, Generated

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)
TOOL_CALL_START = "<tool_call>"

ToolCalls = list[dict[str, Any]]
ToolParser = Callable[[str, list[dict[str, Any]]], tuple[str | None, ToolCalls]]
"""Generated text and the request's tools, to the content before the calls and the calls in OpenAI's shape."""


def parse_hermes(text: str, tools: list[dict[str, Any]]) -> tuple[str | None, ToolCalls]:
    """Tool calls as vLLM's hermes parser reads them, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: the text
    before the first call (None when empty) and the calls in OpenAI's shape. A call that JSON cannot carry is none."""
    if TOOL_CALL_START not in text:
        return text, []
    calls: ToolCalls = []
    for closed, unclosed in _CALL.findall(text):
        try:
            call = json.loads(closed or unclosed)
            name, arguments = call["name"], json.dumps(call["arguments"], ensure_ascii=False)
            (name + arguments).encode()  # a name that is no text, a lone surrogate
        except (ValueError, KeyError, TypeError, RecursionError):
            return text, []
        calls.append(tool_call(name, arguments))
    return text[: text.index(TOOL_CALL_START)] or None, calls


def tool_call(name: str, arguments: str) -> dict[str, Any]:
    """A call in OpenAI's shape with a fresh id."""
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


Message = dict[str, Any]

RENDER_CACHE = 4096
"""Rendered conversations kept: the first turn of a group is rendered once for all its rollouts."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A request in tokens, ready to be answered."""

    token_ids: list[int]
    draw: Draw


class ChatCodec:
    """Renders conversations with the model's own template and reads answers back."""

    def __init__(self, model_dir: str, max_model_len: int, parse_tool_calls: ToolParser = parse_hermes) -> None:
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"There is no tokenizer in the model directory {model_dir}: {error}. Put tokenizer.json and "
                "tokenizer_config.json beside config.json."
            ) from error
        if not tokenizer.chat_template:
            raise ConfigError(
                f"The tokenizer in {model_dir} has no chat template. Add chat_template to tokenizer_config.json."
            )
        self.tokenizer: Any = tokenizer
        self.max_model_len = max_model_len
        self.parse_tool_calls = parse_tool_calls
        self.stop_token_ids = stop_token_ids(self.tokenizer, model_dir)
        # The stop token that the chat template writes after an assistant message
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        text: str = self.tokenizer.apply_chat_template(turn, tokenize=False)
        ends = [(text.rfind(self.tokenizer.convert_ids_to_tokens(stop)), stop) for stop in self.stop_token_ids]
        self.end_of_turn_id = max(ends)[1]
        self.end_of_turn = self.tokenizer.convert_ids_to_tokens(self.end_of_turn_id)
        config = json.loads((Path(model_dir) / "config.json").read_text())
        self.vocabulary = max(len(self.tokenizer), int(config.get("vocab_size", 0)))
        self._backend = self.tokenizer.backend_tokenizer
        self._special = frozenset(self.tokenizer.all_special_ids)
        self._template = str(self.tokenizer.chat_template)
        self._empty_content = "" if _breaks_on_null(self.tokenizer) else None
        self._rendered: OrderedDict[bytes, list[int]] = OrderedDict()

    def encode(self, text: str) -> list[int]:
        """Text to token IDs, with nothing added."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def render(self, request: ChatRequest, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """The conversation as text.

        Raises:
            BadRequest: the model's template refuses the messages.
        """
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tools=request.tools or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **request.template_arguments,
            )
        except Exception as error:
            raise BadRequest(f"The chat template refuses these messages: {error}", "messages") from error
        return text

    def prompt(self, request: ChatRequest) -> RenderedPrompt:
        """The tokens of a request.

        Raises:
            BadRequest: recorded token IDs are outside the vocabulary, or the template refuses the messages or does not know
                `reasoning_effort`.
            ContextLengthExceeded: no room is left to generate.
        """
        if "reasoning_effort" in request.template_arguments and "reasoning_effort" not in self._template:
            raise BadRequest(
                "reasoning_effort is given, and this model's chat template does not know it. Leave it out.",
                "reasoning_effort",
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
        """The newest message of a conversation, an assistant's, as the tokens that a policy would have generated: what the
        template writes behind its generation prompt, to the end of the turn.

        Raises:
            BadRequest: the template refuses the messages, or does not write them so.
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
        return continue_prompt(
            recorded,
            self.render(request, messages[: index + 1], generation_prompt=False),
            self.render(request, messages, generation_prompt=True),
            end_of_turn=self.end_of_turn,
            end_of_turn_id=self.end_of_turn_id,
            encode=self.encode,
        )

    def message(
        self, generated: Generated, tools: list[dict[str, Any]], *, only_first_call: bool = False
    ) -> tuple[Message, str]:
        """The assistant message (without token fields) and the finish reason of an answer."""
        ids = generated.token_ids
        if ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        if tools:
            content, calls = self.parse_tool_calls(text, tools)
            if calls:
                # A call that the length limit cut off does not parse, so what parsed is whole.
                kept = calls[:1] if only_first_call else calls
                return {"role": "assistant", "content": content, "tool_calls": kept}, "tool_calls"
        if not self._special.isdisjoint(ids):
            text = self._backend.decode(ids, skip_special_tokens=True)
        return {"role": "assistant", "content": text}, generated.finish_reason

    def written(self, message: Message, tools: ToolCalls) -> str:
        """An assistant message as the chat template writes it, without what opens and ends its turn.

        Raises:
            BadRequest: the template refuses it.
        """
        asked = ChatRequest([{"role": "user", "content": "?"}], tools, Draw(0), "")
        messages = template_messages([*asked.messages, message], self._empty_content)
        opened = self.render(asked, messages[:1], generation_prompt=True)
        whole = self.render(asked, messages, generation_prompt=False)
        begins = next((k for k, (a, b) in enumerate(zip(opened, whole, strict=False)) if a != b), len(opened))
        return whole[begins:].split(self.end_of_turn)[0]

    def log_probs(self, generated: Generated) -> dict[str, Any]:
        """An answer's log-probabilities in OpenAI's form, one entry a token."""
        entries = []
        for token, log_prob in zip(generated.token_ids, generated.log_probs, strict=True):
            text: str = self._backend.decode([token], skip_special_tokens=False)
            entries.append({"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": entries}


def template_messages(messages: Sequence[Message], empty: str | None = None) -> list[Message]:
    """Messages as chat templates want them: text content as a string (`empty` where there is none, as beside a tool call),
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
    """Every token ID that ends an answer: the tokenizer's and those of generation_config.json."""
    ids: set[int] = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    path = Path(model_dir) / "generation_config.json"
    if path.is_file():
        eos = json.loads(path.read_text()).get("eos_token_id")
        ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if not ids:
        raise ConfigError(f"Neither tokenizer nor generation_config.json in {model_dir} names an end-of-turn token.")
    return frozenset(ids)


def _breaks_on_null(tokenizer: Any) -> bool:
    """Whether the chat template fails on `content: null` next to a tool call, or writes it as the word None."""
    call = {"id": "call_0", "type": "function", "function": {"name": "a", "arguments": {}}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    try:
        text: str = tokenizer.apply_chat_template([{"role": "user", "content": "a"}, turn], tokenize=False)
    except Exception:  # noqa: BLE001 - a template may raise anything
        return True
    return "None" in text


class ContinuationBroken(DataError):
    """The rendered conversation cannot be joined to the recorded tokens."""


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
        prefix_text: the conversation up to and including that message, rendered without generation prompt.
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
        raise ContinuationBroken(
            f"The chat template does not end turns with {end_of_turn!r}, so a recorded turn cannot be continued. Use a "
            "template that does, or send the messages without token fields."
        )
    if recorded[-1] == end_of_turn_id:
        position += len(end_of_turn)
    return [*recorded, *encode(whole_text[position:])]
