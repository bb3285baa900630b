"""Every family of docs/models.md: log-probabilities, gradients, a step, and the checkpoint, against plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from roundhouse.config.models import GenerationConfig, TrainConfig
from roundhouse.config.training import LoraConfig
from roundhouse.errors import ConfigError
from roundhouse.generation.served_policy import check_weights, expected_shapes
from roundhouse.generation.transformers_engine import build_model as engine_model
from roundhouse.generation.transformers_engine import load_into, score_tokens
from roundhouse.pretrained import build_model, load_pretrained
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.checkpoint import load_model
from roundhouse.training.forward import Scorer
from roundhouse.training.language_model import frozen_towers, parameter_names
from roundhouse.training.memory_plan import plan_memory, refuse_unfit_layout
from roundhouse.training.packed_attention import why_not_packed
from roundhouse.training.packing import build_microbatches
from roundhouse.training.trainer import Trainer
from tests.training import reference
from tests.training.families import FAMILIES, Family, table
from tests.training.tiny import records

CPU = torch.device("cpu")
QUICK = ("gemma3", "gpt_oss")
ROWS = records(2, 3)
BATCH = TrainingSequences.from_records(ROWS)


def config(family: Family, packed: bool | None = None) -> TrainConfig:
    return TrainConfig(device="cpu", packing="auto" if packed is None else packed)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def computed(family: Family, directory: Path, packed: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """[T] log-probabilities of the trained tokens by our passes, and gradients of their weighted sum."""
    model = load_model(directory, packed=packed, device=CPU)
    scorer, values = Scorer(model), torch.zeros(len(BATCH.token_ids))
    rows = build_microbatches(BATCH, range(len(BATCH)), BATCH.loss_mask, budget=4096, packed=packed)
    for row in rows:
        values = values.index_copy(0, torch.from_numpy(row.source), scorer.predict(row).log_probs)
    return values.detach(), gradients(model, (values * weights()).sum())


def weights() -> torch.Tensor:
    return torch.linspace(-1, 2, len(BATCH.token_ids))


def plain(directory: Path) -> Any:
    shape = load_pretrained(AutoConfig, directory)
    kind = type(build_model(shape))
    return load_pretrained(kind, directory, dtype=torch.float32, attn_implementation="eager").eval()


def by_transformers(model: Any) -> torch.Tensor:
    """The same log-probabilities, of each sequence alone."""
    values = torch.zeros(len(BATCH.token_ids))
    for row, start in zip(ROWS, BATCH.offsets[:-1], strict=True):
        for position, value in reference.log_probs(model, row)[0].items():
            values = values.index_put((torch.tensor(int(start) + position),), value)
    return values


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.model_type, marks=() if family.model_type in QUICK else pytest.mark.real)
        for family in FAMILIES
    ],
)
def test_a_family_trains_as_in_transformers_and_saves_its_own_architecture(family: Family, tmp_path: Path) -> None:
    start = family.save(tmp_path / "start")
    model = plain(start)
    expected = by_transformers(model)
    by_plain = gradients(model, (expected * weights()).sum())
    for packed in (False, True) if family.unpacked is None else (False,):
        values, by_ours = computed(family, start, packed)
        torch.testing.assert_close(values, expected.detach(), rtol=1e-4, atol=1e-5)
        assert by_ours.keys() == by_plain.keys() - frozen_towers(model).keys()
        for name, gradient in by_ours.items():
            np.testing.assert_allclose(gradient, by_plain[name], rtol=1e-3, atol=1e-4, err_msg=name)
    if family.unpacked is not None:
        with pytest.raises(ConfigError, match=rf"{family.unpacked}.*train\.packing to false"):
            refuse_unfit_layout(load_pretrained(AutoConfig, start), config(family, packed=True))
    trainer = Trainer.load(start, config(family))
    refuse_unfit_layout(load_pretrained(AutoConfig, start), config(family))
    assert all(scorer.packed == (family.unpacked is None) for scorer in trainer.engine._scorers.values())
    assert trainer.step(BATCH, 0).updates > 0
    trainer.save(tmp_path / "next")
    check_checkpoint(trainer, start, tmp_path / "next")


def check_checkpoint(trainer: Trainer, start: Path, saved: Path) -> None:
    before, after = (load_file(directory / "model.safetensors") for directory in (start, saved))
    assert before.keys() == after.keys()
    towers = frozen_towers(trainer.model)
    frozen = {name for name, p in zip(before, parameter_names(trainer.model, before), strict=True) if p in towers}
    assert len(frozen) == len(towers)
    for name in before:
        same = before[name].dtype == after[name].dtype and torch.equal(before[name], after[name])
        assert same == (name in frozen), name
    log_probs = trainer.log_probs(BATCH)
    model = plain(saved)
    assert type(model) is type(trainer.model)
    np.testing.assert_allclose(by_transformers(model).detach().numpy(), log_probs, rtol=1e-4, atol=1e-5)
    again = Trainer.load(saved, trainer.learner.config, trainer_state=saved / "trainer")
    assert np.array_equal(again.log_probs(BATCH), log_probs)
    trained = {p for name, p in trainer.model.named_parameters() if name not in towers}
    assert {*trainer.engine.optimizer.state} == trained


def test_auxiliary_losses_of_routers_are_not_trained_on(tmp_path: Path) -> None:
    [family] = [family for family in FAMILIES if family.model_type == "qwen3_moe"]
    start, by_setting = family.save(tmp_path / "start"), []
    settings = json.loads((start / "config.json").read_text())
    for asked in (False, True):
        routers = {"output_router_logits": asked, "router_aux_loss_coef": 10.0}
        (start / "config.json").write_text(json.dumps(settings | routers))
        by_setting.append(computed(family, start, packed=True)[1])
    without, asked_for = by_setting
    assert without.keys() == asked_for.keys()
    assert all(torch.equal(gradient, asked_for[name]) for name, gradient in without.items())


def test_packing_is_chosen_by_the_model_with_the_reason() -> None:
    for family in FAMILIES:
        if family.model_type in ("llama", "gemma2", "lfm2", "nemotron", "llama4_text"):
            reason = why_not_packed(family.config())
            assert (reason is None) == (family.unpacked is None), family.name
            assert (family.unpacked or "") in (reason or "")


def test_context_parallelism_refuses_a_model_that_cannot_be_packed() -> None:
    [family] = [family for family in FAMILIES if family.model_type == "lfm2"]
    service = {"kind": "resident", "processes": 2, "context_parallel": 2}
    with pytest.raises(ConfigError, match="layers of kind conv"):
        refuse_unfit_layout(family.config(), TrainConfig.model_validate({"device": "cpu", "service": service}))


@pytest.fixture(scope="module")
def composite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    [family] = [family for family in FAMILIES if family.model_type == "gemma3"]
    return family.save(tmp_path_factory.mktemp("composite"))


def test_an_adapter_is_on_the_language_model_alone_and_its_checkpoint_is_whole(composite: Path, tmp_path: Path) -> None:
    lora = LoraConfig(rank=2, alpha=4.0, target_modules=("q_proj", "v_proj"))  # the tower has modules of these names
    trainer = Trainer.load(composite, TrainConfig(device="cpu", lora=lora))
    adapted = [name for name, _ in trainer.model.named_parameters() if ".lora_" in name]
    assert len(adapted) == 2 * 2 * 2
    assert all(name.startswith("model.language_model.layers.") for name in adapted)
    assert trainer.step(BATCH, 0).updates > 0
    trainer.save(tmp_path)
    before, after = (load_file(directory / "model.safetensors") for directory in (composite, tmp_path))
    changed = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    assert changed
    assert all(name.endswith(("q_proj.weight", "v_proj.weight")) and "vision" not in name for name in changed)
    again = Trainer.load(tmp_path, trainer.learner.config, trainer_state=tmp_path / "trainer")
    assert np.array_equal(again.log_probs(BATCH), trainer.log_probs(BATCH))


def test_the_transformers_engine_scores_a_composite_model_as_the_trainer_does(composite: Path) -> None:
    model = engine_model(str(composite), GenerationConfig())
    load_into(model, str(composite))
    log_probs = Trainer.load(composite, TrainConfig(device="cpu")).log_probs(BATCH)
    first = BATCH.token_ids[: BATCH.offsets[1]].tolist()
    scores = np.array([0.0, *score_tokens(model, first)]) * BATCH.loss_mask[: len(first)]
    np.testing.assert_allclose(scores, log_probs[: len(first)], rtol=1e-4, atol=1e-5)
    check_weights(composite, composite, expected_shapes(composite))


def test_a_memory_plan_counts_frozen_towers_without_gradients_or_moments(composite: Path) -> None:
    shape = load_pretrained(AutoConfig, composite)
    towers = sum(parameter.numel() for parameter in frozen_towers(build_model(shape)).values())
    whole, text = (plan_memory(each, TrainConfig(device="cpu"), 1, 16) for each in (shape, shape.get_text_config()))
    assert whole.parameters == text.parameters + towers
    activations = whole.bytes.pop("activations"), text.bytes.pop("activations")
    assert activations[0] == pytest.approx(activations[1], rel=0.01)
    assert whole.bytes == text.bytes | {"frozen towers": 2 * towers}
    spread = plan_memory(shape, TrainConfig(device="cpu"), 2, 16).bytes
    assert spread["frozen towers"] == towers
    assert (
        spread["gathered weights"]
        == plan_memory(shape.get_text_config(), TrainConfig(device="cpu"), 2, 16).bytes["gathered weights"]
    )


def test_the_page_of_models_has_the_table_of_these_tests() -> None:
    page = Path(__file__).parents[2] / "docs" / "models.md"
    assert table() in page.read_text()
