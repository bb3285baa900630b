"""Checks of a run before anything starts: before its first record in the store, before services and engine.

Invariant: these checks only read, and refuse only what a later stage would refuse, with its error, the key or option,
and the remedy. Facts that only a service knows are left to the service.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from roundhouse import plugins
from roundhouse.config.environments import RemoteEnvironment, environment_traits, environments_in
from roundhouse.config.generation import Endpoint, training_endpoints, weight_updates
from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.models import BundledPolicy, RunConfig, WarmStartPolicy
from roundhouse.config.secrets import read_secret
from roundhouse.config.training import TemplatedPolicy
from roundhouse.cpu import computes_bfloat16
from roundhouse.environments import (
    check_sandboxes,
    demonstrating,
    first_task,
    has_own_splits,
    load_any,
    refuse_without_demonstrations,
)
from roundhouse.environments.base import BadReward, GymnasiumEnvironment, TaskRow
from roundhouse.errors import ConfigError, StoreError
from roundhouse.health.policy import code_of, code_of_type
from roundhouse.http.clients import http_client, proxy_note
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
from roundhouse.policy.tokenizer import CHAT_TEMPLATE, PAD, TURN_END
from roundhouse.pretrained import is_composite
from roundhouse.rollout.agents import GymnasiumLoop, ToolLoop
from roundhouse.rollout.clients import LocalEnvironmentClient, first_messages, open_environment, tools_of, verdict_on
from roundhouse.rollout.hosted import HostedEnvironmentClient
from roundhouse.rollout.plan import build_curriculum
from roundhouse.rollout.protocol import EnvironmentClient
from roundhouse.rollout.rubric import refuse_unfit_criteria
from roundhouse.stages.evaluate import no_heldout_task
from roundhouse.stages.hooks import refuse_unfit_hooks
from roundhouse.stages.report import sink_class
from roundhouse.stages.task_survey import has_local_rows
from roundhouse.store.location import Location
from roundhouse.store.run import load_run, no_such_version, run_exists, run_ids, version_named
from roundhouse.store.stage import MANIFEST, model_location

logger = logging.getLogger(__name__)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""Looks like a model of the Hugging Face hub, such as Qwen/Qwen3-0.6B."""
ANSWER_SECONDS = 10.0
TRIAL_SECONDS = 10.0
Tokens = Callable[[str], int]
"""Counts the tokens of a text."""


def refuse_unready(config: RunConfig, *, remote: bool = True, trains: bool = True) -> None:
    """Refuse a run whose store, algorithm, curriculum, environment, held-out tasks, starting policy or datasets are
    unusable.

    Args:
        remote: check buckets, too. A dry run makes no remote requests.
        trains: the engine has to take new weights.

    Raises:
        ConfigError: names the key and the remedy.
    """
    _refuse_unwritable_store(config)
    _refuse_slow_bfloat16(config)
    _refuse_unfit_endpoint(config, remote, trains)
    algorithm = config.train.algorithm
    if ":" in getattr(algorithm, "target", getattr(algorithm, "policy_loss", "")):
        from roundhouse.training.algorithms import build_algorithm  # imports torch

        build_algorithm(algorithm)
    build_curriculum(config.rollout.curriculum)
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
    first = _first_prompt(config) if trains and reads_rows else None
    if remote and config.infra.runs_here:  # else sandboxes start elsewhere
        check_sandboxes(config.environment)
    evaluation, offline = config.evaluation, config.offline
    evaluates = (offline is None or offline.evaluate) and (evaluation.every is not None or evaluation.before_training)
    if not _has_tasks(config, remote) and evaluates:
        raise no_heldout_task(config)
    _refuse_unfit_layout(config, remote)
    refuse_unfit_memory(config)
    reachable = remote or Location(config.store).is_local
    if reachable and (Location(config.store) / f"runs/{config.run_id}/checkpoints/000000").exists(MANIFEST):
        return  # it has its initial state
    if config.resume.path is None:
        _starting_policy(config, remote, task, first)
    if config.offline is not None and reachable:
        from roundhouse.stages.offline import find_datasets

        find_datasets(config.store, config.offline.datasets)


