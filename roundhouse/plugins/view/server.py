"""The viewer over HTTP, for the person at this machine, and an iteration as one file (`export_page`).

Invariants: nothing can be written (only GET is answered). A page of another site cannot read anything
(`roundhouse.http.asgi`; no sharing across origins). Text of a rollout cannot be executed (Content-Security-Policy
allows only our own files, which build the page from text nodes).

The same answers (`Answers`) fill an exported page: the viewer's page with its data inside. It makes no requests. Its
policy allows exactly its script and its style, by their digests, so text of a rollout cannot be executed there either.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import mimetypes
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from roundhouse.errors import RoundhouseError, StoreError
from roundhouse.http.asgi import SameOrigin
from roundhouse.plugins.view.catalog import LARGEST_PAGE, Catalog, Filters, Scope, ViewError
from roundhouse.plugins.view.detail import Details
from roundhouse.plugins.view.index import Index, Indexes

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cache-control": b"no-store",
}
_HOST = "127.0.0.1"
STATIC = importlib.resources.files("roundhouse.plugins.view") / "static"


def create_app(store: str) -> Starlette:
    """The viewer over a store, as an ASGI application."""
    answers = Answers(store)
    routes = [
        Route(f"/api/{name}", _endpoint(answer), methods=["GET"], name=name)
        for name, answer in answers.routes().items()
    ]
    routes += [Route("/", _file, methods=["GET"]), Route("/static/{name}", _file, methods=["GET"])]
    # Names that are used with other methods get 405 from the routes themselves.
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(_Guarded),
            Middleware(SameOrigin, host=_HOST),
            Middleware(GZipMiddleware, minimum_size=4096),
        ],
    )


def serve(store: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Answer on the loopback interface until interrupted.

    Args:
        port: 0 takes a free one.
        on_ready: called with the page's address once it answers.

    Raises:
        ViewError: the port is taken.
    """
    import socket

    import uvicorn

    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((_HOST, port))
        except OSError as error:
            raise ViewError(f"--port {port}: {error.strerror}. Leave it out, and a free port is taken.") from error
        listening.listen(128)
        on_ready(f"http://{_HOST}:{listening.getsockname()[1]}/")
        config = uvicorn.Config(create_app(store), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listening])


def _endpoint(answer: Callable[[Mapping[str, str]], Any]) -> Callable[[Request], Response]:
    def endpoint(request: Request) -> Response:
        try:
            return _json(answer(request.query_params))
        except ViewError as error:
            return _json({"error": str(error)}, 404)
        except StoreError as error:
            return _json({"error": str(error)}, 502)
        except RoundhouseError as error:
            return _json({"error": str(error)}, 400)

    return endpoint


def _json(value: Any, status: int = 200) -> Response:
    # NaN becomes null.
    return Response(orjson.dumps(value), status, media_type="application/json")


