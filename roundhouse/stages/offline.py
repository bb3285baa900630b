"""Offline data: datasets that a run trains on instead of fresh rollouts, fixed and checked before the first step.

Invariant: a run's `offline` stage names its dataset versions with their digests, and every iteration reads these. It
resolves names such as `nightly@all` once. It is committed only if the data is fresh enough or on_stale is warn.

    iterations/000012/offline      the datasets, their groups, their freshness          the run starts from version 12
    iterations/000013/validate     a batch of them, as sequences                        instead of refit, collect, validate

`batch_at` selects iteration k's groups from the datasets' groups, the batch size, the seed and k alone, so a killed run
resumes with the same batch. An epoch has every group once. A batch has groups of one dataset version, sampled by one
policy; batch sizes of a version differ by at most one group.

    versions a (5 groups), b (2), size 2      epoch 1:  a[3 0] b[1 0] a[2] a[4 1]      epoch 2: another order
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from roundhouse.activity import announce
from roundhouse.config.models import RunConfig
from roundhouse.config.rollout import CHAT_ROWS, NAMED, OfflineConfig
from roundhouse.errors import ConfigError, DataError, StoreError
from roundhouse.stages.datasets import dataset_names, dataset_versions
from roundhouse.stages.freshness import Freshness, bounds_of, importance_metrics, importance_of, judge, settle
from roundhouse.stages.importing import lacks_tokens, with_tokens
from roundhouse.stages.validate import image_reader, rows_of_groups, validate_groups, vocabulary_size
from roundhouse.store.lineage import read_identity
from roundhouse.store.location import Location, NotFound
from roundhouse.store.run import Run
from roundhouse.store.stage import (
    Manifest,
    Reference,
    Stage,
    StageKind,
    model_location,
    read_manifest,
    read_table,
    sha256,
)
from roundhouse.training.batch import TrainingSequences
from roundhouse.trajectories.records import derive_seed, prove_counted
from roundhouse.trajectories.schemas import rollouts_from_tables
from roundhouse.trajectories.validation import CollectionLimits, validate

GROUPS = pa.schema([("dataset", pa.int32()), ("group_id", pa.string())])
"""The stage's dataset `groups`."""
DAY = 86400.0

LogProbs = Callable[[TrainingSequences], np.ndarray]
"""[T] log-probabilities of the generated tokens under the policy that training starts from."""

_RUN = re.compile(r"(?P<run>.+/runs/[^/]+)/.+")


def prepare_offline(run: Run, base: Reference, log_probs: LogProbs) -> Reference:
    """Fix the run's datasets and judge their freshness.

    Raises:
        StoreError: a dataset does not exist.
        ConfigError: it cannot fit the run.
        StaleData: it is too old, and `offline.on_stale` is refuse.
    """
    stage = run.stage(run.first_version, StageKind.OFFLINE)
    if (earlier := stage.reference()) is not None:
        return earlier
    offline = _section(run.config)
    attempt = run.begin(stage, policy_version=base.policy_version)
    datasets = find_datasets(run.config.store, offline.datasets, run)
    groups = [groups_of(reference) for reference in datasets]
    _refuse_unfit(run, datasets)
    assessments = [freshness_of(run, reference, log_probs) for reference in datasets]
    lines = {each.label: judge(run.config, each) for each in assessments}
    attempt.write_json("freshness", {"datasets": [each.facts() for each in assessments], "stale": lines})
    for label, stale in lines.items():
        settle(run.config, f"Dataset {label}", stale)
    rows = [{"dataset": index, "group_id": group} for index, own in enumerate(groups) for group in own]
    attempt.write_table("groups", pa.Table.from_pylist(rows, schema=GROUPS))
    batches = batches_of_an_epoch([len(own) for own in groups], _batch_size(run.config))
    metrics = {"offline/age_days": max(freshness.days for freshness in assessments)}
    if ages := [freshness.age for freshness in assessments if freshness.age is not None]:
        metrics["offline/age_versions"] = float(max(ages))
    measured = [
        importance_metrics(freshness.importance) for freshness in assessments if freshness.importance is not None
    ]
    for metric in measured[0] if measured else ():
        worst = min if "effective" in metric else max
        metrics[metric] = worst(freshness[metric] for freshness in measured)
    reference = attempt.commit(
        inputs={f"dataset-{index:04d}": reference for index, reference in enumerate(datasets)},
        counts={"datasets": len(datasets), "groups": len(rows), "batches": batches}
        | {"rollouts": sum(reference.counts.get("requested", 0) for reference in datasets)},
        metrics=metrics,
        details={
            "datasets": [each.facts() for each in assessments],
            "stale": {name: own for name, own in lines.items() if own},
        },
    )
    announce("offline", text=_summary(assessments, batches, offline.epochs))
    return reference


