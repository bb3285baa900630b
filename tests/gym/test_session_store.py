"""Sessions of a server: bounded in number and in age."""

import pytest

from roundhouse.http.sessions import SessionStore, TooManySessions, UnknownSession


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_session_that_is_not_used_is_gone_and_one_in_use_stays():
    clock = Clock()
    store = SessionStore(idle_seconds=10, clock=clock)
    store.put("used", 1)
    store.put("idle", 2)
    for clock.now in (4.0, 8.0, 12.0):
        assert store.get("used").state == 1
    assert len(store) == 1
    with pytest.raises(UnknownSession):
        store.get("idle")


def test_a_full_store_throws_out_verified_sessions_first_and_never_open_ones():
    store = SessionStore(capacity=2)
    store.put("a", 1)
    store.put("b", 2)
    with pytest.raises(TooManySessions, match="All 2 sessions"):
        store.put("c", 3)
    store.finished("a")
    assert store.get("a").state == 1, "its verdict may be asked for again"
    store.put("c", 3)
    with pytest.raises(UnknownSession):
        store.get("a")
    assert (store.get("b").state, store.get("c").state) == (2, 3)


def test_seeding_again_begins_anew():
    store = SessionStore()
    store.put("a", 1)
    store.finished("a")
    store.put("a", 2)
    assert (store.get("a").state, len(store)) == (2, 1)
