"""Program of `test_adapter`: prompt log-probabilities from vLLM, with and without an adapter.

python tests/generation/adapter.py <model directory> <adapter directory> <prompt token ids as JSON>
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    model, adapter, ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    engine = LLM(
        model=model,
        enable_lora=True,
        max_lora_rank=8,
        enforce_eager=True,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
    )
    settings = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)

    def log_probs(request: LoRARequest | None) -> list[float]:
        prompts: Any = [{"prompt_token_ids": ids}]
        (answer,) = engine.generate(prompts, settings, lora_request=request, use_tqdm=False)
        assert answer.prompt_logprobs is not None
        return [entry[token].logprob for entry, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True) if entry]

    found = {"base": log_probs(None), "adapter": log_probs(LoRARequest("v1", 1, adapter))}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
