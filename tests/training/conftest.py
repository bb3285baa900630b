from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.tiny import make_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def reference_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("reference"), seed=1)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
