from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

SHELVES = {"bolts": "C3", "nails": "A1", "hinges": "B2", "screws": "D4"}
PRICES = {"C3": "7", "A1": "2", "B2": "9", "D4": "5"}


def shelf_of(good: str) -> str:
    """Name the shelf of a product.

    Args:
        good: The product.
    """
    return SHELVES.get(good, "unknown")


def price_at(shelf: str) -> str:
    """Name the price at a shelf.

    Args:
        shelf: The shelf.
    """
    return PRICES.get(shelf, "unknown")


def shaped(completions, good, **kwargs):
    rewards = []
    for messages, product in zip(completions, good, strict=True):
        calls = sum(len(each.get("tool_calls") or ()) for each in messages)
        right = PRICES[SHELVES[product]] in str(messages[-1].get("content"))
        rewards.append(0.1 * min(calls, 2) + 0.8 * right)
    return rewards


def rows(goods):
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"What do {each} cost?"}], "good": each} for each in goods]
    )


GRPOTrainer(
    model="model",
    tools=[shelf_of, price_at],
    reward_funcs=shaped,
    train_dataset=rows(["bolts", "nails", "hinges"]),
    eval_dataset=rows(["screws"]),
    args=GRPOConfig(
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=24,
        max_tool_calling_iterations=2,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=2,
        logging_steps=1,
    ),
).train()
