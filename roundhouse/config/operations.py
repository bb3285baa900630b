"""Operation of a run: evaluation and approval, checkpoints, tracking, cost and budget, failures, alerts, local
services."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from roundhouse import plugins
from roundhouse.config.environments import EnvironmentConfig
from roundhouse.config.generation import Sampling
from roundhouse.config.kubernetes import InfraSection
from roundhouse.config.section import Code, Consent, Operational, PositiveFloat, PositiveInt, ProperFraction, Section
from roundhouse.errors import ConfigError

if TYPE_CHECKING:
    from roundhouse.config.models import RunConfig


class ApprovalConfig(Section):
    """A person's approval of each promotion. The run's starting policy needs none, because it is in use already."""

    required: bool = False
    """Ask before a version that is better beyond noise becomes the promoted one."""
    while_pending: Literal["continue", "block"] = "continue"
    """Until the answer comes: continue with the next iteration, or block before it and release the machine."""
    timeout_hours: PositiveFloat | None = 72
    """Time limit of the question; null: none."""
    on_timeout: Literal["refuse", "approve"] = "refuse"
    """The answer when none has come by then."""


class EvaluationSet(Section):
    """A further evaluation of the versions that are evaluated: other tasks, or the same drawn otherwise. It is reported as
    `evaluation/<name>/…`; promotion does not look at it."""

    environment: EnvironmentConfig | None = None
    """Environment with the held-out tasks; unset: the run's."""
    tasks: PositiveInt | None = None
    """If unset, this and the following keys are those of `evaluation`."""
    samples: PositiveInt | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: PositiveInt | None = None
    max_new_tokens: PositiveInt | None = None
    success_threshold: float | None = None


class EvaluationConfig(Section):
    """Held-out evaluation: before training, every N iterations, and at the end."""

    every: Operational[Annotated[int, Field(ge=0)] | None] = 10
    """Iterations between evaluations; 0 evaluates the last version only, null none. With null and `before_training: false` a
    run needs no held-out tasks."""
    tasks: PositiveInt = 128
    """Held-out tasks; all there are when fewer."""
    samples: PositiveInt = 1
    """Rollouts of each task."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Unset, this and the next two are those of `generation.sampling`."""
    top_k: PositiveInt | None = None
    max_new_tokens: PositiveInt | None = None
    """An environment of a mixture with a separate limit (`rollout.environments`) keeps it."""
    before_training: Operational[bool] = True
    """Evaluate the starting policy too: what every later version is compared with."""
    success_threshold: Operational[float] = 1.0
    """A rollout passes (`evaluation/pass_at_*`) if its reward is at least this. 1 is a completely right answer; lower
    it if rewards are graded and less is a success, but above the reward that a wrong answer can earn by its form."""
    promotion_confidence: Operational[Annotated[float, Field(gt=0.5, lt=1)] | None] = 0.95
    """After each evaluation, promote the version when it is better than the promoted one beyond noise: when the interval of
    this confidence around the difference, task by task, lies above 0. null promotes nothing."""
    approval: Operational[ApprovalConfig] = ApprovalConfig()
    sets: dict[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")], EvaluationSet] = Field(default_factory=dict)
    """More evaluations by name, such as `greedy: {temperature: 0}`: the same tasks without chance; or tasks of another
    environment, which training must not make worse."""


def with_set(config: RunConfig, name: str) -> RunConfig:
    """The configuration as one of `evaluation.sets` changes it."""
    own = {key: value for key, value in config.evaluation.sets[name] if value is not None}
    environment = own.pop("environment", config.environment)
    evaluation = config.evaluation.model_copy(update=own)
    return config.model_copy(update={"environment": environment, "evaluation": evaluation})


def evaluation_sampling(config: RunConfig) -> Sampling:
    """Return the sampling of an evaluation."""
    own = {name: getattr(config.evaluation, name) for name in Sampling.model_fields}
    return config.generation.sampling.model_copy(update={key: value for key, value in own.items() if value is not None})


class FinishConfig(Section):
    """A metric that ends a run before `iterations` do."""

    metric: str = "evaluation/reward/mean"
    """The metric that `at_least` is compared with, after each iteration that has it (docs/metrics.md)."""
    at_least: float | None = None
    """The run ends with the iteration in which the metric reaches this. Unset: no metric ends it."""


class CheckpointConfig(Section):
    """Content and retention of checkpoints. The newest complete one and version 0 are always kept."""

    keep_last: PositiveInt = 3
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Keep each version divisible by this for good; 0 keeps none beyond `keep_last`."""
    optimizer_every: PositiveInt = 1
    """Versions divisible by this, and the last, hold the optimizer's state, which is twice the size of the weights; the others
    hold the weights alone. A resume from one of them trains the iterations since the newest state again, from their stored
    sequences, and must arrive at the recorded weights."""
    optimizer_beside_mib: Annotated[int, Field(ge=0)] | None = 64
    """From this size of a version's weights on (MiB), a version is published before its optimizer's state is written,
    which happens during the next refit and collection. A run that is killed in between trains that iteration again,
    as with `optimizer_every`. Only if training is reproducible: not on GPUs. null: each state is written before its
    version."""


class ResumeConfig(Section):
    """Behaviour of a start if the run exists."""

    mode: Literal["auto", "disable", "from_path"] = "auto"
    """`auto` continues the run of this id after its last complete stage, or begins it. `disable` only begins: a run id that
    exists is refused. `from_path` begins from the checkpoint at `path`, weights and trainer state, and continues such a run."""
    path: str | None = None
    """Checkpoint to begin from: `<store>/runs/<run>/checkpoints/<version>`, a path or URI."""
    changed_inputs: Literal["refuse", "accept"] = "refuse"
    """When task rows or the code of a class that the configuration names have changed since the run's last start. `accept`
    continues, and records the change in the run's `inputs.json`."""

    @model_validator(mode="after")
    def _path(self) -> Self:
        if (self.mode == "from_path") != (self.path is not None):
            value = "no resume.path" if self.path is None else f"resume.path={self.path!r}"
            raise ValueError(
                f"resume.mode={self.mode} with {value}: a path goes with from_path, and from_path with a path. Set both "
                "or none."
            )
        return self


LabelName = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9_-]{0,61}[a-z0-9])?$")]
LabelValue = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
"""A label as Kubernetes allows it."""


