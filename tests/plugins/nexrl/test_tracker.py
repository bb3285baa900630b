"""NexRL's activity tracker, by its own names."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from roundhouse.activity import ACTIVITY, Activity
from roundhouse.errors import ConfigError
from roundhouse.plugins.nexrl import (
    ActivityTracker,
    ActivityTrackerProxy,
    BaseRolloutWorker,
    ErrorReporter,
    ErrorSeverity,
    NexRLModule,
)


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
        assert not tracker.check_module_liveness(timeout=0.2)
    stuck.set()


def test_the_step_is_kept_and_posts_are_logged_or_sent(tracker: Any, caplog: pytest.LogCaptureFixture) -> None:
    tracker.set_training_step(7)
    assert tracker.get_training_step() == 7
    with caplog.at_level("INFO"):
        for _ in range(2):
            tracker.experiment_logger_post("wandb", data={"loss": 1.0}, step=7)
    levels = [record.levelname for record in caplog.records if "wandb" in record.message]
    assert levels == ["WARNING", "INFO", "INFO"]
    assert "{'loss': 1.0}" in caplog.text
    posted: list[Any] = []
    ActivityTracker(post=lambda *given: posted.append(given)).experiment_logger_post("wandb", data={"a": 1}, step=7)
    assert posted == [("wandb", {"data": {"a": 1}, "step": 7})]


def test_a_tracker_is_made_with_nexrls_configuration_and_a_bound_of_its_errors() -> None:
    """The mapping was taken for the bound."""
    tracker = ActivityTracker({"project_name": "p", "experiment_name": "e"}, 2)
    assert (tracker.experiment_logger.project_name, tracker.experiment_logger.experiment_name) == ("p", "e")
    for number in range(3):
        tracker.report_exception("trainer", "batch", ValueError(str(number)))
    assert tracker.get_error_health_status()["recent_error_count"] == 2
    with pytest.raises(ConfigError, match=r"config is 5, which is not a mapping.*max_errors"):
        ActivityTracker(5)  # type: ignore[arg-type]


def test_the_error_reporter_keeps_a_thousand_errors_by_default() -> None:
    reporter = ErrorReporter()
    for number in range(1001):
        reporter.report_error("trainer", "batch", str(number), ErrorSeverity.WARNING)
    assert (len(reporter.errors()), reporter.errors()[0].message) == (1000, "1")
    assert reporter.get_health_status()["status"] == "warning"


def test_a_workers_tracker_is_the_activity_of_its_process() -> None:
    worker = BaseRolloutWorker(None)  # type: ignore[arg-type]
    with worker._activity_tracker.track("MyModule", "processing_data"):
        assert any(work.module == "MyModule" for work in ACTIVITY.in_flight())


def test_a_module_has_a_name_a_tracker_and_is_alive(caplog: pytest.LogCaptureFixture) -> None:
    module, tracker = NexRLModule(), ActivityTracker({})
    assert module.get_module_name() == "invalid"
    module.set_module_name("trainer-0")
    module.set_activity_tracker(tracker)
    tracker.register_module(module.get_module_name(), module)
    assert tracker.check_module_liveness()
    with caplog.at_level("DEBUG"):
        module.easy_dump({"loss": 1.5, "rest": 2}, ["loss"], lambda value: f"<{value}>")
    assert caplog.messages == ["trainer-0: <{'loss': 1.5}>"]
