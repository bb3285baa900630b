"""The stages as Prefect tasks: names, artifacts, and one call into the library each. Retries:
`roundhouse_tasks.options`.

A stage returns a reference to its manifest; Prefect shows and retries it, and the store alone decides whether it is
complete. The tasks of the generation loop import their modules (`roundhouse.stages.prefetch`) when they run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.states import Cancelled

from roundhouse.activity import announce
from roundhouse.stages import checkpoint as checkpoint_stage
from roundhouse.stages import collect as collect_stage
from roundhouse.stages import evaluate as evaluate_stage
from roundhouse.stages import hooks
from roundhouse.stages import offline as offline_stage
from roundhouse.stages import policy as policy_stage
from roundhouse.stages import promotion as promotion_stage
from roundhouse.stages import refit as refit_stage
from roundhouse.stages import train as train_stage
from roundhouse.stages import validate as validate_stage
from roundhouse.stages.datasets import TaskDraw
from roundhouse.store.directories import checkpoint_cache
from roundhouse.store.run import Run, Skip
from roundhouse.store.stage import Reference, StageKind, read_manifest
from roundhouse_tasks.options import STAGE, stage_task
from roundhouse_tasks.report import show_reported

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

    from roundhouse.collection.asynchronous.overlap import StepBatch
    from roundhouse.collection.runner import RolloutRunner


def _progress(stage: str, **about: Any) -> collect_stage.Progress:
    return lambda finished, planned: announce(stage, **about, finished=finished, planned=planned)


@stage_task(name="starting-policy", task_run_name="starting policy")
def starting_policy(run: Run) -> Reference:
    """Make or fetch version 0."""
    return policy_stage.starting_policy(run)


@stage_task(name="engine", task_run_name="start engine")
def start_engine(run: Run) -> None:
    """Ask for the engine, without waiting for it."""
    refit_stage.start_engine(run)


@stage_task(name="refit", task_run_name="refit to version {checkpoint.policy_version}")
def refit(run: Run, iteration: int, checkpoint: Reference) -> Reference:
    """Bring every replica of the engine to a version."""
    return refit_stage.refit_iteration(run, iteration, checkpoint)


@stage_task(name="refit-to", task_run_name="refit to version {checkpoint.policy_version}")
def refit_to(run: Run, checkpoint: Reference) -> None:
    """The same outside an iteration."""
    refit_stage.ensure_version(run, checkpoint)


@stage_task(name="collect", task_run_name="collect {iteration}")
def collect(run: Run, iteration: int, weights: Reference) -> Reference:
    if (reference := run.stage(iteration, StageKind.COLLECT).reference()) is not None:
        return reference  # no engine is asked for
    engine_url = refit_stage.engine_at(run, weights.policy_version)
    show_reported(run)
    return collect_stage.collect_iteration(
        run, iteration, weights, engine_url, _progress("collect", iteration=iteration)
    )


@stage_task(name="collect-dataset", task_run_name="collect {name}")
def collect_dataset(run: Run, name: str, draw: TaskDraw, checkpoint: Reference) -> Reference:
    engine_url = refit_stage.engine_at(run, checkpoint.policy_version)
    progress = _progress("collect", iteration=draw.iteration)
    return collect_stage.collect_dataset(run, name, draw, checkpoint, engine_url, progress)


@stage_task(name="validate", task_run_name="validate {iteration}")
def validate(run: Run, iteration: int, rollouts: Reference) -> Reference:
    """Prove the tokens of an iteration, and quarantine unproved rollouts."""
    return validate_stage.validate_iteration(run, iteration, rollouts, validate_stage.vocabulary_size(run))


@stage_task(name="own-stage", task_run_name="{target} {iteration}")
def own_stage(run: Run, iteration: int, target: str, key: str, reference: Reference) -> Reference:
    """Run a stage of the user (`stages.after_…`)."""
    return hooks.run_hook(run, iteration, target, key, reference)


@stage_task(name="train", task_run_name="train {iteration}")
def train_step(run: Run, iteration: int, sequences: Reference, base: Reference) -> Reference:
    say = get_run_logger().info  # a Job's log is the task's
    cache = checkpoint_cache(run.config)
    show_reported(run)
    return train_stage.train_iteration(run, iteration, sequences, base, cache, say)


@stage_task(name="checkpoint", task_run_name="checkpoint {update.iteration}")
def checkpoint(run: Run, update: Reference) -> Reference:
    """Publish the version that training made, and delete expired ones."""
    published = checkpoint_stage.publish(run, update)
    checkpoint_stage.retain(run, published.policy_version)
    return published


@stage_task(name="evaluate", task_run_name="evaluate version {checkpoint.policy_version}")
def evaluate(run: Run, checkpoint: Reference) -> Reference:
    """Evaluate a policy version on held-out tasks, then on each of `evaluation.sets`, unless complete."""
    reference = _evaluated(run, checkpoint.policy_version)
    for name in run.config.evaluation.sets:
        _evaluated(run, checkpoint.policy_version, name)
    return reference


def _evaluated(run: Run, version: int, name: str | None = None) -> Reference:
    if (earlier := run.stage(version, evaluate_stage.stage_of(name)).reference()) is not None:
        return earlier
    engine_url = refit_stage.engine_at(run, version)
    progress = _progress("evaluate", version=version)
    reference = evaluate_stage.evaluate_version(run, version, engine_url, progress, name)
    announce("evaluation", version=version, metrics=read_manifest(reference).metrics)
    return reference


@task(name="promote", task_run_name="promote version {version}?", **STAGE)
def promote(run: Run, version: int) -> Reference | None:
    """Decide whether an evaluated version becomes the promoted one."""
    return promotion_stage.promote(run, version)


@stage_task(name="skip", task_run_name="skip {iteration}")
def skip_iteration(run: Run, iteration: int, why: Skip) -> Reference:
    """Publish a version that is the one before, for an iteration that cannot be trained on."""
    published = checkpoint_stage.skip_iteration(run, iteration, why)
    text = f"# Iteration {iteration} was skipped\n\n`{why.code}` ({why.kind}): {why.reason}.\n\n```\n{why.error}\n```\n"
    create_markdown_artifact(key=f"skipped-{iteration:06d}", markdown=text)
    return published


# Offline training


@stage_task(name="offline", task_run_name="datasets")
def prepare_offline(run: Run, base: Reference) -> Reference:
    """Fix the datasets, and judge them."""
    cache = checkpoint_cache(run.config)
    return offline_stage.prepare_offline(run, base, lambda batch: train_stage.log_probs_under(run, base, batch, cache))


@stage_task(name="validate", task_run_name="validate {iteration}")
def validate_batch(run: Run, iteration: int) -> Reference:
    """Take an iteration's batch of the datasets."""
    return offline_stage.validate_batch(run, iteration)