def _first_prompt(config: RunConfig) -> TaskRow | None:
    """Return the first training task if its rollouts begin with its prompt; None if the agent makes the prompt.

    Raises:
        ConfigError: as `_first_training_task`.
    """
    if config.offline is not None:
        return None
    client = open_environment(config.environment)
    task = _first_training_task(config, client)
    return task if isinstance(client.agent, ToolLoop | GymnasiumLoop) else None


def _first_training_task(config: RunConfig, client: EnvironmentClient) -> TaskRow:
    """Return the first training task.

    Raises:
        ConfigError: the environment has no task, or the first is not a task row.
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


def _refuse_long_prompt(config: RunConfig, task: TaskRow | None, template: ChatTemplate, tokenizer: Tokens) -> None:
    """Refuse a first training task whose prompt fills the context."""
    if task is None or config.rollout.max_prompt_tokens is not None:
        return
    rollout = config.rollout.of_environment(str(task.get("task_id", "")).partition("/")[0])
    text = template.render(first_messages(task, rollout.system_prompt), tools_of(task))
    limit = config.generation.max_model_len
    if len(text.encode()) >= limit and (count := tokenizer(text)) >= limit:  # a token has one byte or more
        raise ConfigError(
            f"generation.max_model_len is {limit}, and the prompt of the first training task ({task.get('task_id')}) has "
            f"{count} tokens, which leaves none for a reply. Raise it, or shorten the row, its tools or rollout.system_prompt."
        )


def _refuse_unbranchable(config: RunConfig) -> None:
    """Refuse `rollout.branching` with an environment that cannot be rebuilt at a turn, or that has one turn alone."""
    if config.rollout.branching is None:
        return
    restorations: dict[str, str] = {}
    for key, each in environments_in(config.environment).items():
        restorations[key] = open_environment(each).restoration
        if restorations[key] == "none":
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
    if len(set(restorations.values())) > 1:
        raise ConfigError(
            f"rollout.branching is set, but the environments of the mixture differ in restoration ({restorations}), so none "
            "of them is restored. Leave branching out, or mix environments of one restoration."
        )


def _refuse_unfit_pods(config: RunConfig) -> None:
    """Refuse an environment's own servers that cannot work in pods, on a cluster."""
    if not isinstance(infra := config.infra, KubernetesInfra):
        return
    for environment in environments_in(config.environment).values():
        if (check := environment_traits(environment).check_pods) is not None:
            plugins.resolve(check)(environment, infra)


