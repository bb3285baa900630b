"""A Job as a stage, from its creation to its end, with the faults of a cluster between."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from roundhouse.errors import ConfigError, DataError, InfraError, RoundhouseError, StoreError
from roundhouse.plugins.kubernetes import job_status
from roundhouse.plugins.kubernetes.cluster import ApiRefused
from roundhouse.plugins.kubernetes.stage_jobs import TrainJob
from tests.k8s.api_server import ApiState
from tests.plugins.kubernetes.fault_proxy import EXPIRED, Fault
from tests.plugins.kubernetes.stand import Stand
from tests.waiting import until

Object = dict[str, Any]


def running(stand: Stand, count: int = 1) -> bool:
    return sum(pod.get("status", {}).get("phase") == "Running" for pod in stand.found("pods")) >= count


def test_a_job_is_created_once_found_by_its_name_and_owned_by_its_run(stand: Stand) -> None:
    plan = stand.plan()
    assert stand.run(plan) == 1
    assert stand.run(plan) == 1, "complete already: found"
    [job] = stand.found("jobs")
    assert job["metadata"]["name"] == "my-run-1-012345-i3-train-89abcdef-1"
    [owner] = stand.found("configmaps")
    assert [ref["uid"] for ref in job["metadata"]["ownerReferences"]] == [owner["metadata"]["uid"]]
    labels = job["metadata"]["labels"]
    assert (labels["roundhouse/run"], labels["roundhouse/iteration"], labels["roundhouse/stage"]) == (
        "My_run.1",
        "3",
        "train",
    )
    assert len(stand.kubelet.pods) == 1


def test_several_pods_are_ranks_that_find_index_0_by_its_host_name(stand: Stand) -> None:
    plan = stand.plan(trainer={"pods": 3}, service={"processes": 2})
    assert stand.run(plan) == 1
    assert len(stand.kubelet.pods) == 3
    [service] = stand.found("services")
    assert service["spec"]["clusterIP"] == "None"
    pods = stand.found("pods")
    assert {pod["spec"]["subdomain"] for pod in pods} == {service["metadata"]["name"]}
    arguments = pods[0]["spec"]["containers"][0]["args"]
    host = f"{stand.found('jobs')[0]['metadata']['name']}-0.{service['metadata']['name']}.{stand.namespace}.svc"
    assert arguments[arguments.index("--master-addr") + 1] == host
    assert "$(JOB_COMPLETION_INDEX)" in arguments


def test_a_flow_that_died_finds_its_own_job_and_waits_on(stand: Stand) -> None:
    go = threading.Event()

    def behave(pod: Object) -> None:
        stand.kubelet.run(pod)
        go.wait(20)
        stand.kubelet.exit(pod, 0)

    stand.kubelet.behave = behave
    first = stand.begin(stand.plan())
    until(lambda: running(stand))
    second = stand.begin(stand.plan())
    until(lambda: sum("1 of 1 pods run" in line for line in stand.said) == 2)
    go.set()
    assert (first.result(), second.result()) == (1, 1)
    assert len(stand.kubelet.pods) == 1, "one Job, one pod"


def test_a_name_of_another_run_is_refused(stand: Stand) -> None:
    plan = stand.plan()
    job = plan.job(1, stand.admin.create(f"/api/v1/namespaces/{stand.namespace}/configmaps", plan.run_object()))
    job["metadata"]["labels"]["roundhouse/run-uid"] = "another"
    stand.admin.create(f"/apis/batch/v1/namespaces/{stand.namespace}/jobs", job)
    with pytest.raises(ConfigError, match=r"is not this run's.*another infra\.namespace"):
        stand.run(plan)


def exits(stand: Stand, code: int, reason: str = "", message: str = "") -> Any:
    def behave(pod: Object) -> None:
        stand.kubelet.run(pod)
        stand.kubelet.exit(pod, code, reason, message)

    return behave


@pytest.mark.parametrize(
    ("code", "reason", "kind", "message"),
    [
        (65, "", DataError, "exit code 65.*no whole group"),
        (78, "", ConfigError, "exit code 78"),
        (74, "", StoreError, "exit code 74"),
        (75, "", InfraError, "exit code 75"),
        (1, "", InfraError, "exit code 1"),
        (139, "", InfraError, "killed by signal 11"),
        (137, "OOMKilled", ConfigError, r"out of memory \(OOMKilled; its limit is 64Mi\). Raise infra.trainer.memory"),
    ],
)
def test_exit_codes_and_an_out_of_memory_kill_are_told_apart(
    stand: Stand, code: int, reason: str, kind: type[RoundhouseError], message: str
) -> None:
    stand.kubelet.behave = exits(stand, code, reason, "no whole group\n")
    with pytest.raises(kind, match=rf"(?s){message}") as raised:
        stand.run(stand.plan())
    assert type(raised.value) is kind
    if code == 65:
        stand.kubelet.behave = lambda pod: stand.kubelet.succeed(pod)
        assert stand.run(stand.plan()) == 2, "a failed Job keeps its name; the next try is the next number"
        assert len(stand.found("jobs")) == 2


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("PreemptionByScheduler", "was preempted by a pod of higher priority"),
        ("EvictionByEvictionAPI", "its node is being drained"),
        ("DeletionByPodGC", "was lost with its node"),
        ("TerminationByKubelet", "was ended by its node"),
    ],
)
def test_a_disruption_of_one_of_several_ranks_is_an_infrastructure_failure_that_says_which(
    stand: Stand, reason: str, message: str
) -> None:
    def behave(pod: Object) -> None:
        stand.kubelet.run(pod)
        if pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] == "1":
            until(lambda: running(stand, 2))
            stand.kubelet.disrupt(pod, reason, "for a good reason")

    stand.kubelet.behave = behave
    with pytest.raises(InfraError, match=f"{message}.*for a good reason"):
        stand.run(stand.plan(trainer={"pods": 2}))


def test_a_single_pod_that_is_preempted_is_replaced_without_a_new_job(stand: Stand) -> None:
    def behave(pod: Object) -> None:
        if len(stand.kubelet.pods) == 1:
            stand.kubelet.run(pod)
            stand.kubelet.disrupt(pod, "PreemptionByScheduler")
        else:
            stand.kubelet.succeed(pod)

    stand.kubelet.behave = behave
    assert stand.run(stand.plan()) == 1
    assert len(stand.kubelet.pods) == 2


def test_a_pod_evicted_by_its_node_is_an_infrastructure_failure(stand: Stand) -> None:
    def behave(pod: Object) -> None:
        stand.kubelet.run(pod)
        stand.kubelet.evict(pod, "The node was low on resource: ephemeral-storage")

    stand.kubelet.behave = behave
    with pytest.raises(InfraError, match=r"Evicted.*low on resource: ephemeral-storage"):
        stand.run(stand.plan())


def test_a_pod_without_a_node_is_given_up_after_its_time_with_the_schedulers_words(stand: Stand) -> None:
    stand.kubelet.behave = lambda pod: stand.kubelet.unschedulable(pod, "0/3 nodes: 3 Insufficient nvidia.com/gpu")
    with pytest.raises(InfraError, match=r"no node.*Insufficient nvidia.com/gpu.*infra.trainer.pending_seconds"):
        stand.run(stand.plan(trainer={"pending_seconds": 1}))
    until(lambda: stand.found("jobs") == [] and stand.found("pods") == [])


@pytest.mark.parametrize(
    ("reason", "message", "kind"),
    [
        ("ImagePullBackOff", "manifest unknown", ConfigError),
        ("ErrImagePull", "connection reset by peer", InfraError),
        ("CreateContainerConfigError", 'secret "s3" not found', ConfigError),
    ],
)
def test_an_image_or_secret_that_is_not_there_is_given_up_after_its_time(
    stand: Stand, reason: str, message: str, kind: type[RoundhouseError]
) -> None:
    stand.kubelet.behave = lambda pod: stand.kubelet.stuck(pod, reason, message)
    with pytest.raises(kind, match=message) as raised:
        stand.run(stand.plan(trainer={"image_seconds": 1}))
    assert type(raised.value) is kind


def test_a_job_beyond_its_deadline_says_what_to_raise(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainJob, "seconds", lambda plan: 2)
    stand.kubelet.behave = lambda pod: stand.kubelet.run(pod)
    with pytest.raises(InfraError, match=r"ended after 2 s.*train.service.timeout_seconds"):
        stand.run(stand.plan())


def test_a_job_that_somebody_deletes_is_an_infrastructure_failure(stand: Stand) -> None:
    stand.kubelet.behave = lambda pod: stand.kubelet.run(pod)
    begun = stand.begin(stand.plan())
    until(lambda: running(stand))
    [job] = stand.found("jobs")
    path = f"/apis/batch/v1/namespaces/{stand.namespace}/jobs/{job['metadata']['name']}"
    assert stand.admin.delete(path)
    with pytest.raises(InfraError, match="deleted by another client"):
        begun.result()


@pytest.mark.parametrize("code", [0, 65])
def test_a_job_that_ended_and_was_cleaned_up_before_anybody_looked_is_told_as_it_ended(stand: Stand, code: int) -> None:
    stand.kubelet.behave = lambda pod: stand.kubelet.run(pod)

    def conditions() -> Any:
        return stand.found("jobs")[0].get("status", {}).get("conditions")

    def say(line: str) -> None:
        """Keeps the caller away until the Job is gone."""
        if "1 of 1 pods run" not in line:
            return
        [pod], [job] = stand.found("pods"), stand.found("jobs")
        stand.kubelet.exit(pod, code)
        until(lambda: any(each["type"] in ("Complete", "Failed") for each in conditions() or []))
        stand.admin.delete(f"/apis/batch/v1/namespaces/{stand.namespace}/jobs/{job['metadata']['name']}")
        until(lambda: jobs._jobs.is_gone(job["metadata"]["uid"]))

    with stand.jobs() as jobs:
        if code == 0:
            assert jobs.run(stand.plan(), say) == 1
        else:
            with pytest.raises(DataError, match="exit code 65"):
                jobs.run(stand.plan(), say)


class Cancelled(BaseException):
    """The exception of a flow's cancellation."""


