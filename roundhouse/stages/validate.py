"""Validate: from rollouts to training sequences and a quarantine (`roundhouse.trajectories.validation`).

Invariant: what is judged is what is in the store. The proofs themselves are pure; this stage provides the facts that they are
held against: the plan's limits, the counts recorded with the turns, and the policy's tokenizer.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from roundhouse.config.environments import OWN_LOOP, environments_in
from roundhouse.config.models import RunConfig, ValidationConfig
from roundhouse.errors import ConfigError, DataError, StoreError, TooFewSequences
from roundhouse.generation.chat import TOOL_CALL_START, parse_hermes
from roundhouse.rollout.responses import assistant_items
from roundhouse.stages.refit import engine_files
from roundhouse.store.run import Run
from roundhouse.store.stage import Reference, Stage, StageKind, model_location, read_manifest, read_table
from roundhouse.trajectories.records import Refusal, Rollout, prove_counted, rollout_waste
from roundhouse.trajectories.schemas import FEWEST_TOKENS, computed_log_probs, rollouts_from_tables
from roundhouse.trajectories.token_breaks import Decode, TokenBreak
from roundhouse.trajectories.validation import CollectionLimits, Recorded, Validated, validate

NO_SPREAD, SURPLUS = "no_spread", "surplus_group"
"""Reasons of rollouts that dynamic sampling put aside. Nothing is wrong with them: they do not count as refused."""


def _keeps_own_record(config: RunConfig) -> bool:
    """Whether an environment of the run does: the checks that follow are of whole collections."""
    return any(each.kind in OWN_LOOP for each in environments_in(config.environment).values())


def in_plan_order(rollouts: list[Rollout]) -> list[Rollout]:
    """By group and sample. They were written as they finished, and training must not depend on that order."""
    return sorted(rollouts, key=lambda rollout: (rollout.group_id, rollout.sample))


def groups_left_out(rollouts: list[Rollout], sampling: dict[str, Any] | None) -> dict[str, str]:
    """Why each group that dynamic sampling (its entry in the collect stage's manifest) did not keep is not trained on."""
    if not sampling:
        return {}
    kept, surplus = set(sampling["kept"]), set(sampling["surplus"])
    groups = {rollout.group_id for rollout in rollouts if rollout.branched_from is None} - kept
    return {group: SURPLUS if group in surplus else NO_SPREAD for group in groups}


def limits_of(config: RunConfig, vocabulary_size: int, policy_version: int) -> CollectionLimits:
    """What the iteration was collected under. Limits of a model call are known only where our loops made the calls."""
    ours = not _keeps_own_record(config)
    limits = CollectionLimits(
        vocabulary_size=vocabulary_size,
        policy_version=policy_version,
        max_age=config.asynchrony.staleness,
        group_size=config.rollout.group_size,
        branches=None if config.rollout.branching is None else config.rollout.branching.samples,
        max_new_tokens=config.generation.sampling.max_new_tokens if ours else None,
        max_turns=config.rollout.max_turns if ours else None,
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
    """What the `rollouts` dataset says of the turns of each rollout.

    Raises:
        DataError: turns belong to no rollout.
    """
    columns = [
        rollouts.column(name).to_pylist() for name in ("rollout_id", "turns", "generated_tokens", "total_tokens")
    ]
    counts = {name: Recorded(*found) for name, *found in zip(*columns, strict=True)}
    if strays := set(pc.unique(turns.column("rollout_id")).to_pylist()) - set(counts):
        raise DataError(
            f"The turns dataset has turns of {len(strays)} rollouts that the rollouts dataset has not, such as {min(strays)}. "
            "It is not what the collect stage wrote; collect the iteration again."
        )
    return counts


def text_proof(run: Run) -> DecodedText | None:
    """What holds messages against tokens; None where it is turned off, the record is not ours, or there is no policy with a
    tokenizer.json."""
    config = run.config
    if not config.validation.check_text or _keeps_own_record(config) or run.checkpoint(0).reference() is None:
        return None
    files = engine_files(run)
    if not (files / "tokenizer.json").is_file():
        return None
    return DecodedText(files, hermes=config.generation.tool_call_parser == "hermes")


def decoder(run: Run) -> Decode | None:
    """Token IDs to text, by the policy's tokenizer, which is read when it is first asked; None where there is none."""
    if run.checkpoint(0).reference() is None or not (engine_files(run) / "tokenizer.json").is_file():
        return None

    @functools.cache
    def tokenizer() -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(engine_files(run) / "tokenizer.json"))

    return lambda ids: tokenizer().decode(ids, skip_special_tokens=False)


def break_metrics(name: str, breaks: dict[str, list[TokenBreak]]) -> dict[str, float]:
    """How many breaks, or forks, in all and by likely cause."""
    causes = Counter(each.cause for found in breaks.values() for each in found)
    return {name: causes.total(), **{f"{name}/{cause.value}": count for cause, count in causes.items()}}


def validate_iteration(run: Run, iteration: int, rollouts: Reference, vocabulary_size: int) -> Reference:
    """Validate the rollouts of an iteration.

    Raises:
        LedgerError: the rollouts are not those that the collect stage counted.
        TooFewSequences: more was refused than `validation.max_quarantine_fraction` allows, or too few groups are left.
    """
    stage = run.stage(iteration, StageKind.VALIDATE)
    if (done := stage.reference()) is not None:
        return done
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

    Its limits of a model call are not known here: its collection may have had others than the run.

    Args:
        where: what these groups are, for the manifest.

    Raises:
        TooFewSequences: as of `validate_iteration`.
    """
    stage = run.stage(iteration, StageKind.VALIDATE)
    if (done := stage.reference()) is not None:
        return done
    tables = rows_of_groups(dataset, groups)
    collected = in_plan_order(rollouts_from_tables(*tables))
    written = bool(read_manifest(dataset).details.get("written"))
    terms = CollectionLimits(vocabulary_size, dataset.policy_version, written=written)
    return _validated(run, stage, {"dataset": dataset}, collected, tables, terms, {}, {"offline": where})


def rows_of_groups(dataset: Reference, groups: Collection[str]) -> tuple[pa.Table, pa.Table]:
    """The rows of these groups in the tables `rollouts` and `turns`."""
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
    )
    attempt.write_table("sequences", result.sequences)
    attempt.write_table("quarantine", result.quarantine)
    # Under `on_break` truncate and split no quarantine row has them
    told = {name: str(found[0]) for name, found in itertools.islice(result.breaks.items(), BREAKS_TOLD)}
    refused = _refuse_too_few(result, config, f"iteration {stage.iteration}", stage.location.uri)
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
            **break_metrics("validate/token_breaks", result.breaks),
            **break_metrics("validate/forks", result.forks),
            **rollout_waste(collected, result.quarantine),
        },
        details={"reasons": result.reasons, "failures": result.ledger.failures}
        | ({"token_breaks": told} if told else {})
        | details,
    )


NONE_WITH_SPREAD = (
    " No group has spread (rollout.dynamic_sampling): the tasks are too easy or too hard for this policy. Change them, raise "
    "rollout.group_size or rollout.dynamic_sampling.max_rounds, or set failures.on_too_few to skip."
)
BREAKS_TOLD = 20
"""Breaks that the manifest holds word for word; all of them are counted."""


def _refuse_too_few(result: Validated, config: RunConfig, what: str, place: str) -> int:
    """How many rollouts were refused.

    Raises:
        TooFewSequences: more than `validation.max_quarantine_fraction`, or fewer groups are left than `failures.min_groups`.
    """
    filtered = _filtered(result)
    refused, requested = result.quarantine.num_rows - filtered, result.ledger.requested - filtered
    sequences = result.sequences
    there = {*sequences["rollout_id"].to_pylist(), *result.quarantine["rollout_id"].to_pylist()}
    owners = zip(sequences["group_id"].to_pylist(), sequences["branched_from"].to_pylist(), strict=True)
    # Branches count where the rollout that they left is elsewhere, as in a dataset of branches
    groups = len({group for group, origin in owners if origin not in there})
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
"""One thing that a policy said: ("message", text), ("reasoning", [texts]) or ("call", (name, arguments))."""


class DecodedText:
    """The proof that text and tokens agree: what the policy is said to have said is what its token IDs decode to.

    Invariant: text is compared exactly, and tool calls by name and parsed arguments; a rollout is refused only when its record
    contradicts its tokens. Its model calls are read from the tokens as the engine read them
    (`roundhouse.generation.chat.message_of`), and its recorded items by their order, so no id or position is trusted.

        tokens  [.. 41, 7, 2]  ->  "The answer is 17."   ->  message(The answer is 17.)
        record  message(The answer is 18.)                   refused: text_mismatch

    It reads the files with `tokenizers` alone: validation needs no torch and no transformers.

    Args:
        hermes: tool calls are written in Hermes' notation, the one that can be read here. Without it, rollouts with tool
            calls are not judged.

    Raises:
        ConfigError: the directory has no tokenizer.json.
    """

    def __init__(self, directory: Path, *, hermes: bool = True) -> None:
        from tokenizers import Tokenizer

        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{directory} has no tokenizer.json, so text cannot be proved. Set validation.check_text to false."
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
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._hermes = hermes

    def prove(self, rollout: Rollout) -> bool:
        """See `TextProof`.

        Raises:
            Refusal: `text_mismatch`.
        """
        given = rollout.task.get("responses_create_params", {}).get("input", [])
        recorded = list(_said_in(rollout.items[1 if isinstance(given, str) else len(given) :]))
        # If no call is on record, none was offered or none was parsed: the text is unchanged.
        called = any(kind == "call" for kind, _ in recorded)
        if called and not self._hermes:
            return False
        place = 0
        for turn in rollout.turns:
            ids = turn.generation_token_ids
            if ids[-1] in self._stops:
                ids = ids[:-1]
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            message: dict[str, Any] = {"content": text}
            calls: list[dict[str, Any]] = []
            if called and TOOL_CALL_START in text:
                message["content"], calls = parse_hermes(text, [])
            if calls:
                message["tool_calls"] = calls
            elif not self._special.isdisjoint(ids):
                message["content"] = self._tokenizer.decode(ids, skip_special_tokens=True)
            for said in list(_said_in(assistant_items(message, ""))):
                found = recorded[place] if place < len(recorded) else None
                if found != said:
                    raise Refusal(
                        "text_mismatch", f"the tokens say {_short(said)}, the record {_short(found)}", turn.turn
                    )
                place += 1
        if place < len(recorded):
            raise Refusal("text_mismatch", f"no token says {_short(recorded[place])}")
        return True


def _said_in(items: list[dict[str, Any]]) -> Iterable[Said]:
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            yield "reasoning", [part["text"] for part in item.get("summary", [])]
        elif kind == "function_call":
            name, arguments = item["name"], item["arguments"]
            with suppress(ValueError):
                # In one spelling, also of what equals nothing (NaN)
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
    """The proof of log-probabilities: the weights that the iteration was collected with say what the engine recorded.

    Invariant: what weights have learnt from was generated, as recorded, by the version before. The train stage computes these
    log-probabilities anyway, for every token that it trains on, before the first update; so the proof covers all of them, costs
    no pass over the model, and works over every train service. A sequence that the weights do not bear out has weight 0 in
    every term of the loss (`loss.borne_out`) and stands in the dataset `mismatched`; above a share of them the weights become
    no version.

    It catches what no single row shows: log-probabilities that were swapped, shifted or made up, answers of other weights under
    the wanted version's number, and tokens that were changed where no later prompt repeats them.

    Args:
        sequences: the validate stage's dataset.
        columns: the train stage's, one row a sequence in the same order.
        policy_version: of the weights that `trainer_logprobs` were computed with; sequences of other versions are not judged.
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
    """`validation.recompute_tolerance`, or None where engine and trainer compute different distributions by design, and where
    the rollouts are another run's, whose version numbers say nothing of these weights."""
    sampling = config.generation.sampling
    if config.offline is not None or sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k is not None:
        return None
    return config.validation.recompute_tolerance


def refuse_mismatched(found: pa.Table, judged: int, config: ValidationConfig, where: str) -> None:
    """
    Raises:
        DataError: they are more than `validation.max_mismatched_fraction` of the sequences that were judged.
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
    """Number of token IDs of the run's policy.

    Raises:
        StoreError: the run has no starting policy yet.
    """
    location = model_location(run.checkpoint(0).location)
    try:
        return int(json.loads(location.read("config.json"))["vocab_size"])
    except (KeyError, ValueError) as error:
        raise StoreError(f"{location.uri}/config.json has no vocab_size: {error}") from error