def refuse_no_checkpoint(config: RunConfig, version: int | None, *, promoted: bool = False) -> None:
    """Refuse to evaluate a checkpoint, or to collect with one, that is not there. The starting policy of a run that has not
    begun is asked for by its number, 0, and is made then.

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
        refuse_unready(config, trains=False)
        return
    run = load_run(config.store, config.run_id)
    if promoted:
        version = version_named(run, "promoted")
    begins = version == run.first_version and run.latest_checkpoint() is None
    if version is not None and not begins and run.checkpoint(version).reference() is None:
        raise no_such_version(run, version)


def _refuse_unfit_endpoint(config: RunConfig, remote: bool, trains: bool) -> None:
    """Refuse a running server that does not take weights that change, or does not list its models. Its token replies
    are checked when the engine starts."""
    endpoint = config.generation.endpoint
    if endpoint is None:
        return
    if trains and endpoint.kind == "text" and config.offline is None:
        raise ConfigError(
            f"generation.endpoint.kind is text, so {endpoint.url} returns neither token IDs nor log-probabilities: evaluations "
            "and collections work with --version 0, training does not. Name a server that returns them, and set kind "
            f"to {' or '.join(training_endpoints())}."
        )
    if trains and endpoint.weight_update is None and config.offline is None:
        raise ConfigError(
            f"generation.endpoint.weight_update is unset, so {endpoint.url} keeps the weights that it has: evaluations and "
            f"collections work with --version 0, training does not. Set it to {' or '.join(weight_updates())}, if the server "
            "can read a checkpoint's directory."
        )
    if not remote:
        return
    import httpx

    secret = None if endpoint.api_key_variable is None else read_secret(endpoint.api_key_variable)
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    try:
        with http_client(endpoint.url, foreign=True, headers=headers, timeout=ANSWER_SECONDS) as http:
            status = http.get(f"{endpoint.url}/v1/models").status_code
        problem = None if status == 200 else f"answered {status}"
    except httpx.HTTPError as error:
        problem = f"does not answer ({type(error).__name__}: {error})"
    if problem is not None:
        raise ConfigError(
            f"generation.endpoint.url is {endpoint.url}, and its /v1/models {problem}. Start the server, or correct the "
            f"section generation.endpoint.{proxy_note(endpoint.url)}"
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

    from roundhouse.generation import openai_engine
    from roundhouse.generation.protocol import BadReply, EngineUnreachable
    from roundhouse.http.replies import MALFORMED

    engine: type[openai_engine.OpenAIEngine] = plugins.factory("endpoint", endpoint.kind)
    path, body = engine.trial(endpoint.model)
    with http_client(endpoint.url, foreign=True, headers=headers, timeout=seconds) as http:
        reply = http.post(endpoint.url + path, json=body)
    try:
        engine.read_trial(reply.json())
    except (BadReply, EngineUnreachable, *MALFORMED) as error:
        raise ConfigError(
            f"generation.endpoint.url is {endpoint.url}, and its {path} answers {reply.status_code} without token IDs and "
            f"log-probabilities ({reply.text[:200]!r}), which generation.endpoint.kind {endpoint.kind} needs: its answers "
            f"cannot be trained on. {openai_engine.REMEDY}"
        ) from error


def _has_tasks(config: RunConfig, remote: bool) -> bool:
    """Return whether held-out tasks exist. Read the files of rows and create the class of a custom environment."""
    environment = config.environment
    if (known := environment.has_heldout(read=remote)) is not None:
        return known
    return any(True for _ in open_environment(environment).tasks("heldout"))


def _starting_policy(config: RunConfig, remote: bool, task: TaskRow | None, first: TaskRow | None) -> None:
    """Refuse a starting policy that cannot be made, does not render the tools of `task`, or lacks room for the prompt
    of `first`."""
    policy = config.policy
    if isinstance(policy, WarmStartPolicy):
        refuse_without_demonstrations(config.environment)
        template = ChatTemplate("the warm start", CHAT_TEMPLATE, {"eos_token": TURN_END, "pad_token": PAD})
        _refuse_long_prompt(config, first, template, lambda text: _tokens_of_warm_start(config, policy, text))
        return
    prompts = [config.rollout.system_prompt, *(each.system_prompt for each in config.rollout.environments.values())]
    tools, system = tools_of(task), next((prompt for prompt in prompts if prompt is not None), None)
    if isinstance(policy, BundledPolicy):
        file = bundled_file(policy.name)
        check_gguf(file)
        refuse_small_memory(config, BUNDLED[policy.name].memory_gib)
        refuse_unfit_template(_chosen(config, policy, template_of(file)), tools, system)
        return
    source = model_location(Location(policy.path))
    if source.is_local:
        if HUB_ID.fullmatch(policy.path) and not source.local_path.exists():
            raise ConfigError(
                f"policy.path is {policy.path}, which is not a directory. Models are not downloaded. Run `hf download "
                f"{policy.path} --local-dir DIRECTORY` and name the directory. Or set policy.kind to "
                "bundled for the model that comes with Roundhouse."
            )
        if (gguf := gguf_file(source.local_path)) is None:
            check_model_directory(source.local_path, config.generation.max_model_len)
            _refuse_no_torchvision(config, source.local_path)
            template = _chosen(config, policy, template_in(source.local_path))
            refuse_unfit_template(template, tools, system)
            _refuse_long_prompt(config, first, template, _tokens_by(source.local_path / "tokenizer.json"))
        else:
            check_gguf(gguf)
            refuse_unfit_template(_chosen(config, policy, template_of(gguf)), tools, system)
    elif remote and not source.exists("config.json") and not any(name.endswith(".gguf") for name in source.names()):
        raise ConfigError(f"policy.path is {source.uri}: it holds no config.json. Give a Hugging Face model directory.")


def _refuse_no_torchvision(config: RunConfig, model: Path) -> None:
    """Refuse a composite model if vLLM, in this installation, cannot import its class, as also for text alone."""
    generation = config.generation
    here = generation.backend == "vllm" and generation.engine_url is None and generation.endpoint is None
    if here and config.infra.runs_here and is_composite(model) and not find_spec("torchvision"):
        raise ConfigError(
            f"policy.path is {model}, a model with towers beside its language model, whose class in vLLM needs torchvision. "
            "Install the build for your torch (pip install torchvision --index-url https://download.pytorch.org/whl/cpu), or "
            "set generation.backend to transformers."
        )


def _tokens_of_warm_start(config: RunConfig, policy: WarmStartPolicy, text: str) -> int:
    from roundhouse.policy.warm_start import starting_tokenizer  # imports torch

    tokenizer = starting_tokenizer(policy, demonstrating(config.environment), config.seed)
    return len(tokenizer.encode(text, add_special_tokens=False))


def _tokens_by(file: Path) -> Tokens:
    """Return a counter of a text's tokens; without such a file it counts 0, and the engine counts later."""

    def count(text: str) -> int:
        from tokenizers import Tokenizer

        return len(Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids) if file.is_file() else 0

    return count


