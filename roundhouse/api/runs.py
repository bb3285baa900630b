"""Runs of a store: open, list, query, compare, fork and replay them.

run = open_run("quickstart")                           # of ROUNDHOUSE_STORE, else .roundhouse/store
run = open_run("s3://bucket/store/runs/quickstart")
run.rollouts(iteration=3, split="train").filter(status="completed").to_pandas()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from roundhouse import plugins
from roundhouse.api.stores import named_store
from roundhouse.api.values import override_texts
from roundhouse.errors import ConfigError, StoreError
from roundhouse.notebook import html_table, svg_curve
from roundhouse.store.location import Location, is_name
from roundhouse.store.run import Run, load_run, no_such_version, readable_runs, version_named
from roundhouse.store.stage import StageKind

if TYPE_CHECKING:
    import os

    import pandas as pd

    from roundhouse.api.checkpoints import Checkpoint
    from roundhouse.api.rows import Rows
    from roundhouse.config.models import RunConfig
    from roundhouse.plugins.lab.replays.comparison import Comparison
    from roundhouse.plugins.lab.replays.verdicts import VerdictDiff
    from roundhouse.sql.lineage import RunComparison
    from roundhouse.sql.parts import StageFiles

TRAIN, HELDOUT = "train", "heldout"
"""Splits, as environments name them."""


class RunHandle:
    """A run of a store, and its data. It is read anew with each call, so it shows a run that trains meanwhile."""

    def __init__(self, run: Run, store: str) -> None:
        self._run = run
        self.store = store
        """Path or URI of the store."""

    @property
    def run_id(self) -> str:
        return self._run.run_id

    @property
    def uri(self) -> str:
        """URI of the run's directory."""
        return self._run.location.uri

    @property
    def config(self) -> RunConfig:
        """The configuration that the run was created with."""
        return self._run.config

    @property
    def state(self) -> str:
        """running, finished, stopped, failed, crashed or not started."""
        from roundhouse.health.heartbeat import state_of

        return state_of(self._run)

    def summary(self) -> dict[str, Any]:
        """Return the run in figures, as `roundhouse runs show --json` does."""
        return facts_of(self._run)

    def metrics(self) -> pd.DataFrame:
        """Return all metrics: a row an iteration, a column a metric (docs/metrics.md).

        `.plot(y=...)` draws a line through a metric's values and skips iterations without one.
        """
        from roundhouse.api.frames import MetricsFrame
        from roundhouse.sql.database import load_tables

        table: Any = load_tables(self.store, {"iterations"}, runs=[self.run_id])["iterations"]
        rows = {row["iteration"]: row["metrics"] for row in table.to_pylist(maps_as_pydicts="lossy")}
        frame = MetricsFrame.from_dict(rows, orient="index")
        frame.index.name = "iteration"
        return frame.sort_index().sort_index(axis=1)

    def rollouts(self, iteration: int | Iterable[int] | None = None, split: str | None = None) -> Rows:
        """Return rollouts, a row each.

        Args:
            iteration: only of this one, or of these.
            split: train, heldout, or the name of one of `evaluation.sets`; all without it.

        Raises:
            StoreError: the rows are missing; the error names the iterations with rows.
            ConfigError: an unknown split.
        """
        return self._rows("rollouts", iteration, self._stages_of(split))

    def turns(self, iteration: int | Iterable[int] | None = None, split: str | None = None) -> Rows:
        """Return the model calls of rollouts, a row each, with token IDs and log-probabilities; arguments as of `rollouts`."""
        return self._rows("turns", iteration, self._stages_of(split))

    def sequences(self, iteration: int | Iterable[int] | None = None) -> Rows:
        """Return the sequences to train on, a row each; arguments as of `rollouts`."""
        return self._rows("sequences", iteration, (StageKind.VALIDATE,))

    def quarantine(self, iteration: int | Iterable[int] | None = None) -> Rows:
        """Return the rollouts that were kept from training, a row each, with reason and evidence."""
        return self._rows("quarantine", iteration, (StageKind.VALIDATE,))

    def _stages_of(self, split: str | None) -> tuple[str, ...]:
        from roundhouse.stages.evaluate import stage_of

        sets = list(self.config.evaluation.sets)
        stages = {TRAIN: StageKind.COLLECT, HELDOUT: stage_of(None), **{name: stage_of(name) for name in sets}}
        if split is None:
            return tuple(stages.values())
        if split not in stages:
            raise ConfigError(f"split is {split!r}; run {self.run_id!r} has: {', '.join(stages)}.")
        return (stages[split],)

    def _rows(self, kind: str, iteration: int | Iterable[int] | None, stages: Sequence[str]) -> Rows:
        from roundhouse.api.rows import Rows
        from roundhouse.sql.database import TABLES
        from roundhouse.sql.parts import dataset_of, runs_stages
        from roundhouse.store.stage import MANIFEST

        iterations = None if iteration is None else {iteration} if isinstance(iteration, int) else set(iteration)
        present: set[int] = set()

        def is_wanted(stage: StageFiles) -> bool:
            if stage.stage not in stages or MANIFEST not in stage.names:
                return False
            present.add(stage.iteration)
            return iterations is None or stage.iteration in iterations

        parts = runs_stages(self.store, runs=[self.run_id], wanted=is_wanted)
        if not parts or (iterations or set()) - present:
            missing = "" if iterations is None else f" of iteration {', '.join(map(str, sorted(iterations - present)))}"
            raise StoreError(
                f"Run {self.run_id!r} has no {kind}{missing} ({', '.join(stages)}). Iterations with {kind}: "
                f"{', '.join(map(str, sorted(present))) or 'none'}."
            )
        return Rows(kind, dataset_of(parts, kind, TABLES[kind].schema))

    def checkpoint(self, version: int | str | None = None) -> Checkpoint:
        """Return the checkpoint of a policy version.

        Args:
            version: a number, `newest` or `promoted`; the newest without it.

        Raises:
            StoreError: the checkpoint is missing; the error names the existing versions.
        """
        from roundhouse.api.checkpoints import Checkpoint

        number = version_named(self._run, "newest" if version is None else str(version))
        if (reference := self._run.checkpoint(number).reference()) is None:
            raise no_such_version(self._run, number)
        return Checkpoint(self._run, self.store, reference)

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints that the store has, the oldest first."""
        return [self.checkpoint(version) for version in self._run.checkpoint_versions()]

    def compare(self, other: RunHandle | str, metrics: list[str] | None = None) -> RunComparison:
        """Compare configuration and metrics with those of another run of the store.

        Raises:
            ConfigError: the other run lies in another store.
            StoreError: the other run does not exist.
        """
        from roundhouse.sql.lineage import compare_runs

        if isinstance(other, RunHandle) and Location(other.store).uri != Location(self.store).uri:
            raise ConfigError(
                f"Run {other.run_id!r} is in {other.store}, not in {self.store}. Compare runs of one store."
            )
        return compare_runs(self.store, self.run_id, other if isinstance(other, str) else other.run_id, metrics)

    def fork(self, run_id: str, at: Any = None, **overrides: Any) -> RunHandle:
        """Create a run that continues from an iteration of this one. `train` trains it.

        Args:
            run_id: of the new run.
            at: number of the iteration to continue from; the newest without it.
            overrides: keys that differ, such as `iterations=40` or `**{"train.optimizer.learning_rate": 1e-4}`.

        Raises:
            StoreError: the iteration lacks a checkpoint.
            ConfigError: a change that cannot be, or nothing left to train.
        """
        from roundhouse.stages.fork import fork_config, fork_run

        config = fork_config(self.store, self.run_id, run_id, at, override_texts(overrides))
        return RunHandle(fork_run(config), self.store)

    def __repr__(self) -> str:
        return f"<Run {self.run_id}: {self.state}, {self.uri}>"

    def _repr_html_(self) -> str:
        facts = self.summary()
        evaluations = [each for each in facts["evaluation"]["all"] if each["reward_mean"] is not None]
        heldout = [(each["version"], each["reward_mean"]) for each in evaluations]
        trained = enumerate(facts["reward_by_iteration"], facts["first_version"] + 1)
        rewards = [(iteration, reward) for iteration, reward in trained if reward is not None]
        curves = svg_curve(rewards, "reward") + svg_curve(heldout, "held-out reward")
        rows = [
            ("state", facts["state"]),
            ("iterations", f"{facts['iterations']} of {facts['iterations_wanted']}"),
            ("environment", facts["environment"]),
            ("checkpoints", ", ".join(map(str, facts["checkpoints"])) or "none"),
            ("model", facts["model"] or "none"),
            ("store", self.uri),
        ]
        return html_table((f"run {self.run_id}", ""), rows) + curves


class RunList(Sequence[RunHandle]):
    """Runs of a store, the newest first."""

    def __init__(self, handles: Sequence[RunHandle]) -> None:
        self._handles = list(handles)

    @overload
    def __getitem__(self, place: int) -> RunHandle: ...
    @overload
    def __getitem__(self, place: slice) -> RunList: ...
    def __getitem__(self, place: int | slice) -> RunHandle | RunList:
        return RunList(self._handles[place]) if isinstance(place, slice) else self._handles[place]

    def __len__(self) -> int:
        return len(self._handles)

    def __iter__(self) -> Iterator[RunHandle]:
        return iter(self._handles)

    def to_pandas(self) -> pd.DataFrame:
        """Return a row a run: state, environment, iterations and held-out rewards."""
        import pandas as pd

        return pd.DataFrame([_list_row(run) for run in self])

    def __repr__(self) -> str:
        return f"<RunList {', '.join(run.run_id for run in self)}>"

    def _repr_html_(self) -> str:
        rows = [_list_row(run) for run in self]
        columns = list(rows[0]) if rows else ["run_id"]
        return html_table(columns, (list(row.values()) for row in rows))


def _list_row(run: RunHandle) -> dict[str, Any]:
    facts = run.summary()
    before, after = (facts["evaluation"][when] for when in ("before", "after"))
    return {
        "run_id": run.run_id,
        "state": facts["state"],
        "created": time.strftime("%Y-%m-%d %H:%M", time.localtime(facts["created_at"])),
        "environment": facts["environment"],
        "iterations": facts["iterations"],
        "iterations_wanted": facts["iterations_wanted"],
        "heldout_before": None if before is None else before["reward_mean"],
        "heldout_after": None if after is None else after["reward_mean"],
    }


def facts_of(run: Run) -> dict[str, Any]:
    """Return the run's summary as it is now, its state, the versions with a checkpoint, and the newest model's directory."""
    from roundhouse.api.checkpoints import model_uri
    from roundhouse.health.heartbeat import state_of
    from roundhouse.stages.report import summarize

    summary, state = summarize(run), state_of(run)
    if (
        state == "finished"
    ):  # by fewer iterations than its configuration has, if it reached a target or had no more tasks
        summary["iterations_wanted"] = (run.summary() or {}).get("iterations_wanted", summary["iterations_wanted"])
    latest = run.latest_checkpoint()
    return summary | {
        "state": state,
        "created_at": run.created_at,
        "checkpoints": run.checkpoint_versions(),
        "model": None if latest is None else model_uri(latest),
    }


def open_run(name_or_uri: str, store: str | os.PathLike[str] | None = None) -> RunHandle:
    """Open a run.

    Args:
        name_or_uri: its id, or the path or URI of its directory, `<store>/runs/<id>`.
        store: path or URI; without it ROUNDHOUSE_STORE, else .roundhouse/store.

    Raises:
        StoreError: the store or the run does not exist; the error names the existing runs.
        ConfigError: neither an id nor a run's directory, or a directory together with a store.
    """
    if not is_name(name_or_uri):
        place, _, run_id = name_or_uri.rstrip("/").rpartition("/runs/")
        if not place or not is_name(run_id) or store is not None:
            raise ConfigError(
                f"{name_or_uri!r} does not name a run. Give its id, with store=… if it is not in the default store, or the "
                "path or URI of its directory, <store>/runs/<id>, alone."
            )
        name_or_uri, store = run_id, place
    named = named_store(store)
    return RunHandle(load_run(named, name_or_uri), named)


def runs(store: str | os.PathLike[str] | None = None) -> RunList:
    """List the runs of a store, the newest first; an unreadable one is skipped with a warning.

    Raises:
        StoreError: the store does not exist.
    """
    named = named_store(store)
    readable = sorted(readable_runs(named), key=lambda run: -run.created_at)
    return RunList([RunHandle(run, named) for run in readable])


def query(
    sql: str,
    store: str | os.PathLike[str] | None = None,
    *,
    runs: Sequence[RunHandle | str] | None = None,
    values: Sequence[Any] = (),
    timeout_seconds: float = 300.0,
) -> pd.DataFrame:
    """Answer one reading SQL statement over the store's runs (`roundhouse query --help` lists the tables).

    Args:
        runs: only these.
        values: of the statement's `?`, in order.

    Raises:
        QueryError: not a single reading statement, or an unknown table or column.
        StoreError: the store or a run does not exist.
    """
    from roundhouse.sql.database import run_query

    chosen = None if runs is None else [each if isinstance(each, str) else each.run_id for each in runs]
    answer = run_query(named_store(store), sql, runs=chosen, values=values, timeout_seconds=timeout_seconds)
    return answer.to_pandas(maps_as_pydicts="lossy")


# Any: a type checker gives the values of **{"a.b": 0.5} to each parameter that is left, too.
def replay(
    run: RunHandle | str,
    iterations: int | Sequence[int],
    stages: Any = ("validate", "train"),
    *,
    inputs: Any = None,
    name: Any = None,
    store: Any = None,
    **overrides: Any,
) -> Comparison:
    """Run recorded stages of a run again, with changes or without, and compare them with the original.

    Args:
        iterations: one, or consecutive ones such as `range(10, 21)`.
        stages: names of collect, validate, train and evaluate. Collect and evaluate need the run's engine.
        inputs: mapping of substituted inputs (docs/replay.md).
        name: name of the replay; without it one that follows from the request.
        store: directory or URI of the store, if `run` is a name.
        overrides: keys of the configuration that differ.

    Raises:
        StoreError: a stage, checkpoint or input is missing.
        ConfigError: a substitution that cannot be, or code that only the store names and nobody accepted on this machine.
    """
    handle, texts = _opened(run, store), override_texts(overrides)
    numbers = [iterations] if isinstance(iterations, int) else iterations
    operation = plugins.factory("operation", "replay")
    return operation(handle.store, handle.run_id, numbers, stages, texts, inputs, name, _accepting(texts))


def rescore(
    run: RunHandle | str,
    name: str,
    *,
    iterations: Any = None,
    store: Any = None,
    **overrides: Any,
) -> VerdictDiff:
    """Judge stored rollouts with the environment as it is now, or as the overrides change it, without generating anything.

    Args:
        name: dataset that gets the verdicts.
        iterations: range of the iterations; all that collected without it.
        store: directory or URI of the store, if `run` is a name.
        overrides: keys of the environment, such as `**{"environment.tolerance": 0.1}`.

    Raises:
        StoreError: no rollouts to judge, or the dataset has verdicts of another judge.
        ConfigError: the environment cannot be loaded, another key is overridden, or nobody accepted its code on this machine.
    """
    handle, texts = _opened(run, store), override_texts(overrides)
    operation = plugins.factory("operation", "rescore")
    return operation(handle.store, handle.run_id, name, iterations, texts, _accepting(texts))


def _accepting(overrides: list[str]) -> Callable[[RunConfig], None]:
    """Return a function that records the consent to a configuration, or refuses code that these overrides do not name."""
    from roundhouse.infra.consents import record_consent, refuse_unaccepted_code

    def accept(config: RunConfig) -> None:
        refuse_unaccepted_code(config, overrides)
        record_consent(config)

    return accept


def _opened(run: RunHandle | str, store: str | os.PathLike[str] | None) -> RunHandle:
    return open_run(run, store) if isinstance(run, str) else run
