"""pass@k, pass@1[avg-of-k] and majority@k over several rollouts of each task, in percent; pure functions.

Invariant: a task counts for pass@k only if it has at least k scores. Names and values are those of NeMo Gym.

    pass@k of a task with n rollouts, w of them wrong:  1 - C(w, k) / C(n, k)        (Chen et al. 2021, unbiased)
    pass@k of a score that is not 0 or 1:               the best of the first k
    majority@k:                                         the score of the most frequent answer of the first k; ties share

    two tasks with rewards (1, 0) and (0, 0):  pass@1 25, pass@2 50, pass@1[avg-of-2] 25
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    """All rates for k = 1 … the largest number of rollouts of a task.

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
            rates |= _rates_at(scores, name, k) | _spread_at(scores, name, k, runs[name])
            if answer_key is not None:
                answers = [[rollout.get(answer_key) for rollout in rollouts] for rollouts in tasks]
                rates[f"majority@{k}/{name}"] = 100.0 * _mean(
                    [
                        majority(given[:k], [one.get(name) for one in own[:k]])
                        for given, own in zip(answers, scores, strict=True)
                    ]
                )
    return rates | ({"per_sample_aggregate": {name: means for name, means in runs.items() if means}} if tasks else {})


def pass_at_k(values: Sequence[float], k: int) -> float:
    """The chance that one of k rollouts drawn without replacement is right; of graded scores the best of the first k.

    Args:
        values: the scores of a task's rollouts, at least k.
    """
    if not all(value in (0, 1) for value in values):
        return max(values[:k])
    wrong = sum(1 for value in values if not value)
    return 1.0 - math.comb(wrong, k) / math.comb(len(values), k)


def majority(answers: Sequence[Any], scores: Sequence[float | None]) -> float:
    """The score of the most frequent answer; the mean of those that tie, 0 if nobody answered."""
    given = [(a, s) for a, s in zip(answers, scores, strict=True) if a is not None and s is not None]
    if not given:
        return 0.0
    votes = Counter(given)
    most = max(votes.values())
    return _mean([score for (_, score), count in votes.items() if count == most])


def highest_k(rates: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The rates of a family at its largest k, without their spreads.

    Args:
        family: `pass@`, `pass@1[avg-of-` or `majority@`.
    """
    by_k: dict[int, dict[str, Any]] = {}
    for name, value in rates.items():
        head, _, score = name.partition("/")
        number = head.removeprefix(family).removesuffix("]") if head.startswith(family) else ""
        if number.isdigit() and score and "/" not in score:
            by_k.setdefault(int(number), {})[name] = value
    return by_k[max(by_k)] if by_k else {}


def _scores(rollout: Mapping[str, Any], score: Score, answer_key: str | None) -> dict[str, float]:
    scores = {name: int(value) if isinstance(value, bool) else value for name, value in score(rollout).items()}
    return scores if answer_key is None else scores | {NO_ANSWER: int(rollout.get(answer_key) is None)}


def _of(rollouts: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [one[name] for one in rollouts if name in one]


def _rates_at(scores: Scores, name: str, k: int) -> dict[str, float]:
    columns = [_of(rollouts, name) for rollouts in scores]
    passes = [pass_at_k(values, k) for values in columns if len(values) >= k]
    means = [_mean(values) for rollouts in scores if (values := _of(rollouts[:k], name))]
    rates = {}
    if passes:
        rates[f"pass@{k}/{name}"] = 100.0 * _mean(passes)
    if means:
        rates[f"pass@1[avg-of-{k}]/{name}"] = 100.0 * _mean(means)
    return rates


def _spread_at(scores: Scores, name: str, k: int, runs: Sequence[float]) -> dict[str, float]:
    """How much the mean of one run (the i-th rollout of every task) varies over the first k runs, and a task's scores."""
    key = f"pass@1[avg-of-{k}]/{name}"
    spread = {}
    if k > 1 and len(first := runs[:k]) > 1:
        deviation = _deviation(first)
        spread[f"{key}/std_dev_across_runs"] = deviation
        spread[f"{key}/std_err_across_runs"] = deviation / math.sqrt(len(first))
    within = [_deviation(values) for rollouts in scores if len(values := _of(rollouts[:k], name)) > 1]
    if k > 1 and within:
        spread[f"{key}/avg_sample_std_dev"] = _mean(within)
    return spread


def _mean_by_run(scores: Scores, name: str, largest: int) -> list[float]:
    runs = (
        [rollouts[run][name] for rollouts in scores if run < len(rollouts) and name in rollouts[run]]
        for run in range(largest)
    )
    return [100.0 * _mean(values) for values in runs if values]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
