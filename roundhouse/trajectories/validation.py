"""The gate between collection and training: every token that is trained on has been proved to be what the engine saw.

Invariants: a rollout is either turned into sequences or refused with a reason and evidence, never both and never silently
dropped; whatever was refused, failed or masked is not seen by the group statistics; the ledger balances.

The proofs, in order; the first that does not hold gives the reason:

    unique ids · a reward or a failure, not both                  here, `proofs.prove_failure`
    reward, components, status, sample, times                     `proofs.prove_outcome`
    every recorded turn is there                                  `proofs.prove_counts`
    stored parts rebuild the prompts (length, digest, order)      `proofs.prove_prompts`
    log-probabilities, vocabulary, policy version, limits         `proofs.prove_turn`, `proofs.prove_measured`
    each prompt continues its parent (else `on_break` decides)    `sequences.chains_of`
    messages are what the tokens say                              a `proofs.TextProof`, where one is given
    no copies, no seed twice, one task a group                    `proofs.batch_refusals`
    mask and log-probabilities of the finished table              `sequences.misaligned`

That the log-probabilities are those of the recorded weights is proved where they are computed anyway, in the train stage
(`roundhouse.stages.recomputed`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from roundhouse.config.models import ValidationConfig
from roundhouse.trajectories.ledger import Ledger
from roundhouse.trajectories.proofs import (
    CollectionLimits,
    Recorded,
    Refusal,
    TextProof,
    batch_refusals,
    prove_counts,
    prove_failure,
    prove_measured,
    prove_outcome,
    prove_prompts,
    prove_turn,
)
from roundhouse.trajectories.records import Rollout, Status
from roundhouse.trajectories.schemas import QUARANTINE
from roundhouse.trajectories.sequences import Chain, chains_of, misaligned, sequences_table

Accepted = dict[str, tuple[Rollout, list[Chain]]]
Refused = dict[str, tuple[Rollout, Refusal]]


@dataclass
class Validated:
    """Result of validating one iteration."""

    sequences: pa.Table
    quarantine: pa.Table
    ledger: Ledger
    reasons: dict[str, int] = field(default_factory=dict)
    """How many rollouts were kept from training, by reason."""
    text_proved: int = 0
    """Rollouts whose messages were held against their tokens."""


def validate(
    rollouts: Sequence[Rollout],
    config: ValidationConfig,
    *,
    vocabulary_size: int,
    policy_version: int,
    left_out: Mapping[str, str] | None = None,
    terms: CollectionLimits | None = None,
    recorded: Mapping[str, Recorded] | None = None,
    text: TextProof | None = None,
) -> Validated:
    """Turn rollouts into training sequences and a quarantine.

    Args:
        rollouts: all of an iteration, failed ones included.
        vocabulary_size: IDs must lie in [0, vocabulary_size).
        policy_version: the version that the iteration was collected with.
        left_out: groups that dynamic sampling put aside, each with the reason; their rollouts are omitted.
        terms: more of what is known about the collection; its vocabulary and version are those given here.
        recorded: what the `rollouts` dataset says of the turns of each; where it lacks one, turns are not counted.
        text: without it, no messages are held against tokens.
    """
    if terms is None:
        terms = CollectionLimits(vocabulary_size, policy_version)
    batch = _Batch(rollouts)
    for rollout in rollouts:
        with batch.judging(rollout):
            batch.prove_unique(rollout)
            prove_failure(rollout)
            if rollout.status.rewarded:
                chains = _prove(rollout, config, terms, (recorded or {}).get(rollout.rollout_id))
                if text is not None:
                    batch.text_proved += text.prove(rollout)
                batch.accepted[rollout.rollout_id] = (rollout, chains)
    batch.refuse(batch_refusals([rollout for rollout, _ in batch.accepted.values()]))
    batch.leave_out(left_out or {})
    batch.omit_small_groups(max(config.min_group_size, math.ceil(config.min_group_fraction * (terms.group_size or 0))))
    return batch.validated()


def _prove(
    rollout: Rollout, config: ValidationConfig, terms: CollectionLimits, recorded: Recorded | None
) -> list[Chain]:
    """The chains of one rollout, or a Refusal."""
    if rollout.status is Status.MASKED:
        raise Refusal("masked_by_environment", "the environment asked not to train on this rollout")
    prove_outcome(rollout, terms)
    prove_counts(rollout, recorded, terms)
    prove_prompts(rollout.turns)
    for turn in rollout.turns:
        prove_turn(turn, terms)
    prove_measured(rollout.turns)
    return chains_of(rollout.turns, config.on_break)


class _Batch:
    """The rollouts of an iteration on their way to either side of the gate."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self.rollouts = rollouts
        self.accepted: Accepted = {}
        self.refused: Refused = {}
        self.text_proved = 0
        self._seen: set[str] = set()

    @contextmanager
    def judging(self, rollout: Rollout) -> Iterator[None]:
        """A Refusal raised inside puts the rollout into quarantine."""
        try:
            yield
        except Refusal as refusal:
            self.refused[rollout.rollout_id] = (rollout, refusal)
            self.accepted.pop(rollout.rollout_id, None)

    def prove_unique(self, rollout: Rollout) -> None:
        if rollout.rollout_id in self._seen:
            raise Refusal("duplicate_rollout", f"{rollout.rollout_id} occurs more than once")
        self._seen.add(rollout.rollout_id)

    def refuse(self, refusals: Mapping[str, Refusal]) -> None:
        for name, refusal in refusals.items():
            self.refused[name] = (self.accepted.pop(name)[0], refusal)

    def leave_out(self, groups: Mapping[str, str]) -> None:
        evidence = "dynamic sampling put its group aside"
        self.refuse(
            {
                name: Refusal(groups[rollout.group_id], evidence, outcome=Status.OMITTED)
                for name, (rollout, _) in self.accepted.items()
                if rollout.group_id in groups
            }
        )

    def omit_small_groups(self, min_group_size: int) -> None:
        """Refuse the rest of a group that lost too many members."""
        sizes = Counter(rollout.group_id for rollout, _ in self.accepted.values())
        self.refuse(
            {
                name: Refusal(
                    "small_group",
                    f"{sizes[rollout.group_id]} valid rollouts in the group, {min_group_size} needed",
                    outcome=Status.OMITTED,
                )
                for name, (rollout, _) in self.accepted.items()
                if sizes[rollout.group_id] < min_group_size
            }
        )

    def validated(self) -> Validated:
        table = sequences_table(self.accepted.values())
        while wrong := misaligned(table, list(self.accepted.values())):
            table = table.filter(pc.invert(pc.is_in(table.column("rollout_id"), pa.array(list(wrong)))))
            self.refuse({name: Refusal("mask_alignment", evidence) for name, evidence in wrong.items()})
        refusals = {name: refusal for name, (_, refusal) in self.refused.items()}
        outcomes = [
            refusals[rollout.rollout_id].outcome if rollout.rollout_id in refusals else rollout.status
            for rollout in self.rollouts
        ]
        return Validated(
            sequences=table,
            quarantine=quarantine_table(self.refused.values()),
            ledger=Ledger.from_outcomes(outcomes, [rollout.failure_code for rollout in self.rollouts]),
            reasons=dict(Counter(refusal.reason for refusal in refusals.values())),
            text_proved=self.text_proved,
        )


def quarantine_table(refused: Iterable[tuple[Rollout, Refusal]]) -> pa.Table:
    """The `quarantine` dataset."""
    rows = [
        {
            "rollout_id": rollout.rollout_id,
            "group_id": rollout.group_id,
            "outcome": refusal.outcome.value,
            "reason": refusal.reason,
            "evidence": refusal.evidence,
            "turn": refusal.turn,
        }
        for rollout, refusal in refused
    ]
    return pa.Table.from_pylist(rows, schema=QUARANTINE)
