"""A request to SGLang names every parameter that shapes the distribution, since the server fills in the others."""

from __future__ import annotations

import pytest

from roundhouse.plugins.sglang.engine import SGLangEngine
from tests.generation.test_foreign_requests import names_every_parameter


@pytest.mark.parametrize("top_k", [None, 7])
async def test_every_parameter_that_shapes_the_distribution_is_named(top_k: int | None) -> None:
    await names_every_parameter(SGLangEngine, top_k, least_tokens="min_new_tokens")
