"""Compare log-probabilities of tiny random models by vLLM and by plain transformers: a line of JSON for each line of the input.

    in    {"model_type": "gemma3", "directory": "…", "dtype": "float32"}
    out   {"off": 1e-6, "start": 4.2, "refit": 0.1} or {"error": "…"}

"off" is the largest difference, all others are CPU seconds. vLLM is imported once. Each model has a fork, because an engine
leaves its distributed state in the process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from roundhouse.config.models import GenerationConfig
from roundhouse.generation import vllm_engine
from roundhouse.imports import broken_torch_extensions

CONFIG = GenerationConfig(kv_cache_gib=0.03125, max_model_len=64, dtype="float32")
TOKENS = list(range(10, 40))
SIZES = {
    "head_dim": 32, "global_head_dim": 32, "hidden_size": 128, "intermediate_size": 64, "intermediate_size_mlp": 64,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "mamba_d_head": 64, "mamba_d_ssm": 256,
}  # fmt: skip
"""The smallest sizes that vLLM's kernels for CPUs have."""
TOWER = dict.fromkeys(("out_hidden_size", "vision_output_dim", "projector_input_dim", "projector_output_dim"), 128)
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 8]}}


def save(model_type: str, directory: Path) -> Path:
    """Write a random model with a tokenizer of words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from tests.training.families import FAMILIES, TEXT

    [family] = [family for family in FAMILIES if family.model_type == model_type]
    changes = family.changes | SIZES | (MROPE if "rope_parameters" in family.changes else {})
    if "attention_chunk_size" in changes:
        changes["attention_chunk_size"] = 128
    towers = family.towers and {
        part: {key: TOWER.get(key, value) for key, value in tower.items()} if isinstance(tower, dict) else tower
        for part, tower in family.towers.items()
    }
    words = {f"w{number}": number for number in range(TEXT["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2").save_pretrained(directory)
    return replace(family, changes=changes, towers=towers).save(directory)


def by_transformers(directory: Path) -> list[float]:
    import torch

    from tests.training.test_families import plain

    with torch.no_grad():
        scores = plain(directory)(torch.tensor([TOKENS])).logits[0].float().log_softmax(-1)
    return [float(scores[at, token]) for at, token in enumerate(TOKENS[1:])]


def by_vllm(directory: Path, dtype: str) -> tuple[list[float], float, float]:
    """Return the log-probabilities after a refit, and the CPU seconds of the engine's start and of the refit."""
    from vllm import LLM, SamplingParams

    start = time.process_time()
    config = CONFIG.model_copy(update={"dtype": dtype})
    llm = LLM(disable_log_stats=True, **vllm_engine.engine_arguments(config, str(directory)))
    started = time.process_time()
    llm.collective_rpc("roundhouse_load", args=(str(directory),))
    loaded = time.process_time()
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    [answer] = llm.generate([{"prompt_token_ids": TOKENS}], sampling, use_tqdm=False)
    scores = [next(iter(each.values())).logprob for each in answer.prompt_logprobs[1:]]
    return scores, started - start, loaded - started


def compare(line: str, answer: Any) -> None:
    request = json.loads(line)
    try:
        directory = save(request["model_type"], Path(request["directory"]))
        expected = by_transformers(directory)
        scores, start, refit = by_vllm(directory, request["dtype"])
        off = max(abs(a - b) for a, b in zip(scores, expected, strict=True))
        answer.send({"off": off, "start": start, "refit": refit})
    except Exception as error:  # noqa: BLE001 - of any part of vLLM
        traceback.print_exc()
        answer.send({"error": f"{type(error).__name__}: {error}"})
    os._exit(0)


def main() -> None:
    os.environ.update(vllm_engine.environment(CONFIG) | vllm_engine.without_compiler(CONFIG))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    broken_torch_extensions()
    from vllm import LLM  # noqa: F401  (for all forks)
    from vllm.model_executor.models import registry

    vllm_engine.allow_proxies()
    vars(registry)["_run_in_subprocess"] = lambda inspect: inspect()  # a process of vLLM for each class takes longer
    for line in sys.stdin:
        here, there = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=compare, args=(line, there))
        child.start()
        there.close()
        try:
            reply = here.recv()
        except EOFError:
            reply = {"error": "the process ended"}
        child.join()
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
