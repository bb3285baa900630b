"""NexRL's parts in a loop of your own: worker threads, pool, weight-sync controller, validator, and their import names."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from roundhouse.errors import ConfigError, InfraError
from roundhouse.plugins.nexrl import (
    ActivityTracker,
    BaseDataLoader,
    BaseRolloutWorker,
    LLMServiceClient,
    MockDataLoader,
    SimpleRolloutWorker,
    TorchDataLoader,
    TrajectoryPool,
    Validator,
    WeightSyncController,
)
from tests.waiting import until


class Answers(BaseHTTPRequestHandler):
    """OpenAI's API, which fails each second request with 503."""

    seen: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
        fails = len(self.seen) % 2 == 0
        text = {"text": "four", "finish_reason": "stop"} if "prompt" in body else None
        message = {"message": {"role": "assistant", "content": "four"}, "finish_reason": "stop"}
        reply = json.dumps({"choices": [text or message]}).encode()
        self.send_response(503 if fails else 200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    seen: list[dict[str, Any]] = []
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Answers,), {"seen": seen}))
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}", seen
    http.shutdown()
    http.server_close()


class Worker(BaseRolloutWorker):
    def step(self, task: dict[str, Any]) -> str | None:
        result = self._llm_client.completion(task["prompt"], temperature=0.7)
        put = self._put_validate_trajectory if self._is_running_validate else self._put_trajectory
        return put({"task": task["prompt"], "response": result["response"], "reward": 1.0})


def test_worker_threads_lose_no_task_while_weights_are_exchanged(server: tuple[str, list[dict[str, Any]]]) -> None:
    url, seen = server
    config = {"inference_service": {"url": f"{url}/v1", "model_tag": "default", "api_key": "k", "max_retries": 30}}
    loader, pool = MockDataLoader(8), TrajectoryPool({"batch_size": 2})
    sent: list[str] = []
    controller = WeightSyncController({"type": "default", "sync_mode": "sync"}, sent.append)
    controller.set_module_references(dataloader=loader, trajectory_pool=pool)
    pool.set_module_references(loader, controller)
    tracker = ActivityTracker({})
    workers = [Worker(config) for _ in range(3)]
    with pytest.raises(ConfigError, match="call set_module_references"):
        workers[0].run()
    for number, worker in enumerate(workers):
        worker.set_module_references(pool, loader, controller, MockDataLoader(2), Validator({}))
        worker.set_activity_tracker(tracker)
        worker.set_module_name(f"worker-{number}")
        worker.run()
    taken: list[str] = []
    while len(taken) < 8:
        until(lambda: not pool.is_empty())
        if (batch := pool.get_batch()) is not None:
            taken += batch.values["task"]
            controller.train_worker_notify_weight_update("trainer", "default")
    for worker in workers:
        worker.stop()
    assert tracker.get_error_health_status()["status"] == "healthy"
    assert sorted(taken) == sorted(f"mock prompt {number}" for number in range(8))
    assert controller.get_rollout_model_version("default") == len(sent) > 0
    assert {request["path"] for request in seen} == {"/v1/completions"}
    assert {request["key"] for request in seen} == {"Bearer k"}


def test_a_chat_is_retried_and_a_refusal_is_not(server: tuple[str, list[dict[str, Any]]]) -> None:
    url, seen = server
    client = LLMServiceClient({"url": url, "model": "m", "max_retries": 1})
    for _ in range(2):
        answer = client.generate([{"role": "user", "content": "2+2?"}], temperature=0)
        assert (answer["response"], answer["finish_reason"], answer["temperature"]) == ("four", "stop", 0)
    assert [request["model"] for request in seen] == ["m"] * 3
    with pytest.raises(InfraError, match="503"):
        LLMServiceClient({"url": url}).generate([])
    with pytest.raises(ConfigError, match="url is unset"):
        LLMServiceClient({}).completion("x")


@pytest.mark.parametrize(
    ("mode", "threshold", "blocked"),
    [
        ("sync", 0, [True, True, True, True]),
        ("batch-async", 0, [True, True, True, True]),
        ("batch-async", 2, [False, False, True, False]),
        ("fully-async", 0, [False, False, False, False]),
    ],
)
def test_rollouts_wait_when_the_batch_would_make_their_weights_too_old(
    mode: str, threshold: int, blocked: list[bool]
) -> None:
    pool = TrajectoryPool()
    controller = WeightSyncController({"sync_mode": mode, "staleness_threshold": threshold})
    controller.set_module_references(None, pool)
    states = []
    for _ in blocked:
        controller.trajectory_pool_notify_batch_ready("m")
        states.append(controller.check_rollout_service_status("m") == "block")
        assert states[-1] == (pool.put_trajectory({"model_tag": "m"}) == "re-rollout")
        controller.train_worker_notify_weight_update("trainer", "m")
        assert controller.check_rollout_service_status("m") == "continue"
    assert states == blocked
    versions = {"sync": 4, "fully-async": 4, "batch-async": 3 if threshold else 4}
    assert controller.get_rollout_model_version("m") == versions[mode]


