"""One Prefect server and one engine for all real runs here: they take longer to start than most runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.asynchrony.place import Place, opened


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with opened(tmp_path_factory.mktemp("overlapped")) as place:
        yield place
