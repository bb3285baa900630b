"""Pauses between attempts grow to their limit, and are spread only if asked for."""

from __future__ import annotations

from roundhouse.retry import Backoff


def test_pauses_grow_by_the_factor_up_to_the_longest() -> None:
    assert [Backoff(1.0, longest=10.0, factor=3.0).pause(attempt) for attempt in (1, 2, 3, 4)] == [1.0, 3.0, 9.0, 10.0]


def test_a_loop_that_never_gives_up_has_a_pause_at_every_attempt() -> None:
    assert Backoff(0.1, longest=5.0).pause(10**6) == 5.0


def test_spread_pauses_differ_and_stay_around_their_length() -> None:
    drawn = [Backoff(1.0, spread=0.5).pause(1) for _ in range(100)]
    assert len(set(drawn)) > 1
    assert all(0.5 <= pause <= 1.5 for pause in drawn)
