"""The training part of a step against TRL's GRPOTrainer: same model, batch, loss and optimizer; CPU seconds, alternating.

    python benchmarks/against_trl.py [--peer-python /path/to/python] [--repeats N]

Ours is `Trainer.step` whole: advantages, packing, forward, loss, backward, AdamW, every metric and the report. TRL's is what
`trl_peer.py` says. Before anything is timed, the losses must agree to 1e-5 at old log-probabilities that are not the current
ones (so that ratios and clips matter), and the gradient norms of the first steps to 1e-4. `equal` is 64 completions of 64
tokens, where there is no padding to save; `as they fall` has log-normal lengths. TRL runs in the interpreter of
`--peer-python`; where it cannot be imported the peer is reported as skipped. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from roundhouse.config.algorithms import GRPOConfig
from roundhouse.config.models import OptimizerConfig, TrainConfig
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.service.verbs import token_positions
from roundhouse.training.trainer import Trainer, TrainStep

VOCABULARY, GROUP, ROLLOUTS, RATE = 258, 8, 64, 1e-4


def make_model(directory: Path) -> Path:
    """0.14 M parameters, as in the measurement of TRL that this continues; with a byte tokenizer that TRL wants to see."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=192,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: index for index, letter in enumerate([*letters, "<pad>", "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(directory)
    return directory


