"""One Prefect server with served deployments for all tests here: it takes longer to start than most of them to run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.flows.served import Served, serving


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture
def prefect_client(served: Served) -> Iterator[Served]:
    """Prefect's client in this process talks to the server."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: f"{served.services.prefect_ui_url}/api"}):
        yield served
