"""Rollouts and turns as Python objects, and the ledger of an iteration's rollouts and tokens.

    task ── group ── rollout ── turn (one model call)
                        └────── sequence (training input; made by validation)

Invariants: a failed rollout has no reward (`reward is None`); a completed or truncated one has a reward. Token IDs are
the engine's, never re-tokenised. Spread is a property of a whole group: measured without one rollout, the single right
answer among wrong ones would be filtered out.

A `Ledger` counts the outcome of every requested rollout. It always balances: `requested = completed + truncated +
failed + masked + omitted`, and the failures by code add up to `failed`. It is checked against its rows when a stage is
read, before training, and in `store verify`:

    the `rollouts` dataset has these rows by status, each id once              collect, evaluate
    no row without a rewarded status has a reward                              collect, evaluate
    validate has as many requested and failed as collect                       between the two
    the rollouts of `sequences` are those completed and truncated              validate, and again before training

The last check keeps the reward of a failed rollout from the weights. Every generated token of a training rollout is
trained on or wasted for exactly one reason: failed, quarantined or omitted (validate; too small a group or surplus), or
untrained (train; a group without spread).
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from roundhouse.errors import RoundhouseError, StoreError
from roundhouse.store.location import Location
from roundhouse.store.stage import Manifest, StageKind, parse_parquet, read_manifest


class Status(StrEnum):
    """Outcome of a rollout. requested = completed + truncated + failed + masked + omitted, always."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """Ended by a limit of turns or tokens; it has a reward."""
    FAILED = "failed"
    """Without a reward; `failure_kind` and `failure_detail` have the cause."""
    MASKED = "masked"
    """Has a reward but must not be trained on, by decision of the environment, the agent or validation."""
    OMITTED = "omitted"
    """Not trained on although nothing is wrong with it: its group was too small, or it was never started."""

    @property
    def rewarded(self) -> bool:
        return self is not Status.FAILED and self is not Status.OMITTED

    @property
    def counted(self) -> bool:
        """The reward counts in means and group statistics: a masked rollout keeps its reward on record alone."""
        return self is Status.COMPLETED or self is Status.TRUNCATED


class FailureKind(StrEnum):
    """Party at fault, which decides whether a retry can help (`roundhouse.errors`)."""

    INFRA = "infra"
    DATA = "data"


class CallStage(StrEnum):
    """Stages of one model call, in order."""

    REQUEST = "LF1 Request"
    """The JSON that is sent: messages or Responses items."""
    INPUT_PROMPT = "LF2 Input Prompt"
    """The text that the chat template makes of it."""
    PROMPT_TOKEN_IDS = "LF3 Prompt Token IDs"
    """The text in tokens."""
    GENERATION_TOKEN_IDS = "LF4 Generation Token IDs"
    """The model's sampled tokens."""
    GENERATION = "LF5 Generation"
    """The sampled tokens as text."""
    RESPONSE = "LF6 Response"
    """The text, parsed into content and tool calls."""


@dataclass(slots=True)
class Turn:
    """One model call."""

    turn: int
    """0, 1, … in order of the calls."""
    parent: int | None
    """Turn that this prompt continues; None begins a new root (the first turn, or a break)."""
    prompt_token_ids: list[int]
    """Tokens that the prompt adds to the parent's prompt and generation; the whole prompt at a root."""
    prompt_length: int
    """Length of the whole prompt as the engine saw it, in tokens."""
    prompt_digest: str
    """`digest_tokens` of the whole prompt as the engine saw it: the proof that the stored parts rebuild it."""
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    """Natural logarithms under the sampling distribution (with temperature), one per generated token; empty if the
    tokens were written, not sampled."""
    policy_version: int
    """Version of the generating weights; the oldest one if a refit happened in between."""
    finish_reason: str
    """stop, tool_calls or length."""
    latency_seconds: float
    trained: bool = True
    """False: its tokens stay on record and in later prompts, and the loss skips them."""
    version_spans: list[dict[str, int]] | None = None
    """`[{"version": 3, "tokens": 17}, …]`: which version drew which of the generated tokens, in order; None: all are
    `policy_version`'s."""
    reward: float | None = None
    """The environment's reward for this turn, part of the rollout's reward. None: not judged yet; the rest of the
    rollout's reward belongs to its last turns."""
    images: list[str] | None = None
    """Names of the images that the prompt adds to the parent's (`roundhouse.images`), in order."""