class TrackingConfig(Section):
    """Destinations of a run's metrics; the store has them all."""

    enabled: bool = True
    """False: nowhere."""
    sinks: Annotated[tuple[str, ...], Field(min_length=1), Consent("code", role="sink")] = ("mlflow",)
    """`mlflow`, which the other keys are about; `json_lines`, a line an iteration in `metrics/<run_id>.jsonl` of `infra.state`;
    `tensorboard`, `wandb` or `trackio`, each with the extra of that name (`pip install 'roundhouse[wandb]'`); a sink of an
    installed plug-in by its name; or `module:Class` of a `roundhouse.tracking.sinks.MetricsSink`."""
    uri: Code[str | None] = None
    """Tracking server. Unset: MLFLOW_TRACKING_URI, else the local services' server."""
    experiment: str = "roundhouse"
    labels: dict[LabelName, LabelValue] = Field(default_factory=dict)
    """Labels of the run, such as `team: search`: tags of its MLflow run and of its deployments' flow runs, labels of
    its Jobs and their pods, and groups of `roundhouse runs cost --by team`."""
    conversations: Annotated[int, Field(ge=0)] = 4
    """Sample conversations logged at each evaluation, as text and as traces."""
    register_as: str | None = "{run_id}"
    """Name of the registered model that gets a version for each evaluated checkpoint; null registers none."""
    system_metrics: bool = True
    """Log CPU, memory, disk and network of the run's machine every ten seconds."""

    @property
    def in_mlflow(self) -> bool:
        return self.enabled and "mlflow" in self.sinks

    @field_validator("sinks")
    @classmethod
    def _names_sinks(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in (known := plugins.names("sink")) and ":" not in name:
                raise ValueError(f"{name!r}: the sinks are {', '.join(known)}, or name a class as module:Class")
        if len(set(names)) < len(names):
            raise ValueError(f"a sink is named twice: {', '.join(names)}")
        return names

    @field_validator("register_as")
    @classmethod
    def _names_a_model(cls, value: str | None) -> str | None:
        try:
            name = (value or "").format(run_id="x")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"{value!r}: only {{run_id}} may stand in braces ({error!r})") from None
        if value is not None and (not name or set(name) & set("/:")):
            raise ValueError(f"{value!r}: a registered model's name is not empty and has neither / nor :")
        return value


