"""One training step in a separate process: `python -m roundhouse.training.service.one_shot --spec spec.json`.

Invariant: the process depends only on its spec and the store objects that it names, and leaves its result in the store:
the checkpoint's files, then `columns.parquet`, and last `report.json`, which exists exactly if the step is whole. It
can run anywhere (next to the train stage, or as a Kubernetes Job), and a repetition writes the same files to another
place.

    torchrun --nproc-per-node 8 -m roundhouse.training.service.one_shot --spec spec.json     one model over eight ranks

Exit codes show whether repeating can help: 0 done; 65 a data error and 78 a configuration error (it cannot); 74 a store
error; 75 a failure of machines or networks (it can). `error.json` next to the report has the message.
"""

from __future__ import annotations

import argparse
import io
import logging
import sys
from datetime import timedelta
from pathlib import Path

from roundhouse.imports import gc_paused

with gc_paused():
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pydantic import BaseModel, ConfigDict, ValidationError

    from roundhouse.config.models import TrainConfig
    from roundhouse.errors import InfraError, RoundhouseError
    from roundhouse.health.policy import typed
    from roundhouse.logs import set_up_observability
    from roundhouse.store.directories import ModelSource, StoredModel, scratch_beside, upload_model
    from roundhouse.store.location import Location, NotFound
    from roundhouse.store.stage import ModelFiles, Reference, parse_parquet, read_table
    from roundhouse.training.batch import TrainingSequences
    from roundhouse.training.checkpoint import TRAINER_DIRECTORY
    from roundhouse.training.parallel import TIMEOUT, Ranks, join, leave
    from roundhouse.training.service.engine import TrainEngine
    from roundhouse.training.service.job_entry import REPORT, exit_code, read_spec, tell_error
    from roundhouse.training.trainer import Trainer
    from roundhouse.trajectories.schemas import tolerances
    from roundhouse.weight_sync.checkpoint_files import CheckpointCache

COLUMNS = "columns.parquet"


class StepSpec(BaseModel):
    """Everything a step depends on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 1
    iteration: int
    seed: int
    """The run's seed."""
    temperature: float
    """Sampling temperature of the sequences."""
    train: TrainConfig
    sequences: Reference
    """The validate stage, complete."""
    base: Reference
    """Checkpoint of the version before."""
    state: Reference | None = None
    """Stage that holds its trainer's state. Unset: the checkpoint holds it, or it does not exist."""
    reference: Reference | str | None = None
    """Model of the KL term: a checkpoint, or the URI of a model directory."""
    critic: str | None = None
    """URI of the model directory that a new critic begins from. Unset: the base's."""
    checkpoint: str
    """URI of the new version's directory; the files go to a new place there."""
    attempt: str
    """Name of the train stage's attempt, for that place."""
    report: str
    """URI of the directory for report, columns or error."""
    cache: str
    """Directory on this machine for downloads."""
    recompute_tolerance: float | None = None
    """`validation.recompute_tolerance`, if it applies to this step."""
    node_cache: str | None = None
    """Directory that the node's steps have in common, for checkpoints. Unset: each step fetches its own."""
    node_cache_bytes: int = 0
    """Size limit of unused checkpoints in it."""


class TrainStepResult(BaseModel):
    """`report.json`."""

    model_config = ConfigDict(extra="forbid")

    sequences: int
    updates: int
    metrics: dict[str, float]
    seconds: dict[str, float]
    tokens: dict[str, int]
    checkpoint: ModelFiles


def run_step(spec: StepSpec, ranks: Ranks) -> None:
    """Train and write the result; every rank calls it, the first one writes."""
    cache = Path(spec.cache)
    checkpoints = None if spec.node_cache is None else CheckpointCache(Path(spec.node_cache), spec.node_cache_bytes)
    batch = TrainingSequences.from_table(read_table(spec.sequences, "sequences"))
    engine = TrainEngine(spec.train, temperature=spec.temperature, ranks=ranks)
    model = _checkpoint(spec.base, cache, checkpoints)
    reference: ModelSource | None = None
    if isinstance(spec.reference, Reference):
        reference = _checkpoint(spec.reference, cache, checkpoints)
    elif spec.reference is not None:
        reference = StoredModel(uri=spec.reference, cache=cache)
    state = (model if spec.state is None else _checkpoint(spec.state, cache, checkpoints)) / TRAINER_DIRECTORY
    trainer = Trainer.over(
        engine,
        model,
        spec.train,
        trainer_state=state if state.is_dir() else None,
        reference_dir=reference,
        critic_dir=None if spec.critic is None else StoredModel(uri=spec.critic, cache=cache),
        seed=spec.seed,
    )
    judged = tolerances(batch.policy_versions, spec.base.policy_version, spec.recompute_tolerance)
    report = trainer.step(batch, spec.iteration, judged)
    place = Location(spec.checkpoint)
    with scratch_beside(place) as directory:
        trainer.save(directory)
        if ranks.leads:
            written = upload_model(place, spec.attempt, directory, move=checkpoints is None)
            if checkpoints is not None:
                checkpoints.keep(written.named(), directory)
            more = {} if checkpoints is None else {"fetched_bytes": float(checkpoints.fetched_bytes)}
            result = TrainStepResult(
                sequences=len(batch),
                updates=report.updates,
                metrics={**report.metrics, **more},
                seconds=report.seconds,
                tokens=report.tokens,
                checkpoint=written,
            )
            sink = io.BytesIO()
            pq.write_table(report.columns, sink, compression="zstd")
            location = Location(spec.report)
            location.write(COLUMNS, sink.getvalue())
            location.write(REPORT, result.model_dump_json(indent=1).encode())
    if checkpoints is not None:
        checkpoints.release()


def read_result(location: Location) -> tuple[TrainStepResult, pa.Table]:
    """Read the result of a finished process.

    Raises:
        InfraError: it left no report.
    """
    try:
        result = TrainStepResult.model_validate_json(location.read(REPORT))
        return result, parse_parquet(location.read(COLUMNS))
    except (NotFound, ValidationError) as error:
        raise InfraError(f"{location.uri} has no complete report of a training step: {error}") from error


def _checkpoint(reference: Reference, cache: Path, kept: CheckpointCache | None) -> ModelSource:
    return StoredModel.of(reference, cache) if kept is None else kept.checkpoint(reference, cache)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m roundhouse.training.service.one_shot")
    parser.add_argument("--spec", required=True, help="JSON file or its URI in the store; see StepSpec")
    options = parser.parse_args(arguments)
    set_up_observability()
    logging.basicConfig(level=logging.INFO)  # if ROUNDHOUSE_LOG is unset
    report: str | None = None
    try:
        spec = read_spec(StepSpec, options.spec, "training step")
        report = spec.report
        import torch

        device = "cuda" if spec.train.device != "cpu" and torch.cuda.is_available() else "cpu"
        # others wait in a collective for a rank that fetches a checkpoint; a hanging one is found before the step's
        # end
        whole = timedelta(seconds=getattr(spec.train.service, "timeout_seconds", 0.0))
        limit = max(TIMEOUT, whole / 2)
        run_step(spec, join(device, limit, **spec.train.parallelism))
    except Exception as error:  # ends the process
        known = typed(error)
        if not isinstance(known, RoundhouseError):
            raise
        tell_error(report, known)
        return exit_code(known)
    finally:
        leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
