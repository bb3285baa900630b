from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundhouse.errors import ConfigError
from roundhouse.training.forward import Scorer, check_plain_logits, chunked_log_probs

SINGLE: dict[str, Any] = {"dtype": torch.float32, "with_entropy": True}


def _plain(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    every = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / temperature, dim=-1)
    return every.gather(1, targets[:, None]).squeeze(1), -(every.exp() * every).sum(-1)


def _inputs(seed: int, rows: int, bias: bool, dtype: torch.dtype) -> list[Any]:
    draw = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(size, generator=draw, dtype=dtype) for size in ((rows, 8), (13, 8), (13,))]
    leaves = [tensor.requires_grad_() for tensor in tensors[: 3 if bias else 2]]
    return [*leaves, *([] if bias else [None]), torch.randint(13, (rows,), generator=draw)]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 20), st.integers(1, 25), st.booleans(), st.sampled_from([0.5, 1.0, 1.7]))
def test_chunks_of_any_size_give_the_values_and_gradients_of_the_whole(
    seed: int, rows: int, chunk: int, bias: bool, temperature: float
) -> None:
    inputs = _inputs(seed, rows, bias, torch.float32)
    upstream = torch.randn(2, rows, generator=torch.Generator().manual_seed(seed + 1))
    leaves = [tensor for tensor in inputs[:3] if tensor is not None]
    found, expected = [], []
    for outputs, into in (
        (chunked_log_probs(*inputs, temperature=temperature, chunk=chunk, **SINGLE), found),
        (_plain(*inputs, temperature), expected),
    ):
        into += [*outputs, *torch.autograd.grad((torch.stack(outputs) * upstream).sum(), leaves)]
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).detach().norm()) <= 1e-6 * float(theirs.detach().norm()) + 1e-6


def test_the_gradient_agrees_with_finite_differences() -> None:
    hidden, weight, bias, targets = _inputs(0, 5, True, torch.float64)

    def function(*leaves: torch.Tensor) -> Any:
        return chunked_log_probs(
            *leaves, targets, temperature=0.7, chunk=2, dtype=torch.float64, with_entropy=True
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_no_more_rows_of_logits_exist_than_the_chunk_has() -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.ndim == 2 and tensor.shape[1] == 501:
                    largest = max(largest, tensor.shape[0])
            return out

    hidden, weight = torch.randn(300, 4, requires_grad=True), torch.randn(501, 4, requires_grad=True)
    with Watch():
        log_probs, entropy = chunked_log_probs(
            hidden, weight, None, torch.zeros(300, dtype=torch.long), temperature=1.0, chunk=32, **SINGLE
        )
        (log_probs.sum() + entropy.sum()).backward()
    assert largest == 32


def test_a_model_that_caps_its_logits_is_refused() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=16,
        intermediate_size=16, final_logit_softcapping=0.1,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    with pytest.raises(ConfigError, match=r"Gemma2ForCausalLM changes its logits.*logits_chunk_tokens"):
        check_plain_logits(Scorer(model, logits_chunk=8))
