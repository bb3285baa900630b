"""One driver per run: with any actions of two drivers, in any order, at most one may commit, and the other names it."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from roundhouse.activity import supervised
from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, StoreError
from roundhouse.health.policy import Kind, kind_of
from roundhouse.store import lease as leases
from roundhouse.store.lease import (
    DIRECTORY,
    Lease,
    LeaseLost,
    LeaseRecord,
    LeaseWatch,
    RunDriven,
    driving,
    holder,
    try_to_take,
)
from roundhouse.store.location import Location
from roundhouse.store.run import open_run, point_to_promoted
from roundhouse.store.stage import read_manifest
from roundhouse.store.verification import verify

numbers = itertools.count()


def empty(store_uri: str) -> Location:
    return Location(f"{store_uri}/runs/r{next(numbers)}")


def taken(run: Location, watch: LeaseWatch | None = None, seconds: float = 0.0) -> Lease:
    lease, _ = try_to_take(run, watch or LeaseWatch(), seconds)
    assert lease is not None
    return lease


def waited_for(run: Location) -> LeaseWatch:
    """A watch that has seen the run's lease unrenewed for longer than it lasts."""
    watch = LeaseWatch()
    for _ in range(int(leases.SECONDS) + 1):
        assert try_to_take(run, watch, 1.0)[0] is None
    return watch


class Drivers(RuleBasedStateMachine):
    """Three drivers of one run, any of which may stand still, come back, end or die at any point."""

    store: str

    def __init__(self) -> None:
        super().__init__()
        self.run = empty(self.store)
        self.leases: list[Lease | None] = [None] * 3
        self.watches = [LeaseWatch() for _ in self.leases]
        self.committed: list[int] = []

    def act(self, driver: int, what: Callable[[Lease], None]) -> None:
        if (lease := self.leases[driver]) is not None:
            try:
                what(lease)
            except LeaseLost:
                self.leases[driver] = None

    @rule(driver=st.integers(0, 2), seconds=st.sampled_from([0.5, 2.0, 100.0]), looks=st.integers(1, 40))
    def look(self, driver: int, seconds: float, looks: int) -> None:
        for _ in range(looks if self.leases[driver] is None else 0):
            try:
                self.leases[driver], _ = try_to_take(self.run, self.watches[driver], seconds)
            except RunDriven:
                self.watches[driver] = LeaseWatch()
            if self.leases[driver] is not None:
                self.watches[driver] = LeaseWatch()
                return

    @rule(driver=st.integers(0, 2))
    def renew(self, driver: int) -> None:
        self.act(driver, Lease.renew)

    @rule(driver=st.integers(0, 2))
    def commit(self, driver: int) -> None:
        def check(lease: Lease) -> None:
            lease.check()
            self.committed.append(lease.fence.token)

        self.act(driver, check)

    @rule(driver=st.integers(0, 2), gives_back=st.booleans())
    def end(self, driver: int, gives_back: bool) -> None:
        if (lease := self.leases[driver]) is not None and gives_back:
            lease.release()
        self.leases[driver] = None

    @invariant()
    def at_most_one_may_commit(self) -> None:
        allowed = 0
        for lease in self.leases:
            try:
                if lease is not None:
                    lease.fence.check()
                    allowed += 1
            except LeaseLost:
                pass
        assert allowed <= 1

    @invariant()
    def tokens_of_what_is_committed_never_fall(self) -> None:
        assert self.committed == sorted(self.committed)


def test_at_most_one_of_three_drivers_may_commit_in_any_order_of_their_steps(tmp_path: Path) -> None:
    machine = type("DriversHere", (Drivers,), {"store": str(tmp_path)})
    run_state_machine_as_test(machine, settings=settings(max_examples=50, stateful_step_count=25, deadline=None))


def test_of_many_that_start_at_once_one_drives(store_uri: str) -> None:
    run, got, refused = empty(store_uri), [], []
    ready = threading.Barrier(6)

    def start() -> None:
        ready.wait()
        lease, other = try_to_take(run, LeaseWatch(), 0.0)
        (refused if lease is None else got).append(lease or other)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    assert len(refused) == 5
    assert got[0].fence.token == 1


def test_a_driver_that_renews_is_named_and_not_followed(store_uri: str) -> None:
    run, watch = empty(store_uri), LeaseWatch()
    first = taken(run)
    assert try_to_take(run, watch, 0.0)[0] is None
    first.renew()
    with pytest.raises(
        RunDriven, match=rf"process {os.getpid()} on {socket.gethostname()}, since .*take another run_id"
    ):
        try_to_take(run, watch, 1.0)
    found = holder(run)
    assert found is not None
    assert (found.pid, found.token, found.renewals) == (os.getpid(), 1, 1)


def test_a_suspended_driver_is_followed_and_stops_when_it_wakes(store_uri: str) -> None:
    run = empty(store_uri)
    first = taken(run)
    second = taken(run, waited_for(run), 2.0)
    assert second.fence.token == 2
    for act in (first.renew, first.check, first.fence.check, first.refuse_lost):
        with pytest.raises(LeaseLost, match=r"Another process drives .* now: process .* writes nothing more"):
            act()
    second.renew()
    first.release()
    assert holder(run) is not None, "what the first does is no matter to the second"


