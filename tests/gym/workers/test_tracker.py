"""NexRL's activity tracker, by its own names."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from roundhouse.activity import ACTIVITY, Activity
from roundhouse.compat.nexrl import ActivityTracker, ActivityTrackerProxy, BaseRolloutWorker
from roundhouse.errors import ConfigError


@pytest.fixture(params=[lambda tracker: tracker, ActivityTrackerProxy], ids=["tracker", "proxy"])
def tracker(request: pytest.FixtureRequest) -> Any:
    return request.param(ActivityTracker(activity=Activity()))


def test_work_is_in_flight_until_it_ends_and_its_failure_is_reported_once(tracker: Any) -> None:
    token = tracker.start("loader", "reading")
    assert not tracker.is_quiescent()
    assert "loader: reading" in tracker.get_running_status_summary()
    assert not tracker.wait_quiescent(0.01)
    tracker.end(token)
    assert tracker.wait_quiescent()
    assert tracker.get_error_health_status()["status"] == "healthy"
    for reported in (True, False):
        with pytest.raises(ValueError, match="no"), tracker.track("trainer", "batch", auto_report_errors=reported):
            raise ValueError("no")
    assert tracker.is_quiescent()
    health = tracker.get_error_health_status()
    assert (health["status"], health["error_level_count"]) == ("error", 1)


def test_idle_workers_are_told_from_other_modules(tracker: Any) -> None:
    tracker.register_module("worker-0", object(), is_rollout_worker=True)
    with tracker.track("trainer", "batch"):
        assert tracker.is_rollout_worker_quiescent()
        with tracker.track("worker-0", "rollout"):
            assert not tracker.is_rollout_worker_quiescent()


class Module:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def health_check(self) -> bool:
        return self.answer() if callable(self.answer) else self.answer


def test_a_module_that_is_dead_raises_or_hangs_is_not_alive(tracker: Any) -> None:
    tracker.register_module("plain", object())
    tracker.register_module("well", Module(True))
    assert tracker.check_module_liveness()
    stuck = threading.Event()
    for answer in (False, lambda: 1 / 0, stuck.wait):
        tracker.register_module("ill", Module(answer))
        begun = time.monotonic()
        assert not tracker.check_module_liveness(timeout=0.2)
        assert time.monotonic() - begun < 5
    stuck.set()


def test_the_step_is_kept_and_posts_go_to_whoever_takes_them(tracker: Any) -> None:
    tracker.set_training_step(7)
    assert tracker.get_training_step() == 7
    with pytest.raises(ConfigError, match=r"'wandb'.*EvaluationRunResult.*post="):
        tracker.experiment_logger_post("wandb", data={"loss": 1.0}, step=7)
    posted: list[Any] = []
    ActivityTracker(post=lambda *given: posted.append(given)).experiment_logger_post("wandb", data={"a": 1}, step=7)
    assert posted == [("wandb", {"data": {"a": 1}, "step": 7})]


def test_a_workers_tracker_is_the_activity_of_its_process() -> None:
    worker = BaseRolloutWorker(None)  # type: ignore[arg-type]
    with worker._activity_tracker.track("MyModule", "processing_data"):
        assert any(work.module == "MyModule" for work in ACTIVITY.in_flight())
