"""NexRL's trainers in a loop of your own: `train`, `run`, `stop`, and checkpoints `global_step_*`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundhouse.errors import ConfigError, DataError
from roundhouse.plugins.nexrl import ActivityTracker, NexRLRole, TrajectoryPool, WeightSyncController
from roundhouse.plugins.nexrl.controller import MODULE_REGISTRY, NexRLController, module_class
from roundhouse.plugins.nexrl.mock_service import MockTrainServiceClient
from roundhouse.plugins.nexrl.trainer_loop import find_latest_checkpoint
from roundhouse.plugins.nexrl.trainers import BaseTrainer, RemoteApiGrpoTrainer, SelfHostedGrpoTrainer
from tests.training.tiny import make_model, plain_model, records
from tests.waiting import until


def trajectories() -> list[dict[str, Any]]:
    names = {"token_ids": "tokens", "gen_logprobs": "logprobs"}
    return [{names.get(key, key): value for key, value in each.items()} for each in records()]


@pytest.fixture
def section(tmp_path: Path) -> dict[str, Any]:
    """NexRL's section `trainer`, as its controller hands it to a trainer."""
    actor = {"model": {"path": str(make_model(tmp_path / "model"))}, "optim": {"lr": 1e-3}}
    return {
        "type": "self_hosted_grpo",
        "total_train_steps": 2,
        "checkpoint_path": str(tmp_path / "checkpoints"),
        "sync_weight_path": str(tmp_path / "weights"),
        "save_freq": 1,
        "remove_previous_ckpt": False,
        "train_service": {"backend": "nextrainer", "model_tag": "default", "actor": actor},
        "resume": {"mode": "auto"},
    }


@pytest.mark.parametrize("kind", [SelfHostedGrpoTrainer, RemoteApiGrpoTrainer])
def test_train_takes_a_step_on_trajectories(section: dict[str, Any], tmp_path: Path, kind: type[BaseTrainer]) -> None:
    trainer = kind(section)
    metrics = trainer.train(trajectories())
    assert metrics["reward"] == pytest.approx(sum(each["reward"] for each in records()) / len(records()))
    assert metrics["grad_norm"] > 0
    before = plain_model(tmp_path / "model").state_dict()
    assert any((value != before[name]).any() for name, value in trainer.trainer.model.state_dict().items())
    with pytest.raises(DataError, match=r"Trajectory 0 of step 1 lacks logprobs, reward"):
        kind(section).train([{"tokens": [1, 2], "loss_mask": [0, 1]}])


def test_a_service_holder_gets_the_datums_of_the_prepared_trajectories() -> None:
    class Holder:
        def train(self, datums: Any, config: Any) -> dict[str, float]:
            self.datums = datums
            return {"loss": 0.5}

    trainer, holder = RemoteApiGrpoTrainer({"total_train_steps": 1}), Holder()
    trainer.set_service_holder(holder)
    rows = [
        {"tokens": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "logprobs": [0, 0, -1, -2], "reward": r, "group_id": "g"}
        for r in (0.0, 1.0)
    ]
    metrics = trainer.train(rows)
    assert (metrics["loss"], metrics["grpo/reward/mean"]) == (0.5, 0.5)
    last = holder.datums[1]
    assert (last["input_tokens"], last["target_tokens"]) == ([1, 2, 3], [2, 3, 4])
    assert (last["weights"], last["logprobs"]) == ([0, 1, 1], [0, -1, -2])
    assert last["advantages"] == pytest.approx([0, 2**-0.5, 2**-0.5])


def test_a_thread_trains_on_a_pools_batches_and_another_continues(section: dict[str, Any], tmp_path: Path) -> None:
    sent: list[int] = []
    trainer, pool = SelfHostedGrpoTrainer(section), TrajectoryPool({"batch_size": 16})
    controller = WeightSyncController({"sync_mode": "sync"}, lambda tag: sent.append(len(list(weights.iterdir()))))
    weights = tmp_path / "weights"
    with pytest.raises(ConfigError, match="call set_module_references before run"):
        trainer.run()
    controller.set_module_references(None, pool)
    pool.set_module_references(None, controller)
    trainer.set_module_references(pool, controller)
    trainer.set_activity_tracker(tracker := ActivityTracker({}))
    trainer.run()
    for step in (1, 2):
        for each in trajectories():
            until(lambda each=each: pool.put_trajectory(each) == "success")
        until(lambda step=step: controller.get_rollout_model_version("default") == step, seconds=60)
    trainer.stop()
    assert tracker.get_error_health_status()["status"] == "healthy"
    assert (trainer.get_train_step(), tracker.get_training_step(), pool.is_empty()) == (2, 2, True)
    assert len(sent) == 2
    assert min(sent) > 0, "the weights are complete before they are sent"
    folder = tmp_path / "checkpoints"
    assert sorted(each.name for each in folder.iterdir()) == ["global_step_1", "global_step_2"]
    assert NexRLController._find_latest_checkpoint(folder) == str(folder / "global_step_2")
    later = SelfHostedGrpoTrainer(section | {"remove_previous_ckpt": True, "total_train_steps": 3})
    later.set_module_references(pool, controller)
    later.run()
    assert later.get_train_step() == 2
    for each in trajectories():
        until(lambda each=each: pool.put_trajectory(each) == "success")
    until(lambda: later.get_train_step() == 3, seconds=60)
    later.stop()
    assert sorted(each.name for each in folder.iterdir()) == ["global_step_1", "global_step_3"]


