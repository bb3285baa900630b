"""Run recorded stages again and judge recorded rollouts anew.

Invariant: recorded data is never written. A replay has a separate place (`replays/<name>/`), new verdicts are a new
dataset version, and both name their sources. Nothing here samples from a policy.

    from roundhouse.plugins.lab.replays import replay, rescore

    replay(store, "quickstart", iterations=range(10, 21), stages=["train"],
           overrides=["train.optimizer.learning_rate=1e-5"])
    rescore(store, "quickstart", "mended", overrides=["environment.tolerance=0.1"])
"""

from roundhouse.plugins.lab.replays.stages import replay
from roundhouse.plugins.lab.replays.verdicts import rescore

__all__ = ["replay", "rescore"]
