"""The rewards of TRL's GRPOTrainer for stored completions: `python trl_rewards.py rewards.py completions.json out.json`."""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


def main(file: str, completions: str, output: str) -> None:
    spec = importlib.util.spec_from_file_location("rewards", file)
    assert spec is not None
    assert spec.loader is not None
    rewards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rewards)
    made = json.loads(Path(completions).read_text())
    Path(output).write_text(json.dumps([rewards_of(case, rewards) for case in made]))


def rewards_of(case: dict[str, Any], rewards: Any) -> list[float | None]:
    """Return the weighted reward of each completion; None if no function applied."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    sizes = {
        "vocab_size": 3,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    rows, completions = case["rows"], case["completions"]
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=LlamaForCausalLM(LlamaConfig(**sizes)),
            reward_funcs=[getattr(rewards, name) for name in case["functions"]],
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            args=GRPOConfig(
                output_dir=directory,
                report_to=[],
                use_cpu=True,
                bf16=False,
                per_device_train_batch_size=2,
                num_generations=2,
                reward_weights=case["weights"],
            ),
        )
        values = trainer._calculate_rewards(rows, [row["prompt"] for row in rows], completions, [[0]] * len(rows))
        total = (values * trainer.reward_weights.to(values.device).unsqueeze(0)).nansum(dim=1)
    unscored = torch.isnan(values).all(dim=1)
    return [None if none else value for value, none in zip(total.tolist(), unscored.tolist(), strict=True)]


if __name__ == "__main__":
    main(*sys.argv[1:])
