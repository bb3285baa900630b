"""GRPO as on a blackboard: loops over sequences and tokens, without shared code of the library.

It is slow, has no packing, padding, microbatches or flat arrays, and the library is compared with it.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def advantages(rows: list[dict[str, Any]], *, normalize: bool, leave_one_out: bool) -> list[float | None]:
    """Return the advantage of each sequence; None if its group has no spread."""
    rollouts: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        rollouts.setdefault(row["group_id"], {}).setdefault(row["rollout_id"], []).append(row["reward"])
    result: list[float | None] = []
    for row in rows:
        group = {name: sum(values) / len(values) for name, values in rollouts[row["group_id"]].items()}
        values = list(group.values())
        if max(values) == min(values):
            result.append(None)
            continue
        mean = sum(values) / len(values)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
        others = [value for name, value in group.items() if name != row["rollout_id"]]
        baseline = sum(others) / len(others) if leave_one_out else mean
        advantage = row["reward"] - baseline
        result.append(advantage / (deviation + 1e-6) if normalize else advantage)
    return result


def log_probs(model: Any, row: dict[str, Any], temperature: float = 1.0) -> tuple[dict[int, Any], dict[int, Any]]:
    """Log-probability and entropy at each trained position of one sequence, computed alone."""
    logits = model(input_ids=torch.tensor([row["token_ids"]])).logits[0]
    found, entropies = {}, {}
    for position, trained in enumerate(row["loss_mask"]):
        if trained:
            distribution = torch.log_softmax(logits[position - 1].float() / temperature, dim=-1)
            found[position] = distribution[row["token_ids"][position]]
            entropies[position] = -(distribution.exp() * distribution).sum()
    return found, entropies


def token_term(
    cur: Any,
    old: Any,
    gen: float,
    advantage: float,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    correction: str = "none",
    bounds: tuple[float, float] = (0.5, 5.0),
) -> Any:
    """The policy loss of one token."""
    ratio = torch.exp(cur - old)
    if float(ratio.detach()) < 1 - clip_low:
        clipped = torch.tensor(1 - clip_low, dtype=cur.dtype)
    elif float(ratio.detach()) > 1 + clip_high:
        clipped = torch.tensor(1 + clip_high, dtype=cur.dtype)
    else:
        clipped = ratio
    kept = float(advantage * ratio.detach()) <= float(advantage * clipped.detach())
    chosen = -advantage * ratio if kept else -advantage * clipped
    if dual_clip is not None and advantage < 0 and float(chosen.detach()) > -advantage * dual_clip:
        chosen = torch.tensor(-advantage * dual_clip, dtype=cur.dtype)
    weight = math.exp(float(old) - gen)
    if correction == "tis":
        chosen = chosen * min(max(weight, bounds[0]), bounds[1])
    elif correction == "icepop":
        chosen = chosen * (weight if bounds[0] <= weight <= bounds[1] else 0.0)
    return chosen


def policy_terms(
    curs: list[Any],
    olds: list[Any],
    gens: list[float],
    advantages: list[float],
    *,
    kind: str = "clipped",
    ratio: str = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    correction: str = "none",
    bounds: tuple[float, float] = (0.5, 5.0),
    max_error: float | None = None,
) -> list[Any]:
    """The policy losses of one sequence's tokens, for every kind of loss, ratio and correction."""
    n = len(curs)
    log_weights = [float(old) - gen for old, gen in zip(olds, gens, strict=True)]
    geometric = math.exp(sum(log_weights) / n)
    error = sum(math.exp(abs(w)) for w in log_weights) / n
    sequence_ratio = torch.exp(sum(cur - old for cur, old in zip(curs, olds, strict=True)) / n)
    terms = []
    for cur, old, log_weight, advantage in zip(curs, olds, log_weights, advantages, strict=True):
        r = {"token": torch.exp(cur - old), "sequence": sequence_ratio, "on_policy": torch.exp(cur - cur.detach())}[
            ratio
        ]
        bounded = min(max(float(r.detach()), 1 - clip_low), 1 + clip_high)
        if kind == "reinforce":
            term = -advantage * cur
        elif kind == "cispo":
            term = -advantage * bounded * cur
        else:
            clipped = r if bounded == float(r.detach()) else torch.tensor(bounded, dtype=cur.dtype)
            term = -advantage * r if advantage * float(r.detach()) <= advantage * bounded else -advantage * clipped
            if dual_clip is not None and advantage < 0 and float(term.detach()) > -advantage * dual_clip:
                term = torch.tensor(-advantage * dual_clip, dtype=cur.dtype)
        weight = geometric if ratio == "sequence" else math.exp(log_weight)
        inside = bounds[0] <= weight <= bounds[1]
        if correction == "tis" or (correction == "auto" and sum(map(abs, log_weights)) / n > 0.01):
            term = term * min(max(weight, bounds[0]), bounds[1])
        elif correction == "icepop":
            term = term * (weight if inside else 0.0)
        elif correction == "seq-mask-tis":
            term = term * (weight if bounds[0] <= geometric <= bounds[1] else 0.0)
        if max_error is not None and error > max_error:
            term = term * 0.0
        terms.append(term)
    return terms


