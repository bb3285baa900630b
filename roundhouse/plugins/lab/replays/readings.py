"""A metric of a run's versions: as recorded, at its fall, and estimated for other weights.

A replayed version is measured without an engine, by the recorded rollouts of the good and the bad version, each
weighted by its probability under the new weights over that under their mixture (self-normalised importance sampling,
with the balance heuristic of Veach and Guibas 1995). If the effective number of these rollouts is too small
(`MIN_ESS`), or the new weights behave differently (`MIN_COVERED`), those of other versions are added; if that is not
enough, the measurement is refused.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from roundhouse.errors import StoreError
from roundhouse.stages.evaluate import rewards_by_task
from roundhouse.stages.freshness import kish
from roundhouse.stages.train import log_probs_under
from roundhouse.stages.trainer_home import trainer_home
from roundhouse.store.directories import checkpoint_cache
from roundhouse.store.run import Run
from roundhouse.store.stage import Reference, StageKind, read_table
from roundhouse.training.batch import TrainingSequences
from roundhouse.trajectories.records import Rollout, Status
from roundhouse.trajectories.schemas import chains_of, sequences_table

THRESHOLD = 4.0
"""Standard errors that a metric has to fall by: at hundreds of versions, chance does it in one run of a hundred."""
MIN_ESS = 0.05
"""Smallest effective share of the recorded rollouts for an estimate of other weights."""
MIN_COVERED = 0.6
"""Smallest share of the other weights' rollouts that the recorded ones cover: the mean weight before normalisation.
Otherwise, weights with unrecorded behaviour would be judged by their recorded part alone."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The metric of one version."""

    version: int
    by_task: Mapping[str, Sequence[float]]

    @property
    def value(self) -> float:
        """Mean over tasks of their means."""
        return fmean(map(fmean, self.by_task.values()))


@dataclass(frozen=True, slots=True)
class Fall:
    """From a version that was good to the first that is not."""

    good: int
    bad: int
    before: float
    after: float
    standard_errors: float


def recorded_readings(run: Run, metric: str) -> list[Reading]:
    """The metric of each version that has it, ascending."""
    versions = sorted(int(name) for name in (run.location / "iterations").names() if name.isdigit())
    if metric == "reward":
        versions = [version - 1 for version in versions if version > run.first_version]
    readings = []
    for version in versions:
        if (reference := measured_on(run, metric, version)) is None:
            continue
        rows = read_table(reference, "rollouts").select(["group_id", "status", "reward"]).to_pylist()
        by_task: dict[str, list[float]] = {}
        for row in rows:
            if Status(row["status"]).counted and row["reward"] is not None:
                by_task.setdefault(row["group_id"], []).append(row["reward"])
        if by_task:
            readings.append(Reading(version, by_task))
    return readings


def measured_on(run: Run, metric: str, version: int) -> Reference | None:
    """The rollouts of a version that the metric is taken from."""
    if metric == "reward":
        return run.stage(version + 1, StageKind.COLLECT).reference()
    return run.stage(version, StageKind.EVALUATE).reference()


def find_fall(readings: Sequence[Reading], threshold: float = THRESHOLD) -> Fall | None:
    """The first fall that chance does not explain: `threshold` standard errors below the best version before.

    The good version is the last one before that had lost less than half of it.
    """
    best = readings[0]
    for place, reading in enumerate(readings[1:], 1):
        distance = best.value - reading.value
        error = standard_error(best, reading)
        if distance > 0 and distance >= threshold * error:
            good = [
                each for each in readings[:place] if best.value - each.value <= distance / 2 and each is not reading
            ]
            before = [each for each in good if each.version >= best.version][-1]
            errors = math.inf if error == 0 else distance / error
            return Fall(before.version, reading.version, before.value, reading.value, errors)
        if reading.value > best.value:
            best = reading
    return None


def standard_error(one: Reading, other: Reading) -> float:
    """Return the standard error of the difference of two readings: of the sampling if the same tasks were played
    several times, else over the tasks."""
    same = one.by_task.keys() == other.by_task.keys()
    if same and all(len(own) > 1 for each in (one, other) for own in each.by_task.values()):
        spread = [_variance(own) / len(own) for each in (one, other) for own in each.by_task.values()]
        return math.sqrt(math.fsum(spread)) / len(one.by_task)
    if same:
        differences_of = [fmean(one.by_task[task]) - fmean(other.by_task[task]) for task in one.by_task]
        return math.sqrt(_variance(differences_of) / len(differences_of))
    means = [[fmean(own) for own in each.by_task.values()] for each in (one, other)]
    return math.sqrt(math.fsum(_variance(own) / len(own) for own in means))


def _variance(values: Sequence[float]) -> float:
    centre = fmean(values)
    return math.fsum((value - centre) ** 2 for value in values) / max(1, len(values) - 1)


@dataclass(slots=True)
class _Measured:
    """The rollouts of one version, ready to be weighted for another."""

    rollouts: list[Rollout]
    batch: TrainingSequences
    owner: np.ndarray
    """[T] index of the rollout that owns each token."""

    def totals(self, log_probs: np.ndarray) -> np.ndarray:
        """[R] log-probability of each rollout's generated tokens."""
        on = self.batch.loss_mask
        return np.bincount(self.owner[on], log_probs[on].astype(np.float64), len(self.rollouts))


