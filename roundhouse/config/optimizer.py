"""How weights are updated: AdamW and its learning rate, of the policy and of a critic alike."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from roundhouse.config.section import Fraction, PositiveFloat, PositiveInt, Section


class OptimizerConfig(Section):
    """AdamW with linear warm-up, then constant or falling to a share of the full rate."""

    learning_rate: PositiveFloat = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Optimizer steps, counted over the whole run."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up."""
    decay_steps: PositiveInt | None = None
    """Optimizer steps from the end of the warm-up until the rate has fallen; needed unless the schedule is constant."""
    final_share: Fraction = 0.1
    """The share of the full rate at which a falling schedule ends and stays."""
    max_grad_norm: PositiveFloat = 1.0
    moments: Literal["float32", "8-bit"] = "float32"
    """Of AdamW's two moments. 8-bit (arXiv:2110.02861) takes 2.1 bytes per parameter of a matrix in place of 8, with a scale
    for each 128 numbers; it needs torchao (extra `torchao`). It must stay what it was during a run."""

    @model_validator(mode="after")
    def _decay_has_an_end(self) -> Self:
        if (self.schedule == "constant") != (self.decay_steps is None):
            raise ValueError(
                f"schedule {self.schedule} with decay_steps {self.decay_steps}: a linear or cosine schedule needs decay_steps "
                "(optimizer steps: iterations times minibatches times epochs), a constant one has none"
            )
        return self
