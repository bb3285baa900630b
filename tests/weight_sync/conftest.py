"""The fixtures of the tests of weight transports."""

from __future__ import annotations

from tests.weight_sync.publishing import cache, store, versions

__all__ = ["cache", "store", "versions"]
