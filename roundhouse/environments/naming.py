"""An environment as a command line names it.

Invariant: what is accepted is what a run's configuration accepts under `environment`, with the same defaults.

    environment_config("sort", '{"digits": 4}')            kind sort, digits 4
    environment_config("my_package.weather:Weather")       kind custom
"""

from __future__ import annotations

import orjson
from pydantic import TypeAdapter, ValidationError

from roundhouse.config.models import EnvironmentConfig
from roundhouse.errors import ConfigError


def environment_config(name: str, parameters: str = "{}") -> EnvironmentConfig:
    """The configuration of a kind of environment, or of `module:Class`, with JSON parameters.

    Raises:
        ConfigError: there is no such kind, or the parameters do not fit.
    """
    try:
        values = orjson.loads(parameters)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"--parameters is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--parameters is {parameters}: give a JSON object.")
    custom = {"kind": "custom", "target": name, "parameters": values}
    try:
        config: EnvironmentConfig = TypeAdapter(EnvironmentConfig).validate_python(
            custom if ":" in name else {"kind": name, **values}
        )
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"--environment {name}: {problems}") from error
    return config
