"""Statistics of verified rollouts: the answer of /aggregate_metrics, the reward profile, and pass rates.

Invariant: each statistic is over the rollouts that report the field; a truth value counts as 0 or 1. A masked rollout
(`mask_sample`) counts in no statistic; `coverage/*` counts these if any exist. `std` is the sample's (n-1); it is 0 for
a single rollout, and missing if only one of several rollouts reports the field.

    [{"reward": 1, "_ng_task_index": 0}, {"reward": 0, "_ng_task_index": 0}]
        ->  agent_metrics {"mean/reward": 0.5, "max/reward": 1, …}, key_metrics {"mean/reward": 0.5}, one group

Fields are the numbers at the top of a row, of its token usage, and of `metrics` and `reward_components`. All functions
are pure, except for `write_profile`.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from roundhouse.errors import DataError
from roundhouse.plugins.nemo_gym.exchange.json_lines import (
    ROLLOUT,
    TASK,
    CollectionFiles,
    Key,
    Row,
    iter_rows,
    key_of,
    read_rows,
    write_rows,
)
from roundhouse.plugins.nemo_gym.exchange.repeats import (
    RepeatMetrics,
    across_repeats,
    add_own_metrics,
    repeat_level_metrics,
)
from roundhouse.trajectories import records

VerifiedRow = Mapping[str, Any]
Metrics = dict[str, Any]
ComputeMetrics = Callable[[list[list[VerifiedRow]]], Metrics]
"""From rollouts by task to more metrics; `per_task_metrics` among them, a list of rows with `_ng_task_index`, joins the
groups."""
KeyMetrics = Callable[[Metrics], Metrics]
"""Select from all metrics the ones to read first."""

MASK = "mask_sample"
_OWN_FIELDS = ("metrics", "reward_components")


def aggregate_metrics(
    verify_responses: Sequence[VerifiedRow],
    compute_metrics: ComputeMetrics | None = None,
    key_metrics: KeyMetrics | None = None,
    compute_repeat_metrics: RepeatMetrics | None = None,
) -> Metrics:
    """Return statistics over all rollouts, each task's and each repeat's. Rows without `_ng_task_index` are distinguished by
    `task_id`."""
    measured, missing = [row for row in verify_responses if not row.get(MASK)], coverage(verify_responses)
    if not measured:
        return {
            "group_level_metrics": [],
            "agent_metrics": dict(missing),
            "key_metrics": dict(missing),
            "repeat_level_metrics": [],
        }
    tasks = rollouts_by_task(measured)
    groups = [group_metrics(rollouts, expected=len(rollouts)) for rollouts in tasks]
    repeats = repeat_level_metrics(measured, numbers)
    agent_metrics: Metrics = {**describe(measured), **across_repeats(repeats), **missing}
    own: Metrics = {}
    if compute_metrics is not None:
        own = dict(compute_metrics(tasks))
        per_task = own.pop("per_task_metrics", None) or []
        by_index = {row[TASK]: row for row in per_task}
        for group in groups:
            group |= by_index.get(group.get(TASK), {})
        agent_metrics |= own
    agent_metrics["num_repeats"] = len({row.get(ROLLOUT, 0) for row in verify_responses})
    selected = {**(key_metrics or means)(agent_metrics), **missing}
    if compute_repeat_metrics is not None and repeats:
        add_own_metrics(repeats, agent_metrics, own, measured, compute_repeat_metrics)
    return {
        "group_level_metrics": groups,
        "agent_metrics": agent_metrics,
        "key_metrics": selected,
        "repeat_level_metrics": repeats,
    }


def coverage(rows: Sequence[VerifiedRow]) -> dict[str, int]:
    """Return how many rollouts and tasks the statistics are over; nothing if no rollout is masked."""
    measured = [row for row in rows if not row.get(MASK)]
    if len(measured) == len(rows):
        return {}
    tasks, measured_tasks = ({row.get(TASK, row.get("task_id", 0)) for row in some} for some in (rows, measured))
    return {
        "coverage/measured_rollouts": len(measured),
        "coverage/masked_rollouts": len(rows) - len(measured),
        "coverage/measured_tasks": len(measured_tasks),
        "coverage/fully_masked_tasks": len(tasks - measured_tasks),
    }


def rollouts_by_task(rows: Iterable[VerifiedRow]) -> list[list[VerifiedRow]]:
    """Group rollouts by task: by ascending index, then by `task_id` in the order of their occurrence."""
    groups: dict[Any, list[VerifiedRow]] = {}
    for row in rows:
        groups.setdefault(row.get("task_id") if row.get(TASK) is None else row[TASK], []).append(row)
    return [groups[key] for key in sorted(groups, key=lambda key: (0, key) if isinstance(key, int) else (1, 0))]


def group_metrics(rollouts: Sequence[VerifiedRow], expected: int, sample: VerifiedRow | None = None) -> Metrics:
    """One task's entry of group_level_metrics.

    Args:
        expected: how many rollouts of the task were asked for.
        sample: the task's row; if it is unknown, the rollouts' agent.
    """
    first = rollouts[0]
    identity = {name: first[name] for name in (TASK, "task_id") if first.get(name) is not None}
    infos = []
    own = [{name: row[name] for name in (TASK, ROLLOUT) if row.get(name) is not None} for row in rollouts]
    for place, row in sorted(enumerate(rollouts), key=lambda pair: own[pair[0]].get(ROLLOUT, pair[0])):
        indexes = own[place]
        rollout_id = f"{indexes.get(TASK, row.get('task_id', ''))}:{indexes.get(ROLLOUT, place)}"
        infos.append({"rollout_id": rollout_id, **indexes, **numbers(row)})
    return {
        **identity,
        **describe(rollouts),
        "sample": sample if sample is not None else {"agent_ref": {"name": "agent"}},
        "num_rollouts": len(rollouts),
        "expected_num_rollouts": expected,
        "missing_num_rollouts": expected - len(rollouts),
        "reward_profile_completion_pct": 100.0 * len(rollouts) / expected if expected else 100.0,
        "rollout_infos": infos,
    }


def describe(rows: Sequence[VerifiedRow]) -> dict[str, float]:
    """Return mean, max, min, median and std of each field, named `<statistic>/<field>`."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in numbers(row).items():
            columns.setdefault(name, []).append(value)
    described: dict[str, float] = {}
    for name, values in columns.items():
        mean = sum(values) / len(values)
        described |= {
            f"mean/{name}": mean,
            f"max/{name}": max(values),
            f"min/{name}": min(values),
            f"median/{name}": statistics.median(values),
        }
        if len(values) > 1 or len(rows) == 1:
            described[f"std/{name}"] = math.sqrt(
                sum((value - mean) * (value - mean) for value in values) / max(1, len(values) - 1)
            )
    return {name: value for name, value in described.items() if math.isfinite(value)}


