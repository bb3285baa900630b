"""One training stage: optimizer, batches, precision."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from roundhouse.config.algorithms import AlgorithmConfig, GRPOConfig
from roundhouse.config.section import Operational, PositiveFloat, PositiveInt, Section, is_recorded
from roundhouse.config.train_service import ResidentService, TrainServiceConfig


class OptimizerConfig(Section):
    """AdamW with linear warm-up, then constant."""

    learning_rate: PositiveFloat = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Optimizer steps, counted over the whole run."""
    max_grad_norm: PositiveFloat = 1.0


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
    """Names of the layers that get one, without what stands before the last dot."""


class TrainConfig(Section):
    """One training stage: from sequences and version v to version v+1."""

    algorithm: AlgorithmConfig = GRPOConfig()
    """What the rewards are made of; `kind: grpo` where no kind is given."""
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    """Train an adapter and leave the model as it is; learning rates are then about ten times higher. Published checkpoints hold
    the merged model, so that nothing else has to know."""
    service: Operational[TrainServiceConfig] = ResidentService()
    """Where it runs."""
    minibatches: PositiveInt = 4
    """Optimizer steps an epoch; the sequences that teach are split into as many parts."""
    epochs: PositiveInt = 1
    """Passes over the iteration's sequences."""
    tokens_per_microbatch: PositiveInt = 4096
    """Packed tokens of one forward and backward pass; at least one sequence always fits."""
    packing: bool = True
    """Pack sequences into one row with block-diagonal attention. False pads: the slow reference."""
    logits_chunk_tokens: Annotated[int, Field(ge=0)] = 0
    """Compute logits for so many positions at a time, and again in the backward pass, so that a large vocabulary times a long
    sequence needs no memory; 1024 is a good number. 0 computes all at once, which is faster where they fit."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer and compute the rest again in the backward pass: less memory, a third more time."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Operational[Annotated[int, Field(ge=0)]] = 0
    """CPU threads; 0 takes half of the cores, at least one."""

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
                f"algorithm has {setting}, which is right for one optimizer step an iteration, but minibatches x epochs is "
                f"{count}. Set minibatches and epochs to 1, or policy_loss to clipped and importance_ratio to token."
            )
        return self
