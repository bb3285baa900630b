"""Import of rollouts that other systems made, as a version of a dataset (`roundhouse import`).

Invariants: a name and version is imported once; the same files again are a no-op, other files an error. Tokens are those of the
file or missing: a conversation without tokens is stored as it is, and only supervised training makes tokens of it, by the
template of the policy that learns (`with_tokens`), in another dataset.

    trajectories.jsonl  ──reader──>  datasets/theirs/v000001/                       rollouts, turns, foreign
                                     datasets/theirs-tokens/v000001-3f2a…/          the same, with tokens of one policy
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from roundhouse import plugins
from roundhouse.config.section import Section
from roundhouse.errors import ConfigError, DataError, StoreError
from roundhouse.stages.chat_rows import Conversations
from roundhouse.stages.datasets import TaskDraw, dataset_stage
from roundhouse.store.lineage import code_version
from roundhouse.store.location import Location
from roundhouse.store.run import Run
from roundhouse.store.stage import Attempt, Provenance, Reference, Stage, StageKind, read_manifest, read_table
from roundhouse.trajectories.foreign_files import ForeignRollouts, Head, Reader, documents
from roundhouse.trajectories.records import Ledger, Refusal, Rollout, Status
from roundhouse.trajectories.schemas import rollouts_from_tables, rollouts_table, turns_table

PART_ROLLOUTS = 1024
"""Rollouts in one Parquet part."""
WITH_TOKENS = "with_tokens"
"""Key of a manifest's details: number of imported rollouts that have tokens."""
NOT_TOKENISED = "not_tokenised"
"""Failure code of a conversation that the policy's template cannot express, or that is too long for it."""


@dataclass(frozen=True, slots=True)
class Imported:
    """An imported version of a dataset."""

    reference: Reference
    format: str
    with_tokens: int
    """Rollouts with token IDs."""
    note: str = ""


def import_files(
    store: str,
    name: str,
    path: Path,
    version: str = "v000001",
    *,
    file_format: str | None = None,
    options: Mapping[str, Any] | None = None,
    policy_version: int = 0,
) -> Imported:
    """Import a file, or the files of a directory, as `<store>/datasets/<name>/<version>`.

    Args:
        file_format: name of a reader; by default the reader that recognises the first file.
        options: keys of the reader's section.
        policy_version: of the weights that made the rollouts, for files that do not have it.

    Raises:
        ConfigError: the format is unknown, or an option is not one of its reader.
        DataError: a file cannot be read; names file, line and key.
        StoreError: the version exists and was made from other files.
    """
    file_format, files = find_format(path, file_format)
    section = _section(file_format, options or {})
    reader: Reader = plugins.traits("reader", file_format)
    digest = hashlib.sha256(json.dumps([file_format, dict(options or {}), policy_version], default=str).encode())
    for file in files:
        for each in (file, *reader.companions(file)):
            if each.exists():
                with each.open("rb") as handle:
                    digest.update(hashlib.file_digest(handle, "sha256").digest())
    stage = Stage(Location(store) / f"datasets/{name}/{version}", kind=StageKind.COLLECT, run_id=name, iteration=0)
    if (reference := stage.reference()) is not None:
        manifest = read_manifest(reference)
        if manifest.provenance.config_digest != digest.hexdigest():
            raise StoreError(
                f"{reference.uri} exists and was imported from other files or with other options "
                f"({manifest.details.get('imported')}). Give the import another --name or --version."
            )
        return Imported(reference, file_format, manifest.details.get(WITH_TOKENS, 0))
    foreign: ForeignRollouts = plugins.factory("reader", file_format)(files, section, policy_version)
    rollouts = foreign.rollouts
    if not rollouts:
        raise DataError(f"{path} holds no rollout. Name a file of rollouts.")
    [(most, times)] = Counter(rollout.rollout_id for rollout in rollouts).most_common(1)
    if times > 1:
        raise DataError(f"{path}: {times} rollouts have the ID {most}. Import their files under different names.")
    versions = {turn.policy_version for rollout in rollouts for turn in rollout.turns}
    attempt = stage.begin(
        Provenance(
            policy_version=max(versions, default=policy_version),
            config_digest=digest.hexdigest(),
            code_version=code_version(),
            seed=0,
        )
    )
    for dataset, table in foreign.tables.items():
        attempt.write_table(dataset, table)
    tokens = sum(bool(rollout.turns) for rollout in rollouts)
    written = bool(tokens) and not any(turn.generation_log_probs for each in rollouts for turn in each.turns)
    details = {"imported": str(path), "format": file_format, WITH_TOKENS: tokens} | (
        {"written": True} if written else {}
    )
    return Imported(_commit(attempt, rollouts, details), file_format, tokens, foreign.note)


