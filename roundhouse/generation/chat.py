"""Conversations to tokens and back, the same for every engine.

Invariants: a later turn's prompt begins with exactly the tokens that earlier turns saw and generated. With R = the
prompt and generation token IDs recorded on the newest assistant message that carries them, the prompt is R +
encode(tail), in which the tail is the rendered text from that message's end of turn on. No token of R is tokenised
again, so other merges of the same text do not matter. An answer's message equals its decoded token IDs; the end-of-turn
token counts among the IDs but is not shown in the text. `tool_calls.py` reads its tool calls.

Start of the tail: the end of turn after that message in the whole rendered conversation, in which a mark stands in the
message's text and calls. So a template may remove parts of earlier turns (old reasoning), and may end a turn by another
token than a conversation. An end of turn is a stop token, the token that the template writes after an answer, or the
token that begins the next turn (GLM). Only the template's ends of turn count: a message that spells one has a mark there
(`control_tokens.py`). If the recorded generation already ends with the end of turn, it is dropped from the tail; if a
length limit cut the generation, the tail supplies it.

    whole:  <user>hi<end> <assistant>he llo⟦mark⟧<end> <user>more<end> <assistant>
    tail:                                        <end> <user>more<end> <assistant>
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import orjson

from roundhouse.errors import ConfigError, DataError
from roundhouse.generation.control_tokens import TAGS, ControlTokens
from roundhouse.generation.protocol import TOKEN_FIELDS, BadRequest, ChatRequest, ContextLengthExceeded, Draw, Generated
from roundhouse.generation.tool_calls import (
    THOUGHT_START,
    ToolCalls,
    ToolParser,
    broken_call_problem,
    parse_hermes,
)
from roundhouse.generation.tool_formats import parse_harmony
from roundhouse.generation.tool_schemas import shown_tools
from roundhouse.images import BadImage, ImageReader, images_of
from roundhouse.pretrained import load_pretrained, text_part

Message = dict[str, Any]

PROMPT_ENDING = 8
"""Last tokens of a prompt that are searched for the beginning of a thought."""
PROBE_CALL = {"id": "call00000", "type": "function", "function": {"name": "a", "arguments": {}}}
"""A tool call to render. Mistral's templates accept only identifiers of nine letters and digits."""
ANSWERED = "answered-4b7e"
RETURNED = "returned-91ad"
"""Words that no template writes by itself."""
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
        images: ImageReader | None = None,
    ) -> None:
        """
        Args:
            template_date: the day that the chat template writes as today; None: the day of the rendering.
            images: None refuses messages with images.
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
        self.end_of_turn_id = min(self.stop_token_ids) if written is None else written
        self.end_of_turn: str = self.tokenizer.convert_ids_to_tokens(self.end_of_turn_id)
        self._turn_ends = TurnEnds(self.tokenizer, self.stop_token_ids, written)
        config = text_part(json.loads((Path(model_dir) / "config.json").read_text()))
        self.vocabulary = max(len(self.tokenizer), int(config.get("vocab_size", 0)))
        self._backend = self.tokenizer.backend_tokenizer
        self.control = ControlTokens(self._backend, self.stop_token_ids)
        added = self._backend.get_added_tokens_decoder()
        self._special = frozenset(self.tokenizer.all_special_ids) | {
            each for each, token in added.items() if token.special
        }
        self._template = str(self.tokenizer.chat_template)
        # What rendering is called with: an argument of the caller must not take its place
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters
        self._own_arguments = {*own, *self.tokenizer.special_tokens_map, "messages", "raise_exception", "strftime_now"}
        self._clock: dict[str, Any] = {} if template_date is None else {"strftime_now": template_date.strftime}
        self._forms = MessageForms.of_template(self.tokenizer)
        self._rendered: OrderedDict[bytes, list[int]] = OrderedDict()
        self.images = images
        if images is not None:  # a drawn placeholder would need an image
            self.stop_token_ids |= {images.token_id}

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
            BadRequest: recorded token IDs are outside the vocabulary, the template refuses the messages or does not know
                an argument, or an image cannot be shown to the model.
            ContextLengthExceeded: no room is left to generate.
        """
        for name in request.template_arguments:
            if name in self._own_arguments or re.search(rf"\b{re.escape(name)}\b", self._template) is None:
                raise BadRequest(
                    f"{name} is given, and it is not a variable of this model's chat template. Leave it out.",
                    name if name == "reasoning_effort" else "chat_template_kwargs",
                )
        images = self._images(request)
        # The message up to which the prompt's tokens are fixed, and those tokens
        index = newest_recorded(request.messages)
        if request.required_prefix is not None:
            roles = [message["role"] for message in request.messages]
            newest = len(roles) - 1 - roles[::-1].index("assistant")
            token_ids = self._continued(request, newest, request.required_prefix, images)
        elif index is not None:
            message = request.messages[index]
            recorded = [*message["prompt_token_ids"], *message["generation_token_ids"]]
            token_ids = self._continued(request, index, recorded, images)
        else:
            key = hashlib.sha256(orjson.dumps([request.messages, request.tools, request.template_arguments])).digest()
            cached = self._rendered.get(key)
            if cached is None:
                messages = template_messages(request.messages, self._forms)
                cached = self._shown(self.render(request, messages, generation_prompt=True), images)
                self._rendered[key] = cached
                if len(self._rendered) > RENDER_CACHE:
                    self._rendered.popitem(last=False)
            token_ids = list(cached)
        room = self.max_model_len - len(token_ids)
        if room <= 0:
            raise ContextLengthExceeded(len(token_ids), self.max_model_len)
        limit = room if request.draw.max_tokens <= 0 else min(request.draw.max_tokens, room)
        return RenderedPrompt(token_ids, replace(request.draw, max_tokens=limit, images=tuple(images)))

    def reply(self, request: ChatRequest) -> list[int]:
        """Return the newest message of a conversation, an assistant's, as generated tokens: the template's text after
        its generation prompt, up to the end of the turn.

        Raises:
            BadRequest: the template refuses the messages, or writes them differently.
        """
        messages = template_messages(request.messages, self._forms)
        prompt = self.render(request, messages[:-1], generation_prompt=True)
        text = self.render(request, messages, generation_prompt=False)
        end = self._turn_ends.of_newest(text, len(prompt))
        if not text.startswith(prompt) or end is None:
            raise BadRequest(
                "The chat template does not write an assistant message as its generation prompt, the text and an end of turn.",
                "messages",
            )
        return self.encode(text[len(prompt) : end[1]])

    def _images(self, request: ChatRequest) -> list[bytes]:
        """The images of a request.

        Raises:
            BadRequest: the engine reads text alone, or an image is not sent as data.
        """
        try:
            images = images_of(request.messages)
        except BadImage as error:
            raise BadRequest(str(error), "messages") from error
        if images and self.images is None:
            raise BadRequest(
                "The messages have images, and this engine reads text alone. Set generation.images to true.", "messages"
            )
        return images

    def _shown(self, text: str, images: Sequence[bytes]) -> list[int]:
        """The tokens of a rendered text, with the placeholders of these images."""
        ids = self.encode(text)
        if self.images is None:
            return ids
        try:
            return self.images.expanded(ids, images)
        except BadImage as error:
            raise BadRequest(str(error), "messages") from error

    def _continued(self, request: ChatRequest, index: int, recorded: list[int], images: Sequence[bytes]) -> list[int]:
        if min(recorded) < 0 or max(recorded) >= self.vocabulary:
            raise BadRequest(f"messages[{index}] carries token IDs outside 0..{self.vocabulary - 1}.", "messages")
        messages = template_messages(request.messages, self._forms)
        for message in messages[:index]:  # they are not in the tail, and some templates refuse arguments as text
            for call in message.get("tool_calls") or ():
                if isinstance(call["function"].get("arguments"), str) and not self._forms.text_arguments:
                    call["function"] = call["function"] | {"arguments": {}}
        messages[index] = self._turn_ends.marked(messages[index], self._forms)
        whole = self.render(request, messages, generation_prompt=True)
        tail = self._turn_ends.tail(whole, recorded[-1], bool(messages[index].get("tool_calls")))
        shown = 0
        if self.images is not None:
            shown = len(self.images.runs(recorded))
            try:
                misfit = self.images.misfit(recorded, images[:shown])
            except BadImage as error:
                raise BadRequest(f"messages[{index}]: {error}", "messages") from error
            if misfit:
                raise BadRequest(
                    f"messages[{index}]: the recorded tokens have {misfit}. They are of other images, or a reply drew a "
                    "placeholder: the conversation cannot be continued.",
                    "messages",
                )
        return [*recorded, *self._shown(tail, images[shown:])]

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
        whole = self.parse_tool_calls is parse_harmony  # its replies have a form without tools, too
        if tools or whole:
            ending = self._backend.decode(prompt_token_ids[-PROMPT_ENDING:], skip_special_tokens=False)
            content, calls = calls_of_reply(text, ending, generated.finish_reason, tools, self.parse_tool_calls)
            if calls:
                message_calls = calls[:1] if only_first_call else calls
                return {"role": "assistant", "content": content, "tool_calls": message_calls}, "tool_calls"
            if whole:
                return {"role": "assistant", "content": content or ""}, generated.finish_reason
        if not self._special.isdisjoint(ids):
            text = self._backend.decode(ids, skip_special_tokens=True)
        return {"role": "assistant", "content": text}, generated.finish_reason

    def written(self, message: Message, tools: ToolCalls) -> str:
        """Return an assistant message as the chat template writes it, without the start and end of its turn.

        Raises:
            BadRequest: the template refuses it.
        """
        request = ChatRequest([{"role": "user", "content": "?"}], tools, Draw(0), "")
        messages = template_messages([*request.messages, message], self._forms)
        opened = self.render(request, messages[:1], generation_prompt=True)
        whole = self.render(request, messages, generation_prompt=False)
        begins = next((k for k, (a, b) in enumerate(zip(opened, whole, strict=False)) if a != b), len(opened))
        end = self._turn_ends.of_newest(whole, begins)
        return self.control.unescape(whole[begins : len(whole) if end is None else end[0]])

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


