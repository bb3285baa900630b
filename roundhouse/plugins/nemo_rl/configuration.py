"""Translate NeMo RL's configuration of a GRPO run: the keys of its shipped files, by section.

Keys of this system may stand beside them, such as `run_id`, `environment` and `generation.endpoint`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from roundhouse.config.foreign_keys import (
    OFF,
    Rule,
    Translation,
    Tree,
    only,
    read,
    refused,
    run_id_of,
    switched,
    to,
    translate,
    unused,
)

_LOGGERS = ("mlflow", "wandb", "tensorboard")
UNBOUNDED = 1e9
"""Bound of an importance weight, or of an advantage, that NeMo RL does not bound."""
_ENVIRONMENT = (
    "Name the environment and its task rows in the section environment (docs/environments.md): kind worker plays the rows of a "
    "file with your worker and evaluator."
)
_MEGATRON = (
    "It needs megatron-core and CUDA. Set policy.megatron_cfg.enabled to false and dtensor_cfg.enabled to true; in place "
    "of generation.backend megatron set generation: {backend: trainer, mcore_generation_config: {buffer_size_gb: …, "
    "max_tokens: …}}, which generates in the trainer as well."
)
_SGLANG = (
    "It needs CUDA: start SGLang's server and set generation: {endpoint: {url: http://HOST:30000, model: NAME}} beside it; "
    "weights then reach it by /update_weights_from_disk."
)
_TRTLLM = (
    "It needs CUDA: start trtllm-serve and set generation: {backend: openai, endpoint: {url: http://HOST:8000, model: NAME, "
    "kind: text}}, for evaluations and collections; training needs vllm, sglang or trainer."
)
_AGREES = "Leave it out: training needs the log-probabilities of the distribution that was drawn from."
_NOT_SFT = "Train on chat rows or collected datasets with roundhouse train-offline (docs/offline-training.md)."

_GRPO: Mapping[str, Rule] = {
    "num_prompts_per_step": to("rollout.prompts_per_iteration"),
    "num_generations_per_prompt": to("rollout.group_size"),
    "max_rollout_turns": to("rollout.max_turns"),
    "max_num_epochs": to("rollout.epochs"),
    "max_num_steps": to("iterations"),
    "val_start_at": only(-1, 0, remedy="Set it to -1: evaluations come every grpo.val_period iterations."),
    "val_at_start": to("evaluation.before_training"),
    "val_at_end": unused(),
    "overlong_filtering": to("train.algorithm.mask_truncated"),
    "max_val_samples": to("evaluation.tasks"),
    "val_num_generations_per_prompt": to("evaluation.samples"),
    "stop_at_validation_metric": to("finish.metric", {"accuracy": "evaluation/reward/mean"}),
    "stop_at_validation_threshold": to("finish.at_least"),
    "val_batch_size": unused(),
    "seed": to("seed"),
    "batch_multiplier": only(1, remedy="Raise rollout.dynamic_sampling.max_rounds, or grpo.num_prompts_per_step."),
    "reward_shaping.overlong_buffer_length": switched(
        "grpo.reward_shaping.enabled", to("train.algorithm.reward.overlong.buffer_tokens")
    ),
    "reward_shaping.overlong_buffer_penalty": switched(
        "grpo.reward_shaping.enabled", to("train.algorithm.reward.overlong.penalty")
    ),
    "reward_shaping.max_response_length": switched(
        "grpo.reward_shaping.enabled", to("train.algorithm.reward.overlong.max_generated_tokens")
    ),
    "reward_shaping.stop_properly_penalty_coef": switched(
        "grpo.reward_shaping.enabled", to("train.algorithm.reward.truncated_factor")
    ),
    "seq_logprob_error_threshold": to("train.algorithm.max_sequence_error"),
    **{
        f"async_grpo.{name}": read()
        for name in (
            "enabled", "max_trajectory_age_steps", "in_flight_weight_updates", "recompute_kv_cache_after_weight_updates"
        )
    },
    "async_grpo.max_generation_failures": unused(),
    **{
        name: read()
        for name in (
            "normalize_rewards", "use_leave_one_out_baseline", "val_period", "advantage_clip_low", "advantage_clip_high",
            "use_dynamic_sampling", "dynamic_sampling_max_gen_batches", "reward_shaping.enabled", "reward_scaling.*",
            "adv_estimator.*",
        )
    },
}  # fmt: skip
_LOSS: Mapping[str, Rule] = {
    "reference_policy_kl_penalty": to("train.algorithm.kl_coefficient"),
    "reference_policy_kl_type": to("train.algorithm.kl_estimator"),
    "kl_input_clamp_value": only(20, remedy="Set it to 20, which is fixed here."),
    "kl_output_clamp_value": only(10, remedy="Set it to 10, which is fixed here."),
    "ratio_clip_min": to("train.algorithm.clip_low"),
    "ratio_clip_max": to("train.algorithm.clip_high"),
    "ratio_clip_c": to("train.algorithm.dual_clip"),
    "use_on_policy_kl_approximation": to("train.algorithm.kl_importance_weighting"),
    "token_level_loss": to("train.algorithm.loss_aggregation", {True: "token", False: "sequence"}),
    "positive_example_nll_weight": to("train.algorithm.positive_nll_weight"),
    **{
        name: read()
        for name in (
            "use_importance_sampling_correction", "truncated_importance_sampling_type",
            "truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min",
            "sequence_level_importance_ratios", "force_on_policy_ratio", "use_kl_in_reward", "use_cispo",
            "disable_ppo_ratio",
        )
    },
}  # fmt: skip
_LORA = "policy.dtensor_cfg.lora_cfg.enabled"
_POLICY: Mapping[str, Rule] = {
    "model_name": to("policy.path"),
    "tokenizer.chat_template_kwargs": refused(
        "Leave it out: set policy.chat_template to a template that does the same."
    ),
    "tokenizer.chat_template": to("policy.chat_template"),
    "tokenizer.*": unused(),
    "hf_config_overrides": refused("Leave it empty: change config.json in the model's directory."),
    "train_micro_batch_size": unused(),
    "generation_batch_size": unused(),
    "logprob_batch_size": unused(),
    "max_total_sequence_length": to("rollout.max_tokens"),
    "precision": to("train.dtype"),
    "logprob_chunk_size": to("train.logits_chunk_tokens"),
    "offload_optimizer_for_logprob": unused(),
    "dtensor_cfg.activation_checkpointing": to("train.activation_checkpointing"),
    "dtensor_cfg.tensor_parallel_size": to("train.service.tensor_parallel"),
    "dtensor_cfg.context_parallel_size": to("train.service.context_parallel"),
    "dtensor_cfg.expert_parallel_size": to("train.service.expert_parallel"),
    "dtensor_cfg.data_parallel_replicate_size": to("train.service.data_parallel_replicate"),
    "dtensor_cfg.cpu_offload": refused("Set it to false: see train.optimizer.moments and train.reduce_gradients."),
    "dtensor_cfg.custom_parallel_plan": refused("Leave it out: the plan follows from train.service."),
    "dtensor_cfg.lora_cfg.dim": switched(_LORA, to("train.lora.rank")),
    "dtensor_cfg.lora_cfg.alpha": switched(_LORA, to("train.lora.alpha")),
    "dtensor_cfg.lora_cfg.exclude_modules": switched(_LORA, refused("Name the modules in target_modules.")),
    "dtensor_cfg.lora_cfg.dropout": switched(_LORA, refused("Set it to 0: adapters are trained without dropout.")),
    "dtensor_cfg.lora_cfg.target_modules": read(),
    "dtensor_cfg.lora_cfg.*": switched(_LORA, unused()),
    "dtensor_cfg.*": unused(),
    "megatron_cfg.enabled": refused(_MEGATRON),
    "megatron_cfg.*": switched("policy.megatron_cfg.enabled", unused()),
    "draft.enabled": refused("Set it to false: nothing trains a draft model."),
    "draft.*": switched("policy.draft.enabled", unused()),
    "dynamic_batching.*": unused(),
    "sequence_packing.enabled": to("train.packing"),
    "sequence_packing.train_mb_tokens": to("train.tokens_per_microbatch"),
    "sequence_packing.*": unused(),
    "make_sequence_length_divisible_by": unused(),
    "max_grad_norm": to("train.optimizer.max_grad_norm"),
    "optimizer.name": only("torch.optim.AdamW", remedy="Set it to torch.optim.AdamW, the only optimizer."),
    "optimizer.kwargs.lr": to("train.optimizer.learning_rate"),
    "optimizer.kwargs.weight_decay": to("train.optimizer.weight_decay"),
    "optimizer.kwargs.betas": to("train.optimizer.betas"),
    "optimizer.kwargs.eps": to("train.optimizer.eps"),
    "optimizer.*": unused(),
}
_ENGINE: Mapping[str, Rule] = {
    "model_name": to("policy.path"),
    "stop_token_ids": refused("Leave it out: a turn ends at the model's end-of-turn token."),
    "stop_strings": refused("Leave it out: a turn ends at the model's end-of-turn token."),
    "refit_transport": refused("Leave it out, or name the transport in generation.weight_sync (docs/weights.md)."),
    "vllm_cfg.precision": to("generation.dtype"),
    "vllm_cfg.max_model_len": to("generation.max_model_len"),
    "vllm_cfg.gpu_memory_utilization": to("generation.gpu_memory_utilization"),
    **{
        f"vllm_cfg.{name}": to(f"generation.engine_args.{name}")
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "enforce_eager", "kv_cache_dtype")
    },
    "vllm_cfg.logprobs_mode": only("processed_logprobs", remedy=_AGREES),
    "vllm_cfg.expert_parallel_size": only(1, remedy="Set it to 1, and vllm_kwargs.enable_expert_parallel to true."),
    "vllm_cfg.use_deep_gemm": refused("Set it to false: it is a kernel of FP8 on CUDA, and weights are not quantised here."),
    "vllm_cfg.num_last_layers_in_bf16": only(0, remedy="Set it to 0: weights are not quantised here."),
    "vllm_cfg.num_first_layers_in_bf16": only(0, remedy="Set it to 0: weights are not quantised here."),
    **{
        f"vllm_cfg.{name}": unused()
        for name in (
            "async_engine", "expose_http_server", "use_tqdm", "enable_vllm_metrics_logger", "vllm_metrics_logger_interval",
            "skip_tokenizer_init", "load_format", "http_refit_server_port", "zmq_refit_server_port",
        )
    },
    "vllm_cfg.*": refused("Leave it out, or set generation.engine_args to the argument of vLLM that it stands for."),
    "vllm_kwargs.*": to("generation.engine_args.*"),
}  # fmt: skip
_GENERATION: Mapping[str, Rule] = {
    "max_new_tokens": to("generation.sampling.max_new_tokens"),
    "temperature": to("generation.sampling.temperature"),
    "top_p": to("generation.sampling.top_p"),
    "top_k": to("generation.sampling.top_k"),
    "val_temperature": to("evaluation.temperature"),
    "val_top_p": to("evaluation.top_p"),
    "val_top_k": to("evaluation.top_k"),
    "colocated.resources.gpus_per_node": read(),
    "colocated.resources.num_nodes": only(1, remedy="Set it to 1, and generation.replicas to the engines on all machines."),
    **{
        name: unused()
        for name in (
            "port_range_low", "port_range_high", "use_async_rollouts", "real_quant_export_cpu_offload", "refit_cfg.*",
            "sglang_cfg.*", "trtllm_cfg.*", "trtllm_kwargs.*", "colocated.enabled",
        )
    },
    "backend": read(),
    "mcore_generation_config.*": read(),
    **_ENGINE,
}  # fmt: skip
_OTHERS: Mapping[str, Rule] = {
    "data.shuffle": to("rollout.shuffle"),
    "data.max_input_seq_length": to("rollout.max_prompt_tokens"),
    "data.num_workers": unused(),
    "data.use_multiple_dataloader": refused("Set it to false: mix environments by environment.kind mixture."),
    **{f"data.{name}.*": read() for name in ("train", "validation", "default")},
    "env.should_use_nemo_gym": read(),
    "checkpointing.enabled": unused(),
    "checkpointing.checkpoint_dir": to("store"),
    "checkpointing.higher_is_better": only(True, remedy="Set it to true: the promoted version is the better one."),
    "checkpointing.keep_top_k": to("checkpoint.keep_last"),
    "checkpointing.save_period": to("checkpoint.optimizer_every"),
    "checkpointing.model_save_format": only("safetensors", remedy="Set it to safetensors, the only format."),
    "checkpointing.save_optimizer": only(True, remedy="Set it to true: a run resumes from the optimizer's state."),
    "checkpointing.*": unused(),
    "logger.num_val_samples_to_print": to("tracking.conversations"),
    **{f"logger.{name}_enabled": read() for name in _LOGGERS},
    "logger.mlflow.experiment_name": to("tracking.experiment"),
    "logger.wandb.project": read(),
    "logger.mlflow.tracking_uri": switched("logger.mlflow_enabled", to("tracking.uri")),
    "logger.monitor_gpus": to("tracking.system_metrics"),
    "logger.swanlab_enabled": refused("Set it to false: tracking.sinks takes a custom class for it (module:Class)."),
    **{
        f"logger.{name}.*": switched(f"logger.{name}_enabled", unused()) for name in ("wandb", "swanlab", "tensorboard")
    },
    "logger.mlflow.run_name": read(),
    "logger.*": unused(),
    "cluster.gpus_per_node": read(),
    "cluster.num_nodes": only(
        1,
        remedy="Set it to 1, and the machines in infra (infra.ray.trainer.nodes, or kind kubernetes: docs/kubernetes.md).",
    ),
    "cluster.*": unused(),
    "data_plane.enabled": refused("Set it to false: stages hand each other datasets in the store."),
    "data_plane.*": switched("data_plane.enabled", unused()),
    "reward_penalties.*": refused("Set it to false: the environment's verifier judges this."),
    "on_policy_distillation.*": refused("Leave it out: train.algorithm.kind distillation."),
    **{f"{name}.*": refused(_NOT_SFT) for name in ("sft", "dpo", "rm")},
    "ppo.*": refused("Leave the section out: train.algorithm.kind ppo, with train.algorithm.critic."),
    "distillation.*": refused("Leave the section out: train.algorithm.kind distillation."),
}
TABLE: Mapping[str, Rule] = {
    **{f"grpo.{name}": rule for name, rule in _GRPO.items()},
    **{f"loss_fn.{name}": rule for name, rule in _LOSS.items()},
    **{f"policy.{name}": rule for name, rule in _POLICY.items()},
    **{f"policy.generation.{name}": rule for name, rule in _GENERATION.items()},
    **{f"generation.{name}": rule for name, rule in _ENGINE.items() if name.startswith(("model_name", "vllm_"))},
    "policy.generation.*": refused("It has no counterpart here: leave it out, or set it in the section generation."),
    "policy.scheduler": read(),
    "policy.train_global_batch_size": read(),
    "env.nemo_gym": read(),
    "env.*": read(),
    **_OTHERS,
}
_MARKS = ("grpo", "loss_fn", "checkpointing", "cluster", "env", "data_plane", "sft", "dpo", "rm", "ppo", "distillation")


def translate_configuration(tree: Tree, origin: str) -> Tree | None:
    """Return NeMo RL's configuration in the keys of this system; None if it is not NeMo RL's.

    Raises:
        ConfigError: lists every key without a counterpart, with the remedy.
    """
    policy, generation = tree.get("policy"), tree.get("generation")
    is_foreign = (
        any(mark in tree for mark in _MARKS)
        or _names_files(tree.get("defaults"))
        or (isinstance(policy, dict) and ("generation" in policy or "model_name" in policy))
        or (isinstance(generation, dict) and (generation.keys() & {"model_name", "vllm_cfg", "vllm_kwargs"}))
        or (isinstance(generation, dict) and generation.get("backend") in ("sglang", "trtllm", "megatron"))
    )
    return translate(tree, origin, "NeMo RL", TABLE, _finish) if is_foreign else None


def _names_files(defaults: Any) -> bool:
    """Return whether `defaults` names files, as NeMo RL's; NexRL's names have no ending."""
    names = defaults if isinstance(defaults, list) else [defaults]
    return any(isinstance(name, str) and name.endswith((".yaml", ".yml")) for name in names)


def _finish(result: Translation) -> None:
    """Set what follows from several keys."""
    if source := result.sources.get("policy.path"):
        result.default("policy.kind", "pretrained", source)
        if (kind := result.own["policy"]["kind"]) != "pretrained":
            result.refuse(
                source, f"policy.kind is {kind}: set it to pretrained with policy.path, or leave the model's name out."
            )
    enabled = {name: result.get(f"logger.{name}_enabled") for name in _LOGGERS}
    if any(value is not None for value in enabled.values()):
        sinks = [name for name, value in enabled.items() if value]
        result.put("tracking.enabled", bool(sinks), "logger.mlflow_enabled")
        if sinks:
            result.default("tracking.sinks", sinks, "logger.mlflow_enabled")
        if enabled["wandb"] and (project := result.get("logger.wandb.project")):
            result.default("tracking.experiment", project, "logger.wandb.project")
    for name in ("logger.mlflow.run_name", "logger.wandb.name"):
        if run_id := run_id_of(str(result.get(name, ""))):
            result.default("run_id", run_id, name)
    _read_algorithm(result)
    _read_rewards(result)
    _read_correction(result)
    _read_batches(result)
    _read_schedule(result)
    _read_engine(result)
    _read_environment(result)


def _read_algorithm(result: Translation) -> None:
    get, put = result.get, result.put
    estimators = ("grpo", "gdpo", "reinforce_plus_plus")
    kind = get("grpo.adv_estimator.name", "grpo")
    if kind not in estimators:
        result.refuse("grpo.adv_estimator.name", f"Set it to {', '.join(estimators)}, or name train.algorithm.kind.")
    elif any(key.startswith(("grpo.", "loss_fn.")) for key in result.keys):
        result.default("train.algorithm.kind", kind, "grpo.adv_estimator.name")
    names = {"normalize_rewards": "normalize_by_std", "use_leave_one_out_baseline": "leave_one_out"}
    if kind == "reinforce_plus_plus":
        names = {"minus_baseline": "minus_baseline"}
    for name, target in names.items():
        value = get(f"grpo.adv_estimator.{name}", get(f"grpo.{name}"))
        if value is not None and kind != "gdpo":
            put(f"train.algorithm.{target}", value, f"grpo.{name}")
    for key, target, value in (
        ("sequence_level_importance_ratios", "importance_ratio", "sequence"),
        ("force_on_policy_ratio", "importance_ratio", "on_policy"),
        ("use_kl_in_reward", "kl_placement", "reward"),
        ("disable_ppo_ratio", "policy_loss", "reinforce"),
        ("use_cispo", "policy_loss", "cispo"),
    ):
        if get(f"loss_fn.{key}"):
            put(f"train.algorithm.{target}", value, f"loss_fn.{key}")
    if get("grpo.async_grpo.enabled"):
        put("asynchrony.mode", "batch-async", "grpo.async_grpo.enabled")
        put("asynchrony.staleness", get("grpo.async_grpo.max_trajectory_age_steps", 1), "grpo.async_grpo.enabled")
        in_flight = bool(get("grpo.async_grpo.in_flight_weight_updates"))
        put("asynchrony.refit", "in-flight" if in_flight else "drain", "grpo.async_grpo.in_flight_weight_updates")
        keeps = in_flight and not get("grpo.async_grpo.recompute_kv_cache_after_weight_updates")
        put("generation.keep_prefix_cache", keeps, "grpo.async_grpo.recompute_kv_cache_after_weight_updates")


def _read_rewards(result: Translation) -> None:
    get, put = result.get, result.put
    bounds = get("grpo.advantage_clip_low"), get("grpo.advantage_clip_high")
    if bounds != (None, None):
        low, high = bounds
        limits = [-UNBOUNDED if low is None else low, UNBOUNDED if high is None else high]
        put("train.algorithm.advantage_clip", limits, "grpo.advantage_clip_low")
    if get("grpo.reward_scaling.enabled"):
        for name, low, high in (("source", 0.0, 1.0), ("target", 0.0, 1.0)):
            scaling = [get(f"grpo.reward_scaling.{name}_min", low), get(f"grpo.reward_scaling.{name}_max", high)]
            put(f"train.algorithm.reward.scaling.{name}", scaling, "grpo.reward_scaling")
        put("train.algorithm.reward.scaling.outside", "clamp", "grpo.reward_scaling")
    if get("grpo.use_dynamic_sampling"):
        rounds = get("grpo.dynamic_sampling_max_gen_batches", 10)
        put("rollout.dynamic_sampling.max_rounds", rounds, "grpo.use_dynamic_sampling")
    if "grpo.val_period" in result.keys:
        period = get("grpo.val_period", 0)
        put("evaluation.every", period if period > 0 else None, "grpo.val_period")


def _read_correction(result: Translation) -> None:
    get, put = result.get, result.put
    prefix = "loss_fn.truncated_importance_sampling"
    switch, kind = "loss_fn.use_importance_sampling_correction", get(f"{prefix}_type")
    if switch not in result.keys:
        return
    if get(switch) in OFF:
        put("train.algorithm.mismatch_correction", "none", switch)
    elif kind not in (None, "tis", "icepop", "seq-mask-tis"):
        result.refuse(f"{prefix}_type", "Set it to tis, icepop or seq-mask-tis.")
    elif kind is None:
        put("train.algorithm.mismatch_correction", "tis", switch)
        put("train.algorithm.mismatch_bounds", [0.0, UNBOUNDED], switch)
    else:
        put("train.algorithm.mismatch_correction", kind, f"{prefix}_type")
        if (most := get(f"{prefix}_ratio")) is not None:
            put("train.algorithm.mismatch_bounds", [get(f"{prefix}_ratio_min", 0.0), most], f"{prefix}_ratio")


def _read_batches(result: Translation) -> None:
    get, put = result.get, result.put
    whole = get("policy.train_global_batch_size")
    rollouts = get("grpo.num_prompts_per_step", 0) * get("grpo.num_generations_per_prompt", 0)
    if whole and rollouts:
        if rollouts % whole:
            remedy = f"Set it to a divisor of the {rollouts} rollouts of an iteration."
            result.refuse("policy.train_global_batch_size", remedy)
        else:
            put("train.minibatches", rollouts // whole, "policy.train_global_batch_size")
    if gpus := get("cluster.gpus_per_node"):
        apart = get("policy.generation.colocated.resources.gpus_per_node", 0)
        if get("policy.generation.colocated.enabled", True) or not 0 < apart < gpus:
            apart = 0
        width = get("policy.generation.vllm_cfg.tensor_parallel_size", 1)
        width *= get("policy.generation.vllm_cfg.pipeline_parallel_size", 1)
        result.default("train.service.processes", gpus - apart, "cluster.gpus_per_node")
        own_backend = result.own.get("generation", {}).get("backend", "vllm")
        if get("policy.generation.backend", own_backend) == "vllm":
            result.default("generation.gpus_per_replica", width, "cluster.gpus_per_node")
            result.default("generation.replicas", max(1, (apart or gpus) // width), "cluster.gpus_per_node")
    if get(_LORA):
        result.default("train.lora.rank", 8, _LORA)
        if modules := get("policy.dtensor_cfg.lora_cfg.target_modules"):
            put("train.lora.target_modules", modules, "policy.dtensor_cfg.lora_cfg.target_modules")


def _read_schedule(result: Translation) -> None:
    key = "policy.scheduler"
    schedule = result.get(key) or []
    for part in [schedule] if isinstance(schedule, dict) else schedule:
        name, values = str(part.get("name", "")).rpartition(".")[2], part.get("kwargs") or {}
        if name == "LinearLR":
            result.put("train.optimizer.warmup_steps", values.get("total_iters", 5), key)
        elif name == "CosineAnnealingLR":
            result.put("train.optimizer.schedule", "cosine", key)
            result.put("train.optimizer.decay_steps", values.get("T_max"), key)
        elif name and name != "ConstantLR":
            result.refuse(
                key, "Use LinearLR (warm-up), ConstantLR and CosineAnnealingLR, or set train.optimizer.schedule."
            )


def _read_engine(result: Translation) -> None:
    get, put, key = result.get, result.put, "policy.generation.backend"
    generation = result.own.get("generation", {})
    sampling, length = generation.get("sampling", {}), generation.get("max_model_len")
    if length and sampling.get("max_new_tokens", 0) >= length:
        sampling["max_new_tokens"] = length - 1  # a call is bounded by the prompt's length, there as here
    backend = get(key) or generation.get("backend")
    if key not in result.keys and backend in ("sglang", "trtllm", "megatron"):
        key = "generation.backend"
        result.keys[key] = generation.pop("backend")
    if backend == "megatron":
        result.refuse(key, _MEGATRON)
    elif backend == "trtllm":
        result.refuse(key, _TRTLLM)
    elif backend == "sglang":
        if not generation.get("endpoint"):
            result.refuse(key, _SGLANG)
        put("generation.backend", "openai", key)
        result.default("generation.endpoint.kind", "sglang", key)
        result.default("generation.endpoint.weight_update", "sglang", key)
    elif key in result.keys and backend is not None:
        put("generation.backend", backend, key)
    if backend != "vllm" and backend is not None:
        generation.pop("engine_args", None)
    if backend == "trainer":
        for name in ("buffer_size_gb", "max_tokens"):
            value = get(f"policy.generation.mcore_generation_config.{name}")
            if value is not None:
                put(f"generation.mcore_generation_config.{name}", value, key)


def _read_environment(result: Translation) -> None:
    """Read the switch of NeMo Gym; refuse data and environments of NeMo RL, unless the section environment has them."""
    own = result.own.get("environment")
    for key, value in result.keys.items():
        is_named = key.startswith(("data.train", "data.validation", "data.default", "env.")) and key not in TABLE
        if is_named and value not in OFF:
            if own is None:
                result.refuse(key, _ENVIRONMENT)
            else:
                result.unused.append(f"{'.'.join(key.split('.')[:2])}.*")
    if "env.should_use_nemo_gym" not in result.keys and "env.nemo_gym" not in result.keys:
        return
    switch, gym = result.get("env.should_use_nemo_gym"), dict(result.get("env.nemo_gym") or {})
    if switch is not True:
        if gym:
            result.refuse(
                "env.should_use_nemo_gym", "Set it to true, or leave env out and name the section environment."
            )
        return
    for name in ("async_engine", "expose_http_server"):
        if result.get(f"policy.generation.vllm_cfg.{name}") is not True:
            result.refuse(
                f"policy.generation.vllm_cfg.{name}", "Set it to true: NeMo Gym reaches the engine over HTTP."
            )
    if (kind := (own or {}).get("kind", "nemo_gym")) != "nemo_gym":
        remedy = (
            f"environment.kind is {kind}, and a run has one environment. Leave one of the two out, or mix them: environment: "
            "{kind: mixture, environments: {…}}, with NeMo Gym's as one of kind nemo_gym."
        )
        result.refuse("env.should_use_nemo_gym", remedy)
        return
    if not (paths := gym.pop("config_paths", None)):
        result.refuse("env.nemo_gym", "Name NeMo Gym's configuration files in env.nemo_gym.config_paths.")
    if nested := [name for name, value in gym.items() if isinstance(value, dict | list)]:
        remedy = f"Put {', '.join(nested)} into a file, and name that in env.nemo_gym.config_paths."
        result.refuse("env.nemo_gym", remedy)
    result.default("environment.kind", "nemo_gym", "env.should_use_nemo_gym")
    result.put("environment.config_paths", paths, "env.nemo_gym")
    if gym:
        settings = [f"++{name}={_text(value)}" for name, value in gym.items()]
        result.put("environment.overrides", settings, "env.nemo_gym")


def _text(value: Any) -> str:
    """Return a setting as YAML has it."""
    return value if isinstance(value, str) else json.dumps(value)
