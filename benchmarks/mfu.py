"""How much of the machine's peak a packed training step uses (MFU), and the memory that long rows take.

    python benchmarks/mfu.py [--tokens 8192] [--length 8192] [--repeats 5] [--long 32768]

On a GPU: a dense model of about 1.5 B parameters (the shape of Qwen2.5-1.5B) in bfloat16, forward and backward of one packed
row through the train service's own scorer, against the chip's dense bf16 peak; then one row of `--long` tokens with chunked
logits and recomputed activations, for its peak memory. The weights are bfloat16, as FSDP uses them in a pass: a run on one
GPU has float32 weights, casts and a float32 residual stream beside them, and every run the optimizer's step and state. Without
a GPU a tiny model runs on the CPU in float32, and "peak" is what a large matrix product reaches on this thread: the machinery
is shown to work, the figure says nothing about a GPU.

Model FLOPs of a row: 6 · P for each token and 6 · L · h · n² for the causal attention of each sequence of n tokens (forward
2 · P and 2 · L · h · n², backward twice that), with P the weights that multiply a token. Recomputation counts for nothing. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from roundhouse.training.batch import TrainingSequences
from roundhouse.training.forward import Scorer
from roundhouse.training.layers import checkpoint_activations
from roundhouse.training.memory_plan import known_device
from roundhouse.training.packed_attention import PACKED, register_packed_attention
from roundhouse.training.packing import Microbatch, build_microbatches, cost_model

LARGE: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "intermediate_size": 8960, "max_position_embeddings": 131_072, "tie_word_embeddings": True,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 768, "max_position_embeddings": 131_072, "tie_word_embeddings": True,
}  # fmt: skip


def make_scorer(device: torch.device, chunk: int, recompute: bool) -> Scorer:
    """A model with random weights, bf16 on a GPU."""
    register_packed_attention()
    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    size = (LARGE if on_gpu else TINY) | {"attn_implementation": PACKED}
    config = Qwen2Config(**size)
    with device:
        model = Qwen2ForCausalLM(config)
    torch.nn.Module.to(model, torch.bfloat16 if on_gpu else torch.float32).eval()
    if recompute:
        checkpoint_activations(model)
    return Scorer(model, dtype="bfloat16" if on_gpu else "float32", logits_chunk=chunk, sharded=on_gpu)


def make_row(tokens: int, length: int, vocabulary: int) -> Microbatch:
    """One packed row of sequences of `length`; every token but the first of each is predicted."""
    ids = np.random.default_rng(0).integers(0, vocabulary, tokens).tolist()
    rows = [
        {
            "sequence_id": str(start),
            "rollout_id": str(start),
            "group_id": "0",
            "token_ids": [*ids[start : start + length], 0],
            "loss_mask": [0] + [1] * len(ids[start : start + length]),
            "gen_logprobs": [0.0] * (len(ids[start : start + length]) + 1),
            "policy_version": 0,
            "reward": 0.0,
        }
        for start in range(0, tokens, length)
    ]
    batch = TrainingSequences.from_records(rows)
    (row,) = build_microbatches(batch, range(len(batch)), batch.loss_mask, budget=tokens, packed=True)
    return row


def flops(scorer: Scorer, row: Microbatch) -> float:
    """Model FLOPs of forward and backward; 6 · P · cost, because cost is n + n²/knee and knee is P / (L · h)."""
    config: Any = scorer.model.config
    cost = cost_model(scorer.model)
    weights = cost.knee * config.num_hidden_layers * config.hidden_size
    assert row.spans is not None
    lengths = np.concatenate([np.full(span.count, span.length) for span in row.spans])
    return 6 * weights * float(cost.of(lengths).sum())


def step_seconds(scorer: Scorer, row: Microbatch, repeats: int) -> list[float]:
    """Seconds of forward and backward: wall on a GPU, CPU otherwise."""
    device = row.input_ids.device
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    seconds = []
    for _ in range(repeats + 2):  # two to warm up
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = clock()
        scorer.predict(row).log_probs.mean().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(clock() - begun)
        scorer.zero_grad(set_to_none=True)
    return seconds[2:]


def peak_flops(device: torch.device) -> tuple[float, str]:
    """The machine's peak and where the number comes from."""
    if device.type != "cuda":
        return product_flops(1024, device), "a matrix product of 1024 by 1024 on one CPU thread"
    name = torch.cuda.get_device_name(device)
    if (known := known_device(name)) is not None:
        return known.bf16_flops, f"data sheet of {name}"
    return product_flops(
        8192, device
    ), f"a bf16 matrix product of 8192 by 8192 on {name}, measured: below its data sheet"


def product_flops(size: int, device: torch.device) -> float:
    """What the fastest of ten matrix products reaches."""
    on_gpu = device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    seconds = []
    for _ in range(10):
        if on_gpu:
            torch.cuda.synchronize(device)
        begun = clock()
        a @ a
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(clock() - begun)
    return 2 * size**3 / min(seconds)


def memory(device: torch.device) -> float:
    """Peak GiB so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure_step(tokens: int, length: int, repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Share of the peak and tokens a second of one packed row, printed too."""
    scorer = make_scorer(device, chunk=2048 if device.type == "cuda" else 0, recompute=False)
    row = make_row(tokens, length, 2048).to(device)
    seconds = step_seconds(scorer, row, repeats)
    work, (peak, source) = flops(scorer, row), peak_flops(device)
    median = statistics.median(seconds)
    parameters = sum(parameter.numel() for parameter in scorer.model.parameters())
    print(f"{parameters / 1e9:.3f} B parameters, {tokens} tokens packed, on {device.type}; peak from {source}")
    print(f"{median:.4f} s ({min(seconds):.4f} … {max(seconds):.4f}), {tokens / median:.0f} tokens/s")
    print(f"{work / median / 1e12:.3f} TFLOP/s of {peak / 1e12:.3f}: MFU {work / median / peak:.1%}")
    return [
        result("mfu", round(work / median / peak, 4), "share of peak"),
        result("tokens", round(tokens / median, 1), "tokens/s"),
    ]


def measure_long(tokens: int, device: torch.device) -> dict[str, Any]:
    """Peak memory of one long sequence, printed too."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    scorer = make_scorer(device, chunk=1024, recompute=True)
    step_seconds(scorer, make_row(tokens, tokens, 2048).to(device), 0)
    print(f"one sequence of {tokens}, chunked logits, recomputed activations: peak {memory(device):.2f} GiB")
    return result(f"memory of {tokens} tokens", round(memory(device), 3), "GiB")


def result(case: str, value: float, unit: str) -> dict[str, Any]:
    return {"case": case, "value": value, "unit": unit, "peer": None, "ratio": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="of the packed row")
    parser.add_argument("--length", type=int, default=None, help="of each sequence; the whole row by default on a GPU")
    parser.add_argument("--long", type=int, default=None, help="tokens of the long row; 32768 on a GPU, 8192 on a CPU")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        torch.set_num_threads(1)
        print("No GPU here: a tiny model on one CPU thread. These figures say nothing about a GPU.")
    length = arguments.length or (arguments.tokens if on_gpu else 1024)
    results = measure_step(arguments.tokens, length, arguments.repeats, device)
    results.append(measure_long(arguments.long or (32_768 if on_gpu else 8_192), device))
    machine = {"cpu": platform.processor() or platform.machine(), "device": device.type, "torch": torch.__version__}
    if on_gpu:
        machine["gpu"] = torch.cuda.get_device_name(device)
    print("\n" + json.dumps({"bench": "mfu", "results": results, "machine": machine}))


if __name__ == "__main__":
    main()
