"""Tokens that the judges of rubrics and audits read and wrote, by the model that answered, and their money.

Invariant: a judge without a price is named with its tokens; it never counts as free. The run's own engine has no price of its
own: it answers on GPUs that are paid by the hour.

    metrics of the rollouts     judge_prompt_tokens, judge_completion_tokens, and audit_…   (cached answers are not repeated)
    the section environment     which models judged them, in its rubric and its audit: of a mixture, those of the rollout's part
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from roundhouse.config.operations import JudgePrice
from roundhouse.rollout.rubric import COMPLETION_TOKENS, PREFIXES, PROMPT_TOKENS

OWN_ENGINE, UNKNOWN = "the run's own engine", "an unknown judge"
MILLION = 1e6


@dataclass(frozen=True, slots=True)
class JudgeTokens:
    """Of one model."""

    prompt: float = 0.0
    completion: float = 0.0


def judge_tokens(rollouts: pa.Table, environment: Mapping[str, Any]) -> dict[str, JudgeTokens]:
    """What the judges of these rollouts used, by model.

    Args:
        rollouts: the `rollouts` dataset, or its columns `group_id` and `metrics`.
        environment: the section by which they were judged, as JSON.
    """
    parts = environment.get("environments")
    found: dict[str, JudgeTokens] = {}
    for row in rollouts.select(["group_id", "metrics"]).to_pylist():
        metrics = dict(row["metrics"] or ())
        own = environment if parts is None else parts.get(row["group_id"].partition("/")[0], {})
        for section, prefix in PREFIXES.items():
            prompt, completion = (metrics.get(f"{prefix}_{name}", 0.0) for name in (PROMPT_TOKENS, COMPLETION_TOKENS))
            if prompt or completion:
                add_judges(found, {_model(own.get(section) or {}): JudgeTokens(prompt, completion)})
    return found


def _model(section: Mapping[str, Any]) -> str:
    judge = section.get("judge")
    if judge is None:
        return UNKNOWN
    return OWN_ENGINE if judge.get("base_url") is None else str(judge["model"])


def add_judges(totals: dict[str, JudgeTokens], more: Mapping[str, JudgeTokens]) -> None:
    """Add the tokens of each model."""
    for model, used in more.items():
        before = totals.get(model, JudgeTokens())
        totals[model] = JudgeTokens(before.prompt + used.prompt, before.completion + used.completion)


def judge_money(used: Mapping[str, JudgeTokens], prices: Mapping[str, JudgePrice]) -> float:
    """Of the judges that have a price."""
    return sum(
        (used[model].prompt * price.prompt + used[model].completion * price.completion) / MILLION
        for model, price in prices.items()
        if model in used
    )


def unpriced_judges(used: Mapping[str, JudgeTokens], prices: Mapping[str, JudgePrice]) -> dict[str, float]:
    """Tokens, prompt and completion together, by the models without a price."""
    return {
        model: each.prompt + each.completion
        for model, each in used.items()
        if model not in prices and model != OWN_ENGINE
    }
