"""Bisect: find the iteration that made a run's metric fall, and the cause in it, by replaying it with one substitution
at a time.

Invariant: a verdict is an intervention, never a coincidence. A candidate is the cause if the iteration, replayed with
only this candidate corrected, restores at least half of the fall. For rows, one more proof is required: the fallen
iteration's rows also make the healthy iteration before it fall, or at most half of the groups explain the fall.
Without such a candidate, no verdict is given. Candidates that cannot differ (equal verdicts, log-probabilities that
the weights confirm) are not tried.

    metric     0.31 0.44 0.58 0.71 0.81 0.14      fall at version 5, from 0.81 to 0.14
    candidate  code            replayed as it is            0.14     no
               reward code     collection 5 judged again    0.88     yes: the cause

A replayed version is measured by the recorded rollouts (`readings`); with `evaluate=True` the run's engine evaluates it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from roundhouse.config.loading import apply_override, digest_of_tree, flatten
from roundhouse.config.operations import evaluation_sampling
from roundhouse.errors import ConfigError, RoundhouseError, StoreError
from roundhouse.plugins.lab.replays.comparison import Comparison
from roundhouse.plugins.lab.replays.narrowing import (
    NARROWING_BUDGET,
    Group,
    SubstitutedGroups,
    groups_in_words,
    smallest_set,
)
from roundhouse.plugins.lab.replays.readings import (
    Fall,
    OtherWeights,
    find_fall,
    measured_on,
    recorded_readings,
    value_of_rollouts,
)
from roundhouse.plugins.lab.replays.rollouts import open_for_replay
from roundhouse.plugins.lab.replays.stages import replay, substituted_config
from roundhouse.plugins.lab.replays.verdicts import judge_all, judge_of
from roundhouse.stages.collect import read_rollouts
from roundhouse.stages.policy import delete_run
from roundhouse.stages.trainer_home import release_trainers
from roundhouse.store.lineage import code_version
from roundhouse.store.location import Location
from roundhouse.store.replays import load_replay
from roundhouse.store.run import Run, load_run
from roundhouse.store.stage import Reference, Stage, StageKind, read_manifest
from roundhouse.trajectories.records import Ledger, Rollout, digest_tokens
from roundhouse.trajectories.schemas import (
    rebuild_prompts,
    rollouts_table,
    turns_table,
)

METRICS = ("held_out_reward", "reward")
"""Mean reward of a version's evaluation, and of the collection that it made for the next iteration."""
RECOVERED = 0.5
RESTORED = 0.8
"""Share of the effect of all healthy rows that the smallest set of groups has to restore."""
MAX_MISMATCH = 0.05
"""Nats a token between recorded and recomputed log-probabilities, in the mean, that rounding does not explain."""
FURTHER = 3
"""Versions that add their rollouts, one after the other, if the good and the bad version alone give no estimate."""
LONGEST = 3
"""Iterations that a fall may be spread over and still be replayed as a whole."""

Say = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trial:
    """Replay with one substitution, and the resulting metric."""

    cause: str
    what: str
    value: float | None
    """None: the recorded rollouts cannot measure these weights."""
    recovered: float | None
    """Share of the fall; 1 is all of it."""
    place: str = ""
    """The replay, if one was made."""


