"""GRPO in one file: a model with random weights learns to count, from rewards alone, in under a minute on a laptop.

    python docs/examples/grpo_in_one_file.py

The task: the prompt is a digit, the answer is the next three (7 -> 8 9 0). A reward says which share of them is right; nobody
ever shows an answer. The loop is the whole of reinforcement learning from verifiable rewards:

    for each iteration:
        sample G answers to each of P prompts from the policy                 (rollouts; here: transformers)
        score them                                                            (reward)
        compare each with the other answers to the same prompt                (advantage: GRPO)
        make the better ones likelier, within a trust region                  (clipped policy loss, AdamW)

What the library does is the lower half: `TrainingSequences` checks the tokens, an algorithm turns rewards into columns, the
`Trainer` minimises the loss. In a real run the upper half is an engine (vLLM), an agent loop and an environment with tools, and
each half is a durable stage of its own; the lower half is this very code.

Notation: P prompts, G answers each (a group), B = P * G rollouts, L tokens an answer.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from roundhouse.config.algorithms import GRPOConfig
from roundhouse.config.models import OptimizerConfig, TrainConfig
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.trainer import Trainer

P, G, L = 10, 16, 3
DIGITS = 10


def make_policy(directory: Path) -> Path:
    """A Qwen3 of 0.04 M parameters with random weights; the vocabulary is the ten digits."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=DIGITS,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=24,
        max_position_embeddings=16,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


@torch.no_grad()
def sample(policy: Any, prompts_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """L tokens after each prompt: [B, 1 + L] token ids, and [B, L] log-probabilities of what was drawn."""
    tokens, log_probs = prompts_B[:, None], []
    for _ in range(L):
        log_distribution = torch.log_softmax(policy(input_ids=tokens).logits[:, -1], dim=-1)
        drawn = torch.multinomial(log_distribution.exp(), 1)
        log_probs.append(log_distribution.gather(1, drawn))
        tokens = torch.cat([tokens, drawn], dim=1)
    return tokens, torch.cat(log_probs, dim=1)


def reward(prompt: int, answer: list[int]) -> float:
    """Share of the answer's digits that count on from the prompt."""
    return sum(digit == (prompt + place) % DIGITS for place, digit in enumerate(answer, 1)) / L


def roll_out(policy: Any, iteration: int) -> TrainingSequences:
    """P groups of G scored answers, as the records that training reads.

    The loss mask is 1 on what the policy generated and 0 on the prompt; the engine's log-probabilities go along, so that the
    trainer can tell how far engine and trainer are apart. A group is known by its id, never by its prompt.
    """
    torch.manual_seed(iteration)
    prompts_B = torch.arange(P).repeat_interleave(G) % DIGITS
    tokens, log_probs = sample(policy, prompts_B)
    records = []
    for b, (ids, values) in enumerate(zip(tokens.tolist(), log_probs.tolist(), strict=True)):
        records.append(
            {
                "sequence_id": f"{iteration}/{b}",
                "rollout_id": f"{iteration}/{b}",
                "group_id": f"{iteration}/{b // G}",
                "token_ids": ids,
                "loss_mask": [0] + [1] * L,
                "gen_logprobs": [0.0, *values],
                "policy_version": iteration - 1,
                "reward": reward(ids[0], ids[1:]),
            }
        )
    return TrainingSequences.from_records(records)


def show(iteration: int, metrics: dict[str, float]) -> None:
    """One line of an iteration."""
    line = (
        f"iteration {iteration:3d}   reward {metrics['reward']:.2f}   "
        f"groups that teach {metrics['baseline_reward/pct_mixed']:3.0f} %   "
        f"clipped {100 * metrics.get('clip_fraction', 0):4.1f} %   "
        f"engine and trainer differ by {metrics['logprob_abs_diff_max']:.0e}"
    )
    print(line, flush=True)  # noqa: T201 (the output of a script)


def train(iterations: int) -> list[float]:
    """The loop; returns the mean reward of each iteration's rollouts."""
    config = TrainConfig(
        algorithm=GRPOConfig(),  # any other of roundhouse.config.algorithms works here too
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=4),
        minibatches=2,
        device="cpu",
    )
    rewards = []
    with tempfile.TemporaryDirectory() as name:
        directory = make_policy(Path(name))
        trainer = Trainer.load(directory, config)
        engine = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
        for iteration in range(1, iterations + 1):
            engine.load_state_dict(trainer.model.state_dict())  # refit: the engine takes the trainer's weights
            report = trainer.step(roll_out(engine, iteration), iteration)
            rewards.append(report.metrics["reward"])
            if iteration % 5 == 0 or iteration == 1:
                show(iteration, report.metrics)
    return rewards


if __name__ == "__main__":
    disable_progress_bar()
    parser = argparse.ArgumentParser(description="Learn to count, from rewards alone.")
    parser.add_argument("--iterations", type=int, default=40)
    train(parser.parse_args().iterations)
