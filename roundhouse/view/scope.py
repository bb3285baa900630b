"""What is looked at: the rollouts of one stage of one iteration, or of all iterations of a run. A collected dataset stands for
a run (`dataset_versions`), its versions for iterations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from roundhouse.errors import RoundhouseError, StoreError
from roundhouse.view.dataset_versions import is_dataset

ROLLOUT_STAGES = ("collect", "evaluate")
"""Stages that hold rollouts. What was collected goes on to validate and train; what was evaluated does not."""


class ViewError(RoundhouseError):
    """A request that cannot be answered; the text says what there is instead."""


class Missing(ViewError, StoreError):
    """The store has no such run, dataset, version or iteration."""


@dataclass(frozen=True, slots=True)
class Scope:
    """One stage of an iteration, or of all of them."""

    run_id: str
    iteration: int | None
    """None: all iterations of the run."""
    stage: Literal["collect", "evaluate"]

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages whose datasets say something about these rollouts. A dataset is only collected."""
        if is_dataset(self.run_id):
            return ("collect",)
        return ("collect", "validate", "train") if self.stage == "collect" else ("evaluate",)

    @classmethod
    def of(cls, parameters: Mapping[str, str], prefix: str = "") -> Scope:
        """From the parameters of a request: `run`, `iteration` (a number or `all`) and `stage`.

        Raises:
            ViewError: one is missing or impossible.
        """
        run_id = parameters.get(f"{prefix}run", "")
        if not run_id:
            raise ViewError(f"{prefix}run is missing: name a run.")
        stage = parameters.get(f"{prefix}stage", "collect")
        if stage not in ROLLOUT_STAGES:
            raise ViewError(f"{prefix}stage={stage!r} holds no rollouts: {' or '.join(ROLLOUT_STAGES)}.")
        if is_dataset(run_id) and stage != "collect":
            raise ViewError(f"{prefix}stage={stage}: a dataset has no evaluations. Leave it out.")
        iteration = parameters.get(f"{prefix}iteration", "all")
        if iteration != "all" and not iteration.isdecimal():
            raise ViewError(f"{prefix}iteration={iteration!r} is neither a number nor 'all'.")
        return cls(
            run_id, None if iteration == "all" else int(iteration), "evaluate" if stage == "evaluate" else "collect"
        )
