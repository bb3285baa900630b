"""What each key of `infra` with `kind: kubernetes` puts into the Job of a step or of a shard."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.training import ProcessService
from roundhouse.infra.kubernetes.names import StageIdentity
from roundhouse.infra.kubernetes.train_job import TrainJob
from tests.k8s.test_shard_jobs import manifest as shard_manifest

Object = dict[str, Any]
OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "uid": "1111"}}
BASIC: Object = {"cpu": "1", "image": "a:1"}
PODS: Object = {
    "image": "mine:7",
    "cpu": "77m",
    "memory": "7Gi",
    "scratch": "77Gi",
    "pending_seconds": 77_777,
    "priority_class": "seven",
    "node_selector": {"pool": "seven"},
    "tolerations": [{"key": "seven"}],
}
TRAINER: Object = PODS | {"pods": 7, "gpus": 7, "shared_memory": "777Mi", "restarts": 7, "cache_claim": "seven"}
COLLECTOR: Object = PODS | {"service_account": "seven", "secret": "seven", "environment": {"SEVEN": "7"}}
SHARED: Object = {
    "namespace": "seven",
    "service_account": "seven",
    "secret": "seven",
    "environment": {"SEVEN": "7"},
    "store_claim": "seven",
    "queue": "seven",
    "keep_jobs_seconds": 77_777,
}


def train_manifest(**infra: Any) -> Object:
    identity = StageIdentity("run", "0123456789ab", 1, "train", "89abcdef0123")
    settings = KubernetesInfra.model_validate(infra)
    store = "file:///store" if settings.store_claim else "s3://bucket"
    return TrainJob(identity, settings, ProcessService(), reports=f"{store}/r", store=store).job(1, OWNER)


@pytest.mark.parametrize("key", TRAINER)
def test_a_key_of_the_trainer_is_in_its_job(key: str) -> None:
    plain, changed = (train_manifest(trainer=given) for given in ({}, {key: TRAINER[key]}))
    assert changed != plain


@pytest.mark.parametrize("key", SHARED)
def test_a_key_that_all_pods_share_is_in_the_job(key: str) -> None:
    plain, changed = train_manifest(), train_manifest(**{key: SHARED[key]})
    assert changed != plain


@pytest.mark.parametrize("key", [key for key in COLLECTOR if key != "pending_seconds"])
def test_a_key_of_the_collector_is_in_its_job(key: str) -> None:
    plain, changed = (shard_manifest(collector=given) for given in (BASIC, BASIC | {key: COLLECTOR[key]}))
    assert changed != plain


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (8, "cuda")])
def test_the_image_of_a_trainer_is_one_that_is_built(gpus: int, device: str, tmp_path: Path) -> None:
    """The default was a tag without a device, which no build makes."""
    [container] = train_manifest(trainer={"gpus": gpus})["spec"]["template"]["spec"]["containers"]
    builder = tmp_path / "docker"
    builder.write_text('#!/bin/sh\necho "$@"\n')
    builder.chmod(0o755)
    script = Path(__file__).parents[2] / "images/build.sh"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "BUILDER": "docker"}
    done = subprocess.run([script, device, "trainer"], env=environment, capture_output=True, text=True, check=True)
    assert f"-t {container['image']} ." in done.stdout
