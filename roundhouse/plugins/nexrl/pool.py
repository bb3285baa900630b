"""NexRL's trajectory pool and batch, for a user's training loop that takes trajectories as they come.

Invariants: a trajectory is returned at most once, oldest first. A group is returned whole. Models (`model_tag`) share
nothing. While the weights of a model are exchanged, its new trajectories are answered "re-rollout" and not kept. A run
of Roundhouse records its groups by itself (`rollout.group_size`, `asynchrony`) and does not need this pool.

    pool = TrajectoryPool({"key_list": ["task_id"], "group_size": 8, "batch_size": 64})            # or by keywords
    pool.put_trajectory({"task_id": "7*4+1", "tokens": […], "loss_mask": […], "reward": 1.0})      # "success"
    while (batch := pool.get_batch()) is not None: …                                               # 64, in whole groups

    key_list []                     no grouping: each trajectory is finished at once
    key_list ["task_id"]            groups by one field, finished with group_size members
    key_list ["user", "session"]    groups within groups: the innermost are finished with group_size members

`read_trajectories` returns the sequences of a complete validate stage in this form.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from roundhouse.errors import ConfigError, DataError
from roundhouse.plugins.nexrl.modules import NexRLModule, execute, read_section
from roundhouse.store.location import Location
from roundhouse.store.stage import Stage, StageKind, read_table

log = logging.getLogger(__name__)
Trajectory = dict[str, Any]
ModelTag = str
BatchReady = Literal[
    "batch_size", "batch_size_reached", "loaded_batch_finished", "batch_size_reached_and_loaded_batch_finished"
]
"""When a batch may be taken: enough trajectories are finished, everything that was loaded for it has been put, or both. The
first is the older name of the second."""
DEFAULT_TAG = "default"
_RULES: dict[str, Callable[[bool, bool], bool]] = {
    "batch_size": lambda reached, ended: reached,
    "batch_size_reached": lambda reached, ended: reached,
    "loaded_batch_finished": lambda reached, ended: ended,
    "batch_size_reached_and_loaded_batch_finished": lambda reached, ended: reached and ended,
}


_DEFAULTS = {"key_list": (), "group_size": 1, "batch_size": 1, "check_batch_ready_function": "batch_size"}


class TrajectoryPool(NexRLModule):
    """A pool for each model tag, made when it is first named. Safe to use from any thread."""

    def __init__(self, config: Mapping[str, Any] | Sequence[str] = (), **keys: Any) -> None:
        """Make a pool.

        Args:
            config: `key_list`, `group_size`, `batch_size` and `check_batch_ready_function`, as in NexRL's section
                `trajectory_pool`; or the key_list alone.
            keys: the same as keyword arguments, which take precedence.

        Raises:
            ConfigError: the configuration has another key, a size is below 1, a batch does not hold whole groups, or a
                key_list or rule is invalid.
        """
        settings = dict(config) if isinstance(config, Mapping) else {"key_list": config}
        section = read_section({**settings, **keys}, _DEFAULTS, "TrajectoryPool")
        key_list, rule = section["key_list"], section["check_batch_ready_function"]
        group_size, batch_size = section["group_size"], section["batch_size"]
        if isinstance(key_list, str) or not all(isinstance(key, str) for key in key_list):
            raise ConfigError(
                f"TrajectoryPool: key_list is {key_list!r}. Give a list of names of fields, such as [task_id]."
            )
        if group_size < 1 or batch_size < 1 or (key_list and batch_size % group_size):
            raise ConfigError(
                f"batch_size is {batch_size} and group_size {group_size}: both are at least 1, and with a key_list a batch is "
                "whole groups. Set batch_size to a multiple of group_size."
            )
        if rule not in _RULES:
            raise ConfigError(f"check_batch_ready_function is {rule!r}. Rules: {', '.join(_RULES)}.")
        self._keys, self._group_size = tuple(key_list), group_size
        self._batch_size, self._rule = batch_size, _RULES[rule]
        self._instances: dict[str, _Instance] = {}
        self._lock = threading.Lock()
        self._controller: Any = None

    def set_module_references(
        self, dataloader: Any = None, weight_sync_controller: Any = None, activity_tracker: Any = None
    ) -> None:
        """Notify the controller of each batch that becomes ready."""
        self._controller = weight_sync_controller
        if activity_tracker is not None:
            self.set_activity_tracker(activity_tracker)

    def put_trajectory(self, trajectory: Trajectory) -> str:
        """Keep a trajectory and return "success"; "fail", and a warning, if it lacks a field of `key_list`; "re-rollout" while
        weights change."""
        tag = str(trajectory.get("model_tag") or DEFAULT_TAG)
        with self._lock:
            instance = self._instance(tag)
            if instance.locked:
                return "re-rollout"
            instance.ended += 1
            if missing := [key for key in self._keys if trajectory.get(key) is None]:
                log.warning("A trajectory without %s is not kept: key_list groups by it.", ", ".join(missing))
                return "fail"
            instance.add(trajectory, tuple(trajectory[key] for key in self._keys), self._group_size)
            is_new = bool(instance.finished) and self._rule(*instance.state(self._batch_size)) and not instance.notified
            instance.notified |= is_new
            instance.notifying = is_new or instance.notifying
        if is_new:
            try:
                self._notify(tag)
            finally:
                with self._lock:
                    instance.notifying = False
        return "success"

    def expect(self, count: int, model_tag: str = DEFAULT_TAG) -> None:
        """So many more trajectories were begun for the next batch (for `loaded_batch_finished`)."""
        with self._lock:
            self._instance(model_tag).loaded += count

    def get_batch(self, batch_size: int | None = None, model_tag: str | None = None) -> Batch | None:
        """Return the oldest finished trajectories of a model (None: of any), if the rule allows it; all of them if
        failures made a loaded batch shorter.

        Raises:
            ConfigError: with a key_list, `batch_size` is not a multiple of the group size.
        """
        size = batch_size or self._batch_size
        if self._keys and size % self._group_size:
            raise ConfigError(f"batch_size is {size}, no multiple of group_size ({self._group_size}).")
        with self._lock:
            for tag in list(self._instances) if model_tag is None else [model_tag]:
                instance = self._instances.get(tag)
                if instance is None or not instance.finished or instance.notifying:
                    continue
                if self._rule(*instance.state(size)):
                    is_known = instance.notified
                    batch = Batch.from_trajectories(instance.take(size), tag)
                    break
            else:
                return None
        if not is_known:  # it became ready together with an earlier batch
            self._notify(tag)
        return batch

    def get_batch_any(self, batch_size: int | None = None) -> Batch | None:
        """A batch of whichever model has one."""
        return self.get_batch(batch_size)

    def is_empty(self, model_tag: str | None = None) -> bool:
        """Return whether a model's pool, or all pools, are empty; an unknown model's pool is empty."""
        with self._lock:
            pools = self._instances.values() if model_tag is None else filter(None, [self._instances.get(model_tag)])
            return not any(instance.finished or instance.waiting for instance in pools)

    def get_model_tags(self) -> list[str]:
        """The models that have a pool, in the order in which they came."""
        with self._lock:
            return list(self._instances)

    def notify_weight_sync_starting(self, model_tag: str = DEFAULT_TAG) -> None:
        """Take nothing for this model until `unlock_for_weight_sync`."""
        with self._lock:
            self._instance(model_tag).locked = True

    def unlock_for_weight_sync(self, model_tag: str = DEFAULT_TAG) -> None:
        with self._lock:
            self._instance(model_tag).locked = False

    def _notify(self, model_tag: str) -> None:
        """Tell the controller of a ready batch; it locks the pool in this call."""
        if self._controller is not None:
            execute(self._controller.trajectory_pool_notify_batch_ready, model_tag)

    def _instance(self, model_tag: str) -> _Instance:
        return self._instances.setdefault(model_tag, _Instance())


TrajectoryPoolInstance = TrajectoryPool
"""NexRL's pool of one model: a pool that is given the trajectories of one `model_tag`."""


