"""Replay: run recorded stages of a run again, with or without substitutions, into a separate place, and compare.

    <store>/replays/<name>/run.json                        the replayed stages and substitutions; the parent checkpoint
    <store>/replays/<name>/iterations/000012/train/        as in a run
    <store>/replays/<name>/checkpoints/000012/
    <store>/replays/<name>/comparison.json                 the result, compared with the original

Invariants: the original is only read, and a replay owns its checkpoints as a fork does. A stage takes each input from
the replay if the replay made it, else from the record, so iterations i to j of `train` are one chain, trained again on
their recorded rollouts. The installed code runs. The same call resumes after the last complete stage.

    recorded     collect 10 ─ validate 10 ─ train 10 ─ version 10 ─ collect 11 ─ …
    replayed        │ read                  TRAIN 10 ─ VERSION 10      │ read      TRAIN 11 ─ VERSION 11
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as changed
from typing import Any

from roundhouse.config.loading import apply_override, digest_of_tree, parse_config
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError, StoreError
from roundhouse.plugins.lab.replays.comparison import Comparison, DriftGate, compare_stage, drift_of, first_difference
from roundhouse.plugins.lab.replays.verdicts import rescored_inputs
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.offline import batch_of
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.refit import release_engine
from roundhouse.stages.train import train_iteration
from roundhouse.stages.trainer_home import trainer_home
from roundhouse.stages.trainers import MEMORY
from roundhouse.stages.validate import validate_groups, validate_iteration, vocabulary_size
from roundhouse.store.directories import checkpoint_cache
from roundhouse.store.lease import driving
from roundhouse.store.lineage import (
    code_version,
    create_identity,
    first_draw_of,
    parent_at,
    refuse_unloadable,
)
from roundhouse.store.location import Location, NotFound
from roundhouse.store.replays import load_replay
from roundhouse.store.run import Run, load_run, no_such_version
from roundhouse.store.stage import Reference, Stage, StageKind, read_manifest

REPLAYED = (StageKind.COLLECT, StageKind.VALIDATE, StageKind.TRAIN, StageKind.EVALUATE)
"""Stages that can run again, in the order of an iteration."""
SAMPLING = (StageKind.COLLECT, StageKind.EVALUATE)
"""Stages that sample from an engine: their rows cannot be equal, and are compared by distribution."""
INPUTS = {"rollouts": StageKind.VALIDATE, "base": StageKind.TRAIN}
"""Inputs that can be substituted, and the stage that reads each."""

Say = Callable[[str], None]


def replay(
    store: str,
    run_id: str,
    iterations: range | Sequence[int],
    stages: Sequence[str] = (StageKind.VALIDATE, StageKind.TRAIN),
    *,
    overrides: Sequence[str] = (),
    inputs: Mapping[str, str] | None = None,
    name: str | None = None,
    gate: DriftGate | None = None,
    say: Say = lambda line: None,
) -> Comparison:
    """Run recorded stages again and compare them with the original.

    Args:
        iterations: consecutive, such as `range(10, 21)`.
        stages: of collect, validate, train and evaluate. Sampling stages need the run's engine.
        overrides: `key.path=value` over the recorded configuration.
        inputs: `rollouts`: a dataset that `rescore` made of this run, the path of a collection, or `iteration:7`;
            `base`: the version that the first iteration starts from.
        name: of the replay; by default a name derived from all of the above and the code.
        gate: bounds of drift at which to stop; None: never.
        say: called with a line for each stage.

    Returns:
        The differences, starting with the first and its cause; also stored as `comparison.json`.

    Raises:
        StoreError: a stage, checkpoint or input is missing, or the name is taken by another replay.
        ConfigError: an impossible substitution.
    """
    original = load_run(store, run_id)
    numbers, kinds, substituted = _checked_request(iterations, stages, inputs or {})
    recorded = {(k, kind): _recorded(original, k, kind) for k in numbers for kind in kinds}
    rollouts = _substituted_rollouts(original, numbers, substituted.get("rollouts"))
    config = substituted_config(original.config, overrides)
    base = int(substituted.get("base", _base_of(original, numbers, kinds)))
    request = {
        "run_id": run_id,
        "run_uid": original.uid,
        "iterations": [numbers[0], numbers[-1]],
        "stages": [str(kind) for kind in kinds],
        "set": list(overrides),
        "inputs": substituted,
        "code_version": code_version(),
    }
    run = _open(original, config, request, name or f"{run_id}-{digest_of_tree(request)[:8]}", base)
    comparison = Comparison.begin(run.location, original, run.config, request)
    with driving(run.location):
        try:
            _run_chain(run, original, recorded, rollouts, "base" not in substituted, gate, comparison, say)
        finally:
            trainer_home(run).release()
            if set(SAMPLING).intersection(kinds):  # other replays reach no engine, and perhaps no cluster
                release_engine(run)
        comparison.first = first_difference(comparison)
        run.location.write("comparison.json", (json.dumps(comparison.as_json(), indent=1) + "\n").encode())
    return comparison


def _run_chain(
    run: Run,
    original: Run,
    recorded: Mapping[tuple[int, StageKind], Reference],
    rollouts: Mapping[int, Reference],
    as_recorded: bool,
    gate: DriftGate | None,
    comparison: Comparison,
    say: Say,
) -> None:
    """Stage after stage, each compared with the recorded one; a gate that fires ends it before the version is published."""
    previous = starting_policy(run)
    references: dict[str, Reference] = {}
    for (k, kind), original_stage in recorded.items():
        say(f"iteration {k}: {kind}")
        references = {key: reference for key, reference in references.items() if reference.iteration == k}
        # The run in the form for a step without an engine. With other initial weights than recorded, the recorded
        # log-probabilities need not fit them
        config = run.config.model_copy(update={"placement": type(run.config.placement)()})
        if not as_recorded:
            validation = config.validation.model_copy(update={"recompute_tolerance": None})
            config = config.model_copy(update={"validation": validation})
        if kind == StageKind.TRAIN:
            config = _with_recorded_memory_settings(config, original.config, original_stage)
        again = _run_stage(
            changed(run, config=config), original, k, kind, original_stage, references, rollouts, previous
        )
        references[kind] = again
        compared = compare_stage(comparison, original_stage, again, by_distribution=kind in SAMPLING)
        comparison.stages.append(compared)
        if kind != StageKind.TRAIN:
            continue
        drift = drift_of(run.config, read_manifest(again).inputs["sequences"], again)
        as_recorded = as_recorded and not compared.weights
        compared.drift = None if drift is None else drift.facts()
        if gate is not None and drift is not None and (reasons := gate.judge(drift)):
            comparison.stopped = {"iteration": k, "reasons": reasons}
            return
        previous = publish(run, again)


def _with_recorded_memory_settings(config: RunConfig, original: RunConfig, recorded: Reference) -> RunConfig:
    """Return the configuration with the memory settings of the stage's training, except overridden ones: a run may
    change them when it resumes, and results are compared bit for bit."""
    settings = {
        name: value
        for name, value in read_manifest(recorded).details.get(MEMORY, {}).items()
        if getattr(config.train, name) == getattr(original.train, name)
    }
    return config.model_copy(update={"train": config.train.model_copy(update=settings)})


def _checked_request(
    iterations: Sequence[int], stages: Sequence[str], inputs: Mapping[str, str]
) -> tuple[list[int], list[StageKind], dict[str, str]]:
    """Iterations, stages in the order of an iteration and inputs, as asked for and found possible."""
    numbers = list(iterations)
    if not numbers or numbers != list(range(numbers[0], numbers[-1] + 1)):
        raise ConfigError(f"--iterations: {numbers} are not consecutive iterations; give first:last, such as 10:20.")
    kinds = [kind for kind in REPLAYED if kind in stages]
    if unknown := set(stages) - set(kinds):
        raise ConfigError(f"--stage {sorted(unknown)[0]}: {', '.join(REPLAYED)} can run again.")
    substituted = dict(inputs)
    for key in substituted:
        if key not in INPUTS or INPUTS[key] not in kinds:
            raise ConfigError(
                f"--input {key}: rollouts can be substituted with --stage validate, base with --stage train; stages are "
                f"{', '.join(kinds)}."
            )
    return numbers, kinds, substituted


def substituted_config(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The recorded configuration but for the overrides.

    Raises:
        ConfigError: they do not make a configuration, or name the run or its store.
    """
    tree = config.model_dump(mode="json")
    for override in overrides:
        if override.partition("=")[0].strip() in ("run_id", "store"):
            raise ConfigError(f"--set {override}: a replay is of this run and lies in its store; name it with --name.")
        apply_override(tree, override)
    return parse_config(tree, origin=f"replay of {config.run_id}", recorded=not overrides)