def make_rows(kind: str) -> list[dict[str, Any]]:
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    for i in range(ROLLOUTS):
        prompt = rng.randint(12, 26)
        completion = 64 if kind == "equal" else max(4, min(256, round(rng.lognormvariate(3.6, 0.8))))
        rows.append(
            {
                "sequence_id": str(i),
                "rollout_id": str(i),
                "group_id": str(i // GROUP),
                "token_ids": [rng.randrange(VOCABULARY - 2) for _ in range(prompt + completion)],
                "loss_mask": [0] * prompt + [1] * completion,
                "gen_logprobs": [0.0] * prompt + [-5.5] * completion,
                "policy_version": 0,
                "reward": float(rng.random() < 0.5) if i % GROUP else 1.0 - float(i // GROUP % 2),
            }
        )
    for group in range(0, ROLLOUTS, GROUP):
        rows[group + 1]["reward"] = 1.0 - rows[group]["reward"]  # every group has spread
    return rows


def make_trainer(model: Path) -> Trainer:
    optimizer = OptimizerConfig(
        learning_rate=RATE, betas=(0.9, 0.95), warmup_steps=0, max_grad_norm=1e9, weight_decay=0.0
    )
    config = TrainConfig(
        algorithm=GRPOConfig(clip_low=0.2, clip_high=0.28, mismatch_correction="none"),
        optimizer=optimizer,
        minibatches=1,
        tokens_per_microbatch=16_384,
        device="cpu",
        threads=1,
    )
    return Trainer.load(model, config)


def loss_at(trainer: Trainer, batch: TrainingSequences, old: np.ndarray) -> float:
    """Our loss at given old log-probabilities; the trainer is spent afterwards."""
    step = TrainStep(trainer.learner, batch, 1)
    everything = list(range(len(batch)))
    request = step._loss_batch(everything, token_positions(batch, everything), first=True)
    request = dataclasses.replace(request, old_logprobs=old)
    return trainer.learner.service.forward_backward(request).loss


class Peer:
    """TRL in its own process: `trl_peer.py`."""

    def __init__(self, python: str, message: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name("trl_peer.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(message["threads"]), "PYTHONWARNINGS": "ignore"},
        )
        self.first = self.ask(json.dumps(message))

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (BrokenPipeError, ValueError):
            raise RuntimeError((self.process.communicate(timeout=60)[1].strip() or "it ended")[-2000:]) from None

    def end(self) -> None:
        self.process.communicate("end\n", timeout=60)


def message_to_peer(
    rows: list[dict[str, Any]], batch: TrainingSequences, advantages: np.ndarray, old: np.ndarray
) -> dict[str, Any]:
    """The batch as TRL takes it: prompts and completions apart, one advantage a rollout."""
    ends = [row["loss_mask"].index(1) for row in rows]
    bounds = zip(batch.offsets[:-1] + ends, batch.offsets[1:], strict=True)
    return {
        "prompts": [row["token_ids"][:end] for row, end in zip(rows, ends, strict=True)],
        "completions": [row["token_ids"][end:] for row, end in zip(rows, ends, strict=True)],
        "advantages": advantages[batch.offsets[1:] - 1].tolist(),
        "old": [old[start:stop].tolist() for start, stop in bounds],
        "group_size": GROUP,
        "learning_rate": RATE,
    }


def alternate(trainer: Trainer, batch: TrainingSequences, peer: Peer, repeats: int) -> tuple[list[float], list[float]]:
    """CPU seconds of `repeats` steps of each, one after the other; the first three are checked and not counted."""
    mine, theirs = [], []
    for repeat in range(repeats + 3):
        begun = time.process_time()
        report = trainer.step(batch, repeat + 1)
        seconds = time.process_time() - begun
        told = peer.ask("step")
        if abs(report.metrics["grad_norm"] / told["grad_norm"] - 1) > 1e-4 and repeat < 3:
            raise SystemExit(f"Gradient norms differ at step {repeat + 1}: {report.metrics['grad_norm']}, TRL {told}")
        if repeat >= 3:
            mine.append(seconds)
            theirs.append(told["seconds"])
    return mine, theirs


def compare(kind: str, model: Path, python: str, repeats: int, scratch: Path) -> dict[str, Any]:
    rows = make_rows(kind)
    batch = TrainingSequences.from_records(rows)
    checked = make_trainer(model)
    noise = np.random.default_rng(0).normal(0, 0.3, len(batch.token_ids)).astype(np.float32)
    old = np.where(batch.loss_mask, checked.log_probs(batch) + noise, 0).astype(np.float32)
    advantages = TrainStep(checked.learner, batch, 1).signals.columns.advantages
    given = {"model": str(model), "scratch": str(scratch), "threads": 1}
    peer = Peer(python, given | message_to_peer(rows, batch, advantages, old))
    ours = loss_at(checked, batch, old)
    print(f"\n{kind}: {len(batch.token_ids)} tokens, {int(batch.loss_mask.sum())} trained; TRL {peer.first['trl']}")
    print(f"loss at the same old log-probabilities: {ours:.8f}, TRL {peer.first['loss']:.8f}")
    if abs(ours - peer.first["loss"]) > 1e-5:
        raise SystemExit("The losses differ: the two do not compute the same, and comparing their speed says nothing.")
    mine, theirs = alternate(make_trainer(model), batch, peer, repeats)
    peer.end()
    for name, values in (("roundhouse", mine), ("TRL", theirs)):
        print(f"{name:<12}{statistics.median(values):.4f} CPU s a step ({min(values):.4f} … {max(values):.4f})")
    low, middle, high = statistics.quantiles([a / b for a, b in zip(mine, theirs, strict=True)], n=4)
    print(f"ratio       {middle:.3f} (quartiles {low:.3f} … {high:.3f})")
    return {
        "case": kind,
        "value": round(statistics.median(mine), 5),
        "unit": "CPU s/step",
        "peer": round(statistics.median(theirs), 5),
        "ratio": round(middle, 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
        "loss_difference": abs(ours - peer.first["loss"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter of an environment with TRL")
    parser.add_argument("--repeats", type=int, default=21)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = subprocess.run([arguments.peer_python, "-c", "import trl"], capture_output=True, timeout=300)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model")
        for kind in ("equal", "as they fall"):
            if found.returncode:
                print(f"{kind}: skipped, {arguments.peer_python} has no TRL")
                results.append({"case": kind, "value": None, "unit": "CPU s/step", "peer": "skipped", "ratio": None})
                continue
            results.append(compare(kind, model, arguments.peer_python, arguments.repeats, Path(directory)))
    machine = {"cpu": platform.processor() or platform.machine(), "threads": 1, "torch": torch.__version__}
    print("\n" + json.dumps({"bench": "trl", "results": results, "machine": machine}))


if __name__ == "__main__":
    main()