def test_the_mock_service_trains_nothing_and_keeps_its_place(section: dict[str, Any], tmp_path: Path) -> None:
    mocked = {key: value for key, value in section.items() if key != "train_service"}
    mocked |= {"train_service": {"backend": "mock", "model_tag": "default"}}
    for step in (1, 2):
        trainer, pool = SelfHostedGrpoTrainer(mocked), TrajectoryPool({"batch_size": 16})
        trainer.set_module_references(pool)
        for each in trajectories():
            pool.put_trajectory(each)
        trainer.run()
        until(
            lambda trainer=trainer, step=step: (tmp_path / "checkpoints" / f"global_step_{step}" / "trainer").exists()
        )
        trainer.stop()
        assert trainer.get_train_step() == step
        assert isinstance(trainer.trainer.learner.service, MockTrainServiceClient)
        assert trainer.trainer.learner.service.steps >= step


def test_a_trainer_with_train_of_its_own_needs_no_model() -> None:
    class Mine(BaseTrainer):
        def train(self, trajectories: Any) -> dict[str, Any]:
            return {"custom/count": len(trajectories)}

    posted: list[Any] = []
    trainer, pool = Mine({"total_train_steps": 1}), TrajectoryPool({"batch_size": 2})
    trainer.set_module_references(pool)
    trainer.set_activity_tracker(ActivityTracker(post=lambda backend, post: posted.append(post)))
    for reward in (0.0, 1.0):
        pool.put_trajectory({"reward": reward})
    trainer.run()
    until(lambda: posted)
    trainer.stop()
    assert posted == [{"data": {"custom/count": 2}, "step": 1}]


def test_a_step_that_fails_is_reported_and_stops_the_thread(section: dict[str, Any]) -> None:
    trainer, pool = SelfHostedGrpoTrainer(section), TrajectoryPool()
    trainer.set_module_references(pool)
    trainer.set_activity_tracker(tracker := ActivityTracker({}))
    pool.put_trajectory({"prompt": "x"})
    trainer.run()
    until(lambda: tracker.get_error_health_status()["error_level_count"] == 1)
    trainer.stop()
    assert trainer.get_train_step() == 0


def test_a_type_is_a_class_of_the_registry_or_of_yours(tmp_path: Path) -> None:
    for role, types in MODULE_REGISTRY.items():
        for name, kind in types.items():
            assert module_class(role, {"type": name}) is kind
    (tmp_path / "mine.py").write_text("from nexrl import TrajectoryPool\nclass Mine(TrajectoryPool): pass\n")
    roles = (NexRLRole.TRAJECTORY_POOL, NexRLRole.WEIGHT_SYNC_CONTROLLER, NexRLRole.VALIDATOR)
    for role in roles:
        assert module_class(role, {"type": f"{tmp_path / 'mine.py'}:Mine"}).__name__ == "Mine"
        with pytest.raises(ConfigError, match=f"{role.value} has no type 'redis': set it to default, or"):
            module_class(role, {"type": "redis"})
    custom = {"custom_trainer_module_path": str(tmp_path / "mine.py"), "custom_trainer_class_name": "Mine"}
    assert module_class(NexRLRole.TRAINER, custom).__name__ == "Mine"


def test_the_latest_checkpoint_is_that_of_the_highest_step(tmp_path: Path) -> None:
    assert find_latest_checkpoint(tmp_path / "nowhere") is None
    for name in ("global_step_9", "global_step_10", "global_step_x", "step_11"):
        (tmp_path / name).mkdir()
    assert find_latest_checkpoint(tmp_path) == tmp_path / "global_step_10"
