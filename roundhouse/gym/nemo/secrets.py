"""What of a configuration must not be shown.

Invariant: masking never changes the shape of a tree, and masks by the name of a key, not by guessing at values: a value under
a key that speaks of keys, tokens, passwords, secrets or credentials is replaced, whatever it is; so is the user part of a URL.
Counts and switches (`max_output_tokens: 64`, `return_token_id_information: true`) stay.
"""

from __future__ import annotations

import re
from typing import Any

MASK = "****"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# fmt: off
_SECRET_WORDS = frozenset((
    "key", "keys", "apikey", "token", "tokens", "secret", "secrets", "password", "passwd", "passphrase", "credential",
    "credentials", "authorization", "cookie",
))
# fmt: on
_URL_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def masked(node: Any, key: str = "") -> Any:
    """A copy of a tree of plain containers with its secrets replaced. All of a mapping `secrets` or `api_keys` is secret."""
    if isinstance(node, dict):
        whole = _words(key)[-1:] and _words(key)[-1] in _SECRET_WORDS
        return {name: masked(child, key if whole else str(name)) for name, child in node.items()}
    if isinstance(node, list):
        return [masked(child, key) for child in node]
    if _is_secret(_words(key), node):
        return MASK
    return _URL_USER.sub(MASK, node) if isinstance(node, str) else node


def _words(key: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(key)]


def _is_secret(words: list[str], value: Any) -> bool:
    if not words or isinstance(value, bool) or value in (None, "", "???"):
        return False
    if isinstance(value, str):
        return not _SECRET_WORDS.isdisjoint(words)
    return words[-1] in _SECRET_WORDS and words[-1] != "tokens"
