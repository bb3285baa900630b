"""Interpretation of a Job's and its pods' status, and time limits of each state: no calls, and no clock but in
`JobDeadlines`.

Invariant: only a Job's own conditions make it failed; its pods give the cause, and the reason for waiting. It has
succeeded by its condition, or as soon as each of its indexes has a pod that ended with 0, because node and Job
controller take two seconds to report it. Each failure is the error of the kind that decides about a retry, with the
remedy.

    cause                                   error         repeated
    evicted, preempted, drained, node lost  InfraError    yes
    no node for the pod, deadline           InfraError    yes
    exit 75, killed by a signal             InfraError    yes
    out of memory of a training step        ConfigError   no: the same step needs the same memory
    out of memory of a shard                InfraError    yes: another try resumes from its stored rollouts
    image or secret that is not there       ConfigError   no
    exit 65, 74, 78                         DataError, StoreError, ConfigError
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from roundhouse.errors import EXIT_CODES, ConfigError, InfraError, RoundhouseError
from roundhouse.plugins.kubernetes.stage_jobs import StageJob
from roundhouse.plugins.kubernetes.stage_pod import TRAINER, PodKeys

Status = dict[str, Any]

OUT_OF_MEMORY = "OOMKilled"
INDEX = "batch.kubernetes.io/job-completion-index"
"""Annotation of a pod: which of an Indexed Job's completions it is for."""
_DISRUPTIONS = {
    "PreemptionByScheduler": "was preempted by a pod of higher priority",
    "DeletionByTaintManager": "was evicted because its node was tainted (unreachable, not ready or in maintenance)",
    "EvictionByEvictionAPI": "was evicted through the API: its node is being drained",
    "DeletionByPodGC": "was lost with its node",
    "TerminationByKubelet": "was ended by its node: shutdown, or pressure on memory or disk",
}
_NOT_FOUND = ("not found", "does not exist", "manifest unknown", "unauthorized", "denied", "forbidden")
_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
_START_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


class _Rank(IntEnum):
    """Order of pods' failures by which one is the cause of the others."""

    DISRUPTION, OUT_OF_MEMORY, TOLD, SIGNAL, OTHER = range(5)


@dataclass(frozen=True)
class Waiting:
    """The Job is still running."""

    text: str
    """One line for a person; changes when something changed."""
    problem: RoundhouseError | None = None
    """Error of the Job if this state lasts."""
    pending: bool = False
    """Not all of its pods have a node yet."""
    queued: bool = False
    """Suspended: a queue has not admitted it yet."""


@dataclass(frozen=True)
class Succeeded:
    """All pods ended with 0."""


@dataclass(frozen=True)
class Failed:
    """The Job is over."""

    error: RoundhouseError
    pod: str | None = None
    """The pod that failed first; its last lines have the details."""
    by_exit_code: bool = False
    """The process ended by itself, so that it may have left its own message."""


JobOutcome = Waiting | Succeeded | Failed


def judge(job: Status, pods: Sequence[Status], keys: PodKeys = TRAINER) -> JobOutcome:
    """The outcome of a Job, given the pods of it that were ever seen, oldest first, in their last state. Errors name `keys`."""
    conditions = {
        item["type"]: item for item in job.get("status", {}).get("conditions") or [] if item["status"] == "True"
    }
    if "Complete" in conditions:
        return Succeeded()
    if "Failed" in conditions:
        condition = conditions["Failed"]
        name = job["metadata"]["name"]
        if condition.get("reason") == "DeadlineExceeded":
            seconds = job["spec"].get("activeDeadlineSeconds")
            stuck = _waiting(job, pods, keys)
            hint = f" At the end: {stuck.text}." if stuck.pending else ""
            return Failed(
                InfraError(
                    f"Job {name} was ended after {seconds} s, its deadline.{hint} "
                    f"Raise {keys.timeout}, or {keys.section}.pending_seconds where it waited for nodes."
                )
            )
        # of an index the newest pod's counts: Kubernetes replaced those before it, so they did not fail the Job
        causes = {_index(each): cause for each in pods if (cause := _cause(each, keys)) is not None}
        if causes:
            _, _, failed = min(causes.values(), key=lambda cause: cause[:2])
            return failed
        reason = condition.get("message") or condition.get("reason") or "no reason given"
        return Failed(
            InfraError(f"Job {name} failed: {reason}. Its pods are gone; look at `kubectl describe job {name}`.")
        )
    ranks = {_index(pod) for pod in pods if _ended_well(pod)} - {None}
    if not {"FailureTarget", "Suspended"} & set(conditions) and len(ranks) >= int(job["spec"].get("completions") or 1):
        return Succeeded()
    return _waiting(job, pods, keys)


