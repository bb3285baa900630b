"""Model families, each as a tiny random model of its configuration class, and the table of docs/models.md.

python -m tests.training.families        prints the table
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 256, "initializer_range": 0.15, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
WINDOW: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 6, "head_dim": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
STATES: dict[str, Any] = {
    "mamba_num_heads": 4, "mamba_n_heads": 4, "mamba_head_dim": 16, "mamba_d_head": 16, "ssm_state_size": 8, "mamba_d_state": 8,
    "n_groups": 1, "mamba_n_groups": 1, "chunk_size": 8, "mamba_chunk_size": 8, "mamba_d_ssm": 64,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
}  # fmt: skip
MROPE: dict[str, Any] = {
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of transformers."""

    name: str
    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the text configuration `TEXT`."""
    towers: dict[str, Any] | None = None
    """Configurations beside that for text; None for a text model."""
    unpacked: str | None = None
    """Reason for which packing is refused, as in the error; None if it works."""
    vllm: str = "equal"
    """On CPU, as the table says it; `equal` (float32) and `bfloat16` are tested (`tests.contracts.test_vllm_families`)."""

    def config(self) -> Any:
        from transformers import AutoConfig

        text = TEXT | self.changes
        return AutoConfig.for_model(
            self.model_type, **(text if self.towers is None else {"text_config": text, **self.towers})
        )

    def save(self, directory: Path) -> Path:
        """Write a random model in bfloat16."""
        import torch

        from roundhouse.pretrained import build_model, without_progress_bars

        torch.manual_seed(0)
        model = build_model(self.config(), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():  # norms and sinks too have numbers of their own
                parameter.add_(0.02 * torch.randn(parameter.shape))
        with without_progress_bars():
            model.to(torch.bfloat16).save_pretrained(directory)
        return directory


LLAMA_4: dict[str, Any] = {
    "num_experts_per_tok": 1, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 8,
}  # fmt: skip
LLAMA_VISION = VISION | {
    "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "pixel_shuffle_ratio": 0.5,
}  # fmt: skip
GEMMA_4: dict[str, Any] = {
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "global_head_dim": 8, "num_kv_shared_layers": 0,
}  # fmt: skip
GRANITE: dict[str, Any] = {
    "attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0,
}  # fmt: skip
QUERY: dict[str, Any] = {"query_pre_attn_scalar": 8}
GLM: dict[str, Any] = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
PIXTRAL = VISION | {"model_type": "pixtral", "head_dim": 8}
CLIP = VISION | {"model_type": "clip_vision_model", "projection_dim": 16}
HYBRID = EXPERTS | STATES | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 24}

FAMILIES = (
    Family("Llama 3, SmolLM 2", "llama"),
    Family("Llama 4, text", "llama4_text", LLAMA_4, None, "chunked_attention"),
    Family("Llama 4", "llama4", LLAMA_4, {"vision_config": LLAMA_VISION}, "chunked_attention"),
    Family("Qwen 2, 2.5", "qwen2"),
    Family("Qwen 2 MoE", "qwen2_moe", EXPERTS),
    Family("Qwen 2.5-VL", "qwen2_5_vl", MROPE, {"vision_config": QWEN_VISION}),
    Family("Qwen 3", "qwen3"),
    Family("Qwen 3 MoE", "qwen3_moe", EXPERTS),
    Family("Qwen 3-VL", "qwen3_vl", MROPE, {"vision_config": QWEN_VISION}),
    Family("Qwen 3-VL MoE", "qwen3_vl_moe", MROPE | EXPERTS, {"vision_config": QWEN_VISION}, vllm="no"),
    Family("Qwen 3-Next", "qwen3_next", EXPERTS | LINEAR, None, "linear_attention", vllm="bfloat16"),
    Family("Qwen 3.5", "qwen3_5", LINEAR, {"vision_config": QWEN_VISION}, "linear_attention", vllm="bfloat16"),
    Family("Qwen 3.5 MoE", "qwen3_5_moe", EXPERTS | LINEAR, {"vision_config": QWEN_VISION}, "linear_attention",
           vllm="bfloat16"),
    Family("Gemma 2", "gemma2", WINDOW | QUERY | {"attn_logit_softcapping": 2.0}),
    Family("Gemma 3, text", "gemma3_text", WINDOW | QUERY),
    Family("Gemma 3", "gemma3", WINDOW | QUERY, {"vision_config": VISION, "mm_tokens_per_image": 1}),
    Family("Gemma 4", "gemma4", WINDOW | GEMMA_4, {"vision_config": VISION, "audio_config": None}),
    Family("Mistral", "mistral", {"sliding_window": 8}),
    Family("Ministral", "ministral", WINDOW),
    Family("Mistral 3", "mistral3", {"model_type": "mistral"}, {"vision_config": PIXTRAL}),
    Family("Mixtral", "mixtral", EXPERTS),
    Family("Phi 3, 4", "phi3"),
    Family("Phi 3.5 MoE", "phimoe", EXPERTS, vllm="–"),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3", WINDOW),
    Family("OLMoE", "olmoe", EXPERTS),
    Family("SmolLM 3", "smollm3"),
    Family("DeepSeek V3", "deepseek_v3", EXPERTS | LATENT, vllm="–"),
    Family("GLM 4", "glm4"),
    Family("GLM 4.5, 4.6", "glm4_moe", EXPERTS | GLM),
    Family("GPT-OSS", "gpt_oss", EXPERTS | WINDOW),
    Family("Granite 3", "granite", GRANITE),
    Family("Granite 4", "granitemoehybrid", HYBRID, None, "linear_attention"),
    Family("Nemotron", "nemotron", {}, None, "does not pass the places"),
    Family("Nemotron-H", "nemotron_h", EXPERTS | STATES | {"layers_block_type": ["mamba", "attention"], "expand": 2}, None,
           "linear_attention", vllm="differs by 0.003"),
    Family("Falcon-H1", "falcon_h1", STATES, None, "hybrid"),
    Family("LFM 2", "lfm2", {"layer_types": ["conv", "full_attention"]}, None, "conv", vllm="no"),
    Family("Command R7B, A", "cohere2", WINDOW, vllm="differs by 0.06"),
    Family("EXAONE 4", "exaone4", WINDOW),
    Family("ERNIE 4.5", "ernie4_5"),
    Family("MiniMax M2", "minimax_m2", EXPERTS, vllm="no"),
    Family("Seed-OSS", "seed_oss"),
    Family("LLaVA", "llava", {"model_type": "llama"}, {"vision_config": CLIP}),
)  # fmt: skip


def table() -> str:
    """Return the families in Markdown."""
    lines = ["| family | `model_type` | trained | packing | vLLM on CPU |", "| --- | --- | --- | --- | --- |"]
    for family in sorted(FAMILIES, key=lambda each: each.name.lower()):
        trained = "all" if family.towers is None else "the language model; towers are frozen"
        why = (
            f"`{family.unpacked}`"
            if "_" in (family.unpacked or "") or family.unpacked in ("conv", "hybrid")
            else "own code"
        )
        packing = "yes" if family.unpacked is None else f"refused: {why}"
        lines.append(f"| {family.name} | `{family.model_type}` | {trained} | {packing} | {family.vllm} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
