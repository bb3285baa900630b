"""Effect of each key of `infra` with `kind: kubernetes` on the Job of a step, of a shard or of a gym server."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import pytest

from roundhouse.config import kubernetes as settings_of_infra
from roundhouse.config.kubernetes import KubernetesInfra, RayServiceEngine, Toleration, TrainerPods
from roundhouse.config.section import RECORDED
from roundhouse.config.training import ProcessService
from roundhouse.errors import InfraError
from roundhouse.plugins.kubernetes import cluster, rayservice
from roundhouse.plugins.kubernetes.launcher import KubernetesLauncher
from roundhouse.plugins.kubernetes.names import StageIdentity
from roundhouse.plugins.kubernetes.rayservice import RayServiceServed, ServedRun
from roundhouse.plugins.kubernetes.serve_config import Told
from roundhouse.plugins.kubernetes.stage_jobs import GymJob, TrainJob
from roundhouse.plugins.kubernetes.stage_pod import pod
from tests.plugins.kubernetes.test_shard_jobs import manifest as shard_manifest

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


def test_a_job_in_a_queue_names_its_priority_and_one_without_a_queue_is_refused() -> None:
    labels = train_manifest(queue="team", queue_priority="urgent")["metadata"]["labels"]
    assert (labels["kueue.x-k8s.io/queue-name"], labels["kueue.x-k8s.io/priority-class"]) == ("team", "urgent")
    assert not any(name.startswith("kueue") for name in train_manifest()["metadata"]["labels"])
    with pytest.raises(ValueError, match="queue_priority is 'urgent', and no queue is named"):
        KubernetesInfra.model_validate({"queue_priority": "urgent"})


def test_the_namespace_is_that_of_the_pod_unless_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert KubernetesInfra().namespace == "roundhouse"
    (tmp_path / "namespace").write_text("team-a\n")
    monkeypatch.setattr(settings_of_infra, "IN_CLUSTER_NAMESPACE", str(tmp_path / "namespace"))
    assert KubernetesInfra().namespace == "team-a"
    assert KubernetesInfra(namespace="team-b").namespace == "team-b"


def test_the_claim_of_the_store_is_in_the_job() -> None:
    assert train_manifest(store_claim="seven") != train_manifest(store_claim="eight")


def test_what_checkpoints_may_take_on_a_node_reaches_the_step() -> None:
    launcher = KubernetesLauncher.__new__(KubernetesLauncher)
    launcher._infra = KubernetesInfra.model_validate({"trainer": {"cache_claim": "seven", "cache_gib": 7}})
    assert launcher.caches(Path())["node_cache_bytes"] == 7 * 2**30


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two contexts; nobody listens at either server."""
    names = {"one": "http://127.0.0.1:1", "two": "http://127.0.0.2:1"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "one",
        "clusters": [{"name": name, "cluster": {"server": url}} for name, url in names.items()],
        "users": [{"name": "nobody", "user": {}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": "nobody"}} for name in names],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.mark.usefixtures("kubeconfig")
def test_a_context_says_which_cluster_is_asked() -> None:
    hosts = [cluster.connect(KubernetesInfra(context=context)).host for context in (None, "two")]
    assert hosts == ["http://127.0.0.1:1", "http://127.0.0.2:1"]


@pytest.mark.usefixtures("kubeconfig")
def test_how_long_the_api_server_may_be_away(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(cluster, "time", SimpleNamespace(sleep=waited.append, monotonic=lambda: sum(waited)))
    with pytest.raises(InfraError, match=r"infra\.api_outage_seconds"):
        cluster.connect(KubernetesInfra(api_outage_seconds=7)).get("/api")
    assert 0 < sum(waited) <= 7


def test_where_a_rayservice_answers_and_how_long_its_operator_may_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def get(client: httpx.Client, url: str) -> httpx.Response:
        asked.append(f"{client.base_url}".rstrip("/") + url)
        return httpx.Response(503)

    monkeypatch.setattr(httpx.Client, "get", get)
    settings = RayServiceEngine(ray_service="engine", url="http://there:1", operator_seconds=7)
    served = RayServiceServed(KubernetesInfra(engine=settings), settings, ServedRun("r", "u", "/r"))
    assert served.replicas() == []
    assert asked == ["http://there:1/rh/replicas"]
    waiting = rayservice._RefitWait(served, mock.MagicMock(), {}, 2, 600, began=time.monotonic() - 20)
    with pytest.raises(InfraError, match="KubeRay has not looked"):
        waiting._raise_failures(Told(generation=1))


@pytest.mark.parametrize("key", [key for key in COLLECTOR if key != "pending_seconds"])
def test_a_key_of_the_collector_is_in_its_job(key: str) -> None:
    plain, changed = (shard_manifest(collector=given) for given in (BASIC, BASIC | {key: COLLECTOR[key]}))
    assert changed != plain


def gym_job(**infra: Any) -> GymJob:
    return GymJob(
        StageIdentity("run", "0123456789ab", 0, "gym", "89abcdef0123", shard="calc-123456"),
        KubernetesInfra.model_validate(infra),
        store="s3://bucket",
        service_name="gym-run",
        port=8000,
        role="resources_servers",
        arguments=("python", "-m", "server"),
        variables={},
        secret_variables={"CONFIGURATION": ("secret", "key")},
    )


@pytest.mark.parametrize("key", [key for key in COLLECTOR if key != "pending_seconds"])
def test_a_key_of_the_gym_is_in_its_job(key: str) -> None:
    plain, changed = (gym_job(gym=given).job(1, OWNER) for given in (BASIC, BASIC | {key: COLLECTOR[key]}))
    assert changed != plain


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (8, "cuda")])
def test_the_image_of_a_trainer_is_one_that_is_built(gpus: int, device: str, tmp_path: Path) -> None:
    """The default was a tag without a device, which no build makes."""
    [container] = train_manifest(trainer={"gpus": gpus})["spec"]["template"]["spec"]["containers"]
    builder = tmp_path / "docker"
    builder.write_text('#!/bin/sh\necho "$@"\n')
    builder.chmod(0o755)
    script = Path(__file__).parents[3] / "images/build.sh"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "BUILDER": "docker"}
    done = subprocess.run([script, device, "trainer"], env=environment, capture_output=True, text=True, check=True)
    assert f"-t {container['image']} ." in done.stdout


def test_every_part_of_a_toleration_reaches_the_pod() -> None:
    taint = {"key": "gpu", "operator": "Equal", "value": "h100", "effect": "NoSchedule"}
    settings = TrainerPods.model_validate({"tolerations": [taint]})
    assert pod(settings, {}, "account")["tolerations"] == [taint]


def test_a_toleration_is_one_that_kubernetes_takes() -> None:
    def operator(**given: Any) -> str:
        return Toleration.model_validate(given).operator

    assert operator(key="gpu", value="h100") == operator(key="gpu", value="") == "Equal"
    assert operator(key="gpu") == operator() == operator(key="gpu", value=None) == "Exists"
    recorded = {"key": "gpu", "operator": "Exists", "value": "h100", "effect": None}
    assert Toleration.model_validate(recorded, context=RECORDED).model_dump() == recorded
    with pytest.raises(ValueError, match="operator is Exists and value 'h100': set operator to Equal"):
        operator(**recorded)
    with pytest.raises(ValueError, match="operator is Equal and value 'h100', without a key"):
        operator(value="h100")
