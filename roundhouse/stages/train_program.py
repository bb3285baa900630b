"""A training step as a program that reads from the store and writes to it: a process of this machine, or a Job.

Invariant: a started step is found again by everything that it depends on, so that a killed run repeats nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundhouse.config.placement import trainer_launcher
from roundhouse.config.training import ProcessService
from roundhouse.errors import ConfigError
from roundhouse.launch.base import Program, open_launcher
from roundhouse.stages.base_models import critic_origin, reference_origin
from roundhouse.stages.validate import tolerance_of
from roundhouse.store.location import Location
from roundhouse.store.run import Run, state_of, trained_since_state
from roundhouse.store.stage import Reference, StageKind

if TYPE_CHECKING:
    import pyarrow as pa

    from roundhouse.training.service.one_shot import StepSpec, TrainStepResult

logger = logging.getLogger(__name__)


Say = Callable[[str], None]

STEP = "roundhouse.training.service.one_shot"


def run_step(
    run: Run, iteration: int, sequences: Reference, base: Reference, cache: Path, say: Say, attempt: str
) -> tuple[TrainStepResult, pa.Table]:
    """The step by a program that reads from the store and writes to it: a process of this machine, or a Job."""
    from roundhouse.training.service.one_shot import StepSpec, read_result

    config, began = run.config, time.monotonic()
    service: Any = config.train.service
    origin, since = trained_since_state(base)
    if since:
        raise ConfigError(
            f"train.service.kind is process, but version {base.policy_version} holds weights without the optimizer's state, "
            f"which version {origin.policy_version} has (checkpoint.optimizer_every). Continue with kind resident, which "
            f"trains {len(since)} iterations again, or fork from version {origin.policy_version}."
        )
    name = trainer_launcher(config)
    assert name is not None, "a process is started"
    with open_launcher(name, "train.service.launcher", run) as launcher, tempfile.TemporaryDirectory() as scratch:
        spec = StepSpec(
            iteration=iteration,
            seed=config.seed,
            temperature=config.generation.sampling.temperature,
            train=config.train,
            sequences=sequences,
            base=base,
            state=None if (state := state_of(base)) == base else state,
            reference=reference_origin(run, base.policy_version),
            critic=critic_origin(run),
            checkpoint=run.checkpoint(iteration).location.uri,
            attempt=attempt,
            recompute_tolerance=tolerance_of(config),
            report="",
            **launcher.caches(cache),  # type: ignore[arg-type]
        )
        jobs = run.stage(iteration, StageKind.TRAIN).location / "jobs"
        place, log_line = (Location(Path(scratch).as_uri()), logger.debug) if launcher.same_machine else (jobs, say)
        result, columns = read_result(launcher.run(step_program(spec, service, place), log_line, threading.Event()))
    figures = launcher.metrics()
    if figures:
        # pods, images, imports and the cluster itself; negative for a Job that was found finished
        figures["kubernetes_seconds"] = time.monotonic() - began - result.seconds["total"]
    return result.model_copy(update={"metrics": result.metrics | figures}), columns


def step_program(spec: StepSpec, service: ProcessService, place: Location) -> Program:
    """The step as a program, which is found again by all that it depends on."""
    fleeting = ("attempt", "report", "cache", "node_cache", "node_cache_bytes")
    tree = spec.model_dump(mode="json", exclude={**dict.fromkeys(fleeting, True), "train": {"service": True}})
    # sorted: a stored reference has its counts in another order than a new one
    depends = json.dumps(tree, sort_keys=True)
    return Program(
        what="The training step",
        module=STEP,
        spec=spec,
        place=place,
        place_field="report",
        stage="train",
        timeout_seconds=service.timeout_seconds,
        timeout_key="train.service.timeout_seconds",
        ranks=service.processes,
        iteration=spec.iteration,
        digest=hashlib.sha256(depends.encode()).hexdigest()[:32],
    )