def validate_batch(run: Run, iteration: int) -> Reference:
    """Validate the groups that are this iteration's, into its sequences."""
    datasets, batch = batch_of(run, iteration)
    reference = datasets[batch.dataset]
    where = {"dataset": label_of(reference), "epoch": batch.epoch, "batch": batch.number}
    return validate_groups(run, iteration, reference, batch.groups, vocabulary_size(run), where)


def batch_of(run: Run, iteration: int) -> tuple[list[Reference], OfflineBatch]:
    """The dataset versions of the run, and the batch of one of them that an iteration trains on."""
    reference = run.stage(run.first_version, StageKind.OFFLINE).reference()
    if reference is None:
        raise StoreError(
            f"Run {run.run_id} has not fixed its datasets yet: {run.location.uri} lacks the stage {StageKind.OFFLINE}."
        )
    table = read_table(reference, "groups")
    by_dataset: list[list[str]] = [[] for _ in range(reference.counts["datasets"])]
    for dataset, group in zip(table["dataset"].to_pylist(), table["group_id"].to_pylist(), strict=True):
        by_dataset[dataset].append(group)
    manifest, groups = read_manifest(reference), by_dataset
    batch = batch_at(groups, _batch_size(run.config), run.config.seed, iteration - run.first_version - 1)
    return [manifest.inputs[name] for name in sorted(manifest.inputs)], batch


def with_iterations(run: Run) -> Run:
    """Return the run with its number of iterations: the batches of its epochs, counted from its start."""
    offline = _section(run.config)
    earlier = run.stage(run.first_version, StageKind.OFFLINE).reference()
    if earlier is not None:
        batches = earlier.counts["batches"]
    else:
        datasets = find_datasets(run.config.store, offline.datasets, run)
        sizes = [len(groups_of(reference)) for reference in datasets]
        batches = batches_of_an_epoch(sizes, _batch_size(run.config))
    return replace(
        run, config=run.config.model_copy(update={"iterations": run.first_version + offline.epochs * batches})
    )


def find_datasets(store: str, names: Sequence[str], run: Run | None = None) -> list[Reference]:
    """Return the complete versions that these names mean, each once, in the order of the names and then of their
    completion.

    Args:
        run: chat-row files, and versions that were imported without tokens, get the tokens of its policy; without a run,
            files are read and omitted, and versions stay as they are.

    Raises:
        ConfigError: the run's algorithm weights tokens, and a version lacks them.
        StoreError: a name matches nothing; the existing names are listed.
        DataError: a chat row cannot be learnt from.
    """
    by_uri: dict[str, Reference] = {}
    for name in names:
        for version in _versions_of(store, name, run):
            if run is not None:
                _refuse_missing_weights(run.config, version)
            reference = version if run is None else with_tokens(run, version)
            by_uri.setdefault(reference.uri, reference)
    return list(by_uri.values())


def groups_of(reference: Reference) -> list[str]:
    """Ids of the dataset's groups, sorted."""
    return sorted(pc.unique(read_table(reference, "rollouts").column("group_id")).to_pylist())


def label_of(reference: Reference) -> str:
    """`nightly@20261121T020000Z-v000012`; of a stage of a run, its place in the store."""
    parts = reference.uri.split("/")
    return f"{parts[-2]}@{parts[-1]}" if parts[-3] == "datasets" else "/".join(parts[-4:])


def freshness_of(run: Run, reference: Reference, log_probs: LogProbs) -> Freshness:
    """Return the age of a dataset version for the run, with the importance weights of a sample."""
    manifest, offline = read_manifest(reference), _section(run.config)
    days = (time.time() - manifest.finished_at) / DAY
    importance = None
    if offline.precheck_rollouts > 0 and not manifest.details.get("written"):
        batch = draw_sample(run, reference, manifest, offline.precheck_rollouts)
        difference = (log_probs(batch) - batch.gen_logprobs)[batch.loss_mask]
        owner = np.unique(batch.rollout_ids, return_inverse=True)[1][batch.sequence_of_token][batch.loss_mask]
        importance = importance_of(difference, owner, bounds_of(run.config))
    age = age_of(run, manifest.inputs.get("weights"))
    return Freshness(label_of(reference), reference.policy_version, age, days, importance)


