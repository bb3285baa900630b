"""TRL's GRPOTrainer on command, in an environment of its own: lines of JSON on standard input and output.

**A fixed batch** (`against_trl.py`). The first line has model directory, prompts, completions, advantages, old
log-probabilities, settings. The first answer is the loss of the batch at these old log-probabilities, computed by TRL's own
`_compute_loss`. Then each line `step` is answered by CPU seconds and gradient norm of one training step (forward, loss,
backward, clipping, AdamW), and `end` ends it. Generation and rewards are replaced by the batch, because only the training part
is compared: what TRL does from `on_step_begin` to `on_step_end` is timed, and nothing of its logging, saving or data loading.

**Tasks** (`pretrained_trl.py`). The first line has model directory, chat messages of each task, settings. The first answer
comes when the model is loaded. The line `train` begins; each generation is answered by its completions, and continues with
their rewards, `[0.2, 1.0, …]`, or ends with `null`. The last answers have the trained model's directory, before and after it is
written. Nothing of TRL is replaced but the rate of each optimizer step.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SAY = sys.stdout
sys.stdout = sys.stderr  # libraries print; the answers stay readable


def answer(values: dict[str, Any]) -> None:
    SAY.write(json.dumps(values) + "\n")
    SAY.flush()


def padded(rows: list[list[float]], *, left: bool, dtype: torch.dtype) -> torch.Tensor:
    width = max(map(len, rows))
    filled = [[0] * (width - len(row)) + row if left else row + [0] * (width - len(row)) for row in rows]
    return torch.tensor(filled, dtype=dtype)


def fixed_batch(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What `_generate_and_score_completions` returns, with prompts padded left and completions right."""
    prompts, completions = given["prompts"], given["completions"]
    batch = {
        "prompt_ids": padded(prompts, left=True, dtype=torch.long),
        "prompt_mask": padded([[1] * len(row) for row in prompts], left=True, dtype=torch.long),
        "completion_ids": padded(completions, left=False, dtype=torch.long),
        "completion_mask": padded([[1] * len(row) for row in completions], left=False, dtype=torch.long),
        "advantages": torch.tensor(given["advantages"]),
    }
    return batch | {"num_items_in_batch": batch["completion_mask"].sum()}


class OnCommand(TrainerCallback):
    """Begins a step when told to, and answers what it took."""

    begun = norm = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if sys.stdin.readline().strip() != "step":
            sys.exit(0)
        self.begun = time.process_time()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        # called after clipping, which is set beyond any norm
        paused = time.process_time()
        norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
        self.norm = float(torch.stack(norms).norm())
        self.begun += time.process_time() - paused

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        answer({"seconds": time.process_time() - self.begun, "grad_norm": self.norm})


def settings(given: dict[str, Any], **chosen: Any) -> GRPOConfig:
    """What both uses have in common: GRPO in float32 on CPU, without a reference, and nothing logged or saved on the way."""
    return GRPOConfig(
        output_dir=given["scratch"],
        num_generations=given["group_size"],
        gradient_accumulation_steps=1,
        learning_rate=given["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        temperature=1.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **chosen,
    )


def repeat_one_batch(given: dict[str, Any]) -> None:
    count = len(given["prompts"])
    trainer = GRPOTrainer(
        model=given["model"],
        reward_funcs=lambda completions, **rest: [0.0] * len(completions),
        args=settings(
            given,
            per_device_train_batch_size=count,
            max_steps=1_000_000,
            max_completion_length=max(map(len, given["completions"])),
            max_grad_norm=1e9,
            loss_type="dapo",
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * count}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(given["model"]),
        callbacks=[OnCommand()],
    )
    batch = fixed_batch(given)
    old = padded(given["old"], left=False, dtype=torch.float32)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # `train` sets it
    with torch.no_grad():
        loss = trainer._compute_loss(trainer.model, batch | {"old_per_token_logps": old})
    answer({"loss": float(loss), "trl": trl.__version__, "torch": torch.__version__})
    trainer._generate_and_score_completions = lambda inputs: dict(batch)
    trainer.train()


class EndedEarly(Exception):
    """The other side gives no more rewards."""


class Scheduled(GRPOTrainer):
    """With the rate of each optimizer step as it was given."""

    rates: list[float]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        rates = [rate / self.args.learning_rate for rate in [*self.rates, 0.0]]
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, rates.__getitem__)
        return self.lr_scheduler


def train_on_tasks(given: dict[str, Any]) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(given["model"])

    def rewarded(completions: Any, completion_ids: Any, task: Any, **rest: Any) -> list[float]:
        ended = [ids[-1] == tokenizer.eos_token_id for ids in completion_ids]
        texts = [messages[0]["content"] for messages in completions]
        answer({"tasks": task, "texts": texts, "ended": ended, "tokens": sum(map(len, completion_ids))})
        rewards = json.loads(sys.stdin.readline())
        if rewards is None:
            raise EndedEarly
        return rewards

    tasks, rollouts = given["tasks"], given["prompts_per_iteration"] * given["group_size"]
    trainer = Scheduled(
        model=given["model"],
        reward_funcs=rewarded,
        args=settings(
            given,
            per_device_train_batch_size=rollouts // given["minibatches"],
            steps_per_generation=given["minibatches"],
            max_steps=len(given["rates"]),
            max_completion_length=given["max_tokens"],
            max_grad_norm=given["max_grad_norm"],
            loss_type="bnpo",
            scale_rewards="none",
            shuffle_dataset=False,
            seed=given["seed"],
            model_init_kwargs={"dtype": "float32"},
        ),
        train_dataset=Dataset.from_dict({"prompt": tasks, "task": list(range(len(tasks)))}),
        processing_class=tokenizer,
    )
    trainer.rates = given["rates"]
    answer({"trl": trl.__version__, "torch": torch.__version__})
    sys.stdin.readline()
    early = False
    try:
        trainer.train()
    except EndedEarly:
        early = True
    answer({"model": given["scratch"], "ended_early": early})
    trainer.save_model(given["scratch"])
    answer({"saved": True})


def main() -> None:
    given = json.loads(sys.stdin.readline())
    torch.set_num_threads(given["threads"])
    if "tasks" in given:
        train_on_tasks(given)
    else:
        repeat_one_batch(given)


if __name__ == "__main__":
    main()
