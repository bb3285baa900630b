"""NexRL's pool and batch: stores by keys, model tags, locks, ready rules, padding, and the way from a run's store."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from roundhouse.errors import ConfigError, DataError
from roundhouse.plugins.nexrl import Batch, NexRLRole, TrajectoryPool, read_trajectories
from roundhouse.plugins.nexrl.resources import Registration, colocated_actor
from roundhouse.store.location import Location
from roundhouse.store.stage import Provenance, Stage
from roundhouse.trajectories.schemas import SEQUENCES
from tests.waiting import until


def names(batch: Batch | None) -> list[str]:
    assert batch is not None
    return list(batch.values["name"])


def put(pool: TrajectoryPool, *named: str, **fields: Any) -> None:
    for name in named:
        assert pool.put_trajectory({"name": name, **fields}) == "success"


def test_without_a_key_trajectories_come_out_as_they_came() -> None:
    pool = TrajectoryPool(batch_size=2)
    put(pool, "a", "b", "c")
    assert names(pool.get_batch()) == ["a", "b"]
    assert pool.get_batch() is None
    assert names(pool.get_batch(1)) == ["c"]
    assert pool.is_empty()


def test_one_key_releases_whole_groups_alone() -> None:
    pool = TrajectoryPool(["task"], group_size=2, batch_size=2)
    put(pool, "a0", task="a")
    put(pool, "b0", "b1", task="b")
    assert names(pool.get_batch()) == ["b0", "b1"]
    assert pool.get_batch() is None
    assert not pool.is_empty()
    put(pool, "a1", task="a")
    assert names(pool.get_batch()) == ["a0", "a1"]


def test_several_keys_keep_equal_names_under_different_parents_apart() -> None:
    pool = TrajectoryPool(["user", "session"], group_size=2, batch_size=2)
    put(pool, "u1", user="u", session=1)
    put(pool, "v1", user="v", session=1)
    assert pool.get_batch() is None
    put(pool, "u2", user="u", session=1)
    assert names(pool.get_batch()) == ["u1", "u2"]


def test_models_share_nothing() -> None:
    pool = TrajectoryPool(batch_size=2)
    put(pool, "a", "b", model_tag="large")
    put(pool, "c")
    assert pool.get_model_tags() == ["large", "default"]
    assert pool.get_batch(model_tag="default") is None
    assert pool.get_batch(model_tag="unknown") is None
    batch = pool.get_batch_any()
    assert (names(batch), batch.metadata["model_tag"]) == (["a", "b"], "large")  # type: ignore[union-attr]
    assert (pool.is_empty("large"), pool.is_empty("default"), pool.is_empty()) == (True, False, False)


def test_while_weights_are_exchanged_a_model_takes_nothing() -> None:
    pool = TrajectoryPool()
    pool.notify_weight_sync_starting()
    assert pool.put_trajectory({"name": "a"}) == "re-rollout"
    assert pool.put_trajectory({"name": "b", "model_tag": "other"}) == "success"
    pool.unlock_for_weight_sync()
    assert pool.put_trajectory({"name": "a"}) == "success"


class Controller:
    """Counts the notifications; the first one waits to be released."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.released = threading.Event()

    def trajectory_pool_notify_batch_ready(self, model_tag: str) -> None:
        self.told.append(model_tag)
        assert self.released.wait(60)


def test_a_batch_is_taken_only_after_its_notification() -> None:
    pool, controller = TrajectoryPool({"batch_size": 2}), Controller()
    pool.set_module_references(None, controller)
    put(pool, "a")
    thread = threading.Thread(target=put, args=(pool, "b"))
    thread.start()
    until(lambda: controller.told)
    put(pool, "c", "d")
    assert pool.get_batch() is None
    controller.released.set()
    thread.join()
    assert names(pool.get_batch()) == ["a", "b"]
    assert controller.told == ["default"]
    assert names(pool.get_batch()) == ["c", "d"]
    assert controller.told == ["default"] * 2


NEXRL_SECTION = {
    "type": "default",
    "key_list": ["task"],
    "group_size": 2,
    "batch_size": 4,
    "check_batch_ready_function": "loaded_batch_finished",
}


@pytest.mark.parametrize("rule", ["batch_size", "loaded_batch_finished"])
def test_every_trajectory_put_into_a_registered_pool_comes_out_once(rule: str) -> None:
    """As RayResourceManager creates it: the configuration's keys were taken for fields, and every put failed silently."""
    section = NEXRL_SECTION | {"check_batch_ready_function": rule}
    registered = Registration(NexRLRole.TRAJECTORY_POOL, TrajectoryPool, section, 1, "main")
    actor: Any = colocated_actor([registered])()
    pool = actor.objects[NexRLRole.TRAJECTORY_POOL]
    pool.expect(12)
    sent = [(task, sample) for sample in range(2) for task in "abcdef"]
    for task, sample in sent:
        assert actor.trajectory_pool_put_trajectory({"task": task, "name": (task, sample)}) == "success"
    received = []
    while (batch := actor.trajectory_pool_get_batch()) is not None:
        received += names(batch)
    assert (sorted(received), pool.is_empty()) == (sorted(sent), True)


def test_a_pool_names_every_key_that_it_does_not_have_and_what_it_drops(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"has no groups, size. Its keys: key_list, group_size"):
        TrajectoryPool({"key_list": [], "groups": 1, "size": 2})
    with pytest.raises(ConfigError, match=r"key_list is 'task'. Give a list"):
        TrajectoryPool("task")
    assert TrajectoryPool(["task", "user"]).put_trajectory({"user": 1}) == "fail"
    assert "A trajectory without task is not kept" in caplog.text


