"""A model server over real HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from roundhouse.plugins.programs.model_server import build_app
from roundhouse.plugins.programs.model_server.section import ModelServerConfig
from tests.gym.playground import serving
from tests.plugins.programs.model_server.fake_engine import FakeEngine, engines

Served = Callable[..., httpx.Client]


@pytest.fixture
def served() -> Iterator[Served]:
    """`served(engine, …, field=value)`: a client of a model server in front of the engines."""
    with ExitStack() as stack:

        def start(*fakes: FakeEngine | str, **fields: Any) -> httpx.Client:
            urls = [fake for fake in fakes if isinstance(fake, str)]
            urls += stack.enter_context(engines(*(fake for fake in fakes if not isinstance(fake, str))))
            config = ModelServerConfig(base_url=urls, **{"health_check_seconds": 60} | fields)
            url = stack.enter_context(serving(build_app(config, "m")))
            return stack.enter_context(httpx.Client(base_url=url, timeout=30))

        yield start
