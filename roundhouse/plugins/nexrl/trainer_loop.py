"""A NexRL trainer in a loop of your own: it trains on trajectories of a pool, in this process.

Invariant: a batch that is taken from the pool is trained on once; the weight-sync controller is notified after its step,
checkpoint and weights are complete.

    trainer = SelfHostedGrpoTrainer(config)                  NexRL's configuration, or its section trainer
    trainer.set_module_references(pool, controller)
    trainer.run()                                            until `stop`, or after trainer.total_train_steps
    metrics = trainer.train(trajectories)                    one step, without a pool

Checkpoints lie in `trainer.checkpoint_path/global_step_<step>`: a Hugging Face directory, and the optimizer under `trainer/`.
`trainer.sync_weight_path` has the newest weights.
"""

from __future__ import annotations

import functools
import logging
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, DataError
from roundhouse.plugins.nexrl.modules import NexRLModule, execute
from roundhouse.plugins.nexrl.pool import DEFAULT_TAG, Batch, Trajectory
from roundhouse.training.batch import TrainingSequences

if TYPE_CHECKING:
    from roundhouse.config.models import RunConfig
    from roundhouse.training.algorithms import Algorithm
    from roundhouse.training.service.verbs import TrainService
    from roundhouse.training.trainer import Trainer

log = logging.getLogger(__name__)
_FIELDS = ("tokens", "loss_mask", "logprobs", "reward")
_POLL_SECONDS = 0.05