@dataclass(slots=True)
class Bisection:
    """Result of a bisection."""

    run_id: str
    metric: str
    values: dict[int, float]
    """By version, as recorded."""
    fall: Fall | None = None
    cause: str = ""
    """rows, reward, configuration, weights, engine or code; empty: no fall, or nothing that was tried explains it."""
    iteration: int | None = None
    detail: str = ""
    likely: str = ""
    """Without a `cause`: the only candidate with trials that could not be measured; empty for zero or several such
    candidates."""
    groups: list[str] = field(default_factory=list)
    """For rows: the smallest set found without which the metric does not fall; empty: only all rows together are
    responsible."""
    keys: list[str] = field(default_factory=list)
    """For a configuration: the responsible keys."""
    trials: list[Trial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Trials that were not possible, with the reasons."""
    stage_runs: int = 0
    """Stages that ran again to name the cause: validate, train, evaluate, and a collection judged anew."""
    narrowing_runs: int = 0
    """The same for the smallest set of groups or keys."""
    narrowing_bound: int = 0
    """Upper bound of these, known before the first of them; 0 if nothing was narrowed."""
    smallest: bool = False
    """Whether no part of `groups` or `keys` is known to suffice."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def bisect(
    store: str,
    run_id: str,
    metric: str = "held_out_reward",
    *,
    against: str | None = None,
    overrides: Sequence[str] = (),
    evaluate: bool = False,
    keep: bool = False,
    budget: int = NARROWING_BUDGET,
    say: Say = lambda line: None,
) -> Bisection:
    """Find the cause of a fall of a run's metric.

    Args:
        metric: of `METRICS`.
        against: a run whose configuration is assumed correct; by default the parent of a fork.
        overrides: `key.path=value`, an assumed correct configuration, applied to that of the run or of `against`.
        evaluate: measure replayed versions with the run's engine, which has to be running.
        keep: leave all replays in the store; else only the deciding one.
        budget: stage runs that the smallest set of groups or keys may take.

    Raises:
        StoreError: the run does not exist, or fewer than two of its versions have the metric.
        ConfigError: the metric is unknown, or cannot be measured without an engine.
    """
    if metric not in METRICS:
        raise ConfigError(f"--metric {metric}: {', '.join(METRICS)} can be bisected.")
    run = load_run(store, run_id)
    readings = recorded_readings(run, metric)
    bisection = Bisection(run_id, metric, {reading.version: reading.value for reading in readings})
    if len(readings) < 2:
        raise StoreError(
            f"Run {run_id!r} has {metric} of {len(readings)} versions, and a fall takes two. Evaluations: evaluation.every; "
            "--metric reward takes the rollouts that were collected."
        )
    bisection.fall = find_fall(readings)
    if bisection.fall is None:
        return bisection
    drawn = evaluation_sampling(run.config)
    if metric == "held_out_reward" and not evaluate:
        for key, unfit in (
            ("temperature", drawn.temperature == 0),
            ("top_p", drawn.top_p < 1),
            ("top_k", drawn.top_k is not None),
        ):
            if unfit:
                raise ConfigError(
                    f"evaluation.{key} is {getattr(drawn, key):g}: such rollouts cannot judge other weights. Add --evaluate "
                    "to sample with the run's engine, or take --metric reward."
                )
    work = _Bisector(run, bisection, _right_config(run, against, overrides), evaluate, budget, say)
    try:
        work.search()
    finally:
        release_trainers()
        if not keep:
            work.clean_up()
    return bisection


def right_run(run: Run, against: str | None) -> Run:
    """Return the run with the configuration that is assumed correct: the named one, else the parent of a fork, else the
    run itself.

    Raises:
        StoreError: no run has the name `against`.
    """
    if against is not None:
        return load_run(run.config.store, against)
    if run.parent is not None:
        with suppress(StoreError):
            return load_run(run.config.store, run.parent.run_id)
    return run


def _right_config(run: Run, against: str | None, overrides: Sequence[str]) -> list[str]:
    """Return overrides from the training keys of the run's configuration to the assumed correct ones."""
    tree = right_run(run, against).config.model_dump(mode="json")
    for override in overrides:
        apply_override(tree, override)
    read = ("train.algorithm", "train.optimizer", "train.minibatches", "generation.sampling", "validation", "rollout")
    right, own = flatten(tree), flatten(run.config.model_dump(mode="json"))
    changed = [key for key in sorted(right.keys() | own.keys()) if right.get(key) != own.get(key)]
    return [
        f"{key}={json.dumps(right.get(key))}"
        for key in changed
        if any(key == part or key.startswith(f"{part}.") for part in read)
    ]