@dataclass(slots=True)
class _Instance:
    """The pool of one model."""

    finished: deque[Trajectory] = field(default_factory=deque)
    waiting: dict[tuple[Any, ...], list[Trajectory]] = field(default_factory=dict)
    """Members of groups that are not whole, by their path of keys."""
    locked: bool = False
    loaded: int = 0
    ended: int = 0
    """Number of loaded items that were put or have failed."""
    notified: bool = False
    """The controller knows of the batch that is ready, or is being told."""
    notifying: bool = False
    """The controller is being told. A batch taken now could be trained before its own notification, which would then lock the
    pool for good."""

    def add(self, trajectory: Trajectory, path: tuple[Any, ...], group_size: int) -> None:
        if not path:
            self.finished.append(trajectory)
            return
        group = self.waiting.setdefault(path, [])
        group.append(trajectory)
        if len(group) == group_size:
            self.finished.extend(self.waiting.pop(path))

    def state(self, size: int) -> tuple[bool, bool]:
        """Return whether enough are finished, and whether all loaded items have ended."""
        return len(self.finished) >= size, 0 < self.loaded <= self.ended

    def take(self, size: int) -> list[Trajectory]:
        self.notified = False
        batch = [self.finished.popleft() for _ in range(min(size, len(self.finished)))]
        if not self.finished:  # else the rest of a loaded batch would wait for the next one, which may never come
            self.loaded = self.ended = 0
        return batch


