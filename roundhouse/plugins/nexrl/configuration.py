"""Translate NexRL's configuration: the keys of its guide and of its recipes, by section.

Keys of Roundhouse may be mixed in, such as `environment.evaluator` and `generation.max_model_len`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from roundhouse.config.foreign_keys import (
    OFF,
    Rule,
    Translation,
    Tree,
    beside,
    only,
    read,
    refused,
    run_id_of,
    to,
    translate,
    unused,
)

_ONE_MODEL = "Leave it out, or at default: a run trains one model; start a run for each."
_SINKS = {
    "console": None,
    "mlflow": "mlflow",
    "tensorboard": "tensorboard",
    "wandb": "roundhouse.plugins.nexrl.val_names:ValNames",
}
"""Sinks by the names of NexRL's loggers."""
_SINK = "Set it to console, mlflow, tensorboard or wandb; name a custom class in tracking.sinks (module:Class)."
_TRAINERS = {
    "self_hosted_grpo": "grpo",
    "remote_api_grpo": "grpo",
    "remote_api_cross_entropy": "cross_entropy",
    "self_hosted_opd": "distillation",
    "remote_api_opd": "distillation",
}
_KL_ESTIMATORS = {"kl": "k1", "abs": None, "mse": "k2", "low_var_kl": "k3"}

_OTHER_WORKERS = {
    "pig_latin": "It trains on given answers: use roundhouse train-offline --method sft (docs/offline-training.md).",
    "single_turn_math": "Set it to simple, and environment.evaluator to a class that judges the answer.",
}

