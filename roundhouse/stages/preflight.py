"""What can be known of a run before anything is started: before its first record is in the store, before services and engine.

Invariant: these checks only read, and refuse nothing that a later stage would take. They raise what that stage would raise,
with the key or option at fault; what only a service can know is left to it.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from roundhouse.config.environments import (
    AgentEnvironment,
    CommandEnvironment,
    CustomEnvironment,
    MixtureEnvironment,
    NemoGymEnvironment,
    RemoteEnvironment,
    WorkerEnvironment,
    environments_in,
)
from roundhouse.config.generation import Endpoint
from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.models import BundledPolicy, LocalInfra, PretrainedPolicy, RunConfig, WarmStartPolicy
from roundhouse.config.secrets import read_secret
from roundhouse.config.training import ProcessService, ResidentService, TemplatedPolicy
from roundhouse.cpu import computes_bfloat16
from roundhouse.environments import check_sandboxes, first_task, load_any, refuse_without_demonstrations
from roundhouse.environments.base import GymnasiumEnvironment, TaskRow
from roundhouse.errors import ConfigError, StoreError
from roundhouse.infra.checks.machine import available_memory, memory_plan, shape_of
from roundhouse.policy.gguf import check_gguf, gguf_file, template_of
from roundhouse.policy.model_directory import (
    BUNDLED,
    ChatTemplate,
    bundled_file,
    check_model_directory,
    refuse_unfit_template,
    template_in,
    template_text,
)
from roundhouse.rollout.clients import open_environment, tools_of
from roundhouse.rollout.plan import build_curriculum
from roundhouse.rollout.rubric import refuse_unfit_criteria
from roundhouse.stages.evaluate import no_heldout_task
from roundhouse.store.location import Location
from roundhouse.store.run import load_run, no_such_version, run_exists, run_ids, version_named
from roundhouse.store.stage import MANIFEST, model_location

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0


def refuse_unready(config: RunConfig, *, remote: bool = True, trains: bool = True) -> None:
    """Refuse a run whose store, algorithm, curriculum, environment, held-out tasks, starting policy or datasets cannot be had.

    Args:
        remote: look into buckets, too. A dry run asks nothing outside this machine.
        trains: the engine has to take new weights.

    Raises:
        ConfigError: names the key and the remedy.
    """
    if Location(config.store).is_local:
        directory = Location(config.store).local_path
        there = next(place for place in (directory, *directory.parents) if place.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "cannot be written to" if there.is_dir() else "is no directory"
            raise ConfigError(f"store is {directory}, but {there} {why}. Set store to a place that can be written to.")
    # A processor without instructions for bfloat16 converts every number: about three times slower than float32.
    if isinstance(config.infra, LocalInfra) and not computes_bfloat16():
        generation, train = config.generation, config.train
        on_cpu = {
            "generation.dtype": generation.engine_url is None and generation.gpus_per_replica == 0 and generation.dtype,
            "train.dtype": train.device == "cpu" and train.dtype,
        }
        for key, dtype in on_cpu.items():
            if dtype == "bfloat16":
                raise ConfigError(
                    f"{key} is bfloat16, but this machine's processor has no instructions for it: about three times slower "
                    f"than float32. Set {key} to float32."
                )
    _refuse_unfit_endpoint(config, remote, trains)
    algorithm = config.train.algorithm
    if ":" in getattr(algorithm, "target", getattr(algorithm, "policy_loss", "")):
        from roundhouse.training.algorithms import build_algorithm  # imports torch

        build_algorithm(algorithm)
    build_curriculum(config.rollout.curriculum)
    for key, each in environments_in(config.environment).items():
        for name, criteria in (("rubric", each.rubric), ("audit", each.audit)):
            if criteria is not None:
                refuse_unfit_criteria(criteria, f"{key}.{name}", ask=remote)
    _refuse_unbranchable(config)
    _refuse_unfit_pods(config)
    task = first_task(config.environment)
    if remote and isinstance(config.infra, LocalInfra):  # elsewhere, sandboxes start where the collectors are
        check_sandboxes(config.environment)
    evaluation, offline = config.evaluation, config.offline
    evaluates = (offline is None or offline.evaluate) and (evaluation.every is not None or evaluation.before_training)
    if not _has_tasks(config, remote) and evaluates:
        raise no_heldout_task(config)
    _refuse_unfit_layout(config, remote)
    refuse_unfit_memory(config)
    reachable = remote or Location(config.store).is_local
    if reachable and (Location(config.store) / f"runs/{config.run_id}/checkpoints/000000").exists(MANIFEST):
        return  # it has what it begins with
    if config.resume.path is None:
        _starting_policy(config, remote, task)
    if config.offline is not None and reachable:
        from roundhouse.stages.offline import find_datasets

        find_datasets(config.store, config.offline.datasets)


def _refuse_unbranchable(config: RunConfig) -> None:
    """Refuse `rollout.branching` with an environment that cannot be rebuilt at a turn, or that has one turn alone."""
    if config.rollout.branching is None:
        return
    found: dict[str, str] = {}
    for key, each in environments_in(config.environment).items():
        found[key] = open_environment(each).restoration
        if found[key] == "none":
            remedy = (
                f"set {key}.restore to replay" if isinstance(each, RemoteEnvironment) else "declare it in its class"
            )
            raise ConfigError(
                f"rollout.branching is set, but {key} ({each.kind}) has the restoration none: its calls cannot be made again, "
                f"and no turn rebuilt. Where they can, {remedy}; else leave branching out."
            )
        # One with a task is in this process; a Gymnasium world, tools or MCP servers give its rollouts a second turn.
        if (task := first_task(each)) is not None and not (
            isinstance(load_any(each), GymnasiumEnvironment) or tools_of(task) or getattr(each, "mcp_servers", None)
        ):
            raise ConfigError(
                f"rollout.branching is set, but {key} ({each.kind}) offers no tool: a rollout is one turn, and a branch begins "
                "at a later one. Leave branching out, or raise rollout.group_size."
            )
    if len(set(found.values())) > 1:
        raise ConfigError(
            f"rollout.branching is set, but the environments of the mixture differ in restoration ({found}), so that none of "
            "them is restored. Leave branching out, or mix environments of one restoration."
        )


def _refuse_unfit_pods(config: RunConfig) -> None:
    """Refuse servers of a NeMo Gym of the run's own that cannot work in pods, on a cluster."""
    if not isinstance(infra := config.infra, KubernetesInfra):
        return
    for environment in environments_in(config.environment).values():
        if isinstance(environment, NemoGymEnvironment):
            from roundhouse.compat.nemo_gym.owned import resolved_for_pods  # needed by this kind alone

            resolved_for_pods(environment, infra, "http://engine")


