"""A model directory is loaded without its code, without a question and without a progress bar."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, CLIPTextConfig
from transformers.utils import logging

from roundhouse.errors import ConfigError
from roundhouse.generation.chat import ChatCodec
from roundhouse.pretrained import build_model, load_pretrained
from tests.training.tiny import make_model


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model directory with a file that leaves a mark when executed, and a user who would answer yes."""
    monkeypatch.setattr("builtins.input", lambda question="": "y")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\nclass Code: ...\n")
    own = {"AutoConfig": "evil.Code", "AutoModelForCausalLM": "evil.Code", "AutoTokenizer": ["evil.Code", None]}
    config = {"model_type": "own", "architectures": ["Own"], "auto_map": own}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": own}))
    return tmp_path


@pytest.mark.parametrize("kind", [AutoConfig, AutoTokenizer, AutoModelForCausalLM], ids=lambda kind: kind.__name__)
def test_a_directory_with_code_of_its_own_is_refused(directory: Path, kind: type) -> None:
    with pytest.raises(ConfigError, match="its own code"):
        load_pretrained(kind, directory)
    assert not (directory / "executed").exists()


def test_a_model_with_code_of_its_own_is_not_built(directory: Path) -> None:
    shape = CLIPTextConfig(name_or_path=str(directory), auto_map={"AutoModelForCausalLM": "evil.Code"})
    with pytest.raises(ConfigError, match="its own code"):
        build_model(shape)
    assert not (directory / "executed").exists()


def test_an_engine_refuses_such_a_tokenizer(directory: Path) -> None:
    with pytest.raises(ConfigError, match="its own code"):
        ChatCodec(str(directory), 64)
    assert not (directory / "executed").exists()


def test_a_model_is_loaded_without_a_progress_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = make_model(tmp_path / "model")
    shown = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        capfd.readouterr()
        load_pretrained(AutoModelForCausalLM, directory)
        assert capfd.readouterr().err == ""
        assert logging.is_progress_bar_enabled(), "other programs in the process keep their bars"
    finally:
        if not shown:
            logging.disable_progress_bar()