def _index(pod: Status) -> str | None:
    return pod["metadata"].get("annotations", {}).get(INDEX)


def _ended_well(pod: Status) -> bool:
    """All its containers ended with 0; they are not started again (`restartPolicy: Never`)."""
    states = [item.get("state", {}) for item in pod.get("status", {}).get("containerStatuses") or []]
    if len(states) < len(pod["spec"]["containers"]):
        return False
    return all(state.get("terminated", {}).get("exitCode") == 0 for state in states)


def _cause(pod: Status, keys: PodKeys) -> tuple[_Rank, str, Failed] | None:
    """Return the cause of a pod's failure, with its rank among its peers; None for a pod that did not fail."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    ends = [
        state
        for container in pod.get("status", {}).get("containerStatuses") or []
        if (state := container.get("state", {}).get("terminated")) is not None
    ]
    ended = next((state for state in ends if state.get("exitCode")), ends[0] if ends else None)
    at = (ended or {}).get("finishedAt") or ""
    node = f" on node {pod['spec']['nodeName']}" if pod.get("spec", {}).get("nodeName") else ""
    for condition in status.get("conditions") or []:
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            what = _DISRUPTIONS.get(condition.get("reason", ""), f"was disrupted ({condition.get('reason')})")
            message = condition.get("message") or ""
            error = InfraError(f"Pod {name}{node} {what}. {message}".rstrip())
            return _Rank.DISRUPTION, at, Failed(error, name)
    if status.get("reason") in (
        "Evicted",
        "Preempting",
        "Preempted",
        "NodeLost",
        "Shutdown",
        "NodeShutdown",
        "Terminated",
    ):
        error = InfraError(f"Pod {name}{node} was ended by its node ({status['reason']}): {status.get('message', '')}")
        return _Rank.DISRUPTION, at, Failed(error, name)
    if status.get("phase") != "Failed" and not (ended and ended.get("exitCode")):
        return None
    if ended is None:
        text = status.get("message") or status.get("reason") or "no reason given"
        return _Rank.OTHER, at, Failed(InfraError(f"Pod {name}{node} failed: {text}"), name)
    return _exited(name, node, pod, ended, at, keys)


def _exited(name: str, node: str, pod: Status, ended: Status, at: str, keys: PodKeys) -> tuple[_Rank, str, Failed]:
    code = int(ended.get("exitCode") or 0)
    if ended.get("reason") == OUT_OF_MEMORY:
        limit = pod["spec"]["containers"][0].get("resources", {}).get("limits", {}).get("memory", "none")
        error: RoundhouseError = keys.out_of_memory(
            f"Pod {name}{node} ran out of memory (OOMKilled; its limit is {limit}). Raise {keys.section}.memory, or "
            f"{keys.less_memory}."
        )
        return _Rank.OUT_OF_MEMORY, at, Failed(error, name)
    kind = next((kind for kind, known in EXIT_CODES.items() if known == code), InfraError)
    message = f" Last message: {ended['message'].strip()}" if (ended.get("message") or "").strip() else ""
    if code > 128:
        error = InfraError(f"Pod {name}{node} was killed by signal {code - 128} (exit code {code}).{message}")
        is_sigterm = code == 128 + signal.SIGTERM  # also by the Job controller, because a peer had failed
        return _Rank.OTHER if is_sigterm else _Rank.SIGNAL, at, Failed(error, name)
    rank = _Rank.TOLD if kind is not InfraError else _Rank.OTHER
    error = kind(f"Pod {name}{node} ended with exit code {code}.{message}")
    return rank, at, Failed(error, name, by_exit_code=True)


def _waiting(job: Status, pods: Sequence[Status], keys: PodKeys) -> Waiting:
    name, completions = job["metadata"]["name"], int(job["spec"].get("completions") or 1)
    if job["spec"].get("suspend"):
        return Waiting("waiting in the queue to be admitted", queued=True)
    started = 0
    for pod in pods:
        phase = pod.get("status", {}).get("phase")
        if pod["metadata"].get("deletionTimestamp") or phase == "Failed":
            continue
        if phase in ("Running", "Succeeded"):
            started += 1
            continue
        if (waiting := _pending(pod, keys)) is not None:
            return waiting
    if started < completions:
        problem = InfraError(f"Job {name} has {started} of {completions} pods after all its time to get them.")
        return Waiting(f"{started} of {completions} pods run", problem, pending=True)
    return Waiting(f"{started} of {completions} pods run")


def _pending(pod: Status, keys: PodKeys) -> Waiting | None:
    """Return the obstacle of a pod that has not started; None while it is starting normally."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            text = f"no node for pod {name}: {condition.get('message') or condition.get('reason')}"
            remedy = f"Free or add nodes, ask for less in {keys.section}, or raise {keys.section}.pending_seconds."
            return Waiting(text, InfraError(f"There is {text} {remedy}"), pending=True)
    for container in status.get("containerStatuses") or []:
        waiting = container.get("state", {}).get("waiting") or {}
        reason, message = waiting.get("reason", ""), waiting.get("message") or ""
        if reason in _IMAGE_REASONS:
            final = reason == "InvalidImageName" or any(word in message.lower() for word in _NOT_FOUND)
            text = f"the image {container.get('image')} of pod {name} cannot be pulled ({reason}: {message})"
            remedy = f"Check {keys.section}.image, and that the nodes may pull from its registry (imagePullSecrets)."
            error = (ConfigError if final else InfraError)(f"{text[0].upper()}{text[1:]}. {remedy}")
            return Waiting(text, error)
        if reason in _START_REASONS:
            text = f"pod {name} cannot start ({reason}: {message})"
            return Waiting(text, ConfigError(f"P{text[1:]}. {keys.remedy_for_start}"))
    return None


