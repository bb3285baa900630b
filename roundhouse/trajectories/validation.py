"""The gate between collection and training: every trained token is proved to be the engine's.

Invariants: a rollout becomes sequences or is refused with a reason and evidence, never both, and is never dropped
silently. Group statistics ignore refused, failed and masked rollouts. The ledger balances.

The proofs, in order; the first that fails gives the reason:

    unique ids · a reward or a failure, not both                  `prove_failure`
    reward, components, status, sample, times                     `prove_outcome`
    every recorded turn is there                                  `prove_counts`
    stored parts rebuild the prompts (length, digest, order)      `prove_prompts`
    log-probabilities, vocabulary, policy version, limits         `prove_turn`, `prove_measured`
    each prompt continues a call or forks (else `on_break`)       `token_breaks`, `schemas.chains_of`
    messages equal the decoded tokens                             a `TextProof`, if one is given
    no copies, no seed twice, one task a group                    `batch_refusals`
    mask and log-probabilities of the finished table              `schemas.misaligned`

The train stage proves the log-probabilities against the recorded weights, because it computes them anyway
(`roundhouse.stages.validate`). An unexpected error in a proof is a refusal too (`malformed`), so no stored rollout can
stop a run. A proof of one rollout reads only its record and its collection's terms, so the result does not depend on
the batch. Rollouts of our own engines and loops are never refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from roundhouse.config.models import ValidationConfig
from roundhouse.images import BadImage, ImageReader
from roundhouse.trajectories.records import Ledger, Refusal, Rollout, Status, Turn
from roundhouse.trajectories.schemas import QUARANTINE, Chain, chains_of, image_files, misaligned, sequences_table
from roundhouse.trajectories.storable import storable_text
from roundhouse.trajectories.token_breaks import Decode, TokenBreak, token_breaks

log = logging.getLogger(__name__)

MOST_EVIDENCE = 500
"""Characters of an unforeseen error in the evidence."""

Accepted = dict[str, tuple[Rollout, list[Chain]]]
Refused = dict[str, tuple[Rollout, Refusal]]


@dataclass
class Validated:
    """Result of validating one iteration."""

    sequences: pa.Table
    quarantine: pa.Table
    ledger: Ledger
    reasons: dict[str, int] = field(default_factory=dict)
    """Number of rollouts excluded from training, by reason."""
    text_proved: int = 0
    """Number of rollouts with messages that were compared with their tokens."""
    breaks: dict[str, list[TokenBreak]] = field(default_factory=dict)
    """By rollout id, whatever `on_break` made of them."""
    forks: dict[str, list[TokenBreak]] = field(default_factory=dict)
    """By rollout id: calls of a sub-agent, a branch or a compacted history, which nothing is wrong with."""


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
    decode: Decode | None = None,
    images: ImageReader | None = None,
) -> Validated:
    """Turn rollouts into training sequences and a quarantine.

    Args:
        rollouts: all of an iteration, including failed ones.
        vocabulary_size: IDs must lie in [0, vocabulary_size).
        policy_version: the version that the iteration was collected with.
        left_out: groups that dynamic sampling omitted, each with the reason; their rollouts are omitted.
        terms: further facts about the collection; its vocabulary and version are replaced by those given here.
        recorded: recorded turn counts of each rollout of the `rollouts` dataset; turns of missing ones are not counted.
        text: without it, messages are not compared with tokens.
        decode: tokens to text, for the report of a break; called only for a break.
        images: reader of the policy's images; None of a policy that sees none.
    """
    if terms is None:
        terms = CollectionLimits(vocabulary_size, policy_version)
    batch = _Batch(rollouts)
    for rollout in rollouts:
        with batch.judging(rollout):
            batch.prove_unique(rollout)
            prove_failure(rollout)
            if rollout.status.rewarded:
                _prove(rollout, terms, (recorded or {}).get(rollout.rollout_id))
                prove_images(rollout, images)
                chains = batch.chains_of(rollout, config.on_break, decode)
                if text is not None:
                    batch.text_proved += text.prove(rollout)
                batch.accepted[rollout.rollout_id] = (rollout, chains)
    batch.refuse(batch_refusals([rollout for rollout, _ in batch.accepted.values()]))
    batch.leave_out(left_out or {})
    if not terms.written:
        batch.omit_small_groups(
            lambda rollout: max(
                config.min_group_size, math.ceil(config.min_group_fraction * (terms.samples_of(rollout) or 0))
            )
        )
    return batch.validated()


def _prove(rollout: Rollout, terms: CollectionLimits, recorded: Recorded | None) -> None:
    """Run all proofs of one rollout.

    Raises:
        Refusal: a proof fails.
    """
    if rollout.status is Status.MASKED:
        raise Refusal("masked_by_environment", "the environment asked not to train on this rollout")
    terms = terms.environments.get(rollout.environment, terms)
    prove_outcome(rollout, terms)
    prove_counts(rollout, recorded, terms)
    prove_prompts(rollout.turns)
    for turn in rollout.turns:
        prove_turn(turn, terms)
    if not terms.written:
        prove_measured(rollout.turns)


class _Batch:
    """The rollouts of an iteration on their way to either side of the gate."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self.rollouts = rollouts
        self.accepted: Accepted = {}
        self.refused: Refused = {}
        self.text_proved = 0
        self.breaks: dict[str, list[TokenBreak]] = {}
        self.forks: dict[str, list[TokenBreak]] = {}
        self._seen: set[str] = set()

    @contextmanager
    def judging(self, rollout: Rollout) -> Iterator[None]:
        """An error raised inside puts the rollout into quarantine; another one than a Refusal as `malformed`."""
        try:
            yield
            return
        except Refusal as error:
            refusal = error
        except Exception as error:  # judging this rollout ends here, not the iteration
            log.warning("Rollout %s cannot be judged", rollout.rollout_id, exc_info=True)
            refusal = Refusal("malformed", f"{type(error).__name__}: {error}"[:MOST_EVIDENCE])
        self.refused[rollout.rollout_id] = (rollout, refusal)
        self.accepted.pop(rollout.rollout_id, None)

    def prove_unique(self, rollout: Rollout) -> None:
        if rollout.rollout_id in self._seen:
            raise Refusal("duplicate_rollout", f"{rollout.rollout_id} occurs more than once")
        self._seen.add(rollout.rollout_id)

    def chains_of(
        self, rollout: Rollout, on_break: Literal["reject", "truncate", "split"], decode: Decode | None
    ) -> list[Chain]:
        """The paths of a rollout; its forks and breaks are noted whatever becomes of it.

        Raises:
            Refusal: see `schemas.chains_of`; `not_contiguous` for a break under `reject`.
        """
        departures = token_breaks(rollout.turns, decode)
        for kind, is_fork in ((self.forks, True), (self.breaks, False)):
            if chosen := [each for each in departures if each.cause.is_fork is is_fork]:
                kind[rollout.rollout_id] = chosen
        breaks, turns = self.breaks.get(rollout.rollout_id), rollout.turns
        if breaks and on_break == "reject":
            raise Refusal("not_contiguous", str(breaks[0]), breaks[0].turn)
        return chains_of(turns[: breaks[0].turn] if breaks and on_break == "truncate" else turns)

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

    def omit_small_groups(self, smallest: Callable[[Rollout], int]) -> None:
        """Refuse the rest of a group that lost too many members; `smallest` has the size that a rollout's group needs."""
        sizes = Counter(rollout.group_id for rollout, _ in self.accepted.values())
        self.refuse(
            {
                name: Refusal(
                    "small_group",
                    f"{sizes[rollout.group_id]} valid rollouts in the group, {smallest(rollout)} needed",
                    outcome=Status.OMITTED,
                )
                for name, (rollout, _) in self.accepted.items()
                if sizes[rollout.group_id] < smallest(rollout)
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
            breaks=self.breaks,
            forks=self.forks,
        )


def quarantine_table(refused: Iterable[tuple[Rollout, Refusal]]) -> pa.Table:
    """The `quarantine` dataset."""
    rows = [
        {
            "rollout_id": rollout.rollout_id,
            "group_id": rollout.group_id,
            "outcome": refusal.outcome.value,
            "reason": refusal.reason,
            "evidence": storable_text(refusal.evidence),
            "turn": refusal.turn,
        }
        for rollout, refusal in refused
    ]
    return pa.Table.from_pylist(rows, schema=QUARANTINE)


LOG_PROB_SLACK = 1e-4
"""A log-probability may exceed 0 by this much: float32 rounding of a certain token."""

LOWEST_LOG_PROB = -1000.0
"""No sampler draws a token below it: exp(-745) is the smallest positive float64. Engines report -9999 for minus infinity."""

CERTAIN_TOKENS = 16
"""Smallest number of equal log-probabilities that shows they were not measured."""

COMPONENT_TOLERANCE = 1e-5
"""Relative, of the sum of reward components against the reward, which may be added up in another order."""

CUT_SHORT = frozenset({"length", "max_tokens", "max_turns", "environment"})
"""Finish reasons of rollouts that a limit or the world ended."""

TURN_FINISHES = frozenset({"stop", "tool_calls", "length"})


@dataclass(frozen=True, slots=True)
class Recorded:
    """Turn counts of a rollout in the `rollouts` dataset; the turns are in another dataset."""

    turns: int
    generated_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class CollectionLimits:
    """Limits and terms of a batch's collection."""

    vocabulary_size: int
    """IDs lie in [0, vocabulary_size)."""
    policy_version: int
    """Version of the weights that must have answered, or the newest that may have."""
    max_age: int = 0
    """Answers of so many versions before it are allowed too."""
    group_size: int | None = None
    """Samples of a group are numbered from 0 to below this. None: not known."""
    branches: int | None = None
    """The same of the branches of a turn."""
    max_new_tokens: int | None = None
    """Tokens of one model call at most. None: not known, as with agents that set their own limits; `max_turns` alike."""
    max_turns: int | None = None
    reward_limit: float = 1e6
    """Rewards are at most so large in size."""
    written: bool = False
    """Whether the conversations were written, not sampled: log-probabilities are missing, and each row is a group."""
    environments: Mapping[str, CollectionLimits] = field(default_factory=dict)
    """Limits for the rollouts of some environments of a mixture, in place of these."""

    def samples_of(self, rollout: Rollout) -> int | None:
        """Return the number of samples of this rollout's group."""
        return self.group_size if rollout.branched_from is None else self.branches


class TextProof(Protocol):
    """Holds a rollout's recorded messages against its tokens."""

    def prove(self, rollout: Rollout) -> bool:
        """True: they agree. False: this rollout cannot be judged.

        Raises:
            Refusal: they do not agree.
        """
        ...


def prove_failure(rollout: Rollout) -> None:
    """A rollout has a reward or a failure, not both.

    Raises:
        Refusal: `reward_of_failure`; a failed rollout stays failed.
    """
    if not rollout.status.rewarded and rollout.reward is not None:
        evidence = f"status {rollout.status.value} with reward {rollout.reward}"
        raise Refusal("reward_of_failure", evidence, outcome=rollout.status)
    if rollout.status.counted and (rollout.failure_kind or rollout.failure_code):
        marks = rollout.failure_code or rollout.failure_kind
        raise Refusal("reward_of_failure", f"status {rollout.status.value} with failure {marks}")


def prove_outcome(rollout: Rollout, terms: CollectionLimits) -> None:
    """Reward, status, sample number and times make sense."""
    if rollout.reward is None or not math.isfinite(rollout.reward):
        raise Refusal("reward", f"reward is {rollout.reward}")
    for name, part in {"reward": rollout.reward, **rollout.reward_components}.items():
        if not abs(part) <= terms.reward_limit:
            raise Refusal("reward", f"{name} is {part:g}, rollout.reward_limit is {terms.reward_limit:g}")
    if rollout.reward_components:
        total = math.fsum(rollout.reward_components.values())
        if not math.isclose(total, rollout.reward, rel_tol=COMPONENT_TOLERANCE, abs_tol=1e-8):
            raise Refusal("reward_components", f"they add up to {total}, the reward is {rollout.reward}")
    whole = rollout.status is Status.COMPLETED
    if rollout.finish_reason in CUT_SHORT if whole else rollout.finish_reason == "stop":
        raise Refusal("finish_reason", f"status {rollout.status.value} with finish reason {rollout.finish_reason}")
    samples = terms.samples_of(rollout)
    if rollout.sample < 0 or (samples is not None and rollout.sample >= samples):
        raise Refusal("sample", f"sample {rollout.sample} of a group of {samples}")
    spent = (rollout.seconds, rollout.generation_seconds, rollout.environment_seconds, rollout.started_at)
    times = (*spent, *(turn.latency_seconds for turn in rollout.turns))
    if not math.isfinite(sum(times)) or min(times) < 0:
        raise Refusal("timing", f"a time is negative or not finite: {times}")


def prove_counts(rollout: Rollout, recorded: Recorded | None, terms: CollectionLimits) -> None:
    """The turns are all there: as many, with as many tokens, as were written down with the rollout."""
    turns = rollout.turns
    if not turns:
        raise Refusal("no_turns", "the rollout has no model call")
    if recorded is not None:
        total = sum(len(turn.prompt_token_ids) + len(turn.generation_token_ids) for turn in turns)
        actual = Recorded(len(turns), rollout.generated_tokens, total)
        if actual != recorded:
            raise Refusal("turn_count", f"found {actual}, written down {recorded}")
    if terms.max_turns is None:
        return
    if len(turns) > terms.max_turns:
        raise Refusal("turn_count", f"{len(turns)} model calls, {terms.max_turns} allowed")
    if rollout.finish_reason == "max_turns" and len(turns) < terms.max_turns:
        raise Refusal("turn_count", f"finish reason max_turns after {len(turns)} of {terms.max_turns} model calls")
    if rollout.finish_reason == "length" and turns[-1].finish_reason != "length":
        raise Refusal(
            "finish_reason", f"length, but the last call ended with {turns[-1].finish_reason}", len(turns) - 1
        )


def prove_prompts(turns: Sequence[Turn]) -> None:
    """Turns are in order, and the stored parts rebuild every prompt that the engine saw."""
    ends: list[int] = []
    hashes: list[hashlib._Hash] = []
    for index, turn in enumerate(turns):
        if turn.turn != index or (turn.parent is not None and not 0 <= turn.parent < index):
            raise Refusal("turn_order", f"turn {turn.turn} with parent {turn.parent} at place {index}", index)
        known = 0 if turn.parent is None else ends[turn.parent]
        length = known + len(turn.prompt_token_ids)
        if length != turn.prompt_length:
            raise Refusal("prompt_length", f"{length} tokens rebuilt, the engine saw {turn.prompt_length}", index)
        if length == 0:
            raise Refusal("empty_prompt", "nothing stands before the first generated token to predict it", index)
        running = hashlib.sha256() if turn.parent is None else hashes[turn.parent].copy()
        running.update(_as_int32(turn.prompt_token_ids, index))
        if running.hexdigest()[:16] != turn.prompt_digest:
            raise Refusal("prompt_digest", "the rebuilt prompt is not what the engine saw", index)
        running.update(_as_int32(turn.generation_token_ids, index))
        hashes.append(running)
        ends.append(length + len(turn.generation_token_ids))


def prove_images(rollout: Rollout, reader: ImageReader | None) -> None:
    """Each image has one run of placeholders, as long as the image needs, and its file is recorded.

    Raises:
        Refusal: `images`.
    """
    files = image_files(rollout)
    for turn in rollout.turns:
        names = turn.images or []
        if missing := next((name for name in names if name not in files), None):
            raise Refusal("images", f"the image {missing} of the prompt is not recorded", turn.turn)
        if reader is None:
            if names:
                raise Refusal("images", f"{len(names)} images, and the policy sees none", turn.turn)
            continue
        try:
            misfit = reader.misfit(turn.prompt_token_ids, [files[name] for name in names])
        except BadImage as error:
            raise Refusal("images", str(error), turn.turn) from error
        if misfit:
            raise Refusal("images", misfit, turn.turn)
        # Only the last token of a reply may be one: it stops the reply, and nothing is computed from it
        if any(turn.turn == other.parent for other in rollout.turns) and reader.runs(turn.generation_token_ids):
            raise Refusal("images", "a reply holds a placeholder without an image", turn.turn)


def prove_turn(turn: Turn, terms: CollectionLimits) -> None:
    """Tokens and log-probabilities of one model call, and the version that answered it."""
    tokens, log_probs = turn.generation_token_ids, turn.generation_log_probs
    if not tokens:
        raise Refusal("empty_generation", "no token was generated", turn.turn)
    if len(log_probs) != (0 if terms.written else len(tokens)):
        raise Refusal("log_prob_count", f"{len(tokens)} tokens, {len(log_probs)} log-probabilities", turn.turn)
    # NaN hides from min and max, and not from a sum of bounded numbers
    if (
        max(log_probs, default=0.0) > LOG_PROB_SLACK
        or min(log_probs, default=0.0) < LOWEST_LOG_PROB
        or math.isnan(sum(log_probs))
    ):
        place, value = next(
            (place, value) for place, value in enumerate(log_probs) if not LOWEST_LOG_PROB <= value <= LOG_PROB_SLACK
        )
        evidence = f"log-probability {value} at generated token {place}, which is impossible for a sampled token"
        raise Refusal("log_prob_value", evidence, turn.turn)
    lowest = min(min(tokens), min(turn.prompt_token_ids, default=0))
    highest = max(max(tokens), max(turn.prompt_token_ids, default=0))
    if lowest < 0 or highest >= terms.vocabulary_size:
        token = lowest if lowest < 0 else highest
        raise Refusal("vocabulary", f"token {token} is outside [0, {terms.vocabulary_size})", turn.turn)
    # turns outside the loss may have any version: the recorded turns before a branch
    if turn.trained and not 0 <= terms.policy_version - turn.policy_version <= terms.max_age:
        older = f" or {terms.max_age} before it" if terms.max_age else ""
        evidence = f"answered by version {turn.policy_version}, not {terms.policy_version}{older}"
        raise Refusal("policy_version", evidence, turn.turn)
    if turn.version_spans is not None:
        # They cover the generated tokens, and the oldest is the turn's version: a rollout is as old as its oldest token
        spans, generated = turn.version_spans, len(turn.generation_token_ids)
        counts = [span["tokens"] for span in spans]
        oldest = min((span["version"] for span in spans), default=None)
        if min(counts, default=0) < 1 or sum(counts) != generated or oldest != turn.policy_version:
            detail = f"{list(spans)} over {generated} tokens, answered by version {turn.policy_version}"
            raise Refusal("version_spans", detail, turn.turn)
    if turn.reward is not None and not abs(turn.reward) <= terms.reward_limit:
        evidence = f"the turn's reward is {turn.reward}, rollout.reward_limit is {terms.reward_limit:g}"
        raise Refusal("reward", evidence, turn.turn)
    if turn.finish_reason not in TURN_FINISHES:
        raise Refusal("finish_reason", f"a model call ended with {turn.finish_reason!r}", turn.turn)
    if terms.max_new_tokens is not None and len(tokens) > terms.max_new_tokens:
        raise Refusal("generation_length", f"{len(tokens)} tokens, {terms.max_new_tokens} allowed", turn.turn)


def prove_measured(turns: Sequence[Turn]) -> None:
    """Prove that the log-probabilities are measurements: not one number for every token.

    All exactly 0 means certainty everywhere, which gives a gradient of 0 too, or an engine that did not report them.
    Only for rollouts of at least `CERTAIN_TOKENS` generated tokens.
    """
    count = sum(len(turn.generation_log_probs) for turn in turns)
    first = turns[0].generation_log_probs[0]
    if count >= CERTAIN_TOKENS and all(
        turn.generation_log_probs.count(first) == len(turn.generation_log_probs) for turn in turns
    ):
        raise Refusal("log_probs_constant", f"all {count} log-probabilities are {first}")


def _as_int32(token_ids: Sequence[int], turn: int) -> bytes:
    try:
        return array("i", token_ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise Refusal("vocabulary", f"no token IDs: {error}", turn) from error


def batch_refusals(rollouts: Sequence[Rollout]) -> dict[str, Refusal]:
    """Refusals by rollout id; give only rollouts with a reward."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.seed != 0:
            groups.setdefault(rollout.group_id, []).append(rollout)
    strangers = dict(refused for members in groups.values() for refused in _strangers(members))
    same_seed: dict[str, Refusal] = {}
    holders: dict[tuple[str, int], str] = {}
    for rollout in rollouts:
        if rollout.seed == 0:
            continue
        holder = holders.setdefault((rollout.group_id, rollout.seed), rollout.rollout_id)
        if holder != rollout.rollout_id:
            same_seed[rollout.rollout_id] = Refusal("repeated_seed", f"seed {rollout.seed} is that of {holder}")
    copies: dict[str, Refusal] = {}
    originals: dict[tuple[float, float, float], list[Rollout]] = {}
    for rollout in rollouts:
        if not rollout.started_at or not rollout.seconds:
            continue
        timed = originals.setdefault((rollout.started_at, rollout.seconds, rollout.generation_seconds), [])
        for original in timed:
            if original.rollout_id != rollout.rollout_id and original.turns == rollout.turns:
                evidence = (
                    f"the same turns, begun at {rollout.started_at} for {rollout.seconds} s, as {original.rollout_id}"
                )
                copies[rollout.rollout_id] = Refusal("copied_rollout", evidence)
                break
        else:
            timed.append(rollout)
    return {**strangers, **same_seed, **copies}


def _strangers(members: list[Rollout]) -> Iterable[tuple[str, Refusal]]:
    first = members[0]
    if all(each.task == first.task and each.environment == first.environment for each in members):
        return
    kinds: dict[tuple[str, str], list[Rollout]] = {}
    for rollout in members:
        # As text, in which also NaN equals itself.
        kinds.setdefault((json.dumps(rollout.task, sort_keys=True), rollout.environment), []).append(rollout)
    if len(kinds) == 1:
        return
    most = max(map(len, kinds.values()))
    clear = sum(len(alike) == most for alike in kinds.values()) == 1
    for alike in kinds.values():
        if clear and len(alike) == most:
            continue
        for rollout in alike:
            evidence = f"{len(alike)} of {len(members)} rollouts of the group have this task row and environment"
            yield rollout.rollout_id, Refusal("task_row", evidence)
