"""Metrics of a training step: meaning, denominator, healthy values.

Invariant: every metric that a step reports is listed in `METRICS` with its denominator, so that values of several
microbatches, ranks or steps can be combined without bias: means by their denominators' counts, extremes by max and min,
counts by their sum (`loss.MetricSums`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Denominator(StrEnum):
    """Denominator of a metric, or its rule of combination if it is not a mean."""

    TOKENS = "tokens"
    """Trained tokens: those with a non-zero weight. Each counts once an epoch."""
    SEQUENCES = "sequences"
    """Sequences with a trained token."""
    ALL_SEQUENCES = "all_sequences"
    """All sequences of the iteration."""
    ROLLOUTS = "rollouts"
    GROUPS = "groups"
    UPDATES = "updates"
    """Optimizer steps of the iteration."""
    SUM = "sum"
    """A count; combine by adding."""
    MAX = "max"
    MIN = "min"
    LAST = "last"
    """A state; the newest holds."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table in docs/metrics.md."""

    denominator: Denominator
    meaning: str
    healthy: str = ""


_TOKENS, _UPDATES, _GROUPS = Denominator.TOKENS, Denominator.UPDATES, Denominator.GROUPS
_SEQUENCES, _ALL = Denominator.SEQUENCES, Denominator.ALL_SEQUENCES
_SUM, _MAX, _MIN, _LAST = Denominator.SUM, Denominator.MAX, Denominator.MIN, Denominator.LAST