def refuse_no_checkpoint(config: RunConfig, version: int | None, *, promoted: bool = False) -> None:
    """Refuse to evaluate a checkpoint, or to collect with one, that is not there. The starting policy of a run that has not
    begun is asked for by its number, 0, and is made then.

    Raises:
        StoreError: no such run, or no such version of it.
        ConfigError: nothing is promoted.
    """
    if not run_exists(config.store, config.run_id):
        if version != 0:
            there = ", ".join(run_ids(config.store)) or "none"
            raise StoreError(
                f"No run {config.run_id!r} in {Location(config.store).uri}. Runs there: {there}. Train it first, or name its "
                "starting policy, which is made then: --version 0."
            )
        refuse_unready(config, trains=False)
        return
    run = load_run(config.store, config.run_id)
    if promoted:
        version = version_named(run, "promoted")
    begins = version == run.first_version and run.latest_checkpoint() is None
    if version is not None and not begins and run.checkpoint(version).reference() is None:
        raise no_such_version(run, version)


def _refuse_unfit_endpoint(config: RunConfig, remote: bool, trains: bool) -> None:
    """A server that runs already takes weights where they change, and lists its models; what it answers to tokens is looked at
    when the engine starts."""
    endpoint = config.generation.endpoint
    if endpoint is None:
        return
    if trains and endpoint.kind == "text" and config.offline is None:
        raise ConfigError(
            f"generation.endpoint.kind is text, so {endpoint.url} returns neither token IDs nor log-probabilities: evaluations "
            "and collections work with --version 0, training does not. Name a server that returns them, and set kind "
            "to tokens or sglang."
        )
    if trains and endpoint.weight_update is None and config.offline is None:
        raise ConfigError(
            f"generation.endpoint.weight_update is unset, so {endpoint.url} keeps the weights that it has: evaluations and "
            "collections work with --version 0, training does not. Set it to vllm or sglang, if the server can read a "
            "checkpoint's directory."
        )
    if not remote:
        return
    import httpx

    secret = None if endpoint.api_key_variable is None else read_secret(endpoint.api_key_variable)
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    try:
        status = httpx.get(f"{endpoint.url}/v1/models", headers=headers, timeout=ANSWER_SECONDS).status_code
        problem = None if status == 200 else f"answered {status}"
    except httpx.HTTPError as error:
        problem = f"does not answer ({type(error).__name__}: {error})"
    if problem is not None:
        raise ConfigError(
            f"generation.endpoint.url is {endpoint.url}, whose /v1/models {problem}. Start the server, or correct the section "
            "generation.endpoint."
        )
    if endpoint.kind != "text":
        try:
            _refuse_no_tokens(endpoint, headers, config.generation.request_timeout_seconds)
        except httpx.HTTPError as error:
            raise ConfigError(
                f"generation.endpoint.url is {endpoint.url}, which does not draw a token within "
                f"generation.request_timeout_seconds ({type(error).__name__}: {error}). Start the server again, or raise it."
            ) from error


