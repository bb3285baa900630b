"""Validate: from rollouts to training sequences and a quarantine (`roundhouse.trajectories.validation`).

Invariant: only stored data is judged. The proofs are pure; this stage provides their facts: the plan's limits, the
counts recorded with the turns, and the policy's tokenizer.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from roundhouse.config.environments import environments_in
from roundhouse.config.models import RunConfig, ValidationConfig
from roundhouse.errors import ConfigError, DataError, StoreError, TooFewSequences
from roundhouse.generation.chat import PROMPT_ENDING, calls_of_reply
from roundhouse.generation.control_tokens import ControlTokens
from roundhouse.generation.tool_calls import TOOL_CALL_START, ToolParser, parse_hermes
from roundhouse.generation.tool_formats import OWN_PARSERS, parse_harmony, parser_of_template
from roundhouse.images import ImageReader
from roundhouse.policy.model_directory import template_in
from roundhouse.pretrained import text_part
from roundhouse.rollout.responses import assistant_items
from roundhouse.stages.refit import engine_files
from roundhouse.store.run import Run
from roundhouse.store.stage import Reference, Stage, StageKind, model_location, read_manifest, read_table
from roundhouse.trajectories.records import Refusal, Rollout, prove_counted, rollout_waste
from roundhouse.trajectories.schemas import FEWEST_TOKENS, computed_log_probs, rollouts_from_tables
from roundhouse.trajectories.token_breaks import Decode, TokenBreak
from roundhouse.trajectories.validation import CollectionLimits, Recorded, Validated, validate

NO_SPREAD, SURPLUS = "no_spread", "surplus_group"
"""Reasons for rollouts that dynamic sampling omitted. They are valid and do not count as refused."""


def _keeps_own_record(config: RunConfig) -> bool:
    """Return whether an environment of the run keeps a separate record; the following checks need whole collections."""
    return any(each.has_own_loop for each in environments_in(config.environment).values())


def in_plan_order(rollouts: list[Rollout]) -> list[Rollout]:
    """Return the rollouts by group and sample: training must not depend on the order in which they finished."""
    return sorted(rollouts, key=lambda rollout: (rollout.group_id, rollout.sample))


def groups_left_out(rollouts: list[Rollout], sampling: dict[str, Any] | None) -> dict[str, str]:
    """Return the reason for each group that dynamic sampling did not keep, by group.

    Args:
        sampling: the entry of dynamic sampling in the collect stage's manifest; empty without it.
    """
    if not sampling:
        return {}
    kept_groups, surplus = set(sampling["kept"]), set(sampling["surplus"])
    groups = {rollout.group_id for rollout in rollouts if rollout.branched_from is None} - kept_groups
    return {group: SURPLUS if group in surplus else NO_SPREAD for group in groups}


def limits_of(config: RunConfig, vocabulary_size: int, policy_version: int) -> CollectionLimits:
    """Return the limits of the iteration's collection. Limits of a model call are known only if our loops made the
    calls."""
    ours = not _keeps_own_record(config)
    limits = CollectionLimits(
        vocabulary_size=vocabulary_size,
        policy_version=policy_version,
        max_age=config.asynchrony.staleness,
        group_size=config.rollout.group_size,
        branches=None if config.rollout.branching is None else config.rollout.branching.samples,
        max_new_tokens=config.generation.sampling.max_new_tokens if ours else None,
        max_turns=config.rollout.max_turns if ours else None,
        reward_limit=config.rollout.reward_limit,
    )
    own = {
        name: replace(
            limits,
            max_new_tokens=each.max_new_tokens or limits.max_new_tokens,
            max_turns=each.max_turns or limits.max_turns,
        )
        for name, each in config.rollout.environments.items()
    }
    return replace(limits, environments=own) if ours else limits


def recorded_counts(rollouts: pa.Table, turns: pa.Table) -> dict[str, Recorded]:
    """Return the turn counts of each rollout from the `rollouts` dataset.

    Raises:
        DataError: turns belong to no rollout.
    """
    columns = [
        rollouts.column(name).to_pylist() for name in ("rollout_id", "turns", "generated_tokens", "total_tokens")
    ]
    counts = {name: Recorded(*row_counts) for name, *row_counts in zip(*columns, strict=True)}
    if strays := set(pc.unique(turns.column("rollout_id")).to_pylist()) - set(counts):
        raise DataError(
            f"The turns dataset has turns of {len(strays)} rollouts that the rollouts dataset has not, such as {min(strays)}. "
            "It is not what the collect stage wrote; collect the iteration again."
        )
    return counts


def text_proof(run: Run) -> DecodedText | None:
    """Return the proof of messages against tokens; None if it is disabled, the record is not ours, or the policy has
    no tokenizer.json."""
    config = run.config
    if not config.validation.check_text or _keeps_own_record(config) or run.checkpoint(0).reference() is None:
        return None
    files = engine_files(run)
    if not (files / "tokenizer.json").is_file():
        return None
    return DecodedText(files, own_parser(config, files))


def own_parser(config: RunConfig, files: Path) -> ToolParser | None:
    """Return the parser of the policy's tool calls; None if it is one of vLLM's, which only the engine can use.

    Args:
        files: the policy's directory, with its chat template.
    """
    name = config.generation.tool_call_parser
    return OWN_PARSERS.get(parser_of_template(template_in(files).text) if name == "auto" else name)


def decoder(run: Run) -> Decode | None:
    """Return a decoder of token IDs with the policy's tokenizer, read on first use; None without a tokenizer."""
    if run.checkpoint(0).reference() is None or not (engine_files(run) / "tokenizer.json").is_file():
        return None

    @functools.cache
    def tokenizer() -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(engine_files(run) / "tokenizer.json"))

    return lambda ids: tokenizer().decode(ids, skip_special_tokens=False)


