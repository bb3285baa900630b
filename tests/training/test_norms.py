from __future__ import annotations

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from roundhouse.training.layers import replace_norms


@pytest.mark.parametrize("shape", [(7, 16), (2, 5, 16), (1, 3, 4, 16)], ids=str)
def test_values_and_gradients_are_those_of_the_models_own_norm(shape: tuple[int, ...]) -> None:
    own, ours = Qwen3RMSNorm(16, eps=1e-6), Qwen3RMSNorm(16, eps=1e-6)
    with torch.no_grad():
        own.weight.normal_()
        ours.weight.copy_(own.weight)
    assert replace_norms(ours) == 1
    x, upstream = torch.randn(shape), torch.randn(shape)
    results = []
    for module in (own, ours):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        results.append([out, *torch.autograd.grad(out, (leaf, module.weight), upstream)])
    for theirs, found in zip(*results, strict=True):
        torch.testing.assert_close(found, theirs, rtol=2e-6, atol=2e-6)


def test_a_norm_of_another_formula_keeps_its_own_code() -> None:
    """Gemma multiplies by 1 + w."""
    norm = Gemma2RMSNorm(8)
    norm.variance_epsilon = norm.eps
    assert replace_norms(norm) == 0


def test_other_precisions_run_the_models_own_code() -> None:
    norm = Qwen3RMSNorm(8)
    replace_norms(norm)
    x = torch.randn(3, 8).bfloat16()
    assert torch.equal(norm(x), Qwen3RMSNorm(8)(x))
