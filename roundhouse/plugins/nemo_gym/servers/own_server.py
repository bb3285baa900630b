"""The process of one of our servers: `python -m roundhouse.plugins.nemo_gym.servers.own_server`.

Two environment variables describe it.

Invariant: it either serves, or ends at once with one line that names the necessary change. On SIGTERM it takes no more
requests, gives the running ones one second, and ends.

A directory of NeMo Gym's with an `app.py` of these two lines starts it as well:

    from roundhouse.plugins.nemo_gym.servers.own_server import main
    main()

Our servers, made from an instance of a resolved configuration.

Invariant: a server needs only the two environment variables that NeMo Gym gives to its children, so that `roundhouse
gym start` and NeMo Gym's command start the same process.

    NEMO_GYM_CONFIG_DICT   the whole resolved configuration, as YAML
    NEMO_GYM_CONFIG_PATH   the name of this process's instance

    python -m roundhouse.plugins.nemo_gym.servers.own_server
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roundhouse.imports import add_import_path, gc_paused

with gc_paused():
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from pydantic import BaseModel, ValidationError
    from starlette.types import ASGIApp

    from roundhouse.errors import ConfigError, RoundhouseError
    from roundhouse.http.asgi import serve
    from roundhouse.plugins.nemo_gym.config.instances import SERVER_TYPES, Instance, ServerType
    from roundhouse.plugins.nemo_gym.config.merging import filled
    from roundhouse.plugins.nemo_gym.server_sections import AgentServerConfig, EnvironmentServerConfig, own_fields

GRACE_SECONDS = 1


def main() -> None:
    """Serve until interrupted."""
    add_import_path(".")  # a configuration may name modules of the directory that it is started in
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
    """Return the server that the two variables describe.

    Raises:
        ConfigError: a variable is missing, or its content does not describe one of our servers.
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
    return OwnServer(name, str(fields["host"]), int(fields["port"]), application(config, name, own))


def instance_fields(config: DictConfig, name: str) -> tuple[ServerType, dict[str, Any]]:
    """Return type and fields of an instance, with interpolations filled.

    Raises:
        ConfigError: the instance is unknown, or an interpolation cannot be filled.
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
    raise ConfigError(f"{name} is not a server: it lacks {', '.join(SERVER_TYPES)}.")


def server_url(config: DictConfig, name: str) -> str:
    """Return the base URL of another instance.

    Raises:
        ConfigError: the name is unknown.
    """
    _, fields = instance_fields(config, name)
    if fields.get("url") and not fields.get("entrypoint"):
        return str(fields["url"]).rstrip("/")
    host = "127.0.0.1" if fields["host"] in ("0.0.0.0", "::") else fields["host"]
    return f"http://{host}:{fields['port']}"


def connection_limit(config: DictConfig) -> int:
    """Return how many connections to one server a process may have: the smaller of NeMo Gym's two limits; 0 for none."""
    return min((int(config[key]) for key in CONNECTION_LIMITS if config.get(key)), default=0)


CONNECTION_LIMITS = ("global_aiohttp_connector_limit", "global_aiohttp_connector_limit_per_host")


def limit_problems(settings: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each connection limit that is not a whole number from 0."""
    return [
        f"{key} is {value!r}; give a whole number of connections, or 0 for no limit."
        for key in CONNECTION_LIMITS
        if (value := settings.get(key)) is not None and (type(value) is not int or value < 0)
    ]


def own_problems(server_type: ServerType, name: str, fields: Mapping[str, Any]) -> list[str]:
    """Return the problems of the fields of one of our servers."""
    if (workers := fields.get("num_workers")) not in (None, 1):
        return [
            f"{name}.num_workers is {workers}; our servers are one process, which holds the sessions. Remove it, and "
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
    """Return the keys of `token_id_capture` that would be ignored. Our model server keeps its records in memory,
    and a run reads them there; the other keys configure NeMo Gym's model server and collector."""
    if block is None:
        return []
    if not isinstance(block, Mapping):
        return [f"token_id_capture is {block!r}; it is a mapping with {', '.join(sorted(_CAPTURE))}."]
    problems = [
        f"token_id_capture.{key} is unknown. Known: {', '.join(sorted(_CAPTURE | _THEIR_CAPTURE))}."
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
    from roundhouse.plugins.programs.model_server.section import ModelServerConfig

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


def application(config: DictConfig, name: str, own: Any) -> ASGIApp:
    """Return the application for a server's validated fields. Each imports only its kind's modules."""
    if isinstance(own, EnvironmentServerConfig):
        from roundhouse.environments import load_to_serve
        from roundhouse.plugins.nemo_gym.servers.resources import build_app

        return build_app(load_to_serve(own.environment), name, expose_tools_over_mcp=own.expose_tools_over_mcp)
    if isinstance(own, AgentServerConfig):
        from roundhouse.plugins.nemo_gym.servers.agent import build_app as build_agent

        capture = filled(config).value.get("token_id_capture") or {}
        return build_agent(
            own,
            name,
            server_url(config, own.resources_server.name),
            server_url(config, own.model_server.name),
            names_calls=bool(config.get("observability_enabled")),
            captures=bool(capture.get("enabled")) and (own.token_id_capture or bool(capture.get("all_agents"))),
            limit=connection_limit(config),
        )
    from roundhouse.plugins.programs.model_server.app import build_app as build_model_server
    from roundhouse.plugins.programs.model_server.engine_client import EngineClient

    return build_model_server(own, name, EngineClient(own, connection_limit(config)))


if __name__ == "__main__":
    main()