def find_format(path: Path, file_format: str | None = None) -> tuple[str, list[Path]]:
    """Return the name of the reader for a path, and its files in order: the path, or those below a directory.

    Raises:
        ConfigError: the path does not exist, or no reader, or more than one, recognises it.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist. Name a file of rollouts, or a directory of such files.")
    names = plugins.names("reader")
    if file_format is not None and file_format not in names:
        raise ConfigError(f"--format is {file_format!r}. Formats: {', '.join(sorted(names))}.")
    candidates = []
    for name in names if file_format is None else [file_format]:
        reader: Reader = plugins.traits("reader", name)
        files = sorted(path.glob(reader.files)) if path.is_dir() else [path]
        if files and (file_format is not None or reader.recognises(_head(files[0]))):
            candidates.append((name, files))
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise ConfigError(
            f"{path} could be {' or '.join(name for name, _ in candidates)}. Name its format: --format {candidates[0][0]}."
        )
    patterns = ", ".join(f"{name} ({plugins.traits('reader', name).files})" for name in names)
    raise ConfigError(
        f"{path} is of no format that a reader recognises: {patterns}. Check the file, or name its format with --format."
    )


def _head(file: Path) -> Head:
    with file.open("rb") as handle:
        if handle.read(4) == b"PAR1":
            try:
                return Head(file, columns=frozenset(pq.read_schema(file).names))
            except pa.ArrowException as error:
                raise DataError(f"{file} is a damaged Parquet file: {error}") from error
    try:
        return Head(file, row=next(documents(file), ("", {}))[1])
    except DataError:
        return Head(file)


def _section(file_format: str, options: Mapping[str, Any]) -> Section | None:
    from roundhouse.config.loading import parse_section

    if plugins.find("reader", file_format).section is None:
        if options:
            raise ConfigError(f"--set {next(iter(options))}: the reader {file_format} has no options.")
        return None
    section = plugins.section("reader", file_format)
    return parse_section(section, {"kind": file_format, **options}, "--set")


def _commit(
    attempt: Attempt,
    rollouts: Sequence[Rollout],
    details: dict[str, Any],
    inputs: dict[str, Reference] | None = None,
) -> Reference:
    for start in range(0, len(rollouts), PART_ROLLOUTS):
        part = rollouts[start : start + PART_ROLLOUTS]
        attempt.write_table("turns", turns_table(part))
        attempt.write_table("rollouts", rollouts_table(part))
    ledger = Ledger.from_rollouts(rollouts, requested=len(rollouts))
    rewards = [reward for rollout in rollouts if (reward := rollout.counted_reward) is not None]
    return attempt.commit(
        inputs=inputs or {},
        counts=ledger.counts(),
        metrics={"reward/mean": sum(rewards) / len(rewards)} if rewards else {},
        details={"failures": ledger.failures, **details},
    )


def lacks_tokens(reference: Reference) -> bool:
    """Return whether a dataset's version was imported without any token."""
    return read_manifest(reference).details.get(WITH_TOKENS) == 0


def with_tokens(run: Run, reference: Reference) -> Reference:
    """Return the dataset's version, or, if it was imported without tokens, the version with tokens of the run's policy.

    A conversation that the policy cannot express becomes masked, with the code `not_tokenised`.

    Raises:
        DataError: the policy can express no conversation.
    """
    if not lacks_tokens(reference):
        return reference
    conversations = Conversations(run)
    *_, name, version = reference.uri.split("/")
    draw = TaskDraw(0)
    stage = dataset_stage(run, f"{name}-tokens", f"{version}-{conversations.label(reference.digest)}", draw)
    if (earlier := stage.reference()) is not None:
        return earlier
    rollouts = rollouts_from_tables(read_table(reference, "rollouts"), read_table(reference, "turns"))
    tokenised = [_tokenised(conversations, each) if each.status.counted else each for each in rollouts]
    if not any(each.turns for each in tokenised):
        reasons = (each.failure_detail for each in tokenised if each.failure_code == NOT_TOKENISED)
        reason = next(reasons, "no rollout has a reward; judge them first (roundhouse rescore)")
        raise DataError(f"Dataset {name}@{version}: no conversation can be learnt from: {reason}.")
    return _commit(
        run.begin(stage, policy_version=0),
        tokenised,
        {"written": True, "imported": reference.uri, "tokenizer": conversations.tokenizer_digest()},
        {"rollouts": reference},
    )


def _tokenised(conversations: Conversations, rollout: Rollout) -> Rollout:
    try:
        return conversations.rollout_with_turns(rollout)
    except (DataError, ConfigError, Refusal) as error:
        detail = error.evidence if isinstance(error, Refusal) else str(error).rstrip(".")
        return replace(rollout, status=Status.MASKED, failure_code=NOT_TOKENISED, failure_detail=detail)
