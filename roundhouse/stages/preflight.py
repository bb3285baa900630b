"""Checks of a run before anything starts: before its first record in the store, before services and engine.

Invariant: these checks only read, and refuse only what a later stage would refuse, with its error, the key or option,
and the remedy. Facts that only a service knows are left to the service.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Sequence

from roundhouse import plugins
from roundhouse.config.environments import environment_traits, environments_in
from roundhouse.config.models import RunConfig
from roundhouse.config.operations import with_set
from roundhouse.config.placement import trainer_launcher
from roundhouse.cpu import computes_bfloat16
from roundhouse.environments import (
    check_sandboxes,
    first_task,
    has_own_splits,
    load_any,
)
from roundhouse.environments.base import BadReward, GymnasiumEnvironment, TaskRow
from roundhouse.errors import ConfigError, StoreError
from roundhouse.health.policy import code_of, code_of_type
from roundhouse.images import FAMILIES, BadImage, images_of
from roundhouse.launch.base import Launcher
from roundhouse.policy.existing import prompts_in
from roundhouse.policy.prompt_lengths import Prompts, longer_than_allowed
from roundhouse.policy.starting import starting_policy_of
from roundhouse.rollout.agents import GymnasiumLoop, ToolLoop
from roundhouse.rollout.clients import (
    LocalEnvironmentClient,
    first_messages,
    open_environment,
    tools_of,
    verdict_on,
)
from roundhouse.rollout.hosted import HostedEnvironmentClient
from roundhouse.rollout.plan import WeightedTasks, build_curriculum, refuse_few_tasks, refuse_incomplete_iteration
from roundhouse.rollout.protocol import EnvironmentClient
from roundhouse.rollout.rubric import refuse_unfit_criteria
from roundhouse.stages.collect import last_iteration
from roundhouse.stages.endpoint_check import refuse_unfit_endpoint
from roundhouse.stages.evaluate import no_heldout_task
from roundhouse.stages.hooks import refuse_unfit_hooks
from roundhouse.stages.machine_fit import refuse_small_memory, refuse_unfit_layout, refuse_unfit_memory
from roundhouse.stages.metric_catalogue import meaning_of
from roundhouse.stages.report import sink_class
from roundhouse.stages.task_survey import has_local_rows
from roundhouse.store.lineage import parent_at
from roundhouse.store.location import Location
from roundhouse.store.run import load_run, no_such_version, run_exists, run_ids, version_named
from roundhouse.store.stage import MANIFEST, model_location

TRIAL_SECONDS = 10.0


def refuse_unready(config: RunConfig, *, remote: bool = True, trains: bool = True, draws: bool | None = None) -> None:
    """Refuse a run with an unusable store, algorithm, curriculum, environment, task, starting policy or dataset.

    Args:
        remote: check buckets, too. A dry run makes no remote requests.
        trains: the engine has to take new weights.
        draws: training tasks are drawn; None: if the run trains.

    Raises:
        ConfigError: names the key and the remedy.
    """
    draws = trains if draws is None else draws
    _refuse_unwritable_store(config)
    _refuse_slow_bfloat16(config)
    refuse_unknown_metric(config)
    refuse_unfit_endpoint(config, remote, trains)
    algorithm = config.train.algorithm
    if ":" in getattr(algorithm, "target", getattr(algorithm, "policy_loss", "")):
        from roundhouse.training.algorithms import build_algorithm  # imports torch

        build_algorithm(algorithm)
    build_curriculum(config.rollout.curriculum)
    _refuse_unfit_classes(config)
    for key, each in environments_in(config.environment).items():
        plugins.check("environment", each.kind, each)
        for name, criteria in (("rubric", each.rubric), ("audit", each.audit)):
            if criteria is not None:
                refuse_unfit_criteria(criteria, f"{key}.{name}", ask=remote)
    _refuse_unbranchable(config)
    _refuse_unfit_pods(config)
    refuse_unfit_hooks(config)
    for sink in config.tracking.sinks if config.tracking.enabled else ():
        if sink != "mlflow":
            sink_class(sink)
    reads_rows = remote or has_local_rows(config.environment)
    task = first_task(config.environment) if reads_rows else None
    tasks = _training_tasks(config) if draws and reads_rows and config.offline is None else None
    if remote and config.infra.runs_here:  # else sandboxes start elsewhere
        check_sandboxes(config.environment)
    evaluation, offline = config.evaluation, config.offline
    evaluates = (offline is None or offline.evaluate) and (evaluation.every is not None or evaluation.before_training)
    if not _has_tasks(config, remote) and evaluates:
        raise no_heldout_task(config)
    if evaluates:
        _refuse_empty_sets(config, remote)
    _refuse_missing_models(config, remote)
    refuse_unfit_layout(config, remote)
    refuse_unfit_memory(config)
    if _has_begun(config, remote):
        return
    prompts = _prompts(config, remote, task)
    if tasks is not None:
        _refuse_unfit_tasks(config, tasks, prompts)
        if trains and config.rollout.epochs is not None and config.resume.path is not None and prompts is not None:
            start = parent_at(config.resume.path).version
            last_iteration(config.rollout, len(prompts.fitting(tasks)), start)
    if config.offline is not None and (remote or Location(config.store).is_local):
        from roundhouse.stages.offline import find_datasets, refuse_other_sampling

        refuse_other_sampling(config, find_datasets(config.store, config.offline.datasets))


def _refuse_unfit_classes(config: RunConfig) -> None:
    """Refuse an engine, a weight transport or a launcher of the user's that cannot be imported or is incomplete."""
    generation = config.generation
    if ":" in generation.backend and config.infra.runs_here and generation.engine_url is None:
        from roundhouse.generation.interface import backend_class

        backend_class(generation.backend)
    if not isinstance(generation.weight_sync, str):
        from roundhouse.weight_sync.base import load_transport

        load_transport(generation.weight_sync)
    launchers = {
        "train.service.launcher": trainer_launcher(config),
        "rollout.distribution.launcher": getattr(config.rollout.distribution, "launcher", None),
    }
    for key, name in launchers.items():
        if name is not None and ":" in name:
            plugins.chosen("launcher", name, Launcher, key)