class _Bisector:
    """One search; `found` receives its results."""

    def __init__(self, run: Run, found: Bisection, right: list[str], evaluate: bool, budget: int, say: Say) -> None:
        assert found.fall is not None, "it is searched for the cause of a fall"
        self.run, self.found, self.fall, self.right, self.say = run, found, found.fall, right, say
        self.evaluate, self.budget = evaluate, budget
        # Everything that determines a replay of this search, by its number
        search = {
            "run": run.uid,
            "metric": found.metric,
            "fall": [self.fall.good, self.fall.bad],
            "right": right,
            "judge": _judge(run),
            "evaluate": evaluate,
            "budget": budget,
            "code": code_version(),
        }
        self.name = f"bisect-{run.run_id}-{digest_of_tree(search)[:8]}"
        self.window = list(range(self.fall.good + 1, self.fall.bad + 1))
        self.before, self.after = self.fall.before, self.fall.after
        self.rollouts: dict[int, list[Rollout]] = {}
        self.other = OtherWeights(run, self.rollouts)
        self._replays: list[str] = []
        self._datasets: list[str] = []
        self._narrowing = False

    # the search

    def search(self) -> None:
        for version in (self.fall.good, self.fall.bad):
            reference = measured_on(self.run, self.found.metric, version)
            assert reference is not None, "it was read"
            self.rollouts[version] = read_rollouts(reference)
        if self._is_of_the_measurement():
            return
        self._narrow_window()
        if len(self.window) > LONGEST:
            self.found.notes.append(
                f"the fall is spread over iterations {self.window[0]} to {self.window[-1]}, and no version between could be "
                f"measured: evaluate more often (evaluation.every), or add --evaluate"
            )
        if self.run.checkpoint(self.window[0] - 1).reference() is None:
            self.found.notes.append(
                f"version {self.window[0] - 1} is deleted: nothing can be replayed (checkpoint.keep_every)"
            )
            return
        for candidate in (self._code, self._configuration, self._reward, self._engine, self._rows):
            if candidate():
                return
        self.found.likely = likely_cause(self.found.trials)

    def _is_of_the_measurement(self) -> bool:
        """Return whether the weights are as good as before, and the measurement or its tools changed."""
        good, bad = self.fall.good, self.fall.bad
        judged = {version: self._judged(self.rollouts[version], f"version {version}") for version in (good, bad)}
        if any(flips for _, flips in judged.values()):
            self.rollouts.update({version: rollouts for version, (rollouts, _) in judged.items()})
            values = {version: value_of_rollouts(rollouts) for version, rollouts in self.rollouts.items()}
            trial = self._tried(
                "reward", f"versions {good} and {bad} judged by one verifier", values[bad], values[good]
            )
            if trial.recovered is not None and trial.recovered >= RECOVERED:
                flips = {version: count for version, (_, count) in judged.items() if count}
                return self._name("reward", bad, f"verdicts that the verifier does not give: {flips} by version")
            self.before, self.after = values[good], values[bad]
        if self._measurement_fault() is None:
            self.other.pool = [good, bad]
            if not any(flips for _, flips in judged.values()):
                self.other.further = self._further_rollouts
            return False
        self.other.pool = [good]
        reference = self.run.checkpoint(bad).reference()
        value = None if reference is None else self.other.value_of(reference)
        trial = self._tried("engine", f"weights of version {bad} on the rollouts of version {good}", value)
        return _does(trial) and self._name_measurement()

    def _further_rollouts(self) -> Iterator[tuple[int, list[Rollout]]]:
        """Yield the rollouts of other versions, the nearest to the fall first, if their weights gave them to the same tasks."""
        good, bad = self.fall.good, self.fall.bad
        known = {each.group_id: each.task for each in self.rollouts[good]}
        others = [version for version in self.found.values if version not in self.other.pool]
        for version in sorted(others, key=lambda each: min(abs(each - good), abs(each - bad)))[:FURTHER]:
            reference = measured_on(self.run, self.found.metric, version)
            if reference is None or self.run.checkpoint(version).reference() is None:
                continue
            rollouts = read_rollouts(reference)
            same_tasks = all(known.get(each.group_id, each.task) == each.task for each in rollouts)
            same_prompts = not _other_prompts(rollouts, self.rollouts[good])
            if same_tasks and same_prompts and self.other.mismatch(rollouts, version) <= MAX_MISMATCH:
                yield version, rollouts

    def _name_measurement(self) -> bool:
        """The weights are good: other tasks were asked, or the engine did not answer as these weights do."""
        fault = self._measurement_fault()
        return fault is not None and self._name(fault[0], self.fall.bad, fault[1])

    def _measurement_fault(self) -> tuple[str, str] | None:
        """Return cause and detail if the bad version's rollouts are not its weights' answers to the good version's
        tasks."""
        good, bad = self.fall.good, self.fall.bad
        by_group = [{each.group_id: each.task for each in self.rollouts[k]} for k in (good, bad)]
        if tasks := sorted(
            group for group in by_group[0].keys() & by_group[1].keys() if by_group[0][group] != by_group[1][group]
        ):
            return "rows", f"the held-out tasks are others than before: {', '.join(tasks[:5])}"
        prompts = _other_prompts(self.rollouts[bad], self.rollouts[good])
        apart = self.other.mismatch(self.rollouts[bad], bad)
        if prompts or apart > MAX_MISMATCH:
            return "engine", self._engine_fault(self.rollouts[bad], bad, prompts, apart)
        return None

    def _narrow_window(self) -> None:
        """Halve the iterations between two evaluations by measuring versions between them."""
        while len(self.window) > 1:
            middle = self.window[len(self.window) // 2 - 1]
            reference = self.run.checkpoint(middle).reference()
            value = None if reference is None else self.other.value_of(reference)
            if value is None:
                return
            self.say(f"version {middle}: {value:.4g}")
            fallen = self._recovered(value) < RECOVERED
            self.window = [k for k in self.window if (k <= middle if fallen else k > middle)]

    def _code(self) -> bool:
        """Replay unchanged: any difference comes from the installed code."""
        control, trial = self._replayed("code", "as recorded, by the code that is installed")
        if control is None or not _does(trial):
            return False
        for k in self.window:
            base = read_manifest(self._recorded(k, StageKind.TRAIN)).inputs["base"].policy_version
            if base != k - 1:
                return self._name("weights", k, f"it was trained from version {base}, not {k - 1}")
        if control.first is None:
            return self._name_measurement()
        what = f"{control.first.stage} of iteration {control.first.iteration} gives another result: "
        columns = sorted({name for each in control.first.rows.values() for name in each["columns"]})
        return self._name("code", control.first.iteration, what + (", ".join(columns) or "other weights"))

    def _configuration(self) -> bool:
        if not self.right:
            return False
        what = f"{len(self.right)} keys as they should be"
        _, trial = self._replayed("configuration", what, overrides=self.right)
        if not _does(trial):
            return False
        keys = self._smallest(
            self.right, lambda some: _does(self._replayed("configuration", ", ".join(some), some)[1]), "keys"
        )
        self.found.keys = [key.partition("=")[0] for key in keys]
        return self._name("configuration", self.window[0], f"with {', '.join(keys)} it does not fall")

    def _reward(self) -> bool:
        judged = {k: self._judged(self._collected(k), f"iteration {k}") for k in self.window}
        if not any(flips for _, flips in judged.values()):
            return False
        _, trial = self._replayed(
            "reward", "collections judged again", rollouts={k: rollouts for k, (rollouts, _) in judged.items()}
        )
        if not _does(trial):
            return False
        self._narrowing = True
        since = self._since(lambda k: bool(self._judged(self._collected(k), f"iteration {k}")[1]))
        flips = sum(count for _, count in judged.values())
        return self._name(
            "reward", since, f"{flips} verdicts of iterations {_span(self.window)} are not the verifier's"
        )

    def _engine(self) -> bool:
        mended, faults = {}, {}
        for k in self.window:
            rollouts = self._collected(k)
            # Rollouts of the last iteration before the window
            before = self.window[0] - 1
            earlier = self._collected(before) if before > 0 and self._has_collection(before) else []
            prompts = _other_prompts(rollouts, earlier)
            apart = self.other.mismatch(rollouts, k - 1)
            mended[k] = rollouts
            if prompts or apart > MAX_MISMATCH:
                faults[k] = self._engine_fault(rollouts, k - 1, prompts, apart)
                mended[k] = self.other.as_weights_say(_with_prompts(rollouts, earlier) if prompts else rollouts, k - 1)
        if not faults:
            return False
        _, trial = self._replayed(
            "engine", "log-probabilities and prompts as the weights and the template have them", rollouts=mended
        )
        if not _does(trial):
            return False
        k = min(faults)
        return self._name("engine", k, faults[k])

    def _rows(self) -> bool:
        good = self.fall.good
        healthy, rows = None, list[Rollout]()
        if good > self.run.first_version and len(self.window) <= LONGEST:
            rows = self._collected(good)
            _, healthy = self._replayed("rows", f"rows of iteration {good}", rollouts=dict.fromkeys(self.window, rows))
            if healthy.recovered is not None and not _does(healthy):
                return False
        groups = SubstitutedGroups({k: self._collected(k) for k in self.window}, rows)
        few = self._few_groups(groups, RESTORED * (1.0 if healthy is None else healthy.recovered or 1.0))
        detail = f"without these groups it does not fall: {', '.join(group for _, group in few)}"
        blamed = self._groups_that_fell(few, groups) if few and rows else few
        if len(blamed) > len(few):
            detail += f"; among healthy rows it falls with {', '.join(group for _, group in blamed)}"
        self.found.groups = [group for _, group in blamed or few]
        if blamed:
            return self._name("rows", blamed[0][0], detail)
        if healthy is None or not _does(healthy):
            return self._not_the_rows()
        self._narrowing = False
        _, sufficient = self._replayed(
            "rows",
            f"rows of iteration {self.window[0]} in iteration {good}",
            rollouts={good: self._collected(self.window[0])},
        )
        if sufficient.recovered is not None and sufficient.recovered > RECOVERED:
            return self._not_the_rows()
        too = "was not measured" if sufficient.recovered is None else "is a fall, too"
        together = f"its rows together; what they do in iteration {good} {too}"
        return self._name("rows", self.window[0], f"{together}; {detail}" if few else together)

    def _not_the_rows(self) -> bool:
        self.found.groups, self.found.smallest = [], False
        return False

    def _few_groups(self, groups: SubstitutedGroups, restored: float) -> list[Group]:
        """Return the smallest set of at most half of the groups without which the metric does not fall, although it
        does fall without as many other groups; empty if no such set exists.

        Args:
            restored: share of the fall that has to be restored.
        """

        def does_it(some: list[Group]) -> bool:
            rollouts = groups.without(some)
            if not all(rollouts.values()):
                return True
            trial = self._replayed("rows", f"without {groups_in_words(some)}", rollouts=rollouts)[1]
            return trial.recovered is not None and trial.recovered >= restored

        subset = self._smallest(groups.every, does_it, "groups", reserved=2)
        others = [each for each in groups.every if each not in subset][: len(subset)]
        if len(others) < len(subset) or does_it(others):
            self.found.smallest = False
            return []
        return subset

    def _groups_that_fell(self, few: list[Group], groups: SubstitutedGroups) -> list[Group]:
        """Return the smallest set with these groups that makes the metric fall among healthy rows, too.

        Of groups that do it together, each restores the metric if it is left out. Return nothing if it takes more than half of
        the groups, or more stage runs than are left.
        """
        if self._makes_fall(few, groups):
            return few
        trials = (self.found.narrowing_bound - self.found.narrowing_runs) // self._runs_of_a_trial
        others = [each for each in groups.every if each not in few]
        more, is_proved = smallest_set(others, lambda some: self._makes_fall([*few, *some], groups), max(0, trials))
        self.found.smallest = self.found.smallest and is_proved
        blamed = [each for each in groups.every if each in few or each in more]
        return blamed if len(blamed) <= len(groups.every) // 2 else []

    def _makes_fall(self, some: list[Group], groups: SubstitutedGroups) -> bool:
        """Return whether healthy rows make the metric fall, too, with these groups among them."""
        rest = [each for each in groups.every if each not in some]
        what = f"healthy rows with {groups_in_words(some)}"
        _, trial = self._replayed("rows", what, rollouts=groups.without(rest))
        return trial.recovered is not None and trial.recovered < RECOVERED

    @property
    def _runs_of_a_trial(self) -> int:
        """Stage runs of one replay of the window."""
        return len(self.window) * (3 if self.evaluate else 2)

    def _smallest(
        self, items: Sequence[T], does_it: Callable[[list[T]], bool], what: str, reserved: int = 0
    ) -> list[T]:
        """`smallest_set` within the stage runs that are left of the budget, but for so many trials."""
        trials = min(2 * len(items), self.budget // self._runs_of_a_trial - reserved)
        self.found.narrowing_bound = max(0, trials + reserved) * self._runs_of_a_trial
        self.say(f"the smallest set of {len(items)} {what}: at most {self.found.narrowing_bound} stage runs")
        self._narrowing = True
        subset, self.found.smallest = smallest_set(items, does_it, max(0, trials))
        if not self.found.smallest:
            self.found.notes.append(f"the smallest set of {what} is not known within these stage runs (--budget)")
        return subset

    def _name(self, cause: str, iteration: int, detail: str) -> bool:
        self.found.cause, self.found.iteration, self.found.detail = cause, iteration, detail
        return True

    def _since(self, wrong: Callable[[int], bool]) -> int:
        """Return the first of the consecutive wrong iterations up to the window's last one, by halving."""
        last = self.window[0]
        low, high = self.run.first_version, last
        if last - 1 > low and not wrong(last - 1):
            return last
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._has_collection(middle) and wrong(middle) else (middle, high)
        return high

    # interventions

    def _replayed(
        self,
        cause: str,
        what: str,
        overrides: Sequence[str] = (),
        rollouts: Mapping[int, list[Rollout]] | None = None,
    ) -> tuple[Comparison | None, Trial]:
        """Replay the window, or the iterations of `rollouts`, with a substitution, and measure the last version."""
        iterations = sorted(rollouts) if rollouts else self.window
        name = f"{self.name}-{len(self._replays):03d}"
        inputs = {"rollouts": self._stored(name, rollouts)} if rollouts else {}
        stages = [StageKind.VALIDATE, StageKind.TRAIN, *([StageKind.EVALUATE] if self.evaluate else [])]
        self.say(f"iterations {_span(iterations)}: {what}")
        config = substituted_config(self.run.config, overrides)
        tolerant = [] if config.validation.recompute_tolerance is None else ["validation.recompute_tolerance=null"]
        self._replays.append(name)
        try:
            comparison = replay(
                self.run.config.store,
                self.run.run_id,
                range(iterations[0], iterations[-1] + 1),
                stages,
                overrides=[*overrides, *tolerant],
                inputs=inputs,
                name=name,
            )
        except RoundhouseError as error:
            self.found.notes.append(f"{what}: {error}")
            return None, self._tried(cause, what, None)
        self._count(len(comparison.stages))
        replay_run = load_replay(self.run.config.store, name)
        evaluation = replay_run.stage(iterations[-1], StageKind.EVALUATE).reference() if self.evaluate else None
        if evaluation is not None:
            return comparison, self._tried(
                cause, what, value_of_rollouts(read_rollouts(evaluation)), place=comparison.uri
            )
        reference = replay_run.checkpoint(iterations[-1]).reference()
        assert reference is not None, "the replay published it"
        return comparison, self._tried(cause, what, self.other.value_of(reference), place=comparison.uri)

    def _stored(self, name: str, rollouts: Mapping[int, list[Rollout]]) -> str:
        """The rollouts as versions of a dataset, in the place that `replay` reads re-scored ones from."""
        self._datasets.append(name)
        for k, iteration_rollouts in rollouts.items():
            place = Location(self.run.config.store) / f"datasets/{name}/{self.run.run_id}-i{k:06d}"
            stage = Stage(place, kind=StageKind.COLLECT, run_id=self.run.run_id, iteration=k)
            if stage.reference() is not None:
                continue
            recorded = self._recorded(k, StageKind.COLLECT)
            attempt = stage.begin(read_manifest(recorded).provenance)
            own = [
                replace(each, turns=[replace(turn, policy_version=k - 1, version_spans=None) for turn in each.turns])
                for each in iteration_rollouts
            ]
            attempt.write_table("rollouts", rollouts_table(own))
            attempt.write_table("turns", turns_table(own))
            ledger = Ledger.from_rollouts(own, requested=len(own))
            attempt.commit(inputs={"rollouts": recorded}, counts=ledger.counts(), details={"failures": ledger.failures})
        return name

    def _tried(self, cause: str, what: str, value: float | None, before: float | None = None, place: str = "") -> Trial:
        recovered = None if value is None else self._recovered(value, before)
        trial = Trial(cause, what, value, recovered, place)
        self.found.trials.append(trial)
        self.say(f"  {'not measured' if value is None else f'{value:.4g}'}")
        return trial

    def _recovered(self, value: float, before: float | None = None) -> float:
        """Share of the fall that is gone; with `before`, of the fall from there."""
        fall = self.before - self.after
        return (value - self.after) / fall if before is None else 1 - (before - value) / fall

    def _count(self, stages: int) -> None:
        if self._narrowing:
            self.found.narrowing_runs += stages
        else:
            self.found.stage_runs += stages

    def clean_up(self) -> None:
        """Delete all replays except the deciding one: the last trial that restored the fall."""
        decided = [trial.place for trial in self.found.trials if trial.place and _does(trial)]
        deciding_name = decided[-1].rsplit("/", 1)[-1] if self.found.cause and decided else ""
        store = Location(self.run.config.store)
        for name in self._replays:
            if name != deciding_name and (store / f"replays/{name}").names():
                delete_run(load_replay(self.run.config.store, name))
        for name in self._datasets:
            if name != deciding_name:
                (store / f"datasets/{name}").delete_tree()

    # the recorded data

    def _recorded(self, k: int, kind: str) -> Reference:
        reference = self.run.stage(k, kind).reference()
        if reference is None:
            raise StoreError(f"Run {self.run.run_id!r} has no {kind} of iteration {k}, so it cannot be replayed.")
        return reference

    def _collected(self, k: int) -> list[Rollout]:
        return read_rollouts(self._recorded(k, StageKind.COLLECT))

    def _has_collection(self, k: int) -> bool:
        return self.run.stage(k, StageKind.COLLECT).reference() is not None

    def _judged(self, rollouts: list[Rollout], what: str) -> tuple[list[Rollout], int]:
        """Return the rollouts with the present environment's verdicts, and the number of differences. If it cannot
        judge, return them unchanged."""
        try:
            open_for_replay(self.run.config.environment)
            self.say(f"judging {len(rollouts)} rollouts of {what}")
            judged = judge_all(rollouts, self.run.config.environment)
        except RoundhouseError as error:
            self.found.notes.append(f"{what}, not judged again: {error}")
            return rollouts, 0
        self._count(1)
        refused = sum(each.outcome == "refused" for each in judged)
        if refused:
            self.found.notes.append(
                f"{what}: {refused} of {len(judged)} rollouts cannot be judged again and stay unchanged"
            )
        flips = sum(each.outcome == "flipped" for each in judged)
        return [each.before if each.after is None else each.after for each in judged], flips

    def _engine_fault(self, rollouts: list[Rollout], version: int, prompts: Sequence[str], apart: float) -> str:
        if prompts:
            return f"the same tasks are rendered in other tokens than before: {', '.join(prompts[:5])}"
        for older in range(version - 1, max(self.run.first_version, version - 4) - 1, -1):
            as_older = [
                replace(each, turns=[replace(turn, policy_version=older) for turn in each.turns]) for each in rollouts
            ]
            if (
                self.run.checkpoint(older).reference() is not None
                and self.other.mismatch(as_older, older) < MAX_MISMATCH / 10
            ):
                return f"the engine held the weights of version {older}, not {version}"
        return f"log-probabilities are {apart:.3g} nats a token from those of the weights of version {version}"


def likely_cause(trials: Sequence[Trial]) -> str:
    """Return the only cause with unmeasured trials, if no measured trial recovers the fall.

    Rows can be tried in every run. Any other cause is tried because of a difference on record, so it precedes them.
    """
    if any(_does(trial) for trial in trials):
        return ""
    unmeasured = {trial.cause for trial in trials if trial.value is None}
    recorded = unmeasured - {"rows"}
    causes = recorded or unmeasured
    return next(iter(causes)) if len(causes) == 1 else ""


def _judge(run: Run) -> dict[str, Any]:
    """Return the dependencies of today's verdicts; empty if the environment cannot be loaded, so that none are given."""
    try:
        return judge_of(run.config.environment)
    except RoundhouseError:
        return {}


def _does(trial: Trial) -> bool:
    return trial.recovered is not None and trial.recovered >= RECOVERED


def _key(rollout: Rollout) -> str:
    """A task, whatever the place that it was given in."""
    return json.dumps(rollout.task, sort_keys=True)


def _first_prompts(rollouts: list[Rollout]) -> dict[str, list[int]]:
    """Token IDs of the first prompt, by task row, whatever group the task stands in."""
    return {_key(each): each.turns[0].prompt_token_ids for each in rollouts if each.turns}


def _other_prompts(rollouts: list[Rollout], earlier: list[Rollout]) -> list[str]:
    """Return groups with the same task as an earlier rollout, but other tokens in the first prompt."""
    then = _first_prompts(earlier)
    return sorted(
        {
            each.group_id
            for each in rollouts
            if each.turns and then.get(_key(each), each.turns[0].prompt_token_ids) != each.turns[0].prompt_token_ids
        }
    )


def _with_prompts(rollouts: list[Rollout], earlier: list[Rollout]) -> list[Rollout]:
    """The rollouts with the first prompts of the same tasks of before; those of other tasks are left out."""
    then, changed_prompts = _first_prompts(earlier), []
    for each in rollouts:
        prompt = then.get(_key(each))
        if prompt is None or not each.turns:
            continue
        turns = [replace(each.turns[0], prompt_token_ids=prompt), *each.turns[1:]]
        whole = rebuild_prompts(turns)
        turns = [
            replace(turn, prompt_length=len(tokens), prompt_digest=digest_tokens(tokens))
            for turn, tokens in zip(turns, whole, strict=True)
        ]
        changed_prompts.append(replace(each, turns=turns))
    return changed_prompts


def _span(iterations: Sequence[int]) -> str:
    return str(iterations[0]) if len(iterations) == 1 else f"{iterations[0]} to {iterations[-1]}"
