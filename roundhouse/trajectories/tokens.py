"""Digests and seeds over token IDs: small pure functions that writers and checkers share."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def digest_tokens(token_ids: Sequence[int]) -> str:
    """First 16 hex digits of SHA-256 over the IDs as little-endian int32."""
    data = array("i", token_ids)
    return hashlib.sha256(data.tobytes()).hexdigest()[:16]


class GrowingDigest:
    """`digest_tokens` of a sequence that only grows, at the cost of what is new."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def extend(self, token_ids: Sequence[int]) -> str:
        """Append; the digest of everything so far.

        Raises:
            TypeError, OverflowError: they are no token IDs.
        """
        self._hash.update(array("i", token_ids).tobytes())
        return self._hash.hexdigest()[:16]


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**31) from named parts, e.g. (run seed, iteration, group, sample, turn).

    The same parts give the same seed on every machine; different parts give unrelated ones.
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") & 0x7FFFFFFF