_DATA: Mapping[str, Rule] = {
    "type": read(),
    "seed": to("seed"),
    "data_files": read(),
    "batch_size": to("rollout.prompts_per_iteration"),
    "keep_batch_order": only(True, remedy="Set it to true: an iteration trains on its own tasks."),
    "rollout_repeat_n": to("rollout.group_size"),
    "prompt_key": only("prompt", "query", "question", remedy="Name the column prompt, or override format_task_query."),
    "filter_prompts": read(),
    "max_prompt_length": read(),
    "max_response_length": to("generation.sampling.max_new_tokens"),
    "tokenizer_path": unused(),
    "shuffle": to("rollout.shuffle"),
    "drop_last": to("rollout.drop_last"),
}
_WORKER: Mapping[str, Rule] = {
    "type": read(),
    "num_workers": to("rollout.concurrency"),
    "need_llm_inference": only(True, remedy="Leave it out: rollout_worker.type mock calls no policy."),
    "temperature": to("generation.sampling.temperature"),
    "top_p": to("generation.sampling.top_p"),
    "top_k": to("generation.sampling.top_k"),
    "agent_cls": refused(
        "Set rollout_worker.type to agent or simple, and environment.evaluator to a class that judges."
    ),
    "agent.*": refused("Leave it out: environment.parameters has the arguments of a worker's class."),
    "custom_rollout_worker_module_path": read(),
    "custom_rollout_worker_class_name": read(),
    "nexau_agent_config_path": read(),
    "nexau_agent_workspace": read(),
    "evaluator_module_path": read(),
    "task_name": to("environment.parameters.task_name"),
    "max_prompt_length": unused(),
    "max_response_length": to("generation.sampling.max_new_tokens"),
    "max_sequence_length": read(),
    "tokenizer": unused(),
    "resource.*": unused(),
}
_OWN_LOOP = "Set it to default: a run keeps its own; a custom class can replace it in your own loop."
_POOL: Mapping[str, Rule] = {
    "type": only("default", remedy=_OWN_LOOP),
    "batch_size": read(),
    "group_size": read(),
    "key_list": read(),
    "check_batch_ready_function": read(),
}
_TRAINER: Mapping[str, Rule] = {
    "type": read(),
    "custom_trainer_module_path": read(),
    "custom_trainer_class_name": read(),
    "total_train_steps": to("iterations"),
    "checkpoint_path": to("store"),
    "sync_weight_path": unused(),
    "save_freq": read(),
    "remove_previous_ckpt": read(),
}
_ALGORITHM: Mapping[str, Rule] = {
    "type": only("grpo", remedy="Set it to grpo, or name train.algorithm.kind."),
    "batch_size": unused(),
    "do_old_log_prob_compute": only(True, remedy="Set it to true: old log-probabilities are always recomputed."),
    "use_kl_in_reward": read(),
    "kl_penalty": read(),
    "kl_ctrl.*": read(),
    "critic.kl_ctrl.*": read(),
    "inference_service.*": refused(
        "Leave it out: the reference is the starting policy (train.algorithm.reference_every)."
    ),
}
_WEIGHT: Mapping[str, Rule] = {
    "type": only("default", remedy=_OWN_LOOP),
    "sync_mode": read(),
    "staleness_threshold": read(),
    "validate_freq": read(),
    "sync_method": to("generation.weight_sync", {"disk": "store", "network": "transfer", "tinker": "trainer"}),
    "sync_weight_path": unused(),
    "checkpoint_manager": unused(),
}
_INFERENCE: Mapping[str, Rule] = {
    "backend": read(),
    "url": read(),
    "base_url": read(),
    "model": read(),
    "model_path": to("policy.path"),
    "model_tag": only("default", remedy=_ONE_MODEL),
    "identifier": only("default", remedy=_ONE_MODEL),
    "api_key": read(),
    "max_retries": to("environment.max_retries"),
    "freeze_for_weight_sync": only(True, remedy="Set it to true, or choose weight.sync_mode fully-async."),
    "max_tokens": to("generation.sampling.max_new_tokens"),
    "tokenizer": unused(),
    "weight_type": unused(),
    "resource.replicas": to("generation.replicas"),
    "resource.gpus_per_replica": to("generation.gpus_per_replica"),
    "resource.*": unused(),
}
_ACTOR: Mapping[str, Rule] = {
    "model.path": to("policy.path"),
    "grad_clip": to("train.optimizer.max_grad_norm"),
    "clip_ratio_low": to("train.algorithm.clip_low"),
    "clip_ratio_high": to("train.algorithm.clip_high"),
    "clip_ratio_c": to("train.algorithm.dual_clip"),
    "loss_agg_mode": to("train.algorithm.loss_aggregation", {"token-mean": "token", "seq-mean-token-mean": "sequence"}),
    "entropy_coeff": to("train.algorithm.entropy_coefficient"),
    "use_kl_loss": read(),
    "kl_loss_type": read(),
    "kl_loss_coef": read(),
    "ppo_epochs": to("train.epochs"),
    "ppo_mini_batch_size": read(),
    "ppo_max_token_len_per_gpu": to("train.tokens_per_microbatch"),
    "ulysses_sequence_parallel_size": to("train.service.context_parallel"),
    "optim.lr": to("train.optimizer.learning_rate"),
    "optim.weight_decay": to("train.optimizer.weight_decay"),
    "optim.betas": to("train.optimizer.betas"),
    "optim.lr_warmup_steps": to("train.optimizer.warmup_steps"),
    "optim.lr_warmup_steps_ratio": only(0, remedy="Give the steps: train.optimizer.warmup_steps."),
    "optim.warmup_style": to("train.optimizer.schedule", {"constant": "constant", "cosine": "cosine"}),
    "fsdp_config.param_offload": refused("Set it to false: the trainer keeps its weights on its device."),
    "fsdp_config.optimizer_offload": refused("Set it to false: see train.optimizer.moments."),
    "*": unused(),
}
_TRAIN_SERVICE: Mapping[str, Rule] = {
    "backend": read(),
    "url": unused(),
    "model_tag": only("default", remedy=_ONE_MODEL),
    "identifier": only("default", remedy=_ONE_MODEL),
    "role": only("actor", remedy=_ONE_MODEL),
    "resource.world_size": read(),
    "resource.gpus_per_pod": read(),
    "resource.*": unused(),
    "config.loss_fn": unused(),
    "config.learning_rate": to("train.optimizer.learning_rate"),
    "config.eps": to("train.optimizer.eps"),
    "config.beta1": read(),
    "config.beta2": read(),
    **{f"actor.{name}": rule for name, rule in _ACTOR.items()},
}
TABLE: Mapping[str, Rule] = {
    "project_name": to("tracking.experiment"),
    "experiment_name": read(),
    "launch_mode": read(),
    "multi_model": only(False, "false", remedy=_ONE_MODEL),
    "defaults": read(),
    "logger.backend": read(),
    "logger.enable_feishu_logging": refused(
        "Set it to false: alerts go to Prefect's automations (docs/supervision.md)."
    ),
    "logger.feishu_url": unused(),
    "environment.setup_script": refused("Leave it out: run the script before the command, or build an image with it."),
    "environment.require_setup_script": refused("Leave it out, with environment.setup_script."),
    "resume.resume_path": read(),
    "resume.resume_dataloader": only(True, remedy="Set it to true: a run that resumes draws the tasks that are left."),
    **{f"data.{name}": rule for name, rule in _DATA.items()},
    **{f"rollout_worker.{name}": rule for name, rule in _WORKER.items()},
    **{f"trajectory_pool.{name}": rule for name, rule in _POOL.items()},
    **{f"trainer.{name}": rule for name, rule in _TRAINER.items()},
    **{f"trainer.algorithm.{name}": rule for name, rule in _ALGORITHM.items()},
    **{f"algorithm.{name}": rule for name, rule in _ALGORITHM.items()},
    **{f"weight.{name}": rule for name, rule in _WEIGHT.items()},
    **{f"service.inference_service.{name}": rule for name, rule in _INFERENCE.items()},
    **{f"service.train_service.{name}": rule for name, rule in _TRAIN_SERVICE.items()},
    **{f"service.train_service.main_actor.{name}": rule for name, rule in _TRAIN_SERVICE.items()},
    "service.tinker_service.base_url": to("train.service.url"),
    "service.tinker_service.lora_rank": to("train.service.lora_rank"),
    "service.tinker_service.api_key": read(),
    "service.weaver_service.*": refused("Leave it out: a run does not reach Weaver (docs/train-service.md)."),
    "validate.validate_before_train": to("evaluation.before_training"),
    "validate.data.type": read(),
    "validate.data.data_files": read(),
    "validate.data.*": unused(),
    "validate.eval.type": only("default", remedy=_OWN_LOOP),
    "validate.eval.validate_freq": read(),
    "runtime_monitor.exception_handling.enabled": read(),
    "runtime_monitor.exception_handling.policy": read(),
    "runtime_monitor.health_check.enabled": unused(),
    "runtime_monitor.health_check.check_interval": to("failures.heartbeat_seconds"),
    "runtime_monitor.*": unused(),
}
_MARKS = (
    "launch_mode", "project_name", "experiment_name", "rollout_worker", "trajectory_pool", "trainer", "weight", "service",
    "validate", "runtime_monitor",
)  # fmt: skip