@pytest.mark.parametrize(
    ("rule", "loaded", "given", "taken"),
    [
        ("batch_size", 8, 4, 4),
        ("loaded_batch_finished", 8, 7, None),
        ("loaded_batch_finished", 3, 3, 3),
        ("batch_size_reached_and_loaded_batch_finished", 8, 7, None),
        ("batch_size_reached_and_loaded_batch_finished", 3, 3, None),
        ("batch_size_reached_and_loaded_batch_finished", 8, 8, 4),
    ],
)
def test_when_a_batch_may_be_taken(rule: Any, loaded: int, given: int, taken: int | None) -> None:
    pool = TrajectoryPool(batch_size=4, check_batch_ready_function=rule)
    pool.expect(loaded)
    put(pool, *map(str, range(given)))
    batch = pool.get_batch()
    assert (None if batch is None else len(batch)) == taken


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"key_list": ["task"], "group_size": 2, "batch_size": 3}, "multiple of group_size"),
        ({"group_size": 0}, "at least 1"),
        ({"check_batch_ready_function": "soon"}, "'soon'. Rules: batch_size"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrajectoryPool(**keys)


def test_a_copy_is_deep_metadata_wins_and_columns_have_one_length() -> None:
    batch = Batch.from_trajectories([{"tokens": [1], "model_tag": "own"}, {"tokens": [2], "reward": 1.0}])
    other = batch.copy()
    other.values["tokens"][0].append(9)
    assert batch.values["tokens"] == [[1], [2]]
    assert batch.values["reward"] == [None, 1.0]
    assert batch.to_dict()["model_tag"] == "default"
    with pytest.raises(DataError, match=r"tokens has 1 entries.*is 2"):
        Batch({"tokens": [1]}, {"batch_size": 2})


def test_tensors_and_other_values_are_told_apart() -> None:
    batch = Batch({"input_ids": torch.ones(2, 3), "names": ["a", "b"]}, {"batch_size": 2})
    found = batch.to_nextrainer_batch()
    assert (list(found["batch"]), list(found["non_tensor_batch"]), found["meta_info"]["batch_size"]) == (
        ["input_ids"],
        ["names"],
        2,
    )


@pytest.mark.parametrize(("most", "left", "right"), [(-1, 2, 1), (1, 1, 1), (0, 0, 0)])
def test_padding_that_every_row_has_is_cut_from_all_fields(most: int, left: int, right: int) -> None:
    tokens = torch.tensor([[0, 0, 0, 5, 6, 0], [0, 0, 7, 8, 0, 0]])
    batch = Batch({"input_ids": tokens, "mask": (tokens > 0).long(), "reward": [1.0, 0.0]}, {"batch_size": 2})
    fields = ["input_ids", "mask"]
    cut = Batch.remove_redundant_left_padding(batch, 0, fields, max_strip_threshold=most)
    assert cut.values["input_ids"].tolist() == tokens[:, left:].tolist()
    cut = Batch.remove_redundant_right_padding(cut, 0, fields, max_strip_threshold=most)
    assert cut.values["mask"].tolist() == (tokens > 0).long()[:, left : 6 - right].tolist()
    assert cut.values["reward"] == [1.0, 0.0]
    assert batch.values["input_ids"].shape == (2, 6), "the given one is as it was"


def test_the_sequences_of_a_run_go_through_a_pool_in_groups(tmp_path: Path) -> None:
    rows = [
        {
            "sequence_id": f"g{group}/{sample}/0",
            "rollout_id": f"g{group}/{sample}",
            "group_id": f"g{group}",
            "token_ids": [1, 2],
            "loss_mask": [0, 1],
            "gen_logprobs": [0.0, -1.0],
            "policy_version": 3,
            "reward": float(sample),
            "truncated": sample == 1,
        }
        for group in range(2)
        for sample in range(2)
    ]
    stage = Stage(Location(str(tmp_path)), kind="validate", run_id="r", iteration=3)
    attempt = stage.begin(Provenance(policy_version=3, config_digest="", code_version="", seed=0))
    attempt.write_table("sequences", pa.Table.from_pylist(rows, schema=SEQUENCES))
    attempt.commit()
    pool = TrajectoryPool(["group_id"], group_size=2, batch_size=2)
    for trajectory in read_trajectories(str(tmp_path)):
        assert pool.put_trajectory(trajectory) == "success"
    first = pool.get_batch()
    assert first is not None
    assert (first.values["group_id"], first.values["run_id"]) == (["g0", "g0"], [0, 1])
    assert first.values["finish_reason"] == ["stop", "length"]
    with pytest.raises(ConfigError, match="not a complete validate stage"):
        next(read_trajectories(str(tmp_path / "elsewhere")))


def test_a_batch_is_padded_to_the_world_size_by_its_first_rows() -> None:
    batch = Batch({"ids": torch.tensor([[1], [2], [3]]), "name": ["a", "b", "c"]}, {"batch_size": 3})
    padded = batch.pad_to_world_size(world_size=4)
    assert (padded.values["ids"].flatten().tolist(), padded.values["name"]) == ([1, 2, 3, 1], ["a", "b", "c", "a"])
    assert (len(padded), padded.metadata["pad_size"], len(padded.pad_to_world_size(2))) == (4, 1, 4)
