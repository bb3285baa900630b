from pathlib import Path

from roundhouse.config.loading import load_config
from roundhouse.environments import load

LOOKUP = Path(__file__).parents[3] / "configs" / "lookup.yaml"


def test_the_lookup_example_leaves_room_for_its_longest_walk() -> None:
    config = load_config(LOOKUP)
    shown = load(config.environment).demonstrations("train", 200, 1.0, seed=0)
    calls = max(sum(said["role"] == "assistant" for said in conversation) for conversation in shown)
    assert calls == 4
    assert calls <= config.rollout.max_turns
