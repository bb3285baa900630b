"""Learning rates over a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from roundhouse.config.loading import parse_config
from roundhouse.config.models import OptimizerConfig
from roundhouse.errors import ConfigError
from roundhouse.training.trainer import learning_rate


@pytest.mark.parametrize(
    ("schedule", "peer"), [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
def test_a_falling_schedule_is_that_of_transformers(schedule: Any, peer: Any) -> None:
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=5, schedule=schedule, decay_steps=20, final_share=0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = peer(optimizer, num_warmup_steps=5, num_training_steps=25)
    rates = []
    for _ in range(25):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    # ours begins at the first step of the warm-up, theirs at 0
    assert [learning_rate(config, step) for step in range(4)] == pytest.approx(rates[1:5])
    assert [learning_rate(config, step) for step in range(5, 25)] == pytest.approx(rates[5:])
    assert learning_rate(config, 25) == learning_rate(config, 1000) == 0


def test_the_rate_ends_at_its_share_and_stays() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, schedule="cosine", decay_steps=10, final_share=0.25)
    rates = [learning_rate(config, step) for step in range(30)]
    assert rates[0] == 1
    assert rates[5] == pytest.approx(0.625)
    assert set(rates[10:]) == {0.25}
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("keys", [{"schedule": "linear"}, {"decay_steps": 10}])
def test_a_schedule_without_its_end_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"train\.optimizer.*decay_steps"):
        parse_config({"run_id": "r", "train": {"optimizer": keys}})
