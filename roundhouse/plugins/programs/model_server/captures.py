"""Token IDs of the calls made under a rollout's ID, kept in memory for its collector.

Invariant: calls, bytes and age are bounded, and a record that lost a call is marked for ever (`complete` is false): a
rollout is trained on with all of its calls or not at all. Whole rollouts are dropped, the longest untouched first. A
call that repeats another one, by its client's header, takes that one's place, so that no request counts twice.

    number = captures.begin("7-0")          an agent calls the model
    captures.record("7-0", number, answer)  it was answered
    captures.read("7-0")                    {"calls": [{"call": 0, "prompt_token_ids": […], …}], "complete": true, …}
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from roundhouse.generation.protocol import TOKEN_FIELDS
from roundhouse.plugins.programs.model_server.answer import ModelAnswer

REMEMBERED_LOSSES = 100_000
"""Number of remembered IDs of lost rollouts."""


@dataclass(frozen=True, slots=True)
class HttpAttempt:
    """A request's data about its repetitions."""

    name: bytes
    """Common name of attempts that only their clients can distinguish."""
    repeats: bytes
    """Name of the replaced attempt; empty for a first one."""


def http_attempt(headers: Mapping[bytes, bytes], body: Any) -> HttpAttempt | None:
    """Read the headers: `Idempotency-Key`, equal in all attempts at a request, or the number of the retry, as the SDKs
    of OpenAI and Anthropic send it, of a request with this body. None: each request counts."""
    if key := headers.get(b"idempotency-key"):
        return HttpAttempt(key, key)
    retry = headers.get(b"x-stainless-retry-count", b"")
    if not retry.isdigit():
        return None
    digest = hashlib.blake2b(orjson.dumps(body, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
    number = int(retry)
    return HttpAttempt(digest + b"%d" % number, digest + b"%d" % (number - 1) if number else b"")


@dataclass(slots=True)
class CapturedCall:
    """One answered call; tokens as 4-byte, log-probabilities as 8-byte numbers."""

    number: int
    prompt: array[int] | None
    generation: array[int] | None
    log_probs: array[float] | None
    policy_version: int | None
    version_spans: list[dict[str, int]] | None
    finish_reason: str
    started_at: float
    latency_seconds: float

    @property
    def size(self) -> int:
        """Memory in bytes, of the token lists."""
        return sum(
            len(part) * part.itemsize for part in (self.prompt, self.generation, self.log_probs) if part is not None
        )

    def token_fields(self) -> dict[str, Any]:
        """Return the three lists by their names; null for missing ones."""
        lists = zip(TOKEN_FIELDS, (self.prompt, self.generation, self.log_probs), strict=True)
        return {name: None if part is None else part.tolist() for name, part in lists}

    def as_json(self) -> dict[str, Any]:
        return {
            "call": self.number,
            **self.token_fields(),
            "policy_version": self.policy_version,
            "version_spans": self.version_spans,
            "finish_reason": self.finish_reason,
            "started_at": self.started_at,
            "latency_seconds": self.latency_seconds,
        }


@dataclass(slots=True)
class _CaptureRecord:
    touched_at: float
    calls: list[CapturedCall] = field(default_factory=list)
    begun: dict[int, float] = field(default_factory=dict)
    """When the calls in flight began, in seconds since the epoch."""
    ends: dict[bytes, CapturedCall] = field(default_factory=dict)
    """Calls by the digest of the conversation that their reply ends."""
    attempts: dict[bytes, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Calls by their clients' attempt names, without replaced ones."""
    superseded: set[int] = field(default_factory=set)
    """Calls in flight after their caller has left."""
    next_number: int = 0
    size: int = 0


class Captures:
    """The records of all rollouts."""

    def __init__(
        self,
        max_calls: int,
        max_bytes: int,
        max_age_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._max_age = max_age_seconds
        self._clock = clock
        self._records: OrderedDict[str, _CaptureRecord] = OrderedDict()
        self._lost: OrderedDict[str, None] = OrderedDict()
        self.calls = 0
        self.bytes = 0

    def begin(self, rollout: str, attempt: HttpAttempt | None = None) -> int:
        """Start a call and return its number, in start order.

        Args:
            attempt: its client's data about repetitions.
        """
        self._expire()
        if attempt is not None:
            self._supersede(rollout, attempt)
        record = self._touched(rollout)
        number, record.next_number = record.next_number, record.next_number + 1
        record.begun[number] = self._clock()
        if attempt is not None:
            record.attempts[attempt.name].append(number)
        return number

    def _supersede(self, rollout: str, attempt: HttpAttempt) -> None:
        """Remove the call that this attempt repeats: usually a failed one without a record."""
        record = self._touched(rollout)
        earlier = record.attempts.get(attempt.repeats, [])
        answered = {call.number: call for call in record.calls}
        if failed := [number for number in earlier if number not in answered and number not in record.begun]:
            earlier.remove(failed[0])
        elif len(earlier) > 1:  # samplings of one prompt, and nobody knows which of their answers was lost
            self._lose(rollout)
        elif earlier:
            number = earlier.pop()
            if (call := answered.get(number)) is None:
                record.superseded.add(number)
                return
            record.calls.remove(call)
            record.ends = {digest: each for digest, each in record.ends.items() if each is not call}
            record.size -= call.size
            self.calls -= 1
            self.bytes -= call.size

    def record(self, rollout: str, number: int, answer: ModelAnswer, digest: bytes = b"") -> None:
        """Record a call's answer. An answer without generated tokens, because the prompt did not fit, leaves no record.

        Args:
            digest: `reply_digest` of the conversation, for `recall`.
        """
        record = self._touched(rollout)
        started = record.begun.pop(number, None)
        if number in record.superseded:
            return
        if started is None:  # the record went, or was fetched and deleted, while the call was in flight
            self._lose(rollout)
            return
        if answer.tokens is None:
            return
        tokens = answer.tokens
        call = CapturedCall(
            number,
            _array("i", tokens.prompt),
            _array("i", tokens.generation),
            _array("d", tokens.log_probs),
            answer.policy_version,
            tokens.version_spans,
            answer.finish_reason,
            started,
            self._clock() - started,
        )
        record.calls.append(call)
        if digest and call.prompt is not None and call.generation and call.log_probs is not None:
            record.ends[digest] = call
        record.size += call.size
        self.calls += 1
        self.bytes += call.size
        while self._records and (self.calls > self._max_calls or self.bytes > self._max_bytes):
            self._lose(next(iter(self._records)))

    def recall(self, rollout: str, digest: bytes) -> dict[str, Any] | None:
        """Return token fields of the rollout's call whose reply ended this conversation."""
        record = self._records.get(rollout)
        call = record.ends.get(digest) if record else None
        return None if call is None else call.token_fields()

    def abandon(self, rollout: str, number: int) -> None:
        """The call failed, or its caller left: the agent has seen none of its tokens."""
        if (record := self._records.get(rollout)) is not None:
            record.begun.pop(number, None)

    def read(self, rollout: str) -> dict[str, Any] | None:
        """The record, or None when nothing was ever recorded under this id."""
        self._expire()
        record = self._records.get(rollout)
        if record is None and rollout not in self._lost:
            return None
        calls = sorted(record.calls, key=lambda call: call.number) if record else []
        return {
            "calls": [call.as_json() for call in calls],
            "complete": rollout not in self._lost,
            "in_flight": len(record.begun) if record else 0,
        }

    def delete(self, rollout: str) -> bool:
        """Forget a rollout; whether there was anything."""
        known = self._drop(rollout)
        return self._lost.pop(rollout, known) is None or known

    def _touched(self, rollout: str) -> _CaptureRecord:
        record = self._records.setdefault(rollout, _CaptureRecord(0.0))
        record.touched_at = self._clock()
        self._records.move_to_end(rollout)
        return record

    def _expire(self) -> None:
        oldest = self._clock() - self._max_age
        while self._records and (first := next(iter(self._records))) and self._records[first].touched_at < oldest:
            self._lose(first)

    def _lose(self, rollout: str) -> None:
        self._drop(rollout)
        self._lost[rollout] = None
        if len(self._lost) > REMEMBERED_LOSSES:
            self._lost.popitem(last=False)

    def _drop(self, rollout: str) -> bool:
        record = self._records.pop(rollout, None)
        if record is None:
            return False
        self.calls -= len(record.calls)
        self.bytes -= record.size
        return True


def _array(code: Any, values: list[Any] | None) -> array[Any] | None:
    """Return None for anything but a list of numbers: the collector then sees that tokens are missing."""
    try:
        return None if values is None else array(code, values)
    except (TypeError, OverflowError):
        return None