def test_time_that_a_waiting_driver_did_not_watch_does_not_count(store_uri: str) -> None:
    """It was suspended itself, or the store was away, and the other could not renew either."""
    run, watch = empty(store_uri), LeaseWatch()
    taken(run)
    for _ in range(5):
        assert try_to_take(run, watch, 10_000.0)[0] is None


def test_a_lease_that_was_given_back_is_followed_at_once_by_a_higher_token(store_uri: str) -> None:
    run = empty(store_uri)
    for token in (1, 2, 3):
        with driving(run) as lease, driving(run) as inner:
            assert inner is lease
            assert lease.fence.token == token
            assert leases.fence_of(run) == lease.fence
        assert holder(run) is None
        assert leases.fence_of(run) is None


def test_it_is_given_back_also_when_the_run_is_cancelled(store_uri: str) -> None:
    run = empty(store_uri)
    with pytest.raises(KeyboardInterrupt), driving(run):
        raise KeyboardInterrupt
    assert holder(run) is None


DIES = """
import os, sys
from roundhouse.store.lease import LeaseWatch, try_to_take
from roundhouse.store.location import Location
lease, _ = try_to_take(Location(sys.argv[1]), LeaseWatch(), 0.0)
os._exit(9)
"""


def test_a_process_of_this_machine_that_died_is_followed_at_once(store_uri: str) -> None:
    run = empty(store_uri)
    assert subprocess.run([sys.executable, "-c", DIES, run.uri], check=False, timeout=60).returncode == 9
    assert holder(run) is None
    assert taken(run).fence.token == 2


def test_a_process_number_of_another_machine_or_of_a_later_process_says_nothing(store_uri: str) -> None:
    run = empty(store_uri)
    taken(run)
    record = holder(run)
    assert record is not None
    assert record.pid == os.getpid()
    assert record.born is not None
    earlier = record.model_copy(update={"born": record.born - 1})
    assert earlier.is_over
    assert not earlier.model_copy(update={"machine": "another"}).is_over


def test_a_run_that_was_deleted_and_made_anew_is_not_the_old_drivers(store_uri: str) -> None:
    run = empty(store_uri)
    first = taken(run)
    (run / DIRECTORY).delete_tree()
    with pytest.raises(LeaseLost, match="was deleted"):
        first.check()
    taken(run)
    first = Lease(
        run, LeaseRecord.model_validate_json((run / DIRECTORY).read("000001.json")).model_copy(update={"nonce": "o"})
    )
    with pytest.raises(LeaseLost, match="Another process drives"):
        first.check()


def test_a_damaged_record_is_named(store_uri: str) -> None:
    run = empty(store_uri)
    run.write(f"{DIRECTORY}/000001.json", b"{")
    with pytest.raises(StoreError, match=r"(?s)000001\.json is damaged.*Delete it"):
        taken(run)


def test_neither_is_tried_again() -> None:
    assert {kind_of(error("")) for error in (RunDriven, LeaseLost)} == {Kind.FATAL}


@pytest.mark.parametrize("given", ["0", "x", "1e9"])
def test_an_impossible_time_is_refused(given: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("ROUNDHOUSE_STORE_LEASE_SECONDS", given)
    with pytest.raises(ConfigError, match="ROUNDHOUSE_STORE_LEASE_SECONDS"):
        taken(Location(str(tmp_path)))


def test_a_driver_that_lost_its_run_begins_commits_and_moves_nothing(store_uri: str) -> None:
    run = open_run(parse_config({"run_id": "r", "store": store_uri}))
    with driving(run.location) as lease:
        start = run.begin(run.checkpoint(0), policy_version=0).commit()
        assert read_manifest(start).lease == lease.fence.token == 1
        attempt = run.begin(run.stage(1, "train"), policy_version=0)
        attempt.write_bytes("part", b"data")
        taken(run.location, waited_for(run.location), 2.0)
        for act in (
            attempt.commit,
            lambda: run.begin(run.stage(1, "collect"), policy_version=0),
            lambda: run.point_to(start),
            lambda: run.write_summary({}),
            lambda: point_to_promoted(run, 0),
        ):
            with pytest.raises(LeaseLost):
                act()
    assert run.stage(1, "train").reference() is None
    assert not run.location.exists("latest.json")
    assert verify(store_uri).problems == []


def test_a_stage_at_work_is_ended_when_the_lease_is_lost(tmp_path: Path) -> None:
    run, at_work = empty(str(tmp_path)), threading.Event()

    def work() -> None:
        at_work.set()
        while True:
            time.sleep(0.01)

    def refuse() -> None:
        leases.refuse_lost(run)

    def lose() -> None:
        at_work.wait()
        taken(run, waited_for(run), 2.0)
        with contextlib.suppress(LeaseLost):
            lease.check()

    with driving(run) as lease:
        loses = threading.Thread(target=lose)
        loses.start()
        with pytest.raises(LeaseLost, match="Another process drives"):
            supervised(work, "collect", "iteration 1", 60.0, refuse=refuse)
        loses.join()
