"""Task: evaluate a policy version on held-out tasks."""

from __future__ import annotations

from prefect import task

from roundhouse.progress import announce
from roundhouse.stages.evaluate import evaluate_version
from roundhouse.stages.promotion import promote as promote_version
from roundhouse.stages.refit import engine_at
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind, read_manifest
from tasks.options import STAGE, stage_task


@stage_task(name="evaluate", task_run_name="evaluate version {checkpoint.policy_version}")
def evaluate(run: Run, checkpoint: Reference) -> Reference:
    version = checkpoint.policy_version
    if (done := run.stage(version, StageKind.EVALUATE).reference()) is not None:
        return done
    engine_url = engine_at(run, version)

    def progress(finished: int, planned: int) -> None:
        announce("evaluate", version=version, finished=finished, planned=planned)

    reference = evaluate_version(run, version, engine_url, progress)
    announce("evaluation", version=version, metrics=read_manifest(reference).metrics)
    return reference


@task(name="promote", task_run_name="promote version {version}?", **STAGE)
def promote(run: Run, version: int) -> Reference | None:
    """Decide whether an evaluated version becomes the promoted one."""
    return promote_version(run, version)
