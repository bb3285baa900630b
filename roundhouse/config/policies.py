"""The policy that a run starts from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roundhouse.config.section import Fraction, PositiveFloat, PositiveInt, Section


class PretrainedPolicy(Section):
    """Start from a Hugging Face model directory."""

    kind: Literal["pretrained"]
    path: str
    """Directory with config.json, safetensors and tokenizer files; a local path, file:// or s3:// URI."""


class WarmStartPolicy(Section):
    """Make a small Qwen3 policy from nothing: train a tokenizer and warm-start on generated demonstrations.

    The demonstrations come from the environment; sources and measured recipes: docs/policies.md.
    """

    kind: Literal["warm_start"] = "warm_start"
    seed: int | None = None
    """Seed of weights and demonstrations. Unset: the run's seed."""
    hidden_size: PositiveInt = 64
    layers: PositiveInt = 2
    heads: PositiveInt = 2
    kv_heads: PositiveInt = 1
    head_dim: PositiveInt = 32
    intermediate_size: PositiveInt = 192
    tie_word_embeddings: bool = True
    steps: PositiveInt = 600
    """Optimizer steps of supervised training on demonstrations."""
    batch_size: PositiveInt = 32
    learning_rate: PositiveFloat = 1e-2
    """Peak; linear warm-up, then linear decay."""
    good_fraction: Fraction = 0.25
    """Share of demonstrations that follow the right procedure. The rest show the wrong ones a policy must unlearn."""


PolicyConfig = Annotated[PretrainedPolicy | WarmStartPolicy, Field(discriminator="kind")]
