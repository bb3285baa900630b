"""Distance of the engine's log-probabilities from the trainer's, by number format, with the corrections that bound it.

    python benchmarks/precision.py [--models llama qwen3_moe] [--prompts N] [--tokens N]

A random model of each family generates with vLLM on CPU, in float32, in bfloat16, and in bfloat16 with a float32 head
(`generation.engine_args: {hf_overrides: {head_dtype: float32}}`). The trainer computes the same tokens in float32 and in
bfloat16. x is the trainer's log-probability minus the engine's. A model with experts has a router, which chooses two of
eight for each token: `experts differ` is the share of tokens for which engine and trainer choose others in some layer.

Columns: mean and largest |x|; the largest weight of `tis` (bounds 0 to 2); sequences that `seq-mask-tis` leaves out
(0.999 to 1.002) and the largest |x| a token of those that it keeps, as mean of the sequence. Trained models have sharper
distributions than these; the order of magnitude is what a number format does. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY, PROMPT = 512, 16
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 256, "max_position_embeddings": 256, "initializer_range": 0.12,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window": 64},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True},
}
ENGINES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, float32 head": {"dtype": "bfloat16", "hf_overrides": {"head_dtype": "float32"}},
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A generated sequence with its log-probabilities by the engine."""

    prompt: list[int]
    tokens: list[int]
    log_probs: list[float]

    def record(self, number: int) -> dict[str, Any]:
        mask = [0] * len(self.prompt) + [1] * len(self.tokens)
        return {
            "sequence_id": str(number),
            "rollout_id": str(number),
            "group_id": str(number),
            "token_ids": self.prompt + self.tokens,
            "loss_mask": mask,
            "gen_logprobs": [0.0] * len(self.prompt) + self.log_probs,
            "policy_version": 0,
            "reward": 0.0,
        }


def save_model(kind: str, directory: Path) -> None:
    """Write a random model in bfloat16, so that each number format begins with the same weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SHAPE | MODELS[kind]))
    model: Any = AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(directory)


def generate(directory: str, engine: str, prompts: int, tokens: int) -> None:
    """Generate with vLLM and print the answers; runs in a separate process."""
    from vllm import LLM, SamplingParams, TokensPrompt

    from roundhouse.generation.vllm_engine import allow_proxies

    allow_proxies()
    llm = LLM(
        model=directory,
        skip_tokenizer_init=True,
        max_model_len=PROMPT + tokens + 1,
        enforce_eager=True,
        enable_chunked_prefill=False,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=2**28,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        **ENGINES[engine],
    )
    random = np.random.default_rng(0)
    asked = random.integers(0, VOCABULARY, (prompts, PROMPT)).tolist()
    drawn = SamplingParams(temperature=1.0, max_tokens=tokens, logprobs=0, detokenize=False, ignore_eos=True, seed=0)
    answers = []
    for prompt, output in zip(
        asked, llm.generate([TokensPrompt(prompt_token_ids=each) for each in asked], drawn, use_tqdm=False), strict=True
    ):
        answer: Any = output.outputs[0]
        log_probs = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        answers.append([prompt, list(answer.token_ids), log_probs])
    print("\n" + json.dumps(answers))


def generated(directory: Path, engine: str, prompts: int, tokens: int) -> list[Answer] | str:
    """Return the answers of vLLM, or the reason why it has none."""
    from roundhouse.config.models import GenerationConfig
    from roundhouse.generation.vllm_engine import environment

    command = [sys.executable, __file__, "--generate", str(directory), engine]
    command += ["--prompts", str(prompts), "--tokens", str(tokens)]
    variables = os.environ | environment(GenerationConfig()) | {"PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1"}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True)
    if ended.returncode:
        return (ended.stderr.strip().splitlines() or ["no output"])[-1]
    return [Answer(*each) for each in json.loads(ended.stdout.strip().splitlines()[-1])]


def choices(directory: Path, dtype: str, answers: list[Answer]) -> np.ndarray | None:
    """[T, layers, k] experts of each generated token, ordered; None for a model without experts. By plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    if not hasattr(model.config, "num_experts_per_tok"):
        return None
    chosen = []
    with torch.no_grad():
        for answer in answers:
            output = model(torch.tensor([answer.prompt + answer.tokens]), output_router_logits=True)
            layers = torch.stack([logits.reshape(-1, logits.shape[-1]) for logits in output.router_logits], 1)
            best = layers.topk(model.config.num_experts_per_tok).indices.sort(-1).values
            chosen.append(best[len(answer.prompt) - 1 : -1].numpy())  # of the positions that predict
    return np.concatenate(chosen)


