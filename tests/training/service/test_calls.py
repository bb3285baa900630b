"""Calls are done once and in order; the lease has one holder; bodies keep every bit."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from roundhouse.errors import DataError
from roundhouse.training.algorithms import LossSettings, TokenColumns
from roundhouse.training.loss import Share
from roundhouse.training.service.protocol import (
    CallLog,
    CallRefused,
    CallReply,
    LeaseHeld,
    SessionLease,
    SessionLost,
    StoreCheckpoint,
    parse,
)
from roundhouse.training.service.verbs import Gradient, LossBatch, TokenBatch
from roundhouse.training.service.wire import pack, unpack


@given(st.lists(st.integers(0, 3), max_size=40))
def test_however_calls_are_repeated_each_is_done_once_and_in_order(repetitions: list[int]) -> None:
    log, done = CallLog(), []
    for number, times in enumerate(repetitions, 1):
        answers = []
        for _ in range(1 + times):
            answer = log.admit(number, "optim_step", b"%d" % number)
            if answer is None:
                done.append(number)
                answer = CallReply(200, b"answer %d" % number, "text/plain")
                log.record(number, "optim_step", b"%d" % number, answer)
            answers.append(answer)
        assert {answer.body for answer in answers} == {b"answer %d" % number}
    assert done == list(range(1, len(repetitions) + 1))


def test_a_gap_a_call_of_the_past_and_a_changed_repetition_are_refused() -> None:
    log = CallLog()
    for number in (1, 2):
        log.record(number, "forward_backward", b"x", CallReply(200, b"", "text/plain"))
    for number, body in ((4, b"x"), (1, b"x"), (0, b"x")):
        with pytest.raises(CallRefused, match=f"Call {number} .*does not follow call 2"):
            log.admit(number, "forward_backward", body)
    for verb, body in (("forward_backward", b"y"), ("optim_step", b"x")):
        with pytest.raises(CallRefused, match="another content"):
            log.admit(2, verb, body)


def test_a_lease_has_one_holder_until_it_is_silent_closed_or_its_owner_returns() -> None:
    lease = SessionLease(idle_seconds=10)
    first = lease.open("a", now=0).token
    lease.require(first, now=9)
    with pytest.raises(LeaseHeld, match=r"'a', for 3 seconds"):
        lease.open("b", now=16)
    second = lease.open("a", now=17).token
    with pytest.raises(SessionLost):
        lease.require(first, now=17)
    third = lease.open("b", now=27).token
    with pytest.raises(SessionLost):
        lease.require(second, now=27)
    lease.close(second)
    lease.require(third, now=28)
    lease.close(third)
    lease.open("a", now=28)


def loss_batch(lengths: list[int], seed: int, *, old: bool) -> LossBatch:
    rng = np.random.default_rng(seed)
    total = sum(lengths)

    def column() -> np.ndarray:
        return rng.normal(size=total).astype(np.float32)

    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    predicted = np.ones(total, dtype=bool)
    predicted[offsets[:-1]] = False
    names = TokenColumns.__slots__
    return LossBatch(
        tokens=TokenBatch(offsets, rng.integers(0, 64, total).astype(np.int32), predicted),
        columns=TokenColumns(**{name: column() for name in names}),
        gen_logprobs=column(),
        scale=column(),
        loss=LossSettings(clip_high=0.28, dual_clip=3.0),
        old_logprobs=column() if old else None,
    )


def arrays(batch: LossBatch) -> list[np.ndarray | None]:
    columns = [getattr(batch.columns, name) for name in TokenColumns.__slots__]
    tokens = batch.tokens
    return [
        tokens.offsets,
        tokens.token_ids,
        tokens.predicted,
        *columns,
        batch.gen_logprobs,
        batch.scale,
        batch.old_logprobs,
    ]


@settings(max_examples=30)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=5), st.integers(0, 9), st.booleans())
def test_a_loss_batch_keeps_every_bit_on_the_wire(lengths: list[int], seed: int, old: bool) -> None:
    sent = loss_batch(lengths, seed, old=old)
    found = unpack(LossBatch, pack(sent))
    assert found.loss == sent.loss
    assert found.ref_logprobs is None
    for ours, theirs in zip(arrays(sent), arrays(found), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.dtype == theirs.dtype
            assert ours.tobytes() == theirs.tobytes()


def test_a_gradient_keeps_its_numbers_even_when_they_are_not() -> None:
    sent = Gradient(float("nan"), 0.1 + 0.2, np.zeros(3, np.float32), {"kl_penalty": Share(1 / 3, 7)}, 1, 2, 3)
    found = unpack(Gradient, pack(sent))
    assert np.isnan(found.loss)
    assert (found.policy_loss, found.shares, found.positions) == (0.1 + 0.2, {"kl_penalty": Share(1 / 3, 7)}, 3)


def broken(change: str) -> bytes:
    batch = loss_batch([3, 4], 0, old=True)
    if change == "nan":
        return pack(replace(batch, scale=np.full(7, np.nan, np.float32)))
    if change == "short":
        return pack(replace(batch, gen_logprobs=np.zeros(6, np.float32)))
    if change == "double":
        return pack(replace(batch, scale=np.zeros(7)))
    if change == "offsets":
        return pack(replace(batch, tokens=replace(batch.tokens, offsets=np.array([0, 9, 7]))))
    if change == "first":
        return pack(replace(batch, tokens=replace(batch.tokens, predicted=np.ones(7, dtype=bool))))
    if change == "truncated":
        return pack(batch)[:-5]
    held = load(pack(batch))
    return save(held, {"roundhouse": '{"loss": {"clip_low": 0.2}}'})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nan", "scale holds a value that is not finite"),
        ("short", "gen_logprobs has 6 values for 7 tokens"),
        ("double", "scale is float64"),
        ("offsets", "offsets do not cut 7 tokens"),
        ("first", "first token of a sequence"),
        ("truncated", "The body is not a LossBatch"),
        ("other version", "loss differs in .*clip_high.*same version"),
    ],
)
def test_a_body_that_the_engine_could_not_work_on_is_refused(change: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        unpack(LossBatch, broken(change))


@pytest.mark.parametrize("attempt", ["../x", "a/b", "", "a\\b", "1" * 21])
def test_an_attempt_is_a_name_that_stays_inside_its_checkpoint(attempt: str) -> None:
    body = {"place": "s3://bucket/checkpoints/000001", "attempt": attempt, "cursor": None}
    with pytest.raises(DataError, match="attempt"):
        parse(StoreCheckpoint, json.dumps(body).encode())
    assert parse(StoreCheckpoint, json.dumps(body | {"attempt": "0002"}).encode()).attempt == "0002"