def numbers(row: VerifiedRow) -> dict[str, float]:
    """Return the fields of a rollout that statistics are made of, without bookkeeping (`_…`) and the mask."""
    parts: list[tuple[str, VerifiedRow]] = []  # of one name twice, the later counts
    for name in _OWN_FIELDS:
        if isinstance(own := row.get(name), Mapping):
            parts.append(("" if name == "metrics" else f"{name}/", own))
    parts += [("", row), ("", _usage(row))]
    return {
        f"{prefix}{name}": int(value) if isinstance(value, bool) else value
        for prefix, fields in parts
        for name, value in fields.items()
        if isinstance(value, int | float) and not name.startswith("_") and name != MASK
    }


def means(metrics: Metrics) -> Metrics:
    """Return the `mean/…` of the metrics: the ones to read first unless an environment chooses others."""
    return {name: value for name, value in metrics.items() if name.startswith("mean/")}


def light(row: VerifiedRow) -> Metrics:
    """A rollout as it is sent to /aggregate_metrics: without conversation and captures, its token usage kept."""
    heavy = ("response", "responses_create_params", "ng_agent_observations", "ng_model_call_capture", "ng_trajectory")
    light_row = {name: value for name, value in row.items() if name not in heavy and name != "_roundhouse"}
    usage = _usage(row)
    return {**light_row, "response": {"usage": usage}} if usage else light_row


def expected_by_task(rows: Iterable[VerifiedRow]) -> Counter[Any]:
    """Return the number of requested rollouts of each task index."""
    return Counter(row[TASK] for row in rows)


def _usage(row: VerifiedRow) -> VerifiedRow:
    response = row.get("response")
    usage = response.get("usage") if isinstance(response, Mapping) else None
    return usage if isinstance(usage, Mapping) else {}


MOST_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Profile:
    """Reward profile of a collection: statistics by task and by agent."""

    tasks: list[dict[str, Any]]
    agents: list[dict[str, Any]]
    repeats: list[dict[str, Any]]
    expected: int
    """Rows of the materialized inputs."""
    completed: int