def translate_configuration(tree: Tree, origin: str) -> Tree | None:
    """Return NexRL's configuration in the keys of this system; None if it is not NexRL's.

    Raises:
        ConfigError: lists every key without a counterpart, with the remedy.
    """
    resume = tree.get("resume")
    is_foreign = any(mark in tree for mark in _MARKS) or (isinstance(resume, dict) and "resume_path" in resume)
    if not is_foreign:
        return None
    return translate(tree, origin, "NexRL", TABLE, lambda result: _finish(result, origin))


def _finish(result: Translation, origin: str) -> None:
    """Set the values that depend on several keys."""
    if run_id := run_id_of(str(result.get("experiment_name", ""))):
        result.default("run_id", run_id, "experiment_name")
    _read_resume(result, origin)
    _read_launch(result)
    _read_data(result, origin)
    _read_worker(result, origin)
    _read_pool(result)
    _read_trainer(result, origin)
    _read_kl(result)
    _read_weight(result)
    _read_services(result)


_MODEL_DIRECTORIES = ("", "huggingface", "actor/huggingface")
"""Places of the Hugging Face files below a checkpoint `global_step_<step>`."""


def _read_resume(result: Translation, origin: str) -> None:
    """Read the path of a run's checkpoint; from the directory `global_step_<step>` of another program, the weights alone."""
    if not (path := result.get("resume.resume_path")):
        return
    place, _, name = str(path).rstrip("/").rpartition("/")
    step = name.removeprefix("global_step_")
    if step == name or not step.isdecimal():
        result.put("resume.path", path, "resume.resume_path")
    elif place.endswith("/checkpoints"):
        result.put("resume.path", f"{place}/{int(step):06d}", "resume.resume_path")
    else:
        folder = Path(beside(origin, path))
        models = [folder / each for each in _MODEL_DIRECTORIES if (folder / each / "config.json").is_file()]
        if not models:
            result.refuse(
                "resume.resume_path", f"Name a checkpoint of a run, or {name} with a Hugging Face directory in it."
            )
            return
        result.own.setdefault("policy", {})["path"] = str(models[0])
        result.own.pop("resume", None)
        result.unused.append("resume.mode (weights alone are read: optimizer and step start again)")


