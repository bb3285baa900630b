"""Rollouts and turns as Python objects: what the rollout engine makes, validation judges and the Parquet writers take.

    task ── group ── rollout ── turn (one model call)
                        └────── sequence (what is trained on; made by validation)

Invariant: a rollout that failed has no reward (`reward is None`), and a rollout that completed or was truncated has one. Token
IDs are what the engine returned, never re-tokenised.

Spread of a group's rewards, without which it is not trained on, belongs to a whole group and never to one of its rollouts:
measured over the others of a rollout, the single right answer among wrong ones would have none, and would be the one to be
filtered out.

The ledger says what became of every requested rollout, in numbers.

Invariant, checked whenever one is made: `requested = completed + truncated + failed + masked + omitted`, and the
failures by code add up to `failed`. A ledger that does not balance cannot exist.

    >>> Ledger.from_outcomes([Status.COMPLETED, Status.FAILED], ["", "tool_timeout"]).counts()["failed"]
    1

Functions hold it against the rows that it counts: when a stage is read, before it is trained on, and in
`store verify`. For every iteration:

    requested = completed + truncated + failed + masked + omitted              of collect and of validate
    the `rollouts` dataset has these rows by status, each id once              collect, evaluate
    no row without a rewarded status has a reward                              collect, evaluate
    validate has as many requested and failed as collect                       between the two
    the rollouts of `sequences` are those completed and truncated              validate, and again before training

The last one is why a reward of a failed rollout cannot reach a weight: a sequence of it would be one rollout too many.

Tokens: every generated token of an iteration's training rollouts is either trained on or wasted for exactly one reason,
recorded by the stage that knows it:

    generated = trained on + failed + quarantined + omitted + untrained

    failed        its rollout has no reward                                             validate
    quarantined   validation refused its rollout                                        validate
    omitted       its group was too small, or more was collected than was wanted        validate
    untrained     the algorithm gave its sequences no weight: a group without spread    train
"""

from __future__ import annotations

import hashlib
import math
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
    """No reward exists; `failure_kind` and `failure_detail` say why."""
    MASKED = "masked"
    """Has a reward but must not be trained on (the environment or an agent said so, or validation refused it)."""
    OMITTED = "omitted"
    """Not trained on although nothing is wrong with it: its group was too small, or it was never started."""

    @property
    def rewarded(self) -> bool:
        return self is not Status.FAILED and self is not Status.OMITTED


class FailureKind(StrEnum):
    """Who is at fault, hence whether a retry can help (`roundhouse.errors`)."""

    INFRA = "infra"
    DATA = "data"


class CallStage(StrEnum):
    """What one model call passes through, in order."""

    REQUEST = "LF1 Request"
    """The JSON that is sent: messages or Responses items."""
    INPUT_PROMPT = "LF2 Input Prompt"
    """The text that the chat template makes of it."""
    PROMPT_TOKEN_IDS = "LF3 Prompt Token IDs"
    """That text in tokens."""
    GENERATION_TOKEN_IDS = "LF4 Generation Token IDs"
    """What the model draws."""
    GENERATION = "LF5 Generation"
    """Those tokens as text."""
    RESPONSE = "LF6 Response"
    """That text, parsed into content and tool calls."""


@dataclass(slots=True)
class Turn:
    """One model call."""

    turn: int
    """0, 1, … in order of the calls."""
    parent: int | None
    """Turn whose tokens this prompt continues; None begins a new root (the first turn, or a break)."""
    prompt_token_ids: list[int]
    """Only what the prompt adds to the parent's prompt and generation; the whole prompt at a root."""
    prompt_length: int
    """Length of the whole prompt as the engine saw it, in tokens."""
    prompt_digest: str
    """`digest_tokens` of the whole prompt as the engine saw it: the proof that the stored parts rebuild it."""
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    """Natural logarithms under the distribution sampled from (temperature applied), one a generated token; none where the
    tokens were written, not sampled."""
    policy_version: int
    """Version of the weights that answered; the oldest of them, where a refit came in between."""
    finish_reason: str
    """stop, tool_calls or length."""
    latency_seconds: float
    trained: bool = True
    """False: its tokens stay on record and in later prompts, and the loss skips them."""
    version_spans: list[dict[str, int]] | None = None
    """`[{"version": 3, "tokens": 17}, …]`: which version drew which of the generated tokens, in order; None: all are
    `policy_version`'s."""
    reward: float | None = None
    """What the environment gave for this turn, a part of the rollout's reward; None: it said nothing yet of the turns since the
    last one with a reward. What is left of the rollout's reward belongs to its last turns."""


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
    """Short and stable. Of a failed rollout, the failure's type: engine_unreachable, engine_timeout, tool_timeout,
    environment_unavailable, verifier_failed, … Of a masked one, why, where the environment itself did not ask for it:
    token_capture_<reason> (its recorded calls cannot be joined in one way), malformed_token_fields (an import); else empty."""
    failure_detail: str = ""
    started_at: float = 0.0
    """Seconds since the epoch."""
    seconds: float = 0.0
    """Wall time of the last attempt."""
    generation_seconds: float = 0.0
    environment_seconds: float = 0.0
    branched_from: str | None = None
    """Id of the rollout whose turns it begins with; these are not trained on. None: it begins with its task."""

    @property
    def rollout_id(self) -> str:
        return f"{self.group_id}/{self.sample}"

    @property
    def generated_tokens(self) -> int:
        """Over all its turns; of a branch, over those that were made for it."""
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
        lines.append(f"_{rollout.failure_code}: {rollout.failure_detail}_")
    lines += [f"- {line}" for line in conversation_lines(rollout.items)]
    return "\n".join(lines)


