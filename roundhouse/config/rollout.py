"""What an iteration collects, and the gate between collection and training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roundhouse.config.distribution import Distribution, InProcessCollection
from roundhouse.config.section import Fraction, Operational, PositiveFloat, PositiveInt, Section


class RetryPolicy(Section):
    """Bounded attempts with exponential back-off, for infrastructure failures only."""

    attempts: PositiveInt = 3
    first_delay_seconds: PositiveFloat = 0.5
    factor: Annotated[float, Field(ge=1)] = 2.0
    max_delay_seconds: PositiveFloat = 30.0
    budget_fraction: Annotated[float, Field(ge=0)] | None = None
    """Retries of one collection in all, as a share of its rollouts; a failure after that is final. Unset: every rollout has
    its attempts."""
    budget_seconds: PositiveFloat | None = None
    """No retry begins later than this after the first one of the collection. Unset: no limit."""


class DynamicSampling(Section):
    """Collect more tasks until `rollout.prompts_per_iteration` of them have spread in rewards (DAPO, arXiv 2503.14476)."""

    max_rounds: PositiveInt = 10
    """Rounds of `rollout.prompts_per_iteration` tasks each, the first one included."""
    on_exhausted: Literal["error", "continue"] = "error"
    """When too few have spread after the last round: fail the stage, or train on those that have."""


class RolloutConfig(Section):
    """What one iteration collects."""

    prompts_per_iteration: PositiveInt = 16
    """Tasks (groups) an iteration."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Rollouts of each task."""
    max_turns: PositiveInt = 4
    """Model calls a rollout."""
    max_tokens: PositiveInt = 400
    """Tokens of a whole rollout, prompt included; it is truncated there."""
    concurrency: Operational[PositiveInt | None] = 128
    """Rollouts in flight at once, in all shards together. Null: as many as there are."""
    distribution: Operational[Distribution] = InProcessCollection()
    """Over which workers the collection is spread, for training and evaluation alike."""
    timeout_seconds: Operational[PositiveFloat] = 120
    """Time limit of one rollout attempt, all turns and tools."""
    tool_timeout_seconds: Operational[PositiveFloat] = 20
    """Time limit of one tool call."""
    parallel_tool_calls: bool = False
    """Run the tool calls of one reply at the same time, where their order does not matter: in an environment without
    session state, or on a remote server of which you know it. Outputs stand in the order of the calls either way."""
    dynamic_sampling: DynamicSampling | None = None
    """Unset: one round, whatever its rewards; groups without spread are not trained on either way."""
    retry: Operational[RetryPolicy] = RetryPolicy()
    max_failed_fraction: Operational[Fraction] = 0.2
    """The collect stage fails when a larger share of its rollouts failed."""


class ValidationConfig(Section):
    """The gate between collection and training."""

    on_break: Literal["reject", "truncate", "split"] = "reject"
    """A prompt that does not continue the recorded tokens: refuse the rollout, keep it up to the last contiguous turn,
    or begin a new sequence of the same rollout."""
    min_group_size: PositiveInt = 2
    """Groups with fewer valid rollouts are omitted."""
    min_group_fraction: Fraction = 0.5
    """The same as a share of `rollout.group_size`, rounded up: what is left of a group that lost most of its rollouts is a
    biased sample (long and hard ones fail first), with a baseline as noisy as it is small. Not for offline data."""
    max_quarantine_fraction: Operational[Fraction] = 0.5
    """The validate stage fails when a larger share was refused."""
    check_text: bool = True
    """Hold each rollout's recorded messages against its tokens, decoded with the policy's tokenizer. Not possible, and not
    done, where an agent or worker keeps the record (environment.kind agent, worker)."""
    recompute_tolerance: Operational[PositiveFloat | None] = 0.25
    """The train stage recomputes the log-probability of every token that it trains on. A sequence that differs from what the
    engine recorded by more than this has weight 0 and is counted: the mean of the absolute difference over its tokens in
    nats, of at least 16. A few times `train/logprob_abs_diff_mean` of a good iteration is a sharp value.
    Not done under top-k, top-p or temperature 0, where the engine draws from another distribution than the trainer
    computes. Null: never."""
    max_mismatched_fraction: Operational[Fraction] = 0.05
    """The train stage fails, and its weights become no version, when a larger share of the sequences differs so."""