def _refuse_no_tokens(endpoint: Endpoint, headers: dict[str, str], seconds: float) -> None:
    """Draw one token as the engine will, and see that it comes with its ID and log-probability.

    Raises:
        ConfigError: it does not.
        httpx.HTTPError: the server does not answer within `seconds`.
    """
    import httpx

    from roundhouse.generation import openai_engine, sglang_engine
    from roundhouse.generation.protocol import BadReply, EngineUnreachable

    path = "/v1/completions"
    body: dict[str, Any] = {"model": endpoint.model, "prompt": [0, 1], "max_tokens": 1, "logprobs": 0}
    body[openai_engine.TOKENS] = True
    if endpoint.kind == "sglang":
        path = "/generate"
        body = {"input_ids": [0, 1], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    reply = httpx.post(endpoint.url + path, json=body, headers=headers, timeout=seconds)
    try:
        if endpoint.kind == "sglang":
            sglang_engine.read_tokens(reply.json()["meta_info"])
        else:
            openai_engine.read_tokens(reply.json()["choices"][0])
    except (BadReply, EngineUnreachable, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"generation.endpoint.url is {endpoint.url}, whose {path} answers {reply.status_code} with no token IDs with "
            f"log-probabilities ({reply.text[:200]!r}), as generation.endpoint.kind {endpoint.kind} needs them: its answers "
            f"cannot be trained on. {openai_engine.REMEDY}"
        ) from error


def _has_tasks(config: RunConfig, remote: bool) -> bool:
    """Whether there are held-out tasks. Reads the files of rows and makes the class of a custom environment."""
    environment = config.environment
    if isinstance(environment, CustomEnvironment | CommandEnvironment | MixtureEnvironment | NemoGymEnvironment):
        return any(True for _ in open_environment(environment).tasks("heldout"))
    if isinstance(environment, AgentEnvironment | RemoteEnvironment):
        rows = (environment.train_tasks, environment.heldout_tasks)
    elif isinstance(environment, WorkerEnvironment):
        rows = (environment.train_data, environment.heldout_data)
    else:
        return getattr(environment, "heldout_fraction", 1) > 0
    if remote or not any("://" in (uri or "") for uri in rows):
        return any(True for _ in open_environment(environment).tasks("heldout"))
    return rows[1] is not None


def _starting_policy(config: RunConfig, remote: bool, task: TaskRow | None) -> None:
    policy = config.policy
    if isinstance(policy, WarmStartPolicy):
        refuse_without_demonstrations(config.environment)
        return
    prompts = [config.rollout.system_prompt, *(each.system_prompt for each in config.rollout.environments.values())]
    tools, system = tools_of(task), next((prompt for prompt in prompts if prompt is not None), None)
    if isinstance(policy, BundledPolicy):
        file = bundled_file(policy.name)
        check_gguf(file)
        refuse_small_memory(config, BUNDLED[policy.name].memory_gib)
        refuse_unfit_template(_chosen(policy, template_of(file)), tools, system)
        return
    source = model_location(Location(policy.path))
    if source.is_local:
        if (gguf := gguf_file(source.local_path)) is None:
            check_model_directory(source.local_path)
            refuse_unfit_template(_chosen(policy, template_in(source.local_path)), tools, system)
        else:
            check_gguf(gguf)
            refuse_unfit_template(_chosen(policy, template_of(gguf)), tools, system)
    elif remote and not source.exists("config.json") and not any(name.endswith(".gguf") for name in source.names()):
        raise ConfigError(f"policy.path is {source.uri}: it holds no config.json. Give a Hugging Face model directory.")


def _chosen(policy: TemplatedPolicy, own: ChatTemplate) -> ChatTemplate:
    """The template that the run renders with."""
    name = policy.chat_template
    return own if name is None else replace(own, source=f"policy.chat_template ({name})", text=template_text(name))


def _refuse_unfit_layout(config: RunConfig, remote: bool) -> None:
    policy = config.policy
    if max(config.train.parallelism.values()) == 1 or (
        isinstance(policy, PretrainedPolicy) and not remote and not Location(policy.path).is_local
    ):
        return
    if (shape := shape_of(config)) is not None:
        from roundhouse.training.memory_plan import refuse_unfit_layout

        refuse_unfit_layout(shape, config.train)


def refuse_unfit_memory(config: RunConfig) -> None:
    """Refuse a policy whose training step does not fit this machine: its first GPU, or of its memory what is free for a rank.

    On CPUs a policy that is small beside the memory is not planned, which takes seconds.

    Raises:
        ConfigError: with the plan, and the settings that fit.
    """
    train, policy, service = config.train, config.policy, config.train.service
    if not isinstance(service, ResidentService | ProcessService) or service.launcher not in (None, "subprocess"):
        return
    if not isinstance(config.infra, LocalInfra) or not train.check_memory:
        return
    if not isinstance(policy, PretrainedPolicy) or not (source := model_location(Location(policy.path))).is_local:
        return
    if train.device != "cpu" and any(Path("/dev").glob("nvidia[0-9]*")):
        import torch

        if not torch.cuda.is_available():
            return
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        memory = available_memory() // service.processes
        if _BYTES_OF_A_STEP * sum(file.stat().st_size for file in source.local_path.glob("*.safetensors")) < memory:
            return
    try:
        findings = memory_plan(config, f"{memory / 1e9:.2f}GB", None)
    except ConfigError as error:
        logger.warning("%s", error)
        return
    for finding in findings:
        if finding.status == "fail":
            raise ConfigError(
                f"The training step {finding.detail}. {finding.remedy} Or set train.check_memory to false."
            )


_BYTES_OF_A_STEP = 8
"""For a byte of weights in bfloat16, before any activation: weights, gradient and two moments in float32."""


def refuse_small_memory(config: RunConfig, needed_gib: float) -> None:
    """Refuse a model that this machine has no room for, where engine and trainer are on it.

    Raises:
        ConfigError: less memory is free.
    """
    if not isinstance(config.infra, LocalInfra) or config.generation.engine_url is not None:
        return
    free = available_memory() / 2**30
    if free < needed_gib:
        raise ConfigError(
            f"policy.name is {getattr(config.policy, 'name', None)}: its run takes about {needed_gib:g} GiB of memory, and "
            f"{free:.1f} GiB are free. End other programs, or start from a small policy (policy.kind warm_start)."
        )
