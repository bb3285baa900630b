"""When a Job's pods say enough, and when its conditions must."""

from __future__ import annotations

from typing import Any

import pytest

from roundhouse.infra.kubernetes.job_status import INDEX, Failed, Succeeded, Waiting, judge

Object = dict[str, Any]


def job(*conditions: str, pods: int = 2) -> Object:
    told = [{"type": kind, "status": "True", "reason": "Because"} for kind in conditions]
    return {"metadata": {"name": "j"}, "spec": {"completions": pods}, "status": {"conditions": told}}


def pod(index: int, code: int | None) -> Object:
    """A pod whose container has ended with a code, while the kubelet still calls it running."""
    state: Object = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
    return {
        "metadata": {"name": f"j-{index}-{code}", "annotations": {INDEX: str(index)}},
        "spec": {"containers": [{"name": "trainer"}]},
        "status": {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": state}]},
    }


def test_a_job_has_succeeded_when_each_index_has_a_pod_that_ended_with_0() -> None:
    assert isinstance(judge(job(), [pod(0, 0), pod(1, 0)]), Succeeded)
    assert isinstance(judge(job(), [pod(0, 137), pod(0, 0), pod(1, 0)]), Succeeded), "one was replaced"


@pytest.mark.parametrize(
    "pods", [[pod(0, 0)], [pod(0, 0), pod(1, None)], [pod(0, 0), pod(0, 0)], [pod(0, 0), pod(1, 3)]]
)
def test_an_index_without_one_is_waited_for(pods: list[Object]) -> None:
    assert isinstance(judge(job(), pods), Waiting)


def test_a_job_that_is_ended_by_its_deadline_has_not_succeeded() -> None:
    assert isinstance(judge(job("FailureTarget"), [pod(0, 0), pod(1, 0)]), Waiting)
    assert isinstance(judge(job("Failed"), [pod(0, 0), pod(1, 0)]), Failed)
