"""What an engine checks when it exchanges its weights, with modules of a few numbers."""

import json
from pathlib import Path

import pytest
import torch

from roundhouse.generation.weights_probe import StaleWeights, beginnings, refuse_kept
from roundhouse.pretrained import keeps_states


def module() -> torch.nn.Module:
    parts = torch.nn.ModuleDict({"attention": torch.nn.Linear(3, 3), "scale": torch.nn.Linear(1, 1, bias=False)})
    parts.register_parameter("k_scale", torch.nn.Parameter(torch.ones(2)))
    return parts


def test_a_parameter_that_the_first_load_did_not_reach_is_named() -> None:
    model = module()
    before = beginnings(model)
    with torch.no_grad():
        model["attention"].weight.copy_(torch.ones(3, 3))
    with pytest.raises(
        StaleWeights, match=r"attention\.bias has kept its random initial numbers: .* Set generation\.backend"
    ):
        refuse_kept(model, before)


def test_single_numbers_scales_and_later_loads_are_not_compared() -> None:
    model = module()
    before = beginnings(model)
    with torch.no_grad():
        for parameter in model["attention"].parameters():
            parameter.add_(1)
    refuse_kept(model, before)
    refuse_kept(model, {})


@pytest.mark.parametrize(
    ("config", "states"),
    [
        ({"model_type": "qwen3"}, False),
        ({"text_config": {"linear_num_key_heads": 2}, "vision_config": {}}, True),
        ({"mamba_d_ssm": 64}, True),
        ({"conv_L_cache": 3}, True),
        ({"hybrid_override_pattern": "M*"}, True),
    ],
)
def test_models_with_states_are_known_by_their_configuration(
    config: dict[str, object], states: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert keeps_states(tmp_path) is states