@dataclass(slots=True)
class Rollout:
    """One attempt at a task, as the rollout engine leaves it."""

    group_id: str
    sample: int
    task: dict[str, Any]
    """The task row (NeMo Gym shape: `responses_create_params` and verifier fields)."""
    environment: str
    status: Status
    attempt: int = 1
    seed: int = 0
    reward: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    items: list[dict[str, Any]] = field(default_factory=list)
    """The conversation as Responses items, input first, without token fields."""
    turns: list[Turn] = field(default_factory=list)
    finish_reason: str = ""
    """stop, length, max_turns, max_tokens, environment (a world's own limit), or empty when it failed."""
    failure_kind: FailureKind | None = None
    failure_code: str = ""
    """Short and stable. For a failed rollout, the failure's type: engine_unreachable, engine_timeout, tool_timeout,
    environment_unavailable, verifier_failed, … For a masked one, the reason unless the environment asked for it:
    token_capture_<reason> (its recorded calls cannot be joined uniquely), malformed_token_fields (an import); else
    empty."""
    failure_detail: str = ""
    started_at: float = 0.0
    """Seconds since the epoch."""
    seconds: float = 0.0
    """Wall time of the last attempt."""
    generation_seconds: float = 0.0
    environment_seconds: float = 0.0
    branched_from: str | None = None
    """ID of the rollout that supplied its first turns; these are not trained on. None: it begins with its task."""

    @property
    def rollout_id(self) -> str:
        return f"{self.group_id}/{self.sample}"

    @property
    def counted_reward(self) -> float | None:
        """The reward as a part of means and group statistics; None of a rollout that failed or is masked."""
        return self.reward if self.status.counted else None

    @property
    def generated_tokens(self) -> int:
        """Return the number of tokens of all its turns; for a branch, of its new turns."""
        own = [turn for turn in self.turns if turn.trained] if self.branched_from is not None else self.turns
        return sum(len(turn.generation_token_ids) for turn in own)


@dataclass(eq=False)
class Refusal(Exception):
    """Why a rollout was kept from training."""

    reason: str
    evidence: str
    turn: int | None = None
    outcome: Status = Status.MASKED


def as_markdown(rollout: Rollout) -> str:
    """The conversation with its outcome, as Markdown."""
    reward = "none" if rollout.reward is None else f"{rollout.reward:g}"
    lines = [f"### {rollout.rollout_id}: {rollout.status.value}, reward {reward}"]
    if rollout.failure_code:
        lines.append(f"_{rollout.failure_code}_ {as_code(rollout.failure_detail)}")
    lines += [f"- {line}" for line in conversation_lines(rollout.items)]
    return "\n".join(lines)


def conversation_lines(items: list[dict[str, Any]], most: int = sys.maxsize) -> list[str]:
    """Return a line of Markdown per item: its role, and its text as code. `most` limits the characters of all texts
    together."""
    lines: list[str] = []
    for item in items:
        if most <= 0:
            break
        kind = item.get("type", "message")
        if kind == "function_call":
            name, text = "call", f"{item['name']}({item['arguments']})"
        elif kind == "function_call_output":
            name, text = "tool", str(item["output"])
        else:
            name, text = item.get("role", kind), item_text(item)
        role = f"**{name}**" if str(name).isidentifier() else as_code(str(name))
        lines.append(f"{role} {as_code(text[:most])}")
        most -= len(text)
    return lines


def as_code(text: str) -> str:
    """Return a text as code on one line of Markdown, whatever it contains: a page that shows it loads no image of it."""
    text = " ".join(text.splitlines()).strip()
    if not text:
        return ""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {text} {fence}" if longest else f"{fence}{text}{fence}"


def item_text(item: dict[str, Any]) -> str:
    """The text of a message or of reasoning."""
    content = item.get("content") or item.get("summary") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def digest_tokens(token_ids: Sequence[int]) -> str:
    """First 16 hex digits of SHA-256 over the IDs as little-endian int32."""
    data = array("i", token_ids)
    return hashlib.sha256(data.tobytes()).hexdigest()[:16]


