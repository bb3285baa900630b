"""How long a Job may wait and work."""

from __future__ import annotations

import time
from typing import Any

import pytest

from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.rollout import JobShards
from roundhouse.config.training import ProcessService
from roundhouse.errors import InfraError
from roundhouse.plugins.kubernetes.job_status import JobDeadlines, Waiting
from roundhouse.plugins.kubernetes.names import StageIdentity
from roundhouse.plugins.kubernetes.stage_jobs import ShardJob, TrainJob
from tests.plugins.kubernetes.test_pod_settings import gym_job

Tree = dict[str, Any]


@pytest.mark.parametrize(
    ("section", "given", "waiting"),
    [
        ("trainer", {"queue": "team", "queue_seconds": 60}, Waiting("", queued=True)),
        ("trainer", {"trainer": {"image_seconds": 60}}, Waiting("", InfraError("no image"))),
        ("trainer", {"trainer": {"pending_seconds": 60}}, Waiting("", InfraError("no node"), pending=True)),
        ("collector", {"collector": {"image_seconds": 60}}, Waiting("", InfraError("no image"))),
        ("collector", {"collector": {"pending_seconds": 60}}, Waiting("", InfraError("no node"), pending=True)),
        ("gym", {"gym": {"image_seconds": 60}}, Waiting("", InfraError("no image"))),
        ("gym", {"gym": {"pending_seconds": 60}}, Waiting("", InfraError("no node"), pending=True)),
    ],
    ids=[
        "queue_seconds",
        "image_seconds",
        "pending_seconds",
        "shard_image_seconds",
        "shard_pending_seconds",
        "gym_image_seconds",
        "gym_pending_seconds",
    ],
)
def test_how_long_a_job_may_wait(section: str, given: Tree, waiting: Waiting) -> None:
    def left(**infra: Any) -> float:
        identity = StageIdentity("run", "0123456789ab", 1, "train", "89abcdef0123")
        settings = KubernetesInfra.model_validate({"collector": {}} | infra)
        if section == "trainer":
            plan: Any = TrainJob(identity, settings, ProcessService(), reports="s3://b/r", store="s3://b")
        elif section == "gym":
            plan = gym_job(**infra)
        else:
            plan = ShardJob(identity, settings, JobShards(), spec="s3://b/s", stage="s3://b/t", store="s3://b")
        return JobDeadlines(plan).left(waiting, False, time.monotonic())

    assert left(**given) == pytest.approx(60, abs=5)
    assert left() > 200


def test_how_long_a_job_may_work() -> None:
    identity = StageIdentity("run", "0123456789ab", 1, "train", "89abcdef0123")
    infra = KubernetesInfra.model_validate({"collector": {}})
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "uid": "1111"}}
    step = TrainJob(identity, infra, ProcessService(timeout_seconds=77), reports="s3://b/r", store="s3://b")
    shard = ShardJob(identity, infra, JobShards(timeout_seconds=77), spec="s3://b/s", stage="s3://b/t", store="s3://b")
    assert step.job(1, owner)["spec"]["activeDeadlineSeconds"] == 77 + infra.trainer.pending_seconds
    assert shard.job(1, owner)["spec"]["activeDeadlineSeconds"] == 77
