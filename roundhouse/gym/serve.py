"""The command that serves one environment: `python -m roundhouse.gym.resources_server`.

Invariant: it either serves, or ends at once with one line that says what to change.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import uvicorn
from pydantic import TypeAdapter, ValidationError

from roundhouse.config.models import EnvironmentConfig
from roundhouse.errors import ConfigError, RoundhouseError
from roundhouse.gym.environment import Environment
from roundhouse.gym.environments import load
from roundhouse.gym.resources_server import build_app

KEEP_ALIVE_SECONDS = 30
"""As NeMo Gym's servers: longer than its clients keep an idle connection (15 s)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted."""
    options = _parser().parse_args(arguments)
    try:
        app = build_app(environment_named(options.environment, options.parameters), options.name)
    except RoundhouseError as error:
        sys.exit(f"resources server: {error}")
    uvicorn.run(
        app,
        host=options.host,
        port=options.port,
        log_level=options.log_level,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )


def environment_named(name: str, parameters: str = "{}") -> Environment:
    """The environment of a kind (calculator, sort, guess_number) or of `module:Class`, with JSON parameters.

    Raises:
        ConfigError: there is no such environment, or its parameters do not fit.
    """
    try:
        values = json.loads(parameters)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--parameters is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--parameters is {parameters}: give a JSON object.")
    tree: dict[str, Any] = {"kind": name, **values}
    if ":" in name:
        tree = {"kind": "custom", "target": name, "parameters": values}
    try:
        config: EnvironmentConfig = TypeAdapter(EnvironmentConfig).validate_python(tree)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"--environment {name}: {problems}") from error
    return load(config)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m roundhouse.gym.resources_server", description=main.__doc__)
    parser.add_argument("--environment", required=True, help="calculator, sort, guess_number, or module:Class")
    parser.add_argument("--parameters", default="{}", help="the environment's parameters as a JSON object")
    parser.add_argument("--name", help="instance name (default: the environment's); part of the cookie's name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    return parser