def conversation_lines(items: list[dict[str, Any]]) -> list[str]:
    """One line an item: `user: …`, `call: calc({…})`, `tool: …`, `assistant: …`."""
    lines = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            lines.append(f"**call** `{item['name']}({item['arguments']})`")
        elif kind == "function_call_output":
            lines.append(f"**tool** `{item['output']}`")
        else:
            lines.append(f"**{item.get('role', kind)}** {item_text(item)}")
    return lines


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
    """`digest_tokens` of a sequence that only grows, at the cost of what is new."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def extend(self, token_ids: Sequence[int]) -> str:
        """Append; the digest of everything so far.

        Raises:
            TypeError, OverflowError: they are no token IDs.
        """
        self._hash.update(array("i", token_ids).tobytes())
        return self._hash.hexdigest()[:16]


SEEDS = 2**31
"""How many seeds there are; servers take no larger ones."""


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
        if rollout.status in (Status.COMPLETED, Status.TRUNCATED) and rollout.reward is not None:
            own.append(rollout.reward)
    return [group for group, values in rewards.items() if values and has_spread(values)]


def has_spread(rewards: list[float]) -> bool:
    """Whether the rewards (at least one) are not all equal."""
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
        """The ledger of `outcomes`; `failure_codes` are parallel to them and count where the outcome is failed.

        Raises:
            LedgerError: `requested` (by default as many as there are outcomes) is not the number of outcomes.
        """
        counts = Counter(status.value for status in outcomes)
        pairs = zip(outcomes, failure_codes, strict=True)
        failures = Counter(code for status, code in pairs if status is Status.FAILED)
        asked = len(outcomes) if requested is None else requested
        return cls(requested=asked, failures=dict(sorted(failures.items())), **counts)

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout], requested: int | None = None) -> Ledger:
        """The ledger of finished rollouts; give `requested` to have it proved that none is missing."""
        codes = [rollout.failure_code for rollout in rollouts]
        return cls.from_outcomes([rollout.status for rollout in rollouts], codes, requested)

    def counts(self) -> dict[str, int]:
        """`requested` and the outcomes, without the failure codes."""
        return {name: getattr(self, name) for name in ("requested", *(status.value for status in Status))}


COUNTED = (StageKind.COLLECT, StageKind.EVALUATE, StageKind.VALIDATE)
"""Stages whose manifest holds a ledger."""


def ledger_of(manifest: Manifest) -> Ledger:
    """The ledger of a stage.

    Raises:
        LedgerError: it does not balance.
    """
    counts = {name: manifest.counts.get(name, 0) for name in ("requested", *(status.value for status in Status))}
    failures = manifest.details.get("failures", {})
    return Ledger(**counts, failures=failures)


def prove_counted(counts: Mapping[str, int], rollouts: Sequence[Rollout]) -> None:
    """The rollouts are those that their stage counted.

    Raises:
        LedgerError: more, fewer, or with other outcomes.
    """
    if "requested" not in counts:
        return  # a dataset that was imported and never counted
    found = Ledger.from_rollouts(rollouts, requested=counts["requested"]).counts()
    other = {name: (counts.get(name, 0), count) for name, count in found.items() if counts.get(name, 0) != count}
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
    """What is wrong with the ledger of a complete stage, in words."""
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
                yield f"the ledger says {manifest.counts.get(name, 0)} {name}, the rollouts dataset has {statuses[name]}"
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
