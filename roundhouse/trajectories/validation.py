"""The gate between collection and training: every token that is trained on has been proved to be what the engine saw.

Invariants: a rollout is either turned into sequences or refused with a reason and evidence, never both and never silently
dropped; whatever was refused, failed or masked is not seen by the group statistics; the ledger balances.

The proofs, in order: a reward exists and is finite · ids are unique · prompts rebuild to the recorded length and digest ·
log-probabilities pair with tokens, are finite and not positive · IDs lie in the vocabulary · the policy version is the
wanted one · each prompt continues its parent (else `on_break` decides).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from roundhouse.config.models import ValidationConfig
from roundhouse.trajectories.ledger import Ledger
from roundhouse.trajectories.records import Rollout, Status, Turn
from roundhouse.trajectories.schemas import QUARANTINE, SEQUENCES, rebuild_prompts
from roundhouse.trajectories.tokens import digest_tokens

LOG_PROB_SLACK = 1e-4
"""A log-probability may exceed 0 by this much: float32 rounding of a certain token."""


@dataclass(eq=False)
class Refusal(Exception):
    """Why a rollout was kept from training."""

    reason: str
    evidence: str
    turn: int | None = None
    outcome: Status = Status.MASKED


@dataclass
class Validated:
    """Result of validating one iteration."""

    sequences: pa.Table
    quarantine: pa.Table
    ledger: Ledger
    reasons: dict[str, int] = field(default_factory=dict)
    """How many rollouts were kept from training, by reason."""


def validate(
    rollouts: Sequence[Rollout], config: ValidationConfig, *, vocabulary_size: int, policy_version: int
) -> Validated:
    """Turn rollouts into training sequences and a quarantine.

    Args:
        rollouts: all of an iteration, failed ones included.
        vocabulary_size: IDs must lie in [0, vocabulary_size).
        policy_version: the version that the iteration was collected with.
    """
    accepted: dict[str, list[dict[str, Any]]] = {}
    refused: dict[str, tuple[Rollout, Refusal]] = {}
    seen: set[str] = set()
    for rollout in rollouts:
        if not rollout.status.rewarded:
            continue
        try:
            if rollout.rollout_id in seen:
                raise Refusal("duplicate_rollout", f"{rollout.rollout_id} occurs more than once")
            seen.add(rollout.rollout_id)
            rows = _sequences(rollout, config, vocabulary_size, policy_version)
            accepted[rollout.rollout_id] = rows
        except Refusal as refusal:
            refused[rollout.rollout_id] = (rollout, refusal)
            accepted.pop(rollout.rollout_id, None)
    _omit_small_groups(rollouts, config.min_group_size, accepted, refused)
    return _validated(rollouts, accepted, refused)


def _sequences(
    rollout: Rollout, config: ValidationConfig, vocabulary_size: int, policy_version: int
) -> list[dict[str, Any]]:
    """The sequences of one rollout, or a Refusal."""
    if rollout.status is Status.MASKED:
        raise Refusal("masked_by_environment", "the environment asked not to train on this rollout")
    if rollout.reward is None or not math.isfinite(rollout.reward):
        raise Refusal("reward", f"reward is {rollout.reward}")
    if not rollout.turns:
        raise Refusal("no_turns", "the rollout has no model call")
    _prove_prompts(rollout.turns)
    for turn in rollout.turns:
        _prove_turn(turn, vocabulary_size, policy_version)
    chains = _chains(rollout.turns, config)
    return [_sequence(rollout, index, chain) for index, chain in enumerate(chains)]


def _prove_prompts(turns: Sequence[Turn]) -> None:
    for index, turn in enumerate(turns):
        if turn.turn != index or (turn.parent is not None and not 0 <= turn.parent < index):
            raise Refusal("turn_order", f"turn {turn.turn} with parent {turn.parent} at place {index}", index)
    for turn, prompt in zip(turns, rebuild_prompts(turns), strict=True):
        if len(prompt) != turn.prompt_length:
            raise Refusal(
                "prompt_length", f"{len(prompt)} tokens rebuilt, the engine saw {turn.prompt_length}", turn.turn
            )
        if digest_tokens(prompt) != turn.prompt_digest:
            raise Refusal("prompt_digest", "the rebuilt prompt is not what the engine saw", turn.turn)


def _prove_turn(turn: Turn, vocabulary_size: int, policy_version: int) -> None:
    tokens, log_probs = turn.generation_token_ids, turn.generation_log_probs
    if not tokens:
        raise Refusal("empty_generation", "no token was generated", turn.turn)
    if len(tokens) != len(log_probs):
        raise Refusal("log_prob_count", f"{len(tokens)} tokens, {len(log_probs)} log-probabilities", turn.turn)
    for place, value in enumerate(log_probs):
        if not math.isfinite(value) or value > LOG_PROB_SLACK:
            raise Refusal("log_prob_value", f"log-probability {value} at generated token {place}", turn.turn)
    for token in (*turn.prompt_token_ids, *tokens):
        if not 0 <= token < vocabulary_size:
            raise Refusal("vocabulary", f"token {token} is outside [0, {vocabulary_size})", turn.turn)
    if turn.policy_version != policy_version:
        raise Refusal("policy_version", f"answered by version {turn.policy_version}, not {policy_version}", turn.turn)


def _chains(turns: Sequence[Turn], config: ValidationConfig) -> list[list[Turn]]:
    """Runs of turns that continue one another; more than one only under `split`."""
    chains: list[list[Turn]] = [[turns[0]]]
    for turn in turns[1:]:
        if turn.parent == turn.turn - 1:
            chains[-1].append(turn)
            continue
        if config.on_break == "reject":
            raise Refusal("not_contiguous", "the prompt does not continue the recorded tokens", turn.turn)
        if config.on_break == "truncate":
            break
        if turn.parent is not None:
            raise Refusal("branch", f"turn {turn.turn} branches off turn {turn.parent}", turn.turn)
        chains.append([turn])
    return chains


def _sequence(rollout: Rollout, index: int, chain: Sequence[Turn]) -> dict[str, Any]:
    token_ids: list[int] = []
    mask: list[int] = []
    log_probs: list[float] = []
    spans: list[dict[str, int]] = []
    for turn in chain:
        new, generated = turn.prompt_token_ids, turn.generation_token_ids
        start = len(token_ids) + len(new)
        token_ids += [*new, *generated]
        mask += [0] * len(new) + [1] * len(generated)
        log_probs += [0.0] * len(new) + turn.generation_log_probs
        if spans and spans[-1]["version"] == turn.policy_version:
            spans[-1]["end"] = len(token_ids)
        else:
            spans.append({"version": turn.policy_version, "start": start, "end": len(token_ids)})
    return {
        "sequence_id": f"{rollout.rollout_id}/{index}",
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "token_ids": token_ids,
        "loss_mask": mask,
        "gen_logprobs": log_probs,
        "policy_version": min(span["version"] for span in spans),
        "version_spans": spans,
        "reward": rollout.reward,
        "truncated": rollout.status is Status.TRUNCATED,
    }


def _omit_small_groups(
    rollouts: Sequence[Rollout],
    min_group_size: int,
    accepted: dict[str, list[dict[str, Any]]],
    refused: dict[str, tuple[Rollout, Refusal]],
) -> None:
    """Move the rest of a group that lost too many members from `accepted` to `refused`."""
    sizes: dict[str, int] = {}
    for rollout in rollouts:
        sizes[rollout.group_id] = sizes.get(rollout.group_id, 0) + (rollout.rollout_id in accepted)
    for rollout in rollouts:
        size = sizes[rollout.group_id]
        if rollout.rollout_id in accepted and size < min_group_size:
            del accepted[rollout.rollout_id]
            evidence = f"{size} valid rollouts in the group, {min_group_size} needed"
            refused[rollout.rollout_id] = (rollout, Refusal("small_group", evidence, outcome=Status.OMITTED))


def _validated(
    rollouts: Sequence[Rollout],
    accepted: dict[str, list[dict[str, Any]]],
    refused: dict[str, tuple[Rollout, Refusal]],
) -> Validated:
    quarantine = [
        {
            "rollout_id": rollout.rollout_id,
            "group_id": rollout.group_id,
            "outcome": refusal.outcome.value,
            "reason": refusal.reason,
            "evidence": refusal.evidence,
            "turn": refusal.turn,
        }
        for rollout, refusal in refused.values()
    ]
    reasons = Counter(refusal.reason for _, refusal in refused.values())
    outcomes = [
        refused[rollout.rollout_id][1].outcome if rollout.rollout_id in refused else rollout.status
        for rollout in rollouts
    ]
    return Validated(
        sequences=pa.Table.from_pylist([row for rows in accepted.values() for row in rows], schema=SEQUENCES),
        quarantine=pa.Table.from_pylist(quarantine, schema=QUARANTINE),
        ledger=Ledger.from_outcomes(outcomes, [rollout.failure_code for rollout in rollouts]),
        reasons=dict(reasons),
    )
