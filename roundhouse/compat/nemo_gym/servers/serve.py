"""The command that serves one environment: `python -m roundhouse.compat.nemo_gym.servers.resources`.

Invariant: it either serves, or ends at once with one line that says what to change.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import uvicorn

from roundhouse.compat.nemo_gym.servers.resources import build_app
from roundhouse.environments import load_any
from roundhouse.environments.naming import environment_config
from roundhouse.errors import RoundhouseError
from roundhouse.http.same_origin import SameOrigin
from roundhouse.observability import set_up_observability

KEEP_ALIVE_SECONDS = 30
"""As NeMo Gym's servers: longer than its clients keep an idle connection (15 s)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted."""
    options = _parser().parse_args(arguments)
    try:
        environment = load_any(environment_config(options.environment, options.parameters))
        app = build_app(environment, options.name, expose_tools_over_mcp=options.mcp)
        registry = set_up_observability()
    except RoundhouseError as error:
        sys.exit(f"resources server: {error}")
    served: Any = app
    if registry is not None:
        from roundhouse.http.request_metrics import MeasuredRequests

        served = MeasuredRequests(app, registry)
    uvicorn.run(
        SameOrigin(served, options.host),
        host=options.host,
        port=options.port,
        log_level=options.log_level,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m roundhouse.compat.nemo_gym.servers.resources", description=main.__doc__
    )
    parser.add_argument("--environment", required=True, help="a built-in kind (docs/environments.md), or module:Class")
    parser.add_argument("--parameters", default="{}", help="the environment's parameters as a JSON object")
    parser.add_argument("--name", help="instance name (default: the environment's); part of the cookie's name")
    parser.add_argument("--mcp", action="store_true", help="serve the tools over MCP as well, at /mcp")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    return parser
