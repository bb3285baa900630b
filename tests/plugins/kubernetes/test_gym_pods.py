"""`environment.kind: nemo_gym` on a cluster: its servers are pods, healthy before the first rollout, replaced after a death,
deleted at the end.

The test has no nodes and no DNS: its kubelet runs each server as a process of this machine, which resolves
`<service>.<namespace>.svc` to the loopback address.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from roundhouse.config.environments import SERVERS_VARIABLE
from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from roundhouse.config.placement import placement
from roundhouse.environments.calculator import Calculator
from roundhouse.errors import ConfigError, InfraError
from roundhouse.http.asgi import ALLOWED_HOSTS
from roundhouse.plugins.kubernetes import checks
from roundhouse.plugins.kubernetes.names import server_label
from roundhouse.plugins.kubernetes.stage_jobs import gym_secret
from roundhouse.plugins.nemo_gym.config.instances import RESERVED
from roundhouse.plugins.nemo_gym.owned import resolved_for_pods
from roundhouse.plugins.nemo_gym.section import NemoGymEnvironment
from roundhouse.plugins.nemo_gym.servers.pods import HEAD, GymPlan, plan_pods
from roundhouse.stages.collect import collect_iteration, read_rollouts
from roundhouse.stages.preflight import refuse_unready
from roundhouse.stages.refit import own_gym
from roundhouse.store.run import Run, open_run
from roundhouse.trajectories.records import Status
from tests.asynchrony.place import opened
from tests.gym.playground import serving
from tests.k8s.validation import ROOT, pod_specs, problems, unrestricted
from tests.plugins.kubernetes.players import run_container
from tests.plugins.kubernetes.stand import Stand
from tests.plugins.kubernetes.test_shard_jobs import may
from tests.plugins.nemo_gym.test_start import CALCULATOR, plays_calculator
from tests.plugins.programs.model_server.fake_engine import FakeEngine
from tests.ports import free_ports, listens
from tests.waiting import until

pytestmark = pytest.mark.real

Object = dict[str, Any]

SECRET = "sesame-of-the-judge"
NAMES = {HEAD, "calc", "calc_agent", "policy_model"}
PODS = {"cpu": "100m", "memory": "64Mi", "scratch": "1Gi"}
TASKS = 2


def settings(tmp_path: Path, namespace: str = "roundhouse", engine: str = "http://engine:9000", **given: Any) -> Object:
    """A run of the calculator behind NeMo Gym's contracts, with a free port for each server."""
    tree = yaml.safe_load(CALCULATOR)
    *ports, head = free_ports(4)
    for port, (name, kind) in zip(ports, [(name, *each) for name, each in tree.items()], strict=True):
        [implementation] = tree[name][kind]
        tree[name][kind][implementation]["port"] = port
    (tmp_path / "gym.yaml").write_text(yaml.safe_dump(tree | {"judge_api_key": SECRET}))
    agent = {"agent_ref": {"type": "responses_api_agents", "name": "calc_agent"}}
    rows = [dict(row) | agent for row in Calculator().tasks("train")[: 2 * TASKS]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {
        "kind": "nemo_gym",
        "config_paths": [str(tmp_path / "gym.yaml")],
        "overrides": [f"++head_server.port={head}"],
        "train_tasks": str(tmp_path / "rows.jsonl"),
        "start_timeout_seconds": 120,
    }
    return {
        "run_id": "my_run",
        "store": str(tmp_path / "store"),
        "policy": {"kind": "pretrained", "path": str(tmp_path)},
        "generation": {"engine_url": engine, "max_model_len": 100_000},
        "evaluation": {"every": None, "before_training": False},
        "rollout": {
            "prompts_per_iteration": TASKS,
            "group_size": 2,
            "retry": {"attempts": 4, "first_delay_seconds": 0.05},
        },
        "environment": environment | given.pop("environment", {}),
        "infra": {
            "kind": "kubernetes",
            "namespace": namespace,
            "state": str(tmp_path / "state"),
            "store_claim": "store",
            "gym": PODS | given.pop("gym", {}),
            **given.pop("infra", {}),
        },
        **given,
    }


def name_of(item: Object) -> str:
    """Return the name of the server of a pod or Job."""
    label = item["metadata"]["labels"]["roundhouse/shard"]
    return next(name for name in NAMES if label.startswith(name.replace("_", "-")) and len(label) == len(name) + 7)


class Machine:
    """This machine as the node: kubelet, DNS and proxies for a server."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.name = re.compile(rf"[a-z0-9-]+\.{stand.namespace}\.svc")

    def run(self, pod: Object) -> None:
        places = {item["name"]: self._value(item) for item in pod["spec"]["containers"][0]["env"]}
        places = {name: value for name, value in places.items() if name not in ("HOME", "TMPDIR")}
        run_container(self.stand.kubelet, pod, places)

    def resolve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Names of Services, in this process."""
        look_up = socket.getaddrinfo

        def getaddrinfo(host: Any, *rest: Any, **options: Any) -> Any:
            return look_up("127.0.0.1" if self.name.fullmatch(os.fsdecode(host or "")) else host, *rest, **options)

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    def kill(self, name: str) -> None:
        """The server's process, as when it is out of memory."""
        for pod in self.stand.found("pods"):
            if name_of(pod) == name and pod["status"]["phase"] == "Running":
                self.stand.kubelet.processes[pod["metadata"]["uid"]].send_signal(signal.SIGKILL)

    def _value(self, item: Object) -> str:
        value = item.get("value")
        if value is None:
            reference = item["valueFrom"]["secretKeyRef"]
            path = f"/api/v1/namespaces/{self.stand.namespace}/secrets/{reference['name']}"
            value = base64.b64decode(self.stand.admin.get(path)["data"][reference["key"]]).decode()
        return self.name.sub("127.0.0.1", value)


@pytest.fixture
def machine(fake: Stand, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("KUBECONFIG", str(fake.kubeconfig))
    machine = Machine(fake)
    fake.kubelet.behave = machine.run
    machine.resolve(monkeypatch)
    return machine


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(reply=plays_calculator, policy_version=0)
    with serving(engine) as engine.url:  # type: ignore[attr-defined]
        yield engine


def run_on(machine: Machine, tmp_path: Path, engine: FakeEngine, **given: Any) -> Run:
    """Return a run with an engine under a name of the cluster."""
    namespace, port = machine.stand.namespace, engine.url.rpartition(":")[2]  # type: ignore[attr-defined]
    url = f"http://engine.{namespace}.svc:{port}"
    return open_run(parse_config(settings(tmp_path, namespace, url, **given)))


def collected(run: Run, iteration: int) -> list[Any]:
    weights = run.begin(run.stage(iteration, "refit"), policy_version=0).commit()
    return list(read_rollouts(collect_iteration(run, iteration, weights, run.config.generation.engine_url)))


@contextmanager
def flow_pod(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> Iterator[Object]:
    """The Job of the flow, with this process as one of its pods."""
    monkeypatch.setattr(socket, "gethostname", lambda: "roundhouse-flow-0-abcde")
    jobs = f"/apis/batch/v1/namespaces/{stand.namespace}/jobs"
    assert stand.state is not None
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "flow"}, "spec": {"suspend": True}}
    _, job = stand.state.create("jobs", stand.namespace, body)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "flow", "uid": job["metadata"]["uid"], "controller": True}
    metadata = {"name": "roundhouse-flow-0-abcde", "ownerReferences": [owner]}
    stand.admin.create(f"/api/v1/namespaces/{stand.namespace}/pods", {"metadata": metadata, "spec": {}, "status": {}})
    yield stand.admin.get(f"{jobs}/flow")


