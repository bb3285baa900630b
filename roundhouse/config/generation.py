"""The inference engine, how tokens are drawn, and how new weights reach it from a checkpoint.

Invariant: the plug-in registry, or the configured `module:Class`, decides which class implements a weight transport.
The class of a built-in transport refuses runs in which it cannot work (`check_transport`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from roundhouse import plugins
from roundhouse.config.engines import engine_traits
from roundhouse.config.secrets import Parameters, VariableName
from roundhouse.config.section import (
    Code,
    Consent,
    Fraction,
    Operational,
    PositiveFloat,
    PositiveInt,
    Section,
    Target,
    is_recorded,
)
from roundhouse.errors import ConfigError

if TYPE_CHECKING:
    from roundhouse.config.models import RunConfig

OWN_PARSERS = ("hermes", "openai")
"""Parsers of tool calls that do not need vLLM."""
_VLLM_BACKENDS = ("gloo", "nccl")
_REFUSED_BACKENDS = ("ipc", "sparse_nccl", "sharded_rdt", "nccl_m2n", "modelexpress")


class CustomWeightSync(Section):
    """A weight transport of your own, imported by name; docs/weights.md has an example."""

    kind: Literal["custom"]
    target: Target
    """`module:Class` of a `roundhouse.weight_sync.base.WeightTransport`; not a file: the engine imports the module too, so it
    has to be installed there."""
    parameters: Parameters = Field(default_factory=dict)
    """The section of its configuration (`Config` of the class)."""


def _known(argument: Any) -> Any:
    if argument in _VLLM_BACKENDS:
        raise ValueError(
            f"{argument} is a weight-transfer engine of vLLM, a backend of the transport transfer. Set it to transfer, and "
            f"generation.transfer_backend to {argument}."
        )
    known_backend(argument)
    if isinstance(argument, str) and argument not in (known := plugins.names("weight_transport")):
        raise ValueError(
            f"unknown transport {argument}. Available: {', '.join(known)}, and kind: custom for your own class."
        )
    return argument


def known_backend(argument: Any) -> Any:
    """Refuse the backends of vLLM that are not connected here.

    Raises:
        ValueError: with the reason and the remedy.
    """
    if argument in _REFUSED_BACKENDS:
        why = (
            "takes handles of memory on the engine's own GPU, pickled, from a process that holds it there"
            if argument == "ipc"
            else "is not connected here"
        )
        raise ValueError(
            f"{argument} is a weight-transfer engine of vLLM that {why}. Set generation.weight_sync to transfer with "
            "generation.transfer_backend gloo or nccl, or to store, shared-memory, delta or adapter."
        )
    return argument


def _list_transports(schema: dict[str, Any]) -> None:
    schema["enum"] = list(plugins.names("weight_transport"))


WeightSync = Annotated[
    Annotated[str, Field(json_schema_extra=_list_transports)] | CustomWeightSync, BeforeValidator(_known)
]


@dataclass(frozen=True, slots=True)
class TransportTraits:
    """Traits of a plug-in of the role `weight_transport`, known before its class is imported."""

    sends_checkpoint: bool = False
    """Replicas load the checkpoint's own files."""
    stays_in_trainer: bool = False
    """Weights do not move: the trainer generates."""
    vllm_engines: Mapping[str, str] = field(default_factory=dict)
    """Weight-transfer engines of vLLM that it uses (`generation.transfer_backend`), by vLLM's name: `module:Class` of an
    engine that the plug-in adds, empty for vLLM's."""


CHECKPOINT_FILES = TransportTraits(sends_checkpoint=True)
TRAINERS_WEIGHTS = TransportTraits(stays_in_trainer=True)


def transport_traits(chosen: str | CustomWeightSync) -> TransportTraits:
    """Return the traits of `generation.weight_sync`; the default ones for a custom class.

    Raises:
        ConfigError: the package of a plug-in cannot be imported.
    """
    declared = plugins.traits("weight_transport", chosen) if isinstance(chosen, str) else None
    return declared or TransportTraits()