def profile(inputs: Iterable[Row], rollouts: Iterable[Row], *, allow_partial: bool = False) -> Profile:
    """Return the profile of `rollouts` (without their conversations) against the rows that requested them.

    Every rollout belongs to a row of the materialized inputs. Rows without a rollout count as missing.

    Raises:
        DataError: a rollout is without its row, occurs twice, or is missing while `allow_partial` is False.
    """
    input_rows = _by_key(inputs, "the materialized inputs")
    rollout_rows = _by_key(rollouts, "the rollouts")
    _refuse(rollout_rows.keys() - input_rows.keys(), "rollout(s) belong to no row of the materialized inputs")
    if not allow_partial:
        _refuse(
            input_rows.keys() - rollout_rows.keys(),
            "row(s) have no rollout; --allow-partial profiles the others. Missing",
        )
    masked = {key for key, row in rollout_rows.items() if row.get(MASK)}  # were played, and are in no statistic
    expected = expected_by_task(row for key, row in input_rows.items() if key not in masked)
    ordered = [rollout_rows[key] for key in sorted(rollout_rows.keys() - masked)]
    tasks = []
    for own in rollouts_by_task(ordered):
        input_row = input_rows[own[0][TASK], own[0][ROLLOUT]]
        sample = {name: value for name, value in input_row.items() if name not in (TASK, ROLLOUT)}
        tasks.append(group_metrics(own, expected[own[0][TASK]], sample))
    agents: dict[str, list[Row]] = {}
    for key in sorted(rollout_rows):
        agents.setdefault(input_rows[key]["agent_ref"]["name"], []).append(rollout_rows[key])
    by_agent: list[Metrics] = []
    by_repeat: list[Metrics] = []
    for name, agent_rows in sorted(agents.items()):
        reference = {"agent_ref": {"name": name}}
        measured = [row for row in agent_rows if not row.get(MASK)]
        repeats = repeat_level_metrics(measured, numbers)
        by_agent.append(describe(measured) | across_repeats(repeats) | coverage(agent_rows) | reference)
        by_repeat += [reference | entry for entry in repeats]
    return Profile(tasks, by_agent, by_repeat, len(input_rows), len(rollout_rows))


def write_profile(files: CollectionFiles, inputs: Path | None = None, *, allow_partial: bool = False) -> Profile:
    """Profile a collection and write the result next to it; `inputs` are its materialized inputs, if they are
    elsewhere.

        run_materialized_inputs.jsonl + run.jsonl  ->  run_reward_profiling.jsonl (a line a task) + run_agent_metrics.json
                                                       + run_repeat_level_metrics.json
    """
    rollouts = (light(row) for _, row in iter_rows(files.rollouts))
    collection_profile = profile(read_rows(inputs or files.materialized_inputs), rollouts, allow_partial=allow_partial)
    write_rows(files.reward_profile, collection_profile.tasks)
    files.agent_metrics.write_bytes(orjson.dumps(collection_profile.agents))
    files.repeat_metrics.write_bytes(orjson.dumps(collection_profile.repeats))
    return collection_profile


def _by_key(rows: Iterable[Row], where: str) -> dict[Key, Row]:
    rows_by_key: dict[Key, Row] = {}
    for row in rows:
        if row.get(TASK) is None or row.get(ROLLOUT) is None:
            raise DataError(f"A row of {where} has no {TASK} and {ROLLOUT}: it cannot be profiled.")
        if key_of(row) in rows_by_key:
            raise DataError(f"Task {row[TASK]}, rollout {row[ROLLOUT]} stands twice in {where}.")
        rows_by_key[key_of(row)] = row
    return rows_by_key


def _refuse(keys: Iterable[Key], what: str) -> None:
    if bad_keys := sorted(keys):
        examples = ", ".join(f"{task}:{rollout}" for task, rollout in bad_keys[:MOST_SHOWN])
        raise DataError(f"{len(bad_keys)} {what}: {examples}{', …' if len(bad_keys) > MOST_SHOWN else ''}.")


Score = Callable[[Mapping[str, Any]], Mapping[str, float | bool]]
Scores = list[list[dict[str, float]]]
"""Scores by name, of each rollout of each task."""

NO_ANSWER = "no_answer"


def reward_as_accuracy(rollout: Mapping[str, Any]) -> Mapping[str, float]:
    """The one score of a rollout unless its environment has others."""
    return {"accuracy": rollout["reward"]}


