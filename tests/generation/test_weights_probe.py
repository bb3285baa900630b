"""The proof of a replica's weights fails when a part differs, and when nothing is compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from roundhouse.generation.weights_probe import StaleWeights, probe, require_proofs


class UnquantizedLinearMethod:
    """Named like vLLM's method: the weights are packed, and only the product is available."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.packed = weight.T.contiguous()

    def apply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x @ self.packed


class Packed(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.quant_method = UnquantizedLinearMethod(weight)


class Model(nn.Module):
    """One decoder layer with a norm and packed queries."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        layer = nn.Module()
        layer.q_proj = Packed(weights["layers.0.q_proj.weight"])
        layer.norm = nn.Module()
        layer.norm.weight = nn.Parameter(weights["layers.0.norm.weight"].clone())
        self.layers = nn.ModuleList([layer])
        self.config: Any = type("Config", (), {"num_hidden_layers": 1, "tie_word_embeddings": False})()


def made(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "layers.0.q_proj.weight": torch.randn(6, 4, generator=draw),
        "layers.0.norm.weight": torch.randn(4, generator=draw),
    }


def test_a_model_with_the_weights_proves_each_part() -> None:
    assert probe(Model(made(1)), made(1)) == 2


@pytest.mark.parametrize("part", ["q_proj", "norm"])
def test_a_part_on_other_weights_is_named(part: str) -> None:
    mixed = {name: (made(2) if part in name else made(1))[name] for name in made(1)}
    with pytest.raises(StaleWeights, match=f"layers.0.{part}"):
        probe(Model(mixed), made(1))


def test_weights_of_which_no_part_can_be_compared_are_no_proof() -> None:
    with pytest.raises(StaleWeights, match="No parameter of the running model could be compared"):
        probe(Model(made(1)), {"other.weight": torch.zeros(2)})


@pytest.mark.parametrize("proofs", [[], [0], [3, 0], [None], [3, "3"]])
def test_a_worker_that_proves_nothing_fails_its_replica(proofs: list[Any]) -> None:
    with pytest.raises(StaleWeights, match="not each has proved that it computes with /w"):
        require_proofs(proofs, "/w")
    require_proofs([3, 1], "/w")
