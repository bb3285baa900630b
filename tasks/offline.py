"""Tasks of offline training: fix and judge the datasets, and take an iteration's batch of them."""

from __future__ import annotations

from roundhouse.stages import offline as stage
from roundhouse.stages.policy import checkpoint_cache
from roundhouse.stages.train import log_probs_under
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from tasks.options import stage_task


@stage_task(name="offline", task_run_name="datasets")
def prepare_offline(run: Run, base: Reference) -> Reference:
    cache = checkpoint_cache(run.config)
    return stage.prepare_offline(run, base, lambda batch: log_probs_under(run, base, batch, cache))


@stage_task(name="validate", task_run_name="validate {iteration}")
def validate_batch(run: Run, iteration: int) -> Reference:
    return stage.validate_batch(run, iteration)