# -- a run ----------------------------------------------------------------------------------------------------------


def test_two_iterations_are_played_by_pods_one_of_which_dies_between_them(
    machine: Machine, tmp_path: Path, engine: FakeEngine
) -> None:
    stand, run = machine.stand, run_on(machine, tmp_path, engine)
    with own_gym(run):
        first = collected(run, 1)
        assert [rollout.status for rollout in first] == [Status.COMPLETED] * 2 * TASKS
        assert {rollout.environment for rollout in first} == {"calc_agent"}
        assert all(turn.generation_token_ids for rollout in first for turn in rollout.turns)
        assert sorted(map(name_of, stand.found("pods"))) == sorted(NAMES)
        services = {item["metadata"]["name"]: item["spec"] for item in stand.found("services")}
        machine.kill("calc_agent")
        second = collected(run, 2)
        assert [rollout.status for rollout in second] == [Status.COMPLETED] * 2 * TASKS
        made = [name for name in stand.kubelet.pods if "calc-agent" in name]
        assert len(made) == 2, "the dead one was started again"
        assert len(stand.kubelet.pods) == len(NAMES) + 1, "and no other"
        assert {item["metadata"]["name"]: item["spec"] for item in stand.found("services")} == services
    assert [plural for plural in ("services", "secrets") if stand.found(plural)] == []
    for plural in ("jobs", "pods"):
        assert [name_of(item) for item in stand.found(plural)] == ["calc_agent"], "what failed, to be looked at"
    assert SERVERS_VARIABLE not in os.environ


