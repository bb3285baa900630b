import json

import reasoning_gym
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

problems = reasoning_gym.create_dataset(
    "chain_sum", size=200, seed=0, min_terms=2, max_terms=3, min_digits=1, max_digits=2
)
rows = Dataset.from_list([{"prompt": each["question"], "entry": json.dumps(each)} for each in problems])


def score(completions, entry, **kwargs):
    return [problems.score_answer(text, json.loads(each)) for text, each in zip(completions, entry, strict=True)]


GRPOTrainer(
    model="model",
    reward_funcs=score,
    train_dataset=rows,
    args=GRPOConfig(
        num_generations=2, per_device_train_batch_size=2, max_completion_length=16, max_steps=1, logging_steps=1
    ),
).train()
