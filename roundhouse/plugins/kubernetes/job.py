"""One Job from its creation or discovery to its end.

Invariant: for one piece of work (`StageIdentity`) at most one Job is running. A caller creates it or finds it by its
name: a restarted flow finds its own and continues to wait. A failed Job keeps its name, its pods and their logs until
its time to live is over; the next try has the next number.

    create ── 201 ──────────────> watch ──> Complete ──> number
       │                            │
       └─ 409: ours, under way ─────┤ ──> Failed ──> DataError, ConfigError, InfraError with the cause
          ours, complete ───────────┘ ──> cancelled, no node, no image ──> deleted with its pods, then the error
          ours, failed ──> next number
          another's ─────> ConfigError

Leaving by any exception except a failure of the API server deletes the Job and waits until its pods are gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Iterable
from types import TracebackType
from typing import Any

from roundhouse.errors import InfraError, RoundhouseError
from roundhouse.plugins.kubernetes.cluster import ApiRefused, Cluster, OwnedResources
from roundhouse.plugins.kubernetes.job_status import INDEX, Failed, JobDeadlines, Succeeded, Waiting, judge
from roundhouse.plugins.kubernetes.names import LABEL
from roundhouse.plugins.kubernetes.stage_jobs import StageJob
from roundhouse.plugins.kubernetes.stage_pod import PodKeys
from roundhouse.plugins.kubernetes.watching import PodLog, Watched, last_lines

logger = logging.getLogger(__name__)

Object = dict[str, Any]
Say = Callable[[str], None]

STOP_SECONDS = 0.5
"""Interval at which a waiting caller checks whether the Job is still wanted."""
MOST_TRIES = 50
"""Numbers that are looked through; a Job's time to live frees them."""
GONE_SECONDS = 120.0
"""For a deleted Job's pods to end: above their grace period of 30 s."""