def test_a_shard_in_a_pod_finds_the_head_server_and_needs_no_file_of_the_configuration(
    machine: Machine, tmp_path: Path, engine: FakeEngine
) -> None:
    infra = {"collector": PODS}
    run = run_on(machine, tmp_path, engine, infra=infra)
    tree = run.config.model_dump(mode="json")
    tree["rollout"]["distribution"] = {"kind": "job", "shards": 2}
    run = open_run(parse_config(tree | {"run_id": "spread"}))
    with own_gym(run):
        (tmp_path / "gym.yaml").unlink()
        rollouts = collected(run, 1)
    assert [rollout.status for rollout in rollouts] == [Status.COMPLETED] * 2 * TASKS
    assert sum("collect" in name for name in machine.stand.kubelet.pods) == 2


def test_no_rollout_is_asked_for_before_every_server_answers(
    machine: Machine, tmp_path: Path, engine: FakeEngine
) -> None:
    stand, go_on, entered, leave = machine.stand, threading.Event(), threading.Event(), threading.Event()

    def behave(pod: Object) -> None:
        if name_of(pod) == "policy_model":
            go_on.wait(60)
        machine.run(pod)

    def start() -> None:
        with own_gym(run_on(machine, tmp_path, engine)):
            entered.set()
            leave.wait(60)

    stand.kubelet.behave = behave
    thread = threading.Thread(target=start, daemon=True)
    thread.start()

    def others_listen() -> bool:
        ports = [
            each["spec"]["ports"][0]["port"] for each in stand.found("services") if name_of(each) != "policy_model"
        ]
        return len(ports) == 3 and all(listens(port) for port in ports)

    until(others_listen)
    time.sleep(1)
    assert not entered.is_set()
    go_on.set()
    assert entered.wait(60)
    leave.set()
    thread.join(60)


# -- ends -----------------------------------------------------------------------------------------------------------

RESOLVER = """
import os, socket
look_up = socket.getaddrinfo
def local(host, *rest, **options):  # asynchronous clients look a name up as bytes
    return look_up("127.0.0.1" if os.fsdecode(host or "").endswith(".svc") else host, *rest, **options)
socket.getaddrinfo = local
"""
"""Has a program read the name of a Service as the loopback address."""
FLOW = f"""
import json, re, sys, time
from pathlib import Path
from roundhouse.plugins.nemo_gym.section import NemoGymEnvironment
from roundhouse.config.environments import SERVERS_VARIABLE
from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.loading import parse_config
from roundhouse.stages.refit import own_gym
from roundhouse.store.run import open_run
{RESOLVER}with own_gym(open_run(parse_config(json.loads(sys.argv[1])))):
    print("up", flush=True)
    time.sleep(600)
"""