@dataclass(frozen=True, slots=True)
class MessageForms:
    """The forms of a message that a chat template renders."""

    empty_content: str | None = None
    """Content of a message that has only tool calls."""
    text_arguments: bool = False
    """The arguments of tool calls are JSON text (DeepSeek V3), not an object."""

    @classmethod
    def of_template(cls, tokenizer: Any) -> MessageForms:
        """Find the forms by rendering a tool call: an object as arguments, if the template renders it, and null content, if
        it is not written as the word None."""
        for text_arguments in (False, True):
            forms = cls("", text_arguments)
            if _rendered_call(tokenizer, forms) is not None:
                written = _rendered_call(tokenizer, null := cls(None, text_arguments))
                return forms if written is None or "None" in written else null
        return cls("")


def _rendered_call(tokenizer: Any, forms: MessageForms) -> str | None:
    """Return a conversation with a tool call as the template writes it; None if it refuses it."""
    messages: list[Message] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [PROBE_CALL]},
    ]
    try:
        return str(tokenizer.apply_chat_template(template_messages(messages, forms), tokenize=False))
    except Exception:  # noqa: BLE001 - a template may raise anything
        return None


def template_messages(messages: Sequence[Message], forms: MessageForms = MessageForms()) -> list[Message]:
    """Convert messages for chat templates: text content as a string, and tool-call arguments as an object, unless `forms` has
    others."""
    rendered = []
    for message in messages:
        out = {key: value for key, value in message.items() if not key.endswith(("_token_ids", "_log_probs"))}
        content = message.get("content")
        if isinstance(content, list):
            images = any(part.get("type") == "image_url" for part in content)
            out["content"] = _parts(content) if images else "".join(part.get("text", "") for part in content)
        elif content is None and "content" in message:
            out["content"] = forms.empty_content
        if calls := message.get("tool_calls"):
            out["tool_calls"] = [_template_call(call, forms.text_arguments) for call in calls]
        rendered.append(out)
    return rendered


