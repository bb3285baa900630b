"""JSON from other programs, in which each key of an object is given once.

read_json('{"reward": 0.0, "reward": 1.0}')     DuplicateKey: the key 'reward' is given twice
"""

from __future__ import annotations

import json
from typing import Any

import orjson


class DuplicateKey(ValueError):
    """An object gives a key twice, and one value would replace the other."""


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        orjson.JSONDecodeError: it is not JSON.
        DuplicateKey: an object has a key twice.
    """
    value = orjson.loads(text)
    try:
        _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise DuplicateKey("it is nested too deeply to look for keys that are given twice") from None
    return value


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> None:
    keys = set[str]()
    for key, _ in pairs:
        if key in keys:
            raise DuplicateKey(f"the key {key[:100]!r} is given twice")
        keys.add(key)


_DECODER = json.JSONDecoder(object_pairs_hook=_refuse_repeated)