def test_a_flow_that_is_killed_and_comes_back_finds_its_servers(
    machine: Machine, tmp_path: Path, engine: FakeEngine
) -> None:
    stand, run = machine.stand, run_on(machine, tmp_path, engine)
    tree = json.dumps(run.config.model_dump(mode="json"))
    flow = subprocess.Popen([sys.executable, "-c", FLOW, tree], stdout=subprocess.PIPE, text=True)
    try:
        assert flow.stdout is not None
        assert flow.stdout.readline() == "up\n"
    finally:
        flow.kill()
        flow.wait()
    assert sorted(map(name_of, stand.found("pods"))) == sorted(NAMES)
    with own_gym(run):
        assert [rollout.status for rollout in collected(run, 1)] == [Status.COMPLETED] * 2 * TASKS
        assert len(stand.kubelet.pods) == len(NAMES), "no second pod"
    assert [plural for plural in ("jobs", "pods", "services", "secrets") if stand.found(plural)] == []


def test_when_the_engine_has_moved_its_servers_are_ended_and_made_anew(
    machine: Machine, tmp_path: Path, engine: FakeEngine
) -> None:
    stand, run = machine.stand, run_on(machine, tmp_path, engine)
    before = plan_of(run.config, run)
    owner = stand.admin.create(f"/api/v1/namespaces/{stand.namespace}/configmaps", before.jobs[0].run_object())
    stand.kubelet.behave = lambda pod: stand.kubelet.run(pod)
    jobs = f"/apis/batch/v1/namespaces/{stand.namespace}/jobs"
    old = {stand.admin.create(jobs, job.job(1, owner))["metadata"]["uid"] for job in before.jobs}
    until(lambda: len(stand.kubelet.pods) == len(NAMES))
    tree = run.config.model_dump(mode="json")
    tree["generation"]["engine_url"] = tree["generation"]["engine_url"].replace("engine", "moved")
    stand.kubelet.behave = machine.run
    with own_gym(open_run(parse_config(tree))):
        assert not old & {job["metadata"]["uid"] for job in stand.found("jobs")}


