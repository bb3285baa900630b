"""A rollout's conversation, its model calls joined into turns, and the dialogue within a token budget.

Invariants: each reply and tool output is converted once, on arrival (chat messages for the engine, Responses items for
the record, turns for training). No call gets more `max_new_tokens` than the rollout has left; a reply that does not fit
sets `limit`. Each call has a seed derived from the rollout's. A turn stores only the prompt tokens that its parent does
not have; a prompt that continues no earlier call is a new root. Validation decides later if such a break is allowed.

    call 0: prompt p0, generates g0               turn(parent=None, new=p0)
    call 1: prompt p0+g0+t, generates g1          turn(parent=0, new=t)
    call 2: prompt q (history re-rendered)        turn(parent=None, new=q)
    call 3: prompt p0+g0+t+g1+u, generates g3     turn(parent=1, new=u)

`chain_calls` joins recorded calls of a foreign agent by tokens alone: the parent is the earlier call with the longest
prefix. Calls with equal prompts are siblings. If the parent is ambiguous, the result reports it and the rollout is not
trained on. Each prompt is hashed once, with a digest at each length at which a call ends; token lists are never
compared.

On-policy rollouts are sampled exactly from the distribution that the trainer computes, so a row with other sampling
parameters is rejected. A row's limits can only tighten the run's limits.

    on_policy, run at temperature 1:  {"temperature": 0.2}        -> BadTaskRow
    evaluation:                       {"temperature": 0.2}        -> sampling.temperature 0.2
    either, run with 512 new tokens:  {"max_output_tokens": 64}   -> sampling.max_new_tokens 64
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from roundhouse.config.models import Sampling
from roundhouse.environments.base import TaskRow
from roundhouse.generation.protocol import TOKEN_FIELDS, Completion, ContextOverflow
from roundhouse.images import image_names
from roundhouse.rollout.protocol import BadCompletion, BadTaskRow
from roundhouse.rollout.responses import (
    Item,
    Message,
    assistant_items,
    chat_messages,
    chat_tools,
    function_call_output,
    response_object,
    tool_message,
)
from roundhouse.trajectories.records import GrowingDigest, Turn, derive_seed
from roundhouse.trajectories.storable import call_problem, storable_json, storable_text

if TYPE_CHECKING:
    from roundhouse.rollout.agents import RolloutAttempt


class TurnChain:
    """Turns of one conversation: one per call, a tree if calls continue older ones."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.tokens: list[int] = []
        """Prompt and generation of the newest call."""
        self._digest = GrowingDigest()
        """Running digest of `tokens`."""
        self._images: list[int] = []
        """Number of images of each prompt."""
        self._left: dict[int, list[int]] = {}
        """Prompt and generation of the other calls that none continues, by turn: every earlier call's begin one of them."""

    def add(
        self,
        prompt: list[int],
        generated: list[int],
        log_probs: list[float],
        *,
        policy_version: int,
        finish_reason: str,
        latency_seconds: float = 0.0,
        version_spans: list[dict[str, int]] | None = None,
        images: Sequence[str] = (),
    ) -> Turn:
        """Record a call.

        Args:
            images: names of all images of the prompt, in order.

        Raises:
            BadCompletion: a field has another type, or a number that cannot be stored.
        """
        newest = len(self.turns) - 1
        parent, known = self._continued(prompt) if isinstance(prompt, list) else (None, 0)
        added = prompt[known:] if known else prompt
        if problem := call_problem(added, generated, log_probs, policy_version, version_spans):
            raise BadCompletion(f"A model call cannot be recorded: {problem}.")
        continues = parent is not None and parent == newest
        digest = self._digest if continues else GrowingDigest()
        turn = Turn(
            turn=len(self.turns),
            parent=parent,
            prompt_token_ids=list(added),
            prompt_length=len(prompt),
            prompt_digest=digest.extend(added if continues else prompt),
            generation_token_ids=generated,
            generation_log_probs=log_probs,
            policy_version=policy_version,
            finish_reason=finish_reason,
            latency_seconds=latency_seconds,
            version_spans=version_spans,
            images=list(images[0 if parent is None else self._images[parent] :]) or None,
        )
        self._images.append(len(images))
        digest.extend(generated)
        if self.turns and not continues:
            self._left[newest] = self.tokens
        if parent is not None:
            self._left.pop(parent, None)
        self._digest = digest
        self.turns.append(turn)
        self.tokens = prompt + generated
        return turn

    def _continued(self, prompt: list[int]) -> tuple[int | None, int]:
        """Return the newest call whose tokens are the longest prefix of `prompt`, and the prefix length."""
        newest = len(self.turns) - 1
        if self.turns and not self._left and prompt[: len(self.tokens)] == self.tokens:
            return newest, len(self.tokens)
        parent: int | None = None
        known = 0
        for leaf, tokens in reversed([*self._left.items(), (newest, self.tokens)] if self.turns else []):
            turn: int | None = leaf
            while turn is not None:
                end = self.turns[turn].prompt_length + len(self.turns[turn].generation_token_ids)
                if end <= known:
                    break
                if prompt[:end] == tokens[:end]:
                    parent, known = turn, end
                    break
                turn = self.turns[turn].parent
        return parent, known


