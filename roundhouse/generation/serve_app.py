"""The Ray Serve application: chat completions on token IDs, with one engine per replica.

Invariant: the deployment's `user_config` alone (`DesiredPolicy`) decides with which weights a replica answers. Serve
sends it to every replica, including later ones, and each applies it in place; no single replica is addressed.

    POST /v1/chat/completions   ours, on token IDs (`chat.py`), with prefix continuation
    GET  /rh/status             of the replica that answers
    GET  /rh/replicas           of all replicas
    POST /rh/desired            a desired state that Serve has stored, before its control loop brings it (Ray's token)
    POST /rh/replaced           end the actors of silent replicas; Serve starts others in their place (Ray's token)
    GET  /health                200 if this replica may answer, 503 with the reason if not
    GET  /ready                 200 if it answers with the wanted version, 503 while it has another
    GET  /metrics               its version and refits, and the engine's own metrics
    everything else             the engine's own OpenAI routes: /tokenize, /detokenize, …

It is a plain ASGI callable: at a hundred short answers a second a web framework would cost more than the engine.

`make_engine` asks the plug-in of the engine; everything above uses `Engine`. `local_model` returns a directory of this
node with every committed file except the weights, digests checked: an engine starts from it, and a refit brings its
weights. A directory of this node is used in place.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundhouse import plugins
from roundhouse.config.engines import engine_traits
from roundhouse.config.models import GenerationConfig
from roundhouse.config.placement import REPLICA_CPUS
from roundhouse.cpu import parameters_of, threads_for
from roundhouse.errors import ConfigError, StoreError
from roundhouse.generation.engines import open_batches
from roundhouse.generation.protocol import Engine
from roundhouse.generation.tool_calls import ToolParser, parse_hermes
from roundhouse.generation.tool_formats import OWN_PARSERS, parser_of_template
from roundhouse.http.asgi import SameOrigin
from roundhouse.logs import set_up_logs
from roundhouse.store.location import Location, NotFound
from roundhouse.store.stage import MANIFEST, Manifest, model_location, sha256
from roundhouse.weight_sync.cache import private_directory
from roundhouse.weight_sync.checkpoint_files import local_path
from roundhouse.weight_sync.replica_state import application_digest, arguments_of
from roundhouse.weight_sync.tensor_files import INDEX

if TYPE_CHECKING:
    from ray.serve import Application

    from roundhouse.generation.chat import ChatCodec
    from roundhouse.generation.chat_server import ChatServer
    from roundhouse.generation.served_policy import ServedPolicy

log = logging.getLogger(__name__)


def make_engine(config: GenerationConfig, model_dir: str, served_name: str, codec: ChatCodec) -> Engine:
    """Return the engine that `config.backend` names, not started."""
    opener = engine_traits(config.backend).opener or open_batches
    engine: Engine = plugins.resolve(opener)(config, model_dir, served_name, codec)
    return engine


def make_tool_parser(config: GenerationConfig, tokenizer: Any) -> ToolParser:
    """The tool-call parser for `config`: ours for hermes and harmony, with every engine; vLLM's for its other names.

    An engine other than vLLM does not read the calls of other templates; a run with tools is refused before its start.
    """
    name = config.tool_call_parser
    if name in OWN_PARSERS or config.backend != "vllm":
        return OWN_PARSERS.get(name, parse_hermes)
    from roundhouse.generation.vllm_engine import tool_parser

    return tool_parser(name, tokenizer)


def with_chosen_parser(config: GenerationConfig, tokenizer: Any) -> GenerationConfig:
    """Return the configuration with the tool-call parser for the tokenizer's chat template, if it is auto."""
    if config.tool_call_parser != "auto":
        return config
    name = parser_of_template(str(tokenizer.chat_template))
    log.info("generation.tool_call_parser is %s, chosen by the chat template.", name)
    return config.model_copy(update={"tool_call_parser": name})


def local_model(uri: str, cache: Path | None = None) -> Path:
    """Return a local directory with config and tokenizer of the model at `uri`: a path, file:// or s3://.

    Raises:
        ConfigError: no committed model is at `uri`.
        StoreError: the store cannot be read, or a file differs from its manifest.
    """
    path = local_path(uri)
    if path is not None:
        return model_location(Location(str(path))).local_path
    source = Location(uri)
    try:
        data = source.read(MANIFEST)
    except NotFound as error:
        raise ConfigError(
            f"No committed model at {uri}. Name the directory of a checkpoint: <store>/runs/<run>/checkpoints/…"
        ) from error
    final = (
        cache or private_directory(Path(tempfile.gettempdir()), "roundhouse-models")
    ) / f"model-{hashlib.sha256(uri.encode() + data).hexdigest()[:24]}"
    if not final.is_dir():
        files = Manifest.model_validate_json(data).model_files.by_name()
        entries = {
            name: entry
            for name, entry in files.items()
            if "/" not in name and not name.endswith(".safetensors") and not name.endswith(INDEX)
        }
        partial = final.parent / f".{final.name}.{uuid.uuid4().hex}"
        partial.mkdir(parents=True)
        try:
            for file_name, entry in entries.items():
                content = source.read(entry.path)
                if sha256(content) != entry.sha256:
                    raise StoreError(
                        f"{source.uri}/{entry.path} differs from its manifest. Check with `roundhouse store verify`."
                    )
                (partial / file_name).write_bytes(content)
            try:
                os.rename(partial, final)
            except OSError:
                if not final.is_dir():
                    raise
                # Another replica of this node was quicker.
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return final


