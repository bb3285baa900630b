"""The `gpu` overlay under KubeRay's own operator: from an idle RayService to the end of a run, and in Kueue's queue.

The drills of one module share a cluster and follow each other; each measures a row of the table that the last one prints.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import s3fs

from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.loading import parse_config
from roundhouse.plugins.kubernetes import checks
from roundhouse.stages.checkpoint import publish, publish_starting_policy
from roundhouse.stages.refit import engine_service, refit_iteration
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, read_manifest
from roundhouse_flows.engine_end import engine_released_at_end
from tests.generation import tiny
from tests.plugins.kubernetes.operators.scene import Scene, applied
from tests.stages.test_checkpoint import trained
from tests.waiting import until

Object = dict[str, Any]

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with applied(tmp_path_factory.mktemp("overlay")) as ready:
        yield ready
        print("\n" + json.dumps(ready.measured, indent=2), flush=True)


@pytest.fixture(scope="module")
def run(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with versions 0 and 1 in the bucket."""
    directory = tmp_path_factory.mktemp("run")
    s3fs.S3FileSystem().call_s3("create_bucket", Bucket=scene.bucket)
    infra = {
        "kind": "kubernetes",
        "namespace": scene.namespace,
        "state": str(directory / "state"),
        "engine": {"ray_service": "roundhouse-engine"},
    }
    generation = {
        "backend": "transformers",
        "max_model_len": 512,
        "start_timeout_seconds": 500,
        "refit_timeout_seconds": 100,
    }
    tree = {"run_id": "drill", "store": f"s3://{scene.bucket}", "infra": infra, "generation": generation}
    opened = open_run(parse_config(tree))
    start, update = (tiny.make_model(directory / str(version), seed=version) for version in (0, 1))
    publish_starting_policy(opened, start, {})
    publish(opened, trained(opened, 1, update))
    return opened


def checkpoint(run: Run, version: int) -> Reference:
    reference = run.checkpoint(version).reference()
    assert reference is not None
    return reference


def versions(run: Run) -> list[int | None]:
    return [replica.policy_version for replica in engine_service(run).replicas() if replica.ready]


def test_the_overlay_as_shipped_becomes_a_ready_rayservice_that_holds_no_gpu_until_a_run_asks(
    scene: Scene, run: Run
) -> None:
    def head_is_ready() -> bool:
        return any(map(checks._is_ready, scene.pods("head")))

    scene.measure("overlay applied to head ready", head_is_ready, scene.began)
    assert scene.pods("worker") == []
    [finding] = checks.ray(scene.admin, KubernetesInfra.model_validate(run.config.infra.model_dump()))
    assert (finding.status, "no replicas" in finding.detail) == ("ok", True), finding
    began = time.monotonic()
    refit_iteration(run, 1, checkpoint(run, 0))
    scene.measure("run's start to a replica with version 0", lambda: versions(run) == [0], began)
    scene.measure("run's start to RayService Ready", scene.is_ready, began)
    assert [pod["spec"]["serviceAccountName"] for pod in scene.pods("worker")] == ["roundhouse-engine"]


def test_a_refit_replaces_no_pod(scene: Scene, run: Run) -> None:
    before = [pod["metadata"]["uid"] for pod in scene.pods("worker")]
    began = time.monotonic()
    refitted = refit_iteration(run, 2, checkpoint(run, 1))
    scene.measure("refit", lambda: versions(run) == [1], began)
    assert [pod["metadata"]["uid"] for pod in scene.pods("worker")] == before
    assert read_manifest(refitted).metrics["refit/engine_replacements"] == 0


@pytest.mark.parametrize("kind", ["worker", "head"])
def test_a_lost_pod_comes_back_with_the_wanted_version_by_itself(scene: Scene, run: Run, kind: str) -> None:
    [pod] = scene.pods(kind)
    scene.admin.delete(scene.path("pods", pod["metadata"]["name"]), propagation="Background")
    began = time.monotonic()
    until(lambda: pod["metadata"]["uid"] not in [each["metadata"]["uid"] for each in scene.pods(kind)], seconds=120)

    def is_back() -> bool:
        """A replica outlives its head for a while, so the pods have to be ready, too."""
        pods = [*scene.pods("head"), *scene.pods("worker")]
        return len(pods) == 2 and all(map(checks._is_ready, pods)) and versions(run) == [1]

    scene.measure(f"{kind} lost to version 1 again", is_back, began)


def test_a_changed_image_is_rolled_out_by_the_next_refit(scene: Scene, run: Run) -> None:
    service = scene.service()
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        group["template"]["spec"]["containers"][0]["image"] = scene.next_image
    scene.admin.patch(scene.path("rayservices", "roundhouse-engine"), {"spec": {"rayClusterConfig": cluster}})
    began = time.monotonic()
    engine, generation, start = engine_service(run), run.config.generation, checkpoint(run, 0).uri
    engine.ensure(generation, start, checkpoint(run, 1).uri, 1)
    scene.measure("image changed to version 1 on the new image", lambda: versions(run) == [1], began)
    assert engine.metrics()["engine_replacements"] == 1
    images = {pod["spec"]["containers"][0]["image"] for kind in ("head", "worker") for pod in scene.pods(kind)}
    assert images == {scene.next_image}
    again = engine_service(run)
    again.ensure(generation, start, checkpoint(run, 1).uri, 1)
    assert again.metrics()["engine_replacements"] == 0, "KubeRay's cluster is equal to its template"


def test_the_end_of_the_run_gives_its_gpus_back_within_a_minute(scene: Scene, run: Run) -> None:
    with pytest.raises(RuntimeError, match="as a failed stage"), engine_released_at_end(run):
        raise RuntimeError("as a failed stage")
    began = time.monotonic()
    scene.measure("end of the run to the last replica gone", lambda: versions(run) == [], began)
    scene.measure("end of the run to the last worker gone", lambda: scene.listed("pods", WORKERS) == [], began)
    assert scene.measured["end of the run to the last worker gone"] <= 60
    assert len(scene.pods("head")) == 1, "it holds no GPU"


WORKERS = "ray.io/node-type=worker"
