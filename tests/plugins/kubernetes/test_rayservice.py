"""The engine as a RayService: refits in place, by KubeRay's word and the replicas' own."""

from __future__ import annotations

import signal
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prefect.exceptions import Pause, TerminationSignal

from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.loading import parse_config
from roundhouse.config.models import GenerationConfig
from roundhouse.errors import ConfigError, DeploymentFailed, InfraError
from roundhouse.plugins.kubernetes import rayservice
from roundhouse.plugins.kubernetes.rayservice import RayServiceServed, ServedRun
from roundhouse.plugins.kubernetes.serve_config import (
    application_in,
    as_handed_on,
    exact_request,
    told,
    with_application,
)
from roundhouse.stages import refit
from roundhouse.stages.cost import BudgetReached
from roundhouse.stages.metric_catalogue import meaning_of
from roundhouse.stages.refit import engine_service, refit_iteration, release_engine
from roundhouse.stages.report import report_iteration
from roundhouse.store.lease import driving
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import read_manifest
from roundhouse_flows import engine_end
from roundhouse_flows.engine_end import engine_released_at_end
from tests.plugins.kubernetes.kuberay import FakeServe, Operator, answering, install_crd, through_go
from tests.plugins.kubernetes.stand import Stand
from tests.waiting import until

Object = dict[str, Any]

ROOT = Path(__file__).parents[3]
CONFIG = GenerationConfig(replicas=2, start_timeout_seconds=10, refit_timeout_seconds=5)
MODEL = "s3://bucket/runs/a/checkpoints/000000"


def manifest(name: str, namespace: str) -> Object:
    """The engine of the overlay `gpu`."""
    [service] = yaml.safe_load_all((ROOT / "k8s/overlays/gpu/rayservice.yaml").read_text())
    service["metadata"] |= {"name": name, "namespace": namespace}
    return dict(service)


@dataclass
class Scene:
    """A RayService, its operator, and its Serve application."""

    stand: Stand
    serve: FakeServe
    operator: Operator
    url: str
    name: str

    @property
    def path(self) -> str:
        return f"/apis/ray.io/v1/namespaces/{self.stand.namespace}/rayservices/{self.name}"

    def engine(self, run: str = "mine", location: str = "/nowhere", **engine: Any) -> RayServiceServed:
        settings = {"ray_service": self.name, "url": self.url} | engine
        infra = KubernetesInfra.model_validate(
            {"namespace": self.stand.namespace, "engine": settings, "api_outage_seconds": 5}
        )
        assert infra.engine is not None
        return RayServiceServed(infra, infra.engine, ServedRun(run, f"uid-of-{run}", location))

    def service(self) -> Object:
        return self.stand.admin.get(self.path)


