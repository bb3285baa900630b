"""Train: one GRPO step of an iteration, from its sequences and version k-1 to the files of version k.

The trainer stays in memory between iterations when it can (`_resident`); what it holds is then exactly what the input
checkpoint holds, told by the digest of its weights. A fresh process loads the checkpoint and goes on bit for bit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from roundhouse.stages.checkpoint import TRAINER, local_directory, upload_directory
from roundhouse.store.manifest import FileEntry, Reference
from roundhouse.store.run import Run
from roundhouse.store.stage import read_manifest, read_table

if TYPE_CHECKING:
    from roundhouse.training.trainer import Trainer

_resident: dict[tuple[str, int, str], Trainer] = {}
"""At most one trainer, by (run uid, policy version, digest of the weights)."""


def train_iteration(run: Run, iteration: int, sequences: Reference, base: Reference, cache: Path) -> Reference:
    """Train version `iteration` from `base` (version `iteration - 1`) on the validated sequences."""
    from roundhouse.training.batch import TrainingSequences

    stage = run.stage(iteration, "train")
    if (done := stage.reference()) is not None:
        return done
    attempt = run.begin(stage, policy_version=base.policy_version)
    batch = TrainingSequences.from_table(read_table(sequences, "sequences"))
    trainer = _trainer_at(run, base, cache)
    _resident.clear()  # a step that fails half-way must not leave its trainer behind
    report = trainer.step(batch, iteration)
    attempt.write_table("columns", report.columns)
    with tempfile.TemporaryDirectory() as directory:
        trainer.save(Path(directory))
        files = upload_directory(run.checkpoint(iteration).location, Path(directory))
    compute = report.seconds["total"]
    reference = attempt.commit(
        inputs={"sequences": sequences, "base": base},
        counts={"sequences": len(batch)},
        metrics={f"train/{name}": value for name, value in report.metrics.items()} | {"seconds/compute": compute},
        details={"checkpoint_files": [entry.model_dump() for entry in files]},
    )
    _resident[(run.uid, iteration, _weights_digest(files))] = trainer
    return reference


def _trainer_at(run: Run, base: Reference, cache: Path) -> Trainer:
    """The trainer that holds exactly what `base` holds: the resident one, or one loaded from it."""
    from roundhouse.training.trainer import Trainer

    key = (run.uid, base.policy_version, _weights_digest(read_manifest(base).files))
    if key in _resident:
        return _resident[key]
    model = local_directory(base, cache)
    reference_model = None
    if run.config.train.algorithm.kl_coefficient > 0:
        start = run.checkpoint(0).reference()
        assert start is not None, "a run that trains has its starting policy"
        reference_model = local_directory(start, cache)
    state = model / TRAINER
    return Trainer.load(
        model,
        run.config.train,
        trainer_state=state if state.is_dir() else None,
        reference_dir=reference_model,
        seed=run.config.seed,
        temperature=run.config.generation.sampling.temperature,
    )


def _weights_digest(files: list[FileEntry]) -> str:
    return "+".join(entry.sha256 for entry in files if entry.path.endswith(".safetensors") and "/" not in entry.path)
