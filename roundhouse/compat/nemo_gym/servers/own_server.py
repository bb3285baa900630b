"""The process of one of our servers: `python -m roundhouse.compat.nemo_gym.servers.own_server`.

It is described by two environment variables.

Invariant: it either serves, or ends at once with one line that says what to change. On SIGTERM it stops taking requests, gives
those in flight one second, and ends.

A directory of NeMo Gym's with an `app.py` of these two lines starts it as well:

    from roundhouse.compat.nemo_gym.servers.own_server import main
    main()

Our own servers, made from an instance of a resolved configuration.

Invariant: what a server needs is in the two environment variables that NeMo Gym gives to its children, and nowhere else; so the
same process can be started by `roundhouse gym start` and by NeMo Gym's own command.

    NEMO_GYM_CONFIG_DICT   the whole resolved configuration, as YAML
    NEMO_GYM_CONFIG_PATH   the name of the instance that this process is

    python -m roundhouse.compat.nemo_gym.servers.own_server
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roundhouse.imports import gc_paused

with gc_paused():
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from pydantic import BaseModel, ValidationError
    from starlette.types import ASGIApp

    from roundhouse.compat.nemo_gym.config.instances import SERVER_TYPES, Instance, ServerType
    from roundhouse.compat.nemo_gym.config.merging import filled
    from roundhouse.compat.nemo_gym.servers.endpoints import serve
    from roundhouse.config.gym_servers import AgentServerConfig, EnvironmentServerConfig, own_fields
    from roundhouse.errors import ConfigError, RoundhouseError

GRACE_SECONDS = 1


def main() -> None:
    """Serve until interrupted."""
    try:
        server = own_server(os.environ)
    except RoundhouseError as error:
        sys.exit(f"roundhouse server: {error}")
    serve(server.app, server.host, server.port, timeout_graceful_shutdown=GRACE_SECONDS, backlog=4096)


CONFIG_DICT, CONFIG_PATH = "NEMO_GYM_CONFIG_DICT", "NEMO_GYM_CONFIG_PATH"


@dataclass(frozen=True, slots=True)
class OwnServer:
    """One instance, ready to be served."""

    name: str
    host: str
    port: int
    app: ASGIApp


def own_server(environ: Mapping[str, str]) -> OwnServer:
    """The server that the two variables describe.

    Raises:
        ConfigError: a variable is missing, or what it holds describes no server of ours.
    """
    for variable in (CONFIG_DICT, CONFIG_PATH):
        if not environ.get(variable):
            raise ConfigError(f"{variable} is not set. Start the server with `roundhouse gym start`.")
    try:
        config: Any = OmegaConf.create(environ[CONFIG_DICT])
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{CONFIG_DICT} holds no configuration: {error}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{CONFIG_DICT} holds no mapping.")
    name = environ[CONFIG_PATH]
    server_type, fields = instance_fields(config, name)
    own = _validated(_models()[server_type], name, fields)
    return OwnServer(name, str(fields["host"]), int(fields["port"]), _app(config, name, own))


def instance_fields(config: DictConfig, name: str) -> tuple[ServerType, dict[str, Any]]:
    """Type and fields of an instance, interpolations filled.

    Raises:
        ConfigError: there is no such instance, or an interpolation of it cannot be filled.
    """
    if name not in config:
        raise ConfigError(f"The configuration has no instance {name!r}.")
    reading = filled(config, (name,))
    if reading.unfilled:
        raise ConfigError("; ".join(f"{'.'.join(path)}: {reason}" for path, reason in reading.unfilled.items()))
    for server_type in SERVER_TYPES:
        block = reading.value.get(server_type) if isinstance(reading.value, dict) else None
        if isinstance(block, dict) and block:
            return server_type, dict(next(iter(block.values())))
    raise ConfigError(f"{name} is no server: it has none of {', '.join(SERVER_TYPES)}.")


def server_url(config: DictConfig, name: str) -> str:
    """Base URL of another instance.

    Raises:
        ConfigError: there is none of that name.
    """
    _, fields = instance_fields(config, name)
    if fields.get("url") and not fields.get("entrypoint"):
        return str(fields["url"]).rstrip("/")
    host = "127.0.0.1" if fields["host"] in ("0.0.0.0", "::") else fields["host"]
    return f"http://{host}:{fields['port']}"


def own_problems(server_type: ServerType, name: str, fields: Mapping[str, Any]) -> list[str]:
    """What is wrong with the fields of a server of ours."""
    if (workers := fields.get("num_workers")) not in (None, 1):
        return [
            f"{name}.num_workers is {workers}; a server of ours is one process, which holds its sessions. Remove it, and "
            "configure several instances where one is too slow."
        ]
    try:
        _validated(_models()[server_type], name, dict(fields))
    except ConfigError as error:
        return [str(error)]
    return []


_CAPTURE = frozenset({"enabled", "all_agents"})
_THEIR_CAPTURE = frozenset(
    {"dir", "sink", "sink_kwargs", "rebuild_response", "max_mask_fraction", "mask_fraction_min_samples"}
)


def capture_problems(block: Any, instances: Sequence[Instance]) -> list[str]:
    """What of the configuration's `token_id_capture` would have no effect. Our model server keeps its records in memory, and a
    run reads them there; where records go, and what is made of them, is said to NeMo Gym's model server and collector."""
    if block is None:
        return []
    if not isinstance(block, Mapping):
        return [f"token_id_capture is {block!r}; it is a mapping with {', '.join(sorted(_CAPTURE))}."]
    problems = [
        f"token_id_capture.{key} is not known; there are {', '.join(sorted(_CAPTURE | _THEIR_CAPTURE))}."
        for key in block.keys() - _CAPTURE - _THEIR_CAPTURE
    ]
    ours = [one.name for one in instances if one.kind == "own" and one.type == "responses_api_models"]
    if ours:
        problems += [
            f"token_id_capture.{key} is {block[key]!r}, which {ours[0]} (roundhouse_model) does not follow: its records are in "
            "its memory, bounded by its capture_max_*, and a run reads them by environment.tokens captured. Remove the key."
            for key in _THEIR_CAPTURE
            if block.get(key) is not None
        ]
    return sorted(problems)


