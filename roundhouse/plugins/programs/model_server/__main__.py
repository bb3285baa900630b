"""The command that serves a model server alone: `python -m roundhouse.plugins.programs.model_server --base-url URL`.

Invariant: it serves, or ends at once with one line that names the remedy. Secrets come from the environment, so process
lists do not show them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from roundhouse.config.secrets import read_secret
from roundhouse.errors import ConfigError
from roundhouse.http.asgi import serve
from roundhouse.plugins.programs.model_server import build_app
from roundhouse.plugins.programs.model_server.section import ModelServerConfig

API_KEY_VARIABLE = "ROUNDHOUSE_ENGINE_API_KEY"
CAPTURE_TOKEN_VARIABLE = "ROUNDHOUSE_CAPTURE_TOKEN"


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m roundhouse.plugins.programs.model_server",
        description=main.__doc__,
        epilog=f"Secrets: {API_KEY_VARIABLE} (to the engines), {CAPTURE_TOKEN_VARIABLE} (from readers of /captures).",
    )
    parser.add_argument("--base-url", action="append", required=True, help="an engine; repeat for several")
    parser.add_argument("--model", default="policy", help="the model's name at the engines")
    parser.add_argument("--name", default="policy_model", help="instance name; part of the cookie's name")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of ModelServerConfig"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    options = parser.parse_args(arguments)
    try:
        config = configuration(options.base_url, options.model, options.set)
    except (ValueError, ConfigError) as error:
        sys.exit(f"model server: {error}")
    app = build_app(config, options.name)
    serve(app, options.host, options.port, log_level=options.log_level, proxy_headers=False)


def configuration(base_urls: Sequence[str], model: str, settings: Sequence[str]) -> ModelServerConfig:
    """Return the configuration of the command line.

    Args:
        settings: `field=value`, the value as JSON or as plain text.

    Raises:
        ValueError: names the field and the fault.
    """
    tree: dict[str, Any] = {"base_url": list(base_urls), "model": model}
    secrets = {"api_key": API_KEY_VARIABLE, "capture_token": CAPTURE_TOKEN_VARIABLE}
    tree |= {key: secret for key, variable in secrets.items() if (secret := read_secret(variable)) is not None}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise ValueError(f"--set {key}: write field=value")
        if key in secrets:
            raise ValueError(
                f"--set {key}=… would be seen in every list of processes: set {secrets[key]}, or {secrets[key]}_FILE"
            )
        try:
            tree[key] = json.loads(value)
        except json.JSONDecodeError:
            tree[key] = value
    try:
        return ModelServerConfig.model_validate(tree)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_input=False))
        raise ValueError("; ".join(problems)) from None


if __name__ == "__main__":
    main()
