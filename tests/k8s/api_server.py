"""A small API server: real HTTP, objects in memory, lists and watches with Kubernetes' resource versions.

It is a fake for machines without a real one: it validates nothing and runs no controllers (`players.py` has those). It
implements the behaviour that a client must handle: 409 for an existing name, a watch from a version, bookmarks, 410 for a
compacted version, and the wait of a foreground deletion.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]

_PATH = re.compile(
    r"^/(?:api/v1|apis/(?P<group>[^/]+/[^/]+))/(?:namespaces/(?P<namespace>[^/]+)/)?(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?$"
)
_KINDS = {
    "jobs": "Job",
    "pods": "Pod",
    "configmaps": "ConfigMap",
    "services": "Service",
    "secrets": "Secret",
    "events": "Event",
    "rayservices": "RayService",
    "rayclusters": "RayCluster",
    "localqueues": "LocalQueue",
    "workloadpriorityclasses": "WorkloadPriorityClass",
    "sandboxclaims": "SandboxClaim",
    "sandboxes": "Sandbox",
}
BOOKMARK_SECONDS = 0.5


class ApiState:
    """The objects, and everything that happened to them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.history: list[tuple[int, str, str, Object]] = []
        """(version, plural, type, object), ascending."""
        self.version = 1
        self.compacted = 0
        self.logs: dict[str, str] = {}
        """What each pod has written, every line with its time stamp."""
        self.ended_logs: set[str] = set()
        self.groups: dict[str, str] = {}
        """Preferred version of each API group that `/apis` lists."""
        self.execute: Callable[[BaseHTTPRequestHandler, str], None] = no_exec
        """Answers an exec in a pod (`pod_exec.py`)."""

    def record(self, plural: str, kind: str, item: Object) -> Object:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, plural, kind, json.loads(json.dumps(item))))
        self.changed.notify_all()
        return item

    def create(self, plural: str, namespace: str, body: Object) -> tuple[int, Object]:
        with self.changed:
            metadata = body.setdefault("metadata", {})
            if "name" not in metadata:
                metadata["name"] = metadata.get("generateName", "") + uuid.uuid4().hex[:5]
            key = (plural, namespace, metadata["name"])
            if key in self.objects:
                return 409, _status(409, "AlreadyExists", f'{plural} "{metadata["name"]}" already exists')
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            metadata |= {"uid": str(uuid.uuid4()), "namespace": namespace, "creationTimestamp": now, "generation": 1}
            body.setdefault("kind", _KINDS[plural])
            self.objects[key] = body
            return 201, self.record(plural, "ADDED", body)

    def delete(self, plural: str, namespace: str, name: str, options: Object) -> tuple[int, Object]:
        with self.changed:
            item = self.objects.get((plural, namespace, name))
            if item is None:
                return 404, _status(404, "NotFound", f'{plural} "{name}" not found')
            uid = options.get("preconditions", {}).get("uid")
            if uid is not None and uid != item["metadata"]["uid"]:
                return 409, _status(409, "Conflict", "the UID in the precondition does not match")
            foreground = options.get("propagationPolicy") == "Foreground"
            if foreground and self._dependents(item):
                item["metadata"]["deletionTimestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                item["metadata"]["finalizers"] = ["foregroundDeletion"]
                for kind, dependent in self._dependents(item):
                    dependent["metadata"]["deletionTimestamp"] = item["metadata"]["deletionTimestamp"]
                    self.record(kind, "MODIFIED", dependent)
                return 200, self.record(plural, "MODIFIED", item)
            self.remove(plural, namespace, name)
            return 200, item

    def remove(self, plural: str, namespace: str, name: str) -> None:
        """End an object, and the owners that only waited for it."""
        with self.changed:
            item = self.objects.pop((plural, namespace, name), None)
            if item is None:
                return
            self.record(plural, "DELETED", item)
            for (kind, _, owner), candidate in list(self.objects.items()):
                if candidate["metadata"].get("finalizers") == ["foregroundDeletion"] and not self._dependents(
                    candidate
                ):
                    candidate["metadata"].pop("finalizers")
                    self.remove(kind, namespace, owner)

    def patch(self, plural: str, namespace: str, name: str, change: Object) -> tuple[int, Object]:
        with self.changed:
            item = self.objects.get((plural, namespace, name))
            if item is None:
                return 404, _status(404, "NotFound", f'{plural} "{name}" not found')
            version = change.get("metadata", {}).get("resourceVersion", item["metadata"]["resourceVersion"])
            if version != item["metadata"]["resourceVersion"]:
                return 409, _status(409, "Conflict", "the object has been modified; apply to the latest version")
            spec = json.dumps(item.get("spec"))
            _merge(item, change)
            item["metadata"]["generation"] += json.dumps(item.get("spec")) != spec
            return 200, self.record(plural, "MODIFIED", item)

    def listed(self, plural: str, namespace: str, query: dict[str, str]) -> tuple[int, Object]:
        with self.changed:
            found = [item for (p, n, _), item in self.objects.items() if p == plural and n == namespace]
            items = [json.loads(json.dumps(item)) for item in found if _matches(item, query)]
            return 200, {"kind": "List", "metadata": {"resourceVersion": str(self.version)}, "items": items}

    def compact(self) -> None:
        """Forget the past: a watch from before now is answered 410."""
        with self.changed:
            self.version += 1
            self.compacted = self.version
            self.history.clear()

    def events(self, plural: str, namespace: str, query: dict[str, str], stopped: threading.Event) -> Iterator[Object]:
        since = int(query.get("resourceVersion") or 0)
        end = time.monotonic() + float(query.get("timeoutSeconds") or 60)
        bookmark = time.monotonic() + BOOKMARK_SECONDS
        while time.monotonic() < end and not stopped.is_set():
            with self.changed:
                if since < self.compacted:
                    yield {"type": "ERROR", "object": _status(410, "Expired", "too old resource version")}
                    return
                fresh = [entry for entry in self.history if entry[0] > since]
                at = self.version  # before the wait: a bookmark must not pass what comes in it
                if not fresh:
                    self.changed.wait(0.1)
            for version, kind, what, item in fresh:
                since = version
                if kind == plural and item["metadata"]["namespace"] == namespace and _matches(item, query):
                    yield {"type": what, "object": item}
            if not fresh and time.monotonic() > bookmark:
                since, bookmark = at, time.monotonic() + BOOKMARK_SECONDS
                yield {"type": "BOOKMARK", "object": {"kind": "X", "metadata": {"resourceVersion": str(at)}}}

    def _dependents(self, owner: Object) -> list[tuple[str, Object]]:
        uid = owner["metadata"]["uid"]
        return [
            (plural, item)
            for (plural, _, _), item in self.objects.items()
            if any(ref["uid"] == uid for ref in item["metadata"].get("ownerReferences") or [])
        ]


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: ApiState
    stopped: threading.Event

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/apis":
            groups = [{"name": name, "preferredVersion": {"version": at}} for name, at in self.state.groups.items()]
            self._reply(200, {"groups": groups})
            return
        place, query = self._place()
        if place is None:
            return
        plural, namespace, name, sub = place
        if sub == "log":
            self._log(name, query)
        elif sub == "exec":
            self.state.execute(self, name)
        elif name:
            item = self.state.objects.get((plural, namespace, name))
            self._reply(*((200, item) if item else (404, _status(404, "NotFound", f'{plural} "{name}" not found'))))
        elif query.get("watch"):
            self._stream(
                json.dumps(event).encode() + b"\n"
                for event in self.state.events(plural, namespace, query, self.stopped)
            )
        else:
            self._reply(*self.state.listed(plural, namespace, query))

    def do_POST(self) -> None:
        place, _ = self._place()
        if place is not None:
            self._reply(*self.state.create(place[0], place[1], self._body()))

    def do_DELETE(self) -> None:
        place, _ = self._place()
        if place is not None:
            self._reply(*self.state.delete(*place[:3], self._body()))

    def do_PATCH(self) -> None:
        place, _ = self._place()
        if place is not None:
            self._reply(*self.state.patch(*place[:3], self._body()))

    def _place(self) -> tuple[tuple[str, str, str, str], dict[str, str]] | tuple[None, dict[str, str]]:
        parts = urlsplit(self.path)
        match = _PATH.match(parts.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if match is None or match["plural"] not in _KINDS:
            self._reply(404, _status(404, "NotFound", "the server could not find the requested resource"))
            return None, query
        return (match["plural"], match["namespace"] or "", match["name"] or "", match["sub"] or ""), query

    def _body(self) -> Object:
        length = int(self.headers.get("Content-Length") or 0)
        return json.loads(self.rfile.read(length)) if length else {}

    def _reply(self, status: int, body: Object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, chunks: Iterator[bytes]) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for chunk in chunks:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def _log(self, pod: str, query: dict[str, str]) -> None:
        if pod not in self.state.logs:
            self._reply(404, _status(404, "NotFound", f"container of {pod} has no log"))
            return
        self._stream(self._log_lines(pod, query))

    def _log_lines(self, pod: str, query: dict[str, str]) -> Iterator[bytes]:
        sent = 0
        since = datetime.fromisoformat(query.get("sinceTime", "1970-01-01T00:00:00Z"))
        while not self.stopped.is_set():
            over = pod in self.state.ended_logs
            lines = self.state.logs[pod].splitlines(keepends=True)
            if "tailLines" in query:
                sent = max(sent, len(lines) - int(query["tailLines"]))
            for line in lines[sent:]:
                stamp, _, text = line.partition(" ")
                if datetime.fromisoformat(stamp) >= since:
                    yield (line if query.get("timestamps") else text).encode()
            sent = len(lines)
            if over or not query.get("follow"):
                return
            time.sleep(0.02)


@contextmanager
def api_server() -> Iterator[tuple[str, ApiState]]:
    """URL and state of a running fake."""
    state, stopped = ApiState(), threading.Event()
    handler = type("Requests", (_Requests,), {"state": state, "stopped": stopped})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", state
    finally:
        stopped.set()
        server.shutdown()
        server.server_close()


def no_exec(request: BaseHTTPRequestHandler, pod: str) -> None:
    request.send_error(404, f"pod {pod} runs nothing")


def _matches(item: Object, query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels") or {}
    wanted = [part.split("=") for part in query.get("labelSelector", "").split(",") if part]
    fields = [part.split("=") for part in query.get("fieldSelector", "").split(",") if part]
    return all(labels.get(key) == value for key, value in wanted) and all(
        _field(item, key) == value for key, value in fields
    )


def _field(item: Any, path: str) -> Any:
    for part in path.split("."):
        item = item.get(part, {})
    return item


def _merge(item: Object, change: Object) -> None:
    for key, value in change.items():
        if value is None:
            item.pop(key, None)
        elif isinstance(value, dict) and isinstance(item.get(key), dict):
            _merge(item[key], value)
        else:
            item[key] = value


def _status(code: int, reason: str, message: str) -> Object:
    return {"kind": "Status", "code": code, "reason": reason, "message": message, "status": "Failure"}
