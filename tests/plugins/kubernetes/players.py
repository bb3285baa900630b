"""Actors of a cluster without nodes: a kubelet controlled by the test, and a Job controller for the fake API server.

Both are ordinary clients of the API server, so the kubelet also works with a real one and its Job controller.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from roundhouse.errors import InfraError
from roundhouse.plugins.kubernetes.cluster import ApiRefused, Cluster
from roundhouse.plugins.kubernetes.watching import Watched
from tests.k8s.api_server import ApiState

Object = dict[str, Any]


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Kubelet:
    """Runs each new pod through `behave` in a separate thread; ends deleted pods at once."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        logs: ApiState | None = None,
        selector: str = "app.kubernetes.io/part-of=roundhouse",
    ) -> None:
        self.cluster, self.namespace, self._logs = cluster, namespace, logs
        self.behave: Callable[[Object], None] = lambda pod: self.succeed(pod)
        self.pods: list[str] = []
        """Names of all pods that came, in order."""
        self.utc_offset = timedelta()
        """Of the time zone that the stamps of logs are written in."""
        self.processes: dict[str, subprocess.Popen[str]] = {}
        """Of pods whose container is a process of this machine, by the pod's uid."""
        self._stopped = False
        self._known: set[str] = set()
        self.ending: set[str] = set()
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._watched = Watched(cluster, self._path, selector, self._changed)

    def stop(self) -> None:
        self._stopped = True
        self._watched.stop()
        for process in self.processes.values():
            process.kill()

    def _changed(self, pod: Object | None) -> None:
        for item in [pod] if pod is not None else list(getattr(self, "_watched", _NONE)._present.values()):
            uid = item["metadata"]["uid"]
            if item["metadata"].get("deletionTimestamp") and uid not in self.ending:
                self.ending.add(uid)
                threading.Thread(target=self._end, args=(item,), daemon=True).start()
            elif uid not in self._known and not item["metadata"].get("deletionTimestamp"):
                self._known.add(uid)
                self.pods.append(item["metadata"]["name"])
                threading.Thread(target=self._act, args=(item,), daemon=True).start()

    def _act(self, pod: Object) -> None:
        try:
            self.behave(pod)
        except ApiRefused as refused:
            if refused.status not in (404, 409):
                raise
        except InfraError:
            if not self._stopped:  # else its API server may have ended, too
                raise

    def _end(self, pod: Object) -> None:
        if (process := self.processes.get(pod["metadata"]["uid"])) is not None:
            process.terminate()
        self._end_log(pod)
        body = {"gracePeriodSeconds": 0}
        try:
            self.cluster._json("DELETE", f"{self._path}/{pod['metadata']['name']}", {}, body)
        except ApiRefused as refused:
            if refused.status != 404:
                raise

    def status(self, pod: Object, **fields: Any) -> None:
        """Write the pod's status as a kubelet would; the log of a pod that has ended gets no more lines."""
        if fields.get("phase") in ("Failed", "Succeeded"):
            self._end_log(pod)
        name = pod["metadata"]["name"]
        self.cluster.patch(f"{self._path}/{name}/status", {"status": fields})

    def bind(self, pod: Object) -> None:
        """Bind the pod to a node as a scheduler does."""
        name = pod["metadata"]["name"]
        if self._logs is None:
            target = {"apiVersion": "v1", "kind": "Node", "name": "node-1"}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
            self.cluster.create(f"{self._path}/{name}/binding", binding)
        else:
            self.cluster.patch(f"{self._path}/{name}", {"spec": {"nodeName": "node-1"}})

    def unschedulable(self, pod: Object, message: str) -> None:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        self.status(pod, phase="Pending", conditions=[condition])

    def stuck(self, pod: Object, reason: str, message: str) -> None:
        """A container that cannot start."""
        self.bind(pod)
        state = {"waiting": {"reason": reason, "message": message}}
        self.status(pod, phase="Pending", containerStatuses=[self._container(pod, state)])

    def run(self, pod: Object) -> None:
        self.bind(pod)
        if self._logs is not None:  # of a container that runs, empty as yet
            self._logs.logs.setdefault(pod["metadata"]["name"], "")
        self.status(pod, phase="Running", startTime=now(), containerStatuses=[self._running(pod)])

    def say(self, pod: Object, text: str) -> None:
        """Write lines to the pod's log (fake API server only)."""
        if self._logs is None:
            return
        name = pod["metadata"]["name"]
        for line in text.splitlines():
            seconds, fraction = divmod(time.time_ns(), 10**9)  # read once: stamps never go back
            at = datetime.fromtimestamp(seconds, timezone(self.utc_offset))
            stamp = f"{at:%Y-%m-%dT%H:%M:%S}.{fraction:09d}{at.isoformat()[19:]}"
            self._logs.logs[name] = self._logs.logs.get(name, "") + f"{stamp} {line}\n"
            time.sleep(0.001)

    def succeed(self, pod: Object) -> None:
        self.run(pod)
        self.exit(pod, 0)

    def exit(self, pod: Object, code: int, reason: str = "", message: str = "") -> None:
        ended = {"exitCode": code, "reason": reason or ("Error" if code else "Completed"), "message": message}
        ended |= {"startedAt": now(), "finishedAt": now()}
        status = self._container(pod, {"terminated": ended, "running": None})
        self.status(pod, phase="Failed" if code else "Succeeded", containerStatuses=[status])

    def disrupt(self, pod: Object, reason: str, message: str = "") -> None:
        """The pod is ended from outside: preempted, drained, lost with its node."""
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
        self.status(pod, phase="Failed", conditions=[condition], containerStatuses=[self._killed(pod)])

    def evict(self, pod: Object, message: str) -> None:
        """End the pod as an eviction by its node, with the reason in its status."""
        self.status(pod, phase="Failed", reason="Evicted", message=message)

    def _end_log(self, pod: Object) -> None:
        if self._logs is not None:
            self._logs.logs.setdefault(pod["metadata"]["name"], "")
            self._logs.ended_logs.add(pod["metadata"]["name"])

    def _running(self, pod: Object) -> Object:
        return self._container(pod, {"running": {"startedAt": now()}})

    def _killed(self, pod: Object) -> Object:
        ended = {"exitCode": 137, "reason": "Error", "startedAt": now(), "finishedAt": now()}
        return self._container(pod, {"terminated": ended, "running": None})

    def _container(self, pod: Object, state: Object) -> Object:
        container = pod["spec"]["containers"][0]
        return {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": "running" in state and state["running"] is not None,
            "restartCount": 0,
            "state": state,
        }