def test_a_validation_is_due_every_so_many_versions_and_rollouts_wait_for_it() -> None:
    controller = WeightSyncController({"sync_mode": "sync", "validate_freq": 2})
    waits = []
    for _ in range(4):
        controller.trajectory_pool_notify_batch_ready("m")
        controller.train_worker_notify_weight_update("trainer", "m")
        waits.append((controller.is_waiting_for_validation(), controller.check_rollout_service_status("m")))
        controller.end_validate("m")
    assert waits == [(False, "continue"), (True, "block")] * 2


def test_weights_that_could_not_be_sent_leave_the_rollouts_waiting() -> None:
    def send(model_tag: str) -> None:
        raise OSError("away")

    controller = WeightSyncController({"sync_mode": "sync"}, send)
    controller.trajectory_pool_notify_batch_ready("m")
    with pytest.raises(OSError, match="away"):
        controller.train_worker_notify_weight_update("trainer", "m")
    assert controller.check_rollout_service_status("m") == "block"
    assert controller.get_rollout_model_version("m") == 0
    for section, told in (({"sync_mode": "soon"}, "'soon'"), ({"sync_mod": "sync"}, "has no sync_mod")):
        with pytest.raises(ConfigError, match=told):
            WeightSyncController(section)


def test_a_validator_posts_the_means_of_all_scores_as_val() -> None:
    posted: list[Any] = []
    tracker = ActivityTracker(post=lambda backend, data: posted.append(data))
    tracker.set_training_step(5)
    validator, loader = Validator(), MockDataLoader(1, True)
    validator.set_activity_tracker(tracker)
    validator.set_module_references(loader)
    assert not validator.is_complete()
    loader.get_next_item()
    assert validator.is_complete()
    with pytest.raises(ConfigError, match="no trajectory was put"):
        validator.compute_and_log_metrics()
    for reward, exact in ((1.0, True), (0.0, False)):
        assert validator.put_trajectory({"reward": reward, "score": {"exact": exact, "text": "x"}}) == "success"
    assert validator.compute_and_log_metrics() == {"val/reward": 0.5, "val/exact": 0.5}
    assert posted == [{"data": {"val/reward": 0.5, "val/exact": 0.5}, "step": 5}]
    validator.clear()
    with pytest.raises(ConfigError):
        validator.compute_and_log_metrics()


def test_a_sink_has_an_evaluations_metrics_under_nexrls_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from roundhouse.plugins.nexrl import val_names

    logged: list[Any] = []

    class Page:
        def __init__(self, run: Any) -> None:
            logged.append(run)

        def log_iteration(self, iteration: int, metrics: dict[str, float]) -> None:
            logged.append((iteration, metrics))

    monkeypatch.setattr(val_names, "factory", lambda role, name: {("sink", "wandb"): Page}[role, name])
    sink = val_names.ValNames("run")
    sink.log_iteration(3, {"evaluation/reward/mean": 0.5, "train/loss": 1.0})
    assert sink.package == "wandb", "a run is refused without it"
    assert logged == ["run", (3, {"val/reward/mean": 0.5, "train/loss": 1.0})]


def test_an_async_step_is_refused_in_a_thread() -> None:
    worker = SimpleRolloutWorker({"url": "http://127.0.0.1:9"})
    worker.set_module_references(TrajectoryPool(), MockDataLoader(1))
    with pytest.raises(ConfigError, match="its step is async"):
        worker.run()
    with pytest.raises(ConfigError, match="the collector gives each worker its task"):
        BaseRolloutWorker(None).run()  # type: ignore[arg-type]


class Counting(BaseDataLoader):
    """As in NexRL's guide: without `load`, with all its own methods, and an item that arrives late."""

    def __init__(self, config: Any, is_validate: bool = False) -> None:
        super().__init__(config, is_validate)
        self.items = [{"prompt": f"{name} {config.suffix}"} for name in config.data_files]
        self.position, self.asked = 0, 0

    def __len__(self) -> int:
        return len(self.items) - self.position

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[self.position + index]

    def get_next_item(self) -> dict[str, Any] | None:
        self.position += 1
        return self.items[self.position - 1]

    def is_finished(self) -> bool:
        return self.position == len(self.items)

    def can_return_item(self) -> bool:
        self.asked += 1
        return self.asked % 2 == 0

    def reset(self) -> None:
        self.position = 0