APPLICATION = "policy"
DEPLOYMENT = "policy"
SERVED_MODEL = "policy"
IMPORT_PATH = "roundhouse.generation.serve_app:build"
VIRTUAL_NODES = 1000
"""Virtual nodes of a replica on the hash ring of sessions. With n of them a replica's share differs by some
1/sqrt(n)."""
BRING_SECONDS = 8.0
"""Time that a caller of `/rh/desired` waits for a refit; a longer refit continues, and `/rh/replicas` reports its
end."""
ANSWER_SECONDS = 3.0
"""Time limit of a replica's status before the reply to `/rh/replicas` omits it."""
UPDATING_SECONDS = 2.0
"""Time to wait while Serve lists no replica: it omits a replica to which it sends a changed desired state."""
FAILED_NOTE = "This was application "
"""Ends the error of a replica that could not start: Serve blames the wanted application for replicas of the one before, too."""


class PolicyReplica:
    """One replica; `build` makes the deployment of it."""

    async def __init__(  # type: ignore[misc]
        self, generation: dict[str, Any], model_dir: str, reserved: dict[str, Any] | None = None
    ) -> None:
        from ray import serve
        from ray.util import get_current_placement_group

        set_up_logs()
        config = GenerationConfig.model_validate(generation)
        replica_id = serve.get_replica_context().replica_id.unique_id
        application = application_digest(arguments_of(generation, model_dir, reserved))
        try:
            self.policy, self.server = await start_policy(config, model_dir, replica_id, application)
        except Exception as error:
            error.add_note(FAILED_NOTE + application)
            raise
        if reserved is not None and (group := get_current_placement_group()) is not None:
            self.policy.placement_group = group.id.hex()
        self._deployment: Any = None
        self._changes: set[asyncio.Task[None]] = set()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        from roundhouse.weight_sync.replica_state import DesiredPolicy

        await self.policy.apply(DesiredPolicy.parse(user_config))

    async def check_health(self) -> None:
        await self.policy.check_health()

    async def status(self, application: str = "", desired: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the replica's report. If `desired` is for this application, apply it first.

        Serve's control loop sends the same state later, which then changes nothing.
        """
        if desired is not None and application == self.policy.application:
            # A caller that leaves must not break off a refit half way: the task belongs to the replica
            change = asyncio.create_task(self.reconfigure(desired))
            self._changes.add(change)
            change.add_done_callback(self._changes.discard)
            await asyncio.wait([change], timeout=BRING_SECONDS)
        return self.policy.status()

    async def replicas(self, *wanted: Any) -> list[dict[str, Any]]:
        """Return the status of every running replica that answers. `wanted`: the arguments of `status`."""
        from ray import serve
        from ray.serve.exceptions import DeploymentUnavailableError

        if self._deployment is None:
            self._deployment = serve.get_deployment_handle(DEPLOYMENT, APPLICATION)
        deadline = time.monotonic() + UPDATING_SECONDS
        while True:
            try:
                return await _answers_in_time(
                    self._deployment.broadcast("status", *wanted), ANSWER_SECONDS + (BRING_SECONDS if wanted else 0)
                )
            except DeploymentUnavailableError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(UPDATING_SECONDS / 100)

    async def replace(self, actors: list[str]) -> list[str]:
        """End other replicas by the names of their actors, and return the names that existed.

        Raises:
            ValueError: a name is not that of another replica of this deployment.
        """
        import ray
        from ray.serve._private.constants import SERVE_NAMESPACE

        own = ray.get_runtime_context().get_actor_name() or ""
        prefix = own[: own.rfind("#") + 1]
        if strangers := [name for name in actors if name == own or not prefix or not name.startswith(prefix)]:
            raise ValueError(f"{strangers[0]!r} is not another replica of this deployment")
        names = []
        for name in actors:
            try:
                actor = await asyncio.to_thread(ray.get_actor, name, SERVE_NAMESPACE)
            except ValueError:  # it has ended already
                continue
            ray.kill(actor)
            names.append(name)
        return names

    def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve once the constructor is done; the application answers HTTP from then on."""
        from ray.util import get_node_ip_address

        self.server.replicas = self.server.bring = self.replicas
        self.server.replace = self.replace
        self.server.control_token = os.environ.get("RAY_AUTH_TOKEN")
        # Serve's proxy forwards the request unchanged. A cluster with loopback addresses is on this
        # machine alone.
        return SameOrigin(self.server, get_node_ip_address())


async def _answers_in_time(response: Any, seconds: float) -> list[dict[str, Any]]:
    """Return the answers of the replicas of a broadcast that come in time.

    `response.results_async` has one limit for all, so that one replica that holds still would cost the answers of the others.
    """
    results = await response._fetch_replica_results_async()
    waits = [asyncio.ensure_future(result.get_async()) for result in results]
    if not waits:
        return []
    answers, late = await asyncio.wait(waits, timeout=seconds)
    for wait in late:
        wait.cancel()
    for answer in answers:
        if (error := answer.exception()) is not None:
            log.warning("A replica did not report its state: %r", error)
    return [answer.result() for answer in answers if answer.exception() is None]


async def start_policy(
    config: GenerationConfig, model_dir: str, replica_id: str, application: str = ""
) -> tuple[ServedPolicy, ChatServer]:
    """An engine with its chat server, without weights yet.

    Args:
        model_dir: config and tokenizer: a directory, or the URI of a checkpoint, from which they are brought here.
    """
    from roundhouse.generation.chat import ChatCodec
    from roundhouse.generation.chat_server import ChatServer
    from roundhouse.generation.served_policy import ServedPolicy
    from roundhouse.images import ImageReader
    from roundhouse.weight_sync.cache import node_cache

    model_dir = str(await asyncio.to_thread(local_model, model_dir))
    check_model_directory(model_dir)
    if (
        config.gpus_per_replica == 0 and not engine_traits(config.backend).in_flow
    ):  # OpenMP reads it when torch is imported, later
        threads = threads_for(parameters_of(Path(model_dir) / "config.json"), config.threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)
    images = ImageReader.of(Path(model_dir)) if config.images else None
    codec = ChatCodec(model_dir, config.max_model_len, template_date=config.template_date, images=images)
    config = with_chosen_parser(config, codec.tokenizer)
    engine = make_engine(config, model_dir, SERVED_MODEL, codec)
    try:
        await engine.start()
        codec.parse_tool_calls = make_tool_parser(config, codec.tokenizer)
    except BaseException:
        engine.shutdown()  # this process may start another one
        raise
    cache = node_cache(int(config.weights_cache_gib * 2**30))
    policy = ServedPolicy(engine, model_dir, replica_id, application, cache)
    return policy, ChatServer(policy, codec, SERVED_MODEL)


def check_model_directory(model_dir: str) -> None:
    """Refuse a directory that no engine could start from, before an engine fails with a long traceback.

    Raises:
        ConfigError: names the missing files.
    """
    path = Path(model_dir)
    if not path.is_dir():
        raise ConfigError(f"The model directory {model_dir} does not exist on this node.")
    for name in ("config.json", "tokenizer_config.json"):
        if not (path / name).is_file():
            raise ConfigError(f"The model directory {model_dir} has no {name}. Name a Hugging Face model directory.")


def build(arguments: dict[str, Any]) -> Application:
    """Build the application in the form of Serve's `import_path`.

    Args:
        arguments: `generation` (a `GenerationConfig` as JSON) and `model_dir`; for a trainer near the engine,
            `reserved` (a `Reservation` as JSON).
    """
    from ray import serve

    config = GenerationConfig.model_validate(arguments["generation"])
    reserved = arguments.get("reserved")
    deployment = serve.deployment(
        name=DEPLOYMENT,
        max_ongoing_requests=65536,  # the engine queues for itself; this would be a second, hidden bound
        max_queued_requests=-1,
        health_check_period_s=2,
        health_check_timeout_s=60,
        graceful_shutdown_timeout_s=5,
        # A log line for each of thousands of short answers is useless and costs as much as the tokenizer.
        logging_config={"enable_access_log": False},
        ray_actor_options={
            "num_cpus": REPLICA_CPUS,
            "num_gpus": config.gpus_per_replica,
            "runtime_env": {"env_vars": replica_environment(config)},
        },
        **routing_options(),
        **placement_options(reserved),
    )(serve.ingress()(PolicyReplica))
    return deployment.bind(arguments["generation"], arguments["model_dir"], reserved)


def routing_options() -> dict[str, Any]:
    """Serve's options by which the calls of a session (`SESSION_HEADER`) go to one replica.

    HAProxy hashes the header itself (`infra/service_specs.py`), and Serve refuses a router of the deployment under it.
    """
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        return {}
    return {
        "request_router_config": {
            "request_router_class": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
            "request_router_kwargs": {"num_virtual_nodes": VIRTUAL_NODES},
        }
    }


def placement_options(reserved: dict[str, Any] | None) -> dict[str, Any]:
    """Return Serve's options of a deployment that reserves room for the trainer in its replica."""
    if reserved is None:
        return {}
    return {"placement_group_bundles": reserved["bundles"], "placement_group_strategy": reserved["strategy"]}


def replica_environment(config: GenerationConfig) -> dict[str, str]:
    """Environment variables of a replica."""
    from roundhouse.generation.vllm_engine import environment, preload, without_compiler

    passed = {key: os.environ[key] for key in ("PYTHONPATH",) if key in os.environ}
    return passed | environment(config) | preload(config) | without_compiler(config)