def test_cancellation_deletes_the_job_and_returns_when_its_pods_are_gone(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand.kubelet.behave = lambda pod: stand.kubelet.run(pod)
    real = job_status.JobDeadlines.left

    def cancelled(self: Any, *arguments: Any) -> float:
        if running(stand):
            raise Cancelled
        return min(real(self, *arguments), 0.1)

    monkeypatch.setattr(job_status.JobDeadlines, "left", cancelled)
    with pytest.raises(Cancelled):
        stand.run(stand.plan())
    assert stand.found("jobs") == []
    assert stand.found("pods") == []


def test_refused_calls_are_repeated_and_a_lost_reply_does_not_make_a_second_job(stand: Stand) -> None:
    stand.faults.plant(429, "POST", "/configmaps", Retry_After="1")
    stand.faults.plant(500, "POST", "/jobs")
    stand.faults.plant(0, "POST", "/jobs")
    stand.faults.plant(503, "GET", "/pods", times=3)
    stand.faults.plant(500, "GET", "/jobs", times=2)
    began = time.monotonic()
    assert stand.run(stand.plan()) == 1
    assert time.monotonic() - began >= 1, "Retry-After was kept"
    assert len(stand.found("jobs")) == 1
    assert len(stand.kubelet.pods) == 1


def test_watches_that_break_go_on_where_they_stood(stand: Stand) -> None:
    go = threading.Event()

    def behave(pod: Object) -> None:
        stand.kubelet.run(pod)
        go.wait(20)
        stand.kubelet.exit(pod, 0)

    stand.kubelet.behave = behave
    begun = stand.begin(stand.plan())
    until(lambda: any("1 of 1 pods run" in line for line in stand.said))
    lists = sum(
        method == "GET" and "/jobs?labelSelector" in path and "watch" not in path for method, path in stand.faults.seen
    )
    for _ in range(3):
        until(lambda: stand.faults.cut_streams() >= 2)
        time.sleep(0.2)
    go.set()
    assert begun.result() == 1
    again = sum(
        method == "GET" and "/jobs?labelSelector" in path and "watch" not in path for method, path in stand.faults.seen
    )
    assert again == lists, "no second list: the watch began again from its version"


def test_a_version_that_is_gone_is_listed_anew(stand: Stand) -> None:
    """410: the API server has forgotten where the watch stood, and with it the events in between."""
    go = threading.Event()

    def behave(pod: Object) -> None:
        stand.kubelet.run(pod)
        go.wait(20)
        stand.kubelet.exit(pod, 0)

    stand.kubelet.behave = behave
    begun = stand.begin(stand.plan())
    until(lambda: any("1 of 1 pods run" in line for line in stand.said))
    stand.faults.plant(503, "GET", "watch=1", times=4)
    stand.faults.cut_streams()
    go.set()
    until(lambda: stand.found("jobs")[0].get("status", {}).get("conditions"))
    if stand.state is not None:
        stand.state.compact()
    else:
        stand.faults.plant(410, "GET", "watch=1", times=2)
    assert begun.result() == 1


@pytest.mark.parametrize("fault", [EXPIRED, 410, 429])
def test_a_server_that_refuses_or_ends_every_watch_is_asked_ever_more_rarely(stand: Stand, fault: int) -> None:
    stand.faults.plant(fault, "GET", "watch=1", times=1000)

    def behave(pod: Object) -> None:
        stand.kubelet.run(pod)
        until(lambda: len(watches(stand)) >= 8, 60)
        stand.kubelet.exit(pod, 0)

    stand.kubelet.behave = behave
    began = time.monotonic()
    begun = stand.begin(stand.plan())
    until(lambda: len(watches(stand)) >= 8, 60)
    stand.faults.planted.clear()
    assert begun.result(60) == 1
    seconds = time.monotonic() - began
    assert len(watches(stand)) <= 2 * (6 + seconds), "0.1 s, 0.2, 0.4, … 5 between two of the same kind"


def watches(stand: Stand) -> list[str]:
    return [path for _, path in stand.faults.seen if "watch=1" in path]


def test_a_create_that_met_another_write_of_its_quota_is_made_again(stand: Stand) -> None:
    """Also a 409, but the name is free: it was reported as an object that exists and has vanished."""
    for path in ("/configmaps", "/jobs"):
        stand.faults.planted.append(Fault(409, "POST", path, reason="Conflict"))
    assert stand.run(stand.plan()) == 1
    assert len(stand.kubelet.pods) == 1
    assert stand.cluster.calls["create jobs"] == 2


def test_an_api_server_that_is_away_too_long_fails_the_stage_and_leaves_the_job_for_the_next_attempt(
    stand: Stand,
) -> None:
    go = threading.Event()

    def behave(pod: Object) -> None:
        stand.kubelet.run(pod)
        go.wait(20)
        stand.kubelet.exit(pod, 0)

    stand.kubelet.behave = behave
    stand.cluster._patience = 1.0
    begun = stand.begin(stand.plan())
    until(lambda: any("1 of 1 pods run" in line for line in stand.said))
    stand.faults.away = True
    stand.faults.cut_streams()
    with pytest.raises(InfraError, match=r"could not be watched for 1 s .*Job .* continues; a new attempt finds it"):
        begun.result()
    stand.faults.away = False
    go.set()
    assert stand.run(stand.plan()) == 1
    assert len(stand.kubelet.pods) == 1


def test_the_real_api_server_may_restart_in_the_middle(stand: Stand) -> None:
    if stand.plane is None:
        pytest.skip("the fake keeps its state in memory")
    go = threading.Event()

    def behave(pod: Object) -> None:
        stand.kubelet.run(pod)
        go.wait(60)
        stand.kubelet.exit(pod, 0)

    stand.kubelet.behave = behave
    stand.cluster._patience = stand.kubelet.cluster._patience = 90
    begun = stand.begin(stand.plan())
    until(lambda: any("1 of 1 pods run" in line for line in stand.said))
    stand.plane.stop("kube-apiserver")
    time.sleep(1)
    stand.plane.start("kube-apiserver")
    stand.plane.wait_until_ready()
    go.set()
    assert begun.result(90) == 1
    assert len(stand.kubelet.pods) == 1


def test_a_missing_namespace_and_a_refused_right_say_what_to_do(stand: Stand) -> None:
    stand.faults.plant(403, "POST", "/configmaps")
    with pytest.raises(ConfigError, match=r"Not allowed to create configmaps.*rbac.yaml"):
        stand.run(stand.plan())
    stand.faults.plant(403, "GET", "/pods")
    with pytest.raises(ConfigError, match="Not allowed to list and watch"):
        stand.run(stand.plan())


def test_calls_of_a_stage_are_bounded(stand: Stand) -> None:
    """However long the step takes: no polling."""

    def behave(pod: Object) -> None:
        stand.kubelet.run(pod)
        time.sleep(2)
        stand.kubelet.exit(pod, 0)

    stand.kubelet.behave = behave
    stand.run(stand.plan())
    calls = {name: count for name, count in stand.cluster.calls.items() if "log" not in name}
    assert calls == {
        "create configmaps": 1,
        "create jobs": 1,
        "get jobs": 1,
        "get pods": 1,
        "watch jobs": 1,
        "watch pods": 1,
    }


@pytest.mark.parametrize("hours", [0, 2, -7])
def test_the_log_of_the_first_pod_comes_line_by_line_once_also_when_its_connection_breaks(
    fake: Stand, hours: int
) -> None:
    """Whatever the node's time zone, in which it stamps the lines."""
    fake.kubelet.utc_offset = timedelta(hours=hours)
    go = threading.Event()

    def behave(pod: Object) -> None:
        fake.kubelet.run(pod)
        fake.kubelet.say(pod, "one\ntwo")
        go.wait(20)
        fake.kubelet.say(pod, "three\nfour")
        fake.kubelet.exit(pod, 0)

    fake.kubelet.behave = behave
    begun = fake.begin(fake.plan())
    until(lambda: "two" in fake.said)
    fake.faults.cut_streams()
    go.set()
    assert begun.result() == 1
    assert [line for line in fake.said if line in ("one", "two", "three", "four")] == ["one", "two", "three", "four"]


@pytest.mark.parametrize("drained", [True, False])
def test_the_log_of_a_pod_that_replaces_the_first_follows_that_ones(fake: Stand, drained: bool) -> None:
    def behave(pod: Object) -> None:
        first = len(fake.kubelet.pods) == 1
        fake.kubelet.run(pod)
        fake.kubelet.say(pod, "one\ntwo" if first else "three\nfour")
        if first:
            until(lambda: "two" in fake.said)
        if first and drained:
            fake.kubelet.disrupt(pod, "EvictionByEvictionAPI")
        else:
            fake.kubelet.exit(pod, 75 if first else 0)

    fake.kubelet.behave = behave
    assert fake.run(fake.plan(trainer={"restarts": 1})) == 1
    assert [line for line in fake.said if line in ("one", "two", "three", "four")] == ["one", "two", "three", "four"]


def test_the_log_of_a_pod_that_has_ended_is_read_from_a_server_that_is_busy(fake: Stand) -> None:
    def behave(pod: Object) -> None:
        fake.kubelet.bind(pod)
        fake.kubelet.say(pod, "one\ntwo")
        fake.kubelet.exit(pod, 0)

    fake.kubelet.behave = behave
    fake.faults.plant(429, "GET", "/log", times=2)
    assert fake.run(fake.plan()) == 1
    assert [line for line in fake.said if line in ("one", "two")] == ["one", "two"]


def test_a_pod_that_failed_without_a_message_is_told_with_the_end_of_its_log(fake: Stand) -> None:
    def behave(pod: Object) -> None:
        fake.kubelet.run(pod)
        fake.kubelet.say(pod, "\n".join(f"line {i}" for i in range(40)))
        fake.kubelet.exit(pod, 1)

    fake.kubelet.behave = behave
    with pytest.raises(InfraError, match=r"(?s)exit code 1\. Last message: line 28\n.*line 39$"):
        fake.run(fake.plan())


def test_the_reason_of_a_job_without_pods_is_asked_for(fake: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the Job is abandoned, even if the first check comes after its time limit."""
    monkeypatch.setattr(job_status, "NO_POD_SECONDS", 1.0)
    plan = fake.plan(trainer={"pending_seconds": 1})
    monkeypatch.setattr("tests.plugins.kubernetes.players.JobController._create", lambda *_: None)
    create = ApiState.create

    def refused(state: ApiState, plural: str, namespace: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """With the event that the Job controller writes when a quota refuses its pods."""
        code, made = create(state, plural, namespace, body)
        if plural == "jobs":
            involved = {"uid": made["metadata"]["uid"]}
            event = {"metadata": {"name": "e"}, "involvedObject": involved, "type": "Warning", "message": "quota: gpus"}
            create(state, "events", namespace, event)
        return code, made

    monkeypatch.setattr(ApiState, "create", refused)
    with pytest.raises(InfraError, match=r"Event of the cluster: .*quota: gpus"):
        fake.run(plan)


def test_a_job_waits_in_its_queue_until_it_is_admitted(stand: Stand) -> None:
    begun = stand.begin(stand.plan(queue="team-a", trainer={"pending_seconds": 5}))
    until(lambda: any("waiting in the queue" in line for line in stand.said))
    [job] = stand.found("jobs")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    path = f"/apis/batch/v1/namespaces/{stand.namespace}/jobs/{job['metadata']['name']}"
    stand.admin.patch(path, {"spec": {"suspend": False}})
    assert begun.result() == 1


def test_an_object_that_the_server_does_not_accept_is_a_configuration_error(stand: Stand) -> None:
    if stand.state is not None:
        stand.faults.plant(422, "POST", "/jobs")
    with pytest.raises(ConfigError, match="refuses to create jobs"):
        stand.run(stand.plan(trainer={"node_selector": {"not a label!": "x"}}))


def test_a_refusal_names_status_and_reason(stand: Stand) -> None:
    with pytest.raises(ApiRefused, match="404 NotFound"):
        stand.cluster.get(f"/api/v1/namespaces/{stand.namespace}/pods/nobody")
