"""NexRL's configuration: read in the keys of this system, or refused by one list."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from roundhouse.config.loading import load_config, parse_config
from roundhouse.errors import ConfigError

RECIPE = Path(__file__).parent / "foreign" / "nexrl_recipe.yaml"
GUIDE: dict[str, Any] = {
    "launch_mode": "local",
    "project_name": "p",
    "experiment_name": "e",
    "data": {"type": "mock", "seed": 3},
    "rollout_worker": {"type": "simple", "num_workers": 4},
    "trajectory_pool": {"type": "default", "batch_size": 16, "group_size": 4, "key_list": ["group_id"]},
    "trainer": {"type": "self_hosted_grpo", "total_train_steps": 5},
    "weight": {"type": "default", "sync_mode": "sync", "staleness_threshold": 0},
    "validate": {"validate_before_train": False, "eval": {"type": "default"}},
    "resume": {"mode": "disable"},
}


def value_at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run_id", "quiz-training-1"),
        ("tracking.experiment", "NexRL-Quiz"),
        ("tracking.sinks", ("mlflow", "roundhouse.plugins.nexrl.val_names:ValNames")),
        ("train.service.kind", "ray"),
        ("rollout.distribution.launcher", "ray"),
        ("resume.path", "/ckpt/runs/a/checkpoints/000003"),
        ("seed", 5),
        ("environment.train_data", "/data/a.parquet,/data/b.parquet"),
        ("environment.heldout_data", "/data/test.parquet"),
        ("environment.worker", "agent_workspace/my_worker.py:MyWorker"),
        ("environment.evaluator", "agent_workspace/evaluator.py:Exact"),
        ("environment.workspace", "agent_workspace"),
        ("environment.parameters.nexau_agent_config_path", "agent_workspace/agent.yaml"),
        ("environment.parameters.task_name", "quiz"),
        ("environment.max_retries", 3),
        ("rollout.prompts_per_iteration", 4),
        ("rollout.group_size", 8),
        ("rollout.shuffle", False),
        ("rollout.drop_last", True),
        ("rollout.max_prompt_tokens", 100),
        ("rollout.concurrency", 12),
        ("generation.backend", "vllm"),
        ("generation.max_model_len", 512),
        ("generation.sampling.max_new_tokens", 64),
        ("generation.sampling.temperature", 0.7),
        ("generation.weight_sync", "store"),
        ("generation.replicas", 2),
        ("policy.path", "/models/small"),
        ("asynchrony.mode", "batch-async"),
        ("asynchrony.staleness", 2),
        ("iterations", 9),
        ("store", "/ckpt"),
        ("checkpoint.optimizer_every", 3),
        ("checkpoint.keep_last", 1),
        ("train.algorithm.kind", "grpo"),
        ("train.algorithm.kl_placement", "reward"),
        ("train.algorithm.kl_coefficient", 0.01),
        ("train.algorithm.adaptive_kl.horizon", 500),
        ("train.algorithm.clip_high", 0.3),
        ("train.optimizer.learning_rate", 2e-6),
        ("train.optimizer.max_grad_norm", 0.5),
        ("train.minibatches", 2),
        ("train.epochs", 2),
        ("train.service.processes", 2),
        ("evaluation.every", 4),
        ("evaluation.before_training", True),
        ("failures.policy", "stop_on_critical"),
        ("failures.heartbeat_seconds", 20),
    ],
)
def test_a_recipe_of_nexrl_is_read_in_the_keys_of_this_system(key: str, value: Any) -> None:
    assert value_at(_recipe(), key) == value


def _recipe() -> Any:
    return load_config(RECIPE)


def test_the_guides_minimal_configuration_is_a_run_of_made_up_items() -> None:
    config = parse_config(copy.deepcopy(GUIDE))
    assert (config.environment.kind, config.environment.worker, config.environment.data_loader) == (
        "worker",
        "simple",
        "mock",
    )
    assert (config.rollout.prompts_per_iteration, config.rollout.group_size) == (4, 4)
    assert (config.asynchrony.mode, config.train.algorithm.kind, config.iterations) == ("sync", "grpo", 5)


def test_batch_async_without_a_threshold_is_the_sync_that_it_is_in_nexrl() -> None:
    tree = copy.deepcopy(GUIDE) | {"weight": {"sync_mode": "batch-async", "staleness_threshold": 0}}
    asynchrony = parse_config(tree).asynchrony
    assert (asynchrony.mode, asynchrony.staleness) == ("batch-async", 0)


def test_a_trainer_of_your_own_is_named_as_a_worker_is(tmp_path: Path) -> None:
    (tmp_path / "my_trainer.py").write_text("")
    own = {
        "type": "self_hosted_grpo",
        "custom_trainer_module_path": "my_trainer.py",
        "custom_trainer_class_name": "Mine",
    }
    config: Any = parse_config(copy.deepcopy(GUIDE) | {"trainer": own}, str(tmp_path / "run.yaml"))
    assert config.train.algorithm.target == f"{tmp_path / 'my_trainer.py'}:Mine"


def test_global_step_is_the_version_of_a_run_or_the_weights_of_another_program(tmp_path: Path) -> None:
    tree = copy.deepcopy(GUIDE) | {
        "resume": {"mode": "from_path", "resume_path": "s3://b/runs/a/checkpoints/global_step_12"}
    }
    assert parse_config(tree).resume.path == "s3://b/runs/a/checkpoints/000012"
    tree["resume"]["resume_path"] = str(tmp_path / "global_step_12")
    tree["service"] = {"inference_service": {"model_path": "/models/start"}}
    with pytest.raises(
        ConfigError, match=r"resume_path: .*global_step_12\n.*Name a checkpoint of a run, or global_step_12"
    ):
        parse_config(tree)
    model = tmp_path / "global_step_12" / "actor" / "huggingface"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    config: Any = parse_config(tree)
    assert (config.policy.kind, config.policy.path, config.resume.mode) == ("pretrained", str(model), "auto")


def test_errors_that_are_not_monitored_end_no_run() -> None:
    monitor = {"exception_handling": {"enabled": False, "policy": "stop_on_error"}}
    assert parse_config(copy.deepcopy(GUIDE) | {"runtime_monitor": monitor}).failures.policy == "continue"


def test_all_keys_without_a_counterpart_are_in_one_list_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    tree = copy.deepcopy(GUIDE) | {"logger": {"backend": "feishu"}, "launch_mode": "slurm", "algorithm": {"gamma": 0.9}}
    tree["data"] |= {"type": "redis", "api_key": "hush"}
    tree["rollout_worker"]["type"] = "single_turn_math"
    tree["trajectory_pool"] |= {"key_list": ["user"], "batch_size": 17}
    tree["trainer"]["type"] = "mine"
    tree["weight"] |= {"sync_mode": "fully-async"}
    tree["service"] = {"weaver_service": {"url": "http://w"}, "inference_service": {"model_tag": "second"}}
    with pytest.raises(ConfigError) as refused:
        parse_config(tree, "mine.yaml")
    text = str(refused.value)
    assert text.startswith("mine.yaml is a configuration of NexRL, with keys to change first:")
    for part in (
        "logger.backend: feishu",
        "tracking.sinks",
        "launch_mode: slurm",
        "Set it to local or ray",
        "algorithm.gamma: 0.9",
        "data.type: redis",
        "path/to/file.py:Class",
        "data.api_key: ****",
        "rollout_worker.type: single_turn_math",
        "Set it to simple, and environment.evaluator",
        "trajectory_pool.key_list: ",
        "trajectory_pool.batch_size: 17",
        "trainer.type: mine",
        "weight.staleness_threshold: 0",
        "1 or more",
        "service.weaver_service.url: http://w",
        "service.inference_service.model_tag: second",
    ):
        assert part in text, part
    assert "hush" not in text


def test_files_that_a_recipe_names_in_defaults_are_below_it(tmp_path: Path) -> None:
    (tmp_path / "common.yaml").write_text(yaml.safe_dump(GUIDE))
    (tmp_path / "agent_workspace").mkdir()
    (tmp_path / "agent_workspace" / "evaluator.py").write_text("")
    own = {
        "defaults": ["common", "_self_"],
        "trainer": {"total_train_steps": 6},
        "rollout_worker": {"evaluator_module_path": "agent_workspace/evaluator.py:Exact"},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(own))
    config: Any = load_config(tmp_path / "mine.yaml", ["rollout.timeout_seconds=9"])
    assert (config.iterations, config.seed, config.rollout.timeout_seconds) == (6, 3, 9)
    assert config.environment.evaluator == f"{tmp_path / 'agent_workspace' / 'evaluator.py'}:Exact"


@pytest.mark.parametrize(
    ("service", "generation", "train"),
    [
        (
            {"backend": "sglang", "url": "http://s:1/v1", "model": "m", "api_key": "${oc.env:SGLANG_API_KEY}"},
            {"backend": "openai", "kind": "sglang", "api_key_variable": "SGLANG_API_KEY", "weight_update": "sglang"},
            "resident",
        ),
        (
            {"backend": "vllm", "base_url": "http://s:1", "model": "m"},
            {"backend": "openai", "url": "http://s:1", "kind": "tokens", "weight_update": "vllm"},
            "resident",
        ),
        ({"backend": "tinker", "model": "Qwen/Qwen3-8B"}, {"backend": "tinker"}, "tinker"),
    ],
)
def test_an_inference_service_is_the_engine(service: Any, generation: Any, train: str) -> None:
    tree = copy.deepcopy(GUIDE) | {"service": {"inference_service": service}}
    tree["policy"] = {"kind": "pretrained", "path": "/models/small"}
    config: Any = parse_config(tree)
    endpoint = config.generation.endpoint.model_dump() if config.generation.endpoint else {}
    assert {
        "backend": config.generation.backend,
        **{k: endpoint[k] for k in generation if k != "backend"},
    } == generation
    assert config.train.service.kind == train


def test_a_secret_is_named_and_never_read_into_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "hush")
    service = {
        "inference_service": {"backend": "tinker", "model": "m"},
        "tinker_service": {"api_key": "${oc.env:MY_API_KEY}"},
    }
    tree = copy.deepcopy(GUIDE) | {"service": service, "policy": {"kind": "pretrained", "path": "/m"}}
    config: Any = parse_config(tree)
    assert config.train.service.token_variable == "MY_API_KEY"
    with pytest.raises(ConfigError, match=r"project_name takes in the environment variable MY_API_KEY") as refused:
        parse_config(tree | {"project_name": "p-${oc.env:MY_API_KEY}"})
    assert "hush" not in str(refused.value) + config.model_dump_json()


def test_a_reference_without_a_value_is_named() -> None:
    tree = copy.deepcopy(GUIDE) | {"experiment_name": "${oc.env:NO_SUCH_VARIABLE_OF_MINE}"}
    with pytest.raises(
        ConfigError, match=r"experiment_name.*NO_SUCH_VARIABLE_OF_MINE.*Set the value that it refers to"
    ):
        parse_config(tree)
