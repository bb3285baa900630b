"""A collection over Jobs of a cluster equals the collection by one process, and a lost Job costs only its own shard.

The test has no nodes: its kubelet runs the container's command as a process of this machine.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from roundhouse.config.generation import TOKEN_VARIABLE
from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.loading import parse_config
from roundhouse.config.placement import placement
from roundhouse.config.rollout import JobShards
from roundhouse.errors import ConfigError, InfraError, RoundhouseError
from roundhouse.plugins.kubernetes.job import Unwanted
from roundhouse.plugins.kubernetes.names import StageIdentity
from roundhouse.plugins.kubernetes.stage_jobs import PLACE, ShardJob
from roundhouse.stages.collect import collect_iteration
from roundhouse.stages.metric_catalogue import meaning_of
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, read_manifest
from roundhouse.store.verification import verify
from tests import fork_server
from tests.k8s.validation import ROOT, problems, unrestricted
from tests.plugins.kubernetes.players import run_container
from tests.plugins.kubernetes.stand import Stand
from tests.stages.test_distributed import TASKS, begun, sequences_digest
from tests.stages.test_distributed import settings as processes
from tests.stages.test_interrupted_collect import (
    COLLECTING,
    GROUP,
    GuessingEngine,
    dataset,
    recorded_seeds,
)
from tests.stages.test_interrupted_collect import engine as engine
from tests.waiting import until

pytestmark = pytest.mark.real

Object = dict[str, Any]

PODS = {"cpu": "100m", "memory": "64Mi", "scratch": "1Gi"}
ENGINE = "http://roundhouse-engine:9000"
"""As a pod would call it; the tests hand the real address to the stage."""


def settings(namespace: str, store: str, shards: int, **collector: Any) -> Object:
    tree = processes(store, 0)
    tree["rollout"]["distribution"] = {"kind": "job", "shards": shards}
    tree["generation"] = tree["generation"] | {"engine_url": ENGINE}
    claim = {} if store.startswith("s3://") else {"store_claim": "store"}
    return tree | {
        "infra": {"kind": "kubernetes", "namespace": namespace, "collector": PODS | collector, **claim},
    }


def on_cluster(stand: Stand, store: str, shards: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, Reference]:
    """A run with shards as Jobs of the stand, and its weights."""
    monkeypatch.setenv("KUBECONFIG", str(stand.kubeconfig))
    stand.kubelet.behave = lambda pod: run_container(stand.kubelet, pod)
    run = open_run(parse_config(settings(stand.namespace, store, shards)))
    refit = run.stage(1, "refit")
    return run, refit.reference() or run.begin(refit, policy_version=0).commit()


def shard_of(item: Object) -> str:
    return str(item["metadata"]["labels"]["roundhouse/shard"])


def pods_by_shard(stand: Stand) -> dict[str, int]:
    """Return the number of pods that each shard had, deleted ones included."""
    labels = ["s0001of0002", "s0002of0002"]
    return {label: sum(label in name for name in stand.kubelet.pods) for label in labels}


# -- the same as one process ----------------------------------------------------------------------------------------


def test_a_collection_over_two_jobs_is_byte_equal_to_that_of_one_process_and_collected_again_has_jobs_of_its_own(
    stand: Stand, tmp_path: Path, engine: GuessingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, weights = begun(f"{tmp_path}/alone", 0)
    alone = collect_iteration(run, 1, weights, engine.url)
    rows, digest, everything = dataset(alone), sequences_digest(run, alone), sorted(engine.answered)
    engine.answered.clear()

    run, weights = on_cluster(stand, f"{tmp_path}/jobs", 2, monkeypatch)
    told: list[tuple[int, int]] = []
    spread = collect_iteration(run, 1, weights, engine.url, lambda *progress: told.append(progress))
    assert sorted(engine.answered) == everything, "each call once"
    assert dataset(spread) == rows
    assert sequences_digest(run, spread) == digest
    assert told[-1] == (TASKS * GROUP, TASKS * GROUP)
    manifest = read_manifest(spread)
    assert manifest.details["distribution"]["kind"] == "job"
    assert manifest.metrics["rollout/shards"] == 2
    # ConfigMap, two lists, two watches, a Job a shard; each shard's log, which a server without nodes is asked for in vain
    assert manifest.metrics["rollout/kubernetes_calls"] <= (20 if stand.state is not None else 40)
    assert all(meaning_of(name) for name in manifest.metrics)
    assert verify(f"{tmp_path}/jobs").problems == []

    jobs = stand.found("jobs")
    assert sorted(shard_of(job) for job in jobs) == ["s0001of0002", "s0002of0002"]
    [owner] = stand.found("configmaps")
    for job in jobs:
        labels = job["metadata"]["labels"]
        assert (labels["roundhouse/run"], labels["roundhouse/iteration"]) == ("r", "1")
        assert labels["roundhouse/stage"] == "collect"
        assert [ref["uid"] for ref in job["metadata"]["ownerReferences"]] == [owner["metadata"]["uid"]]
    assert pods_by_shard(stand) == {"s0001of0002": 1, "s0002of0002": 1}
    if stand.state is not None:
        logs = "".join(stand.state.logs.values())
        assert "s0001of0002: " in logs
        assert "roundhouse.progress" not in logs, "how far it is, and not a line a rollout"

    run.stage(1, "collect").location.delete("manifest.json")
    again = collect_iteration(run, 1, weights, engine.url)
    assert dataset(again) == rows, "the finished Jobs of before are there, their reports are not"
    assert pods_by_shard(stand) == {"s0001of0002": 2, "s0002of0002": 2}


def test_what_a_shard_says_in_its_pod_is_the_stages_log_and_its_progress(
    fake: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, weights = on_cluster(fake, f"{tmp_path}/jobs", 2, monkeypatch)
    told: list[tuple[int, int]] = []
    heard = threading.Event()

    def behave(pod: Object) -> None:
        label = shard_of(pod)
        fake.kubelet.run(pod)
        fake.kubelet.say(pod, f"{label} says something\n{label}: 7 of 10 rollouts\n{label} ends")
        heard.wait(60)
        fake.kubelet.exit(pod, 78)

    fake.kubelet.behave = behave

    def progress(done: int, planned: int) -> None:
        told.append((done, planned))
        if done == 14:
            heard.set()

    with caplog.at_level(logging.INFO), pytest.raises(ConfigError):
        collect_iteration(run, 1, weights, "http://nobody", progress)
    assert (14, TASKS * GROUP) in told
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("collection.sharded_attempt")]
    assert any("s0001of0002 says something" in line for line in lines)
    assert any("1 of 1 pods run" in line for line in lines)
    assert not any("of 10 rollouts" in line for line in lines), "progress is no line of the log"


# -- losses ---------------------------------------------------------------------------------------------------------


def test_a_preempted_pod_costs_its_shard_alone_and_what_it_had_finished_is_not_made_again(
    stand: Stand, tmp_path: Path, engine: GuessingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, weights = begun(f"{tmp_path}/alone", 0)
    expected = sequences_digest(run, collect_iteration(run, 1, weights, engine.url))
    everything = set(engine.answered)
    engine.answered.clear()

    run, weights = on_cluster(stand, f"{tmp_path}/jobs", 2, monkeypatch)
    engine.healthy = 43
    lost = threading.Event()

    def behave(pod: Object) -> None:
        if shard_of(pod) != "s0002of0002" or lost.is_set():
            run_container(stand.kubelet, pod)
            return
        container = pod["spec"]["containers"][0]
        stand.kubelet.run(pod)
        process = fork_server.start([sys.executable, *container["args"]], stdout=subprocess.DEVNULL)
        try:
            until(lambda: len(recorded_seeds(run.stage(1, "collect").location)) == engine.healthy)
        finally:
            process.kill()
            process.wait()
        lost.set()
        engine.healthy = 10**6
        stand.kubelet.disrupt(pod, "PreemptionByScheduler")
        engine.go_on.set()

    stand.kubelet.behave = behave
    reference = collect_iteration(run, 1, weights, engine.url)
    assert lost.is_set()
    assert pods_by_shard(stand) == {"s0001of0002": 1, "s0002of0002": 2}, "nobody touched the other one"
    assert set(engine.answered) == everything
    assert len(engine.answered) == len(everything), "no finished call was made again"
    assert sequences_digest(run, reference) == expected
    manifest = read_manifest(reference)
    assert manifest.metrics["rollout/shards_lost"] == 1
    assert manifest.details["resumptions"]["turns_resumed"] > 0


def test_a_job_that_somebody_deletes_is_made_again(
    stand: Stand, tmp_path: Path, engine: GuessingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, weights = on_cluster(stand, f"{tmp_path}/jobs", 2, monkeypatch)
    first = threading.Event()

    def behave(pod: Object) -> None:
        if shard_of(pod) == "s0002of0002" and not first.is_set():
            first.set()
            stand.kubelet.run(pod)
            name = pod["metadata"]["labels"].get("job-name") or pod["metadata"]["ownerReferences"][0]["name"]
            stand.admin.delete(f"/apis/batch/v1/namespaces/{stand.namespace}/jobs/{name}")
            return
        run_container(stand.kubelet, pod)

    stand.kubelet.behave = behave
    reference = collect_iteration(run, 1, weights, engine.url)
    assert read_manifest(reference).metrics["rollout/shards_lost"] == 1
    assert pods_by_shard(stand) == {"s0001of0002": 1, "s0002of0002": 2}


def test_a_flow_that_is_killed_and_comes_back_finds_the_jobs_of_its_shards(
    stand: Stand, tmp_path: Path, engine: GuessingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"{tmp_path}/jobs"
    run, weights = on_cluster(stand, store, 2, monkeypatch)
    engine.healthy = 10
    flow = fork_server.start(
        [sys.executable, "-c", COLLECTING, json.dumps(settings(stand.namespace, store, 2)), engine.url],
        env=os.environ,
    )
    try:
        until(lambda: len(engine.answered) == engine.healthy or flow.poll() is not None)
        until(lambda: len(stand.kubelet.pods) == 2 or flow.poll() is not None)
        assert flow.poll() is None, "the flow ended by itself"
    finally:
        flow.send_signal(signal.SIGKILL)
        flow.wait()
    engine.healthy = 10**6
    engine.go_on.set()
    reference = collect_iteration(run, 1, weights, engine.url)
    assert pods_by_shard(stand) == {"s0001of0002": 1, "s0002of0002": 1}, "no second Job"
    assert len(stand.found("jobs")) == 2
    assert reference.counts["completed"] == TASKS * GROUP
    assert read_manifest(reference).attempt == 2


def test_a_shard_that_cannot_succeed_ends_the_others_and_no_job_is_left_at_work(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, weights = on_cluster(stand, f"{tmp_path}/jobs", 3, monkeypatch)

    def behave(pod: Object) -> None:
        stand.kubelet.run(pod)
        if shard_of(pod) == "s0001of0003":
            until(lambda: len(stand.kubelet.pods) == 3)
            stand.kubelet.exit(pod, 78, message="no such task file")

    stand.kubelet.behave = behave
    with pytest.raises(ConfigError, match="no such task file"):
        collect_iteration(run, 1, weights, "http://nobody")
    assert [shard_of(job) for job in stand.found("jobs")] == ["s0001of0003"], "kept to be looked at"
    until(lambda: {shard_of(pod) for pod in stand.found("pods")} <= {"s0001of0003"})


# -- one Job --------------------------------------------------------------------------------------------------------


def plan(namespace: str, digest: str = "89abcdef0123", stage: str = "file:///store/a", **given: Any) -> ShardJob:
    collector = PODS | given.pop("collector", {})
    infra = KubernetesInfra.model_validate({"namespace": namespace, "collector": collector, **given})
    identity = StageIdentity("My_run.1", "0123456789ab", 3, "collect", digest, shard="s0001of0200")
    return ShardJob(
        identity, infra, JobShards(timeout_seconds=1000), f"{stage}/spec.json", stage, store="file:///store"
    )


def test_a_stop_deletes_the_job_and_waits_until_it_is_gone(stand: Stand) -> None:
    stopped = threading.Event()

    def behave(pod: Object) -> None:
        stand.kubelet.run(pod)
        stopped.set()

    stand.kubelet.behave = behave
    with stand.jobs() as jobs, pytest.raises(Unwanted):
        jobs.run(plan(stand.namespace), stand.said.append, stopped=stopped)
    assert stand.found("jobs") == []
    with stand.jobs() as jobs, pytest.raises(Unwanted):
        jobs.run(plan(stand.namespace), stand.said.append, stopped=stopped)
    assert len(stand.kubelet.pods) == 1, "nothing is begun that is not wanted"


def test_jobs_of_another_plan_of_the_stage_are_ended_and_those_of_other_stages_stay(stand: Stand) -> None:
    stand.kubelet.behave = lambda pod: stand.kubelet.run(pod)
    place = {PLACE: "file:///store/a"}
    plans = [
        plan(stand.namespace, "aaaaaaaa0000"),
        plan(stand.namespace, "bbbbbbbb0000"),
        plan(stand.namespace, "cccccccc0000", "file:///store/b"),
    ]
    owner = stand.admin.create(f"/api/v1/namespaces/{stand.namespace}/configmaps", plans[0].run_object())
    for each in plans:
        stand.admin.create(f"/apis/batch/v1/namespaces/{stand.namespace}/jobs", each.job(1, owner))
    with stand.jobs() as jobs:
        jobs.end_others(place, {"bbbbbbbb0000"})
    left = {job["metadata"]["annotations"]["roundhouse/digest"] for job in stand.found("jobs")}
    assert left == {"bbbbbbbb0000", "cccccccc0000"}


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        (
            "out of memory",
            InfraError,
            r"limit is 64Mi\). Raise infra.collector.memory, or raise rollout.distribution.sh",
        ),
        ("evicted", InfraError, "Evicted.*low on memory"),
        ("preempted", InfraError, "was preempted by a pod of higher priority"),
        ("told to end", InfraError, "exit code 75"),
        ("no node", InfraError, r"ask for less in infra.collector, or raise infra.collector.pending_seconds"),
        ("no image", ConfigError, r"Check infra.collector.image"),
        ("no secret", ConfigError, r"Check infra.collector.secret, infra.store_claim and infra.collector.environment"),
    ],
)
def test_an_error_of_a_collectors_pod_names_the_keys_of_the_collector(
    fake: Stand, what: str, kind: type[RoundhouseError], message: str
) -> None:
    kubelet = fake.kubelet

    def behave(pod: Object) -> None:
        if what == "no node":
            return kubelet.unschedulable(pod, "0/3 nodes: 3 Insufficient cpu")
        if what in ("no image", "no secret"):
            reason = {"no image": "ErrImagePull", "no secret": "CreateContainerConfigError"}[what]
            return kubelet.stuck(pod, reason, "manifest unknown")
        kubelet.run(pod)
        if what == "out of memory":
            return kubelet.exit(pod, 137, "OOMKilled")
        if what == "evicted":
            return kubelet.evict(pod, "The node was low on memory")
        if what == "preempted":
            return kubelet.disrupt(pod, "PreemptionByScheduler")
        return kubelet.exit(pod, 75)

    kubelet.behave = behave
    impatient = {"no node": {"pending_seconds": 5}, "no image": {"image_seconds": 1}, "no secret": {"image_seconds": 1}}
    with fake.jobs() as jobs, pytest.raises(kind, match=message) as raised:
        jobs.run(plan(fake.namespace, collector=impatient.get(what, {})), fake.said.append)
    assert type(raised.value) is kind
    assert "infra.trainer" not in str(raised.value)
    assert len(kubelet.pods) == 1, "whoever waits decides about another try"


def test_a_shard_beyond_its_deadline_says_what_to_raise(fake: Stand) -> None:
    fake.kubelet.behave = lambda pod: fake.kubelet.run(pod)
    slow = plan(fake.namespace)
    slow = ShardJob(slow.identity, slow.infra, JobShards(timeout_seconds=1), slow.spec, slow.stage, store=slow.store)
    with (
        fake.jobs() as jobs,
        pytest.raises(InfraError, match=r"Raise rollout.distribution.timeout_seconds, or infra.coll"),
    ):
        jobs.run(slow, fake.said.append)


# -- the manifest ---------------------------------------------------------------------------------------------------


def manifest(**given: Any) -> Object:
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "uid": "1111"}}
    return plan("roundhouse", **given).job(1, owner)


def test_the_manifest_of_a_shard_is_valid_restricted_and_takes_all_from_the_collectors_section() -> None:
    collector = {
        "image": "collector:1",
        "cpu": "3",
        "memory": "5Gi",
        "scratch": "7Gi",
        "priority_class": "roundhouse-collector",
        "node_selector": {"pool": "spot"},
        "tolerations": [{"key": "spot"}],
        "secret": "gym-keys",
        "environment": {"GYM_REGION": "x"},
    }
    job = manifest(
        collector=collector, queue="team", store_claim="store", secret="trainers", environment={"AWS_REGION": "y"}
    )
    assert problems(job) == []
    spec = job["spec"]["template"]["spec"]
    assert unrestricted(spec) == []
    assert spec["automountServiceAccountToken"] is False
    assert spec["serviceAccountName"] == "roundhouse-collector"
    assert (spec["priorityClassName"], spec["nodeSelector"]) == ("roundhouse-collector", {"pool": "spot"})
    [container] = spec["containers"]
    assert container["image"] == "collector:1"
    requests = {"cpu": "3", "memory": "5Gi", "ephemeral-storage": "7Gi"}
    assert container["resources"] == {"requests": requests, "limits": {"memory": "5Gi"}}
    assert container["envFrom"] == [{"secretRef": {"name": "gym-keys"}}], "not the trainer's"
    assert {"GYM_REGION", "AWS_REGION"} <= {item["name"] for item in container["env"]}
    assert container["args"] == ["-m", "roundhouse.collection.shard_worker", "--spec", "file:///store/a/spec.json"]
    assert {"name": "store", "mountPath": "/store"} in container["volumeMounts"]
    about = next(json.loads(item["value"]) for item in container["env"] if item["name"] == "ROUNDHOUSE_LOG_LABELS")
    assert about == {"run": "My_run.1", "iteration": 3, "stage": "collect", "shard": "s0001of0200"}
    assert job["spec"]["activeDeadlineSeconds"] == 1000
    assert job["spec"]["ttlSecondsAfterFinished"] == 86_400
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert job["metadata"]["name"] == "my-run-1-012345-i3-collect-s0001of0200-89abcdef-1"
    assert len(manifest(digest="f" * 32)["metadata"]["name"]) <= 58


# -- whom a collector reaches ---------------------------------------------------------------------------------------

POLICIES = [
    item for item in yaml.safe_load_all((ROOT / "k8s/base/network.yaml").read_text()) if item["kind"] == "NetworkPolicy"
]


def selects(selector: Object, labels: dict[str, str]) -> bool:
    def holds(wanted: Object) -> bool:
        is_listed = labels.get(wanted["key"]) in wanted["values"]
        return {"In": is_listed, "NotIn": not is_listed}[wanted["operator"]]

    matched = selector.get("matchLabels", {}).items() <= labels.items()
    return matched and all(holds(wanted) for wanted in selector.get("matchExpressions", []))


def may(sender: dict[str, str], receiver: dict[str, str], port: int | str) -> bool:
    """Return whether the policies of both ends let a pod of the namespace call another one on a port."""
    return _lets(sender, receiver, port, "Egress") and _lets(receiver, sender, port, "Ingress")


def _lets(pod: dict[str, str], other: dict[str, str], port: int | str, way: str) -> bool:
    own = [item["spec"] for item in POLICIES if selects(item["spec"]["podSelector"], pod)]
    own = [spec for spec in own if way in spec["policyTypes"]]
    key = {"Egress": "to", "Ingress": "from"}[way]
    for rule in (rule for spec in own for rule in spec.get(way.lower(), [])):
        ports = [item["port"] for item in rule.get("ports", [])]
        peers = [peer["podSelector"] for peer in rule[key] if "podSelector" in peer and "namespaceSelector" not in peer]
        if any(selects(peer, other) for peer in peers) and (not ports or port in ports):
            return True
    return not own


def test_collectors_reach_the_engines_answers_gym_servers_and_the_store_and_nothing_else_of_the_namespace() -> None:
    def role(component: str) -> dict[str, str]:
        return {"app.kubernetes.io/component": component}

    collector = manifest()["spec"]["template"]["metadata"]["labels"]
    flow, engine, gym, trainer = role("flow"), role("engine"), role("gym"), role("trainer")
    assert may(collector, engine, 9000)
    assert may(collector, engine, 8000)
    assert may(collector, gym, "http")
    assert not may(collector, engine, 8265), "Ray's dashboard takes what is to be served"
    assert not any(may(collector, engine, port) for port in (6379, 10001))
    assert not any(may(collector, other, port) for other in (flow, trainer, collector) for port in (80, 9464, 29500))
    assert not any(may(other, collector, 80) for other in (flow, engine, gym, trainer))
    assert may(flow, engine, 8265)
    assert not may(trainer, engine, 9000)
    names = {item["name"] for item in manifest()["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert TOKEN_VARIABLE not in names, "what tells the one who may change weights from the others"


def test_out_of_the_namespace_collectors_reach_public_addresses_by_https_alone() -> None:
    [spec] = [item["spec"] for item in POLICIES if item["metadata"]["name"] == "collectors-to-what-they-need"]
    outside = [
        (ports["port"], peer.get("ipBlock", {}).get("cidr"))
        for rule in spec["egress"]
        for peer in rule["to"]
        if "podSelector" not in peer or "namespaceSelector" in peer
        for ports in rule["ports"]
    ]
    assert outside == [(443, "0.0.0.0/0"), (443, "::/0")]
    blocks = [peer["ipBlock"] for rule in spec["egress"] for peer in rule["to"] if "ipBlock" in peer]
    forbidden = [ipaddress.ip_network(each) for block in blocks for each in block["except"]]
    for address in ("169.254.169.254", "10.96.0.1", "192.168.1.1", "172.20.0.1"):
        assert any(ipaddress.ip_address(address) in network for network in forbidden), address


# -- the configuration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"infra": {"kind": "local"}}, r"infra.kind is local.*Set infra.kind to kubernetes"),
        ({"infra": {"kind": "kubernetes", "store_claim": "s"}}, r"infra.collector.* is unset. Add it"),
        ({"generation": {"max_model_len": 100_000}}, r"generation.engine_url and infra.engine are unset.*Set one"),
        (
            {"generation": {"engine_url": "http://localhost:1"}},
            r"generation.engine_url is http://localhost:1.*Service's",
        ),
        ({"generation": {"engine_url": "http://[::1]:1"}}, r"generation.engine_url is http://\[::1\]:1"),
        (
            {"environment": {"kind": "remote", "url": "http://127.0.0.1:8001", "train_tasks": "t"}},
            r"environment.url is http://127.0.0.1:8001",
        ),
    ],
)
def test_what_jobs_cannot_work_with_is_refused_at_load_with_key_value_and_remedy(change: Object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(settings("roundhouse", "/store", 2) | change)


def test_an_engine_of_the_cluster_needs_no_url_and_a_dry_run_names_the_jobs() -> None:
    tree = settings("team", "s3://bucket/store", 4)
    tree["generation"].pop("engine_url")
    tree["infra"]["engine"] = {"ray_service": "engine"}
    [line] = [str(place) for place in placement(parse_config(tree)) if place.role == "collector"]
    assert line == "collector: 4 shards, a Job of one pod each in namespace team"
    tree["infra"]["engine"]["url"] = "http://localhost:8000"
    with pytest.raises(ConfigError, match=r"infra.engine.url is http://localhost:8000"):
        parse_config(tree)