def _measured(rollouts: Iterable[Rollout]) -> _Measured:
    counted = [
        each for each in rollouts if each.counted_reward is not None and each.turns and each.branched_from is None
    ]
    # Sequences of every turn, trained or not
    whole = [replace(each, turns=[replace(turn, trained=True) for turn in each.turns]) for each in counted]
    batch = TrainingSequences.from_table(sequences_table([(each, chains_of(each.turns)) for each in whole]))
    place = {rollout.rollout_id: index for index, rollout in enumerate(counted)}
    owner = np.array([place[name] for name in batch.rollout_ids])[batch.sequence_of_token]
    return _Measured(counted, batch, owner)


class OtherWeights:
    """Estimate of any weights of the run from recorded rollouts of some versions."""

    def __init__(self, run: Run, rollouts: dict[int, list[Rollout]]) -> None:
        self.run, self.rollouts = run, rollouts
        self.pool = list(rollouts)
        """Versions with rollouts that count."""
        self.further: Callable[[], Iterator[tuple[int, list[Rollout]]]] = lambda: iter(())
        """Other versions with their rollouts, added to `pool` if it gives no estimate."""
        self._log_probs: dict[tuple[int, int], np.ndarray] = {}

    def value_of(self, checkpoint: Reference) -> float | None:
        """Return the metric of these weights by the recorded rollouts; None if they give no estimate."""
        if (value := self._estimate(checkpoint, self.pool)) is not None:
            return value
        for version, rollouts in self.further():
            self.rollouts[version] = rollouts
            self.pool.append(version)
            if (value := self._estimate(checkpoint, self.pool)) is not None:
                return value
        return None

    def _estimate(self, checkpoint: Reference, pool: Sequence[int]) -> float | None:
        """Return the metric of these weights by the rollouts of some versions."""
        log_weights, rewards, tasks = [], [], []
        for version in pool:
            measured = _measured(self.rollouts[version])
            mixture = [measured.totals(self._of_version(other, version, measured)) for other in pool]
            together = np.logaddexp.reduce(mixture) - math.log(len(mixture))
            log_weights.append(measured.totals(self._under(checkpoint, measured)) - together)
            rewards.append(np.array([each.reward for each in measured.rollouts], np.float64))
            tasks += [each.group_id for each in measured.rollouts]
        weights, reward = np.concatenate(log_weights), np.concatenate(rewards)
        owner = np.unique(np.array(tasks), return_inverse=True)[1]
        shares, covered, values = [], [], []
        for task in range(owner.max() + 1):
            own = weights[owner == task]
            relative = np.exp(own - own.max())
            shares.append(kish(own))
            covered.append(float(np.exp(own).mean()))
            values.append(float((relative * reward[owner == task]).sum() / relative.sum()))
        return None if fmean(shares) < MIN_ESS or fmean(covered) < MIN_COVERED else fmean(values)

    def _of_version(self, version: int, whose: int, measured: _Measured) -> np.ndarray:
        key = (version, whose)
        if key not in self._log_probs:
            reference = self.run.checkpoint(version).reference()
            if reference is None:
                raise StoreError(
                    f"Version {version} of run {self.run.run_id!r} is deleted (checkpoint.keep_last, keep_every), and "
                    "nothing can be measured without it. Add --evaluate."
                )
            self._log_probs[key] = self._under(reference, measured)
        return self._log_probs[key]

    def _under(self, checkpoint: Reference, measured: _Measured) -> np.ndarray:
        trainer_home(self.run).release()
        # as another run: otherwise a server or cluster would reuse the trainer of a running one
        measurer = replace(self.run, uid=secrets.token_hex(6))
        cache = checkpoint_cache(self.run.config)
        return log_probs_under(self.run, checkpoint, measured.batch, cache, for_run=measurer)

    def mismatch(self, rollouts: list[Rollout], version: int) -> float:
        """Return the mean distance of recorded log-probabilities from a version's weights, nats a token; 0 if
        unknown."""
        reference = self.run.checkpoint(version).reference()
        own = [each for each in rollouts if all(turn.policy_version == version for turn in each.turns)]
        if reference is None or not own or self.run.config.generation.sampling.top_p < 1:
            return 0.0
        measured = _measured(own)
        on = measured.batch.loss_mask
        return float(np.abs(self._under(reference, measured)[on] - measured.batch.gen_logprobs[on]).mean())

    def as_weights_say(self, rollouts: list[Rollout], version: int) -> list[Rollout]:
        """The rollouts with the log-probabilities of a version's weights."""
        reference = self.run.checkpoint(version).reference()
        if reference is None:
            return rollouts
        measured = _measured(rollouts)
        computed = self._under(reference, measured)
        on = measured.batch.loss_mask
        by_rollout = [computed[on][measured.owner[on] == index] for index in range(len(measured.rollouts))]
        estimates = []
        for rollout, values in zip(measured.rollouts, by_rollout, strict=True):
            turns, at = [], 0
            for turn in rollout.turns:
                count = len(turn.generation_token_ids)
                turns.append(replace(turn, generation_log_probs=values[at : at + count].tolist()))
                at += count
            estimates.append(replace(rollout, turns=turns))
        return estimates


def value_of_rollouts(rollouts: Sequence[Rollout]) -> float:
    """The metric of these rollouts."""
    return Reading(0, rewards_by_task(rollouts)).value
