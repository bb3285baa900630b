"""NexRL's weight-sync controller and validator, for training loops that users write.

Invariant of the controller: a model's rollouts wait exactly while its weights are exchanged. Let r be the version of
the rollout service and t the version of training. A batch that becomes ready is trained into t + 1, and the exchange
begins

    sync           always
    batch-async    if t + 1 - r is above staleness_threshold
    fully-async    never: each update is sent at once, and nothing waits

    running ── batch ready ──> need_sync ── weight update ──> syncing ── sent ──> running
                                                                           └─ every validate_freq versions: until
                                                                           end_validate
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from roundhouse.errors import ConfigError
from roundhouse.plugins.nexrl.modules import NexRLModule, execute, read_section

MODES = ("sync", "fully-async", "batch-async")
_DEFAULTS = {
    "sync_mode": "sync",
    "staleness_threshold": 0,
    "validate_freq": 0,
    "checkpoint_manager": None,
    "sync_method": None,
    "sync_weight_path": None,
    "inference_service": None,
}


@dataclass(slots=True)
class _Service:
    """The versions of one model."""

    state: Literal["running", "need_sync", "syncing"] = "running"
    rollout_version: int = 0
    train_version: int = 0
    is_validating: bool = False


class WeightSyncController(NexRLModule):
    """Decides when rollouts wait for weights, and when a validation is due. Safe to use from any thread."""

    def __init__(self, config: Mapping[str, Any], send: Callable[[str], None] = lambda model_tag: None) -> None:
        """
        Args:
            config: NexRL's section `weight`.
            send: carries a model's newest weights to the rollout service.

        Raises:
            ConfigError: a key or a mode is unknown, or a number is negative.
        """
        section = read_section(config, _DEFAULTS, "WeightSyncController")
        self._mode, self._threshold = section["sync_mode"], int(section["staleness_threshold"])
        self._frequency, self._send = int(section["validate_freq"]), send
        if self._mode not in MODES or min(self._threshold, self._frequency) < 0:
            raise ConfigError(
                f"WeightSyncController: sync_mode is {self._mode!r}, staleness_threshold {self._threshold} and validate_freq "
                f"{self._frequency}. Set the mode to {', '.join(MODES)}, and the numbers to 0 or more."
            )
        self._services: dict[str, _Service] = defaultdict(_Service)
        self._lock = threading.Lock()
        self._pool: Any = None

    def set_module_references(self, dataloader: Any = None, trajectory_pool: Any = None) -> None:
        """Lock and unlock this pool, here or as an actor of `RayResourceManager`."""
        self._pool = trajectory_pool

    def check_rollout_service_status(self, model_tag: str) -> Literal["continue", "block"]:
        """Return "block" while calls of the rollout service wait for weights."""
        with self._lock:
            return "continue" if self._services[model_tag].state == "running" else "block"

    def trajectory_pool_notify_batch_ready(self, model_tag: str) -> None:
        """Have rollouts wait, if the batch that is ready makes the rollout service's weights too old."""
        with self._lock:
            service = self._services[model_tag]
            age = service.train_version + 1 - service.rollout_version
            is_due = self._mode == "sync" or (self._mode == "batch-async" and age > self._threshold)
            if not is_due or service.state != "running":
                return
            service.state = "need_sync"
        if self._pool is not None:
            execute(self._pool.notify_weight_sync_starting, model_tag)

    def train_worker_notify_weight_update(self, worker_name: str, model_tag: str) -> None:
        """Count a new version, send it if it is due, and end the wait unless a validation is due."""
        with self._lock:
            service = self._services[model_tag]
            service.train_version += 1
            if service.state != "need_sync" and self._mode != "fully-async":
                return
            waits = service.state == "need_sync"
            service.state = "syncing" if waits else "running"
        self.sync_weight_to_rollout_service(model_tag)
        with self._lock:
            version = service.rollout_version
            service.is_validating = bool(self._frequency) and version % self._frequency == 0
            if service.is_validating or not waits:
                service.state = "syncing" if service.is_validating and waits else service.state
                return
        self._resume(model_tag)

    def sync_weight_to_rollout_service(self, model_tag: str) -> None:
        """Send a model's newest weights; an exception of `send` leaves its rollouts waiting."""
        with self._lock:
            version = self._services[model_tag].train_version
        self._send(model_tag)
        with self._lock:
            self._services[model_tag].rollout_version = version

    def get_rollout_model_version(self, model_tag: str) -> int:
        with self._lock:
            return self._services[model_tag].rollout_version

    def is_waiting_for_validation(self) -> bool:
        """Return whether a model's version waits for its validation."""
        with self._lock:
            return any(service.is_validating for service in self._services.values())

    def end_validate(self, model_tag: str) -> None:
        """End the wait for a validation."""
        with self._lock:
            self._services[model_tag].is_validating = False
        self._resume(model_tag)

    def _resume(self, model_tag: str) -> None:
        with self._lock:
            self._services[model_tag].state = "running"
        if self._pool is not None:
            execute(self._pool.unlock_for_weight_sync, model_tag)


class Validator(NexRLModule):
    """Trajectories of a validation, and the means of their scores."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        read_section(config or {}, {}, "Validator")
        self._trajectories: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._loader: Any = None

    def set_module_references(self, validate_dataloader: Any) -> None:
        self._loader = validate_dataloader

    def put_trajectory(self, trajectory: dict[str, Any]) -> str:
        """Keep a trajectory; return "success"."""
        with self._lock:
            self._trajectories.append(trajectory)
        return "success"

    def is_complete(self) -> bool:
        """Return whether the loader is finished and no rollout worker is at work."""
        idle = self._activity_tracker is None or self._activity_tracker.is_rollout_worker_quiescent()
        return self._loader is not None and bool(execute(self._loader.is_finished)) and bool(idle)

    def compute_and_log_metrics(self) -> dict[str, float]:
        """Return the means over the trajectories, with the prefix `val/`, and post them to the tracker's logger.

        A trajectory's scores are its `reward`, and the numbers of its `score` and `metrics`.

        Raises:
            ConfigError: no trajectory was put.
        """
        with self._lock:
            trajectories = list(self._trajectories)
        if not trajectories:
            raise ConfigError("Validator: no trajectory was put. Check the validation data loader (validate.data).")
        values: dict[str, list[float]] = defaultdict(list)
        for trajectory in trajectories:
            scores = {"reward": trajectory.get("reward"), **_numbers(trajectory.get("metrics"))}
            for name, value in {**scores, **_numbers(trajectory.get("score"))}.items():
                if isinstance(value, Real) and math.isfinite(value):
                    values[name].append(float(value))
        means = {f"val/{name}": sum(each) / len(each) for name, each in values.items()}
        tracker = self._activity_tracker
        if tracker is not None:
            tracker.experiment_logger_post(backend="wandb", data=means, step=tracker.get_training_step())
        return means

    def clear(self) -> None:
        """Drop all trajectories."""
        with self._lock:
            self._trajectories.clear()


def _numbers(scores: Any) -> dict[str, Any]:
    """Return the scores by name; a single number is `score`."""
    return dict(scores) if isinstance(scores, Mapping) else {} if scores is None else {"score": scores}