MISSING_TOKENS = "missing_tokens"
MALFORMED_TOKENS = "malformed_tokens"
MISSING_VERSION = "missing_policy_version"
EQUAL_PARENTS = "equal_parents"


@dataclass(frozen=True, slots=True)
class ChainedCalls:
    """Turns of a rollout, with a reason if they must not be trained on."""

    turns: list[Turn] = field(default_factory=list)
    reason: str | None = None
    """One of this module's codes; None when the calls join in one way only."""
    detail: str = ""
    """The calls concerned, in words."""

    @property
    def roots(self) -> int:
        return sum(turn.parent is None for turn in self.turns)


class _Unusable(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(slots=True)
class _Call:
    """A recorded call with its tokens as bytes, for hashing."""

    number: int
    record: Mapping[str, Any]
    prompt: array[int]
    generation: array[int]
    ends: int
    """Length of prompt and generation."""
    end_digest: bytes = b""
    parent: int | None = None


def chain_calls(calls: Sequence[Mapping[str, Any]], policy_version: int | None = None) -> ChainedCalls:
    """Return turns for the calls that generated tokens, in call order.

    A call without generated tokens cannot be trained on and is skipped.

    Args:
        calls: records of the model server's `GET /captures/<id>`: `call` (start order), `prompt_token_ids`,
            `generation_token_ids`, `generation_log_probs`, `policy_version`, `version_spans`, `finish_reason`,
            `latency_seconds`.
        policy_version: weights version for calls without a reported version; it must have been constant.

    Returns:
        The turns that could be joined (empty if tokens are missing), and a reason if joining failed:
        `missing_tokens`, `malformed_tokens`, `missing_policy_version`: a record is incomplete;
        `equal_parents`: two calls end in equal tokens but generated different parts of them, and a later call continues
        them.
    """
    try:
        read = sorted(map(_read, calls), key=lambda call: call.number)
        generated = [call for call in read if call.generation]
        _join(generated)
        turns = [_turn(place, generated, policy_version) for place in range(len(generated))]
    except _Unusable as error:
        return ChainedCalls(reason=error.reason, detail=str(error))
    reason, detail = _doubt(generated)
    return ChainedCalls(turns, reason, detail)


def _read(call: Any) -> _Call:
    number = call.get("call") if isinstance(call, Mapping) else None
    if not isinstance(number, int):
        raise _Unusable(MALFORMED_TOKENS, "a recorded call has no number")
    lists = [call.get(key) for key in TOKEN_FIELDS]
    if any(value is None for value in lists):
        raise _Unusable(MISSING_TOKENS, f"call {number} has no token IDs")
    prompt, generation, log_probs = lists
    version = call.get("policy_version")
    problem = call_problem(prompt, generation, log_probs, 0 if version is None else version, call.get("version_spans"))
    if not problem and len(generation) != len(log_probs):
        problem = f"{len(generation)} generated tokens and {len(log_probs)} log-probabilities"
    latency, finish = call.get("latency_seconds") or 0.0, call.get("finish_reason") or "stop"
    if not isinstance(latency, int | float) or not isinstance(finish, str):
        problem = problem or f"latency_seconds is {latency!r} and finish_reason {finish!r}"
    if problem:
        raise _Unusable(MALFORMED_TOKENS, f"call {number}: {problem}")
    tokens = array("i", prompt), array("i", generation)
    return _Call(number, call, *tokens, ends=len(prompt) + len(generation))


def _join(calls: list[_Call]) -> None:
    """Set each call's parent."""
    boundaries = sorted({call.ends for call in calls})
    ending: dict[bytes, int] = {}
    """Newest call per token digest. If one prompt got the same reply twice, either call may be the parent."""
    for place, call in enumerate(calls):
        # Digests of the prompt at each boundary inside it; sets `end_digest` on the way
        running, taken, candidates = hashlib.blake2b(digest_size=16), 0, []
        data = memoryview(call.prompt).cast("B")
        width = call.prompt.itemsize
        for boundary in boundaries:
            if boundary > len(call.prompt):
                break
            running.update(data[taken * width : boundary * width])
            taken = boundary
            candidates.append(running.digest())
        running.update(data[taken * width :])
        running.update(memoryview(call.generation).cast("B"))
        call.end_digest = running.digest()
        for digest in reversed(candidates):
            if (parent := ending.get(digest)) is not None:
                call.parent = parent
                break
        ending[call.end_digest] = place


def _doubt(calls: Sequence[_Call]) -> tuple[str | None, str]:
    """Why the calls could be joined in another way as well."""
    by_end: dict[bytes, list[_Call]] = defaultdict(list)
    for call in calls:
        alike = [] if call.parent is None else by_end[calls[call.parent].end_digest]
        if len({len(each.prompt) for each in alike}) > 1:
            numbers = " and ".join(str(each.number) for each in alike)
            return EQUAL_PARENTS, f"call {call.number} continues calls {numbers} alike"
        by_end[call.end_digest].append(call)
    return None, ""


def _turn(place: int, calls: Sequence[_Call], policy_version: int | None) -> Turn:
    call = calls[place]
    version = call.record.get("policy_version")
    if version is None and (version := policy_version) is None:
        raise _Unusable(MISSING_VERSION, f"the engine did not return the policy version of call {call.number}")
    known = 0 if call.parent is None else calls[call.parent].ends
    return Turn(
        turn=place,
        parent=call.parent,
        prompt_token_ids=call.prompt[known:].tolist(),
        prompt_length=len(call.prompt),
        prompt_digest=hashlib.sha256(call.prompt).hexdigest()[:16],
        generation_token_ids=call.generation.tolist(),
        generation_log_probs=list(call.record["generation_log_probs"]),
        policy_version=version,
        finish_reason=call.record.get("finish_reason") or "stop",
        latency_seconds=float(call.record.get("latency_seconds") or 0.0),
        version_spans=call.record.get("version_spans"),
    )


class Conversation:
    """Conversation of one rollout: the input of a task row, followed by replies and tool outputs."""

    def __init__(self, row: TaskRow, item_id: str, system_prompt: str | None = None) -> None:
        """
        Args:
            item_id: begins the ids of this conversation's items.
            system_prompt: the first message, unless the row has a system message or instructions.

        Raises:
            BadTaskRow, UnsupportedItem: the row's input or tools cannot be used.
        """
        try:
            params = row["responses_create_params"]
            initial = params["input"]
            self.messages: list[Message] = chat_messages(initial, params.get("instructions"))
            if system_prompt and self.messages[:1] and self.messages[0]["role"] != "system":
                params = {**params, "instructions": system_prompt}
                self.messages = chat_messages(initial, system_prompt)
            self.tools = chat_tools(params.get("tools") or [])
            items = [{"role": "user", "content": initial}] if isinstance(initial, str) else initial
            self.items: list[Item] = [{"type": "message", **item} for item in items]
        except (KeyError, TypeError, AttributeError) as error:
            raise BadTaskRow(f"responses_create_params is malformed: {error!r}") from error
        self._images = image_names(self.messages)
        self.params: dict[str, Any] = params
        self.chain = TurnChain()
        self.turns = self.chain.turns
        self.input_tokens = 0
        self.output_tokens = 0
        self.call_ends: list[int] = []
        """For each model call, the index of its last item in `output`."""
        self._newest: tuple[int, Message] | None = None
        """Index of the newest reply in `messages`, and the reply without its tokens."""
        self._given = len(self.items)
        self._item_id = item_id

    def offer(self, tools: Sequence[dict[str, Any]]) -> None:
        """Add tools to those of the row.

        Raises:
            UnsupportedItem: the schema of a tool cannot be used.
        """
        tools = storable_json(list(tools))
        self.params = {**self.params, "tools": [*(self.params.get("tools") or []), *tools]}
        self.tools = [*self.tools, *chat_tools(tools)]

    @property
    def output(self) -> list[Item]:
        """Return the new items of all turns."""
        return self.items[self._given :]

    def add_reply(self, completion: Completion) -> list[dict[str, Any]]:
        """Record a model call and return the tool calls of its reply, in order.

        Raises:
            BadCompletion: the engine's answer is malformed.
        """
        if completion.finish_reason not in ("stop", "tool_calls", "length"):
            raise BadCompletion(
                f"The engine ended a reply with finish_reason {completion.finish_reason!r}, which is not stop, tool_calls "
                "or length."
            )
        try:
            self.chain.add(
                completion.prompt_token_ids,
                completion.generation_token_ids,
                completion.generation_log_probs,
                policy_version=completion.policy_version,
                finish_reason=completion.finish_reason,
                latency_seconds=completion.latency_seconds,
                version_spans=completion.version_spans,
                images=self._images,
            )
            self.items += assistant_items(completion.message, f"{self._item_id}_{len(self.turns) - 1}")
            calls = completion.message.get("tool_calls") or []
        except (KeyError, TypeError, AttributeError) as error:
            raise BadCompletion(f"The engine's answer is malformed: {error!r}") from error
        self.input_tokens += len(completion.prompt_token_ids)
        self.output_tokens += len(completion.generation_token_ids)
        # The reply as the next call's history. Only the newest carries its tokens, which hold all earlier ones: to
        # carry them on every reply would cost memory that grows with the square of the turns.
        if self._newest is not None:
            index, bare = self._newest
            self.messages[index] = bare
        self._newest = (len(self.messages), completion.message)
        self.messages.append(
            {
                **completion.message,
                "prompt_token_ids": completion.prompt_token_ids,
                "generation_token_ids": completion.generation_token_ids,
                "generation_log_probs": completion.generation_log_probs,
            }
        )
        self.call_ends.append(len(self.items) - self._given - 1)
        return calls

    def add_empty_reply(self) -> None:
        """Add an empty assistant message in place of a reply that did not fit into the model's context."""
        self.items += assistant_items({"content": ""}, f"{self._item_id}_0")

    def add_tool_output(self, call_id: str, text: str) -> None:
        text = storable_text(text)
        self.messages.append(tool_message(call_id, text))
        self.items.append(function_call_output(call_id, text))

    def add_observation(self, text: str) -> None:
        """Add a user message: to the input before the first reply, to the rollout's output after it."""
        text = storable_text(text)
        self.messages.append({"role": "user", "content": text})
        self.items.append({"type": "message", "role": "user", "content": text})
        if not self.turns:
            self._given = len(self.items)


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the policy."""

    items: list[Item]
    calls: list[dict[str, Any]]
    """Tool calls in chat shape, in order."""
    limit: str
    """`length` or `max_tokens` when such a limit cut the reply or leaves nothing after it; else empty."""
    completion: Completion


class Dialogue:
    """Conversation of one attempt, with the engine's replies and the rollout's token budget."""

    def __init__(self, attempt: RolloutAttempt) -> None:
        """
        Raises:
            BadTaskRow, UnsupportedItem: the row cannot be used.
        """
        rollout = attempt.rollout
        self.conversation = Conversation(rollout.task, f"msg_{rollout.seed:08x}", attempt.config.system_prompt)
        rollout.task = {**rollout.task, "responses_create_params": self.conversation.params}
        rollout.items, rollout.turns = self.conversation.items, self.conversation.turns
        self.terms = sampling_overrides(self.conversation.params, attempt.sampling, attempt.on_policy)
        if not self.terms.tools:
            self.conversation.tools = []
        self._attempt = attempt

    def offer(self, tools: Sequence[dict[str, Any]]) -> None:
        """Offer the policy more tools than its row has; they are added to the recorded row."""
        row_tools, rollout = self.conversation.tools, self._attempt.rollout
        self.conversation.offer(tools)
        if not self.terms.tools:
            self.conversation.tools = row_tools
        rollout.task = {**rollout.task, "responses_create_params": self.conversation.params}

    async def ask(self) -> Reply | None:
        """Request the policy's next reply and record it.

        Return None if the conversation fills `rollout.max_tokens`, or exceeds the model's context.

        Raises:
            ContextOverflow: the task alone exceeds the context, and the attempt does not judge such rollouts.
            InfraError, DataError: the engine failed or refused.
        """
        conversation, limit = self.conversation, self._attempt.config.max_tokens
        room = limit - len(conversation.chain.tokens)
        if room <= 0:
            return None
        try:
            completion = await self._complete(len(conversation.turns), room)
        except ContextOverflow:
            if not conversation.turns:
                if not self._attempt.judges_overflow:
                    raise
                conversation.add_empty_reply()
            return None
        first_item = len(conversation.items)
        calls = conversation.add_reply(completion)
        used, cut_short = len(conversation.chain.tokens), completion.finish_reason == "length"
        reached = ""
        if used > limit or (used == limit and (calls or cut_short)):
            reached = "max_tokens"
        elif cut_short:
            reached = "max_tokens" if room < self.terms.sampling.max_new_tokens else "length"
        return Reply(conversation.items[first_item:], calls, reached, completion)

    async def _complete(self, turn: int, room: int) -> Completion:
        sampling = self.terms.sampling
        if room < sampling.max_new_tokens:
            sampling = sampling.model_copy(update={"max_new_tokens": room})
        start = time.perf_counter()
        try:
            return await self._attempt.policy.complete(
                self.conversation.messages,
                self.conversation.tools,
                sampling,
                derive_seed(self._attempt.rollout.seed, turn),
            )
        finally:
            self._attempt.rollout.generation_seconds += time.perf_counter() - start

    def response(self, finish: str) -> dict[str, Any]:
        """Return all items of the policy and the environment as one Responses object."""
        conversation, rollout = self.conversation, self._attempt.rollout
        self._attempt.call_ends = conversation.call_ends
        return response_object(
            f"resp_{rollout.seed:08x}",
            conversation.output,
            model="policy",
            created_at=rollout.started_at,
            finish_reason="length" if finish in ("length", "max_tokens") else "stop",
            input_tokens=conversation.input_tokens,
            output_tokens=conversation.output_tokens,
            params=conversation.params,
        )

    def response_of(self, reply: Reply) -> dict[str, Any]:
        """Return one reply alone as a Responses object."""
        rollout, completion = self._attempt.rollout, reply.completion
        return response_object(
            f"resp_{rollout.seed:08x}_{len(rollout.turns) - 1}",
            reply.items,
            model="policy",
            created_at=rollout.started_at,
            finish_reason=completion.finish_reason,
            input_tokens=len(completion.prompt_token_ids),
            output_tokens=len(completion.generation_token_ids),
            params=self.conversation.params,
        )


@dataclass(frozen=True, slots=True)
class SamplingOverrides:
    """Sampling and tool rules of one rollout."""

    sampling: Sampling
    tools: bool
    """False with `tool_choice: none`: the policy sees no tools."""
    together: bool
    """False: `parallel_tool_calls` is false, and calls of one reply are run one after another. All of them, as NeMo Gym's
    `simple_agent` runs whatever it is given: that a reply has one call is the engine's affair."""
    max_tool_calls: int | None
    """Calls that are run in the whole rollout; None means any number."""


def sampling_overrides(params: Mapping[str, Any], sampling: Sampling, on_policy: bool) -> SamplingOverrides:
    """Apply a row's `responses_create_params` to the run's `sampling`.

    Raises:
        BadTaskRow: a parameter is unsupported, or would make the rollout unfit for training.
    """
    return SamplingOverrides(
        sampling=_sampling(params, sampling, on_policy),
        tools=_shows_tools(params.get("tool_choice")),
        together=params.get("parallel_tool_calls") is not False,
        max_tool_calls=_limit(params, "max_tool_calls", smallest=0),
    )


def _sampling(params: Mapping[str, Any], sampling: Sampling, on_policy: bool) -> Sampling:
    changes: dict[str, Any] = {}
    for name, ours in (("temperature", sampling.temperature), ("top_p", sampling.top_p)):
        value = params.get(name)
        if value is None or value == ours:
            continue
        if on_policy:
            raise BadTaskRow(
                f"responses_create_params.{name} is {value}, but the run draws with generation.sampling.{name}={ours}: the "
                "trainer would compute the ratio for another distribution. Remove it from the row, or set it equal."
            )
        changes[name] = value
    longest = _limit(params, "max_output_tokens", smallest=1)
    if longest is not None and longest < sampling.max_new_tokens:
        changes["max_new_tokens"] = longest
    if not changes:
        return sampling
    try:
        return Sampling.model_validate(sampling.model_dump() | changes)
    except ValidationError as error:
        raise BadTaskRow(f"responses_create_params: {changes} cannot be sampled with: {error}") from error


def _shows_tools(choice: Any) -> bool:
    if choice in (None, "auto"):
        return True
    if choice == "none":
        return False
    raise BadTaskRow(
        f"responses_create_params.tool_choice is {choice!r}: a forced call changes the distribution of the policy, which no "
        "trainer accounts for, so the engine refuses it. Use auto or none."
    )


def _limit(params: Mapping[str, Any], name: str, smallest: int) -> int | None:
    value = params.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise BadTaskRow(
            f"responses_create_params.{name} is {value!r}: give a whole number of at least {smallest}, or leave it out."
        )
    return value
