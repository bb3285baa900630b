"""Run recorded stages again and judge recorded rollouts anew.

Invariant: what is recorded is never written. A replay has a place of its own (`replays/<name>/`), new verdicts are a new
dataset version, and both name what they were made from. Nothing here samples from a policy.

    from roundhouse.replay import replay, rescore

    replay(store, "quickstart", iterations=range(10, 21), stages=["train"], overrides=["train.optimizer.learning_rate=1e-5"])
    rescore(store, "quickstart", "mended", overrides=["environment.tolerance=0.1"])
"""

from roundhouse.replay.stages import replay
from roundhouse.replay.verdicts import rescore

__all__ = ["replay", "rescore"]
