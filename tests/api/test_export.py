"""A policy version as a plain Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import roundhouse as rh
from roundhouse.cli import app
from roundhouse.config.loading import parse_config
from roundhouse.config.models import OptimizerConfig, TrainConfig
from roundhouse.config.training import LoraConfig
from roundhouse.errors import ConfigError, DataError, StoreError
from roundhouse.store.directories import store_model
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference
from roundhouse.training.trainer import Trainer
from tests.training.tiny import make_model, plain_model, sequences

TRAIN = TrainConfig(
    optimizer=OptimizerConfig(learning_rate=2e-2, warmup_steps=0), minibatches=2, device="cpu", threads=1
)
LORA = TRAIN.model_copy(update={"lora": LoraConfig(rank=3, alpha=6.0)})


def commit(run: Run, version: int, save: Any) -> Reference:
    """Make a checkpoint of what `save` writes into a directory."""
    attempt = run.begin(run.checkpoint(version), policy_version=version)
    written = store_model(save, attempt.stage.location, attempt.name)
    for entry in written.files:
        attempt.adopt(entry)
    reference = attempt.commit(directory=written.directory)
    run.point_to(reference)
    return reference


def made_run(store: str, tmp_path: Path, train: TrainConfig = TRAIN, head_dim: int = 16, **keys: Any) -> Run:
    """Return a run of a starting policy and a version 1 that one step of training made of it."""
    run = open_run(
        parse_config({"run_id": "r", "store": store, "train": train.model_dump(mode="json", exclude_unset=True)} | keys)
    )
    make_model(tmp_path / "start", head_dim=head_dim)
    (tmp_path / "start/chat_template.jinja").write_text("{{ messages }}")
    trainer = Trainer.load(tmp_path / "start", train)
    commit(run, 0, trainer.save)
    trainer.step(sequences(), 1)
    commit(run, 1, trainer.save)
    return run


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[1, 2, 3, 4]])).logits.float()


def test_an_export_is_the_model_without_the_trainers_state_from_either_kind_of_store(
    store_uri: str, tmp_path: Path
) -> None:
    run = made_run(store_uri, tmp_path)
    output = rh.open_run("r", store_uri).checkpoint().export(tmp_path / "model")
    assert output == tmp_path / "model"
    files = {path.name for path in output.rglob("*")}
    assert files >= {"config.json", "model.safetensors", "chat_template.jinja", "README.md"}
    assert not files & {"trainer", "manifest.json", "digests.json", "optimizer.safetensors"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".model-")] == []
    rh.open_run("r", store_uri).checkpoint(0).export(tmp_path / "first")
    first, trained = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "model"))
    assert first.keys() == trained.keys()
    assert any(not torch.equal(first[name], trained[name]) for name in first)
    card = (output / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for fact in (run.uid, run.checkpoint(1).reference().digest, run.config_digest, "policy version | 1"):  # type: ignore[union-attr]
        assert fact in card


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_number_format_is_that_of_the_weights_and_of_config_json(dtype: str, tmp_path: Path) -> None:
    made_run(str(tmp_path / "store"), tmp_path)
    checkpoint = rh.open_run("r", str(tmp_path / "store")).checkpoint(1)
    checkpoint.export(tmp_path / "whole")
    output = checkpoint.export(tmp_path / "half", dtype=dtype)
    whole, half = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "half"))
    assert half.keys() == whole.keys()
    assert all(torch.equal(half[name], whole[name].to(getattr(torch, dtype))) for name in whole)
    assert json.loads((output / "config.json").read_text())["dtype"] == dtype
    assert {path.name for path in output.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}
    model = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    assert model.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("begins", ["at a directory of the user", "at a policy that the run made"])
def test_an_adapter_is_exported_as_peft_loads_it_and_merged_as_a_whole_model(begins: str, tmp_path: Path) -> None:
    store, start = str(tmp_path / "store"), tmp_path / "start"
    own = begins == "at a directory of the user"
    made_run(store, tmp_path, LORA, **({"policy": {"kind": "pretrained", "path": str(start)}} if own else {}))
    checkpoint = rh.open_run("r", store).checkpoint(1)
    merged = plain_model(checkpoint.export(tmp_path / "merged", merge=True))
    adapter = checkpoint.export(tmp_path / "adapter")
    base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == (str(start) if own else str(adapter / "base"))
    assert not (adapter / "model.safetensors").exists()
    assert "library_name: peft" in (adapter / "README.md").read_text()
    expected = logits(merged)
    assert not torch.allclose(logits(plain_model(start)), expected, atol=1e-3)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(plain_model(Path(base)), str(adapter))), expected)
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)), expected)
    if not own:
        stored, start_weights = (load_file(place / "model.safetensors") for place in (adapter / "base", start))
        assert all(torch.equal(stored[name], start_weights[name]) for name in start_weights)


def test_what_cannot_be_exported_is_refused_with_the_remedy(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    run = made_run(store, tmp_path)
    handle = rh.open_run("r", store)
    with pytest.raises(StoreError, match=r"no checkpoint of version 9. It has: 0, 1 "):
        handle.checkpoint(9)
    with pytest.raises(ConfigError, match=r"dtype is 'int4'. Choose one of: float32, bfloat16, float16"):
        handle.checkpoint().export(tmp_path / "model", dtype="int4")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").touch()
    with pytest.raises(ConfigError, match=r"full is not empty. Name another"):
        handle.checkpoint().export(tmp_path / "full")
    with pytest.raises(ConfigError, match=r"notes.txt is a file"):
        handle.checkpoint().export(tmp_path / "full/notes.txt")
    commit(run, 2, lambda directory: (directory / "config.json").write_text("{}"))
    with pytest.raises(DataError, match="has no weights"):
        handle.checkpoint(2).export(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    assert (handle.checkpoint(1).export(tmp_path / "empty") / "config.json").is_file()


def test_a_damaged_file_leaves_no_directory_that_looks_complete(tmp_path: Path) -> None:
    run = made_run(str(tmp_path / "store"), tmp_path)
    (weights,) = run.checkpoint(1).location.local_path.glob("a0*/model.safetensors")
    tensors = load_file(weights)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] + 1}, weights, metadata={"format": "pt"})
    for dtype in (None, "bfloat16"):
        with pytest.raises(StoreError, match=r"model.safetensors is damaged: it has digest"):
            rh.open_run("r", str(tmp_path / "store")).checkpoint(1).export(tmp_path / "model", dtype)
    assert [path.name for path in tmp_path.iterdir() if "model" in path.name] == []


def test_the_command_exports_and_show_names_the_models_directory(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    run = made_run(store, tmp_path)
    output = tmp_path / "model"
    words = ["runs", "export-model", "r", "0", "--output", str(output), "--dtype", "bfloat16", "--store", store]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert f"version 0 of r: {output}" in done.output
    (directory,) = run.checkpoint(1).location.local_path.glob("a0*")
    shown = CliRunner().invoke(app, ["runs", "show", "r", "--store", store])
    assert f"model         {directory}" in shown.output
    assert isinstance(CliRunner().invoke(app, words).exception, ConfigError)


@pytest.mark.real
def test_vllm_generates_from_an_exported_model_what_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_run(str(tmp_path / "store"), tmp_path, head_dim=32)  # the least of vLLM's attention on CPU
    output = rh.open_run("r", str(tmp_path / "store")).checkpoint(1).export(tmp_path / "model")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    model = plain_model(output)
    prompt = [1, 2, 3, 4]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0, 4:].tolist()
    engine = LLM(str(output), skip_tokenizer_init=True, dtype="float32", max_model_len=32, enforce_eager=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, detokenize=False, ignore_eos=True)
    (reply,) = engine.generate({"prompt_token_ids": prompt}, sampling)
    assert list(reply.outputs[0].token_ids) == expected
