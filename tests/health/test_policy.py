"""The reaction of a run to a failed iteration is one table, and never loops endlessly."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.config.loading import parse_config
from roundhouse.config.operations import FailuresConfig, stall_seconds
from roundhouse.errors import (
    ConfigError,
    DataError,
    InfraError,
    StoreError,
    TooFewRollouts,
    TooFewSequences,
)
from roundhouse.health.errors import Severity
from roundhouse.health.policy import Kind, Past, Step, after_failure, code_of, kind_of, severity_of, typed

FAILURES = [InfraError("i"), DataError("d"), ConfigError("c"), StoreError("s"), KeyError("defect")]


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        ("stop_on_error", ["stop", "stop", "stop", "stop", "stop"]),
        ("stop_on_critical", ["wait", "skip", "stop", "stop", "stop"]),
        ("continue", ["wait", "skip", "stop", "stop", "skip"]),
    ],
)
def test_the_table_of_policies(policy: Any, steps: list[str]) -> None:
    config = FailuresConfig(policy=policy)
    assert [after_failure(error, config, Past()).step for error in FAILURES] == steps


@pytest.mark.parametrize("error", [TooFewRollouts("few"), TooFewSequences("few")])
def test_too_few_left_is_skipped_when_that_is_configured_whatever_the_policy(error: Exception) -> None:
    assert after_failure(error, FailuresConfig(on_too_few="skip"), Past()).step is Step.SKIP
    assert after_failure(error, FailuresConfig(), Past()).step is Step.STOP


@given(st.sampled_from(["stop_on_error", "stop_on_critical", "continue"]), st.integers(0, 4), st.floats(0, 4000))
def test_no_policy_goes_on_for_ever(policy: Any, limit: int, longest: float) -> None:
    config = FailuresConfig(policy=policy, max_consecutive_skips=limit, max_wait_seconds=longest, on_too_few="skip")
    for error in (*FAILURES, TooFewSequences("few")):
        skipped, waits, waited = 0, 0, 0.0
        while (course := after_failure(error, config, Past(skipped, waits, waited))).step is not Step.STOP:
            skipped += course.step is Step.SKIP
            waits += course.step is Step.WAIT
            waited += course.seconds
            assert skipped <= limit
            assert waited <= longest
        assert course.reason


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


@pytest.mark.parametrize(
    ("error", "kind", "code", "remedy"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), Kind.INFRA, "disk_full", "Free space"),
        (OSError(errno.EROFS, "Read-only file system", "/cache"), Kind.FATAL, "store_error", "'/cache'. Make the file"),
        (RuntimeError("can't start new thread"), Kind.INFRA, "out_of_memory", "train.tokens_per_microbatch"),
        (MemoryError(), Kind.INFRA, "out_of_memory", "train.tokens_per_microbatch"),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), Kind.INFRA, "out_of_memory", "logits_chunk"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            Kind.INFRA,
            "out_of_memory",
            "memory",
        ),
        (httpx.ConnectError("All connection attempts failed"), Kind.INFRA, "service_unreachable", "roundhouse doctor"),
        (ConnectionResetError("reset"), Kind.INFRA, "service_unreachable", "roundhouse doctor"),
        (RuntimeError("shape mismatch"), Kind.DEFECT, "unexpected_error", "shape mismatch"),
        (OSError(errno.ENOENT, "no file"), Kind.DEFECT, "unexpected_error", "no file"),
        (ConfigError("bad key"), Kind.FATAL, "config_error", "bad key"),
    ],
)
def test_errors_of_libraries_get_a_kind_a_code_and_a_remedy(
    error: Exception, kind: Kind, code: str, remedy: str
) -> None:
    assert (kind_of(error), code_of(error)) == (kind, code)
    assert remedy in str(typed(error))


def test_a_full_disk_is_named_if_the_error_names_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {True: 2**20, False: 2**40}
    here = str(Path.cwd())
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=free[place == here]))
    assert f"(almost full: {here})" in str(typed(OSError(28, "No space left on device")))
    assert "almost full" not in str(typed(OSError(28, "No space left on device", "/a/file")))


def test_rays_errors_are_of_the_infrastructure() -> None:
    from ray.exceptions import ActorDiedError, RayError

    assert issubclass(ActorDiedError, RayError)
    assert (kind_of(ActorDiedError()), code_of(ActorDiedError())) == (Kind.INFRA, "service_unreachable")


def test_severity_follows_from_the_kind_and_from_whether_it_is_tried_again() -> None:
    assert severity_of(InfraError("i"), again=True) is Severity.WARNING
    said = [severity_of(error, again=False) for error in FAILURES]
    assert said == ["error", "error", "critical", "critical", "critical"]


def test_the_watchdog_is_by_default_more_patient_than_every_time_limit() -> None:
    tree = {"run_id": "r", "rollout": {"timeout_seconds": 50_000}}
    assert stall_seconds(parse_config(tree)) > 50_000
    assert stall_seconds(parse_config(tree | {"failures": {"stall_seconds": 30}})) == 30