class GrowingDigest:
    """Incremental `digest_tokens` of a growing sequence."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def extend(self, token_ids: Sequence[int]) -> str:
        """Append tokens and return the digest of all tokens so far.

        Raises:
            TypeError, OverflowError: a value is not a token ID.
        """
        self._hash.update(array("i", token_ids).tobytes())
        return self._hash.hexdigest()[:16]


SEEDS = 2**31
"""Number of seeds; servers reject larger ones."""


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**31) from named parts, e.g. (run seed, iteration, group, sample, turn).

    The same parts give the same seed on every machine; different parts give unrelated ones.
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") % SEEDS


SPREAD_TOLERANCE = 1e-9
"""Rewards of a group that differ by less (relative to the largest, at least 1) count as equal: it is rounding."""


def groups_with_spread(rollouts: Iterable[Rollout]) -> list[str]:
    """Group ids in order of first appearance; failed and masked rollouts do not count."""
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        own = rewards.setdefault(rollout.group_id, [])
        if (reward := rollout.counted_reward) is not None:
            own.append(reward)
    return [group for group, values in rewards.items() if values and has_spread(values)]


def has_spread(rewards: list[float]) -> bool:
    """Return whether the rewards (at least one) are not all equal."""
    highest, lowest = max(rewards), min(rewards)
    return highest - lowest > SPREAD_TOLERANCE * max(1.0, abs(highest), abs(lowest))


def pass_at_k(rollouts: int, passed: int, k: int) -> float:
    """Probability that at least one of k rollouts passes, from `passed` of `rollouts`: 1 − C(n − c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, equation 1).
    """
    if not 1 <= k <= rollouts:
        raise ValueError(f"pass@{k} of {rollouts} rollouts: k must be between 1 and their number")
    return 1.0 - math.comb(rollouts - passed, k) / math.comb(rollouts, k)


class LedgerError(RoundhouseError):
    """Rollouts were lost or counted twice."""


class Ledger(BaseModel):
    """Counts of rollouts by outcome."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requested: NonNegativeInt
    completed: NonNegativeInt = 0
    truncated: NonNegativeInt = 0
    failed: NonNegativeInt = 0
    masked: NonNegativeInt = 0
    omitted: NonNegativeInt = 0
    failures: dict[str, NonNegativeInt] = {}
    """Failed rollouts by failure code."""

    def model_post_init(self, _context: object) -> None:
        self.balanced()

    def balanced(self) -> Ledger:
        """This ledger.

        Raises:
            LedgerError: the numbers do not add up; the text names them.
        """
        outcomes = {status.value: getattr(self, status.value) for status in Status}
        if self.requested != sum(outcomes.values()):
            parts = " + ".join(f"{name} {count}" for name, count in outcomes.items())
            raise LedgerError(
                f"The ledger does not balance: requested {self.requested}, but {parts} = {sum(outcomes.values())}. "
                "Rollouts were lost or counted twice; do not train on this dataset, collect it again."
            )
        if self.failed != sum(self.failures.values()):
            raise LedgerError(
                f"The ledger does not balance: failed {self.failed}, but its failures by code are {self.failures}, "
                f"together {sum(self.failures.values())}."
            )
        return self

    @classmethod
    def from_outcomes(
        cls, outcomes: Sequence[Status], failure_codes: Sequence[str], requested: int | None = None
    ) -> Ledger:
        """Count `outcomes`; `failure_codes` are parallel to them and count for failed outcomes.

        Raises:
            LedgerError: `requested` (by default the number of outcomes) is not the number of outcomes.
        """
        counts = Counter(status.value for status in outcomes)
        pairs = zip(outcomes, failure_codes, strict=True)
        failures = Counter(code for status, code in pairs if status is Status.FAILED)
        requested_count = len(outcomes) if requested is None else requested
        return cls(requested=requested_count, failures=dict(sorted(failures.items())), **counts)

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout], requested: int | None = None) -> Ledger:
        """The ledger of finished rollouts; give `requested` to have it proved that none is missing."""
        codes = [rollout.failure_code for rollout in rollouts]
        return cls.from_outcomes([rollout.status for rollout in rollouts], codes, requested)

    def counts(self) -> dict[str, int]:
        """`requested` and the outcomes, without the failure codes."""
        return {name: getattr(self, name) for name in ("requested", *(status.value for status in Status))}


COUNTED = (StageKind.COLLECT, StageKind.EVALUATE, StageKind.VALIDATE)
"""Stages with a ledger in their manifest."""


def ledger_of(manifest: Manifest) -> Ledger:
    """The ledger of a stage.

    Raises:
        LedgerError: it does not balance.
    """
    counts = {name: manifest.counts.get(name, 0) for name in ("requested", *(status.value for status in Status))}
    failures = manifest.details.get("failures", {})
    return Ledger(**counts, failures=failures)


def prove_counted(counts: Mapping[str, int], rollouts: Sequence[Rollout]) -> None:
    """Prove that the rollouts agree with their stage's counts.

    Raises:
        LedgerError: more, fewer, or with other outcomes.
    """
    if "requested" not in counts:
        return  # a dataset that was imported and never counted
    actual = Ledger.from_rollouts(rollouts, requested=counts["requested"]).counts()
    other = {name: (counts.get(name, 0), count) for name, count in actual.items() if counts.get(name, 0) != count}
    if other:
        differences = ", ".join(f"{name} {before} counted, {now} there" for name, (before, now) in other.items())
        raise LedgerError(f"The rollouts are not those of their ledger: {differences}. Collect the iteration again.")