def _read_launch(result: Translation) -> None:
    mode = result.get("launch_mode", "local")
    if mode == "ray":
        result.default("train.service.kind", "ray", "launch_mode")
        result.default("rollout.distribution.kind", "process", "launch_mode")
        result.default("rollout.distribution.launcher", "ray", "launch_mode")
    elif mode != "local":
        result.refuse("launch_mode", "Set it to local or ray; on Kubernetes set infra.kind to kubernetes.")
    backends = result.get("logger.backend", [])
    names = [backends] if isinstance(backends, str) else backends
    if [name for name in names if name not in _SINKS]:
        result.refuse("logger.backend", _SINK)
    elif sinks := [sink for name in names if (sink := _SINKS[name]) not in (None, "mlflow")]:
        result.default("tracking.sinks", ["mlflow", *sinks], "logger.backend")


def _read_data(result: Translation, origin: str) -> None:
    if result.get("data.type") is not None or result.get("data.data_files") is not None:
        result.default("environment.kind", "worker", "data.type")
    for section, target in (("data", "train_data"), ("validate.data", "heldout_data")):
        kind, files = result.get(f"{section}.type"), result.get(f"{section}.data_files")
        if kind == "mock" and section == "data":
            result.put("environment.data_loader", "mock", "data.type")
            result.default(f"environment.{target}", str(result.get("data.num_items", 16)), "data.type")
        elif kind not in (None, "torch", "mock"):
            result.refuse(
                f"{section}.type", "Set it to torch or mock, or environment.data_loader to path/to/file.py:Class."
            )
        elif files and result.own.get("environment", {}).get("data_loader") == "mock":
            result.default(f"environment.{target}", "16", f"{section}.data_files")
        elif files:
            names = [beside(origin, each) for each in ([files] if isinstance(files, str) else files)]
            result.default(f"environment.{target}", ",".join(names), f"{section}.data_files")
    if result.get("data.filter_prompts") and (most := result.get("data.max_prompt_length")):
        result.put("rollout.max_prompt_tokens", most, "data.max_prompt_length")
    if (most := result.get("rollout_worker.max_sequence_length")) is not None:
        result.default("generation.max_model_len", most, "rollout_worker.max_sequence_length")
        result.default("rollout.max_tokens", most, "rollout_worker.max_sequence_length")


def _read_worker(result: Translation, origin: str) -> None:
    prefix = "rollout_worker"
    kinds = ("mock", "simple", "agent", "nexau")
    kind, module = result.get(f"{prefix}.type"), result.get(f"{prefix}.custom_rollout_worker_module_path")
    if module:
        name = result.get(f"{prefix}.custom_rollout_worker_class_name")
        if not name:
            key = f"{prefix}.custom_rollout_worker_module_path"
            result.refuse(key, "Name the class too: rollout_worker.custom_rollout_worker_class_name.")
        result.default("environment.worker", f"{beside(origin, module)}:{name}", f"{prefix}.type")
    elif kind in kinds:
        result.default("environment.worker", kind, f"{prefix}.type")
    elif kind is not None:
        remedy = f"Set it to {', '.join(kinds)}, or name a class: custom_rollout_worker_module_path and _class_name."
        result.refuse(f"{prefix}.type", _OTHER_WORKERS.get(kind, remedy))
    targets = [("evaluator_module_path", "environment.evaluator"), ("nexau_agent_workspace", "environment.workspace")]
    if kind == "nexau":  # only its worker takes these
        names = ("nexau_agent_config_path", "nexau_agent_workspace")
        targets += [(name, f"environment.parameters.{name}") for name in names]
    for name, target in targets:
        if value := result.get(f"{prefix}.{name}"):
            path, colon, symbol = str(value).partition(":")
            result.default(target, f"{beside(origin, path)}{colon}{symbol}", f"{prefix}.{name}")


