"""Model calls of a rollout joined into turns, each holding only the tokens that its prompt adds.

`TurnChain` grows call by call. Invariant: where a prompt begins with everything before it, the turn continues the one before
and stores the rest; where it does not, the turn is a new root and stores its whole prompt. Whether a break is allowed is judged
later, by validation.

    call 0: prompt p0, generates g0        turn(parent=None, new=p0)
    call 1: prompt p0+g0+t, generates g1   turn(parent=0, new=t)
    call 2: prompt q (history re-rendered) turn(parent=None, new=q)

`chain_calls` joins the recorded calls of a foreign agent by their tokens alone. Invariant: a turn's parent is the earlier call
whose prompt and generation together are the longest prefix of the turn's prompt; a prompt that continues no call is a root of
its own (a sub-agent, a compacted history). Where the tokens leave open which call the agent continued, the result says so and
the rollout must not be trained on.

    call 0: prompt p0, generates g0               root
    call 1: prompt p0+g0+t, generates g1          parent 0, adds t
    call 2: prompt q, generates g2                root (a sub-agent)
    call 3: prompt p0+g0+t+g1+u, generates g3     parent 1, adds u

Cost: each prompt is hashed once, with a digest taken at those lengths where some call ends; token lists are never compared.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roundhouse.trajectories.records import Turn
from roundhouse.trajectories.tokens import GrowingDigest


class TurnChain:
    """Grows by one turn a call."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.tokens: list[int] = []
        """Prompt and generation of the newest call."""
        self._digest = GrowingDigest()
        """Of `tokens`."""

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
    ) -> Turn:
        """Record a call.

        Raises:
            TypeError, OverflowError: prompt or generation hold something else than token IDs.
        """
        known = len(self.tokens)
        continues = bool(self.turns) and prompt[:known] == self.tokens
        added = prompt[known:] if continues else prompt
        digest = self._digest if continues else GrowingDigest()
        turn = Turn(
            turn=len(self.turns),
            parent=len(self.turns) - 1 if continues else None,
            prompt_token_ids=added,
            prompt_length=len(prompt),
            prompt_digest=digest.extend(added),
            generation_token_ids=generated,
            generation_log_probs=log_probs,
            policy_version=policy_version,
            finish_reason=finish_reason,
            latency_seconds=latency_seconds,
            version_spans=version_spans,
        )
        digest.extend(generated)
        self._digest = digest
        self.turns.append(turn)
        self.tokens = prompt + generated
        return turn


MISSING_TOKENS = "missing_tokens"
MALFORMED_TOKENS = "malformed_tokens"
MISSING_VERSION = "missing_policy_version"
REPEATED_PROMPT = "repeated_prompt"
EQUAL_PARENTS = "equal_parents"


@dataclass(frozen=True, slots=True)
class ChainedCalls:
    """The turns of a rollout, and why they are not to be trained on, where they are not."""

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

    number: Any
    record: Mapping[str, Any]
    prompt: array[int]
    generation: array[int]
    ends: int
    """Length of prompt and generation."""
    end_digest: bytes = b""
    parent: int | None = None


def chain_calls(calls: Sequence[Mapping[str, Any]], policy_version: int | None = None) -> ChainedCalls:
    """Turns of the calls that generated tokens, in order of the calls.

    A call without any generated token has nothing to train on and is left out.

    Args:
        calls: as `GET /captures/<id>` of the model server gives them: `call` (order of their beginning), `prompt_token_ids`,
            `generation_token_ids`, `generation_log_probs`, `policy_version`, `finish_reason`, `latency_seconds`.
        policy_version: version of the weights for calls whose engine did not tell; it must then have been the same throughout.

    Returns:
        With a reason, the turns are those that could be joined (none where tokens are missing):
        `missing_tokens`, `malformed_tokens`, `missing_policy_version`: a record is incomplete;
        `repeated_prompt`: two calls have the same prompt (a retry, of which the agent used one answer, or a sampling of
        several), so that nothing tells whose tokens the agent's result rests on;
        `equal_parents`: two calls end in the same tokens and a later one goes on from them.
    """
    try:
        read = [_read(call) for call in sorted(calls, key=lambda call: call["call"])]
        generated = [call for call in read if call.generation]
        _join(generated)
        turns = [_turn(place, generated, policy_version) for place in range(len(generated))]
    except _Unusable as error:
        return ChainedCalls(reason=error.reason, detail=str(error))
    reason, detail = _doubt(generated)
    return ChainedCalls(turns, reason, detail)


def _read(call: Mapping[str, Any]) -> _Call:
    number = call["call"]
    lists = [call.get(key) for key in ("prompt_token_ids", "generation_token_ids", "generation_log_probs")]
    if any(value is None for value in lists):
        raise _Unusable(MISSING_TOKENS, f"call {number} has no token IDs")
    prompt, generation, log_probs = lists
    if len(generation or ()) != len(log_probs or ()):
        raise _Unusable(
            MALFORMED_TOKENS,
            f"call {number} has {len(generation or ())} generated tokens and {len(log_probs or ())} log-probabilities",
        )
    try:
        tokens = array("i", prompt or ()), array("i", generation or ())
    except (TypeError, OverflowError) as error:
        raise _Unusable(MALFORMED_TOKENS, f"call {number}: {error}") from error
    return _Call(number, call, *tokens, ends=len(tokens[0]) + len(tokens[1]))


def _join(calls: list[_Call]) -> None:
    """Set each call's parent."""
    boundaries = sorted({call.ends for call in calls})
    ending: dict[bytes, int] = {}
    """The first call that ends in these tokens."""
    for place, call in enumerate(calls):
        for digest in reversed(_digests(call, boundaries)):
            if (parent := ending.get(digest)) is not None:
                call.parent = parent
                break
        ending.setdefault(call.end_digest, place)


def _digests(call: _Call, boundaries: Sequence[int]) -> list[bytes]:
    """Digests of the prompt at each boundary inside it; sets `end_digest` on the way."""
    running, taken, found = hashlib.blake2b(digest_size=16), 0, []
    data = memoryview(call.prompt).cast("B")
    width = call.prompt.itemsize
    for boundary in boundaries:
        if boundary > len(call.prompt):
            break
        running.update(data[taken * width : boundary * width])
        taken = boundary
        found.append(running.digest())
    running.update(data[taken * width :])
    running.update(memoryview(call.generation).cast("B"))
    call.end_digest = running.digest()
    return found


def _doubt(calls: Sequence[_Call]) -> tuple[str | None, str]:
    """Why the calls could be joined in another way as well."""
    by_prompt: dict[bytes, list[Any]] = defaultdict(list)
    by_end: dict[bytes, list[Any]] = defaultdict(list)
    for call in calls:
        by_prompt[call.prompt.tobytes()].append(call.number)
        by_end[call.end_digest].append(call.number)
    for numbers in by_prompt.values():
        if len(numbers) > 1:
            return REPEATED_PROMPT, f"calls {_list(numbers)} have the same prompt"
    for call in calls:
        if call.parent is not None and len(numbers := by_end[calls[call.parent].end_digest]) > 1:
            return EQUAL_PARENTS, f"call {call.number} continues calls {_list(numbers)} alike"
    return None, ""


def _turn(place: int, calls: Sequence[_Call], policy_version: int | None) -> Turn:
    call = calls[place]
    version = call.record.get("policy_version")
    if version is None and (version := policy_version) is None:
        raise _Unusable(
            MISSING_VERSION, f"the engine did not tell which version of the policy answered call {call.number}"
        )
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
    )


def _list(numbers: Sequence[Any]) -> str:
    return " and ".join(str(number) for number in numbers)
