"""The section of a train service with Tinker's API, and the facts of the engine that draws there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from roundhouse.config.engines import EngineTraits
from roundhouse.config.secrets import VariableName
from roundhouse.config.section import Endpoint, PositiveFloat, PositiveInt, SecretFile
from roundhouse.config.training import ServiceSection

if TYPE_CHECKING:
    from roundhouse.config.models import RunConfig


TINKER = EngineTraits(
    "roundhouse.plugins.tinker.engine:open_tinker",
    in_flow=True,
    train_service="tinker",
    refusal="the engine is the service's.",
)


class TinkerService(ServiceSection):
    """Tinker's API (thinkingmachines.ai), or another that speaks it: an adapter on a model of the service's. Weights stay
    there, so that rollouts are drawn there too (`generation.backend: tinker`). Needs the package tinker."""

    is_elsewhere: ClassVar[bool] = True
    holds_one_adapter: ClassVar[bool] = True
    kind: Literal["tinker"]
    base_model: str
    """By the service's name, such as Qwen/Qwen3-8B. `policy.path` is its Hugging Face directory here."""
    lora_rank: PositiveInt = 32
    url: Endpoint[Annotated[str, Field(pattern=r"^https?://\S+$")] | None] = None
    """Unset: Tinker's."""
    token_variable: VariableName = "TINKER_API_KEY"
    """Environment variable that holds the key."""
    token_file: SecretFile | None = None
    """File that holds it instead, such as a mounted secret."""
    timeout_seconds: PositiveFloat = 3600
    """Time limit of one request, its wait in the service's queue included."""

    @property
    def place(self) -> str:
        return self.url or "Tinker"

    def check_run(self, config: RunConfig) -> None:
        temperature, every = config.generation.sampling.temperature, config.checkpoint.optimizer_every
        for unfit, what, remedy in (
            (
                config.generation.backend != "tinker" and (config.offline is None or config.offline.evaluate),
                f"whose weights stay there, but generation.backend is {config.generation.backend}",
                "Set generation.backend to tinker, or train on collected datasets, offline: {datasets: […], evaluate: false}",
            ),
            (
                temperature != 1,
                f"but generation.sampling.temperature is {temperature}",
                "It computes at temperature 1 alone",
            ),
            (config.train.lora is not None, "but train.lora is set", "Set train.service.lora_rank instead"),
            (
                every != 1,
                f"which keeps the optimizer with the weights, but checkpoint.optimizer_every is {every}",
                "Set it to 1",
            ),
        ):
            if unfit:
                raise ValueError(f"train.service.kind is tinker, {what}. {remedy}.")