def _has_begun(config: RunConfig, remote: bool) -> bool:
    """Return whether the run has its starting policy in the store."""
    if not remote and not Location(config.store).is_local:
        return False
    return (Location(config.store) / f"runs/{config.run_id}/checkpoints/000000").exists(MANIFEST)


def _training_tasks(config: RunConfig) -> Sequence[TaskRow]:
    """Return the training tasks.

    Raises:
        ConfigError: as `_first_training_task`.
    """
    client = open_environment(config.environment)
    _first_training_task(config, client)
    return client.tasks("train")


def _first_training_task(config: RunConfig, client: EnvironmentClient) -> TaskRow:
    """Return the first training task.

    Raises:
        ConfigError: the environment does not have a task, or the first is not a task row.
    """
    task = next(iter(client.tasks("train")), None)
    if task is None:
        raise ConfigError(
            f"environment.kind is {config.environment.kind} and has no training task. Name a file with tasks, or return "
            "tasks from tasks('train')."
        )
    if not isinstance(task, dict):
        raise ConfigError(
            f"environment.kind is {config.environment.kind}: its first training task is {task!r:.80}, a {type(task).__name__}. "
            "Give task rows, as roundhouse.environments.base.task_row makes them."
        )
    return task


def _refuse_unwritable_store(config: RunConfig) -> None:
    if Location(config.store).is_local:
        directory = Location(config.store).local_path
        existing = next(place for place in (directory, *directory.parents) if place.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            why = "cannot be written to" if existing.is_dir() else "is not a directory"
            raise ConfigError(
                f"store is {directory}, but {existing} {why}. Set store to a place that can be written to."
            )


def _refuse_slow_bfloat16(config: RunConfig) -> None:
    """Refuse bfloat16 on a processor without instructions for it, which is about three times slower than float32."""
    if config.infra.runs_here and not computes_bfloat16():
        generation, train = config.generation, config.train
        on_cpu = {
            "generation.dtype": generation.engine_url is None and generation.gpus_per_replica == 0 and generation.dtype,
            "train.dtype": train.device == "cpu" and train.dtype,
        }
        for key, dtype in on_cpu.items():
            if dtype == "bfloat16":
                raise ConfigError(
                    f"{key} is bfloat16, but this machine's processor lacks instructions for it: about three times slower "
                    f"than float32. Set {key} to float32."
                )


def verifier_warnings(config: RunConfig) -> list[str]:
    """Let the verifier of an environment in this process judge an answer to the first task; return its error.

    The verifiers that come with Roundhouse are not tried.

    Raises:
        ConfigError: its reward is not a finite number.
    """
    if not has_local_rows(config.environment):
        return []
    client = open_environment(config.environment)
    if has_own_splits(config.environment) or not isinstance(client, LocalEnvironmentClient | HostedEnvironmentClient):
        return []
    task, outcome = _first_training_task(config, client), queue.SimpleQueue[Exception | None]()

    async def verdict() -> None:
        async with client:
            await verdict_on(client, task, "0")

    def judge() -> None:
        try:
            asyncio.run(verdict())
            outcome.put(None)
        except Exception as error:  # noqa: BLE001 - the environment's code ends here
            outcome.put(error)

    threading.Thread(target=judge, name="roundhouse-trial", daemon=True).start()  # ends with the process
    try:
        error = outcome.get(timeout=TRIAL_SECONDS)
    except queue.Empty:
        return [f"{client.name}: verify has not judged the answer '0' to the first task within {TRIAL_SECONDS:g} s."]
    if error is None:
        return []
    text = f"The answer '0' to the first task cannot be judged: {error}"
    if code_of(error) == code_of_type(BadReward.__name__):  # the hosted process names the type alone
        raise ConfigError(text)
    return [text]


def refuse_unknown_metric(config: RunConfig) -> None:
    """Refuse a target that no iteration could reach, since no stage reports the metric."""
    finish = config.finish
    if finish.at_least is not None and meaning_of(finish.metric) is None:
        raise ConfigError(
            f"finish.metric is {finish.metric!r}, but no stage reports it. Name one of docs/metrics.md, such as "
            "evaluation/reward/mean or reward/mean."
        )


def _refuse_unfit_tasks(config: RunConfig, tasks: Sequence[TaskRow], prompts: Prompts | None) -> None:
    """Refuse training tasks if `rollout` leaves too few for an iteration, or if a first prompt fills the context.

    Args:
        prompts: None if they cannot be rendered here; then each task counts.
    """
    rollout = config.rollout
    n = rollout.prompts_per_iteration
    draws_once = build_curriculum(rollout.curriculum) is not None
    if prompts is not None:
        tasks = prompts.fitting(tasks, n if draws_once or rollout.drop_last else 1)
    if not isinstance(tasks, WeightedTasks):
        if rollout.drop_last:
            refuse_incomplete_iteration(len(tasks), n)
        if draws_once:
            refuse_few_tasks(len(tasks), len(tasks), n)
    agent = open_environment(config.environment).agent
    if prompts is None or not isinstance(agent, ToolLoop | GymnasiumLoop):  # others make the prompt
        return
    first, limit = tasks[0], config.generation.max_model_len
    _refuse_unseen_parts(config, first)
    if (count := prompts.above(first, limit - 1)) is not None:
        raise ConfigError(
            f"generation.max_model_len is {limit}, and the prompt of the first training task ({first.get('task_id')}) has "
            f"{count} tokens, which leaves none for a reply. Raise it, or shorten the row, its tools or rollout.system_prompt."
        )


def _refuse_unseen_parts(config: RunConfig, task: TaskRow) -> None:
    """Refuse a prompt with parts that the policy cannot see, or with an image that is not sent as data."""
    messages = first_messages(task)
    prompt = f"The prompt of the first training task ({task.get('task_id')})"
    kinds = [
        part["type"] for message in messages if isinstance(message.get("content"), list) for part in message["content"]
    ]
    for kind in kinds:
        if kind not in ("text", "image_url"):
            raise ConfigError(f"{prompt} has a content part of type {kind}. Leave such parts out of the rows.")
    if "image_url" in kinds and not config.generation.images:
        raise ConfigError(
            f"{prompt} has an image, and generation.images is false. Set it to true, with a policy of type "
            f"{' or '.join(FAMILIES)}, or leave images out of the rows."
        )
    try:
        images_of(messages)
    except BadImage as error:
        raise ConfigError(f"{prompt}: {error}") from error


def prompt_warnings(config: RunConfig, *, remote: bool = True) -> list[str]:
    """Return a warning about the training tasks that `rollout.max_prompt_tokens` leaves out.

    Args:
        remote: read rows and models in buckets, too.
    """
    if config.rollout.max_prompt_tokens is None or config.offline is not None:
        return []
    if _has_begun(config, remote) or not (remote or has_local_rows(config.environment)):
        return []
    prompts = _prompts(config, remote, None)
    tasks = _training_tasks(config)
    report = None if prompts is None else longer_than_allowed(config.rollout, prompts.fitting(tasks), tasks)
    return [] if report is None else [report]


def _refuse_empty_sets(config: RunConfig, remote: bool) -> None:
    """Refuse one of `evaluation.sets` without a held-out task."""
    for name in config.evaluation.sets:
        own = with_set(config, name)
        if own.environment != config.environment and not _has_tasks(own, remote):
            raise ConfigError(f"evaluation.sets.{name}: {no_heldout_task(own)}")


def _refuse_missing_models(config: RunConfig, remote: bool) -> None:
    """Refuse a teacher's or a critic's directory without a model."""
    algorithm = config.train.algorithm
    teacher, critic = algorithm.reference_source, algorithm.critic_section
    if teacher == "start" or config.train.reference_is_frozen:
        teacher = None
    named = {"teacher": teacher, "critic.model": critic.model if critic else None}
    for key, source in named.items():
        if source is not None and (remote or Location(source).is_local):
            from roundhouse.stages.base_models import model_at

            model_at(source, key)


def _refuse_unbranchable(config: RunConfig) -> None:
    """Refuse `rollout.branching` with an environment that cannot be rebuilt at a turn, or that has one turn alone."""
    if config.rollout.branching is None:
        return
    restorations: dict[str, str] = {}
    for key, each in environments_in(config.environment).items():
        restorations[key] = open_environment(each).restoration
        if restorations[key] == "none":
            remedy = (
                f"set {key}.restore to replay" if "restore" in type(each).model_fields else "declare it in its class"
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
    if len(set(restorations.values())) > 1:
        raise ConfigError(
            f"rollout.branching is set, but the environments of the mixture differ in restoration ({restorations}), so none "
            "of them is restored. Leave branching out, or mix environments of one restoration."
        )


def _refuse_unfit_pods(config: RunConfig) -> None:
    """Refuse an environment's own servers that cannot work in pods, on a cluster."""
    if (infra := config.infra).runs_here:
        return
    for environment in environments_in(config.environment).values():
        if (check := environment_traits(environment).check_pods) is not None:
            plugins.resolve(check)(environment, infra)


def refuse_no_checkpoint(
    config: RunConfig, version: int | None, *, promoted: bool = False, draws: bool = False
) -> None:
    """Refuse to evaluate a checkpoint, or to collect with one, that is not there. The starting policy of a run that has not
    begun is asked for by its number, 0, and is made then.

    Args:
        draws: training tasks are drawn.

    Raises:
        StoreError: no such run, or no such version of it.
        ConfigError: nothing is promoted.
    """
    if not run_exists(config.store, config.run_id):
        if version != 0:
            existing = ", ".join(run_ids(config.store)) or "none"
            raise StoreError(
                f"No run {config.run_id!r} in {Location(config.store).uri}. Runs there: {existing}. Train it first, or "
                "evaluate its starting policy: --version 0."
            )
        refuse_unready(config, trains=False, draws=draws)
        return
    run = load_run(config.store, config.run_id)
    if promoted:
        version = version_named(run, "promoted")
    begins = version == run.first_version and run.latest_checkpoint() is None
    if version is not None and not begins and run.checkpoint(version).reference() is None:
        raise no_such_version(run, version)
    if draws and run.checkpoint(0).reference() is not None:
        prompts = prompts_in(config, model_location(run.checkpoint(0).location))
        _refuse_unfit_tasks(config, _training_tasks(config), prompts)


def _has_tasks(config: RunConfig, remote: bool) -> bool:
    """Return whether held-out tasks exist. Read the files of rows and create the class of a custom environment."""
    environment = config.environment
    if (known := environment.has_heldout(read=remote)) is not None:
        return known
    return any(True for _ in open_environment(environment).tasks("heldout"))


def _prompts(config: RunConfig, remote: bool, task: TaskRow | None) -> Prompts | None:
    """Return the template and tokenizer of the policy that the run starts from; None if they cannot be read here.

    Raises:
        ConfigError: the starting policy cannot be made, or does not render the tools of `task`.
    """
    if config.resume.path is not None:
        source = model_location(Location(config.resume.path))
        return None if not (remote or source.is_local) else prompts_in(config, source)
    prompts = [config.rollout.system_prompt, *(each.system_prompt for each in config.rollout.environments.values())]
    tools, system = tools_of(task), next((prompt for prompt in prompts if prompt is not None), None)
    policy = starting_policy_of(config)
    found = policy.prompts(tools, system, remote=remote)
    if policy.memory_gib is not None:
        refuse_small_memory(config, policy.memory_gib)
    return found
