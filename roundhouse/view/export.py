"""One iteration as one file: the viewer's own page with its data inside, for a mail, an issue or an archive.

Invariant: the file asks nobody for anything. Its policy allows exactly the script and the style that are in it, by their
digests, so that no text of a rollout can run there either.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
from pathlib import Path
from typing import Any

import orjson

from roundhouse.errors import RoundhouseError
from roundhouse.view.answers import Answers, stages_told
from roundhouse.view.scope import LARGEST_PAGE, Filters, Scope
from roundhouse.view.server import STATIC

MODULES = (
    "dom", "state", "source", "table", "timeline", "filters", "conversation", "group", "tokens", "rollout", "quarantine",
    "compare", "app",
)  # fmt: skip
"""The page's scripts, each after those that it imports."""

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
    """Write the page of an iteration; its size in bytes.

    Args:
        largest: at most so many rollouts; of more, the first ones, whole groups in order.

    Raises:
        ViewError: there is no such iteration, or no rollout in it.
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
        name: orjson.dumps([name, found["rollout"]["task"], found["rollout"]["messages"]]).decode().lower()
        for name, found in details.items()
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
        "store": {"store": "", "runs": runs},  # the page leaves this machine; where the store lies does not
        "run": {"run_id": scope.run_id, "iterations": [scope.iteration]},
        "stages": stages_told(index),
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
    title = _harmless(f"{info['run']}, iteration {info['iteration']}")
    # In a script element only "<" could end it or begin a comment; in JSON it can be written otherwise.
    embedded = orjson.dumps(data).decode().replace("<", "\\u003c")
    page = _PAGE.format(policy=policy, title=title, style=style, data=embedded, script=script)
    return page.encode()


def bundled(name: str, module: str) -> str:
    """A module as a part of one script: a function that is called at once and gives what the module exports.

    Example: `import { h } from "./dom.js"; export const x = h;` becomes `const $t = (() => { const { h } = $dom; const x = h;
    return { x }; })();`
    """
    given = ", ".join(match[2] for match in _EXPORT.finditer(module))
    inner = _EXPORT.sub(r"\1", _IMPORT.sub(r"const \1 = $\2;", module))
    return f"const ${name} = (() => {{\n{inner}\nreturn {{ {given} }};\n}})();"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _harmless(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