def transfer_engines() -> dict[str, str]:
    """Return the `vllm_engines` of all transports."""
    engines: dict[str, str] = {}
    for name in plugins.names("weight_transport"):
        with suppress(ConfigError):  # a broken package disturbs only the runs that name it
            engines |= transport_traits(name).vllm_engines
    return engines


def check_transport(config: RunConfig) -> None:
    """Refuse a built-in transport that cannot work in this run; a custom one is checked when the run refits, since reading a
    configuration executes no code that it names.

    Raises:
        ValueError: names key, value and remedy.
    """
    chosen, backend = config.generation.weight_sync, config.generation.backend
    if transport_traits(chosen).stays_in_trainer and engine_traits(backend).train_service is not None:
        return  # it works there, and importing it takes seconds
    if isinstance(chosen, str):
        transport: Any = plugins.factory("weight_transport", chosen)
        transport(Section(), chosen).check(config)


TOKEN_VARIABLE = "ROUNDHOUSE_ENGINE_TOKEN"
"""Environment variable with the token of a standalone engine, which requests that set the wanted weights must carry."""


InflightRequests = Literal["drain", "continue", "restart"]
TransferBackend = Literal["gloo", "nccl"]
_CODE_ARGUMENTS = frozenset(
    ("trust_remote_code", "model_class_overrides", "logits_processors", "kv_transfer_config", "ec_transfer_config",
     "ec_manager_config", "log_config_file", "logging_config")
)  # fmt: skip
_POLICY = "the engine serves the policy's checkpoint (section policy)."
_WEIGHTS = (
    "weights come from the store by the transport that generation.weight_sync names, and pickled ones are never loaded."
)
_OWN_ARGUMENTS = {
    **dict.fromkeys(
        ("model", "model_weights", "tokenizer", "tokenizer_mode", "config_format", "hf_config_path"), _POLICY
    ),
    **dict.fromkeys(
        ("revision", "code_revision", "tokenizer_revision", "served_model_name", "runner", "convert"), _POLICY
    ),
    **dict.fromkeys(
        ("load_format", "model_loader_extra_config", "weight_transfer_config", "worker_extension_cls"), _WEIGHTS
    ),
    **dict.fromkeys(
        ("generation_config", "override_generation_config"), "generation.sampling sets how tokens are sampled."
    ),
    "logprobs_mode": "training needs the log-probabilities of the distribution that was drawn from.",
    "dtype": "it is generation.dtype.",
    "max_model_len": "it is generation.max_model_len.",
    "gpu_memory_utilization": "it is generation.gpu_memory_utilization.",
    "kv_cache_memory_bytes": "it is generation.kv_cache_gib.",
}
"""Arguments of vLLM that are set here, and by what."""


class Sampling(Section):
    """Sampling of tokens."""

    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    """0 means greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: PositiveInt | None = None
    max_new_tokens: PositiveInt = 24
    """Limit of one model call."""


class MegatronCoreGeneration(Section):
    """NeMo RL's options of generation in the trainer, for `generation.backend: trainer`."""

    buffer_size_gb: PositiveFloat = 20
    """Keys and values of the requests that are answered together, in GiB: more pulls in more requests at once."""
    buffer_guaranteed_fraction: Fraction | None = None
    """Refused, because it needs megatron-core (whose default is 0.1): here a request has all of its memory from the
    beginning."""
    num_cuda_graphs: Annotated[int, Field(ge=0)] | None = None
    """Refused, as it needs megatron-core and CUDA (its default is 16)."""
    max_tokens: PositiveInt = 16384
    """Tokens of all requests that are answered together, prompts and what may be generated."""

    @model_validator(mode="after")
    def _carried_out(self, info: ValidationInfo) -> Self:
        for name in ("buffer_guaranteed_fraction", "num_cuda_graphs"):
            if (value := getattr(self, name)) is not None and not is_recorded(info):
                raise ValueError(f"{name} is {value:g}, which needs megatron-core and CUDA. Leave it out.")
        return self