@dataclass
class Batch:
    """Trajectories as columns."""

    values: dict[str, Any]
    """A list or tensor by field, each as long as `metadata["batch_size"]`."""
    metadata: dict[str, Any]
    """`batch_size` and `model_tag`, and what else belongs to the whole."""

    def __post_init__(self) -> None:
        for name, column in self.values.items():
            if len(column) != len(self):
                raise DataError(f"Batch: {name} has {len(column)} entries, but metadata['batch_size'] is {len(self)}.")

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory], model_tag: str = DEFAULT_TAG) -> Batch:
        """Make a column for every field of any trajectory, with None for a missing value."""
        names = dict.fromkeys(name for trajectory in trajectories for name in trajectory)
        values = {name: [trajectory.get(name) for trajectory in trajectories] for name in names}
        return cls(values, {"batch_size": len(trajectories), "model_tag": model_tag})

    def __len__(self) -> int:
        return int(self.metadata["batch_size"])

    def copy(self) -> Batch:
        """A deep copy."""
        return copy.deepcopy(self)

    def to_dict(self) -> dict[str, Any]:
        """Values and metadata in one; metadata wins."""
        return {**self.values, **self.metadata}

    def pad_to_world_size(self, world_size: int) -> Batch:
        """Return the batch with its first rows repeated until `world_size` divides its size; `pad_size` counts them."""
        import torch

        size = len(self)
        places = [index % size for index in range(size + -size % world_size)] if size else []
        values = {
            name: column[places] if isinstance(column, torch.Tensor) else [column[place] for place in places]
            for name, column in self.values.items()
        }
        return Batch(values, {**self.metadata, "batch_size": len(places), "pad_size": len(places) - size})

    def to_nextrainer_batch(self) -> dict[str, Any]:
        """Tensors, other values and metadata apart."""
        tensors = {name: value for name, value in self.values.items() if hasattr(value, "shape")}
        others = {name: value for name, value in self.values.items() if name not in tensors}
        return {"batch": tensors, "non_tensor_batch": others, "meta_info": dict(self.metadata)}

    @staticmethod
    def remove_redundant_left_padding(
        data: Batch,
        pad_token_id: int,
        fields: Sequence[str],
        anchor_field: str = "input_ids",
        max_strip_threshold: int = -1,
    ) -> Batch:
        """A batch without the columns on the left that are padding in every row of `anchor_field`, a [B, T] tensor.

        Args:
            fields: the [B, T] values to be cut.
            max_strip_threshold: cut at most so many columns; -1: any number.
        """
        count = _common_padding(data.values[anchor_field], pad_token_id, max_strip_threshold, left=True)
        return _cut(data, fields, slice(count, None))

    @staticmethod
    def remove_redundant_right_padding(
        data: Batch,
        pad_token_id: int,
        fields: Sequence[str],
        anchor_field: str = "input_ids",
        max_strip_threshold: int = -1,
    ) -> Batch:
        """The same on the right."""
        count = _common_padding(data.values[anchor_field], pad_token_id, max_strip_threshold, left=False)
        return _cut(data, fields, slice(None, data.values[anchor_field].shape[1] - count))


def _common_padding(tokens_BT: Any, pad_token_id: int, most: int, *, left: bool) -> int:
    padding_T = (tokens_BT == pad_token_id).all(0).tolist()
    count = 0
    for is_padding in padding_T if left else reversed(padding_T):
        if not is_padding or count == most:
            break
        count += 1
    return count


def _cut(data: Batch, fields: Sequence[str], kept: slice) -> Batch:
    cut = {name: data.values[name][:, kept] for name in fields}
    return Batch({**data.values, **cut}, dict(data.metadata))


def read_trajectories(uri: str, model_tag: str = DEFAULT_TAG) -> Iterator[Trajectory]:
    """Read the training sequences of a complete validate stage, one trajectory each.

    Args:
        uri: such as `<store>/runs/<run>/iterations/000003/validate`.

    Raises:
        ConfigError: it is not a complete validate stage.
    """
    stage = Stage(Location(uri), kind=StageKind.VALIDATE, run_id="", iteration=0)
    if (reference := stage.reference()) is None:
        raise ConfigError(f"{uri} is not a complete validate stage. Name such a directory of a run.")
    for row in read_table(reference, "sequences").to_pylist():
        group, _, sample = str(row["rollout_id"]).rpartition("/")
        yield {
            "tokens": row["token_ids"],
            "loss_mask": row["loss_mask"],
            "logprobs": row["gen_logprobs"],
            "reward": row["reward"],
            "task_id": group,
            "group_id": row["group_id"],
            "run_id": int(sample),
            "finish_reason": "length" if row["truncated"] else "stop",
            "policy_version": row["policy_version"],
            "model_tag": model_tag,
        }