@pytest.fixture
def scene(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("KUBECONFIG", str(stand.kubeconfig))
    if stand.plane is not None:
        install_crd(stand.admin)
    serve, name = FakeServe(), f"engine-{uuid.uuid4().hex[:6]}"
    path = f"/apis/ray.io/v1/namespaces/{stand.namespace}/rayservices"
    stand.admin.create(path, manifest(name, stand.namespace))
    operator = Operator(stand.admin, stand.namespace, serve)
    try:
        with answering(serve) as url:
            yield Scene(stand, serve, operator, url, name)
    finally:
        operator.stop()


def test_a_refit_writes_the_version_to_the_rayservice_and_changes_no_cluster(scene: Scene) -> None:
    engine = scene.engine()
    assert engine.replicas() == []
    first = engine.ensure(CONFIG, MODEL, "s3://bucket/runs/a/checkpoints/000000", 0)
    assert [replica.policy_version for replica in first] == [0, 0]
    before = scene.service()
    scene.stand.faults.seen.clear()
    engine.calls.clear()
    second = engine.ensure(CONFIG, MODEL, "s3://bucket/runs/a/checkpoints/000001", 1)
    assert [replica.policy_version for replica in second] == [1, 1]
    assert len(scene.stand.faults.seen) == 4, "get, apply, list, watch"
    assert engine.metrics() == {"kubernetes_calls": 4.0, "engine_replacements": 0.0}

    after = scene.service()
    assert len(scene.operator.specs) == 1, "one rayClusterConfig from beginning to end"
    assert {**after["spec"], "serveConfigV2": ""} == {**before["spec"], "serveConfigV2": ""}
    one, two = (application_in(item["spec"]["serveConfigV2"]) for item in (before, after))
    assert one is not None
    assert two is not None
    asked = two["deployments"][0].pop("user_config")
    assert asked["request"] > one["deployments"][0].pop("user_config")["request"]
    assert one == two, "user_config alone, so that Serve replaces no replica"
    assert after["metadata"]["annotations"]["roundhouse/run"] == "mine"


def test_the_refit_stage_and_the_iterations_report_count_its_calls(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        refit, "refuse_unfit_engine", lambda *_: None
    )  # the Serve of the scene has replicas and no model
    infra = scene.engine().infra.model_dump(mode="json") | {"store_claim": "store", "state": str(tmp_path / "state")}
    generation = CONFIG.model_dump(mode="json")
    run = open_run(parse_config({"run_id": "mine", "store": str(tmp_path), "infra": infra, "generation": generation}))
    start = run.begin(run.checkpoint(0), policy_version=0).commit()
    run.begin(run.stage(1, "train"), policy_version=0).commit(metrics={"train/kubernetes_calls": 8.0})
    scene.stand.faults.seen.clear()
    metrics = read_manifest(refit_iteration(run, 1, start)).metrics
    assert metrics["refit/kubernetes_calls"] == len(scene.stand.faults.seen) > 0
    assert all(meaning_of(name) for name in metrics)
    reported = read_manifest(report_iteration(run, 1)).metrics["kubernetes/calls"]
    assert reported == metrics["refit/kubernetes_calls"] + 8


@pytest.mark.parametrize("end", [None, RuntimeError, BudgetReached, Pause, KeyboardInterrupt, TerminationSignal])
def test_a_flow_that_ends_releases_the_engine_however_it_ends(
    scene: Scene, tmp_path: Path, end: type[BaseException] | None
) -> None:
    """SIGTERM too, since no Job starts this process again."""
    infra = scene.engine().infra.model_dump(mode="json") | {"store_claim": "store", "state": str(tmp_path / "state")}
    run = open_run(parse_config({"run_id": "mine", "store": str(tmp_path), "infra": infra}))
    engine_service(run).ensure(CONFIG, MODEL, "s3://bucket/1", 1)
    with suppress(end or Exception), engine_released_at_end(run):
        assert application_in(scene.service()["spec"]["serveConfigV2"]) is not None
        if end is not None:
            raise end(signal.SIGTERM) if end is TerminationSignal else end("text")
    assert application_in(scene.service()["spec"]["serveConfigV2"]) is None


@pytest.mark.parametrize("released", [engine_end.engine_released_after_use, refit.engine_released_after_use])
def test_work_beside_a_run_releases_the_engine_unless_a_process_drives_the_run(
    scene: Scene, tmp_path: Path, released: Callable[[Run], AbstractContextManager[None]]
) -> None:
    infra = scene.engine().infra.model_dump(mode="json") | {"store_claim": "store", "state": str(tmp_path / "state")}
    run = open_run(parse_config({"run_id": "mine", "store": str(tmp_path), "infra": infra}))
    engine_service(run).ensure(CONFIG, MODEL, "s3://bucket/1", 1)
    with driving(run.location), released(run):
        pass
    assert application_in(scene.service()["spec"]["serveConfigV2"]) is not None
    with pytest.raises(RuntimeError), released(run):
        raise RuntimeError("as a failed collection")
    assert application_in(scene.service()["spec"]["serveConfigV2"]) is None


def test_an_engine_that_cannot_be_released_is_a_warning_with_the_remedy(
    scene: Scene, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    infra = scene.engine(ray_service="gone").infra.model_dump(mode="json") | {"store_claim": "store"}
    release_engine(open_run(parse_config({"run_id": "mine", "store": str(tmp_path), "infra": infra})))
    assert "RayService gone does not exist" in caplog.text


def test_what_kuberay_hands_on_is_what_was_written(scene: Scene) -> None:
    """Go reads each number as a float64: 0.0 arrives as 0, and a number of 19 digits as another."""
    engine = scene.engine()
    engine.ensure(CONFIG, MODEL, "s3://bucket/one", 1)
    written = yaml.safe_load(scene.service()["spec"]["serveConfigV2"])
    assert scene.serve.puts[-1] == written
    assert written["applications"][0]["args"]["generation"]["gpus_per_replica"] == 0


@given(st.integers(min_value=10**18, max_value=2 * 10**18))
def test_a_request_number_survives_go(number: int) -> None:
    assert number <= through_go(exact_request(number)) == exact_request(number)


@given(st.recursive(st.floats(allow_nan=False, allow_infinity=False) | st.text() | st.booleans(), st.lists))
def test_a_value_that_was_made_ready_survives_go(value: object) -> None:
    small = as_handed_on(value)
    if _largest(small) < 2**53:
        assert through_go(small) == small
        assert repr(through_go(small)) == repr(small).replace("-0.0", "0")


def _largest(value: Any) -> float:
    if isinstance(value, list):
        return max(map(_largest, value), default=0)
    return abs(value) if isinstance(value, int | float) else 0


def test_other_applications_and_options_of_the_rayservice_stay() -> None:
    text = "http_options: {port: 8000}\napplications:\n- {name: judge, import_path: a:b}\n- {name: policy, old: 1}\n"
    tree = yaml.safe_load(with_application(text, {"name": "policy", "new": 1}))
    assert tree == {
        "http_options": {"port": 8000},
        "applications": [{"name": "judge", "import_path": "a:b"}, {"name": "policy", "new": 1}],
    }
    assert yaml.safe_load(with_application(None, {"name": "policy"})) == {"applications": [{"name": "policy"}]}
    for bad in ("[1, 2]", "applications: [a]", "a: [", "applications: 3"):
        with pytest.raises(ConfigError, match="serveConfigV2"):
            with_application(bad, {})


def test_the_engine_can_be_asked_for_before_there_are_weights_and_keeps_those_that_it_has(scene: Scene) -> None:
    engine = scene.engine()
    engine.start(CONFIG, MODEL)
    wanted = _desired(scene)
    assert wanted["weights"] is None
    engine.ensure(CONFIG, MODEL, "s3://bucket/three", 3)
    engine.start(CONFIG, MODEL)
    assert _desired(scene)["policy_version"] == 3


def test_replicas_that_hold_another_version_are_waited_for(scene: Scene) -> None:
    engine = scene.engine()
    engine.ensure(CONFIG, MODEL, "s3://bucket/1", 1)
    scene.serve.holding.set()
    short = CONFIG.model_copy(update={"start_timeout_seconds": 1, "refit_timeout_seconds": 0.5})
    with pytest.raises(DeploymentFailed, match=r"Not all 2 replicas .* version 2 within 1.5 s .*replica-0: version 1"):
        engine.ensure(short, MODEL, "s3://bucket/2", 2)


def test_a_replica_that_refuses_the_weights_ends_the_refit_with_its_words(scene: Scene) -> None:
    engine = scene.engine()
    engine.ensure(CONFIG, MODEL, "s3://bucket/1", 1)
    scene.serve.refusal = "s3://bucket/2 lacks the tensor lm_head.weight."
    with pytest.raises(DeploymentFailed, match="lacks the tensor"):
        engine.ensure(CONFIG, MODEL, "s3://bucket/2", 2)


def test_a_failed_deployment_is_told_in_serves_words_and_a_failure_of_before_is_not(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rayservice, "STALE_SECONDS", 1.5)
    scene.serve.error = "Traceback …\nConfigError: engine_args: unknown key 'tensor_paralel_size'"
    with pytest.raises(DeploymentFailed, match=r"DEPLOY_FAILED: .*\n.*tensor_paralel_size"):
        scene.engine().ensure(CONFIG, MODEL, "s3://bucket/1", 1)
    scene.serve.error = ""
    assert len(scene.engine().ensure(CONFIG, MODEL, "s3://bucket/1", 1)) == 2


def test_without_an_operator_the_refit_says_so(scene: Scene) -> None:
    scene.operator.stop()
    with pytest.raises(InfraError, match=r"KubeRay has not looked at RayService .* Does its operator run"):
        scene.engine(operator_seconds=0.5).ensure(CONFIG, MODEL, "s3://bucket/1", 1)


def test_what_serve_refuses_is_told_by_the_operators_event(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: Object) -> None:
        raise ValueError("ray.serve says 400: no such runtime_env")

    monkeypatch.setattr(scene.serve, "put", refuse)
    with pytest.raises(InfraError, match="no such runtime_env"):
        scene.engine(operator_seconds=1).ensure(CONFIG, MODEL, "s3://bucket/1", 1)


def test_a_missing_rayservice_names_the_key_and_what_to_apply(scene: Scene) -> None:
    with pytest.raises(ConfigError, match=r"infra.engine.ray_service.*k8s/overlays/gpu"):
        scene.engine(ray_service="other").ensure(CONFIG, MODEL, "s3://bucket/1", 1)


def test_a_rayservice_serves_one_run_until_that_has_finished(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    scene.engine("first", str(tmp_path)).ensure(CONFIG, MODEL, "s3://bucket/1", 1)
    with pytest.raises(ConfigError, match=r"serves run 'first'.*annotate rayservice"):
        scene.engine("second").ensure(CONFIG, MODEL, "s3://bucket/1", 1)
    assert _desired(scene)["weights"] == "s3://bucket/1"
    (tmp_path / "summary.json").write_text("{}")
    scene.engine("second").ensure(CONFIG, MODEL, "s3://bucket/other/1", 1)
    assert scene.service()["metadata"]["annotations"]["roundhouse/run"] == "second"


def test_a_refit_survives_an_api_server_with_faults(scene: Scene) -> None:
    engine = scene.engine()
    for status in (429, 503, 500):
        scene.stand.faults.plant(status)
    engine.ensure(CONFIG, MODEL, "s3://bucket/1", 1)
    assert _desired(scene)["policy_version"] == 1


def test_the_cluster_that_is_made_ready_is_looked_at_before_the_one_that_serves() -> None:
    def part(status: str) -> Object:
        return {"applicationStatuses": {"policy": {"status": status, "message": status.lower()}}}

    both = {"activeServiceStatus": part("RUNNING"), "pendingServiceStatus": part("DEPLOYING")}
    assert told({"status": both}).status == "DEPLOYING"
    assert told({"status": {"activeServiceStatus": part("RUNNING")}}).is_running
    assert not told({}).is_running


def test_the_end_of_a_run_takes_the_replicas_away_and_no_other_application(scene: Scene) -> None:
    engine = scene.engine()
    scene.stand.admin.patch(
        scene.path, {"spec": {"serveConfigV2": "applications: [{name: judge, import_path: a:b, route_prefix: /judge}]"}}
    )
    engine.ensure(CONFIG, MODEL, "s3://bucket/1", 1)
    scene.engine("another").release()
    assert _desired(scene)["policy_version"] == 1, "it serves this run"
    engine.release()
    until(lambda: not scene.serve.replicas(), "no replica of the policy")
    assert [each["name"] for each in scene.serve.config["applications"]] == ["judge"]
    notes = scene.service()["metadata"]["annotations"]
    assert notes["roundhouse/run"] == "mine", "a suspended run finds its engine again"
    engine.release()
    assert len(engine.ensure(CONFIG, MODEL, "s3://bucket/1", 1)) == 2


@pytest.mark.parametrize("job", ["lives", "ends", None])
def test_a_signal_leaves_the_replicas_to_the_next_pod_of_the_flows_job(scene: Scene, job: str | None) -> None:
    stand, engine = scene.stand, scene.engine()
    engine.ensure(CONFIG, MODEL, "s3://bucket/1", 1)
    pod = {"metadata": {"name": socket.gethostname()}, "spec": {"containers": [{"name": "flow", "image": "i"}]}}
    if job is not None:
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": f"flow-{job}", "uid": "u", "controller": True}
        pod["metadata"]["ownerReferences"] = [owner]
    if job == "lives":
        template = {"metadata": {}, "spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}}
        body = {"metadata": {"name": f"flow-{job}"}, "spec": {"suspend": True, "template": template}}
        stand.admin.create(f"/apis/batch/v1/namespaces/{stand.namespace}/jobs", body)
    stand.admin.create(f"/api/v1/namespaces/{stand.namespace}/pods", pod)
    engine.release(next_pod_resumes=True)
    application = application_in(scene.service()["spec"]["serveConfigV2"])
    assert (application is not None) == (job == "lives")


def test_a_changed_engine_image_replaces_the_cluster_once_and_is_reported(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    engine = scene.engine()
    engine.ensure(CONFIG, MODEL, "s3://bucket/1", 1)
    first = _clusters(scene)
    service = scene.service()
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["image"] = (
        "team/e:2"
    )
    scene.stand.admin.patch(scene.path, {"spec": service["spec"]})
    engine.ensure(CONFIG, MODEL, "s3://bucket/1", 1)
    until(lambda: _clusters(scene) and _clusters(scene) != first, "another cluster")
    assert "'roundhouse/engine:0.1.0-cuda' -> 'team/e:2'" in caplog.text
    assert engine.metrics()["engine_replacements"] == 1
    second = _clusters(scene)
    scene.engine().ensure(CONFIG, MODEL, "s3://bucket/2", 2)
    assert _clusters(scene) == second


def test_a_run_without_a_rayservice_makes_one_of_its_own_and_deletes_it(scene: Scene, tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text((ROOT / "k8s/overlays/gpu/rayservice.yaml").read_text())
    engine = scene.engine(ray_service=None, manifest=str(file))
    assert len(engine.ensure(CONFIG, MODEL, "s3://bucket/1", 1)) == 2
    path = f"/apis/ray.io/v1/namespaces/{scene.stand.namespace}/rayservices"
    own = scene.stand.admin.get(f"{path}/{engine.name}")
    assert [owner["kind"] for owner in own["metadata"]["ownerReferences"]] == ["ConfigMap"]
    assert own["metadata"]["labels"]["app.kubernetes.io/component"] == "engine", "by which policies select its pods"
    assert len(engine.name) <= 47, "KubeRay makes longer names of it"
    engine.release()
    assert [item["metadata"]["name"] for item in scene.stand.admin.get(path)["items"]] == [scene.name]
    engine.release()
    file.write_text("kind: Nothing")
    with pytest.raises(ConfigError, match=r"infra.engine.manifest: .* has 0 RayServices"):
        engine.ensure(CONFIG, MODEL, "s3://bucket/1", 1)


@pytest.mark.parametrize("engine", [{}, {"ray_service": "a", "manifest": "b"}])
def test_an_engine_is_named_or_made_and_not_both(engine: Object) -> None:
    tree = {"run_id": "a", "store": "s3://bucket/x", "infra": {"kind": "kubernetes", "engine": engine}}
    with pytest.raises(ConfigError, match=r"infra.engine.*set ray_service .* or manifest"):
        parse_config(tree)


def test_two_engines_cannot_be_named() -> None:
    tree = {
        "run_id": "a",
        "store": "s3://bucket/x",
        "infra": {"kind": "kubernetes", "engine": {"ray_service": "e"}},
        "generation": {"engine_url": "http://e:9000"},
    }
    with pytest.raises(ConfigError, match=r"generation.engine_url .* infra.engine \(e\)"):
        parse_config(tree)


def _clusters(scene: Scene) -> list[str]:
    path = f"/apis/ray.io/v1/namespaces/{scene.stand.namespace}/rayclusters"
    return [item["metadata"]["name"] for item in scene.stand.admin.get(path).get("items") or []]


def _desired(scene: Scene) -> Object:
    application = application_in(scene.service()["spec"]["serveConfigV2"])
    assert application is not None
    return dict(application["deployments"][0]["user_config"])
