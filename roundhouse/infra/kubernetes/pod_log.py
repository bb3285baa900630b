"""A pod's log, line by line, while it is written.

Invariant: each line is handed on once and in order, also when the connection breaks in between: lines carry the node's time
stamp, and a new connection begins where the last line stood. A log
that cannot be read is no failure of the work that it is of.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from roundhouse.errors import InfraError
from roundhouse.infra.kubernetes.cluster import ApiRefused, Cluster
from roundhouse.infra.kubernetes.watching import lines_of, shut

logger = logging.getLogger(__name__)

SILENCE_SECONDS = 300.0
_TRIES = 5
"""Connections in a row that bring no line, before the log is given up."""

Say = Callable[[str], None]


class PodLog:
    """Follows the log of one pod in a thread."""

    def __init__(self, cluster: Cluster, namespace: str, pod: str, container: str, say: Say) -> None:
        self._cluster = cluster
        self._path = log_path(namespace, pod)
        self._container = container
        self._say = say
        self._last = ""
        """Time stamp of the last line that was handed on."""
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

        idle = 0
        while idle < _TRIES:
            last, over = self._last, self._ended.is_set()
            try:
                self._read()
                if over:  # the container had ended before this connection began: it gave all there is
                    return
            except ApiRefused as refused:
                # 400 and 404 pass: a container that has just started has no log for a moment
                if refused.status == 403 or (over and refused.status in (400, 404)):
                    logger.warning("%s cannot be read: %s", self._path, refused.message)
                    return
            except (HTTPError, OSError, AttributeError, InfraError) as error:
                logger.info("%s: %s: %s", self._path, type(error).__name__, error)
            idle = 0 if self._last != last else idle + 1
            if over:
                time.sleep(0.2 * 2**idle)
            else:
                self._ended.wait(0.2 * 2**idle)

    def _read(self) -> None:
        query = {"container": self._container, "follow": "true", "timestamps": "true"}
        if self._last:
            query["sinceTime"] = f"{self._last[:19]}Z"  # whole seconds: older servers refuse fractions
        stream = self._stream = self._cluster.stream(self._path, query, SILENCE_SECONDS)
        try:
            for line in lines_of(stream):
                stamp, _, text = line.decode(errors="replace").partition(" ")
                if stamp <= self._last:
                    continue
                self._last = stamp
                self._say(text.rstrip())
        finally:
            self._stream = None
            stream.close()


def last_lines(cluster: Cluster, namespace: str, pod: str, container: str, count: int = 12) -> str:
    """The end of a pod's log; empty when there is none."""
    from urllib3.exceptions import HTTPError

    query = {"container": container, "tailLines": str(count)}
    try:
        return cluster.stream(log_path(namespace, pod), query, 10.0).data.decode(errors="replace").strip()
    except (ApiRefused, HTTPError, OSError) as error:
        logger.info("the log of %s cannot be read: %s", pod, error)
        return ""


def log_path(namespace: str, pod: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