def read_comparison(store: str, name: str) -> dict[str, Any]:
    """Read the stored result of `replay`.

    Raises:
        StoreError: the replay does not exist, or is not finished.
    """
    try:
        return json.loads((Location(store) / f"replays/{name}").read("comparison.json"))
    except NotFound:
        place = load_replay(store, name).location.uri
        raise StoreError(
            f"{place} was interrupted: it has no comparison.json. The same `roundhouse replay` resumes it."
        ) from None


def _recorded(original: Run, iteration: int, kind: StageKind) -> Reference:
    reference = original.stage(iteration, kind).reference()
    if reference is None:
        numbers = sorted(int(name) for name in (original.location / "iterations").names() if name.isdigit())
        recorded = [k for k in numbers if original.stage(k, kind).reference() is not None]
        raise StoreError(
            f"Run {original.run_id!r} has no complete stage {kind} of iteration {iteration}; recorded: "
            f"{', '.join(map(str, recorded)) or 'none'}."
        )
    return reference


def _substituted_rollouts(original: Run, numbers: Sequence[int], source: str | None) -> dict[int, Reference]:
    """By iteration, the collection that is validated instead of the recorded one."""
    if source is None:
        return {}
    if source.startswith("iteration:"):
        other = _recorded(original, int(source.removeprefix("iteration:")), StageKind.COLLECT)
        return dict.fromkeys(numbers, other)
    if "/" in source:
        stage = Stage(Location(source), kind=StageKind.COLLECT, run_id="", iteration=0)
        if (reference := stage.reference()) is None or reference.kind != StageKind.COLLECT:
            raise StoreError(f"--input rollouts={source}: no complete collection is there.")
        return dict.fromkeys(numbers, reference)
    return dict(rescored_inputs(original, source, numbers))