def measured(directory: Path, engine: str, answers: list[Answer]) -> Iterator[dict[str, Any]]:
    """Yield a row for each number format of the trainer."""
    from roundhouse.config.models import TrainConfig
    from roundhouse.training.batch import TrainingSequences
    from roundhouse.training.trainer import Trainer

    batch = TrainingSequences.from_records([answer.record(number) for number, answer in enumerate(answers)])
    mask = batch.loss_mask
    owners = batch.sequence_of_token[mask]
    by_engine = choices(directory, ENGINES[engine]["dtype"], answers)
    for dtype in ("float32", "bfloat16"):
        trainer = Trainer.load(directory, TrainConfig.model_validate({"device": "cpu", "dtype": dtype}))
        x = (trainer.log_probs(batch) - batch.gen_logprobs)[mask].astype(np.float64)
        geometric = np.exp(np.bincount(owners, x) / np.bincount(owners))
        kept = (geometric >= 0.999) & (geometric <= 1.002)
        means = np.bincount(owners, np.abs(x)) / np.bincount(owners)
        row: dict[str, Any] = {
            "engine": engine,
            "trainer": dtype,
            "mean |x|": float(np.abs(x).mean()),
            "largest |x|": float(np.abs(x).max()),
            "largest weight": float(np.exp(x).clip(0, 2).max()),
            "left out": float(1 - kept.mean()),
            "kept": float(means[kept].max()) if kept.any() else None,
            "experts differ": None,
        }
        if by_engine is not None:
            by_trainer = choices(directory, dtype, answers)
            row["experts differ"] = float((by_engine != by_trainer).any((1, 2)).mean())
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--generate", nargs=2, metavar=("DIRECTORY", "ENGINE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.generate:
        directory, engine = arguments.generate
        generate(directory, engine, arguments.prompts, arguments.tokens)
        return
    print(f"{arguments.prompts} answers of {arguments.tokens} tokens\n")
    columns = ("mean |x|", "largest |x|", "largest weight", "left out", "kept", "experts differ")
    print(f"{'model':<12} {'engine':<24} {'trainer':<10}" + "".join(f"{name:>16}" for name in columns))
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        for kind in arguments.models:
            directory = Path(work) / kind
            save_model(kind, directory)
            for engine in arguments.engines:
                answers = generated(directory, engine, arguments.prompts, arguments.tokens)
                if isinstance(answers, str):
                    print(f"{kind:<12} {engine:<24} skipped: {answers[:80]}")
                    results.append(
                        {"case": f"{kind}/{engine}", "value": None, "unit": "skipped", "peer": None, "ratio": None}
                    )
                    continue
                for row in measured(directory, engine, answers):
                    values = "".join(
                        f"{'–' if row[name] is None else format(row[name], '.2e'):>16}" for name in columns
                    )
                    print(f"{kind:<12} {engine:<24} {row['trainer']:<10}{values}", flush=True)
                    case = f"{kind}/engine {engine}/trainer {row['trainer']}"
                    results += [
                        {"case": f"{case}/{name}", "value": row[name], "unit": "nats", "peer": None, "ratio": None}
                        for name in columns
                        if row[name] is not None
                    ]
    print("\n" + json.dumps({"bench": "precision", "results": results, "machine": {"cpu": platform.machine()}}))


if __name__ == "__main__":
    main()