def age_of(run: Run, weights: Reference | None) -> int | None:
    """Return the number of policy versions from the collecting one to the run's first; None if it is not in the run's
    lineage.

    base    1 2 3 4 5 6         a run that starts from base 4 has the lineage 1 2 3 4: data collected with
                  └── run       version 2 has age 2; for version 5 and other runs the age is unknown
    """
    place = None if weights is None else _RUN.fullmatch(weights.uri)
    if place is None or weights is None:
        return None
    line = [(run.location.uri, run.first_version)]
    parent = None if run.parent is None else run.parent.model_dump(mode="json")
    latest = run.first_version
    while parent is not None and (origin := _RUN.fullmatch(parent["checkpoint"]["uri"])) is not None:
        latest = min(latest, int(parent["version"]))
        if any(origin["run"] == uri for uri, _ in line):
            break
        line.append((origin["run"], latest))
        try:
            parent = read_identity(Location(origin["run"])).get("parent")
        except NotFound:
            break  # the lineage continues, but its record is missing
    for uri, newest in line:
        if uri == place["run"]:
            return run.first_version - weights.policy_version if weights.policy_version <= newest else None
    return None


def _versions_of(store: str, name: str, run: Run | None) -> list[Reference]:
    if name.endswith(CHAT_ROWS):
        from roundhouse.stages.chat_rows import import_chat_rows, read_chat_rows

        if run is not None:
            return [import_chat_rows(run, name)]
        read_chat_rows(name)
        return []
    if "/" in name:
        reference = Stage(Location(name), kind=StageKind.COLLECT, run_id="", iteration=0).reference()
        if reference is None or reference.kind != StageKind.COLLECT:
            raise ConfigError(
                f"offline.datasets: {name!r} holds no complete collection. Give the directory of a dataset's version."
            )
        return [reference]
    match = NAMED.fullmatch(name)
    assert match is not None, "the section checks names"
    versions = dataset_versions(store, match["name"])
    if match["version"] is None:
        chosen = versions[-1:]
    else:
        chosen = [version for version in versions if match["version"] in ("all", version.uri.rsplit("/", 1)[-1])]
    if not chosen:
        labels = [version.uri.rsplit("/", 1)[-1] for version in versions]
        if labels:
            existing = f"complete versions: {', '.join(labels)}"
        elif names := dataset_names(store):
            existing = f"datasets there: {', '.join(names)}"
        else:
            existing = "no dataset is there: collect one (roundhouse collect)"
        raise StoreError(f"offline.datasets: {name!r} is not in {Location(store).uri}; {existing}.")
    return chosen


def _refuse_unfit(run: Run, datasets: Sequence[Reference]) -> None:
    """Whole, counted right, sampled at the temperature that log-probabilities are computed at, in the policy's tokens."""
    refuse_other_sampling(run.config, datasets)
    for reference in datasets:
        tables = read_table(reference, "rollouts"), read_table(reference, "turns")
        prove_counted(reference.counts, rollouts_from_tables(*tables))
        _refuse_other_tokens(run, reference, read_manifest(reference))


def refuse_other_sampling(config: RunConfig, datasets: Sequence[Reference]) -> None:
    """Refuse datasets that were sampled at another temperature, or written, for an algorithm that weights their tokens.

    Files of chat rows are written; they need not be imported yet.

    Raises:
        ConfigError: names the dataset and the key.
    """
    for name in _section(config).datasets:
        if name.endswith(CHAT_ROWS):
            _refuse_weights_of_tokens(config, name)
    for reference in datasets:
        details = read_manifest(reference).details
        sampled, temperature = details.get("sampling", {}).get("temperature"), config.generation.sampling.temperature
        if sampled is not None and sampled != temperature:
            raise ConfigError(
                f"Dataset {label_of(reference)} was sampled at temperature {sampled:g}, and generation.sampling.temperature is "
                f"{temperature:g}, at which its log-probabilities would be computed. Set it to {sampled:g}."
            )
        _refuse_missing_weights(config, reference)


def _refuse_missing_weights(config: RunConfig, reference: Reference) -> None:
    """Refuse token weights for a dataset without log-probabilities."""
    if lacks_tokens(reference):
        _refuse_weights_of_tokens(config, label_of(reference), "imported without token IDs")
    elif read_manifest(reference).details.get("written"):
        _refuse_weights_of_tokens(config, label_of(reference))


def _refuse_weights_of_tokens(config: RunConfig, label: str, origin: str = "written, not sampled") -> None:
    """Refuse token weights: the tokens were not sampled from a policy, so their probabilities are unknown."""
    algorithm = config.train.algorithm
    written = f"dataset {label} was {origin}: it lacks the log-probabilities for token weights"
    if algorithm.needs_sampled_tokens:
        raise ConfigError(
            f"train.algorithm.kind is {algorithm.kind}, but {written}. Set it to cross_entropy (--method sft)."
        )
    if algorithm.kl_coefficient > 0:
        raise ConfigError(
            f"train.algorithm.kl_coefficient is {algorithm.kl_coefficient:g}, but {written}, and the KL to the reference is "
            "an expectation over what the policy samples. Set it to 0."
        )