DatabaseUrl = Annotated[str, Field(pattern=r"^[a-z0-9]+(\+[a-z0-9]+)?://")]
"""Without a password, which a configuration does not hold: PGPASSWORD, or the file that PGPASSFILE names."""


class PrefectServerSettings(Section):
    """The local Prefect server."""

    database_url: Code[DatabaseUrl | None] = None
    """Database, such as postgresql+asyncpg://prefect@host/prefect. Unset: SQLite in `state`."""


class MLflowServerSettings(Section):
    """The local MLflow server."""

    backend_store_uri: Code[DatabaseUrl | None] = None
    """Database of its runs, such as postgresql://mlflow@host/mlflow, which needs psycopg2. Unset: SQLite in `state`.
    Artifacts stay in `state`."""


class RayResources(Section):
    """Resources that a program reserves on its node."""

    cpus: PositiveFloat = 1
    gpus: Annotated[float, Field(ge=0)] = 0
    """The ranks of a trainer's node take one each."""


class RayTrainer(RayResources):
    """Resources that the trainer reserves on each of its nodes."""

    nodes: PositiveInt = 1
    """Above 1, the ranks of so many nodes are one group: `train.service.processes` on each, in a separate actor."""


class RayCluster(Section):
    """Ray cluster in which `launcher: ray` starts programs. Its nodes need this version of Roundhouse, and reach
    store and engine."""

    address: Code[str | None] = None
    """Cluster to join; unset joins the one this process is in (RAY_ADDRESS), else starts a local one."""
    trainer: RayTrainer = RayTrainer()
    """Resources of a training step, and of resident ranks."""
    collector: RayResources = RayResources()
    """Resources of one shard of a collection."""


class LocalInfra(InfraSection):
    """Processes on this machine, Ray local."""

    kind: Literal["local"] = "local"
    state: Code[str] = ".roundhouse"
    """Directory of service state and logs."""
    prefect: PrefectServerSettings = PrefectServerSettings()
    mlflow: MLflowServerSettings = MLflowServerSettings()
    ray: RayCluster = RayCluster()
    start_timeout_seconds: PositiveFloat = 300
    """Time limit until all services answer, on an idle machine; the load of a busy one makes it up to six times longer."""

    @model_validator(mode="after")
    def _drivers(self) -> LocalInfra:
        url = self.prefect.database_url
        if url is not None and not url.startswith(("postgresql+asyncpg://", "sqlite+aiosqlite://")):
            raise ValueError(
                f"infra.prefect.database_url is {url!r}: Prefect takes postgresql+asyncpg://user@host/database "
                "(or sqlite+aiosqlite)."
            )
        return self

    def server_arguments(self) -> dict[str, list[str]]:
        arguments = super().server_arguments()
        if (url := self.prefect.database_url) is not None:
            arguments["prefect"] = [f"--database-url={url}"]
        if (uri := self.mlflow.backend_store_uri) is not None:
            if uri.startswith("postgresql") and find_spec("psycopg2") is None:
                raise ConfigError(
                    "infra.mlflow.backend_store_uri names a PostgreSQL, and MLflow's driver for it, psycopg2, is not installed "
                    "here: pip install psycopg2-binary, or unset the key."
                )
            arguments["mlflow"] = [f"--backend-store-uri={uri}"]
        return arguments


class JudgePrice(Section):
    """Money for a million tokens of a judge."""

    prompt: Annotated[float, Field(ge=0)]
    """Price of prompt tokens."""
    completion: Annotated[float, Field(ge=0)]
    """Price of completion tokens."""


class PriceTable(Section):
    """Money for an hour of a resource, and for the tokens of judges, in one currency."""

    currency: str = "USD"
    gpu_hour: Annotated[float, Field(ge=0)] = 0
    cpu_hour: Annotated[float, Field(ge=0)] = 0
    """Price of used CPU time, not of held cores."""
    judges: dict[str, JudgePrice] = Field(default_factory=dict)
    """Prices of a rubric's judges, by `rubric.judge.model`: `prompt` and `completion`, per million tokens of each.
    Tokens of an unlisted judge are reported without a price; the run's engine is paid by `gpu_hour`."""