class RunJobs:
    """The Jobs of a run, all watched over the same two connections. Usable from several threads; a context."""

    def __init__(self, cluster: Cluster, namespace: str, run_uid: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._lock = threading.Lock()
        self._waiters: dict[str, threading.Event] = {}
        """By the uid of the Job that is waited for."""
        self._own = OwnedResources(cluster, namespace)
        selector = f"{LABEL}run-uid={run_uid}"
        self._jobs = Watched(cluster, self._own.path("batch/v1", "jobs"), selector, self._wake)
        self._pods = Watched(cluster, self._own.path("v1", "pods"), selector, self._wake)

    def __enter__(self) -> RunJobs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching."""
        self._jobs.stop()
        self._pods.stop()

    def run(
        self,
        plan: StageJob,
        say: Say,
        prepare: Callable[[int], None] = lambda number: None,
        told: Callable[[int], RoundhouseError | None] = lambda number: None,
        left: Callable[[int], bool] = lambda number: True,
        stopped: threading.Event | None = None,
    ) -> int:
        """Run the Job to its end and return the number of the successful try.

        Args:
            say: receives the log of the first pod and its replacements, line by line, and the reasons for waiting.
            prepare: called with a try's number before its Job may be created; called again for a discovered one.
            told: returns the error that a try's process stored.
            left: returns whether the result of a discovered finished try still exists; otherwise the next number is
                tried.
            stopped: once set, the Job is not wanted any more.

        Raises:
            DataError, ConfigError, InfraError, StoreError: see `job_status`.
            Unwanted: `stopped` was set; the Job is gone.
        """
        number, job = self._create_or_find(plan, prepare, left, stopped)
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        try:
            return self._wait(plan, number, job, say, told, stopped)
        except _ServerAway as away:
            raise InfraError(f"{away} Job {name} continues; a new attempt finds it.") from away
        except _Over as over:
            raise over.error from None
        except BaseException:
            say(f"Job {name} is being deleted")
            try:
                is_deleting = self._cluster.delete(f"{self._own.path('batch/v1', 'jobs')}/{name}", uid=uid)
                if is_deleting:
                    self._until_gone(name, uid)
            except (ApiRefused, InfraError) as error:
                logger.error("Job %s could not be deleted: %s. It ends at its deadline.", name, error)
            raise
        finally:
            self._jobs.forget(uid)
            self._pods.forget(uid)

    def end_others(self, annotations: dict[str, str], wanted: Container[str]) -> None:
        """Delete running Jobs with these annotations that are not wanted any more.

        Args:
            wanted: digests of the wanted ones (`StageIdentity`).
        """
        self._jobs.listed.wait(self._cluster.patience_seconds)
        others = []
        for job in self._jobs.all_present():
            has = job["metadata"].get("annotations") or {}
            if annotations.items() <= has.items() and has.get(f"{LABEL}digest") not in wanted and is_under_way(job):
                others.append((job["metadata"]["name"], job["metadata"]["uid"]))
        for name, uid in others:
            logger.warning("Job %s is obsolete and is deleted", name)
            self._cluster.delete(f"{self._own.path('batch/v1', 'jobs')}/{name}", uid=uid)
        for name, uid in others:
            self._until_gone(name, uid)

    def _create_or_find(
        self,
        plan: StageJob,
        prepare: Callable[[int], None],
        left: Callable[[int], bool],
        stopped: threading.Event | None,
    ) -> tuple[int, Object]:
        owner = self._own.owner(plan)
        for number in range(1, MOST_TRIES + 1):
            if stopped is not None and stopped.is_set():
                raise Unwanted
            prepare(number)
            manifest = plan.job(number, owner)
            job = self._own.ensure("batch/v1", "jobs", manifest)
            if job["metadata"].get("deletionTimestamp"):
                self._until_gone(job["metadata"]["name"], job["metadata"]["uid"])
                job = self._own.ensure("batch/v1", "jobs", manifest)
            outcome = judge(job, [], plan.keys)
            if isinstance(outcome, Waiting) or (isinstance(outcome, Succeeded) and left(number)):
                return number, job
        raise InfraError(
            f"{MOST_TRIES} Jobs of this stage failed; the last was {manifest['metadata']['name']}. Look at them, and delete "
            f"them (kubectl delete jobs -n {self._namespace} -l {LABEL}run-uid={plan.identity.run_uid}) to try again."
        )

    def _wait(
        self,
        plan: StageJob,
        number: int,
        job: Object,
        say: Say,
        told: Callable[[int], RoundhouseError | None],
        stopped: threading.Event | None,
    ) -> int:
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        deadlines = JobDeadlines(plan)
        last_text = ""
        log: PodLog | None = None
        changed = self._waiter(uid)
        try:
            while True:
                changed.clear()
                job, pods = self._look(name, uid, job)
                outcome = judge(job, pods, plan.keys)
                log = self._log(log, pods, say)
                if isinstance(outcome, Succeeded):
                    log = log or self._late_log(job, say)
                    if log is not None:
                        log.finish(5)
                    return number
                if isinstance(outcome, Failed):
                    raise _Over(self._explained(plan.keys, job, pods, lambda: told(number)))
                if outcome.text != last_text:
                    last_text = outcome.text
                    say(f"Job {name}: {last_text}")
                if not pods and not outcome.queued and deadlines.is_time_for_events(time.monotonic()):
                    self._tell_events(uid, say, deadlines)  # before it is aborted, however late this check is
                seconds = deadlines.left(outcome, bool(pods), time.monotonic())
                _pause(changed, stopped, deadlines.next_look(seconds))
        except _Over:
            if log is not None:
                log.finish(5)
            raise
        finally:
            self._waiters.pop(uid, None)
            if log is not None:
                log.finish(0)  # of a container that is not wanted any more nobody waits for the end

    def _look(self, name: str, uid: str, known: Object) -> tuple[Object, list[Object]]:
        """The Job and its pods, oldest first, as they are now. A Job that had ended before it vanished is as it ended."""
        for watched in (self._jobs, self._pods):
            if watched.failure is not None:
                if isinstance(watched.failure, InfraError):
                    raise _ServerAway(str(watched.failure))
                raise watched.failure
        gone = self._jobs.is_gone(uid)  # checked first: a deleted one stays deleted
        known = self._jobs.last(uid) or known
        if gone and isinstance(judge(known, []), Waiting):
            raise _Over(InfraError(f"Job {name} was deleted by another client. A new attempt creates it again."))
        return known, _oldest_first(self._pods.owned_by(uid))

    def _log(self, followed: PodLog | None, pods: list[Object], say: Say) -> PodLog | None:
        """Return the log of the newest started first pod; a followed older one is finished first."""
        for pod in reversed(pods):
            name = pod["metadata"]["name"]
            first = pod["metadata"].get("annotations", {}).get(INDEX, "0") == "0"
            if first and pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed"):
                if followed is not None:
                    if followed.pod == name:
                        return followed
                    followed.finish(5)
                return PodLog(self._cluster, self._namespace, name, pod["spec"]["containers"][0]["name"], say)
        return followed

    def _late_log(self, job: Object, say: Say) -> PodLog | None:
        try:
            return self._log(None, _oldest_first(self._fresh_pods(job)), say)
        except (ApiRefused, InfraError) as error:  # the work is done all the same
            logger.info("the pods of Job %s cannot be listed: %s", job["metadata"]["name"], error)
            return None

    def _fresh_pods(self, job: Object) -> list[Object]:
        """Asked for: the two watches are not in step, and a Job's end may be known before the end of the pod that caused it."""
        selector = f"batch.kubernetes.io/controller-uid={job['metadata']['uid']}"
        return self._cluster.get(self._own.path("v1", "pods"), labelSelector=selector).get("items") or []

    def _explained(
        self, keys: PodKeys, job: Object, known: list[Object], told: Callable[[], RoundhouseError | None]
    ) -> RoundhouseError:
        """The error of a Job that failed: as its process reported it, else with the end of its log."""
        pods = _oldest_first({pod["metadata"]["uid"]: pod for pod in [*known, *self._fresh_pods(job)]}.values())
        failed = judge(job, pods, keys)
        assert isinstance(failed, Failed)
        error = told() if failed.by_exit_code else None
        if error is not None and (int(job["spec"].get("completions") or 1) == 1 or not isinstance(error, InfraError)):
            return error
        if error is not None:  # a peer's end may be its cause: name the pod that ended first
            return InfraError(f"Pod {failed.pod} ended. Message of a rank: {error}")
        if failed.pod is None or not failed.by_exit_code or "Last message" in str(failed.error):
            return failed.error
        container = next(pod for pod in pods if pod["metadata"]["name"] == failed.pod)["spec"]["containers"][0]["name"]
        message = last_lines(self._cluster, self._namespace, failed.pod, container)
        return type(failed.error)(f"{failed.error} Last message: {message}") if message else failed.error

    def _tell_events(self, uid: str, say: Say, deadlines: JobDeadlines) -> None:
        """Log why no pod exists: a quota, an admission webhook, Pod Security."""
        try:
            selector = f"involvedObject.uid={uid},type=Warning"
            events = self._cluster.get(self._own.path("v1", "events"), fieldSelector=selector).get("items") or []
        except ApiRefused as refused:
            logger.info("events cannot be read: %s", refused)
            return
        if events:
            deadlines.event = str(events[-1].get("message") or "")
            say(f"No pod yet: {deadlines.event}")

    def _until_gone(self, name: str, uid: str) -> None:
        deadline, changed = time.monotonic() + GONE_SECONDS, self._waiter(uid)
        self._jobs.listed.wait(GONE_SECONDS)
        while self._jobs.failure is None and (left := deadline - time.monotonic()) > 0:
            changed.clear()
            if self._jobs.is_gone(uid):
                return
            if self._jobs.present(uid) is None:  # the watch has not reported it yet, or no longer does
                try:
                    job = self._cluster.get(f"{self._own.path('batch/v1', 'jobs')}/{name}")
                except ApiRefused as refused:
                    if refused.status == 404:
                        return
                    raise
                if job["metadata"]["uid"] != uid:
                    return
            changed.wait(min(left, 2.0))
        raise InfraError(f"Job {name} was not gone {GONE_SECONDS:g} s after it was deleted. Is its node there?")

    def _waiter(self, uid: str) -> threading.Event:
        with self._lock:
            return self._waiters.setdefault(uid, threading.Event())

    def _wake(self, item: Object | None) -> None:
        """Wake the callers that wait for the Job, or for the Job of the pod; all of them if anything may have changed."""
        with self._lock:
            if item is None:
                concerned = list(self._waiters.values())
            else:
                owners = [owner["uid"] for owner in item["metadata"].get("ownerReferences") or []]
                uids = [item["metadata"]["uid"], *owners]
                concerned = [self._waiters[uid] for uid in uids if uid in self._waiters]
        for waiter in concerned:
            waiter.set()


def is_under_way(job: Object) -> bool:
    """Return whether a Job is running and not being deleted."""
    return not job["metadata"].get("deletionTimestamp") and isinstance(judge(job, []), Waiting)


def _oldest_first(pods: Iterable[Object]) -> list[Object]:
    return sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp") or "")


def _pause(changed: threading.Event, stopped: threading.Event | None, seconds: float) -> None:
    """Wait for a change.

    Raises:
        Unwanted: the caller stopped it.
    """
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if changed.wait(left if stopped is None else min(left, STOP_SECONDS)):
            return
        if stopped is not None and stopped.is_set():
            raise Unwanted


class Unwanted(Exception):
    """The Job was deleted because its result is not wanted any more."""


class _ServerAway(InfraError):
    """The Job cannot be observed any more; it is still running."""


class _Over(Exception):
    """The Job has ended by itself with an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error
