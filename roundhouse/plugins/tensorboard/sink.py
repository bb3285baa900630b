"""Write the metrics of a run as event files of TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping

from roundhouse.store.run import Run
from roundhouse.tracking.sinks import RememberingSink, metrics_directory


class TensorBoardSink(RememberingSink):
    """Event files in `<infra.state>/metrics/tensorboard/<run_id>`: `tensorboard --logdir .roundhouse/metrics/tensorboard`."""

    package = "tensorboard"

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(run)
        directory = metrics_directory(run) / "tensorboard" / run.run_id
        self._writer = SummaryWriter(str(directory), purge_step=self.next)  # hides a half-written iteration

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
