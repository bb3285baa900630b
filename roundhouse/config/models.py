"""The typed configuration of a run. Every key a person can set is a field here, explained right under it.

Unknown keys are refused (see `loading.py`, which names the nearest known one); objects are frozen, so that the digest of a
run's configuration stays what it was when the run began.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
ProperFraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of every configuration section: frozen, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


# -- environments ---------------------------------------------------------------------------------------------------


class CalculatorEnvironment(Section):
    """Two-step arithmetic `a*b+c` with a calculator tool that takes one operator a call."""

    kind: Literal["calculator"] = "calculator"
    heldout_fraction: ProperFraction = 0.2
    """Share of all problems that neither the warm start nor training ever sees."""


class SortEnvironment(Section):
    """Single turn: sort the given digits."""

    kind: Literal["sort"] = "sort"
    digits: Annotated[int, Field(ge=2, le=9)] = 6
    """How many digits a problem has."""
    heldout_fraction: ProperFraction = 0.2
    """Share of all problems that neither the warm start nor training ever sees."""


class GuessNumberEnvironment(Section):
    """Find a hidden number with a tool that answers higher or lower: the policy has to discover the search."""

    kind: Literal["guess_number"] = "guess_number"
    upper: Annotated[int, Field(ge=3, le=64)] = 7
    """The hidden number lies in 1..upper."""
    guesses: PositiveInt = 3
    """Guesses allowed in an episode."""


class CustomEnvironment(Section):
    """An environment of your own, imported by name."""

    kind: Literal["custom"]
    target: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    """`module:Class` of a `roundhouse.gym.environment.Environment`."""
    parameters: dict[str, Any] = {}
    """Keyword arguments of the class."""


class RemoteEnvironment(Section):
    """A resources server reached over HTTP (NeMo Gym's contract: /seed_session, /<tool>, /verify)."""

    kind: Literal["remote"]
    url: str
    """Base URL of the resources server."""
    train_tasks: str
    """JSON lines file of training task rows."""
    heldout_tasks: str | None = None
    """JSON lines file of held-out task rows."""


EnvironmentConfig = Annotated[
    CalculatorEnvironment | SortEnvironment | GuessNumberEnvironment | CustomEnvironment | RemoteEnvironment,
    Field(discriminator="kind"),
]


# -- starting policy ------------------------------------------------------------------------------------------------


class PretrainedPolicy(Section):
    """Start from a Hugging Face model directory."""

    kind: Literal["pretrained"]
    path: str
    """Directory with config.json, safetensors and tokenizer files; a local path, file:// or s3:// URI."""


class WarmStartPolicy(Section):
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


PolicyConfig = Annotated[PretrainedPolicy | WarmStartPolicy, Field(discriminator="kind")]


# -- generation -----------------------------------------------------------------------------------------------------


class Sampling(Section):
    """How tokens are drawn."""

    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    """0 means greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: PositiveInt | None = None
    max_new_tokens: PositiveInt = 24
    """Limit of one model call."""


class GenerationConfig(Section):
    """The inference engine and how it is served."""

    backend: Literal["vllm", "transformers"] = "vllm"
    replicas: PositiveInt = 1
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_model_len: PositiveInt = 512
    """Prompt and generation together, in tokens."""
    sampling: Sampling = Sampling()
    tool_call_parser: str = "hermes"
    """vLLM's name of the parser that turns text into tool calls."""
    kv_cache_gib: PositiveFloat = 0.5
    """Memory of the key-value cache of one replica on CPU, in GiB."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of a GPU's memory that a replica takes. Without a GPU it is not used."""
    gpus_per_replica: Annotated[float, Field(ge=0)] = 0
    """0 runs on CPU."""
    engine_args: dict[str, Any] = {}
    """More arguments of vLLM's engine, by their names."""
    start_timeout_seconds: PositiveFloat = 300
    """Time limit for the deployment to become ready."""
    request_timeout_seconds: PositiveFloat = 60
    """Time limit of one model call."""
    refit_timeout_seconds: PositiveFloat = 120
    """Time limit until all replicas answer with the new policy version."""


# -- rollouts and validation ----------------------------------------------------------------------------------------


class RetryPolicy(Section):
    """Bounded attempts with exponential back-off, for infrastructure failures only."""

    attempts: PositiveInt = 3
    first_delay_seconds: PositiveFloat = 0.5
    factor: Annotated[float, Field(ge=1)] = 2.0
    max_delay_seconds: PositiveFloat = 30.0


class RolloutConfig(Section):
    """What one iteration collects."""

    tasks: PositiveInt = 16
    """Tasks (groups) an iteration."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Rollouts of each task."""
    max_turns: PositiveInt = 4
    """Model calls a rollout."""
    max_tokens: PositiveInt = 400
    """Tokens of a whole rollout, prompt included; it is truncated there."""
    concurrency: PositiveInt = 128
    """Rollouts in flight at once."""
    timeout_seconds: PositiveFloat = 120
    """Time limit of one rollout attempt, all turns and tools."""
    tool_timeout_seconds: PositiveFloat = 20
    """Time limit of one tool call."""
    retry: RetryPolicy = RetryPolicy()
    max_failed_fraction: Fraction = 0.2
    """The collect stage fails when a larger share of its rollouts failed."""


class ValidationConfig(Section):
    """The gate between collection and training."""

    on_break: Literal["reject", "truncate", "split"] = "reject"
    """A prompt that does not continue the recorded tokens: refuse the rollout, keep it up to the last contiguous turn,
    or begin a new sequence of the same rollout."""
    min_group_size: PositiveInt = 2
    """Groups with fewer valid rollouts are omitted."""
    max_quarantine_fraction: Fraction = 0.5
    """The validate stage fails when a larger share was refused."""


# -- training -------------------------------------------------------------------------------------------------------


class GRPO(Section):
    """Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300), token-level loss as in DAPO (2503.14476)."""

    kind: Literal["grpo"] = "grpo"
    normalize_by_std: bool = True
    """Divide the advantage by the group's standard deviation; false gives Dr. GRPO's advantage."""
    leave_one_out: bool = False
    """Baseline from the other rollouts of the group only."""
    loss_aggregation: Literal["token", "sequence"] = "token"
    """Mean over all trained tokens of the batch, or over sequences of their token means."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the loss where the advantage is negative."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the reference (the starting policy) in the loss. 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    mismatch_correction: Literal["none", "tis", "icepop"] = "none"
    """What to do about trainer and engine disagreeing on log-probabilities; it is always measured."""
    mismatch_bounds: tuple[float, float] = (0.5, 5.0)
    """Bounds of exp(trainer - engine) log-probability for the correction."""


class OptimizerConfig(Section):
    """AdamW with linear warm-up, then constant."""

    learning_rate: PositiveFloat = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Optimizer steps, counted over the whole run."""
    max_grad_norm: PositiveFloat = 1.0


class TrainConfig(Section):
    """One training stage: from sequences and version v to version v+1."""

    algorithm: GRPO = GRPO()
    optimizer: OptimizerConfig = OptimizerConfig()
    updates: PositiveInt = 4
    """Optimizer steps an epoch; the sequences that teach are split into as many parts."""
    epochs: PositiveInt = 1
    """Passes over the iteration's sequences."""
    tokens_per_microbatch: PositiveInt = 4096
    """Packed tokens of one forward and backward pass; at least one sequence always fits."""
    packing: bool = True
    """Pack sequences into one row with block-diagonal attention. False pads: the slow reference."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads; 0 takes half of the cores, at least one."""


# -- evaluation, checkpoints, tracking ------------------------------------------------------------------------------


class EvaluationConfig(Section):
    """Held-out evaluation: before training, every N iterations, and at the end."""

    every: Annotated[int, Field(ge=0)] = 10
    """Iterations between evaluations; 0 evaluates only before and after."""
    tasks: PositiveInt = 128
    """Held-out tasks; all there are when fewer."""
    samples: PositiveInt = 1
    """Rollouts of each task."""
    temperature: Annotated[float, Field(ge=0)] = 1.0


class CheckpointConfig(Section):
    """Which checkpoints are kept. The newest complete one and version 0 always are."""

    keep_last: PositiveInt = 3
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Keep each version divisible by this for good; 0 keeps none beyond `keep_last`."""


class TrackingConfig(Section):
    """MLflow."""

    enabled: bool = True
    uri: str | None = None
    """Tracking server. Unset: MLFLOW_TRACKING_URI, else the local services' server."""
    experiment: str = "roundhouse"
    conversations: Annotated[int, Field(ge=0)] = 4
    """Sample conversations logged at each evaluation."""


class LocalInfra(Section):
    """Processes on this machine, Ray local."""

    kind: Literal["local"] = "local"
    state: str = ".roundhouse"
    """Directory of service state and logs."""


class RunConfig(Section):
    """A training run."""

    run_id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    """Identity of the run: starting it again continues it."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    iterations: PositiveInt = 30
    store: str = ".roundhouse/store"
    """Where everything is kept: a path, file:// or s3://bucket/prefix."""
    policy: PolicyConfig = WarmStartPolicy()
    environment: EnvironmentConfig = CalculatorEnvironment()
    generation: GenerationConfig = GenerationConfig()
    rollout: RolloutConfig = RolloutConfig()
    validation: ValidationConfig = ValidationConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    infra: LocalInfra = LocalInfra()

    @model_validator(mode="after")
    def _combinations(self) -> RunConfig:
        rollout = self.rollout
        if rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size is {rollout.group_size}: a group of one has no baseline. Set it to 2 or more."
            )
        if self.validation.min_group_size > rollout.group_size:
            raise ValueError(
                f"validation.min_group_size ({self.validation.min_group_size}) is above rollout.group_size "
                f"({rollout.group_size}): every group would be omitted. Lower it."
            )
        if self.generation.sampling.max_new_tokens >= self.generation.max_model_len:
            raise ValueError(
                f"generation.sampling.max_new_tokens ({self.generation.sampling.max_new_tokens}) leaves no room for a "
                f"prompt in generation.max_model_len ({self.generation.max_model_len}). Lower the first."
            )
        if self.train.updates > rollout.tasks * rollout.group_size:
            raise ValueError(
                f"train.updates ({self.train.updates}) exceeds the rollouts of an iteration "
                f"({rollout.tasks * rollout.group_size}). Lower it."
            )
        sampling = self.generation.sampling
        if sampling.temperature == 0:
            raise ValueError(
                "generation.sampling.temperature is 0: greedy rollouts of a group are all equal and teach nothing. "
                "Set it above 0 (evaluation.temperature may be 0)."
            )
        if sampling.top_p < 1 or sampling.top_k is not None:
            raise ValueError(
                "generation.sampling.top_p and top_k filter the distribution that the trainer cannot reproduce, so the "
                "policy ratio would be wrong. Leave top_p at 1.0 and top_k unset for training."
            )
        return self