def pass_rates(
    tasks: Sequence[Sequence[Mapping[str, Any]]], score: Score = reward_as_accuracy, answer_key: str | None = None
) -> dict[str, Any]:
    """Return pass@k, pass@1[avg-of-k] and majority@k in percent, for k = 1 … the largest number of rollouts of a task.

    A task counts for pass@k only if it has at least k scores. Names and values are those of NeMo Gym.

        two tasks with rewards (1, 0) and (0, 0):  pass@1 25, pass@2 50, pass@1[avg-of-2] 25

    Args:
        tasks: the rollouts of each task, in the order of their indexes.
        answer_key: the field that holds a rollout's answer (None: it gave none); adds majority@k and the score `no_answer`.

    Returns:
        `pass@<k>/<score>`, `pass@1[avg-of-<k>]/<score>` with its `std_dev_across_runs`, `std_err_across_runs` and
        `avg_sample_std_dev`, `majority@<k>/<score>`, and `per_sample_aggregate`: by score, the mean of the i-th rollouts.
    """
    scores = [[_scores(rollout, score, answer_key) for rollout in rollouts] for rollouts in tasks]
    largest = max((len(rollouts) for rollouts in tasks), default=0)
    names = sorted({name for rollouts in scores for one in rollouts for name in one})
    runs = {name: _mean_by_run(scores, name, largest) for name in names}
    rates: dict[str, Any] = {}
    for k in range(1, largest + 1):
        for name in names:
            columns = [_of(rollouts, name) for rollouts in scores]
            passes = [pass_at_k(values, k) for values in columns if len(values) >= k]
            means = [statistics.fmean(values) for rollouts in scores if (values := _of(rollouts[:k], name))]
            if passes:
                rates[f"pass@{k}/{name}"] = 100.0 * statistics.fmean(passes)
            if means:
                rates[f"pass@1[avg-of-{k}]/{name}"] = 100.0 * statistics.fmean(means)
            rates |= _spread_at(scores, name, k, runs[name])
            if answer_key is not None:
                answers = [[rollout.get(answer_key) for rollout in rollouts] for rollouts in tasks]
                rates[f"majority@{k}/{name}"] = 100.0 * statistics.fmean(
                    [
                        majority(own_answers[:k], [one.get(name) for one in own[:k]])
                        for own_answers, own in zip(answers, scores, strict=True)
                    ]
                )
    return rates | ({"per_sample_aggregate": {name: means for name, means in runs.items() if means}} if tasks else {})


def pass_at_k(values: Sequence[float], k: int) -> float:
    """Return the chance that one of k rollouts drawn without replacement is right; for graded scores, the best of the
    first k.

    With n rollouts, w of them wrong: 1 - C(w, k) / C(n, k) (Chen et al. 2021, unbiased).

    Args:
        values: the scores of a task's rollouts, at least k.
    """
    if not all(value in (0, 1) for value in values):
        return max(values[:k])
    return records.pass_at_k(len(values), sum(map(bool, values)), k)


def majority(answers: Sequence[Any], scores: Sequence[float | None]) -> float:
    """Return the score of the most frequent answer; the mean if several are equally frequent, 0 without any answer."""
    pairs = [(a, s) for a, s in zip(answers, scores, strict=True) if a is not None and s is not None]
    if not pairs:
        return 0.0
    votes = Counter(pairs)
    most = max(votes.values())
    return statistics.fmean([score for (_, score), count in votes.items() if count == most])


def _scores(rollout: Mapping[str, Any], score: Score, answer_key: str | None) -> dict[str, float]:
    scores = {name: int(value) if isinstance(value, bool) else value for name, value in score(rollout).items()}
    return scores if answer_key is None else scores | {NO_ANSWER: int(rollout.get(answer_key) is None)}


def _of(rollouts: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [one[name] for one in rollouts if name in one]


def _spread_at(scores: Scores, name: str, k: int, runs: Sequence[float]) -> dict[str, float]:
    """Return the spread of the mean of one run (the i-th rollout of every task) over the first k runs, and of a
    task's scores."""
    key = f"pass@1[avg-of-{k}]/{name}"
    spread = {}
    if k > 1 and len(first := runs[:k]) > 1:
        deviation = _sample_deviation(first)
        spread[f"{key}/std_dev_across_runs"] = deviation
        spread[f"{key}/std_err_across_runs"] = deviation / math.sqrt(len(first))
    within = [_sample_deviation(values) for rollouts in scores if len(values := _of(rollouts[:k], name)) > 1]
    if k > 1 and within:
        spread[f"{key}/avg_sample_std_dev"] = statistics.fmean(within)
    return spread


def _mean_by_run(scores: Scores, name: str, largest: int) -> list[float]:
    runs = (
        [rollouts[run][name] for rollouts in scores if run < len(rollouts) and name in rollouts[run]]
        for run in range(largest)
    )
    return [100.0 * statistics.fmean(values) for values in runs if values]


def _sample_deviation(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return math.hypot(*(value - mean for value in values)) / math.sqrt(len(values) - 1)
