"""`train.service` of kind tinker sets how the service is reached."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from roundhouse.plugins.tinker import service as tinker
from roundhouse.plugins.tinker.service import TinkerPointer, TinkerTrainService
from tests.training.test_every_trainer_key import opened


@pytest.mark.parametrize(
    ("key", "value", "handed", "expected"),
    [
        ("lora_rank", 7, "start", TinkerPointer(base_model="m", lora_rank=7)),
        ("base_model", "other", "start", TinkerPointer(base_model="other")),
        ("url", "http://there:1", "base_url", "http://there:1"),
        ("token_variable", "OTHER_TOKEN", "api_key", "of-the-other-variable"),
        ("token_file", "token.txt", "api_key", "of-the-file"),
        ("timeout_seconds", 77.0, "timeout_seconds", 77.0),
    ],
)
def test_tinker_is_reached_as_its_section_says(
    key: str, value: Any, handed: str, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token.txt").write_text("of-the-file\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTHER_TOKEN", "of-the-other-variable")
    monkeypatch.setenv("TINKER_API_KEY", "usual")
    made = mock.Mock()
    monkeypatch.setattr(tinker, "TinkerTrainService", made)
    opened({"kind": "tinker", "base_model": "m", key: value})
    [call] = made.mock_calls
    assert inspect.signature(TinkerTrainService).bind(*call.args, **call.kwargs).arguments[handed] == expected