def test_all_that_a_start_makes_belongs_to_the_flows_job(
    machine: Machine, tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = machine.stand
    with flow_pod(stand, monkeypatch) as flow, own_gym(run_on(machine, tmp_path, engine)):
        for plural, count in (("jobs", 4), ("services", 4), ("secrets", 1)):
            owned = [item["metadata"]["ownerReferences"] for item in stand.found(plural)]
            assert (
                owned
                == [[{"apiVersion": "batch/v1", "kind": "Job", "name": "flow", "uid": flow["metadata"]["uid"]}]] * count
            )


def test_servers_of_a_flow_that_is_under_way_are_left_to_it_and_those_of_one_that_has_failed_are_not(
    machine: Machine, tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand, run = machine.stand, run_on(machine, tmp_path, engine)
    jobs = f"/apis/batch/v1/namespaces/{stand.namespace}/jobs"
    stand.kubelet.behave = lambda pod: stand.kubelet.run(pod)
    with flow_pod(stand, monkeypatch) as training:
        before = plan_of(run.config, run, training).jobs[0]
        old = stand.admin.create(jobs, before.job(1, OWNER))["metadata"]["uid"]
    monkeypatch.undo()  # an evaluation, say, of the same run elsewhere
    monkeypatch.setenv("KUBECONFIG", str(stand.kubeconfig))
    with pytest.raises(InfraError, match="belong to Job flow, and its flow is running"), own_gym(run):
        raise AssertionError("nothing may run")
    assert [job["metadata"]["uid"] for job in stand.found("jobs")] == [old]
    condition = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    stand.admin.patch(f"{jobs}/flow", {"status": {"conditions": [condition]}})
    stand.kubelet.behave = machine.run
    machine.resolve(monkeypatch)
    with own_gym(run):
        assert old not in [job["metadata"]["uid"] for job in stand.found("jobs")]


def test_a_server_that_always_ends_is_started_again_as_often_as_allowed_and_named(
    machine: Machine, tmp_path: Path, engine: FakeEngine
) -> None:
    stand = machine.stand

    def behave(pod: Object) -> None:
        if name_of(pod) != "calc":
            return machine.run(pod)
        stand.kubelet.run(pod)
        return stand.kubelet.exit(pod, 3, message="no such table")

    stand.kubelet.behave = behave
    run = run_on(machine, tmp_path, engine, environment={"restarts": 2})
    with pytest.raises(InfraError, match=r"(?s)^calc, a server.*exit code 3.*no such table"), own_gym(run):
        raise AssertionError("nothing may run")
    assert [name_of(job) for job in stand.found("jobs")] == ["calc"] * 3
    assert [plural for plural in ("services", "secrets") if stand.found(plural)] == []


def test_a_server_that_a_drain_ends_well_is_started_again(machine: Machine, tmp_path: Path, engine: FakeEngine) -> None:
    stand, first = machine.stand, threading.Event()

    def behave(pod: Object) -> None:
        if name_of(pod) == "calc" and not first.is_set():
            first.set()
            return stand.kubelet.succeed(pod)
        return machine.run(pod)

    stand.kubelet.behave = behave
    with own_gym(run_on(machine, tmp_path, engine)):
        assert sum(server_label("calc") in name for name in stand.kubelet.pods) == 2


@pytest.mark.parametrize(
    ("reason", "key"), [("ErrImagePull", r"infra\.gym\.image"), ("CreateContainerConfigError", r"infra\.gym\.secret")]
)
def test_a_pod_that_cannot_start_is_not_tried_again_and_the_key_is_named(
    machine: Machine, tmp_path: Path, engine: FakeEngine, reason: str, key: str
) -> None:
    stand = machine.stand
    stand.kubelet.behave = lambda pod: stand.kubelet.stuck(pod, reason, "manifest unknown")
    with (
        pytest.raises(ConfigError, match=key),
        own_gym(run_on(machine, tmp_path, engine, gym={"image_seconds": 1})),
    ):
        raise AssertionError("nothing may run")
    assert stand.found("jobs") == []


def test_what_does_not_answer_in_time_is_named_with_what_its_pod_waits_for(
    machine: Machine, tmp_path: Path, engine: FakeEngine
) -> None:
    stand = machine.stand
    stand.kubelet.behave = lambda pod: stand.kubelet.unschedulable(pod, "0/3 nodes: 3 Insufficient cpu")
    run = run_on(machine, tmp_path, engine, environment={"start_timeout_seconds": 2})
    with (
        pytest.raises(InfraError, match=r"(?s)start_timeout_seconds.*calc at http://gym-.*Insufficient cpu"),
        own_gym(run),
    ):
        raise AssertionError("nothing may run")
    assert [plural for plural in ("jobs", "services", "secrets") if stand.found(plural)] == []


def test_the_calls_of_a_start_and_an_end_are_those_that_the_flow_is_granted(
    machine: Machine, tmp_path: Path, engine: FakeEngine
) -> None:
    stand = machine.stand
    with own_gym(run_on(machine, tmp_path, engine)):
        pass
    made = set()
    for method, path in stand.faults.seen:
        place, _, query = path.partition("?")
        _, _, rest = place.partition(f"/namespaces/{stand.namespace}/")
        plural, *name = rest.split("/")
        verb = {"POST": "create", "DELETE": "delete"}.get(method, "get" if name else "list")
        made.add(("watch" if "watch=" in query else verb, "/".join([plural, *name[1:]])))
    assert ("create", "secrets") in made
    rules = next(yaml.safe_load_all((ROOT / "k8s/base/rbac.yaml").read_text()))["rules"]
    granted = {
        (verb, group, kind) for r in rules for verb in r["verbs"] for group in r["apiGroups"] for kind in r["resources"]
    }
    assert granted == {*checks.NEEDED, *checks.ENGINE}
    assert made <= {(verb, kind) for verb, _, kind in granted}


TRAIN = f"""
import sys
from roundhouse.cli import main
{RESOLVER}main()
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_iterations_of_roundhouse_train_with_its_gym_in_pods(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = machine.stand
    with ExitStack() as stack:
        with monkeypatch.context() as only_here:
            only_here.setenv(ALLOWED_HOSTS, f"engine.{stand.namespace}.svc")
            place = stack.enter_context(opened(tmp_path))
        assert place.engine is not None
        engine = f"http://engine.{stand.namespace}.svc:{place.engine.port}"
        tree = place.settings("my_run") | {"iterations": 2, "asynchrony": {}}
        gym = settings(tmp_path, stand.namespace, engine)
        tree |= {name: gym[name] for name in ("environment", "infra", "evaluation")}
        tree["generation"]["engine_url"] = engine
        tree["rollout"] |= {"retry": gym["rollout"]["retry"]}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
        log = tmp_path / "run.log"
        with log.open("w") as output:
            command = [sys.executable, "-c", TRAIN, "train", str(tmp_path / "run.yaml")]
            variables = place.variables | {"KUBECONFIG": str(stand.kubeconfig), ALLOWED_HOSTS: ""}
            flow = subprocess.Popen(command, env=variables, stdout=output, stderr=output)
        try:
            run_store = tmp_path / "store/runs/my_run"
            until(
                lambda: flow.poll() is not None or (run_store / "iterations/000001/collect/manifest.json").exists(), 300
            )
            machine.kill("calc_agent")
            assert flow.wait(300) == 0, log.read_text()
        finally:
            flow.kill()
        run = place.run("my_run")
    assert run.checkpoint_versions() == [0, 1, 2]
    for iteration in (1, 2):
        rollouts = run.stage(iteration, "collect").reference()
        assert rollouts is not None
        assert rollouts.counts["completed"] == rollouts.counts["requested"]
    assert {plural: [*map(name_of, stand.found(plural))] for plural in ("jobs", "services", "secrets")} == {
        "jobs": ["calc_agent"],
        "services": [],
        "secrets": [],
    }
    assert len([name for name in stand.kubelet.pods if "-gym-" in name]) == len(NAMES) + 1


# -- the plan -------------------------------------------------------------------------------------------------------

OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "uid": "1111"}}


def plan_of(config: RunConfig, run: Any = None, flow: Object | None = None) -> GymPlan:
    assert isinstance(config.infra, KubernetesInfra)
    assert isinstance(config.environment, NemoGymEnvironment)
    url = config.generation.engine_url or "http://roundhouse-engine-serve-svc:8000"
    run = run or SimpleNamespace(config=config, run_id=config.run_id, uid="0123456789ab")
    return plan_pods(run, *resolved_for_pods(config.environment, config.infra, url), flow)


def manifests(plan: GymPlan) -> Iterator[Object]:
    yield gym_secret(plan.secret, plan.jobs[0], OWNER, plan.values)
    for job in plan.jobs:
        yield job.job(1, OWNER)
        yield job.service(OWNER)


def test_the_manifests_are_valid_restricted_and_hold_no_secret_but_in_the_secret(tmp_path: Path) -> None:
    secret, *others = manifests(plan_of(parse_config(settings(tmp_path))))
    for item in (secret, *others):
        assert problems(item) == []
        for _, spec in pod_specs(item):
            assert unrestricted(spec) == []
            assert spec["automountServiceAccountToken"] is False
            assert all(volume["name"] == "scratch" for volume in spec["volumes"]), "no store"
    texts = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
    assert [key for key, text in texts.items() if SECRET not in text] == [server_label(HEAD)]
    assert SECRET not in json.dumps(others)
    assert base64.b64encode(SECRET.encode()).decode() not in json.dumps(others)


def test_a_server_listens_everywhere_and_finds_the_others_at_their_services(tmp_path: Path) -> None:
    plan = plan_of(parse_config(settings(tmp_path, "team")))
    jobs = {plan.names[job.identity.shard]: job for job in plan.jobs}
    assert set(jobs) == NAMES
    assert plan.jobs[0] == jobs[HEAD]
    assert HEAD in RESERVED, "no server has this name"
    for name, job in jobs.items():
        config = yaml.safe_load(plan.values[job.identity.shard])
        for other in NAMES - {HEAD}:
            [fields] = next(iter(config[other].values())).values()
            assert fields["host"] == ("0.0.0.0" if other == name else jobs[other].host)
            assert fields["port"] == jobs[other].port
            assert jobs[other].host.endswith(".team.svc")
        assert config["policy_base_url"] == "http://engine:9000/v1"


def test_equal_starts_have_equal_names_and_other_ones_others(tmp_path: Path) -> None:
    tree = settings(tmp_path)
    names = [job.identity.job_name(1) for job in plan_of(parse_config(tree)).jobs]
    assert names == [job.identity.job_name(1) for job in plan_of(parse_config(tree)).jobs]
    changes: list[Object] = [
        {"generation": tree["generation"] | {"engine_url": "http://moved:9000"}},
        {"infra": tree["infra"] | {"gym": PODS | {"image": "mine:7"}}},
        {"environment": tree["environment"] | {"overrides": [*tree["environment"]["overrides"], "++a=1"]}},
    ]
    for change in changes:
        assert not set(names) & {job.identity.job_name(1) for job in plan_of(parse_config(tree | change)).jobs}
    flow = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "flow", "uid": "2222"}}
    assert not set(names) & {job.identity.job_name(1) for job in plan_of(parse_config(tree), flow=flow).jobs}


def test_ports_that_nobody_names_are_chosen_the_same_at_every_start(tmp_path: Path) -> None:
    tree = settings(tmp_path)
    (tmp_path / "gym.yaml").write_text(CALCULATOR)
    tree["environment"]["overrides"] = ["++port_range_low=11000", "++policy_api_key=none"]
    assert [job.port for job in plan_of(parse_config(tree)).jobs] == [11000, 11001, 11002, 11003]


def test_a_foreign_server_starts_in_its_directory_and_is_given_nothing_of_the_flows_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:sesame")
    tree = settings(tmp_path, environment={"python": sys.executable, "search_dirs": [str(tmp_path)]})
    (tmp_path / "gym.yaml").write_text((tmp_path / "gym.yaml").read_text() + FOREIGN)
    place = tmp_path / "resources_servers" / "weather"
    place.mkdir(parents=True)
    for name in ("app.py", "requirements.txt"):
        (place / name).touch()
    plan = plan_of(parse_config(tree))
    [job] = [job for job in plan.jobs if plan.names[job.identity.shard] == "weather"]
    [container] = job.job(1, OWNER)["spec"]["template"]["spec"]["containers"]
    assert [*container["command"], *container["args"]] == [sys.executable, "app.py"]
    assert container["workingDir"] == str(place)
    given = {item["name"]: item.get("value") for item in container["env"]}
    assert given["NEMO_GYM_CONFIG_PATH"] == "weather"
    assert given["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert not [item for item in manifests(plan) if "sesame" in json.dumps(item) and item["kind"] != "Secret"]


def test_a_dry_run_says_where_the_servers_are(tmp_path: Path) -> None:
    [place] = [str(each) for each in placement(parse_config(settings(tmp_path, "team"))) if each.role == "gym"]
    assert place == "gym:       a pod for each server in namespace team"


@pytest.mark.parametrize(("ray", "label"), [(False, None), (True, "worker")])
def test_a_server_prefers_the_node_of_an_engine_else_its_zone(tmp_path: Path, ray: bool, label: str | None) -> None:
    tree = settings(tmp_path)
    if ray:
        tree["generation"].pop("engine_url")
        tree["infra"]["engine"] = {"ray_service": "roundhouse-engine"}
    for job in plan_of(parse_config(tree)).jobs:
        spec = job.job(1, OWNER)["spec"]["template"]["spec"]
        assert list(spec["affinity"]) == ["podAffinity"]
        [(rule, terms)] = spec["affinity"]["podAffinity"].items()
        assert rule.startswith("preferred"), "a full node keeps no server waiting"
        assert [term["podAffinityTerm"]["topologyKey"] for term in terms] == [
            "kubernetes.io/hostname",
            "topology.kubernetes.io/zone",
        ]
        for term in terms:
            labels = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
            assert labels["app.kubernetes.io/component"] == "engine"
            assert labels.get("ray.io/node-type") == label


def test_model_servers_alone_reach_the_engine_and_flow_and_collectors_reach_all(tmp_path: Path) -> None:
    plan = plan_of(parse_config(settings(tmp_path)))
    pods = {
        plan.names[job.identity.shard]: job.job(1, OWNER)["spec"]["template"]["metadata"]["labels"] for job in plan.jobs
    }
    engine, flow, collector = ({"app.kubernetes.io/component": each} for each in ("engine", "flow", "collector"))
    for port in (9000, 8000):
        assert [name for name, labels in pods.items() if may(labels, engine, port)] == ["policy_model"]
    assert not may(pods["policy_model"], engine, 8265), "Ray's dashboard takes what is to be served"
    for name, labels in pods.items():
        assert may(flow, labels, "http"), name
        assert may(collector, labels, "http"), name
        assert all(may(other, labels, "http") for other in pods.values()), name


# -- what cannot work -----------------------------------------------------------------------------------------------

FOREIGN = """
weather:
  resources_servers:
    weather: {entrypoint: app.py, domain: agent}
"""
JUDGE = """
judge:
  responses_api_models:
    any: {url: "http://127.0.0.1:8080"}
"""


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        ("", {"overrides": ["calc.resources_servers.roundhouse_environment.port=80"]}, r"calc.*port is 80.*remove it"),
        (
            "",
            {"overrides": ["calc.resources_servers.roundhouse_environment.port=9464"]},
            "which ROUNDHOUSE_METRICS_PORT uses",
        ),
        (
            "",
            {"overrides": ["+calc.resources_servers.roundhouse_environment.host=10.1.2.3"]},
            r"host is 10\.1\.2\.3.*at its Service\. Remove it",
        ),
        (JUDGE, {}, r"judge.*url is http://127\.0\.0\.1:8080.*Service's"),
        (
            "",
            {"overrides": ["policy_base_url=http://localhost:1/v1"]},
            r"policy_model\.base_url names http://localhost:1",
        ),
        (FOREIGN, {}, r"weather: no directory resources_servers/weather"),
        (FOREIGN, {"python": "/no/python"}, r"weather"),
        (
            FOREIGN,
            {"overrides": ["+ray_head_node_address=10.0.0.1:6379"]},
            r"ray_head_node_address is 10\.0.*Remove it",
        ),
        (f"blob: {'x ' * 70_000}", {}, r"it is 14\d+ bytes for each of 4 pods.*Name fewer"),
    ],
    ids=["low port", "metrics port", "host", "external", "engine", "no directory", "no interpreter", "ray", "large"],
)
def test_what_cannot_work_in_pods_is_refused_before_anything_is_started(
    tmp_path: Path, text: str, change: Object, message: str
) -> None:
    environment = change | {"overrides": change.get("overrides", [])}
    tree = settings(
        tmp_path, environment=environment, infra={"environment": {"ROUNDHOUSE_METRICS_PORT": "0.0.0.0:9464"}}
    )
    (tmp_path / "gym.yaml").write_text((tmp_path / "gym.yaml").read_text() + text)
    with pytest.raises(ConfigError, match=f"(?s)environment.config_paths.*{message}"):
        refuse_unready(parse_config(tree), remote=False)


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({}, r"environment\.kind is nemo_gym.*engine_url and infra\.engine are unset.*Set one"),
        ({"engine_url": "http://localhost:1"}, r"generation\.engine_url is http://localhost:1.*Service's"),
    ],
)
def test_an_engine_that_pods_do_not_reach_is_refused_at_load(tmp_path: Path, generation: Object, message: str) -> None:
    tree = settings(tmp_path)
    tree["generation"] = {"max_model_len": 100_000} | generation
    with pytest.raises(ConfigError, match=message):
        parse_config(tree)


def test_a_flow_without_the_right_is_told_which(machine: Machine, tmp_path: Path, engine: FakeEngine) -> None:
    machine.stand.faults.plant(403, "POST", "/secrets")
    with (
        pytest.raises(ConfigError, match=r"Not allowed to create secrets.*rbac\.yaml"),
        own_gym(run_on(machine, tmp_path, engine)),
    ):
        raise AssertionError("nothing may run")