def prove_trainable(counts: Mapping[str, int], sequences: pa.Table) -> None:
    """The sequences come from as many rollouts as validation let pass, and each has a reward.

    Raises:
        LedgerError: one more, such as of a failed rollout, or one fewer.
    """
    if "requested" not in counts:
        return
    if (what := _untrainable(counts, sequences)) is not None:
        raise LedgerError(f"{what}. Nothing was trained; validate the iteration again.")


def ledger_faults(location: Location, manifest: Manifest) -> Iterator[str]:
    """Return the faults of a complete stage's ledger as text."""
    if manifest.kind not in COUNTED or "requested" not in manifest.counts:
        return
    try:
        ledger_of(manifest)
    except LedgerError as error:
        yield str(error)
        return
    if manifest.kind == StageKind.VALIDATE:
        yield from _validated_faults(location, manifest)
    else:
        rows = _columns(location, manifest, "rollouts", ["rollout_id", "status", "reward"])
        ids, statuses = rows.column("rollout_id").to_pylist(), Counter(rows.column("status").to_pylist())
        for name in (status.value for status in Status):
            if statuses[name] != manifest.counts.get(name, 0):
                yield f"the ledger has {manifest.counts.get(name, 0)} {name}, the rollouts dataset has {statuses[name]}"
        if len(set(ids)) != len(ids):
            yield f"{len(ids) - len(set(ids))} rollouts stand in it more than once"
        unrewarded = pa.array([status.value for status in Status if not status.rewarded])
        planted = rows.filter(pc.and_(pc.is_in(rows.column("status"), unrewarded), pc.is_valid(rows.column("reward"))))
        if planted.num_rows:
            yield f"{planted.num_rows} rollouts that failed have a reward, such as {planted.column('rollout_id')[0].as_py()}"


def _validated_faults(location: Location, manifest: Manifest) -> Iterator[str]:
    if (
        what := _untrainable(manifest.counts, _columns(location, manifest, "sequences", ["rollout_id", "reward"]))
    ) is not None:
        yield what
    source = manifest.inputs.get("rollouts")
    if source is None:
        return
    try:
        collected = read_manifest(source).counts
    except StoreError:
        return  # reported as a reference that leads to nothing
    for name in ("requested", "failed"):
        if collected.get(name, 0) != manifest.counts.get(name, 0):
            yield f"{name}: {collected.get(name, 0)} were collected, {manifest.counts.get(name, 0)} are accounted for"


def _untrainable(counts: Mapping[str, int], sequences: pa.Table) -> str | None:
    rollouts = pc.count_distinct(sequences.column("rollout_id")).as_py()
    passed = counts.get("completed", 0) + counts.get("truncated", 0)
    if rollouts != passed:
        return f"the sequences come from {rollouts} rollouts, but {passed} were completed or truncated and let pass"
    nothing = sequences.column("reward").null_count
    return f"{nothing} sequences have no reward" if nothing else None


def _columns(location: Location, manifest: Manifest, dataset: str, names: list[str]) -> pa.Table:
    parts: Iterable[str] = (entry.path for entry in manifest.files if entry.path.startswith(f"{dataset}-"))
    tables = [parse_parquet(location.read(path), names) for path in parts]
    schema = {"reward": pa.float64()}
    empty = pa.table({name: pa.array([], schema.get(name, pa.string())) for name in names})
    return pa.concat_tables(tables) if tables else empty


def rollout_waste(rollouts: Sequence[Rollout], quarantine: pa.Table) -> dict[str, float]:
    """Tokens of rollouts that will not be trained on, for validation's manifest."""
    outcomes = dict(zip(quarantine["rollout_id"].to_pylist(), quarantine["outcome"].to_pylist(), strict=True))
    wasted = {"failed": 0, "quarantined": 0, "omitted": 0}
    generated = 0
    for rollout in rollouts:
        tokens = rollout.generated_tokens
        generated += tokens
        outcome = outcomes.get(rollout.rollout_id)
        if rollout.status is Status.FAILED:
            wasted["failed"] += tokens
        elif outcome is not None:
            wasted["omitted" if outcome == Status.OMITTED else "quarantined"] += tokens
    return {
        "cost/generated_tokens": float(generated),
        "cost/repeated_rollouts": float(sum(rollout.attempt > 1 for rollout in rollouts)),
        **{f"waste/{reason}_tokens": float(count) for reason, count in wasted.items()},
    }


def untrained_tokens(sequences: pa.Table, columns: pa.Table) -> float:
    """Generated tokens of the sequences that a step was given and gave no weight."""
    idle = columns.filter(pc.invert(columns["trained"]))["sequence_id"]
    masks = sequences.filter(pc.is_in(sequences["sequence_id"], value_set=idle.combine_chunks()))["loss_mask"]
    return float(pc.sum(pc.list_flatten(masks).cast(pa.int64())).as_py() or 0)
