"""Python values as the overrides that configurations take."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from roundhouse.errors import ConfigError


def override_texts(overrides: Mapping[str, Any]) -> list[str]:
    """Return `key.path=value` of each override. A mapping takes the place of a whole section.

    >>> override_texts({"iterations": 3, "environment": {"kind": "sort"}})
    ['iterations=3', 'environment={"kind": "sort"}']

    Raises:
        ConfigError: a value that a configuration cannot hold.
    """
    return [f"{key}={_text(key, value)}" for key, value in overrides.items()]


def _text(key: str, value: Any) -> str:
    try:
        return json.dumps(os.fspath(value) if isinstance(value, os.PathLike) else value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key} is {value!r}, which a configuration cannot hold ({error}). Give numbers, texts, lists or mappings; "
            'name code by its place: "file.py:Class".'
        ) from None
