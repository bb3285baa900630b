"""The small Qwen3 model of a starting policy.

Invariant: weights are float32 and depend on the configuration, the vocabulary and the seed alone; the caller's random state
is left as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundhouse.config.models import WarmStartPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

MAX_POSITIONS = 4096


def make_model(config: WarmStartPolicy, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """An untrained model for `tokenizer`'s vocabulary."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        # 0.02 is meant for wide models. At 64 dimensions 0.1 learns to copy in half the steps, and 0.125 was less even.
        initializer_range=0.8 * config.hidden_size**-0.5,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(shape)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model
