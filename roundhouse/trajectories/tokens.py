"""Digests and seeds over token IDs: small pure functions that writers and checkers share."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def digest_tokens(token_ids: Sequence[int]) -> str:
    """First 16 hex digits of SHA-256 over the IDs as little-endian int32."""
    data = array("i", token_ids)
    return hashlib.sha256(data.tobytes()).hexdigest()[:16]


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**31) from named parts, e.g. (run seed, iteration, group, sample, turn).

    The same parts give the same seed on every machine; different parts give unrelated ones.
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") & 0x7FFFFFFF