def kl_term(cur: Any, ref: Any, kind: str, gen: float | None = None) -> Any:
    """KL to the reference at one token; its gradient has the score-function term written out.

    With `gen`, weighted by exp(cur − gen), by the product rule.
    """
    d = torch.clamp(ref - cur, -20, 20)
    value = {"k1": -d, "k2": d * d / 2, "k3": torch.exp(d) - 1 - d}[kind]
    value = torch.clamp(value, -10, 10)
    far = abs(float((ref - cur).detach())) > 20
    weight = 1.0 if gen is None else math.exp(float(cur.detach()) - gen)
    if far:
        return weight * value
    return weight * (value + value.detach() * (cur - cur.detach()))


def mean(terms: list[list[Any]], aggregation: str, rollouts: list[str] | None = None, length: int = 1) -> Any:
    """The mean of the terms of an update. `terms` holds a list for each sequence, `rollouts` the rollout of each."""
    if aggregation == "token":
        tokens = [term for sequence in terms for term in sequence]
        return sum(tokens) / len(tokens)
    means = [sum(sequence) / len(sequence) for sequence in terms]
    if aggregation == "sequence":
        return sum(means) / len(means)
    names = list(dict.fromkeys(rollouts or range(len(terms))))
    by_rollout: dict[Any, list[int]] = {name: [] for name in names}
    for index, name in enumerate(rollouts or range(len(terms))):
        by_rollout[name].append(index)
    if aggregation == "rollout":
        return sum(sum(means[i] for i in own) / len(own) for own in by_rollout.values()) / len(names)
    return sum(term for sequence in terms for term in sequence) / (len(names) * length)


def loss(
    model: Any,
    rows: list[dict[str, Any]],
    given: list[float | None],
    *,
    old: dict[str, dict[int, float]] | None = None,
    reference: Any = None,
    kl_coefficient: float = 0.0,
    kl_kind: str = "k3",
    entropy_coefficient: float = 0.0,
    aggregation: str = "token",
    temperature: float = 1.0,
    **policy: Any,
) -> Any:
    """Return the whole loss of one update, over the sequences of groups with spread."""
    terms = []
    for row, advantage in zip(rows, given, strict=True):
        if advantage is None:
            continue
        cur, entropies = log_probs(model, row, temperature)
        ref = log_probs(reference, row, temperature)[0] if reference is not None else {}
        sequence = []
        for position, value in cur.items():
            before = value.detach() if old is None else torch.tensor(old[row["sequence_id"]][position])
            term = token_term(value, before, row["gen_logprobs"][position], advantage, **policy)
            if reference is not None:
                term = term + kl_coefficient * kl_term(value, ref[position].detach(), kl_kind)
            sequence.append(term - entropy_coefficient * entropies[position])
        terms.append(sequence)
    return mean(terms, aggregation)