def _refuse_other_tokens(run: Run, reference: Reference, manifest: Manifest) -> None:
    """Refuse data of another tokenizer, if the collecting run's tokenizer still exists."""
    weights, tokenizer = manifest.inputs.get("weights"), manifest.details.get("tokenizer")
    place = None if weights is None else _RUN.fullmatch(weights.uri)
    if tokenizer is not None and tokenizer != sha256(model_location(run.checkpoint(0).location).read("tokenizer.json")):
        raise ConfigError(
            f"Dataset {label_of(reference)} was imported for a policy with another tokenizer. Name the file of its rows, "
            f"{manifest.details['imported']}, to import it for this one."
        )
    if place is None:
        return
    try:
        theirs = model_location(Location(place["run"]) / "checkpoints/000000").read("tokenizer.json")
        ours = model_location(run.checkpoint(0).location).read("tokenizer.json")
    except NotFound:
        return
    if theirs != ours:
        raise ConfigError(
            f"Dataset {label_of(reference)} was collected by {place['run']}, with another tokenizer than the policy's. Choose "
            "a dataset that a policy with the same tokenizer collected."
        )


def draw_sample(run: Run, reference: Reference, manifest: Manifest, count: int) -> TrainingSequences:
    """Whole groups, drawn by the run's seed, of so many rollouts or a few more, as sequences.

    Raises:
        DataError: validation refused all of them.
    """
    groups = groups_of(reference)
    random.Random(derive_seed(run.config.seed, "offline sample", manifest.iteration)).shuffle(groups)
    each = max(1, reference.counts.get("requested", 0) // max(1, len(groups)))
    tables = rows_of_groups(reference, groups[: -(-count // each)])
    size = vocabulary_size(run)
    result = validate(
        rollouts_from_tables(*tables),
        run.config.validation,
        vocabulary_size=size,
        policy_version=reference.policy_version,
        terms=CollectionLimits(size, reference.policy_version, reward_limit=run.config.rollout.reward_limit),
        images=image_reader(run),
    )
    if result.sequences.num_rows == 0:
        raise DataError(
            f"Of {result.ledger.requested} rollouts drawn from dataset {label_of(reference)}, validation refused all: "
            f"{result.reasons}. Leave the dataset out, or inspect its rollouts."
        )
    return TrainingSequences.from_table(result.sequences)


def _summary(found: Sequence[Freshness], batches: int, epochs: int) -> str:
    lines = []
    for each in found:
        age = "unknown age" if each.age is None else f"{each.age} versions old"
        importance = each.importance
        weights = (
            "not sampled"
            if importance is None
            else f"effective sample {importance.effective_tokens:.3f} of tokens, {importance.effective_rollouts:.3f} of "
            f"rollouts, {importance.clipped:.1%} clipped"
        )
        lines.append(f"{each.label}: {age}, {each.days:.1f} days; {weights}")
    return "\n".join([*lines, f"{epochs} epochs of {batches} batches"])


def _batch_size(config: RunConfig) -> int:
    return _section(config).groups or config.rollout.prompts_per_iteration


def _section(config: RunConfig) -> OfflineConfig:
    assert config.offline is not None, "an offline run has the section"
    return config.offline


@dataclass(frozen=True, slots=True)
class OfflineBatch:
    """The groups of one iteration."""

    epoch: int
    """From 1."""
    number: int
    """In the epoch, from 1."""
    dataset: int
    """Index of the dataset version."""
    groups: tuple[str, ...]


def batches_of_an_epoch(sizes: Sequence[int], size: int) -> int:
    """Return the number of batches of an epoch.

    Args:
        sizes: groups of each dataset version.
        size: groups of a batch, at most.
    """
    return sum(-(-groups // size) for groups in sizes)


def batch_at(groups: Sequence[Sequence[str]], size: int, seed: int, position: int) -> OfflineBatch:
    """The batch at this position of the run, from 0.

    Args:
        groups: ids of each dataset version, in a fixed order.
    """
    count = batches_of_an_epoch([len(own) for own in groups], size)
    epoch, number = divmod(position, count)
    shuffle = random.Random(derive_seed(seed, "offline epoch", epoch))
    batches = []
    for index, own in enumerate(groups):
        order = list(own)
        shuffle.shuffle(order)
        parts = -(-len(order) // size)
        bounds = [round(part * len(order) / parts) for part in range(parts + 1)] if parts else []
        batches += [(index, tuple(order[bounds[part] : bounds[part + 1]])) for part in range(parts)]
    shuffle.shuffle(batches)
    return OfflineBatch(epoch + 1, number + 1, *batches[number])
