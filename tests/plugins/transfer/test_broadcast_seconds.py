"""The rule for the time of a broadcast, compared with the refits that Miles published (docs/gpu.md)."""

from __future__ import annotations

import pytest
from transformers import Qwen3MoeConfig

from roundhouse.plugins.transfer.estimate import broadcast_seconds
from roundhouse.training.memory_plan import tensors_of

PUBLISHED = {
    "GLM-4.7-Flash": (60e9, 9_302, 1, 2.5086),
    "Qwen3-30B-A3B": (61e9, 18_867, 1, 2.6700),
    "GLM-4.5-Air": (213e9, 17_820, 4, 5.0011),
    "GLM-Z1-9B": (18.8e9, 440, 1, 0.6946),
    "Moonlight-16B-A3B": (32e9, 5_262, 1, 1.4820),
    "Qwen3-235B-A22B": (470e9, 36_945, 4, 10.7536),
}
"""Bytes, tensors, senders, and seconds from the engine's pause to its resumption."""


@pytest.mark.parametrize("model", PUBLISHED)
def test_refits_of_up_to_eight_nodes_take_what_the_rule_says(model: str) -> None:
    size, tensors, senders, seconds = PUBLISHED[model]
    assert broadcast_seconds(size, tensors, senders) == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize(
    ("size", "tensors", "seconds"), [(1488e9, 58_536, 58.3015), (1029e9, 138_240, 53.2791)], ids=["GLM-5", "Kimi-K2"]
)
def test_over_sixteen_nodes_and_more_it_is_a_lower_bound(size: float, tensors: int, seconds: float) -> None:
    assert 1.7 < seconds / broadcast_seconds(size, tensors, senders=8) < 2.2


def test_each_expert_counts() -> None:
    shape = Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, tie_word_embeddings=False,
    )  # fmt: skip
    assert tensors_of(shape) == PUBLISHED["Qwen3-30B-A3B"][1]
