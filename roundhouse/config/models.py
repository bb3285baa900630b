"""The typed configuration of a run. Every key a user can set is a field of a section, explained directly under it.

Unknown keys are refused (see `loading.py`, which names the nearest known one). Objects are frozen, so the digest of a
run's configuration never changes. Each section has one module; this one combines them.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, ValidationInfo, model_validator

from roundhouse.config.checks import check_combinations
from roundhouse.config.environments import CustomEnvironment, EnvironmentConfig
from roundhouse.config.generation import GenerationConfig, Sampling
from roundhouse.config.included_environments import CalculatorEnvironment, SortEnvironment
from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.operations import (
    AlertsConfig,
    CheckpointConfig,
    CostConfig,
    EvaluationConfig,
    FailuresConfig,
    FinishConfig,
    LocalInfra,
    ResumeConfig,
    TrackingConfig,
)
from roundhouse.config.placement import PlacementConfig
from roundhouse.config.rollout import Asynchrony, OfflineConfig, RetryPolicy, RolloutConfig, ValidationConfig
from roundhouse.config.secrets import refuse_secrets
from roundhouse.config.section import Operational, PositiveInt, Section, is_recorded
from roundhouse.config.stages import StagesConfig
from roundhouse.config.training import (
    BundledPolicy,
    OptimizerConfig,
    PolicyConfig,
    PretrainedPolicy,
    TrainConfig,
    WarmStartPolicy,
)

__all__ = [
    "BundledPolicy",
    "CalculatorEnvironment",
    "CheckpointConfig",
    "CustomEnvironment",
    "EnvironmentConfig",
    "EvaluationConfig",
    "FailuresConfig",
    "GenerationConfig",
    "InfraConfig",
    "KubernetesInfra",
    "LocalInfra",
    "OfflineConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "PretrainedPolicy",
    "ResumeConfig",
    "RetryPolicy",
    "RolloutConfig",
    "RunConfig",
    "Sampling",
    "Section",
    "SortEnvironment",
    "TrackingConfig",
    "TrainConfig",
    "ValidationConfig",
    "WarmStartPolicy",
]


def _infra_kind(given: Any) -> str | None:
    """Return local if the section has only `state`: it means this machine."""
    return given.get("kind", "local") if isinstance(given, dict) else getattr(given, "kind", None)


InfraConfig = Annotated[
    Annotated[LocalInfra, Tag("local")] | Annotated[KubernetesInfra, Tag("kubernetes")],
    Discriminator(_infra_kind, "infra_kind", "kind is neither 'local' nor 'kubernetes'"),
]


class RunConfig(Section):
    """A training run."""

    run_id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    """Identity of the run: starting it again continues it."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    iterations: Operational[PositiveInt] = 30
    finish: Operational[FinishConfig] = FinishConfig()
    store: Operational[str] = ".roundhouse/store"
    """Location of all data: a path, file:// or s3://bucket/prefix."""
    policy: PolicyConfig = WarmStartPolicy()
    environment: EnvironmentConfig = CalculatorEnvironment()
    generation: GenerationConfig = GenerationConfig()
    rollout: RolloutConfig = RolloutConfig()
    asynchrony: Asynchrony = Asynchrony()
    validation: ValidationConfig = ValidationConfig()
    train: TrainConfig = TrainConfig()
    stages: Operational[StagesConfig] = StagesConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    offline: OfflineConfig | None = None
    """Train from collected datasets instead of fresh rollouts (docs/offline-training.md). Unset: from fresh ones."""
    checkpoint: Operational[CheckpointConfig] = CheckpointConfig()
    resume: Operational[ResumeConfig] = ResumeConfig()
    tracking: Operational[TrackingConfig] = TrackingConfig()
    cost: Operational[CostConfig] = CostConfig()
    failures: Operational[FailuresConfig] = FailuresConfig()
    alerts: Operational[AlertsConfig] = AlertsConfig()
    infra: Operational[InfraConfig] = LocalInfra()
    placement: Operational[PlacementConfig] = PlacementConfig()

    @model_validator(mode="after")
    def _no_secrets(self, info: ValidationInfo) -> RunConfig:
        if not is_recorded(info):
            refuse_secrets(self.model_dump(mode="json"), by_name=False)
        return self

    @model_validator(mode="after")
    def _combinations(self, info: ValidationInfo) -> RunConfig:
        check_combinations(self, recorded=is_recorded(info))
        return self