def image_reader(run: Run) -> ImageReader | None:
    """Return the reader of the policy's images; None if it is trained on text."""
    return ImageReader.of(engine_files(run)) if run.config.generation.images else None


@dataclass(frozen=True, slots=True)
class OddTokens:
    """Counts of tokens that a reader of the decoded text would misread or miss; they are reported and not refused."""

    spelled: dict[str, int]
    """For each rollout with some: control tokens that its prompts spell as text (`roundhouse.generation.control_tokens`)."""
    unknown: dict[str, int]
    """For each rollout with some: generated tokens that the tokenizer lacks, such as the padding of the model's vocabulary."""

    def metrics(self) -> dict[str, float]:
        """Count the tokens."""
        spelled, unknown = sum(self.spelled.values()), sum(self.unknown.values())
        return {"validate/spelled_control_tokens": spelled, "validate/unknown_tokens": unknown}

    def details(self) -> dict[str, dict[str, int]]:
        """Return the first rollouts with odd tokens, for the manifest."""
        named = {"spelled_control_tokens": self.spelled, "unknown_tokens": self.unknown}
        return {name: dict(itertools.islice(counts.items(), BREAKS_TOLD)) for name, counts in named.items() if counts}


def odd_tokens(run: Run, rollouts: Sequence[Rollout]) -> OddTokens:
    """Count odd tokens by the policy's tokenizer; none without one."""
    spelled, unknown = Counter[str](), Counter[str]()
    if run.checkpoint(0).reference() is not None and (file := engine_files(run) / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        control, known = ControlTokens(tokenizer), frozenset(tokenizer.get_vocab().values())
        for rollout in rollouts:
            for turn in rollout.turns:
                spelled[rollout.rollout_id] += control.spelled_in(turn.prompt_token_ids)
                if not known.issuperset(turn.generation_token_ids):
                    unknown[rollout.rollout_id] += sum(token not in known for token in turn.generation_token_ids)
    return OddTokens(dict(+spelled), dict(+unknown))


def break_metrics(name: str, breaks: dict[str, list[TokenBreak]]) -> dict[str, float]:
    """Return the metric `name` with the number of breaks, and one metric for each likely cause."""
    causes = Counter(each.cause for rollout_breaks in breaks.values() for each in rollout_breaks)
    return {name: causes.total(), **{f"{name}/{cause.value}": count for cause, count in causes.items()}}


def validate_iteration(run: Run, iteration: int, rollouts: Reference, vocabulary_size: int) -> Reference:
    """Validate the rollouts of an iteration.

    Raises:
        LedgerError: the rollouts differ from the collect stage's count.
        TooFewSequences: more was refused than `validation.max_quarantine_fraction` allows, or too few groups are left.
    """
    stage = run.stage(iteration, StageKind.VALIDATE)
    if (reference := stage.reference()) is not None:
        return reference
    tables = read_table(rollouts, "rollouts"), read_table(rollouts, "turns")
    collected = in_plan_order(rollouts_from_tables(*tables))
    prove_counted(rollouts.counts, collected)
    left_out = groups_left_out(collected, read_manifest(rollouts).details.get("dynamic_sampling"))
    terms = limits_of(run.config, vocabulary_size, rollouts.policy_version)
    return _validated(run, stage, {"rollouts": rollouts}, collected, tables, terms, left_out, {})


def validate_groups(
    run: Run, iteration: int, dataset: Reference, groups: Collection[str], vocabulary_size: int, where: dict[str, Any]
) -> Reference:
    """Validate some groups of a dataset that was collected outside the run, for an iteration that collects nothing.

    Limits of model calls are unknown here, because the collection may have had other limits than the run.

    Args:
        where: description of these groups for the manifest.

    Raises:
        TooFewSequences: see `validate_iteration`.
    """
    stage = run.stage(iteration, StageKind.VALIDATE)
    if (reference := stage.reference()) is not None:
        return reference
    tables = rows_of_groups(dataset, groups)
    collected = in_plan_order(rollouts_from_tables(*tables))
    written = bool(read_manifest(dataset).details.get("written"))
    limit = run.config.rollout.reward_limit
    terms = CollectionLimits(vocabulary_size, dataset.policy_version, reward_limit=limit, written=written)
    return _validated(run, stage, {"dataset": dataset}, collected, tables, terms, {}, {"offline": where})


def rows_of_groups(dataset: Reference, groups: Collection[str]) -> tuple[pa.Table, pa.Table]:
    """Return the rows of these groups in the tables `rollouts` and `turns`."""
    rollouts, turns = read_table(dataset, "rollouts"), read_table(dataset, "turns")
    rollouts = rollouts.filter(pc.is_in(rollouts["group_id"], value_set=pa.array(list(groups), pa.string())))
    return rollouts, turns.filter(pc.is_in(turns["rollout_id"], value_set=rollouts["rollout_id"].combine_chunks()))


def _validated(
    run: Run,
    stage: Stage,
    inputs: dict[str, Reference],
    collected: list[Rollout],
    tables: tuple[pa.Table, pa.Table],
    terms: CollectionLimits,
    left_out: dict[str, str],
    details: dict[str, Any],
) -> Reference:
    config = run.config
    attempt = run.begin(stage, policy_version=terms.policy_version)
    result = validate(
        collected,
        config.validation,
        vocabulary_size=terms.vocabulary_size,
        policy_version=terms.policy_version,
        left_out=left_out,
        terms=terms,
        recorded=recorded_counts(*tables),
        text=text_proof(run),
        decode=decoder(run),
        images=image_reader(run),
    )
    attempt.write_table("sequences", result.sequences)
    attempt.write_table("quarantine", result.quarantine)
    # Under `on_break` truncate and split no quarantine row has them
    examples = {
        name: str(rollout_breaks[0]) for name, rollout_breaks in itertools.islice(result.breaks.items(), BREAKS_TOLD)
    }
    odd = odd_tokens(run, collected)
    refused = refuse_too_few(result, config, f"iteration {stage.iteration}", stage.location.uri)
    return attempt.commit(
        inputs=inputs,
        counts=result.ledger.counts() | {"sequences": result.sequences.num_rows, "quarantined": refused},
        metrics={
            "validate/sequences": result.sequences.num_rows,
            "validate/quarantined": refused,
            "validate/filtered": _filtered(result),
            "validate/text_proved": result.text_proved,
            "validate/tokens": pc.sum(pc.list_value_length(result.sequences.column("token_ids"))).as_py(),
            "validate/trained_tokens": pc.sum(
                pc.list_flatten(result.sequences.column("loss_mask")).cast(pa.int64())
            ).as_py(),
            **odd.metrics(),
            **break_metrics("validate/token_breaks", result.breaks),
            **break_metrics("validate/forks", result.forks),
            **rollout_waste(collected, result.quarantine),
        },
        details={"reasons": result.reasons, "failures": result.ledger.failures}
        | ({"token_breaks": examples} if examples else {})
        | odd.details()
        | details,
    )


NONE_WITH_SPREAD = (
    " No group has spread (rollout.dynamic_sampling): the tasks are too easy or too hard for this policy. Change them, raise "
    "rollout.group_size or rollout.dynamic_sampling.max_rounds, or set failures.on_too_few to skip."
)
BREAKS_TOLD = 20
"""Breaks that the manifest holds word for word; all of them are counted."""


def refuse_too_few(result: Validated, config: RunConfig, what: str, place: str) -> int:
    """Return the number of refused rollouts.

    Raises:
        TooFewSequences: more than `validation.max_quarantine_fraction`, or fewer than `failures.min_groups` groups are
            left.
    """
    filtered = _filtered(result)
    refused, requested = result.quarantine.num_rows - filtered, result.ledger.requested - filtered
    sequences = result.sequences
    ids = {*sequences["rollout_id"].to_pylist(), *result.quarantine["rollout_id"].to_pylist()}
    owners = zip(sequences["group_id"].to_pylist(), sequences["branched_from"].to_pylist(), strict=True)
    # A branch counts if its source rollout is elsewhere, as in a dataset of branches
    groups = len({group for group, origin in owners if origin not in ids})
    if refused > config.validation.max_quarantine_fraction * requested or groups < config.failures.min_groups:
        raise TooFewSequences(
            f"{what}: {refused} of {requested} rollouts were refused ({result.reasons}), "
            f"{sequences.num_rows} sequences of {groups} groups are left; validation.max_quarantine_fraction is "
            f"{config.validation.max_quarantine_fraction}, failures.min_groups {config.failures.min_groups}. The evidence is "
            f"in {place} (dataset quarantine)." + (NONE_WITH_SPREAD if filtered and not groups else "")
        )
    return refused


def _filtered(result: Validated) -> int:
    """Rollouts that nothing is wrong with, which are not wanted."""
    return sum(result.reasons.get(reason, 0) for reason in (NO_SPREAD, SURPLUS))


Said = tuple[str, Any]
"""One utterance of a policy: ("message", text), ("reasoning", [texts]) or ("call", (name, arguments))."""


class DecodedText:
    """Proof that text and tokens agree: the policy's recorded text equals its decoded token IDs.

    Invariant: text is compared exactly, tool calls by name and parsed arguments. A rollout is refused only if its
    record contradicts its tokens. Calls are read from the tokens as the engine read them
    (`roundhouse.generation.chat.calls_of_reply`), recorded items by their order, so no ID or position is trusted.

        tokens  [.. 41, 7, 2]  ->  "The answer is 17."   ->  message(The answer is 17.)
        record  message(The answer is 18.)                   refused: text_mismatch

    Only `tokenizers` reads the files: validation needs neither torch nor transformers.

    Args:
        parse: reads tool calls. None if only the engine can: then rollouts with tool calls are not judged.

    Raises:
        ConfigError: the directory does not contain a tokenizer.json.
    """

    def __init__(self, directory: Path, parse: ToolParser | None = parse_hermes) -> None:
        from tokenizers import Tokenizer

        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{directory} has no tokenizer.json, so text cannot be verified. Set validation.check_text to false."
            )
        self._tokenizer = Tokenizer.from_file(str(file))
        config = _json(directory / "tokenizer_config.json")
        # Tokens that transformers makes special, too, when it loads the tokenizer
        listed = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
        tokens = [config.get(f"{role}_token") for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
        tokens += listed if isinstance(listed, list) else list(listed.values())
        names = {str(token["content"] if isinstance(token, dict) else token) for token in tokens if token}
        known_names = [name for name in names if self._tokenizer.token_to_id(name) is not None]
        self._tokenizer.add_special_tokens(known_names)
        ids: set[int] = set()
        token = config.get("eos_token")
        name = token.get("content") if isinstance(token, dict) else token
        if name is not None and (known := self._tokenizer.token_to_id(name)) is not None:
            ids.add(known)
        ends = _json(directory / "generation_config.json").get("eos_token_id")
        ids.update(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self._stops = frozenset(ids)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._parse = parse

    def prove(self, rollout: Rollout) -> bool:
        """See `TextProof`.

        Raises:
            Refusal: `text_mismatch`.
        """
        initial = rollout.task.get("responses_create_params", {}).get("input", [])
        recorded = list(_said_in(rollout.items[1 if isinstance(initial, str) else len(initial) :]))
        # If no call is on record, none was offered or none was parsed: the text is unchanged.
        called = any(kind == "call" for kind, _ in recorded)
        if self._parse is None and called:
            return False
        whole = self._parse is parse_harmony  # see `ChatCodec.message`
        place = 0
        for turn in rollout.turns:
            ids = turn.generation_token_ids
            if ids[-1] in self._stops | self._special or (turn.finish_reason != "length" and ids[-1] in self._added):
                ids = ids[:-1]  # the template's end of turn is among the stop tokens without being named in these files
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            message: dict[str, Any] = {"content": text}
            calls: list[dict[str, Any]] = []
            if self._parse is not None and (whole or (called and TOOL_CALL_START in text)):
                ending = self._tokenizer.decode(turn.prompt_token_ids[-PROMPT_ENDING:], skip_special_tokens=False)
                message["content"], calls = calls_of_reply(text, ending, turn.finish_reason, [], self._parse)
            if calls:
                message["tool_calls"] = calls
            elif not whole and not self._special.isdisjoint(ids):
                message["content"] = self._tokenizer.decode(ids, skip_special_tokens=True)
            for utterance in list(_said_in(assistant_items(message, ""))):
                record = recorded[place] if place < len(recorded) else None
                if record != utterance:
                    raise Refusal(
                        "text_mismatch",
                        f"the tokens decode to {_short(utterance)}, the record has {_short(record)}",
                        turn.turn,
                    )
                place += 1
        if place < len(recorded):
            raise Refusal("text_mismatch", f"no token decodes to {_short(recorded[place])}")
        return True


def _said_in(items: list[dict[str, Any]]) -> Iterable[Said]:
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            yield "reasoning", [part["text"] for part in item.get("summary", [])]
        elif kind == "function_call":
            name, arguments = item["name"], item["arguments"]
            with suppress(ValueError):
                # Compare serialised values, because NaN does not equal itself
                arguments = json.dumps(json.loads(arguments), sort_keys=True, ensure_ascii=False)
            yield "call", (name, arguments)
        elif kind == "message" and item.get("role") == "assistant":
            content = item.get("content") or ""
            yield "message", content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _short(said: Said | None) -> str:
    return "nothing" if said is None else f"{said[0]} {said[1]!r}"[:200]


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}


MISMATCHED = pa.schema(
    [
        ("sequence_id", pa.string()),
        ("rollout_id", pa.string()),
        ("group_id", pa.string()),
        ("tokens", pa.int32()),  # that were compared
        ("mean_difference", pa.float64()),  # of the absolute difference, nats a token
        ("largest_difference", pa.float64()),
        ("largest_at", pa.int32()),  # position in the sequence
    ]
)
"""One row a sequence that the weights do not bear out."""


def mismatched(sequences: pa.Table, columns: pa.Table, *, policy_version: int, tolerance: float) -> pa.Table:
    """Prove log-probabilities: the collecting weights must confirm the engine's recorded values.

    Invariant: only rollouts that the previous version generated, as recorded, change the weights. The train stage
    computes these log-probabilities anyway, for each token before the first update, so the proof covers all of them,
    needs no extra pass over the model, and works with every train service. A contradicted sequence gets weight 0 in
    every term of the loss (`loss.borne_out`) and is listed in the dataset `mismatched`; above a share of them the
    weights are not published.

    The proof detects errors that no single row shows: log-probabilities that were swapped, shifted or invented, replies
    of other weights under the right version number, and changed tokens that no later prompt repeats.

    Args:
        sequences: the validate stage's dataset.
        columns: the train stage's, one row a sequence in the same order.
        policy_version: version of the weights of `trainer_logprobs`; sequences of other versions are not judged.
        tolerance: nats.
    """
    trainer = columns.column("trainer_logprobs").combine_chunks()
    recorded = sequences.column("gen_logprobs").combine_chunks()
    rows = []
    for index in np.flatnonzero(sequences.column("policy_version").to_numpy() == policy_version).tolist():
        if not trainer[index].is_valid:
            continue
        old, computed = computed_log_probs(trainer[index])
        difference = np.where(computed, np.abs(old - recorded[index].values.to_numpy()), 0).astype(np.float64)
        count = int(computed.sum())
        # A comparison that NaN fails.
        if not difference.sum() <= tolerance * max(count, FEWEST_TOKENS):
            rows.append(
                {
                    **{
                        name: sequences.column(name)[index].as_py()
                        for name in ("sequence_id", "rollout_id", "group_id")
                    },
                    "tokens": count,
                    "mean_difference": float(difference.sum() / count),
                    "largest_difference": float(difference.max()),
                    "largest_at": int(difference.argmax()),
                }
            )
    return pa.Table.from_pylist(rows, schema=MISMATCHED)


def tolerance_of(config: RunConfig) -> float | None:
    """Return `validation.recompute_tolerance`, or None if engine and trainer use different distributions by design, or
    if the rollouts are another run's: its version numbers do not apply to these weights."""
    sampling = config.generation.sampling
    if config.offline is not None or sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k is not None:
        return None
    return config.validation.recompute_tolerance


def refuse_mismatched(found: pa.Table, judged: int, config: ValidationConfig, where: str) -> None:
    """Raise an error if the recorded weights contradict the log-probabilities of too many sequences.

    Raises:
        DataError: more than `validation.max_mismatched_fraction` of the judged sequences are contradicted.
    """
    if found.num_rows <= config.max_mismatched_fraction * judged:
        return
    worst = max(found.to_pylist(), key=lambda row: row["mean_difference"])
    raise DataError(
        f"{found.num_rows} of {judged} sequences have log-probabilities that the recorded weights do not give; the worst is "
        f"{worst['sequence_id']} with a mean difference of {worst['mean_difference']:.3g} nats "
        f"(validation.recompute_tolerance={config.recompute_tolerance:g}). So many "
        f"(validation.max_mismatched_fraction={config.max_mismatched_fraction:g}) make no version. If all differ, the engine "
        " holds other weights or computes them otherwise: look at train/logprob_abs_diff_mean of earlier iterations and "
        f"at the refit; if few do, their rows are damaged. The evidence is in {where} (dataset mismatched)."
    )


def vocabulary_size(run: Run) -> int:
    """Return the number of token IDs of the run's policy.

    Raises:
        StoreError: the run does not have a starting policy yet.
    """
    location = model_location(run.checkpoint(0).location)
    try:
        return int(text_part(json.loads(location.read("config.json")))["vocab_size"])
    except (KeyError, ValueError) as error:
        raise StoreError(f"{location.uri}/config.json has no vocab_size: {error}") from error
