"""Weights are whole before an engine sees them."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from roundhouse.errors import DataError, StoreError
from roundhouse.generation import served_policy, transformers_engine
from roundhouse.weight_sync.cache import NodeCache, node_cache
from roundhouse.weight_sync.checkpoint_files import fetch_checkpoint
from roundhouse.weight_sync.tensor_files import digest_of, weight_files
from tests.generation import tiny


def fetch(uri: str, directory: Path | None = None) -> Path:
    found, _ = fetch_checkpoint(uri, node_cache(10**9) if directory is None else NodeCache(directory, 10**9))
    return found


@pytest.fixture(scope="module")
def bucket(s3_server: str) -> str:
    import s3fs

    s3fs.S3FileSystem(client_kwargs={"endpoint_url": s3_server}).call_s3("create_bucket", Bucket="weights")
    return "s3://weights"


def upload(source: Path, uri: str, s3_server: str) -> None:
    import s3fs

    filesystem = s3fs.S3FileSystem(client_kwargs={"endpoint_url": s3_server})
    for file in source.iterdir():
        filesystem.put_file(str(file), f"{uri}/{file.name}")


def test_weights_come_from_an_object_store_once_a_node(policies, bucket, s3_server, tmp_path):
    upload(policies["first"], f"{bucket}/000001", s3_server)
    fetched = fetch(f"{bucket}/000001", tmp_path)
    assert digest_of(fetched) == digest_of(policies["first"])
    stamp = (fetched / "model.safetensors").stat().st_mtime_ns
    assert fetch(f"{bucket}/000001", tmp_path) == fetched
    assert (fetched / "model.safetensors").stat().st_mtime_ns == stamp


def test_an_empty_prefix_is_refused_by_name(bucket, tmp_path):
    with pytest.raises((DataError, FileNotFoundError), match="nothing-here"):
        fetch(f"{bucket}/nothing-here", tmp_path)


@pytest.mark.parametrize("name", ["first", "untied"])
def test_the_expected_tensors_are_those_of_the_checkpoint(policies, name):
    assert served_policy.expected_shapes(policies[name]) == served_policy.tensor_shapes(policies[name])


def test_experts_are_expected_one_by_one_as_files_have_them(tmp_path):
    model = tiny.make_moe_model(tmp_path, seed=1)
    expected = served_policy.expected_shapes(model)
    assert expected == served_policy.tensor_shapes(model)
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in expected


def test_an_index_that_names_a_missing_file_is_refused(policies, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001.safetensors"}}')
    with pytest.raises(DataError, match="model-00001"):
        weight_files(tmp_path)


def test_a_digest_changes_with_the_weights(policies):
    assert digest_of(policies["first"]) != digest_of(policies["second"])
    assert digest_of(policies["first"]) == digest_of(policies["first"])


def test_an_index_cannot_name_files_outside_of_its_directory(tmp_path):
    (tmp_path / "other.safetensors").write_bytes(b"x")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    with pytest.raises(DataError, match="outside of its directory"):
        weight_files(tmp_path / "model")


def test_downloads_lie_in_a_directory_that_only_this_user_can_write(bucket, policies, s3_server, tmp_path, monkeypatch):
    upload(policies["first"], f"{bucket}/private", s3_server)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache = fetch(f"{bucket}/private").parent
    assert cache.parent == tmp_path
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.rename(tmp_path / "theirs")
    cache.symlink_to(tmp_path / "theirs")
    with pytest.raises(StoreError, match="another user"):
        fetch(f"{bucket}/private")


def test_the_transformers_engine_loads_experts_that_files_have_one_by_one(tmp_path):
    first, second = (tiny.make_moe_model(tmp_path / name, seed=seed) for seed, name in enumerate("ab", 1))
    model = AutoModelForCausalLM.from_pretrained(first).eval()
    tokens = list(range(10, 40))
    before = transformers_engine.score_tokens(model, tokens)
    transformers_engine.load_into(model, str(second))
    fresh = AutoModelForCausalLM.from_pretrained(second).eval()
    assert transformers_engine.score_tokens(model, tokens) == transformers_engine.score_tokens(fresh, tokens) != before
    weights = load_file(second / "model.safetensors")
    del weights["model.layers.1.mlp.experts.3.down_proj.weight"]
    save_file(weights, second / "model.safetensors")
    with pytest.raises(RuntimeError, match="down_proj"):
        transformers_engine.load_into(model, str(second))