def _chosen(config: RunConfig, policy: TemplatedPolicy, own: ChatTemplate) -> ChatTemplate:
    """Return the template that the run renders with. Report a template that writes today's date."""
    name = policy.chat_template
    template = own if name is None else replace(own, source=f"policy.chat_template ({name})", text=template_text(name))
    if "strftime_now" in template.text and config.generation.template_date is None:
        logger.warning(
            "The chat template in %s writes today's date: the prompts of the run change at midnight. Set "
            "generation.template_date to keep one day.",
            template.source,
        )
    return template


_PLAIN = frozenset({"llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
"""Types of models that every section `train` fits on one rank; to see this of another takes seconds."""


def _refuse_unfit_layout(config: RunConfig, remote: bool) -> None:
    """Refuse a model that cannot be packed, that the ranks cannot share, or that transformers does not know."""
    path = config.policy.model
    if path is not None and not remote and not Location(path).is_local:
        return
    spread = max(config.train.parallelism.values()) > 1
    if not spread and (path is None or _model_type(path) in (None, *_PLAIN)):
        return
    try:
        shape = shape_of(config)
        if shape is not None:
            from roundhouse.training.memory_plan import refuse_unfit_layout

            refuse_unfit_layout(shape, config.train)
    except (ValueError, ImportError) as error:
        text = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"policy.path is {path}, which the installed transformers cannot build: {text} Name a model of an architecture "
            "that it has, or install what it names."
        ) from error


def _model_type(path: str) -> str | None:
    """Return the type in a model's config.json; None if it cannot be read, which `check_model_directory` reports."""
    source = model_location(Location(path))
    if not source.is_local or not (source.local_path / "config.json").is_file():
        return None
    try:
        kind = json.loads((source.local_path / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return kind if isinstance(kind, str) else None


def refuse_unfit_memory(config: RunConfig) -> None:
    """Refuse a policy whose training step does not fit this machine: its first GPU, or a rank's share of free memory.

    On CPUs, skip the plan, which takes seconds, for a policy that is small relative to the memory.

    Raises:
        ConfigError: with the plan, and the settings that fit.
    """
    train, policy = config.train, config.policy
    if not train.service.is_on_this_machine:
        return
    if not config.infra.runs_here or not train.check_memory:
        return
    if policy.model is None or not (source := model_location(Location(policy.model))).is_local:
        return
    if train.device != "cpu" and any(Path("/dev").glob("nvidia[0-9]*")):
        import torch

        if not torch.cuda.is_available():
            return
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        memory = available_memory() // getattr(train.service, "processes", 1)
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
    """Refuse a model that does not fit this machine's memory, if engine and trainer run on it.

    Raises:
        ConfigError: less memory is free.
    """
    if not config.infra.runs_here or config.generation.engine_url is not None:
        return
    free = available_memory() / 2**30
    if free < needed_gib:
        raise ConfigError(
            f"policy.name is {getattr(config.policy, 'name', None)}: its run takes about {needed_gib:g} GiB of memory, and "
            f"{free:.1f} GiB are free. End other programs, or start from a small policy (policy.kind warm_start)."
        )