def _known_endpoint(kind: str) -> str:
    if kind not in (known := plugins.names("endpoint")):
        raise ValueError(f"unknown kind {kind} of endpoint. Available: {', '.join(known)}.")
    return kind


def training_endpoints() -> list[str]:
    """Return the kinds of endpoint that return token IDs with log-probabilities."""
    return [kind for kind in plugins.names("endpoint") if kind != "text"]


def weight_updates() -> list[str]:
    """Return the methods to load new weights into a running server."""
    return ["vllm" if kind == "tokens" else kind for kind in training_endpoints()]


def _list_endpoints(schema: dict[str, Any]) -> None:
    schema["enum"] = list(plugins.names("endpoint"))


class Endpoint(Section):
    """A running server, and its abilities."""

    url: Code[Annotated[str, Field(pattern=r"^https?://\S+$")]]
    """Its base URL, without /v1."""
    model: str
    """The name that it serves the policy by."""
    kind: Annotated[str, AfterValidator(_known_endpoint), Field(json_schema_extra=_list_endpoints)] = "tokens"
    """Protocol of the server. tokens: OpenAI's completions from token IDs, with the answer's token IDs and their
    log-probabilities, as vLLM's server returns them. sglang: the same by SGLang's /generate. text: OpenAI's
    completions of plain text, from any server; without log-probabilities it serves evaluations and collections, not
    training."""
    api_key_variable: VariableName | None = None
    """Environment variable that holds its key."""
    weight_update: str | None = None
    """Method to load new weights from the checkpoint's directory, which the server sees at the same path. vllm: it
    proves that it computes with them, as vLLM's server with VLLM_SERVER_DEV_MODE=1 and `--worker-extension-cls
    roundhouse.generation.vllm_worker.RefitExtension`. sglang: by /update_weights_from_disk; the server names the
    version in every answer, and only `validation.recompute_tolerance` compares its log-probabilities with the
    weights. Unset: it holds the policy of `policy`, and serves its evaluations and collections, not training."""

    @model_validator(mode="after")
    def _update_of_its_kind(self) -> Self:
        if self.weight_update in (None, {"tokens": "vllm", "text": None}.get(self.kind, self.kind)):
            return self
        needed = {"vllm": "tokens"}.get(self.weight_update, self.weight_update)
        if needed in ("text", self.kind) or needed not in plugins.names("endpoint"):
            raise ValueError(
                f"endpoint.weight_update is {self.weight_update}. Set it to {' or '.join(weight_updates())}, or leave it out."
            )
        raise ValueError(
            f"endpoint.weight_update is {self.weight_update}, but endpoint.kind is {self.kind}. Set kind to {needed}, or leave "
            "weight_update out."
        )