def _file(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    known = {entry.name: entry for entry in STATIC.iterdir()}
    if name not in known:
        return Response("no such file", 404, media_type="text/plain")
    return Response(known[name].read_bytes(), media_type=mimetypes.guess_type(name)[0] or "application/octet-stream")


class _Guarded:
    """Puts the headers on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_HEADERS.items()]
            await send(message)

        await self._app(scope, receive, send_guarded)


Parameters = Mapping[str, str]
ANSWERS = (
    "store", "run", "curve", "rollouts", "facets", "rollout", "group", "quarantine", "compare", "replays",
)  # fmt: skip
"""Requests under /api, each a method of `Answers`."""


class Answers:
    """Answers over one store; each takes the parameters of a request."""

    def __init__(self, store: str) -> None:
        self.catalog = Catalog(store)
        self.indexes = Indexes(self.catalog)
        self.details = Details(self.catalog, self.indexes)

    def routes(self) -> dict[str, Callable[[Parameters], Any]]:
        """By name."""
        return {name: getattr(self, name) for name in ANSWERS}

    def store(self, parameters: Parameters) -> dict[str, Any]:
        return {"store": self.catalog.root.uri, "runs": self.catalog.runs()}

    def run(self, parameters: Parameters) -> dict[str, Any]:
        run_id = Scope.of(parameters).run_id
        iterations = self.catalog.iterations(run_id)
        # A large vocabulary takes a moment to load: meanwhile the person looks at the table.
        threading.Thread(target=self.details.decoder, args=(run_id,), daemon=True).start()
        newest, ended = self.catalog.newest_with_rollouts(run_id), self.catalog.ended(run_id)
        return {"run_id": run_id, "iterations": iterations, "newest": newest, "ended": ended}

    def curve(self, parameters: Parameters) -> list[dict[str, Any]]:
        return self.catalog.curve(Scope.of(parameters).run_id)

    def rollouts(self, parameters: Parameters) -> dict[str, Any]:
        scope, filters = Scope.of(parameters), Filters.of(parameters)
        index = self.indexes.at(scope)
        page = index.page(filters) | {"stages": stage_states(index)}
        if text := parameters.get("find"):
            page["position"] = index.position(filters, _number(parameters, "find_iteration"), text)
        return page

    def facets(self, parameters: Parameters) -> dict[str, Any]:
        return self.indexes.at(Scope.of(parameters)).facets(Filters.of(parameters))

    def rollout(self, parameters: Parameters) -> dict[str, Any]:
        iteration = _number(parameters, "rollout_iteration")
        return self.details.rollout(Scope.of(parameters), iteration, parameters.get("rollout", ""))

    def group(self, parameters: Parameters) -> dict[str, Any]:
        group = parameters.get("of", "")
        exact = parameters.get("exact", "1") == "1"
        iteration = _number(parameters, "of_iteration") if "of_iteration" in parameters else None
        rollouts = self.details.group(Scope.of(parameters), group, exact=exact, iteration=iteration)
        return {"group": group, "rollouts": rollouts}

    def quarantine(self, parameters: Parameters) -> dict[str, Any]:
        scope = Scope.of(parameters)
        index = self.indexes.at(scope)
        return {
            "stages": stage_states(index),
            "reasons": index.refused(),
            "failed": index.facets(Filters())["failure_code"],
            "rows": self.details.quarantined(scope),
        }

    def replays(self, parameters: Parameters) -> list[dict[str, Any]]:
        return self.catalog.replays(Scope.of(parameters).run_id)

    def compare(self, parameters: Parameters) -> dict[str, Any]:
        """The tasks that two scopes share, with the mean reward in each."""
        sides = [Scope.of(parameters), Scope.of(parameters, "b_")]
        rows = [{row["task"]: row for row in self.indexes.at(side).groups_compared()} for side in sides]
        shared = []
        for task in rows[0].keys() & rows[1].keys():
            a, b = rows[0][task], rows[1][task]
            delta = None if a["reward"] is None or b["reward"] is None else b["reward"] - a["reward"]
            shared.append({"task": task, "a": a, "b": b, "delta": delta})
        return {
            "tasks": sorted(shared, key=lambda row: (-abs(row["delta"] or 0.0), row["task"])),
            "only_a": len(rows[0].keys() - rows[1].keys()),
            "only_b": len(rows[1].keys() - rows[0].keys()),
        }


def stage_states(index: Index) -> dict[str, str]:
    """Each stage as `complete`, `unfinished` (it has parts) or `absent`; over several iterations, the least of them."""
    states: dict[str, str] = {}
    worst = ("absent", "unfinished", "complete")
    for stage in index.stages:
        state = "complete" if stage.complete else "unfinished" if stage.names else "absent"
        states[stage.stage] = min(states.get(stage.stage, "complete"), state, key=worst.index)
    return states


def _number(parameters: Parameters, name: str) -> int:
    text = parameters.get(name, "")
    if not text.isdecimal():
        raise ViewError(f"{name}={text!r} is not the number of an iteration.")
    return int(text)


MODULES = (
    "dom", "state", "source", "table", "timeline", "filters", "conversation", "group", "tokens", "rollout", "quarantine",
    "compare", "replays", "app",
)  # fmt: skip
"""The page's scripts, each after its imports."""

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([a-z]+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:const|class|function) (\w+))", re.MULTILINE)
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<script type="application/json" id="exported">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def export_page(store: str, scope: Scope, file: Path, largest: int) -> int:
    """Write the page of an iteration and return its size in bytes.

    Args:
        largest: limit on rollouts; of more, the first ones are kept, whole groups in order.

    Raises:
        ViewError: the iteration does not exist or is without rollouts.
    """
    page = render(exported(Answers(store), scope, largest))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.part")
        temporary.write_bytes(page)
        os.replace(temporary, file)
    except OSError as error:
        raise RoundhouseError(f"--export {file}: {error.strerror}.") from error
    return len(page)


