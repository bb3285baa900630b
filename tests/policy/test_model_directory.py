import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from roundhouse.config.models import WarmStartPolicy
from roundhouse.environments import Sort
from roundhouse.errors import ConfigError
from roundhouse.policy.model_directory import check_model_directory
from roundhouse.policy.warm_start import make_starting_policy


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("policies") / "whole"
    make_starting_policy(WarmStartPolicy(steps=1, batch_size=2), Sort(digits=3), 0, directory)
    return directory


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    directory = tmp_path / "model"
    directory.mkdir()
    for file in whole.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def refused(directory: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model_directory(directory)
    assert str(directory) in str(caught.value)
    return str(caught.value)


def test_a_made_policy_is_accepted(model: Path) -> None:
    check_model_directory(model)
    check_model_directory(str(model))


def test_no_directory_or_a_file_in_its_place_is_refused_with_the_way_out(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "policy.kind to warm_start" in refused(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "is a file" in refused(tmp_path / "file")


def test_a_model_that_sees_needs_its_text_configuration_and_its_processor(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vision_config": {"depth": 2}}))
    assert "config.json has vision_config and no text_config" in refused(model)
    with_towers = {"model_type": "gemma3", "vision_config": {"depth": 2}, "text_config": config}
    (model / "config.json").write_text(json.dumps(with_towers))
    assert "preprocessor_config.json is missing" in refused(model)
    (model / "preprocessor_config.json").write_text("{}")
    check_model_directory(model)
    with pytest.raises(ConfigError, match=r"max_model_len is 1000000, .* positions"):
        check_model_directory(model, 1_000_000)


def with_settings(directory: Path, **settings: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | settings))


@pytest.mark.parametrize(
    ("tied", "head", "refusal"),
    [
        (True, "same", None),
        (True, None, None),
        (
            True,
            "other",
            "has tie_word_embeddings true, but the weights have lm_head.weight, unlike model.embed_tokens.weight",
        ),
        (False, "other", None),
        (False, None, "has tie_word_embeddings false, but the weights have no output head"),
    ],
)
def test_an_output_head_that_config_json_does_not_describe_is_refused(
    model: Path, tied: bool, head: str | None, refusal: str | None
) -> None:
    tensors = load_file(model / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors.pop("lm_head.weight", None)
    if head is not None:
        tensors["lm_head.weight"] = embedding.clone() if head == "same" else embedding + 1
    save_file(tensors, model / "model.safetensors")
    with_settings(model, tie_word_embeddings=tied)
    if refusal is None:
        check_model_directory(model)
    else:
        assert refusal in refused(model)


@pytest.mark.parametrize(
    ("settings", "positions"),
    [
        ({"max_position_embeddings": 32}, 32),
        ({"max_position_embeddings": 32, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 32),
        ({"max_position_embeddings": 32, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 128),
        ({"max_position_embeddings": 32, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 64),
    ],
)
def test_a_context_beyond_the_models_positions_is_refused_with_both_numbers(
    model: Path, settings: dict[str, Any], positions: int
) -> None:
    with_settings(model, rope_scaling=None, rope_parameters=None)
    with_settings(model, **settings)
    check_model_directory(model, positions)
    with pytest.raises(
        ConfigError, match=rf"max_model_len is 256, .* has {positions} positions .* to {positions} or less"
    ):
        check_model_directory(model, 256)


def test_a_token_without_an_embedding_is_refused_while_spare_embeddings_are_not(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    highest = max(*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"]))
    for rows in (highest + 1, highest + 64):
        with_settings(model, vocab_size=rows)
        check_model_directory(model)
    with_settings(model, vocab_size=highest)
    assert f"tokenizer.json has token {highest}, but the model has {highest} embeddings" in refused(model)
    with_settings(model, vocab_size=highest + 1)
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": highest + 1, "content": "<one more>"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "resize_token_embeddings" in refused(model)


@pytest.mark.parametrize("ends", [99_999, [0, 99_999]])
def test_an_end_of_turn_that_the_tokenizer_lacks_is_refused(model: Path, ends: int | list[int]) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
    check_model_directory(model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert "generation_config.json has eos_token_id 99999, which the tokenizer lacks" in refused(model)


def test_missing_weights_are_named(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "has no safetensors files" in refused(model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named(model: Path, name: str) -> None:
    (model / name).unlink()
    assert f"{name} is missing" in refused(model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_file_cut_short_is_named(model: Path, name: str) -> None:
    content = (model / name).read_text()
    (model / name).write_text(content[: len(content) // 2])
    assert f"{name} cannot be read as JSON" in refused(model)


def test_weights_cut_short_are_noticed_by_a_single_byte(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "its header allows" in refused(model)


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"\xff" * 64, b"version https://git-lfs.github.com/spec/v1\noid sha256:0"]
)
def test_weights_that_are_no_safetensors_are_refused(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    assert "model.safetensors is not a safetensors file" in refused(model)


def test_a_shard_that_the_index_lists_must_be_there(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "lacks model-00002-of-00002.safetensors, which its index names" in refused(model)


def test_a_tokenizer_without_chat_template_is_refused(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    assert "no chat_template" in refused(model)


def test_a_configuration_of_no_model_is_refused(model: Path) -> None:
    (model / "config.json").write_text("{}")
    assert "no model_type" in refused(model)
    (model / "config.json").write_text("[]")
    assert "no JSON object" in refused(model)