def _read_pool(result: Translation) -> None:
    get, keys = result.get, result.get("trajectory_pool.key_list", [])
    if [key for key in keys if key not in ("group_id", "task_id", "run_id", "uid")]:
        result.refuse("trajectory_pool.key_list", "Leave it empty: a run's groups are the rollouts of one task.")
    size = get("trajectory_pool.group_size", 1)
    if size != 1:
        result.put("rollout.group_size", size, "trajectory_pool.group_size")
    batch = get("trajectory_pool.batch_size")
    if batch is None:
        return
    groups = result.own.get("rollout", {})
    members = groups.get("group_size", 1)
    expected = groups.get("prompts_per_iteration", batch // members) * members
    if batch != expected or batch % members:
        remedy = (
            f"Set it to {expected or members}: an iteration trains on data.batch_size tasks, {members} rollouts each."
        )
        result.refuse("trajectory_pool.batch_size", remedy)
        return
    result.default("rollout.prompts_per_iteration", batch // members, "trajectory_pool.batch_size")
    result.default("rollout.group_size", members, "trajectory_pool.batch_size")


def _read_trainer(result: Translation, origin: str) -> None:
    get, put, kind = result.get, result.put, result.get("trainer.type")
    if path := get("trainer.custom_trainer_module_path"):
        kind = f"{path}:{get('trainer.custom_trainer_class_name', 'CustomTrainer')}"
    if kind is not None and ":" in str(kind):
        path, _, symbol = str(kind).rpartition(":")
        put("train.algorithm.kind", "custom", "trainer.type")
        put("train.algorithm.target", f"{beside(origin, path)}:{symbol}", "trainer.type")
    elif kind in _TRAINERS:
        put("train.algorithm.kind", _TRAINERS[kind], "trainer.type")
    elif kind is not None:
        remedy = f"Set it to {', '.join(_TRAINERS)}, or to a subclass of nexrl.trainer's: path/to/file.py:Class."
        result.refuse("trainer.type", remedy)
    if every := get("trainer.save_freq", 0):
        put("checkpoint.optimizer_every", every, "trainer.save_freq")
    if (removes := get("trainer.remove_previous_ckpt")) is not None:
        put("checkpoint.keep_last" if removes else "checkpoint.keep_every", 1, "trainer.remove_previous_ckpt")


def _read_kl(result: Translation) -> None:
    """Read the KL in the reward (the algorithm's), else the KL in the loss (the train service's)."""
    get, put = result.get, result.put
    for prefix in ("trainer.algorithm", "algorithm"):
        if not get(f"{prefix}.use_kl_in_reward"):
            continue
        put("train.algorithm.kl_placement", "reward", f"{prefix}.use_kl_in_reward")
        for controller in (f"{prefix}.kl_ctrl", f"{prefix}.critic.kl_ctrl"):
            if (coefficient := get(f"{controller}.kl_coef")) is not None:
                put("train.algorithm.kl_coefficient", coefficient, f"{controller}.kl_coef")
            if get(f"{controller}.type") == "adaptive":
                put(
                    "train.algorithm.adaptive_kl.target", get(f"{controller}.target_kl", 0.1), f"{controller}.target_kl"
                )
                put(
                    "train.algorithm.adaptive_kl.horizon", get(f"{controller}.horizon", 10_000), f"{controller}.horizon"
                )
        _put_estimator(result, f"{prefix}.kl_penalty")
    for prefix in ("service.train_service.main_actor.actor", "service.train_service.actor"):
        if get(f"{prefix}.use_kl_loss"):
            put("train.algorithm.kl_coefficient", get(f"{prefix}.kl_loss_coef", 0.001), f"{prefix}.kl_loss_coef")
            _put_estimator(result, f"{prefix}.kl_loss_type")


def _put_estimator(result: Translation, key: str) -> None:
    if (name := result.get(key)) is None:
        return
    if _KL_ESTIMATORS.get(name) is None:
        result.refuse(key, "Set it to kl, mse or low_var_kl.")
    else:
        result.put("train.algorithm.kl_estimator", _KL_ESTIMATORS[name], key)


def _read_weight(result: Translation) -> None:
    get, put, mode = result.get, result.put, result.get("weight.sync_mode")
    threshold = get("weight.staleness_threshold", 0)
    if mode not in (None, "sync", "fully-async", "batch-async"):
        result.refuse("weight.sync_mode", "Set it to sync, fully-async or batch-async.")
    elif mode in ("fully-async", "batch-async"):
        if mode == "fully-async" and not threshold:
            remedy = "Set it to 1 or more: a rollout's age is bounded in every mode here, and 0 would be sync."
            result.refuse("weight.staleness_threshold", remedy)
        put("asynchrony.mode", mode, "weight.sync_mode")
        put("asynchrony.staleness", threshold, "weight.staleness_threshold")
    rules = (
        "batch_size",
        "batch_size_reached",
        "loaded_batch_finished",
        "batch_size_reached_and_loaded_batch_finished",
    )
    if get("trajectory_pool.check_batch_ready_function", rules[0]) not in rules:
        result.refuse("trajectory_pool.check_batch_ready_function", f"Set it to {', '.join(rules)}.")
    monitor = "runtime_monitor.exception_handling"
    if get(f"{monitor}.enabled") is False:  # no error ends the run there either
        put("failures.policy", "continue", f"{monitor}.enabled")
    elif (policy := get(f"{monitor}.policy")) is not None:
        put("failures.policy", policy, f"{monitor}.policy")
    for key in ("weight.validate_freq", "validate.eval.validate_freq"):
        if (every := get(key)) is not None:
            put("evaluation.every", every or None, key)
    if not any(key.startswith("validate.data.") for key in result.keys):
        result.default("evaluation.every", None, "validate.eval.validate_freq")


def _read_services(result: Translation) -> None:
    get, put, prefix = result.get, result.put, "service.inference_service"
    backend, url = get(f"{prefix}.backend"), get(f"{prefix}.base_url", get(f"{prefix}.url"))
    if backend not in (None, "vllm", "sglang", "tinker"):
        result.refuse(f"{prefix}.backend", "Set it to vllm, sglang or tinker, or name generation.backend.")
    elif backend == "tinker":
        put("generation.backend", "tinker", f"{prefix}.backend")
        put("train.service.kind", "tinker", f"{prefix}.backend")
        put("train.service.base_model", get(f"{prefix}.model"), f"{prefix}.model")
    elif backend is not None and (url or backend == "sglang"):
        key = f"{prefix}.base_url" if get(f"{prefix}.base_url") else f"{prefix}.url"
        if not url:
            result.refuse(f"{prefix}.backend", "It needs CUDA: start SGLang's server, and name it in base_url.")
        kind = "tokens" if backend == "vllm" else "sglang"
        put("generation.backend", "openai", f"{prefix}.backend")
        put("generation.endpoint.url", str(url).removesuffix("/v1"), key)
        put("generation.endpoint.model", get(f"{prefix}.model", "default"), f"{prefix}.model")
        put("generation.endpoint.kind", kind, f"{prefix}.backend")
        put("generation.endpoint.weight_update", backend, f"{prefix}.backend")
    elif backend is not None:
        put("generation.backend", backend, f"{prefix}.backend")
    for key, target in (
        (f"{prefix}.api_key", "generation.endpoint.api_key_variable"),
        ("service.tinker_service.api_key", "train.service.token_variable"),
    ):
        if isinstance(secret := get(key), dict):
            put(target, secret["variable"], key)
        elif secret not in (*OFF, "EMPTY"):
            result.refuse(key, f"Leave it out, and name the environment variable that holds it: {target}.")
    if "path" in result.own.get("policy", {}):
        result.default("policy.kind", "pretrained", f"{prefix}.model_path")
    for name in ("service.train_service.main_actor", "service.train_service"):
        kinds = (None, "nextrainer", "direct-zmq", "http", "tinker")
        if get(f"{name}.backend") not in kinds:
            result.refuse(
                f"{name}.backend",
                "Set it to nextrainer or tinker, or choose train.service.kind: no backend makes results up.",
            )
        if ranks := max(get(f"{name}.resource.world_size", 0), get(f"{name}.resource.gpus_per_pod", 0)):
            put("train.service.processes", ranks, f"{name}.resource.gpus_per_pod")
        if (part := get(f"{name}.actor.ppo_mini_batch_size")) and (batch := get("trajectory_pool.batch_size")):
            put("train.minibatches", max(1, round(batch / part)), f"{name}.actor.ppo_mini_batch_size")
        betas = [get(f"{name}.config.beta1"), get(f"{name}.config.beta2")]
        if None not in betas:
            put("train.optimizer.betas", betas, f"{name}.config.beta1")