class GenerationConfig(Section):
    """The inference engine and how it is served."""

    backend: Annotated[str, Consent("code", role="engine")] = "vllm"
    """vllm, transformers, or a custom engine: `module:Class` of a `roundhouse.generation.interface.GenerationInterface`
    (`generate`, `prepare_for_generation`, `finish_generation`), or an engine of an installed plug-in by its name.
    Or the trainer itself, so that weights are neither published nor loaded twice: trainer, in the flow's process
    (`train.service.kind: resident`), or tinker, at the training service (`train.service.kind: tinker`). Or openai: a
    running server, `endpoint`."""
    endpoint: Endpoint | None = None
    """The server of `backend: openai`."""
    replicas: Operational[PositiveInt] = 1
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_model_len: PositiveInt = 512
    """Prompt and generation together, in tokens."""
    sampling: Sampling = Sampling()
    images: bool = False
    """Messages may have images, which the policy sees: Qwen 2.5-VL and Qwen 3-VL, unpacked, in one process. False serves and
    trains such a model on text alone."""
    tool_call_parser: str = "auto"
    """The parser that turns text into tool calls. auto: the one for the policy's chat template, reported at the start. hermes
    and openai (harmony) read alike for every engine; another of vLLM's by its name needs `backend: vllm`. Calls in the
    policy's thought are drafts with each."""
    template_date: date | None = None
    """The day that a chat template writes as today (`strftime_now`), as 2026-11-28. Unset: the day of each rendering, so
    prompts change at midnight; a run with such a template reports that."""
    threads: Operational[Annotated[int, Field(ge=0)]] = 0
    """CPU threads of a replica without a GPU; 0 takes one for a model below ten million parameters, else all cores."""
    kv_cache_gib: Operational[PositiveFloat] = 0.5
    """Memory of the key-value cache of one replica on CPU, in GiB."""
    gpu_memory_utilization: Operational[Annotated[float, Field(gt=0, le=1)]] = 0.85
    """Share of a GPU's memory that a replica takes. Without a GPU it is not used."""
    gpus_per_replica: Annotated[float, Field(ge=0)] = 0
    """0 runs on CPU."""
    engine_args: Parameters = Field(default_factory=dict)
    """More arguments of vLLM's engine by name, except arguments that load code or replace settings that a run depends on.
    The backends transformers and trainer accept `max_num_seqs`."""
    mcore_generation_config: MegatronCoreGeneration | None = None
    """Number of requests that `backend: trainer` answers together, by NeMo RL's names. Unset: 64."""
    engine_url: Operational[Code[str | None]] = None
    """Base URL of an engine that runs already (`python -m roundhouse.generation.standalone`). Unset: on Ray Serve."""
    start_timeout_seconds: Operational[PositiveFloat] = 300
    """Time limit for the deployment to become ready."""
    request_timeout_seconds: Operational[PositiveFloat] = 60
    """Time limit of one model call."""
    refit_timeout_seconds: Operational[PositiveFloat] = 120
    """Time limit until all replicas answer with the new policy version."""
    weight_sync: Operational[WeightSync] = "store"
    """The weight transport, from the trainer to the engine's replicas. store: every node reads the checkpoint.
    shared-memory: copied once into this node's memory, in the engine's format; replicas must be on this node. delta:
    the change since the version that the replicas hold, exact. adapter: only the adapter of `train.lora`. transfer:
    from the trainer that holds them, else from the flow's process, straight into the engines. trainer: they stay in
    the trainer, which generates (only `backend: trainer` or `tinker`). Or a custom one (`kind: custom`). If it is
    unavailable (a replica that has just started), the checkpoint is read."""
    transfer_backend: Operational[Annotated[TransferBackend, BeforeValidator(known_backend)]] = "gloo"
    """vLLM's weight-transfer engine for `weight_sync: transfer`. gloo: over TCP, from any process into any engine. nccl:
    between GPUs; the process that sends needs one, and so do the engines."""
    weights_cache_gib: Operational[PositiveFloat] = 32
    """Size limit of a node's weight cache in GiB, in addition to entries in use."""
    inflight_requests: InflightRequests | None = None
    """Treatment of requests in flight at a refit. drain: wait for them. continue: they resume with the new weights, and
    both versions are recorded. restart: they restart on the new weights. Unset: drain, or continue if
    `asynchrony.refit` is in-flight and `asynchrony.staleness` above 0."""
    keep_prefix_cache: bool = False
    """Keep keys and values of the old weights in use after a refit: cheaper, but the new weights would compute others,
    so log-probabilities differ from the trainer's."""

    @model_validator(mode="before")
    @classmethod
    def _flat_names(cls, tree: Any) -> Any:
        """`max_new_tokens`, `temperature`, `top_p` and `top_k` of the section itself are those of `sampling`."""
        if not isinstance(tree, dict) or not (flat := [name for name in Sampling.model_fields if name in tree]):
            return tree
        sampling = tree.get("sampling") or {}
        nested = sampling.model_dump(exclude_unset=True) if isinstance(sampling, Sampling) else sampling
        if both := [name for name in flat if name in nested]:
            raise ValueError(
                f"{both[0]} and sampling.{both[0]} are both given. Give generation.sampling.{both[0]} alone."
            )
        rest = {name: value for name, value in tree.items() if name not in flat}
        return rest | {"sampling": {**nested, **{name: tree[name] for name in flat}}}

    @model_validator(mode="before")
    @classmethod
    def _weights_stay(cls, tree: Any) -> Any:
        """Refuse a transport if the trainer generates, because weights do not move."""
        if not isinstance(tree, dict) or engine_traits(tree.get("backend")).train_service is None:
            return tree
        return {"weight_sync": "trainer"} | tree

    @field_validator("backend")
    @classmethod
    def _known_backend(cls, backend: str) -> str:
        if backend == "megatron":
            raise ValueError(
                "backend is megatron, which needs megatron-core and CUDA. Set it to trainer, which generates in the trainer as "
                "well, with a model of transformers."
            )
        named = {"hf": "transformers"}.get(backend, backend)
        if ":" not in named and named not in (engines := plugins.names("engine")):
            raise ValueError(
                f"unknown backend {backend}. Available: {', '.join(engines)}, and module:Class for your own class."
            )
        return named

    def refuse_arguments(self) -> None:
        """Refuse arguments of the engine that load code or that the configuration sets elsewhere.

        Raises:
            ValueError: names the argument and the remedy.
        """
        for name, value in self.engine_args.items():
            if (why := _unfit_argument(name, value, self.backend)) is not None:
                raise ValueError(f"engine_args.{name}: {why}")

    @model_validator(mode="after")
    def _arguments(self, info: ValidationInfo) -> Self:
        if is_recorded(info):
            return self
        self.refuse_arguments()
        if (self.backend == "openai") != (self.endpoint is not None):
            state = "not given" if self.endpoint is None else "given"
            raise ValueError(
                f"backend is {self.backend}, but endpoint is {state}. `backend: openai` and `endpoint: {{url: …, model: …}}` "
                "belong together."
            )
        if self.backend != "vllm" and self.tool_call_parser not in ("auto", *OWN_PARSERS):
            raise ValueError(
                f"tool_call_parser is {self.tool_call_parser}, but the backend {self.backend} reads hermes and openai alone. "
                "Leave it out, or set backend to vllm."
            )
        return self


