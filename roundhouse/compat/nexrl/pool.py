"""NexRL's trajectory pool and batch: for a training loop of your own that takes trajectories as they come.

Invariants: a trajectory is handed out at most once, oldest first; a group is handed out whole; models (`model_tag`) share
nothing; while the weights of a model are exchanged, what is put for it is answered "re-rollout" and not kept. A run of
Roundhouse has its own record of groups (`rollout.group_size`, `asynchrony`); this is for loops of your own.

    pool = TrajectoryPool(key_list=["task_id"], group_size=8, batch_size=64)
    pool.put_trajectory({"task_id": "7*4+1", "tokens": […], "loss_mask": […], "reward": 1.0})      # "success"
    while (batch := pool.get_batch()) is not None: …                                               # 64, in whole groups

    key_list []                     no grouping: each trajectory is finished at once
    key_list ["task_id"]            groups by one field, finished with group_size members
    key_list ["user", "session"]    groups within groups: the innermost are finished with group_size members

`read_trajectories` gives the sequences of a complete validate stage in this form.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from roundhouse.errors import ConfigError, DataError
from roundhouse.store.location import Location
from roundhouse.store.stage import Stage, StageKind, read_table

Trajectory = dict[str, Any]
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


class TrajectoryPool:
    """A pool for each model tag, made when it is first named. Safe to use from any thread."""

    def __init__(
        self,
        key_list: Sequence[str] = (),
        group_size: int = 1,
        batch_size: int = 1,
        check_batch_ready_function: BatchReady = "batch_size",
    ) -> None:
        """
        Raises:
            ConfigError: a size is below 1, a batch is no multiple of whole groups, or there is no such rule.
        """
        if group_size < 1 or batch_size < 1 or (key_list and batch_size % group_size):
            raise ConfigError(
                f"batch_size is {batch_size} and group_size {group_size}: both are at least 1, and with a key_list a batch is "
                "whole groups. Set batch_size to a multiple of group_size."
            )
        if check_batch_ready_function not in _RULES:
            raise ConfigError(
                f"check_batch_ready_function is {check_batch_ready_function!r}; there are {', '.join(_RULES)}."
            )
        self._keys, self._group_size = tuple(key_list), group_size
        self._batch_size, self._rule = batch_size, _RULES[check_batch_ready_function]
        self._instances: dict[str, _Instance] = {}
        self._lock = threading.Lock()

    def put_trajectory(self, trajectory: Trajectory) -> str:
        """Keep a trajectory: "success"; "fail" where it lacks a field of `key_list`; "re-rollout" while weights change."""
        with self._lock:
            instance = self._instance(str(trajectory.get("model_tag") or DEFAULT_TAG))
            if instance.locked:
                return "re-rollout"
            instance.ended += 1
            if any(trajectory.get(key) is None for key in self._keys):
                return "fail"
            instance.add(trajectory, tuple(trajectory[key] for key in self._keys), self._group_size)
            return "success"

    def expect(self, count: int, model_tag: str = DEFAULT_TAG) -> None:
        """So many more trajectories were begun for the next batch (for `loaded_batch_finished`)."""
        with self._lock:
            self._instance(model_tag).loaded += count

    def get_batch(self, batch_size: int | None = None, model_tag: str | None = None) -> Batch | None:
        """The oldest finished trajectories of a model (None: of any), if the rule allows; all of them where a loaded batch is
        short of what failed.

        Raises:
            ConfigError: with a key_list, `batch_size` is no multiple of the group size.
        """
        size = batch_size or self._batch_size
        if self._keys and size % self._group_size:
            raise ConfigError(f"batch_size is {size}, no multiple of group_size ({self._group_size}).")
        with self._lock:
            for tag in list(self._instances) if model_tag is None else [model_tag]:
                instance = self._instances.get(tag)
                if instance is not None and instance.finished and self._rule(*instance.state(size)):
                    return Batch.from_trajectories(instance.take(size), tag)
        return None

    def get_batch_any(self, batch_size: int | None = None) -> Batch | None:
        """A batch of whichever model has one."""
        return self.get_batch(batch_size)

    def is_empty(self, model_tag: str | None = None) -> bool:
        """Whether a model's pool, or all of them, hold nothing; one that was never named is empty."""
        with self._lock:
            found = self._instances.values() if model_tag is None else filter(None, [self._instances.get(model_tag)])
            return not any(instance.finished or instance.waiting for instance in found)

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

    def _instance(self, model_tag: str) -> _Instance:
        return self._instances.setdefault(model_tag, _Instance())


@dataclass(slots=True)
class _Instance:
    """The pool of one model."""

    finished: deque[Trajectory] = field(default_factory=deque)
    waiting: dict[tuple[Any, ...], list[Trajectory]] = field(default_factory=dict)
    """Members of groups that are not whole, by their path of keys."""
    locked: bool = False
    loaded: int = 0
    ended: int = 0
    """Of what was loaded, what has been put, or has failed."""

    def add(self, trajectory: Trajectory, path: tuple[Any, ...], group_size: int) -> None:
        if not path:
            self.finished.append(trajectory)
            return
        group = self.waiting.setdefault(path, [])
        group.append(trajectory)
        if len(group) == group_size:
            self.finished.extend(self.waiting.pop(path))

    def state(self, size: int) -> tuple[bool, bool]:
        """Whether enough are finished, and whether all that was loaded has ended."""
        return len(self.finished) >= size, 0 < self.loaded <= self.ended

    def take(self, size: int) -> list[Trajectory]:
        self.loaded = self.ended = 0
        return [self.finished.popleft() for _ in range(min(size, len(self.finished)))]


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
        """A column for every field that any trajectory has; None where one lacks it."""
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
    """The training sequences of a complete validate stage, one trajectory each.

    Args:
        uri: such as `<store>/runs/<run>/iterations/000003/validate`.

    Raises:
        ConfigError: it is none.
    """
    stage = Stage(Location(uri), kind=StageKind.VALIDATE, run_id="", iteration=0)
    if (reference := stage.reference()) is None:
        raise ConfigError(f"{uri} is no complete validate stage: name such a directory of a run.")
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
