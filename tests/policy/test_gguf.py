"""GGUF files: refusals before a conversion, and the result of a conversion."""

import json
import os
import struct
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError
from roundhouse.infra.checks import reachability
from roundhouse.policy import existing, gguf, model_directory
from roundhouse.policy.model_directory import template_in
from roundhouse.policy.tokenizer import CHAT_TEMPLATE
from roundhouse.stages import machine_fit, preflight
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.refit import engine_files
from roundhouse.store.run import open_run
from roundhouse.store.stage import read_manifest
from tests.broken_extensions import write_broken_extensions

with_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="needs the package gguf: make smollm2")


def header(architecture: str, key: str = "general.architecture", version: int = 3) -> bytes:
    name, value = key.encode(), architecture.encode()
    return (
        b"GGUF" + struct.pack("<IQQ", version, 0, 1)
        + struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, len(value)) + value
    )  # fmt: skip


def test_the_architecture_is_read_from_the_first_bytes(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(header("llama"))
    assert gguf.architecture_of(file) == "llama"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "does not begin as GGUF"),
        (b"PK" + bytes(100), "does not begin as GGUF"),
        (header("llama", version=1), "does not begin as GGUF"),
        (header("llama", key="general.name"), "first key is 'general.name'"),
        (header("llama")[:30], "cannot be read as GGUF"),
    ],
)
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, content: bytes, what: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=what):
        gguf.check_gguf(file)


def test_an_unknown_architecture_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(header("mamba"))
    with pytest.raises(ConfigError, match=r"architecture is mamba.*llama"):
        gguf.check_gguf(tmp_path / "model.gguf")


def test_one_gguf_file_in_a_directory_is_found_and_several_are_refused(tmp_path: Path) -> None:
    assert gguf.gguf_file(tmp_path) is None
    (tmp_path / "a.gguf").write_bytes(header("llama"))
    assert gguf.gguf_file(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(header("llama"))
    with pytest.raises(ConfigError, match=r"2 GGUF files \(a.gguf, b.gguf"):
        gguf.gguf_file(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert gguf.gguf_file(tmp_path) is None, "an ordinary directory that also has a GGUF file"


CONFIG = parse_config(
    {
        "run_id": "r",
        "policy": {"kind": "bundled", "name": "smollm2-135m-instruct"},
        "environment": {"kind": "sort"},
    }
)


def test_a_missing_package_is_named_with_the_command_by_run_and_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = model_directory.Bundled("no-such-package", "x.gguf", "make smollm2", 1)
    monkeypatch.setitem(model_directory.BUNDLED, "smollm2-135m-instruct", missing)
    with pytest.raises(
        ConfigError, match=r"no-such-package with its weights is not installed. Install it: make smollm2"
    ):
        model_directory.bundled_file("smollm2-135m-instruct")
    [finding] = [found for found in reachability.configured(CONFIG) if found.name == "policy"]
    assert finding.remedy == "make smollm2"


def test_too_little_memory_is_said_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_fit, "available_memory", lambda: 2 * 2**30)
    with pytest.raises(ConfigError, match=r"about 6 GiB of memory, and 2.0 GiB are free"):
        machine_fit.refuse_small_memory(CONFIG, 6)
    monkeypatch.setattr(machine_fit, "available_memory", lambda: 7 * 2**30)
    machine_fit.refuse_small_memory(CONFIG, 6)


@with_gguf
def test_a_converted_model_has_the_tensors_of_the_file_and_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_broken_extensions(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "packages"), *sys.path]))
    file = tiny_gguf(tmp_path / "source")
    told: list[str] = []
    directory, report = gguf.converted(file, tmp_path / "cache", told.append)
    assert not report["reused"]
    assert any("writing" in text for text in told)
    from safetensors.torch import load_file

    tensors = load_file(directory / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape == (len(VOCABULARY), 64)
    assert json.loads((directory / "config.json").read_text())["model_type"] == "llama"
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    again, second = gguf.converted(file, tmp_path / "cache")
    assert (again, second["reused"], second["sha256"]) == (directory, True, report["sha256"])
    for_this_run = gguf.converted(file, tmp_path / "cache", since=0.0)[1]
    assert not for_this_run["reused"], "the engine of the same run had it converted before the starting policy was made"
    (directory / "config.json").write_text("{}")
    assert not gguf.converted(file, tmp_path / "cache")[1]["reused"], "a damaged entry is made again"


@with_gguf
@pytest.mark.parametrize("kind", ["bundled", "pretrained"])
def test_a_template_by_configuration_takes_the_place_of_the_models_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The model's own template ignores tools: without the key the run is refused. The converted model in the cache stays
    unchanged."""
    monkeypatch.delenv("ROUNDHOUSE_CACHE", raising=False)  # that of the suite
    file = tiny_gguf(tmp_path / "source")
    monkeypatch.setattr(existing, "bundled_file", lambda name: file)
    monkeypatch.setattr(machine_fit, "available_memory", lambda: 7 * 2**30)
    model = {"name": "smollm2-135m-instruct"} if kind == "bundled" else {"path": str(file.parent)}
    tree = {
        "run_id": "templated",
        "store": str(tmp_path / "store"),
        "policy": {"kind": kind, **model},
        "infra": {"state": str(tmp_path / "state")},
    }
    with pytest.raises(ConfigError, match=r"ignores tools.*policy\.chat_template: hermes"):
        preflight.refuse_unready(parse_config(tree))
    tree["policy"]["chat_template"] = str(tmp_path / "none.jinja")
    with pytest.raises(ConfigError, match=r"none\.jinja, which is not a file"):
        preflight.refuse_unready(parse_config(tree))
    own = tmp_path / "own.jinja"
    own.write_text(CHAT_TEMPLATE + "\n{#- ours -#}\n")
    for name, text in (("hermes", CHAT_TEMPLATE), (str(own), own.read_text())):
        tree["policy"]["chat_template"], tree["run_id"] = name, Path(name).stem
        config = parse_config(tree)
        preflight.refuse_unready(config)
        run = open_run(config)
        assert template_in(engine_files(run)).text == text
        published = read_manifest(starting_policy(run)).model_files.by_name()["chat_template.jinja"]
        assert run.checkpoint(0).location.read(published.path).decode() == text
    [cached] = (tmp_path / "state/cache/converted").iterdir()
    assert "tools" not in template_in(cached / "files").text


@with_gguf
def test_a_file_cut_short_is_refused_in_words(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path)
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ConfigError, match="cannot be converted"):
        gguf.converted(file, tmp_path / "cache")


VOCABULARY = ["<unk>", "<s>", "</s>", *map(chr, range(ord("a"), ord("z") + 1)), "Ġ", "ab"]


def tiny_gguf(directory: Path) -> Path:
    """A llama of one layer with a byte-pair vocabulary of single letters."""
    import numpy as np
    from gguf import GGUFWriter

    directory.mkdir(exist_ok=True)
    file = directory / "tiny.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3, 3, *[1] * (len(VOCABULARY) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (len(VOCABULARY), 64), "output_norm.weight": (64,), "blk.0.attn_norm.weight": (64,),
        "blk.0.attn_q.weight": (64, 64), "blk.0.attn_k.weight": (32, 64), "blk.0.attn_v.weight": (32, 64),
        "blk.0.attn_output.weight": (64, 64), "blk.0.ffn_norm.weight": (64,), "blk.0.ffn_gate.weight": (96, 64),
        "blk.0.ffn_up.weight": (96, 64), "blk.0.ffn_down.weight": (64, 96),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