def _models() -> dict[ServerType, type[BaseModel]]:
    from roundhouse.config.gym_servers import ModelServerConfig

    return {
        "resources_servers": EnvironmentServerConfig,
        "responses_api_agents": AgentServerConfig,
        "responses_api_models": ModelServerConfig,
    }


def _validated(model: type[BaseModel], name: str, fields: dict[str, Any]) -> Any:
    try:
        return model.model_validate(own_fields(fields))
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_input=False))
        raise ConfigError(f"{name}: {'; '.join(problems)}.") from error


def _app(config: DictConfig, name: str, own: Any) -> ASGIApp:
    """The application of a server's validated fields. Each imports what its own kind needs."""
    if isinstance(own, EnvironmentServerConfig):
        from roundhouse.compat.nemo_gym.servers.resources import build_app
        from roundhouse.environments import load_to_serve

        return build_app(load_to_serve(own.environment), name, expose_tools_over_mcp=own.expose_tools_over_mcp)
    if isinstance(own, AgentServerConfig):
        from roundhouse.compat.nemo_gym.servers.agent import build_app as build_agent

        capture = filled(config).value.get("token_id_capture") or {}
        return build_agent(
            own,
            name,
            server_url(config, own.resources_server.name),
            server_url(config, own.model_server.name),
            names_calls=bool(config.get("observability_enabled")),
            captures=bool(capture.get("enabled")) and (own.token_id_capture or bool(capture.get("all_agents"))),
        )
    from roundhouse.compat.nemo_gym.model_server import build_app as build_model_server

    return build_model_server(own, name)


if __name__ == "__main__":
    main()
