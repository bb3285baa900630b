"""The bearer token of a train service.

Invariant: a token never stands in a configuration or on a command line, only its place: an environment variable or a file.
"""

from __future__ import annotations

import os
from pathlib import Path

from roundhouse.errors import ConfigError


def read_token(variable: str, file: str | None) -> str | None:
    """The token from a file or else the environment; None when there is none.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """
    if file is None:
        return os.environ.get(variable) or None
    try:
        token = Path(file).read_text().strip()
    except OSError as error:
        raise ConfigError(f"The token file {file} cannot be read: {error}") from error
    if not token:
        raise ConfigError(f"The token file {file} is empty.")
    return token
