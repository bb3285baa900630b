"""A run's Jobs and pods by watch, without polling.

Invariant: a reader sees a state that the API server had, never older than an earlier one; a vanished object stays
readable in its last state (a preempted pod is gone when its Job fails). The number of calls does not depend on the
number of watched Jobs, only on time: two lists, and two watches renewed every four minutes.

    list ──> watch ──> event … event ──> closed, broken ──> watch from the last version
      ^                                  410 Gone
      └────────────────────────────────────┘

Each retry waits longer than the one before, until a watch succeeds.

A pod's log (`PodLog`) is a stream too: each line is passed on once and in order, even if the connection breaks: lines
carry the node's time stamp, and a new connection starts after the last line. A log that cannot be read fails no stage.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from roundhouse.errors import InfraError, RoundhouseError
from roundhouse.plugins.kubernetes.cluster import ApiRefused, Cluster, explained
from roundhouse.retry import Backoff

logger = logging.getLogger(__name__)

Object = dict[str, Any]

WATCH_SECONDS = 240
"""After this the server ends a watch, and the next one begins."""
SILENCE_SECONDS = 120.0
"""Silence after which a connection counts as dead; the server sends a bookmark every minute."""
_BACKOFF = Backoff(0.1, longest=5.0)
"""Pauses before a new watch, since the last successful one."""
_SHORT = 1.0
"""A watch that lasted for less and brought nothing did not go well: a server that ends each at once is not asked in a storm."""


class Watched:
    """A collection of objects, kept up to date by a thread."""

    def __init__(
        self, cluster: Cluster, path: str, selector: str, changed: Callable[[Object | None], None], *, fields: str = ""
    ) -> None:
        """Begin to watch.

        Args:
            selector: by labels.
            fields: by fields, such as metadata.name=x.
            changed: called from the thread with an object that is new, changed or gone; with None when all may have changed.
        """
        self._cluster = cluster
        self._path = path
        self._selectors = {"labelSelector": selector, "fieldSelector": fields}
        self._changed = changed
        self._lock = threading.Lock()
        self._present: dict[str, Object] = {}
        self._gone: dict[str, Object] = {}
        self._owned: dict[str, dict[str, Object]] = {}
        self._version: str | None = None
        self._stopped = threading.Event()
        self._stream: Any = None
        self._opened: float | None = None
        """When the present watch was accepted."""
        self._heard: float | None = None
        """When its last event came."""
        self.failure: RoundhouseError | None = None
        """Why nothing is known any more: no right to watch, or the server was away for too long."""
        self.listed = threading.Event()
        """Set once the state is known."""
        self._thread = threading.Thread(target=self._follow, name=f"watch {path.rsplit('/', 1)[-1]}", daemon=True)
        self._thread.start()

    def present(self, uid: str) -> Object | None:
        """The object as it is now; None when it is not there."""
        with self._lock:
            return self._present.get(uid)

    def last(self, uid: str) -> Object | None:
        """Return the last known state of an object, even of a vanished one; None if it was never seen."""
        with self._lock:
            return self._present.get(uid) or self._gone.get(uid)

    def all_present(self) -> list[Object]:
        """Every object that is there now."""
        with self._lock:
            return list(self._present.values())

    def is_gone(self, uid: str) -> bool:
        """Return whether an object was seen and has vanished since."""
        with self._lock:
            return uid in self._gone

    def owned_by(self, uid: str) -> list[Object]:
        """All objects of an owner that were ever seen, each in its last state."""
        with self._lock:
            return list(self._owned.get(uid, {}).values())

    def forget(self, uid: str) -> None:
        """Remove an owner and its vanished objects."""
        with self._lock:
            for item in self._owned.pop(uid, {}):
                self._gone.pop(item, None)
            self._gone.pop(uid, None)

    def stop(self) -> None:
        self._stopped.set()
        if (stream := self._stream) is not None:
            # another thread reads from it: only closing the socket wakes that one
            shut(stream)
        self._thread.join(5)

    def _follow(self) -> None:
        well_at, attempts = time.monotonic(), 0
        while not self._stopped.is_set():
            attempts += 1
            self._opened, self._heard = None, None
            try:
                problem, wait = self._watch()
            except RoundhouseError as error:
                self._fail(error)
                return
            now = time.monotonic()
            lasted = 0.0 if self._opened is None else now - self._opened
            if self._heard is not None or _SHORT <= lasted < SILENCE_SECONDS:
                well_at, attempts = self._heard or now, 1
            if now - well_at > self._cluster.patience_seconds:
                self._fail(
                    InfraError(
                        f"The API server {self._cluster.host} could not be watched for {self._cluster.patience_seconds:g} s "
                        f"(infra.api_outage_seconds): {problem}"
                    )
                )
                return
            wait = max(_BACKOFF.pause(attempts), min(wait, _BACKOFF.longest))
            logger.info("watch of %s: %s; again in %.1f s", self._path, problem, wait)
            self._stopped.wait(wait)

    def _watch(self) -> tuple[str, float]:
        """Watch until the watch ends: why it did, and how long the server asks to be left alone.

        Raises:
            RoundhouseError: nothing will be known any more.
        """
        from urllib3.exceptions import HTTPError

        try:
            if self._version is None:
                listing = self._cluster.get(self._path, **self._selected())
                items = {each["metadata"]["uid"]: each for each in listing.get("items") or []}
                with self._lock:
                    self._gone |= {uid: each for uid, each in self._present.items() if uid not in items}
                    self._present = items
                    for each in items.values():
                        self._keep_by_owner(each)
                self._version = listing["metadata"]["resourceVersion"]
                self.listed.set()
                self._changed(None)
            for event in self._events():
                item, kind = event["object"], event["type"]
                if kind == "ERROR":
                    raise ApiRefused(int(item.get("code") or 500), str(item.get("reason")), str(item.get("message")))
                self._version = item["metadata"]["resourceVersion"]
                if kind != "BOOKMARK":
                    uid = item["metadata"]["uid"]
                    with self._lock:
                        if kind == "DELETED":
                            self._present.pop(uid, None)
                            self._gone[uid] = item
                        else:
                            self._present[uid] = item
                        self._keep_by_owner(item)
                    self._changed(item)
                self._heard = time.monotonic()
        except ApiRefused as refused:
            if refused.status in (401, 403, 404):
                raise explained(refused, f"list and watch {self._path}") from refused
            if refused.status == 410:
                self._version = None
            return str(refused), refused.retry_after or 0.0
        except (HTTPError, OSError, ValueError, AttributeError) as error:  # AttributeError: closed while it was read
            return f"{type(error).__name__}: {error}", 0.0
        return "it has ended", 0.0

    def _selected(self) -> dict[str, str]:
        return {name: value for name, value in self._selectors.items() if value}

    def _keep_by_owner(self, item: Object) -> None:
        for owner in item["metadata"].get("ownerReferences") or []:
            self._owned.setdefault(owner["uid"], {})[item["metadata"]["uid"]] = item

    def _events(self) -> Iterator[Object]:
        query = {
            "watch": "1",
            **self._selected(),
            "resourceVersion": str(self._version),
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        stream = self._stream = self._cluster.stream(self._path, query, SILENCE_SECONDS)
        self._opened = time.monotonic()
        try:
            for line in lines_of(stream):
                if self._stopped.is_set():
                    return
                yield json.loads(line)
        finally:
            self._stream = None
            stream.close()

    def _fail(self, error: RoundhouseError) -> None:
        self.failure = error
        self.listed.set()
        self._changed(None)


def lines_of(stream: Any) -> Iterator[bytes]:
    """Yield whole lines of an answer as they arrive; drop the rest after the last line break of a broken one."""
    rest = b""
    for chunk in stream.stream(amt=None, decode_content=False):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line for line in lines if line.strip())


def shut(stream: Any) -> None:
    import socket

    connection = getattr(stream, "connection", None) or getattr(stream, "_connection", None)
    sock = getattr(connection, "sock", None)
    if sock is not None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


LOG_SILENCE_SECONDS = 300.0
_LOG_BACKOFF = Backoff(0.2, longest=5.0)
_TRIES = 5
"""Connections in a row without a line after which the log of an ended container is abandoned."""

Say = Callable[[str], None]


class PodLog:
    """Follows the log of one pod in a thread."""

    def __init__(self, cluster: Cluster, namespace: str, pod: str, container: str, say: Say) -> None:
        self.pod = pod
        self._cluster = cluster
        self._path = log_path(namespace, pod)
        self._container = container
        self._say = say
        self._last: tuple[datetime, str] | None = None
        """Time stamp of the last line that was handed on: in UTC, and as the node wrote it (its own time zone, nanoseconds)."""
        self._ended = threading.Event()
        self._stream: object = None
        self._thread = threading.Thread(target=self._follow, name=f"log {pod}", daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """The container has ended: wait for the rest of its log, and stop."""
        self._ended.set()
        self._thread.join(seconds)
        if self._thread.is_alive() and (stream := self._stream) is not None:
            shut(stream)
            self._thread.join(1)

    def _follow(self) -> None:
        from urllib3.exceptions import HTTPError

        idle = after_end = 0
        while after_end < _TRIES:
            last, over = self._last, self._ended.is_set()
            try:
                query = {"container": self._container, "follow": "true", "timestamps": "true"}
                if self._last:
                    # whole seconds: older servers refuse fractions
                    query["sinceTime"] = f"{self._last[0]:%Y-%m-%dT%H:%M:%SZ}"
                stream = self._stream = self._cluster.stream(self._path, query, LOG_SILENCE_SECONDS)
                try:
                    for line in lines_of(stream):
                        self._pass_on(line.decode(errors="replace").rstrip())
                finally:
                    self._stream = None
                    stream.close()
                if over:  # the container had ended before this connection began: it gave all there is
                    return
            except ApiRefused as refused:
                # 400 and 404 may pass: the log of a container that has just started is missing for a moment
                if refused.status == 403 or (over and refused.status in (400, 404)):
                    logger.warning("%s cannot be read: %s", self._path, refused.message)
                    return
            except (HTTPError, OSError, AttributeError, InfraError) as error:
                logger.info("%s: %s: %s", self._path, type(error).__name__, error)
            idle = 0 if self._last != last else idle + 1
            after_end = min(idle, after_end + 1) if over else 0
            if over:
                time.sleep(_LOG_BACKOFF.pause(idle + 1))
            else:
                self._ended.wait(_LOG_BACKOFF.pause(idle + 1))

    def _pass_on(self, line: str) -> None:
        written, _, text = line.partition(" ")
        try:
            stamp = datetime.fromisoformat(written).astimezone(UTC), written
        except ValueError:  # the node's own words, such as that the log is gone
            self._say(line)
            return
        if self._last is None or stamp > self._last:
            self._last = stamp
            self._say(text)


def last_lines(cluster: Cluster, namespace: str, pod: str, container: str, count: int = 12) -> str:
    """Return the end of a pod's log; empty without one."""
    from urllib3.exceptions import HTTPError

    query = {"container": container, "tailLines": str(count)}
    try:
        return cluster.stream(log_path(namespace, pod), query, 10.0).data.decode(errors="replace").strip()
    except (ApiRefused, HTTPError, OSError) as error:
        logger.info("the log of %s cannot be read: %s", pod, error)
        return ""


def log_path(namespace: str, pod: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