def _open(original: Run, config: RunConfig, request: dict[str, Any], name: str, base: int) -> Run:
    """The replay's place, made once."""
    location = Location(original.config.store) / f"replays/{name}"
    if (checkpoint := original.checkpoint(base).reference()) is None:
        raise no_such_version(original, base)
    parent = parent_at(checkpoint.uri)
    refuse_unloadable(parent, config)
    identity, created = create_identity(location, config, parent, replay=request)
    if not created and identity.get("replay") != request:
        theirs = identity.get("replay") or {}
        other = [key for key in request if theirs.get(key) != request[key]]
        raise StoreError(
            f"{location.uri} is another replay: {', '.join(other)} differ ({theirs.get(other[0])!r} there). Choose another "
            "--name, or leave it out."
        )
    return Run(
        location, config, identity["uid"], identity["created_at"], code_version(), parent, first_draw_of(identity)
    )


def _run_stage(
    run: Run,
    original: Run,
    k: int,
    kind: StageKind,
    recorded: Reference,
    made: Mapping[str, Reference],
    rollouts: Mapping[int, Reference],
    previous: Reference,
) -> Reference:
    """Run one stage again, unless it is complete."""
    inputs = read_manifest(recorded).inputs
    match kind:
        case StageKind.VALIDATE:
            size = vocabulary_size(run)
            if "dataset" in inputs and k not in rollouts:
                datasets, batch = batch_of(original, k)
                where = read_manifest(recorded).details.get("offline", {})
                return validate_groups(run, k, datasets[batch.dataset], batch.groups, size, where)
            collected = rollouts.get(k) or made.get(StageKind.COLLECT) or inputs["rollouts"]
            return validate_iteration(run, k, collected, size)
        case StageKind.TRAIN:
            sequences = made.get(StageKind.VALIDATE) or inputs["sequences"]
            return train_iteration(run, k, sequences, previous, checkpoint_cache(run.config))
        case StageKind.COLLECT:
            from roundhouse.stages.collect import collect_iteration
            from roundhouse.stages.refit import engine_at

            return collect_iteration(run, k, previous, engine_at(run, previous.policy_version))
        case _:
            from roundhouse.stages.evaluate import evaluate_version
            from roundhouse.stages.refit import engine_at

            return evaluate_version(run, k, engine_at(run, k))


def _base_of(original: Run, numbers: Sequence[int], wanted: Sequence[StageKind]) -> int:
    """The version that the replay starts from.

    Raises:
        ConfigError: sampling of several versions is asked for, which nothing here trains.
    """
    if StageKind.TRAIN in wanted:
        return numbers[0] - 1
    sampling = [kind for kind in wanted if kind in SAMPLING]
    if len(sampling) * len(numbers) > 1:
        raise ConfigError(
            f"--stage {' and '.join(sampling)} of {len(numbers)} iterations needs a version each: name one stage of one "
            "iteration, or add --stage train."
        )
    if not sampling:
        return original.first_version
    return numbers[0] - 1 if sampling == [StageKind.COLLECT] else numbers[0]
