from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from roundhouse.config.models import OptimizerConfig, TrainConfig
from roundhouse.config.training import LoraConfig
from roundhouse.errors import ConfigError, DataError
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.memory_plan import refuse_unfit_layout
from roundhouse.training.service import engine
from roundhouse.training.service.verbs import Role
from roundhouse.training.trainer import Trainer
from tests.training import reference
from tests.training.tiny import make_model, plain_model, records, sequences

OPTIMIZER = OptimizerConfig(learning_rate=2e-2, warmup_steps=0)
CONFIG = TrainConfig(
    lora=LoraConfig(rank=3, alpha=6.0), optimizer=OPTIMIZER, minibatches=2, device="cpu", threads=1
)  # fmt: skip


def _log_probs(model: torch.nn.Module, rows: list[dict]) -> list[float]:
    with torch.no_grad():
        return [float(value) for row in rows for value in reference.log_probs(model, row)[0].values()]


def test_a_fresh_adapter_changes_nothing_and_only_it_is_trained(model_dir: Path) -> None:
    plain, adapted = (Trainer.load(model_dir, config) for config in (CONFIG.model_copy(update={"lora": None}), CONFIG))
    np.testing.assert_array_equal(plain.log_probs(sequences()), adapted.log_probs(sequences()))
    before = {name: p.detach().clone() for name, p in adapted.model.named_parameters()}
    adapted.step(sequences(), 1)
    changed = {name for name, p in adapted.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    state = adapted.engine.optimizer.state
    assert len(state) == len(changed)


def test_the_published_model_is_the_adapted_one_and_peft_loads_the_adapter(model_dir: Path, tmp_path: Path) -> None:
    """Three ways to the same policy: our adapter forward, the merged directory, the start with peft's adapter on it."""
    trainer, rows = Trainer.load(model_dir, CONFIG), records()
    batch = TrainingSequences.from_records(rows)
    start = trainer.log_probs(batch)
    trainer.step(batch, 1)
    trainer.save(tmp_path)
    ours = trainer.log_probs(batch)
    assert np.abs(ours - start).max() > 0.1
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(model_dir / "model.safetensors").keys()
    assert (tmp_path / "config.json").read_text() == (model_dir / "config.json").read_text()
    np.testing.assert_allclose(_log_probs(plain_model(tmp_path), rows), ours[batch.loss_mask], rtol=0, atol=1e-5)
    with_adapter = PeftModel.from_pretrained(plain_model(model_dir), str(tmp_path / "trainer")).eval()
    np.testing.assert_allclose(_log_probs(with_adapter, rows), ours[batch.loss_mask], rtol=0, atol=1e-5)


def test_saved_and_loaded_between_steps_is_bit_for_bit_the_uninterrupted_run(model_dir: Path, tmp_path: Path) -> None:
    batches = [sequences(4, 6, seed=seed) for seed in range(2)]
    through = Trainer.load(model_dir, CONFIG)
    resumed = Trainer.load(model_dir, CONFIG)
    resumed.step(batches[0], 1)
    resumed.save(tmp_path / "half")
    resumed = Trainer.load(tmp_path / "half", CONFIG, trainer_state=tmp_path / "half/trainer")
    resumed.step(batches[1], 2)
    for iteration, batch in enumerate(batches, 1):
        through.step(batch, iteration)
    for name, trainer in (("through", through), ("resumed", resumed)):
        trainer.save(tmp_path / name)
    files = ["model.safetensors", *(f"trainer/{name}" for name in ("adapter_model", "base", "optimizer"))]
    for name in [name.removesuffix(".safetensors") + ".safetensors" for name in files]:
        assert (tmp_path / "through" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes(), name


def test_the_gradient_of_the_adapter_is_that_of_the_merged_matrix(model_dir: Path) -> None:
    """∂/∂B = scale · (∂/∂W) · Aᵀ: taken from a full step on the same start, where B is zero."""
    optimizer = OptimizerConfig(learning_rate=1e-3, betas=(0.9, 0.95), warmup_steps=0, max_grad_norm=1e9)
    lora = CONFIG.model_copy(update={"optimizer": optimizer, "minibatches": 1})
    whole, adapted = Trainer.load(model_dir, lora.model_copy(update={"lora": None})), Trainer.load(model_dir, lora)
    low = {n: p.detach().clone() for n, p in adapted.model.named_parameters() if ".lora_A." in n}
    for trainer in (whole, adapted):
        trainer.step(sequences(), 1)
    full = {n: whole.engine.optimizer.state[p]["exp_avg"] for n, p in whole.model.named_parameters()}
    for name, parameter in adapted.model.named_parameters():
        if ".lora_B." in name:
            owner = name.removesuffix(".lora_B.default.weight")
            expected = 2.0 * full[f"{owner}.weight"] @ low[f"{owner}.lora_A.default.weight"].t()
            found = adapted.engine.optimizer.state[parameter]["exp_avg"]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_policy_without_its_adapter_is_the_reference(model_dir: Path, tmp_path: Path) -> None:
    """The same bytes as with a copy of the starting model, also from a checkpoint, which has merged matrices."""
    config = TrainConfig.model_validate(CONFIG.model_dump() | {"algorithm": {"kl_coefficient": 0.5}})
    copied = Trainer.load(model_dir, config, reference_dir=model_dir)
    own = Trainer.load(model_dir, config)
    for iteration in (1, 2):
        batch = sequences(4, 6, seed=iteration)
        penalties = [trainer.step(batch, iteration).metrics["kl_penalty"] for trainer in (copied, own)]
        assert penalties[0] == penalties[1] != 0
        own.save(tmp_path / f"own {iteration}")
        own = Trainer.load(tmp_path / f"own {iteration}", config, trainer_state=tmp_path / f"own {iteration}/trainer")
    copied.save(tmp_path / "copied")
    for name in ("model", "trainer/adapter_model", "trainer/optimizer"):
        expected = (tmp_path / f"copied/{name}.safetensors").read_bytes()
        assert (tmp_path / f"own 2/{name}.safetensors").read_bytes() == expected, name
    with pytest.raises(DataError, match="No reference was loaded"):
        own.engine._scorer(Role.REFERENCE)


def test_a_reference_that_is_renewed_or_a_teacher_is_a_model_of_its_own(model_dir: Path) -> None:
    for algorithm in (
        {"kl_coefficient": 0.5, "reference_every": 2},
        {"kind": "distillation", "teacher": str(model_dir)},
    ):
        config = TrainConfig.model_validate(CONFIG.model_dump() | {"algorithm": algorithm})
        with pytest.raises(ConfigError, match="no reference_dir was given"):
            Trainer.load(model_dir, config)


@pytest.mark.parametrize("shape", [{}, {"tied": False}, {"experts": 4}], ids=["tied", "untied", "experts"])
@pytest.mark.parametrize("adapted", [True, False], ids=["adapter", "whole"])
def test_what_does_not_learn_is_held_in_bfloat16_which_changes_no_bit(
    shape: dict[str, Any], adapted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = make_model(tmp_path / "start", dtype=torch.bfloat16, **shape)
    changed = {"dtype": "bfloat16", "algorithm": {"kl_coefficient": 0.5}}
    lora = {"rank": 3, "target_modules": ["q_proj", "v_proj"]} if adapted else None
    config = TrainConfig.model_validate(CONFIG.model_dump() | changed | {"lora": lora})
    kept, types = {}, {}
    monkeypatch.setattr(engine, "hold_in_bfloat16", lambda model, sharded: None)
    for name in ("float32", "held", "resumed"):
        trainer = Trainer.load(start, config, reference_dir=None if adapted else start)
        for iteration in (1, 2):
            trainer.step(sequences(seed=iteration), iteration)
            saved = tmp_path / name / str(iteration)
            trainer.save(saved)
            if name == "resumed":
                reference = None if adapted else start
                trainer = Trainer.load(saved, config, trainer_state=saved / "trainer", reference_dir=reference)
        frozen = trainer.engine._scorer(Role.POLICY if adapted else Role.REFERENCE).model
        types[name] = {each.dtype for each in frozen.parameters() if each.ndim > 1 and not each.requires_grad}
        kept[name] = load_file(tmp_path / name / "2/model.safetensors")
        monkeypatch.undo()
    assert types["float32"] == {torch.float32}
    for name in ("held", "resumed"):
        for key, value in kept["float32"].items():
            torch.testing.assert_close(kept[name][key].float(), value, rtol=0, atol=0)
    assert types["held"] == types["resumed"] == {torch.float32, torch.bfloat16}, "an embedding is looked up"
    resumed, held = ((tmp_path / name / "2/model.safetensors").read_bytes() for name in ("resumed", "held"))
    assert resumed == held


def test_a_frozen_model_with_more_bits_keeps_them(model_dir: Path, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"dtype": "bfloat16"})
    trainer = Trainer.load(model_dir, config)
    trainer.step(sequences(), 1)
    trainer.save(tmp_path)
    started, found = (load_file(where / "model.safetensors") for where in (model_dir, tmp_path))
    resumed = Trainer.load(tmp_path, config, trainer_state=tmp_path / "trainer")
    for each in (trainer, resumed):
        assert {parameter.dtype for parameter in each.model.parameters()} == {torch.float32}
    assert torch.equal(found["model.embed_tokens.weight"], started["model.embed_tokens.weight"])


def test_a_state_that_does_not_fit_the_configuration_is_refused(model_dir: Path, tmp_path: Path) -> None:
    for name, config in (("lora", CONFIG), ("plain", CONFIG.model_copy(update={"lora": None}))):
        trainer = Trainer.load(model_dir, config)
        trainer.step(sequences(), 1)
        trainer.save(tmp_path / name)
    with pytest.raises(DataError, match=r"holds an adapter, but train.lora is not set"):
        Trainer.load(
            tmp_path / "lora", CONFIG.model_copy(update={"lora": None}), trainer_state=tmp_path / "lora/trainer"
        )
    with pytest.raises(DataError, match=r"trained without an adapter, but train.lora is set"):
        Trainer.load(tmp_path / "plain", CONFIG, trainer_state=tmp_path / "plain/trainer")
    other = CONFIG.model_copy(update={"lora": LoraConfig(rank=4)})
    with pytest.raises(DataError, match=r"lora_A.weight has shape \(3, \d+\) there and \(4, \d+\)"):
        Trainer.load(tmp_path / "lora", other, trainer_state=tmp_path / "lora/trainer")
    (tmp_path / "lora/trainer/adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(DataError, match=r"adapter in .* cannot be read"):
        Trainer.load(tmp_path / "lora", CONFIG, trainer_state=tmp_path / "lora/trainer")


@pytest.mark.parametrize(
    ("target", "message"), [("no_such", "do not fit Qwen3ForCausalLM"), ("lm_head", "names the output layer")]
)
def test_targets_that_match_nothing_or_the_output_layer_are_refused(tmp_path: Path, target: str, message: str) -> None:
    model = make_model(tmp_path, tied=False)
    with pytest.raises(ConfigError, match=message):
        Trainer.load(model, CONFIG.model_copy(update={"lora": LoraConfig(target_modules=(target,))}))


@pytest.mark.parametrize("mixtral", [False, True], ids=["qwen3_moe", "mixtral"])
def test_experts_are_adapted_as_dense_matrices_are(mixtral: bool, tmp_path: Path) -> None:
    """Of one fresh start: values as without an adapter, the gradient of W, the merged model, and the next step after a
    checkpoint."""
    model = make_model(tmp_path / "start", experts=4, mixtral=mixtral)
    optimizer = OptimizerConfig(learning_rate=2e-2, warmup_steps=0, max_grad_norm=1e9)
    config = CONFIG.model_copy(update={"optimizer": optimizer, "minibatches": 1})
    whole = Trainer.load(model, config.model_copy(update={"lora": None}))
    adapted, rows = Trainer.load(model, config), records()
    batch = TrainingSequences.from_records(rows)
    np.testing.assert_array_equal(whole.log_probs(batch), adapted.log_probs(batch))
    before = {name: parameter.detach().clone() for name, parameter in adapted.model.named_parameters()}
    for trainer in (whole, adapted):
        trainer.step(batch, 1)
    after = dict(adapted.model.named_parameters())
    assert {name for name in before if not torch.equal(before[name], after[name])} <= {
        n for n in before if ".lora_" in n
    }
    full = {
        name: whole.engine.optimizer.state[parameter]["exp_avg"] for name, parameter in whole.model.named_parameters()
    }
    fused = [name for name in full if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(fused) == 4
    for name in fused:
        owner, _, leaf = name.rpartition(".")
        found = adapted.engine.optimizer.state[after[f"{owner}.lora_{leaf}.B"]]["exp_avg"]
        expected = 2.0 * full[name] @ before[f"{owner}.lora_{leaf}.A"].transpose(1, 2)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    adapted.save(tmp_path / "saved")
    ours = adapted.log_probs(batch)
    assert np.abs(ours - whole.log_probs(batch)).max() > 1e-3
    np.testing.assert_allclose(
        _log_probs(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval(), rows),
        ours[batch.loss_mask],
        rtol=0,
        atol=1e-5,
    )
    resumed = Trainer.load(tmp_path / "saved", config, trainer_state=tmp_path / "saved/trainer")
    for trainer in (adapted, resumed):
        trainer.step(batch, 2)
    np.testing.assert_array_equal(adapted.log_probs(batch), resumed.log_probs(batch))


def test_without_its_adapter_a_model_of_experts_is_the_reference(tmp_path: Path) -> None:
    model = make_model(tmp_path, experts=4)
    config = TrainConfig.model_validate(CONFIG.model_dump() | {"algorithm": {"kl_coefficient": 0.5}})
    copied, own = Trainer.load(model, config, reference_dir=model), Trainer.load(model, config)
    for iteration in (1, 2):
        penalties = [
            each.step(sequences(4, 6, seed=iteration), iteration).metrics["kl_penalty"] for each in (copied, own)
        ]
        assert penalties[0] == penalties[1] != 0


def test_adapters_of_experts_alone_are_enough_and_named_where_they_do_not_work(tmp_path: Path) -> None:
    model = make_model(tmp_path / "start", experts=4)
    lora = LoraConfig(rank=2, target_modules=("down_proj",))
    trainer = Trainer.load(model, CONFIG.model_copy(update={"lora": lora}))
    adapted = [name for name, _ in trainer.model.named_parameters() if ".lora_" in name]
    assert {name.rpartition("experts.")[2] for name in adapted} == {"lora_down_proj.A", "lora_down_proj.B"}
    spread = TrainConfig.model_validate(
        {"device": "cpu", "lora": lora.model_dump(), "service": {"kind": "resident", "processes": 2}}
    )
    with pytest.raises(ConfigError, match=r"train\.lora adapts experts, and train\.service\.processes is above 1"):
        refuse_unfit_layout(AutoConfig.from_pretrained(model), spread)
