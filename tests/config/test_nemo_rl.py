"""NeMo RL's spelling of a run with NeMo Gym: mapped, or refused for the switch that is off."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import load_config, parse_config
from roundhouse.errors import ConfigError

FOREIGN = Path(__file__).parent / "foreign"
THEIRS: dict[str, Any] = {
    "run_id": "r",
    "policy": {"generation": {"backend": "vllm", "vllm_cfg": {"async_engine": True, "expose_http_server": True}}},
    "env": {
        "should_use_nemo_gym": True,
        "nemo_gym": {"config_paths": ["math.yaml", "agent.yaml"], "port_range_low": 9000},
    },
    "environment": {"train_tasks": "rows.jsonl"},
}


def value_at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def test_the_switch_of_nemo_rl_is_the_environment_kind_nemo_gym() -> None:
    section = pytest.importorskip("roundhouse.plugins.nemo_gym.section")
    before = copy.deepcopy(THEIRS)
    environment = parse_config(THEIRS).environment
    assert isinstance(environment, section.NemoGymEnvironment)
    assert environment.config_paths == ("math.yaml", "agent.yaml")
    assert environment.overrides == ("++port_range_low=9000",)
    assert environment.train_tasks == "rows.jsonl"
    assert before == THEIRS, "what was given is as it was"


EXEMPLAR, MEGATRON = (FOREIGN / f"nemo_rl_{name}.yaml" for name in ("grpo", "megatron"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run_id", "grpo-dev-1"),
        ("seed", 7),
        ("iterations", 50),
        ("store", "/tmp/nemo/store"),
        ("policy.path", "/models/small"),
        ("rollout.prompts_per_iteration", 8),
        ("rollout.group_size", 4),
        ("rollout.max_turns", 3),
        ("rollout.epochs", 2),
        ("rollout.max_tokens", 256),
        ("rollout.max_prompt_tokens", 128),
        ("rollout.dynamic_sampling.max_rounds", 6),
        ("asynchrony.mode", "batch-async"),
        ("asynchrony.staleness", 2),
        ("asynchrony.refit", "in-flight"),
        ("generation.keep_prefix_cache", False),
        ("generation.backend", "vllm"),
        ("generation.sampling.max_new_tokens", 255),
        ("generation.sampling.temperature", 0.9),
        ("generation.max_model_len", 256),
        ("generation.dtype", "bfloat16"),
        ("generation.gpu_memory_utilization", 0.7),
        ("generation.gpus_per_replica", 2),
        ("generation.replicas", 2),
        ("generation.engine_args.tensor_parallel_size", 2),
        ("generation.engine_args.compilation_config", {"backend": "eager"}),
        ("evaluation.every", 5),
        ("evaluation.before_training", True),
        ("evaluation.tasks", 64),
        ("evaluation.samples", 2),
        ("evaluation.temperature", 0.2),
        ("train.minibatches", 2),
        ("train.dtype", "bfloat16"),
        ("train.tokens_per_microbatch", 512),
        ("train.activation_checkpointing", True),
        ("train.lora.rank", 4),
        ("train.lora.target_modules", ("q_proj",)),
        ("train.service.processes", 4),
        ("train.service.context_parallel", 2),
        ("train.optimizer.learning_rate", 2e-6),
        ("train.optimizer.betas", (0.9, 0.98)),
        ("train.optimizer.max_grad_norm", 0.5),
        ("train.optimizer.warmup_steps", 20),
        ("train.optimizer.decay_steps", 300),
        ("train.algorithm.kind", "grpo"),
        ("train.algorithm.normalize_by_std", True),
        ("train.algorithm.leave_one_out", False),
        ("train.algorithm.mask_truncated", True),
        ("train.algorithm.advantage_clip", (-1e9, 4.0)),
        ("train.algorithm.kl_coefficient", 0.02),
        ("train.algorithm.kl_estimator", "k2"),
        ("train.algorithm.kl_importance_weighting", True),
        ("train.algorithm.clip_low", 0.1),
        ("train.algorithm.clip_high", 0.3),
        ("train.algorithm.dual_clip", 3.0),
        ("train.algorithm.mismatch_correction", "tis"),
        ("train.algorithm.mismatch_bounds", (0.0, 3.0)),
        ("train.algorithm.positive_nll_weight", 0.1),
        ("train.algorithm.reward.scaling.source", (0.0, 2.0)),
        ("train.algorithm.reward.overlong.buffer_tokens", 16),
        ("checkpoint.keep_last", 2),
        ("checkpoint.optimizer_every", 4),
        ("tracking.enabled", True),
        ("tracking.sinks", ("mlflow", "wandb")),
        ("tracking.experiment", "team"),
        ("tracking.uri", "http://mlflow:5000"),
        ("tracking.conversations", 2),
        ("tracking.system_metrics", False),
    ],
)
def test_a_shipped_file_is_read_in_the_keys_of_this_system(key: str, value: Any) -> None:
    assert value_at(load_config(EXEMPLAR, ["environment.kind=calculator"]), key) == value


def test_all_keys_without_a_counterpart_are_in_one_list_with_the_remedy() -> None:
    """The base file's keys too, before anything starts; Megatron's are listed by their switch alone."""
    with pytest.raises(ConfigError) as refused:
        load_config(MEGATRON)
    text = str(refused.value)
    for part in (
        "is a configuration of NeMo RL, with keys to change first:",
        "grpo.batch_multiplier: 2.0",
        "grpo.new_option: 3",
        "It has no counterpart here: leave it out.",
        "reward_penalties.penalize_empty_final_answer: true",
        "policy.megatron_cfg.enabled: true, policy.generation.backend: megatron",
        "needs megatron-core and CUDA",
        "generation: {backend: trainer, mcore_generation_config: {buffer_size_gb: …, max_tokens: …}}",
        "logger.swanlab_enabled: true",
        "tracking.sinks",
        "data.train.dataset_name: some-dataset",
        "env.math.num_workers: 8",
        "Name the environment and its task rows in the section environment",
    ):
        assert part in text, part
    assert "tensor_model_parallel_size" not in text


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("loss_fn.truncated_importance_sampling_type=null", "train.algorithm.mismatch_bounds", (0.0, 1e9)),
        ("policy.generation.colocated={enabled: false, resources: {gpus_per_node: 2}}", "generation.replicas", 1),
        ("policy.generation.colocated={enabled: false, resources: {gpus_per_node: 2}}", "train.service.processes", 2),
        ("grpo.val_period=-1", "evaluation.every", None),
        ("loss_fn.use_kl_in_reward=true", "train.algorithm.kl_placement", "reward"),
        ("loss_fn.use_importance_sampling_correction=false", "train.algorithm.mismatch_correction", "none"),
        ("grpo.async_grpo.enabled=false", "asynchrony.mode", "sync"),
        ("logger.wandb_enabled=false", "tracking.sinks", ("mlflow",)),
    ],
)
def test_another_value_of_a_key_changes_what_it_stands_for(override: str, key: str, value: Any) -> None:
    overrides = ["environment.kind=calculator", override]
    if "kl_in_reward" in override:  # an estimator of the loss is refused there
        overrides += ["loss_fn.reference_policy_kl_type=k1", "loss_fn.use_on_policy_kl_approximation=false"]
    if "sampling_correction" in override:  # which overlapped training cannot do without
        overrides.append("grpo.async_grpo.enabled=false")
    assert value_at(load_config(EXEMPLAR, overrides), key) == value


def test_what_has_no_effect_is_logged_and_a_switch_that_is_off_is_not(caplog: pytest.LogCaptureFixture) -> None:
    load_config(EXEMPLAR, ["environment.kind=calculator"])
    [message] = caplog.messages
    assert "grpo.val_batch_size" in message
    assert "env.math.*" in message
    assert "megatron_cfg" not in message


@pytest.mark.parametrize("place", ["policy.generation", "generation"])
def test_a_backend_of_nemo_rl_is_a_server_or_is_refused_with_the_configuration_that_runs_it(place: str) -> None:
    def config_of(backend: str, **own: Any) -> Any:
        tree: dict[str, Any] = {"run_id": "r", "generation": own}
        section = tree
        for part in place.split("."):
            section = section.setdefault(part, {})
        section["backend"] = backend
        return parse_config(tree)

    endpoint = {"url": "http://h:30000", "model": "m"}
    generation = config_of("sglang", endpoint=endpoint).generation
    assert (generation.backend, generation.endpoint.kind, generation.endpoint.weight_update) == (
        "openai",
        "sglang",
        "sglang",
    )
    for backend, told in (
        ("sglang", r"needs CUDA: start SGLang's server.*generation: \{endpoint: \{url: http://HOST:30000"),
        ("trtllm", r"needs CUDA: start trtllm-serve.*generation: \{backend: openai, endpoint: .*kind: text"),
        ("megatron", r"needs megatron-core and CUDA.*generation: \{backend: trainer"),
    ):
        with pytest.raises(ConfigError, match=rf"(?s){place}\.backend: {backend}.*{told}"):
            config_of(backend)


def test_what_the_policy_of_nemo_rl_says_of_generation_acts_as_in_the_section() -> None:
    """It was read for its two switches, and the rest of it was dropped without a word."""
    tree = copy.deepcopy(THEIRS)
    tree["policy"]["model_name"] = "/models/m"
    tree["policy"]["generation"] |= {"max_new_tokens": 512, "temperature": 0.7, "top_p": 1.0, "top_k": None}
    tree["policy"]["generation"]["vllm_cfg"] |= {
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.8,
        "precision": "bfloat16",
        "tensor_parallel_size": 4,
    }
    config = parse_config(tree)
    assert (config.policy.kind, config.policy.path) == ("pretrained", "/models/m")
    generation = config.generation
    assert (generation.sampling.max_new_tokens, generation.sampling.temperature) == (512, 0.7)
    assert (generation.max_model_len, generation.gpu_memory_utilization, generation.dtype) == (4096, 0.8, "bfloat16")
    assert generation.engine_args == {"tensor_parallel_size": 4}
    del tree["env"], tree["environment"], tree["policy"]["generation"]["vllm_cfg"]
    tree["policy"]["generation"]["max_new_tokens"] = 100
    assert parse_config(tree).generation.sampling.temperature == 0.7, "also without Gym"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"policy": {"generation": {"max_tokens": 5}}},
            r"policy\.generation\.max_tokens: 5\s+It has no counterpart",
        ),
        (
            {"policy": {"generation": {"vllm_cfg": {"use_deep_gemm": True}}}},
            r"vllm_cfg\.use_deep_gemm: true\s+Set it to false",
        ),
        (
            {"generation": {"vllm_cfg": {"unheard_of": 3}}},
            r"generation\.vllm_cfg\.unheard_of: 3\s+Leave it out, or set generation\.engine_args",
        ),
        (
            {"policy": {"generation": {"backend": "vllm"}}, "generation": {"backend": "hf"}},
            r"policy\.generation\.backend: vllm\s+generation\.backend sets generation\.backend to 'hf'",
        ),
        ({"policy": {"model_name": "m", "kind": "warm_start"}}, r"policy\.model_name: m\s+policy\.kind is warm_start"),
    ],
)
def test_what_it_says_that_is_not_carried_out_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config({"run_id": "r"} | changes)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("policy.generation.vllm_cfg.async_engine", False, r"vllm_cfg\.async_engine: false\s+Set it to true"),
        ("policy.generation.vllm_cfg.expose_http_server", None, r"vllm_cfg\.expose_http_server: None\s+Set it to true"),
        ("env.should_use_nemo_gym", False, r"env\.should_use_nemo_gym: false\s+Set it to true"),
        ("env.nemo_gym", {}, r"config_paths"),
        ("env.nemo_gym.math", {"a": 1}, r"Put math into a file"),
        (
            "environment.kind",
            "calculator",
            r"should_use_nemo_gym: true\s+environment\.kind is calculator.*mixture",
        ),
    ],
)
def test_each_switch_that_is_off_is_refused_by_its_key(place: str, value: Any, said: str) -> None:
    tree = copy.deepcopy(THEIRS)
    *parents, leaf = place.split(".")
    section = tree
    for parent in parents:
        section = section[parent]
    section[leaf] = value
    with pytest.raises(ConfigError, match=said):
        parse_config(tree)


def test_the_flat_names_of_generation_are_those_of_sampling_and_both_are_refused() -> None:
    flat = {
        "backend": "hf",
        "max_new_tokens": 100,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": None,
        "model_name": "/models/m",
    }
    config = parse_config({"run_id": "r", "generation": flat})
    sampling = config.generation.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (100, 0.7, 1.0, None)
    assert (config.generation.backend, config.policy.kind, config.policy.path) == (
        "transformers",
        "pretrained",
        "/models/m",
    )
    for generation, told in (
        ({"temperature": 0.7, "sampling": {"temperature": 1.0}}, "Give generation.sampling.temperature alone"),
        ({"model_name": "m"}, "policy.kind is warm_start: set it to pretrained"),
    ):
        with pytest.raises(ConfigError, match=told):
            parse_config({"run_id": "r", "generation": generation, "policy": {"kind": "warm_start"}})