class TrainerLoop(NexRLModule):
    """Thread, steps and checkpoints of a trainer. A subclass is an `Algorithm`, or overrides `train`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: lists the keys without a counterpart, or no model is named.
        """
        tree = _whole(config)
        self._is_mocked = _without_mock(tree)
        resolved: Any = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
        section = resolved["trainer"]
        self.run_config: RunConfig = parse_config({"experiment_name": "loop", **tree}, "the trainer's configuration")
        self._total_train_steps: int | None = section.get("total_train_steps")
        self._checkpoint_path, self._sync_weight_path = section.get("checkpoint_path"), section.get("sync_weight_path")
        self._save_freq = int(section.get("save_freq") or 0)
        self._remove_previous_ckpt = bool(section.get("remove_previous_ckpt"))
        self._train_step = 0
        self._identifier = DEFAULT_TAG
        self.trainer: Trainer | None = None
        self._stop_event = threading.Event()
        self._thread: threading.Thread | None = None
        self._pool: Any = None
        self._controller: Any = None

    def set_module_references(self, trajectory_pool: Any, weight_sync_controller: Any = None) -> None:
        """Train on this pool's batches, and notify the controller of every step."""
        self._pool, self._controller = trajectory_pool, weight_sync_controller

    def initialize_workers(self, service: TrainService | None = None) -> None:
        """Load the model, or with `resume` the latest or named checkpoint, into a train service; by default this process.

        Raises:
            ConfigError: no model is named, or it cannot be loaded.
        """
        from roundhouse.training.service.engine import TrainEngine
        from roundhouse.training.trainer import Trainer

        config = self.run_config
        start = getattr(config.policy, "path", None)
        if self._is_mocked and service is None:
            from roundhouse.plugins.nexrl.mock_service import MockTrainServiceClient

            service, start = MockTrainServiceClient(), "mock"
        if start is None:
            raise ConfigError("The trainer has no model: name it in service.train_service.actor.model.path.")
        checkpoint = self._resumed()
        algorithm, train = self.as_algorithm(), config.train
        self.trainer = Trainer.over(
            service or TrainEngine(train, temperature=config.generation.sampling.temperature),
            Path(checkpoint or start),
            train,
            trainer_state=None if checkpoint is None else checkpoint / "trainer",
            reference_dir=Path(start) if algorithm.needs_reference else None,
            seed=config.seed,
            algorithm=algorithm,
        )

    def as_algorithm(self) -> Algorithm:
        """Return the algorithm of a step: the trainer itself, if its class is one."""
        raise NotImplementedError(f"{type(self).__name__} defines no train")

    def train(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """Take one optimizer step on trajectories with `tokens`, `loss_mask`, `logprobs` and `reward`; return the metrics.

        Raises:
            DataError: a trajectory lacks a field, or does not fit the model.
        """
        if self.trainer is None:
            self.initialize_workers()
        assert self.trainer is not None
        sequences = TrainingSequences.from_records(_records(trajectories, self._train_step))
        return dict(self.trainer.step(sequences, self._train_step + 1).metrics)

    def run(self) -> None:
        """Train in a thread, until `stop` or `total_train_steps`.

        Raises:
            ConfigError: the pool is missing.
        """
        if self._pool is None:
            raise ConfigError(f"{type(self).__name__} has no trajectory pool: call set_module_references before run.")
        if self.trainer is None and type(self).train is TrainerLoop.train:
            self.initialize_workers()
        self._stop_event.clear()
        self._thread = threading.Thread(target=self._work, name=self._module_name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the step that is being taken."""
        self._stop_event.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def get_train_step(self) -> int:
        return self._train_step

    def set_train_step(self, step: int) -> None:
        self._train_step = step

    def _work(self) -> None:
        while not self._stop_event.is_set():
            batch: Batch | None = execute(self._pool.get_batch)
            if batch is None:
                self._stop_event.wait(_POLL_SECONDS)
                continue
            self._tracked(functools.partial(self._take_step, batch))
            if self._total_train_steps is not None and self._train_step >= self._total_train_steps:
                self._stop_event.set()

    def _tracked(self, work: Callable[[], None]) -> None:
        """Do the work; an error stops the loop, and is reported to the tracker or logged."""
        try:
            if self._activity_tracker is None:
                work()
            else:
                with self._activity_tracker.track(self._module_name, "training_step"):
                    work()
        except Exception:  # the boundary of the thread
            log.exception("%s stops: step %d failed", self._module_name, self._train_step + 1)
            self._stop_event.set()

    def _take_step(self, batch: Batch) -> None:
        rows = [dict(zip(batch.values, row, strict=True)) for row in zip(*batch.values.values(), strict=True)]
        metrics = self.train(rows)
        self._train_step += 1
        tracker = self._activity_tracker
        if tracker is not None:
            tracker.set_training_step(self._train_step)
            tracker.experiment_logger_post(backend="wandb", data=metrics, step=self._train_step)
        if self.trainer is not None:
            self._save(self.trainer)
        if self._controller is not None:
            execute(self._controller.train_worker_notify_weight_update, self._module_name, self._identifier)

    def _save(self, trainer: Trainer) -> None:
        service, cursor = trainer.learner.service, trainer.cursor
        if self._sync_weight_path:
            service.save_checkpoint(_empty(Path(self._sync_weight_path)), None)
        if not self._checkpoint_path or not self._save_freq or self._train_step % self._save_freq:
            return
        place = Path(self._checkpoint_path)
        previous = find_latest_checkpoint(place)
        service.save_checkpoint(_empty(place / f"global_step_{self._train_step}"), cursor)
        if previous is not None and self._remove_previous_ckpt:
            shutil.rmtree(previous)

    def _resumed(self) -> Path | None:
        """Return the checkpoint to continue from, and set the step to its number."""
        resume = self.run_config.resume
        if resume.mode == "disable":
            return None
        checkpoint = find_latest_checkpoint(self._checkpoint_path) if resume.path is None else Path(resume.path)
        if checkpoint is not None:
            if (step := step_of(checkpoint)) is None or not checkpoint.is_dir():
                raise ConfigError(f"resume.resume_path: {checkpoint} is not a directory global_step_<step>.")
            self.set_train_step(step)
        return checkpoint


def step_of(checkpoint: Path) -> int | None:
    """Return the step of a directory `global_step_<step>`; None if it has another name."""
    prefix, _, step = checkpoint.name.rpartition("_")
    return int(step) if prefix == "global_step" and step.isdecimal() else None


def find_latest_checkpoint(folder: str | Path | None) -> Path | None:
    """Return the directory `global_step_<step>` with the highest step; None if the folder does not contain one."""
    if folder is None or not Path(folder).is_dir():
        return None
    steps = {step: each for each in Path(folder).iterdir() if (step := step_of(each)) is not None and each.is_dir()}
    return steps[max(steps)] if steps else None


def _whole(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return NexRL's configuration around a section `trainer` that is given alone, with the sections inserted into it."""
    mapping: Any = config
    tree: Any = mapping if isinstance(mapping, dict) else OmegaConf.to_container(mapping, resolve=False)
    if "trainer" in tree:
        return dict(tree)
    beside = {key: tree[key] for key in ("algorithm", "service", "resume", "seed") if key in tree}
    if "train_service" in tree:
        beside["service"] = {**beside.get("service", {}), "train_service": tree["train_service"]}
    return {**beside, "trainer": {key: value for key, value in tree.items() if key not in (*beside, "train_service")}}


def _without_mock(tree: dict[str, Any]) -> bool:
    """Return whether the train service is `mock`, and remove it: a run does not use it."""
    service = (tree.get("service") or {}).get("train_service") or {}
    if service.get("backend") != "mock":
        return False
    tree["service"] = {**tree["service"], "train_service": {k: v for k, v in service.items() if k != "backend"}}
    return True


def _empty(directory: Path) -> Path:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    return directory


def _records(trajectories: Sequence[Trajectory], step: int) -> list[dict[str, Any]]:
    """Return trajectories as the records of training."""
    records = []
    for number, each in enumerate(trajectories):
        if missing := [name for name in _FIELDS if each.get(name) is None]:
            raise DataError(
                f"Trajectory {number} of step {step + 1} lacks {', '.join(missing)}. Let the worker put tokens, loss_mask, "
                "logprobs (one for each token) and reward."
            )
        group = next((each[name] for name in ("group_id", "uid", "task_id") if each.get(name) is not None), number)
        records.append(
            {
                "sequence_id": f"{step}/{number}",
                "rollout_id": f"{step}/{number}",
                "group_id": str(group),
                "token_ids": [int(token) for token in each["tokens"]],
                "loss_mask": [int(value) for value in each["loss_mask"]],
                "gen_logprobs": [float(value) for value in each["logprobs"]],
                "policy_version": int(each.get("policy_version") or 0),
                "reward": float(each["reward"]),
                "truncated": each.get("finish_reason") == "length",
            }
        )
    return records