def run_container(kubelet: Kubelet, pod: Object, places: dict[str, str] | None = None) -> None:
    """Run a pod as a kubelet does: as a process of this machine, with its log and exit code.

    Args:
        places: variables with paths as values, mapped to this machine.
    """
    container = pod["spec"]["containers"][0]
    kubelet.run(pod)
    process = subprocess.Popen(
        [*container.get("command", []), *container["args"]],
        env=variables_of(pod, places),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    kubelet.processes[pod["metadata"]["uid"]] = process
    if pod["metadata"]["uid"] in kubelet.ending:  # it was deleted meanwhile
        process.terminate()
    assert process.stdout is not None
    for line in process.stdout:
        kubelet.say(pod, line.rstrip())
    kubelet.exit(pod, process.wait(60))


def variables_of(pod: Object, places: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of the pod's process, as it is on this machine."""
    # what has no value comes from secrets and from the pod's own fields, which no test's process reads
    given = {item["name"]: item["value"] for item in pod["spec"]["containers"][0]["env"] if "value" in item}
    given = {name: value for name, value in given.items() if name not in ("HOME", "TMPDIR")} | (places or {})
    given["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | given


class _Nothing:
    _present: dict[str, Object] = {}  # noqa: RUF012


_NONE = _Nothing()


class JobController:
    """The part of the Job controller that the fake API server needs: pods for a Job, and its conditions from theirs."""

    def __init__(self, state: ApiState, namespace: str) -> None:
        self._state, self._namespace = state, namespace
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(5)

    def _run(self) -> None:
        seen = 0
        while not self._stopped.is_set():
            with self._state.changed:
                if self._state.version == seen:
                    self._state.changed.wait(0.05)
                seen = self._state.version
                jobs = [item for (plural, _, _), item in self._state.objects.items() if plural == "jobs"]
                for job in jobs:
                    self._sync(job)

    def _sync(self, job: Object) -> None:
        conditions = job.get("status", {}).get("conditions") or []
        if conditions or job["metadata"].get("deletionTimestamp") or job["spec"].get("suspend"):
            return
        status = job.setdefault("status", {})
        status.setdefault("startTime", time.time())
        if time.time() - status["startTime"] > job["spec"]["activeDeadlineSeconds"]:
            self._finish(job, "Failed", "DeadlineExceeded", "Job was active longer than specified deadline")
            return
        pods = self._pods(job)
        failed = [pod for pod in pods if pod.get("status", {}).get("phase") == "Failed"]
        counted = [pod for pod in failed if self._action(job, pod) != "Ignore"]
        if any(self._action(job, pod) == "FailJob" for pod in failed):
            self._finish(job, "Failed", "PodFailurePolicy", "Container failed with a code that fails the Job")
        elif len(counted) > job["spec"]["backoffLimit"]:
            self._finish(job, "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
        else:
            self._fill(job, pods)

    def _fill(self, job: Object, pods: list[Object]) -> None:
        done = 0
        for index in range(job["spec"]["completions"]):
            mine = [pod for pod in pods if pod["metadata"]["annotations"][_INDEX] == str(index)]
            phases = [pod.get("status", {}).get("phase", "Pending") for pod in mine]
            done += "Succeeded" in phases
            if all(phase == "Failed" for phase in phases):
                self._create(job, index)
        if done == job["spec"]["completions"]:
            self._finish(job, "Complete", "CompletionsReached", "")

    def _create(self, job: Object, index: int) -> None:
        template, name = job["spec"]["template"], job["metadata"]["name"]
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": name,
            "uid": job["metadata"]["uid"],
            "controller": True,
        }
        metadata = {
            "generateName": f"{name}-{index}-",
            "labels": dict(template["metadata"]["labels"])
            | {"batch.kubernetes.io/controller-uid": job["metadata"]["uid"]},
            "annotations": {_INDEX: str(index)},
            "ownerReferences": [owner],
        }
        self._state.create(
            "pods", self._namespace, {"metadata": metadata, "spec": dict(template["spec"]), "status": {}}
        )

    def _action(self, job: Object, pod: Object) -> str:
        status = pod.get("status", {})
        codes = [item["state"].get("terminated", {}).get("exitCode") for item in status.get("containerStatuses") or []]
        hit = [item["type"] for item in status.get("conditions") or [] if item["status"] == "True"]
        for rule in job["spec"].get("podFailurePolicy", {"rules": []})["rules"]:
            if any(code in rule.get("onExitCodes", {}).get("values", []) for code in codes):
                return str(rule["action"])
            if any(pattern["type"] in hit for pattern in rule.get("onPodConditions", [])):
                return str(rule["action"])
        return "Count"

    def _finish(self, job: Object, kind: str, reason: str, message: str) -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        job["status"]["conditions"] = [condition]
        self._state.record("jobs", "MODIFIED", job)
        for pod in self._pods(job):
            if pod.get("status", {}).get("phase") in (None, "Pending", "Running") and kind == "Failed":
                pod["metadata"].setdefault("deletionTimestamp", now())
                self._state.record("pods", "MODIFIED", pod)

    def _pods(self, job: Object) -> list[Object]:
        uid = job["metadata"]["uid"]
        return [
            item
            for (plural, _, _), item in self._state.objects.items()
            if plural == "pods" and any(ref["uid"] == uid for ref in item["metadata"].get("ownerReferences") or [])
        ]


_INDEX = "batch.kubernetes.io/job-completion-index"
