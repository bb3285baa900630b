"""Cases in which the pods of a Job decide its end, and cases in which its conditions must."""

from __future__ import annotations

import time
from typing import Any

import pytest

from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.training import ProcessService
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.plugins.kubernetes.job_status import (
    INDEX,
    SLACK_SECONDS,
    Failed,
    JobDeadlines,
    Succeeded,
    Waiting,
    judge,
)
from roundhouse.plugins.kubernetes.names import StageIdentity
from roundhouse.plugins.kubernetes.stage_jobs import TrainJob

Object = dict[str, Any]


def job(*conditions: str, pods: int = 2) -> Object:
    told = [{"type": kind, "status": "True", "reason": "Because"} for kind in conditions]
    return {"metadata": {"name": "j"}, "spec": {"completions": pods}, "status": {"conditions": told}}


def pod(index: int, code: int | None) -> Object:
    """A pod with a container that has ended, while the kubelet still reports it as running."""
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


@pytest.mark.parametrize(
    ("code", "reason", "kind", "by_exit_code"),
    [(65, "Error", DataError, True), (78, "Error", ConfigError, True), (137, "OOMKilled", ConfigError, False)],
)
def test_a_job_fails_by_the_pod_that_replaced_a_drained_one(
    code: int, reason: str, kind: type[Exception], by_exit_code: bool
) -> None:
    drained, replacement = pod(0, 143), pod(0, code)
    drained["status"]["conditions"] = [
        {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    ]
    replacement["status"]["containerStatuses"][0]["state"]["terminated"]["reason"] = reason
    outcome = judge(job("Failed", pods=1), [drained, replacement])
    assert isinstance(outcome, Failed)
    assert (type(outcome.error), outcome.pod, outcome.by_exit_code) == (kind, f"j-0-{code}", by_exit_code)


def test_of_several_ranks_the_disrupted_one_is_the_cause() -> None:
    disrupted = pod(1, 143)
    disrupted["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}]
    outcome = judge(job("Failed"), [disrupted, pod(0, 65)])
    assert isinstance(outcome, Failed)
    assert (type(outcome.error), outcome.pod) == (InfraError, "j-1-143")


def test_a_job_that_its_queue_suspends_again_has_only_waited_while_it_was_suspended() -> None:
    infra = KubernetesInfra.model_validate({"queue": "team", "queue_seconds": 600, "trainer": {"pending_seconds": 300}})
    identity = StageIdentity("run", "0123456789ab", 1, "train", "89abcdef0123")
    plan = TrainJob(identity, infra, ProcessService(), reports="s3://b/r", store="s3://b")
    began, deadlines = time.monotonic(), JobDeadlines(plan)
    queued, running = Waiting("queued", queued=True), Waiting("1 of 1 pods run")
    pending = Waiting("0 of 1 pods run", InfraError("no node"), pending=True)

    def left(waiting: Waiting, after: float) -> float:
        return deadlines.left(waiting, True, began + after)

    whole = plan.seconds() + SLACK_SECONDS
    assert left(queued, 100) == pytest.approx(500, abs=1)
    assert not deadlines.is_time_for_events(began + 101)
    assert left(running, 101) == pytest.approx(whole - 1, abs=1)
    assert left(pending, 2000) == pytest.approx(300, abs=1)
    assert left(queued, 2001) == pytest.approx(500, abs=1), "at work it did not wait"
    assert left(queued, 2301) == pytest.approx(200, abs=1)
    assert left(pending, 2302) == pytest.approx(300, abs=1)
    assert left(running, 2303) == pytest.approx(whole - 2, abs=1), "its deadline begins anew, as Kubernetes does it"
    left(queued, 2400)
    with pytest.raises(InfraError, match=r"not admitted by queue team in infra\.queue_seconds"):
        left(queued, 2601)