def exported(answers: Answers, scope: Scope, largest: int) -> dict[str, Any]:
    """The data of a page: every answer that it may ask for."""
    parameters = {"run": scope.run_id, "iteration": str(scope.iteration), "stage": scope.stage}
    index = answers.indexes.at(scope)
    rows: list[dict[str, Any]] = []
    while len(rows) < min(largest, index.count):
        rows += index.page(Filters(offset=len(rows), limit=min(LARGEST_PAGE, largest - len(rows))))["rows"]
    details = {
        row["rollout_id"]: answers.rollout(
            parameters | {"rollout": row["rollout_id"], "rollout_iteration": str(row["iteration"])}
        )
        for row in rows
    }
    texts = {
        name: orjson.dumps([name, detail["rollout"]["task"], detail["rollout"]["messages"]]).decode().lower()
        for name, detail in details.items()
    }
    runs = [run for run in answers.catalog.runs() if run["run_id"] == scope.run_id]
    return {
        "info": {
            "at": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
            "run": scope.run_id,
            "iteration": scope.iteration,
            "stage": scope.stage,
            "rollouts": len(rows),
            "total": index.count,
        },
        "store": {"store": "", "runs": runs},  # the page leaves this machine; the store's location does not
        "run": {"run_id": scope.run_id, "iterations": [scope.iteration], "newest": scope.iteration, "ended": None},
        "stages": stage_states(index),
        "facets": answers.facets(parameters),
        "rows": rows,
        "rollout": details,
        "text": texts,
        "quarantine": answers.quarantine(parameters),
    }


def render(data: dict[str, Any]) -> bytes:
    """The page with these data inside."""
    style = (STATIC / "style.css").read_text()
    script = "\n".join(bundled(name, (STATIC / f"{name}.js").read_text()) for name in MODULES)
    allowed = f"script-src {_digest(script)}; style-src {_digest(style)}"
    policy = f"default-src 'none'; {allowed}; img-src data:; base-uri 'none'; form-action 'none'"
    info = data["info"]
    title = html.escape(f"{info['run']}, iteration {info['iteration']}")
    # In a script element only "<" could end it or begin a comment; in JSON it can be written otherwise.
    embedded = orjson.dumps(data).decode().replace("<", "\\u003c")
    page = _PAGE.format(policy=policy, title=title, style=style, data=embedded, script=script)
    return page.encode()


def bundled(name: str, module: str) -> str:
    """Return a module as part of one script: a function that is called at once and returns the module's exports.

    Example: `import { h } from "./dom.js"; export const x = h;` becomes `const $t = (() => { const { h } = $dom; const
    x = h; return { x }; })();`
    """
    names = ", ".join(match[2] for match in _EXPORT.finditer(module))
    inner = _EXPORT.sub(r"\1", _IMPORT.sub(r"const \1 = $\2;", module))
    return f"const ${name} = (() => {{\n{inner}\nreturn {{ {names} }};\n}})();"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
