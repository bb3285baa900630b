"""The pool after a crash, from the datasets that the collect stages wrote.

Invariant: a rollout that is on disk with its turns is in the pool again, once, whichever attempt wrote it. One that failed is
not (it is rolled out again or stays on record), nor one that was trained on (its iteration is not among those given).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from roundhouse.collection.pool import TrajectoryPool
from roundhouse.collection.stores import Trajectory
from roundhouse.store.location import Location
from roundhouse.store.stage import Stage, read_part
from roundhouse.trajectories.records import Rollout, Status
from roundhouse.trajectories.schemas import ROLLOUTS, TURNS, rollouts_from_tables


def written_rollouts(stage: Location) -> list[Rollout]:
    """The rollouts in a collect stage's directory, complete or not; of one written twice, the one that did not fail, else the
    newest. Turns are written before rollouts, so a rollout that is there has its turns."""
    found: dict[str, Rollout] = {}
    for name in sorted(name for name in stage.names() if name.startswith("rollouts-") and name.endswith(".parquet")):
        rollouts = read_part(stage, name, ROLLOUTS)
        turns = read_part(stage, "turns-" + name.removeprefix("rollouts-"), TURNS)
        if rollouts is None or turns is None:  # damaged: what it held is rolled out again
            continue
        for rollout in rollouts_from_tables(rollouts, turns):
            before = found.get(rollout.rollout_id)
            if before is None or before.status is Status.FAILED or rollout.status is not Status.FAILED:
                found[rollout.rollout_id] = rollout
    return sorted(found.values(), key=lambda rollout: (rollout.group_id, rollout.sample))


def by_id(stage: Stage) -> dict[str, Rollout]:
    """`written_rollouts` by their id."""
    return {rollout.rollout_id: rollout for rollout in written_rollouts(stage.location)}


def fill_from_stages(
    pool: TrajectoryPool, stages: Mapping[int, Location], model_tag: str = "default"
) -> dict[int, list[Rollout]]:
    """Put what the untrained iterations have on disk; return what was put, by iteration.

    Args:
        stages: the collect stage's directory of each iteration that is begun and not trained.
    """
    put: dict[int, list[Rollout]] = {}
    for iteration, stage in sorted(stages.items()):
        rollouts = _usable(written_rollouts(stage))
        kept = [r for r in rollouts if pool.put(Trajectory(r, iteration, model_tag)).word == "success"]
        put[iteration] = kept
    return put


def _usable(rollouts: Iterable[Rollout]) -> list[Rollout]:
    return [rollout for rollout in rollouts if rollout.status is not Status.FAILED and rollout.turns]
