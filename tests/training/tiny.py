"""A Qwen3 model small enough for a test, and sequences of uneven length with several trained stretches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from roundhouse.training.batch import TrainingSequences

VOCABULARY = 64


SHAPE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "max_position_embeddings": 256, "initializer_range": 0.15,
}  # fmt: skip


def make_model(
    directory: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    vocabulary: int = VOCABULARY,
    dtype: torch.dtype = torch.float32,
    experts: int = 0,
    mixtral: bool = False,
    idle: bool = False,
    **changes: Any,
) -> Path:
    """A model directory with random weights, large enough in scale that attention and logits are far from uniform.

    Args:
        experts: of a layer, two of which compute a token; 0 makes a dense model.
        idle: the first two experts alone are ever asked; with one expert to a token.
        mixtral: make a Mixtral of them, else a Qwen3.
        changes: of the shape.
    """
    shape = SHAPE | {"vocab_size": vocabulary, "tie_word_embeddings": tied}
    torch.manual_seed(seed)
    if mixtral:
        routed = {"num_local_experts": experts, "num_experts_per_tok": 2}
        model: Any = MixtralForCausalLM(MixtralConfig(**(shape | routed | changes)))
    elif experts:
        routed = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(shape | routed | changes)))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**(shape | changes)))
    for layer in model.model.layers if idle else ():
        gate = layer.mlp.gate.weight.data  # whichever sign one has, the other has the larger score
        gate[0], gate[1], gate[2:] = 10 * gate[0], -10 * gate[0], 0.0
    model.to(dtype).save_pretrained(directory)
    (directory / "tokenizer.json").write_text('{"stands": "for a tokenizer"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def plain_model(directory: Path) -> Any:
    """The same weights in transformers' own attention."""
    return Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def record(name: str, group: str, reward: float, *, rollout: str | None = None, seed: int = 0) -> dict[str, Any]:
    """One sequence of two turns; its length, tokens and log-probabilities come from the seed, its prompt from the group."""
    rng, of_group = random.Random(f"{name}/{seed}"), random.Random(f"{group}/{seed}")
    prompt = [of_group.randrange(VOCABULARY) for _ in range(of_group.randint(1, 12))]
    mask = [0] * len(prompt) + [1] * rng.randint(1, 20) + [0] * rng.randint(0, 9) + [1] * rng.randint(1, 5)
    mask += [0] * rng.randint(0, 3)
    return {
        "sequence_id": name,
        "rollout_id": rollout or name,
        "group_id": group,
        "token_ids": prompt + [rng.randrange(VOCABULARY) for _ in mask[len(prompt) :]],
        "loss_mask": mask,
        "gen_logprobs": [-rng.uniform(0.5, 8.0) if trained else 0.0 for trained in mask],
        "policy_version": 0,
        "reward": reward,
    }


def records(groups: int = 4, size: int = 4, *, seed: int = 0) -> list[dict[str, Any]]:
    """Groups of uneven sequences with rewards 0, 0.5 and 1; the last group is without spread."""
    rng = random.Random(seed)
    rows = []
    for group in range(groups):
        rewards = [rng.choice([0.0, 0.5, 1.0]) for _ in range(size - 2)] + [0.0, 1.0]
        if group == groups - 1 and groups > 1:
            rewards = [1.0] * size
        rows += [record(f"g{group}/{i}", f"g{group}", reward, seed=seed) for i, reward in enumerate(rewards)]
    return rows


def sequences(groups: int = 4, size: int = 4, *, seed: int = 0) -> TrainingSequences:
    return TrainingSequences.from_records(records(groups, size, seed=seed))