def _parts(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Content with images in the form of chat templates."""
    return [
        {"type": "image"} if part.get("type") == "image_url" else {"type": "text", "text": part["text"]}
        for part in content
    ]


def _template_call(call: dict[str, Any], text_arguments: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if text_arguments and not isinstance(arguments, str):
        return {**call, "function": {**function, "arguments": json.dumps(arguments or {}, ensure_ascii=False)}}
    if isinstance(arguments, str) and not text_arguments:
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
    if tokenizer.chat_template:
        written = end_of_turn_id(tokenizer)
        ids.update(_next_turn_ids(tokenizer, (False, True)) if written is None else [written])
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
    token = _first_added(tokenizer, ending) if answer else None
    if token is None and ending.strip() and answer:
        raise ConfigError(
            f"The chat template in {tokenizer.name_or_path} ends an assistant's turn with {ending.strip()!r}, and the "
            "tokenizer has no such token, so no reply would end. Add the token to the tokenizer, or name another template "
            "(policy.chat_template)."
        )
    return token


def _after_answer(tokenizer: Any, called: bool) -> tuple[str, str] | None:
    """Return the text between an answer and the next message, and the rest; None if the template refuses them.

    Args:
        called: the answer is a tool call, and the next message its result.
    """
    call = PROBE_CALL | {"function": {"name": "a", "arguments": {ANSWERED: ANSWERED}}}
    answer: Message = {"role": "assistant", "content": "" if called else ANSWERED}
    following: Message = {"role": "tool" if called else "user", "content": RETURNED}
    if called:
        answer["tool_calls"], following["tool_call_id"] = [call], PROBE_CALL["id"]
    for forms in (MessageForms(), MessageForms(text_arguments=True)):
        messages = template_messages([{"role": "user", "content": "a"}, answer, following], forms)
        try:
            text: str = tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # noqa: BLE001 - a template may raise anything, and many refuse tools
            continue
        between, returned, rest = text.rpartition(ANSWERED)[2].rpartition(RETURNED)
        return (between, rest) if ANSWERED in text and returned else None
    return None


def _next_turn_ids(tokenizer: Any, kinds: Sequence[bool]) -> set[int]:
    """Return the first token between an answer and the next message, for each kind of answer (`_after_answer`)."""
    texts = [_after_answer(tokenizer, called) for called in kinds]
    ids = [_first_added(tokenizer, text[0]) for text in texts if text is not None]
    return {token_id for token_id in ids if token_id is not None}


def _first_added(tokenizer: Any, text: str) -> int | None:
    """Return the first token of a text that is in addition to the text vocabulary and is not a tag of the policy."""
    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder()
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return next((token_id for token_id in ids if token_id in added and added[token_id].content not in TAGS), None)


class ContinuationBroken(DataError):
    """The rendered conversation cannot be joined to the recorded tokens."""


class TurnEnds:
    """The ends of an assistant's turn in the text of a chat template."""

    def __init__(self, tokenizer: Any, stop_token_ids: frozenset[int], written: int | None) -> None:
        """
        Args:
            written: `end_of_turn_id` of the tokenizer.
        """
        ids = stop_token_ids | (set() if written is None else _next_turn_ids(tokenizer, (False,)))
        texts = {token_id: tokenizer.convert_ids_to_tokens(token_id) for token_id in ids}
        self._texts: dict[int, str] = {token_id: text for token_id, text in texts.items() if text is not None}
        one = "|".join(re.escape(text) for text in sorted(self._texts.values(), key=len, reverse=True))
        self._ends = re.compile(f"(?:{one})+")
        self._close = re.compile(rf"({one})(?:\s|{one})*\Z")
        self._written = written
        self._mark = secrets.token_hex(8)  # no message spells it
        result = _after_answer(tokenizer, called=True)
        self._shows_calls = result is not None
        self._ends_calls = result is None or self._ends.search(result[0]) is not None

    def of_newest(self, text: str, begin: int) -> tuple[int, int] | None:
        """Return begin and end of the first token that ends a conversation whose newest message is an answer."""
        close = self._close.search(text, begin)
        return None if close is None else close.span(1)

    def marked(self, message: Message, forms: MessageForms) -> Message:
        """Return an assistant message with the mark as the arguments of its calls, or at the end of its content."""
        calls = message.get("tool_calls")
        if not calls or not self._shows_calls:
            return {**message, "content": (message.get("content") or "") + self._mark}
        arguments: Any = {self._mark: self._mark}
        if forms.text_arguments:
            arguments = json.dumps(arguments)
        marked = [{**call, "function": {**call["function"], "arguments": arguments}} for call in calls]
        # Gemma 4 writes content after the results of the calls
        return {**message, "content": forms.empty_content, "tool_calls": marked}

    def tail(self, whole: str, last: int, called: bool) -> str:
        """Return the text after the recorded tokens.

        Args:
            called: the message calls tools.
            whole: the conversation with a marked message, rendered with generation prompt. Only the template spells ends
                of turn in it (`ControlTokens.escape`).
            last: the last recorded token.

        Raises:
            ContinuationBroken: no end of turn follows the message.
        """
        begin = whole.rfind(self._mark)
        ends = None if begin < 0 or (called and not self._ends_calls) else self._ends.search(whole, begin)
        if ends is None:
            names = ", ".join(sorted(self._texts.values()))
            raise ContinuationBroken(
                f"The chat template does not end {'a tool call' if called else 'an answer'} with one of {names}, so the "
                "recorded turn cannot be continued. Add the token that it writes there to eos_token_id in "
                "generation_config.json, use a template that ends turns, or send the messages without token fields."
            )
        position = ends.group().find(self._texts.get(last, self._mark))
        if position >= 0:
            return whole[ends.start() + position + len(self._texts[last]) :]
        return whole[ends.end() if last == self._written else ends.start() :]


def newest_recorded(messages: Sequence[dict[str, Any]]) -> int | None:
    """Index of the newest message that carries recorded tokens."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get(TOKEN_FIELDS[0]):
            return index
    return None
