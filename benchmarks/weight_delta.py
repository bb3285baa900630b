"""Bytes and speed of a delta between two successive checkpoints of a real optimizer.

    python benchmarks/weight_delta.py [--hidden 640] [--layers 12] [--steps 3] [--updates 1] [--learning-rate 1e-5]

A Qwen3 model of about 100 million parameters with random weights is trained for a few iterations (of one update each by
default), by the trainer that runs train with; between each two versions a delta is written and applied, in float32 as the
trainer writes checkpoints, and in bfloat16 as an engine holds them. Speeds are of the new checkpoint's bytes, digests and
files included; `copy` reads and writes the files with the digests alone. The model's weights are drawn from N(0, 0.02²), as
in a fresh model; the table by size of weight tells what other weights would give, since a bfloat16 number changes when the
step is not far below its spacing. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from roundhouse.config.models import OptimizerConfig, TrainConfig
from roundhouse.plugins.delta.transport import apply_delta, write_delta
from roundhouse.store.directories import upload_model
from roundhouse.store.location import Location
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.trainer import Trainer
from roundhouse.weight_sync.tensor_files import TensorFile, weight_files

VOCABULARY = 32_000
T = TypeVar("T")


def make_model(directory: Path, hidden: int, layers: int) -> int:
    """A model directory; how many parameters it has."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=max(1, hidden // 128),
            head_dim=64,
            intermediate_size=4 * hidden,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(directory)
    return model.num_parameters()


def sequences(seed: int, groups: int, length: int) -> TrainingSequences:
    """Groups of four rollouts with two rewards, tokens by Zipf's law as in text."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(4 * groups):
        tokens = np.minimum(rng.zipf(1.2, length), VOCABULARY) - 1
        mask = [0] * 8 + [1] * (length - 8)
        rows.append(
            {
                "sequence_id": f"s{index}",
                "rollout_id": f"s{index}",
                "group_id": f"g{index // 4}",
                "token_ids": tokens.tolist(),
                "loss_mask": mask,
                "gen_logprobs": [-10.0 * trained for trained in mask],
                "policy_version": 0,
                "reward": float(index % 4 < 2),
            }
        )
    return TrainingSequences.from_records(rows)


def in_bfloat16(source: Path, target: Path) -> Path:
    """The checkpoint as an engine of dtype bfloat16 holds it."""
    target.mkdir()
    for path in weight_files(source):
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
        save_file(tensors, target / path.name, metadata={"format": "pt"})
    return target


def changed_by_size(old: Path, new: Path) -> list[tuple[str, float, float]]:
    """(range of |weight|, share of the weights, share of them that changed), in bfloat16."""
    edges = [0, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, np.inf]
    counts, changed = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    for path in weight_files(old):
        after = TensorFile(new / path.name)
        for tensor in TensorFile(path).tensors():
            bits = tensor.data.view(np.uint16)
            values = torch.from_numpy(bits.copy().view(np.int16)).view(torch.bfloat16).float().abs().numpy()
            bins = np.digitize(values, edges) - 1
            differs = bits != after.tensor(tensor.name).data.view(np.uint16)
            counts += np.bincount(bins, minlength=len(counts))
            changed += np.bincount(bins, weights=differs, minlength=len(counts))
    names = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(edges)]
    return [(name, n / counts.sum(), c / max(n, 1)) for name, n, c in zip(names, counts, changed, strict=True)]


def timed(work: Callable[[], T]) -> tuple[float, float, T]:
    """Wall and CPU seconds, and the result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def measure(old: Path, new: Path, work: Path, threads: int, label: str, rows: list[dict]) -> None:
    """Write and apply one delta, prove the result, add to the rows."""
    place = Location(str(work / "delta"))
    wrote, wrote_cpu, delta = timed(lambda: write_delta(old, new, place, threads=threads))
    applied, applied_cpu, _ = timed(lambda: apply_delta(old, place, work / "made", threads=threads))
    copied, copied_cpu, _ = timed(lambda: upload_model(Location(str(work / "copy")), "0001", new))
    assert delta is not None
    for path in weight_files(new):
        assert path.read_bytes() == (work / "made" / path.name).read_bytes(), f"{path.name} is not bit-equal"
    codecs: dict[str, int] = {}
    for file in delta.weights:
        for piece in (piece for tensor in file.tensors for piece in tensor.pieces):
            codecs[piece.codec.value] = codecs.get(piece.codec.value, 0) + piece.size
    size = delta.full_bytes / 1e6
    share = ", ".join(f"{name} {part / delta.full_bytes:.0%}" for name, part in sorted(codecs.items()))
    print(
        f"{label:<24}{size:8.0f} MB{delta.delta_bytes / 1e6:9.1f} MB{delta.delta_bytes / delta.full_bytes:9.2%}"
        f"{size / wrote:8.0f}{size / applied:8.0f}{size / copied:8.0f}   {share}",
        flush=True,
    )
    for case, value, unit, ratio in [
        ("bytes", delta.delta_bytes, "bytes", delta.delta_bytes / delta.full_bytes),
        ("encode", size / wrote, "MB/s", None),
        ("encode, CPU", size / wrote_cpu, "MB per CPU s", None),
        ("apply", size / applied, "MB/s", None),
        ("apply, CPU", size / applied_cpu, "MB per CPU s", None),
        ("copy", size / copied, "MB/s", None),
        ("copy, CPU", size / copied_cpu, "MB per CPU s", None),
    ]:
        rows.append({"case": f"{label}: {case}", "value": round(value, 3), "unit": unit, "peer": None, "ratio": ratio})
    for name in ("delta", "made", "copy"):
        shutil.rmtree(work / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="iterations, a version each")
    parser.add_argument("--updates", type=int, default=1, help="optimizer steps of an iteration")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--groups", type=int, default=4, help="of four sequences")
    parser.add_argument("--length", type=int, default=96, help="tokens of a sequence")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        count = make_model(work / "v0", arguments.hidden, arguments.layers)
        optimizer = OptimizerConfig(learning_rate=arguments.learning_rate, warmup_steps=0)
        config = TrainConfig(optimizer=optimizer, minibatches=arguments.updates, threads=arguments.threads)
        print(
            f"{count / 1e6:.0f} M parameters, learning rate {arguments.learning_rate:g}, {arguments.updates} updates a version"
        )
        print(f"{'':<24}{'full':>11}{'delta':>12}{'share':>9}{'encode':>8}{'apply':>8}{'copy':>8}   MB/s")
        trainer = Trainer.load(work / "v0", config)
        old, old_half = work / "v0", in_bfloat16(work / "v0", work / "h0")
        for step in range(1, arguments.steps + 1):
            trainer.step(sequences(step, arguments.groups, arguments.length), step)
            new = work / f"v{step}"
            trainer.save(new)
            new_half = in_bfloat16(new, work / f"h{step}")
            measure(old_half, new_half, work, arguments.threads, f"version {step}, bfloat16", rows)
            measure(old, new, work, arguments.threads, f"version {step}, float32", rows)
            sizes = changed_by_size(old_half, new_half)
            shutil.rmtree(old)
            shutil.rmtree(old_half)
            old, old_half = new, new_half
    print("\nbfloat16 numbers that changed in the last version, by size\n|weight|           share   changed")
    for name, share, changed in sizes:
        print(f"{name:<18}{share:7.2%}{changed:9.1%}")
    machine = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__}
    print("\n" + json.dumps({"bench": "weight-delta", "results": rows, "machine": machine}))


if __name__ == "__main__":
    main()
