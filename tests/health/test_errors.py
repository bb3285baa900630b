"""Errors are kept, counted and passed on; the health is that of the last five minutes."""

from __future__ import annotations

import pytest

from roundhouse.errors import InfraError
from roundhouse.health.errors import HEALTH_SECONDS, KEPT_ERRORS, ErrorInfo, ErrorReporter, Severity


def test_an_exception_is_kept_with_all_that_a_person_asks_for() -> None:
    reporter = ErrorReporter(clock=lambda: 17.0)
    try:
        raise InfraError("engine away") from OSError("refused")
    except InfraError as error:
        error_id = reporter.report_exception("collect", "iteration 3", error, Severity.WARNING, {"code": "infra_error"})
    [kept] = reporter.errors()
    assert set(ErrorInfo.model_fields) == {
        *("error_id", "timestamp", "module_name", "work_context", "severity", "message", "details"),
        *("exception_type", "exception_traceback"),
    }
    assert (kept.error_id, kept.timestamp, kept.module_name, kept.work_context) == (
        error_id,
        17.0,
        "collect",
        "iteration 3",
    )
    assert (kept.severity, kept.message, kept.exception_type) == ("warning", "engine away", "InfraError")
    assert kept.exception_traceback is not None
    assert "OSError: refused" in kept.exception_traceback


def test_only_the_newest_thousand_are_kept() -> None:
    reporter = ErrorReporter()
    for number in range(KEPT_ERRORS + 5):
        reporter.report_error("collect", "", str(number))
    kept = reporter.errors()
    assert len(kept) == KEPT_ERRORS
    assert (kept[0].message, kept[-1].message) == ("5", str(KEPT_ERRORS + 4))


@pytest.mark.parametrize(
    ("severities", "status", "counts"),
    [
        ([], "healthy", (0, 0, 0)),
        (["info"], "healthy", (1, 0, 0)),
        (["info", "warning"], "warning", (2, 0, 1)),
        (["warning", "error"], "error", (2, 1, 1)),
        (["critical"], "error", (1, 1, 0)),
    ],
)
def test_health_is_the_worst_of_the_last_five_minutes(
    severities: list[str], status: str, counts: tuple[int, int, int]
) -> None:
    now = 0.0
    reporter = ErrorReporter(clock=lambda: now)
    reporter.report_error("train", "", "long ago", Severity.CRITICAL)
    now = HEALTH_SECONDS + 1
    for severity in severities:
        reporter.report_error("train", "", "now", Severity(severity))
    health = reporter.health()
    assert health.status == status
    assert (health.recent_error_count, health.error_level_count, health.warning_level_count) == counts


def test_a_listener_that_fails_costs_nobody_else_the_error() -> None:
    reporter, heard = ErrorReporter(), list[str]()

    def broken(_: ErrorInfo) -> None:
        raise RuntimeError("gone")

    reporter.listen(broken)
    reporter.listen(lambda error: heard.append(error.message))
    reporter.report_error("collect", "", "one")
    assert heard == ["one"]


def test_what_an_earlier_process_kept_comes_before_and_is_told_to_nobody() -> None:
    before, after = ErrorReporter(), ErrorReporter()
    before.report_error("collect", "", "old")
    heard: list[str] = []
    after.listen(lambda error: heard.append(error.message))
    after.report_error("collect", "", "new")
    after.restore(before.errors())
    assert [error.message for error in after.errors()] == ["old", "new"]
    assert heard == ["new"]
