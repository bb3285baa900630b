"""The typed configuration of a run. Every key a person can set is a field of a section, explained right under it.

Unknown keys are refused (see `loading.py`, which names the nearest known one); objects are frozen, so that the digest of a
run's configuration stays what it was when the run began. One module a section; this one puts them together.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, ValidationInfo, model_validator

from roundhouse.config.alerts import AlertsConfig
from roundhouse.config.algorithms import ReinforcePlusPlusConfig
from roundhouse.config.asynchrony import Asynchrony
from roundhouse.config.collectors import refuse_unfit_collectors
from roundhouse.config.colocation import PlacementConfig, refuse_unfit_placement
from roundhouse.config.cost import CostConfig
from roundhouse.config.distribution import InProcessCollection
from roundhouse.config.environments import (
    CalculatorEnvironment,
    CustomEnvironment,
    EnvironmentConfig,
    GuessNumberEnvironment,
    SortEnvironment,
)
from roundhouse.config.failures import FailuresConfig
from roundhouse.config.generation import GenerationConfig, Sampling, refuse_unfit_refits
from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.offline import OfflineConfig, unsound_for_old_samples
from roundhouse.config.operations import CheckpointConfig, EvaluationConfig, LocalInfra, ResumeConfig, TrackingConfig
from roundhouse.config.policies import PolicyConfig, PretrainedPolicy, WarmStartPolicy
from roundhouse.config.remote_environments import AgentEnvironment, RemoteEnvironment
from roundhouse.config.rollout import RetryPolicy, RolloutConfig, ValidationConfig
from roundhouse.config.secrets import refuse_secrets
from roundhouse.config.section import Operational, PositiveInt, Section, is_recorded
from roundhouse.config.train_service import ProcessService
from roundhouse.config.training import OptimizerConfig, TrainConfig

__all__ = [
    "AgentEnvironment",
    "CalculatorEnvironment",
    "CheckpointConfig",
    "CustomEnvironment",
    "EnvironmentConfig",
    "EvaluationConfig",
    "FailuresConfig",
    "GenerationConfig",
    "GuessNumberEnvironment",
    "InfraConfig",
    "KubernetesInfra",
    "LocalInfra",
    "OfflineConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "PretrainedPolicy",
    "RemoteEnvironment",
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
    """Local when nothing is said: a section with nothing but `state` means this machine."""
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
    store: Operational[str] = ".roundhouse/store"
    """Where everything is kept: a path, file:// or s3://bucket/prefix."""
    policy: PolicyConfig = WarmStartPolicy()
    environment: EnvironmentConfig = CalculatorEnvironment()
    generation: GenerationConfig = GenerationConfig()
    rollout: RolloutConfig = RolloutConfig()
    asynchrony: Asynchrony = Asynchrony()
    validation: ValidationConfig = ValidationConfig()
    train: TrainConfig = TrainConfig()
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
        self._groups(recorded=is_recorded(info))
        self._sampling()
        self._one_engine()
        if (unfit := self.asynchrony.unfit_window(self.rollout.prompts_per_iteration)) is not None:
            raise ValueError(unfit)
        if self.offline is not None and (unsound := unsound_for_old_samples(self.train.algorithm)):
            raise ValueError("offline data was sampled by another policy. " + " ".join(unsound))
        refuse_unfit_refits(self)
        refuse_unfit_placement(self)
        self._reachable_store()
        if not is_recorded(info):
            self._trainer_gpus()
        self._distributed()
        return self

    def _groups(self, *, recorded: bool) -> None:
        rollout, algorithm = self.rollout, self.train.algorithm
        if rollout.dynamic_sampling is not None and rollout.group_size < 2:
            raise ValueError(
                "rollout.dynamic_sampling wants groups with spread, but rollout.group_size is 1. Raise it, or unset the first."
            )
        if rollout.group_size < 2 and isinstance(algorithm, ReinforcePlusPlusConfig) and algorithm.minus_baseline:
            if not recorded:
                raise ValueError(
                    f"rollout.group_size is {rollout.group_size} and train.algorithm.minus_baseline true: the mean of one "
                    "rollout is its own reward, and nothing of it would be left. Set minus_baseline to false, or group_size to "
                    "2 or more."
                )
        elif rollout.group_size < 2 and algorithm.needs_groups:
            raise ValueError(
                f"rollout.group_size is {rollout.group_size}: a group of one has no baseline. Set it to 2 or more."
            )
        if self.validation.min_group_size > rollout.group_size:
            raise ValueError(
                f"validation.min_group_size ({self.validation.min_group_size}) is above rollout.group_size "
                f"({rollout.group_size}): every group would be omitted. Lower it."
            )
        if self.train.minibatches > rollout.prompts_per_iteration * rollout.group_size:
            raise ValueError(
                f"train.minibatches ({self.train.minibatches}) exceeds the rollouts of an iteration "
                f"({rollout.prompts_per_iteration * rollout.group_size}). Lower it."
            )

    def _sampling(self) -> None:
        sampling = self.generation.sampling
        if sampling.max_new_tokens >= self.generation.max_model_len:
            raise ValueError(
                f"generation.sampling.max_new_tokens ({sampling.max_new_tokens}) leaves no room for a "
                f"prompt in generation.max_model_len ({self.generation.max_model_len}). Lower the first."
            )
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

    def _one_engine(self) -> None:
        generation = self.generation
        if generation.engine_url is not None and generation.replicas != 1:
            raise ValueError(
                f"generation.engine_url names one engine, but generation.replicas is {generation.replicas}. Set it to 1."
            )
        if isinstance(self.infra, KubernetesInfra) and self.infra.engine is not None and generation.engine_url:
            raise ValueError(
                f"generation.engine_url ({generation.engine_url}) and infra.engine.ray_service "
                f"({self.infra.engine.ray_service}) both name an engine. Unset one."
            )

    def _trainer_gpus(self) -> None:
        infra, service = self.infra, self.train.service
        if isinstance(infra, KubernetesInfra) and isinstance(service, ProcessService):
            gpus, processes = infra.trainer.gpus, service.processes
            if gpus > processes:
                raise ValueError(
                    f"infra.trainer.gpus is {gpus}, but train.service.processes is {processes}, and each process trains on one "
                    f"GPU: the others of a pod would be idle. Set train.service.processes to {gpus}, or lower the first."
                )

    def _distributed(self) -> None:
        rollout, distribution = self.rollout, self.rollout.distribution
        if isinstance(distribution, InProcessCollection):
            return
        if rollout.concurrency is not None and distribution.shards > rollout.concurrency:
            raise ValueError(
                f"rollout.distribution.shards ({distribution.shards}) is above rollout.concurrency ({rollout.concurrency}), "
                "which the shards have together: each needs one rollout in flight. Lower the first or raise the second."
            )
        if distribution.timeout_seconds <= rollout.timeout_seconds:
            raise ValueError(
                f"rollout.distribution.timeout_seconds ({distribution.timeout_seconds:g}) is the limit of a whole shard and "
                f"not above that of one rollout, rollout.timeout_seconds ({rollout.timeout_seconds:g}). Raise the first."
            )
        refuse_unfit_collectors(self)

    def _reachable_store(self) -> None:
        infra, scheme = self.infra, re.match(r"(\w*):/", self.store)
        if not self.store.strip() or (scheme and not self.store.startswith(("file://", "s3://"))):
            raise ValueError(f"store is {self.store!r}. Set it to a path, file:// or s3://bucket/prefix.")
        if isinstance(infra, KubernetesInfra) and not self.store.startswith("s3://") and not infra.store_claim:
            raise ValueError(
                f"store is {self.store!r}, a directory, which the pods of infra.kind kubernetes do not see. Use s3://…, or "
                "name a PersistentVolumeClaim in infra.store_claim, which is mounted at that path."
            )
