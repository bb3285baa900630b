"""What a task row's own parameters mean for its rollout: a pure function.

Invariant: a rollout that is trained on is drawn from exactly the distribution that the trainer will compute; a row that asks
for another one is refused, since its policy ratio would be wrong. Limits of a row can only tighten those of the run.

    on_policy, run at temperature 1:  {"temperature": 0.2}        -> BadTaskRow
    evaluation:                       {"temperature": 0.2}        -> sampling.temperature 0.2
    either, run with 512 new tokens:  {"max_output_tokens": 64}   -> sampling.max_new_tokens 64
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from roundhouse.config.models import Sampling
from roundhouse.rollout.failures import BadTaskRow


@dataclass(frozen=True, slots=True)
class SamplingOverrides:
    """Sampling and tool rules of one rollout."""

    sampling: Sampling
    tools: bool
    """False: `tool_choice` is none, the policy is shown no tools."""
    together: bool
    """False: `parallel_tool_calls` is false, and calls of one reply are run one after another. All of them, as NeMo Gym's
    `simple_agent` runs whatever it is given: that a reply has one call is the engine's affair."""
    max_tool_calls: int | None
    """Calls that are run in the whole rollout; None means any number."""


def sampling_overrides(params: Mapping[str, Any], sampling: Sampling, on_policy: bool) -> SamplingOverrides:
    """The terms of a row's `responses_create_params` under the run's `sampling`.

    Raises:
        BadTaskRow: a parameter has no meaning here, or would make the rollout unfit for training.
    """
    return SamplingOverrides(
        sampling=_sampling(params, sampling, on_policy),
        tools=_shows_tools(params.get("tool_choice")),
        together=params.get("parallel_tool_calls") is not False,
        max_tool_calls=_limit(params, "max_tool_calls", smallest=0),
    )


def _sampling(params: Mapping[str, Any], sampling: Sampling, on_policy: bool) -> Sampling:
    changes: dict[str, Any] = {}
    for name, ours in (("temperature", sampling.temperature), ("top_p", sampling.top_p)):
        asked = params.get(name)
        if asked is None or asked == ours:
            continue
        if on_policy:
            raise BadTaskRow(
                f"responses_create_params.{name} is {asked}, but the run draws with generation.sampling.{name}={ours}: the "
                "trainer would compute the ratio for another distribution. Remove it from the row, or set it equal."
            )
        changes[name] = asked
    longest = _limit(params, "max_output_tokens", smallest=1)
    if longest is not None and longest < sampling.max_new_tokens:
        changes["max_new_tokens"] = longest
    if not changes:
        return sampling
    try:
        return Sampling.model_validate(sampling.model_dump() | changes)
    except ValidationError as error:
        raise BadTaskRow(f"responses_create_params: {changes} cannot be sampled with: {error}") from error


def _shows_tools(choice: Any) -> bool:
    if choice in (None, "auto"):
        return True
    if choice == "none":
        return False
    raise BadTaskRow(
        f"responses_create_params.tool_choice is {choice!r}: forcing a call restricts what the policy can say to something "
        "that no trainer computes, and that the engine therefore refuses, in evaluation too. Use auto or none."
    )


def _limit(params: Mapping[str, Any], name: str, smallest: int) -> int | None:
    asked = params.get(name)
    if asked is None:
        return None
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < smallest:
        raise BadTaskRow(
            f"responses_create_params.{name} is {asked!r}: give a whole number of at least {smallest}, or leave it out."
        )
    return asked
