"""One Prefect server with served deployments for all tests here: it takes longer to start than most of them to run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.flows.served import CHROMIUM, PAGE_SECONDS, Served, serving

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP evil.example 127.0.0.1",
]


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture
def prefect_client(served: Served) -> Iterator[Served]:
    """Prefect's client in this process talks to the server."""
    with served.at_prefect():
        yield served


@pytest.fixture
def page() -> Iterator[Any]:
    """Page of a browser that resolves evil.example to this machine."""
    if not CHROMIUM.exists():
        pytest.skip("needs chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1280, "height": 2600})
        page.set_default_timeout(PAGE_SECONDS)
        yield page
        browser.close()
