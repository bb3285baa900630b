"""Write the metrics of a run to trackio."""

from __future__ import annotations

from collections.abc import Mapping

from roundhouse.store.run import Run
from roundhouse.tracking.sinks import RememberingSink


class TrackioSink(RememberingSink):
    """A run of trackio in the project `tracking.experiment`: `trackio show`. TRACKIO_DIR is the directory of its database."""

    package = "trackio"

    def __init__(self, run: Run) -> None:
        import trackio

        super().__init__(run)
        self._run = trackio.init(
            project=run.config.tracking.experiment,
            name=run.run_id,
            resume="allow",
            config=run.config.model_dump(mode="json"),
        )

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=iteration)

    def close(self) -> None:
        self._run.finish()