METRICS: dict[str, Metric] = {
    # the objective
    "loss": Metric(_UPDATES, "the loss minimised, all terms", "near 0; its size means little"),
    "policy_loss": Metric(_UPDATES, "its policy term", "near 0"),
    "kl_penalty": Metric(_TOKENS, "KL(policy ‖ reference) by the configured estimator, unscaled", "0.001 … 0.1"),
    "kl_coefficient": Metric(_LAST, "weight of the KL; moves under adaptive_kl (only if it is not 0)"),
    "teacher_kl": Metric(_TOKENS, "log policy − log teacher on the policy's tokens (distillation)", "falls to 0"),
    "nll": Metric(_TOKENS, "−cur over the tokens with a cross-entropy weight (only with such tokens)", "falls"),
    "approx_entropy": Metric(
        _TOKENS, "−exp(cur − gen) · cur, an estimate from the sampled tokens (not of written rows)", "slow decline"
    ),
    "entropy": Metric(_TOKENS, "exact entropy of the next-token distribution (only with entropy_coefficient > 0)"),
    "grad_norm": Metric(_UPDATES, "gradient norm before clipping", "no spikes"),
    "grad_norm_max": Metric(_MAX, "the largest of the step's gradient norms", "< 10 × grad_norm"),
    "lr": Metric(_LAST, "learning rate of the last update"),
    "wd": Metric(_LAST, "weight decay"),
    "optimizer_steps": Metric(_LAST, "optimizer steps since the run began"),
    "num_updates": Metric(_SUM, "optimizer steps of this iteration; 0 when no group has spread"),
    # the critic (only if the algorithm has one)
    "value_loss": Metric(_TOKENS, "half the squared error of the critic, clipped, over its updates", "falls"),
    "value_clip_fraction": Metric(
        _TOKENS, "share of tokens with a prediction that moved by more than value_clip (only if it is set)", "< 0.2"
    ),
    "value_mean": Metric(_TOKENS, "the critic's predictions before its updates", "near reward"),
    "explained_variance": Metric(
        _LAST,
        "1 − var(return − value) ÷ var(return) over the trained tokens, before the updates (unless all returns are equal)",
        "rises towards 1",
    ),
    "critic_grad_norm": Metric(_UPDATES, "the critic's gradient norm before clipping", "no spikes"),
    "critic_lr": Metric(_LAST, "the critic's learning rate of its last update"),
    "critic_updates": Metric(_SUM, "optimizer steps of the critic in this iteration"),
    # the policy ratio exp(cur - old)
    "probs_ratio": Metric(_TOKENS, "exp(cur − old), over all updates", "0.99 … 1.01"),
    "probs_ratio_clamped": Metric(_TOKENS, "the same, clamped to the clip bounds", "0.99 … 1.01"),
    "probs_ratio_min": Metric(_MIN, "smallest ratio", "> 0.1"),
    "probs_ratio_max": Metric(_MAX, "largest ratio", "< 10"),
    "clip_fraction": Metric(
        _TOKENS, "share of tokens without a gradient because of the clip (cispo: with a bounded one)", "< 0.2"
    ),
    # the engine against the trainer, before the first update
    "token_mult_prob_error": Metric(_TOKENS, "exp(abs(gen − old))", "< 1.02; float32 on one machine: < 1.0001"),
    "gen_kl_error": Metric(_TOKENS, "KL(engine ‖ trainer), k3 from the engine's samples", "< 0.002"),
    "policy_kl_error": Metric(_TOKENS, "KL(trainer ‖ engine), k3; rare tokens dominate it", "< 0.01"),
    "js_divergence_error": Metric(_TOKENS, "Jensen-Shannon divergence of the two", "< 0.002"),
    "sampling_importance_ratio": Metric(_TOKENS, "exp(old − gen): bias between the two", "0.99 … 1.01"),
    "is_oob_ratio": Metric(_TOKENS, "share of tokens with exp(old − gen) outside mismatch_bounds", "< 0.01"),
    "logprob_abs_diff_mean": Metric(_TOKENS, "abs(gen − old)", "< 0.02; float32: < 1e-5"),
    "logprob_abs_diff_max": Metric(_MAX, "largest abs(gen − old)", "float32: < 1e-4"),
    "seq_mult_prob_error_max": Metric(_MAX, "largest of the sequences' means of exp(abs(gen − old))", "< 1.05"),
    "correction_dropped": Metric(
        _TOKENS, "share of tokens that the correction gave weight 0 (only with one)", "< 0.05"
    ),
    "correction_nonfinite": Metric(_SUM, "tokens with exp(old − gen) that is not finite; their weight is 0", "0"),
    "num_corrected_seqs": Metric(
        _SUM, "sequences that mismatch_correction auto corrects (only with auto)", "0 with float32"
    ),
    "num_masked_seqs": Metric(_SUM, "sequences without any weight left after the correction"),
    "num_mismatched_seqs": Metric(
        _SUM,
        "sequences with log-probabilities that the weights contradict (validation.recompute_tolerance); masked",
        "0",
    ),
    # rewards and groups
    "reward": Metric(Denominator.ROLLOUTS, "mean reward; a rollout counts once"),
    "reward_shaped": Metric(
        Denominator.ROLLOUTS, "the same after shaping and KL in the reward (only with one of them)"
    ),
    "advantages/mean": Metric(_ALL, "mean advantage", "near 0"),
    "advantages/max": Metric(_MAX, "largest advantage"),
    "advantages/min": Metric(_MIN, "smallest advantage"),
    "baseline_reward/pct_0": Metric(_GROUPS, "percent of groups in which every reward is 0: too hard"),
    "baseline_reward/pct_1": Metric(_GROUPS, "percent of groups in which every reward is 1: too easy"),
    "baseline_reward/pct_flat": Metric(_GROUPS, "percent of groups with rewards that all equal another number"),
    "baseline_reward/pct_mixed": Metric(_GROUPS, "percent of groups with spread, which are trained on", "> 30"),
    "num_groups_shaped_flat": Metric(
        _SUM, "groups with spread but equal shaped rewards: no gradient (only with shaping)", "0"
    ),
    "group_size_min": Metric(_MIN, "rollouts of the smallest group"),
    "num_groups_of_one": Metric(_SUM, "groups with a single rollout, without a comparison", "0"),
    "num_truncated_masked": Metric(_SUM, "sequences left out by mask_truncated"),
    "num_selected": Metric(_SUM, "rollouts that cross-entropy learns from"),
    # counts
    "num_groups": Metric(_SUM, "groups"),
    "num_rollouts": Metric(_SUM, "rollouts"),
    "num_sequences": Metric(_SUM, "sequences received"),
    "num_valid_samples": Metric(_SUM, "sequences trained on"),
    "global_valid_toks": Metric(_SUM, "tokens trained on"),
    "num_microbatches": Metric(_SUM, "forward and backward passes"),
    "idle_microbatches": Metric(
        _MAX, "microbatches of a minibatch in which a rank had no sequence (several ranks only)", "0"
    ),
    "mean_trained_tokens": Metric(_SEQUENCES, "trained tokens of a sequence"),
    # speed
    "tokens_per_second": Metric(
        _LAST, "tokens through forward and backward, a second; no padding, and a shared prompt once"
    ),
    "packing_efficiency": Metric(_LAST, "real tokens ÷ positions computed", "1 when packed"),
}