# The generation loop of an asynchronous run


@stage_task(name="collect", task_run_name="collect {iteration}")
def prefetch_rollouts(run: Run, iteration: int, runner: RolloutRunner[Any, Any]) -> Reference | State[Any]:
    """The collect stage, ahead of the iteration's training; cancelled when the loop ends before."""
    return _prefetch(run, iteration, runner)


@stage_task(name="generate", task_run_name="generate {iteration}")
def generate_rollouts(run: Run, iteration: int, runner: RolloutRunner[Any, Any]) -> Reference | State[Any]:
    """Generate rollouts of an iteration; any step of the window may train on its groups."""
    return _prefetch(run, iteration, runner)


def _prefetch(run: Run, iteration: int, runner: RolloutRunner[Any, Any]) -> Reference | State[Any]:
    from roundhouse.stages import prefetch

    reference = prefetch.prefetch_rollouts(run, iteration, runner, _progress("collect", iteration=iteration))
    return reference or Cancelled(message="The loops were ended. What had finished is kept; the run resumes with it.")


@stage_task(name="collect", task_run_name="collect {iteration}")
def collect_chosen(run: Run, iteration: int, runner: RolloutRunner[Any, Any], batch: StepBatch) -> Reference:
    """Make the collect stage from generated rollouts."""
    from roundhouse.stages import prefetch

    return prefetch.collect_chosen(run, iteration, runner, batch)


@stage_task(name="refit", task_run_name="refit to version {checkpoint.policy_version}")
def transfer(run: Run, checkpoint: Reference) -> None:
    """Bring the engine to a version while rollouts run."""
    from roundhouse.stages import prefetch

    prefetch.transfer(run, checkpoint)
