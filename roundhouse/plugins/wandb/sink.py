"""Write the metrics of a run to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping

from roundhouse.store.run import Run
from roundhouse.tracking.sinks import RememberingSink, metrics_directory


class WandbSink(RememberingSink):
    """A run of Weights & Biases in the project `tracking.experiment`, under the run's uid and name.

    WANDB_MODE=offline writes to `<infra.state>/metrics/wandb` alone; `wandb sync` uploads it.
    """

    package = "wandb"

    def __init__(self, run: Run) -> None:
        import wandb

        super().__init__(run)
        self._run = wandb.init(
            project=run.config.tracking.experiment,
            id=run.uid,
            name=run.run_id,
            resume="allow",
            dir=str(metrics_directory(run)),
            config=run.config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True),
        )

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if iteration >= self._run.step:  # the server's count; offline it is 0
            self._run.log(dict(metrics), step=iteration)

    def close(self) -> None:
        self._run.finish()