def test_a_loader_with_nexrls_methods_alone_is_asked_item_by_item(monkeypatch: pytest.MonkeyPatch) -> None:
    from roundhouse.plugins.nexrl import client
    from roundhouse.plugins.nexrl.section import WorkerEnvironment

    def items(loader: str) -> list[str]:
        config = {"kind": "worker", "worker": "mock", "train_data": "a,b", "data_loader": loader}
        environment = WorkerEnvironment.model_validate(config | {"parameters": {"suffix": "x"}})
        found = client.items_of(environment, "a,b", "environment.train_data", is_validate=False)
        return [item["prompt"] for item in found]

    assert items(f"{__name__}:Counting") == ["a x", "b x"]
    with pytest.raises(ConfigError, match=r"data_loader is 'redis'; the loaders are file \(also torch\) and mock"):
        items("redis")
    monkeypatch.setattr(client, "LOADER_SECONDS", 0.05)
    monkeypatch.setattr(Counting, "can_return_item", lambda self: False)
    with pytest.raises(ConfigError, match=r"returned no item for 0.05 seconds after 0"):
        items(f"{__name__}:Counting")
    with pytest.warns(DeprecationWarning, match="is made with"):
        assert BaseDataLoader(True).is_validate


def test_nexrls_torch_loader_reads_all_files_of_its_section(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    files = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    loader = TorchDataLoader({"data_files": files, "rollout_repeat_n": 2}, is_validate=True)
    items = [loader.get_next_item() or {} for _ in range(4)]
    assert [(item["prompt"], item["task_id"], item["run_id"]) for item in items] == [
        ("a", "0", 0),
        ("a", "0", 1),
        ("b", "1", 0),
        ("b", "1", 1),
    ]
    assert loader.is_finished()
    assert loader.is_validate


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("nexrl", "NexRLController"),
        ("nexrl.llm_service_client", "LLMServiceClient"),
        ("nexrl.weight_sync.weight_sync_controller", "WeightSyncController"),
        ("nexrl.validator", "Validator"),
        ("nexrl.error_reporter", "ErrorReporter"),
        ("nexrl.error_reporter", "ErrorSeverity"),
        ("nexrl.error_reporter", "ErrorInfo"),
        ("nexrl.train_service_client", "TrainServiceClient"),
        ("nexrl.mock", "MockTrainServiceClient"),
        ("nexrl.controller", "MODULE_REGISTRY"),
        ("nexrl.utils.logging_utils", "set_logging_basic_config"),
        ("nexrl.trainer", "SelfHostedTrainer"),
        ("nexrl.trainer", "RemoteApiTrainer"),
        ("nexrl.nexrl_types", "Trajectory"),
        ("nexrl.nexrl_types", "ModelTag"),
        ("nexrl.base_module", "NexRLModule"),
        ("nexrl.activity_tracker", "ActivityTrackerProxy"),
        ("nexrl.ray_resource_manager", "RayResourceManager"),
        ("nexrl.rollout_worker", "BaseNexAURolloutWorker"),
    ],
)
def test_nexrls_names_are_imported_from_their_modules(module: str, name: str) -> None:
    import importlib

    import roundhouse.plugins.nexrl as ours

    assert getattr(importlib.import_module(module), name) is getattr(ours, name)


def test_a_name_that_nexrl_does_not_have_is_no_module() -> None:
    with pytest.raises(ImportError):
        exec("from nexrl import NoSuchWorker")
    with pytest.raises(ImportError):
        exec("import nexrl.no_such_module")


def test_the_controller_refuses_a_configuration_by_one_list_and_starts_a_run_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import subprocess

    import yaml

    from roundhouse.config.loading import load_config
    from roundhouse.plugins.nexrl import MODULE_REGISTRY, NexRLController, NexRLRole

    assert set(MODULE_REGISTRY[NexRLRole.TRAINER]) >= {
        "self_hosted_grpo",
        "remote_api_grpo",
        "remote_api_cross_entropy",
    }
    section = {"experiment_name": "e", "data": {"type": "mock"}, "trainer": {"total_train_steps": 2}}
    with pytest.raises(ConfigError, match=r"(?s)launch_mode.*logger\.backend"):
        NexRLController(section | {"launch_mode": "slurm", "logger": {"backend": "feishu"}})
    controller = NexRLController(section)
    seen: list[Any] = []

    class Program:
        def __init__(self, command: list[str]) -> None:
            seen.append((command[3], load_config(command[4]), yaml.safe_load(Path(command[4]).read_text())))

        def wait(self) -> int:
            return len(seen) - 1

    monkeypatch.setattr(subprocess, "Popen", Program)
    controller.run()
    assert (seen[0][0], seen[0][1]) == ("train", controller.config)
    with pytest.raises(InfraError, match="The run e ended with status 1"):
        controller.run()
