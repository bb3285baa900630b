"""Task: publish a version that is the one before, for an iteration that cannot be trained on."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact

from roundhouse.stages.skip import skip_iteration as skip_stage
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from roundhouse.store.skipped import Skip
from tasks.options import stage_task


@stage_task(name="skip", task_run_name="skip {iteration}")
def skip_iteration(run: Run, iteration: int, skip: Skip) -> Reference:
    published = skip_stage(run, iteration, skip)
    text = f"# Iteration {iteration} was skipped\n\n`{skip.code}` ({skip.kind}): {skip.reason}.\n\n```\n{skip.error}\n```\n"
    create_markdown_artifact(key=f"skipped-{iteration:06d}", markdown=text)
    return published