def _unfit_argument(name: str, value: Any, backend: str) -> str | None:
    """Return the reason why an argument of the engine is refused, or None."""
    traits = engine_traits(backend)
    if traits.arguments is not None:
        return None if name in traits.arguments else f"{traits.refusal} Leave it out."
    if name in _OWN_ARGUMENTS:
        return f"{_OWN_ARGUMENTS[name]} Leave it out."
    if name in _CODE_ARGUMENTS or name.endswith(("_cls", "_plugin")):
        return "it loads code into the engine, and a run must be able to trust the engine's answers. Remove it."
    named = value.get("backend") if name == "compilation_config" and isinstance(value, dict) else value
    if name in ("compilation_config", "distributed_executor_backend") and isinstance(named, str) and "." in named:
        return f"{named} names code, which is not loaded into the engine. Use a value that is built into vLLM."
    return None


def inflight_requests(config: RunConfig) -> InflightRequests:
    """Return the treatment of running generations at this run's refits."""
    if config.generation.inflight_requests is not None:
        return config.generation.inflight_requests
    return "continue" if refits_in_flight(config) else "drain"


def refits_in_flight(config: RunConfig) -> bool:
    """Return whether weights change while requests are in flight."""
    return config.asynchrony.staleness > 0 and config.asynchrony.refit == "in-flight"