class Budget(Section):
    """Limits of a whole run. A reached limit stops the run before its next iteration, until it is raised."""

    wall_hours: PositiveFloat | None = None
    """Sum of the iterations' wall time; waiting in between is not counted."""
    gpu_hours: PositiveFloat | None = None
    cpu_hours: PositiveFloat | None = None
    generated_tokens: PositiveFloat | None = None
    money: PositiveFloat | None = None
    """In the currency of `cost.prices`."""


class CostConfig(Section):
    """Accounting by stage, and the budget."""

    trainer_gpus: Annotated[float, Field(ge=0)] = 0
    """GPUs that the trainer holds: for the whole iteration if it stays open, only for its stage with
    `train.service.kind: process`. The engine's are `generation.replicas` × `generation.gpus_per_replica`, held all
    the time."""
    prices: PriceTable = PriceTable()
    budget: Budget = Budget()
    on_reached: Literal["pause", "stop"] = "pause"
    """Behaviour at a reached limit of the budget. `pause`: a flow run of a deployment waits, without a process, until a
    person raises it in Prefect's form or by `roundhouse runs resume --budget`; a run in a terminal ends, and resumes
    in the same way. `stop` fails the flow run."""


SHORTEST_STALL_SECONDS = 900.0


class FailuresConfig(Section):
    """Policy, watchdog, heartbeat. Retries of single rollouts are in `rollout.retry`."""

    policy: Literal["stop_on_error", "stop_on_critical", "continue"] = "stop_on_error"
    """Behaviour after an iteration failed and its stage's retries are used up. `stop_on_error` ends the run.
    `stop_on_critical` waits for infrastructure that may recover, skips (on record) an iteration whose data failed,
    and ends the run for everything else. `continue` also skips defects of the program."""
    on_too_few: Literal["fail", "skip"] = "fail"
    """Behaviour if too few rollouts or groups are left of an iteration: fail it, or skip it on record whatever `policy`
    is. To collect more tasks instead, set `rollout.dynamic_sampling`."""
    min_groups: PositiveInt = 1
    """Fewer groups than this with something to train on are too few."""
    max_consecutive_skips: Annotated[int, Field(ge=0)] = 3
    """More iterations in a row than this are not skipped; the run ends instead."""
    max_wait_seconds: Annotated[float, Field(ge=0)] = 3600
    """Total waiting time of one iteration for unreachable infrastructure."""
    stall_seconds: PositiveFloat | None = None
    """A stage without progress for so long is aborted and retried. Unset: 900, or 1.5 times the longest time limit in
    the configuration, if that is more."""
    heartbeat_seconds: PositiveFloat = 10
    """Interval at which the run's process records the work in flight (`roundhouse runs status`)."""


def stall_seconds(config: RunConfig) -> float:
    """Return `failures.stall_seconds`, or its default: longer than any wait with a separate time limit."""
    if config.failures.stall_seconds is not None:
        return config.failures.stall_seconds
    generation = config.generation
    limits = [
        config.rollout.timeout_seconds,
        generation.start_timeout_seconds + generation.refit_timeout_seconds,
        generation.request_timeout_seconds,
        getattr(config.train.service, "timeout_seconds", 0.0),
    ]
    return max(SHORTEST_STALL_SECONDS, 1.5 * max(limits))


class AlertsConfig(Section):
    """Thresholds. Each alert fires once per crossing; null switches it off."""

    reward_below_best: ProperFraction | None = 0.5
    """The reward has collapsed when its mean over the last `reward_window` iterations is below this share of the best such mean
    of the 100 iterations before. For a best above 0 only."""
    reward_drop: PositiveFloat | None = None
    """The same by an absolute distance from the best, for rewards that may be negative."""
    reward_window: PositiveInt = 3
    """Iterations of that mean: the more, the less a lucky draw of tasks counts."""
    kl_above: PositiveFloat | None = 0.5
    """Limit of `train/kl_penalty`, the divergence from the reference policy; measured if `kl_coefficient` is above 0."""
    mismatch_above: Annotated[float, Field(gt=1)] | None = 1.05
    """Limit of `train/token_mult_prob_error`, the factor between engine's and trainer's probability of a token. Not
    judged if rollouts may be of older weights (`asynchrony.staleness` above 0, `offline`)."""
    audit_refused_above: ProperFraction | None = 0.05
    """Share of the rewarded rollouts that `environment.audit` may refuse. The alert fires if more are refused than by
    chance with a probability of 0.1 %, in the iteration's audit or in that of the last two."""