NO_POD_SECONDS = 20.0
"""Without a pod for this long, the Job's events are asked for the reason."""
SLACK_SECONDS = 120.0
"""Beyond the Job's own deadline; after it, the cluster's Job controller is taken for dead."""


class JobDeadlines:
    """Time limits of a Job's states.

    Invariant: every wait ends: for a queue, for nodes, for a container's start, for the Job itself, each by a
    configuration key that the error names. Time in the queue and time at work are counted separately: a queue may
    suspend a running Job again, and Kubernetes restarts its deadline on resumption.
    """

    def __init__(self, plan: StageJob) -> None:
        self._plan = plan
        self._began = time.monotonic()
        """When its time outside the queue began: when it was last seen in there, if it ever was."""
        self._queued = 0.0
        """Total time in the queue."""
        self._in_queue = True
        self._problem_since: float | None = None
        self._asked = False
        self.event = ""
        """The cluster's message about the missing pods."""

    def left(self, waiting: Waiting, has_pods: bool, now: float) -> float:
        """Seconds until the present state must have changed.

        Raises:
            InfraError, ConfigError: it has not.
        """
        infra, settings = self._plan.infra, self._plan.settings
        name = self._plan.identity.stage
        if waiting.queued:
            if self._in_queue:
                self._queued += now - self._began
            self._in_queue, self._began, self._problem_since = True, now, None
            return self._or_raise(
                infra.queue_seconds - self._queued,
                InfraError(f"The {name} Job was not admitted by queue {infra.queue} in infra.queue_seconds."),
            )
        self._in_queue = False
        total = self._began + self._plan.seconds() + SLACK_SECONDS - now
        self._or_raise(
            total,
            InfraError(f"The {name} Job is long past its deadline and still not ended. Does the Job controller run?"),
        )
        if waiting.problem is None:
            self._problem_since = None
            return total
        since = self._problem_since = self._problem_since if self._problem_since is not None else now
        if not waiting.pending:
            return min(total, self._or_raise(since + settings.image_seconds - now, waiting.problem))
        problem = waiting.problem
        if not has_pods and self.event:
            problem = InfraError(f"{problem} Event of the cluster: {self.event}")
        return min(total, self._or_raise(since + settings.pending_seconds - now, problem))

    def is_time_for_events(self, now: float) -> bool:
        """Once, when no pod came for a while."""
        if self._asked or now - self._began < NO_POD_SECONDS:
            return False
        self._asked = True
        return True

    def next_look(self, seconds: float) -> float:
        """Return the latest time of the next check, from the result of `left`."""
        return min(seconds, NO_POD_SECONDS)

    @staticmethod
    def _or_raise(seconds: float, error: Exception) -> float:
        if seconds <= 0:
            raise error
        return seconds
