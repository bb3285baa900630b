"""Rollouts of an iteration: tasks, collection and its workers, overlap with training, the gate before training, and
earlier collected datasets.

Invariants: one number, `asynchrony.staleness`, bounds the age of every trained rollout in every mode. The age of a
rollout that iteration k trains on is (k - 1) - v, with v the oldest policy version that generated any of its tokens.
The kind and number of shards never change the collected data: rollout IDs, seeds and, with a deterministic engine,
every trained byte stay the same. A run with the section `offline` refits and collects nothing, and never trains
silently on data that the policy has moved away from.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from roundhouse.config.kinds import Kinds
from roundhouse.config.secrets import Parameters
from roundhouse.config.section import (
    EnvironmentName,
    Fraction,
    LauncherName,
    Operational,
    PositiveFloat,
    PositiveInt,
    Section,
    Target,
)

LARGEST_REWARD = 1e15
"""Sums of squares of as many rewards as an iteration has stay finite, also in float32."""


class CurriculumSection(Section):
    """Base of every curriculum."""

    if TYPE_CHECKING:
        kind: str


class Epochs(CurriculumSection):
    """Pass after pass over all tasks, whatever their rewards."""

    kind: Literal["epochs"] = "epochs"


class RecentRewards(CurriculumSection):
    """Common part of kinds that use recent rewards."""

    window: PositiveInt = 50
    """Number of last iterations that count, of those whose rollouts the policy was trained on. A task whose last group
    is older counts as unseen again, so this many iterations should draw as many groups as there are tasks."""


class SuccessBand(RecentRewards):
    """Prefer tasks whose recent success rate lies in a band: groups of other tasks rarely have spread."""

    kind: Literal["success_band"]
    band: tuple[float, float] = (0.2, 0.8)
    """Lowest and highest rate of a task with weight 1, both included."""
    pass_threshold: float | None = None
    """A rollout with at least this reward passes, and a task's rate is the share that passed. Unset: its rate is the mean
    reward."""
    falloff: PositiveFloat = 0.2
    """Distance from the band at which a task's weight, which falls in a line, has come down to `outside_weight`."""
    outside_weight: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Weight of tasks that are far outside. Above 0, so that each is drawn again: the policy changes."""
    unseen_weight: PositiveFloat = 1.0
    """Weight of tasks without a recent rate. Above 1, they are tried before others are repeated."""

    @model_validator(mode="after")
    def _rates(self) -> Self:
        low, high = self.band
        if low >= high:
            raise ValueError(
                f"band is [{low}, {high}], which holds no rate. Give the lower bound first, as in [0.2, 0.8]."
            )
        if self.pass_threshold is not None and not (low >= 0 and high <= 1):
            raise ValueError(
                f"band is [{low}, {high}], but with pass_threshold ({self.pass_threshold}) a rate is a share, from 0 to 1. "
                "Set band within that, or leave pass_threshold out to hold the mean reward against it."
            )
        return self


class CustomCurriculum(RecentRewards):
    """A curriculum of your own, imported by name."""

    kind: Literal["custom"]
    target: Target
    """`module:Class` or `path/to/file.py:Class` of a `Curriculum` (roundhouse.rollout.plan), made with `parameters`."""
    parameters: Parameters = Field(default_factory=dict)
    """Keyword arguments of the class."""


CurriculumConfig = Annotated[CurriculumSection, Kinds("curriculum")]
"""Tasks that an iteration draws. A curriculum's draw depends only on the store, on the iterations that trained the
oldest policy version allowed for the tasks (`roundhouse.rollout.plan`), so a resumed run makes the same draw."""


class InProcessCollection(Section):
    """All in the process of the collect stage."""

    kind: Literal["in_process"] = "in_process"

    @property
    def workers(self) -> None:
        """Return None: there are no workers."""


class Shards(Section):
    """Common part of all kinds of workers. A shard is a part of the collection by whole groups."""

    shards: PositiveInt = 2
    """Number of workers; not more than the collection has groups. They share `rollout.concurrency`. With
    `asynchrony.staleness` above 0 as many run at once, over all iterations that are collected."""
    restarts: Annotated[int, Field(ge=0)] = 2
    """Number of restarts of a lost worker within an attempt at the stage; it makes only missing rollouts."""
    timeout_seconds: PositiveFloat = 3600
    """Time limit of one worker, from its start to its last rollout. A Job's wait for a node counts."""

    @property
    def workers(self) -> Self:
        """Return the section of the workers."""
        return self

    @property
    @abstractmethod
    def launcher_name(self) -> str:
        """Return the launcher that starts the workers."""


class ProcessShards(Shards):
    """Processes in addition to the stage's own, on the launcher's machines."""

    kind: Literal["process"] = "process"
    launcher: LauncherName = "subprocess"
    """Launcher of a worker: `subprocess`, `ray` or `module:Class`."""

    @property
    def launcher_name(self) -> str:
        return self.launcher

    @field_validator("launcher")
    @classmethod
    def _no_jobs(cls, launcher: str) -> str:
        if launcher == "kubernetes":
            raise ValueError("rollout.distribution.launcher is kubernetes. Set rollout.distribution.kind to job.")
        return launcher


class JobShards(Shards):
    """Jobs of one pod each, on the cluster of `infra`; `infra.collector` describes the pod."""

    kind: Literal["job"] = "job"

    @property
    def launcher_name(self) -> str:
        return "kubernetes"


Distribution = Annotated[InProcessCollection | ProcessShards | JobShards, Field(discriminator="kind")]


class RetryPolicy(Section):
    """Bounded attempts with exponential back-off, for infrastructure failures only."""

    attempts: PositiveInt = 3
    first_delay_seconds: PositiveFloat = 0.5
    factor: Annotated[float, Field(ge=1)] = 2.0
    max_delay_seconds: PositiveFloat = 30.0
    budget_fraction: Annotated[float, Field(ge=0)] | None = None
    """Retries of one collection in all, as a share of its rollouts; a failure after that is final. Unset: every rollout has
    its attempts."""
    budget_seconds: PositiveFloat | None = None
    """No retry begins later than this after the first one of the collection. Unset: no limit."""


class DynamicSampling(Section):
    """Collect more tasks until `rollout.prompts_per_iteration` of them have spread in rewards (DAPO, arXiv 2503.14476). In
    every `asynchrony.mode`, unless `asynchrony.window` is above 1."""

    max_rounds: PositiveInt = 10
    """Rounds of `rollout.prompts_per_iteration` tasks each, the first one included."""
    on_exhausted: Literal["error", "continue"] = "error"
    """Behaviour if too few groups have spread after the last round: fail the stage, or train on those with spread.
    Without any, nothing can be trained on, and `failures.on_too_few` applies."""


class Branching(Section):
    """After the rollouts of an iteration, continue some of them anew from one of their turns, with the same policy
    version, and compare the ends (`roundhouse.rollout.recording`). Only groups with different rewards are used; with
    `dynamic_sampling`, only kept ones. The environment is rebuilt by repeated calls, so its `restoration` must not
    be none. Only with `asynchrony.staleness` 0."""

    rollouts: PositiveInt = 1
    """Rollouts of each such group that are branched, at one turn each: drawn, by the run's seed, from those of two turns or
    more."""
    samples: Annotated[int, Field(ge=2)] = 4
    """Branches of each. They form a separate group, whose rewards are compared with each other and with the source
    rollout's."""
    turn: Literal["random", "uncertain"] = "random"
    """random: drawn from the turns after the first. uncertain: the turn whose first tokens were least likely."""


class EnvironmentRollouts(Section):
    """Rollout settings of one environment of a mixture, in training and evaluation; unset keys are the run's."""

    max_turns: PositiveInt | None = None
    """Instead of `rollout.max_turns`."""
    max_tokens: PositiveInt | None = None
    """Instead of `rollout.max_tokens`."""
    max_new_tokens: PositiveInt | None = None
    """Instead of `generation.sampling.max_new_tokens`."""
    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """Instead of `rollout.system_prompt`."""
    parallel_tool_calls: bool | None = None
    """Instead of `rollout.parallel_tool_calls`."""

    @model_validator(mode="before")
    @classmethod
    def _one_distribution(cls, values: Any) -> Any:
        """The trainer computes all log-probabilities under one distribution."""
        for name in ("temperature", "top_p", "top_k"):
            if isinstance(values, dict) and name in values:
                raise ValueError(
                    f"{name} is {values[name]}, of one environment alone, but the trainer computes the ratio of every rollout "
                    f"for one distribution, generation.sampling.{name}. Leave it out, or set that for all. (For evaluation, "
                    "evaluation.temperature and evaluation.sets have it.)"
                )
        return values


class RolloutConfig(Section):
    """Collection of one iteration."""

    prompts_per_iteration: PositiveInt = 16
    """Tasks (groups) an iteration."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Rollouts of each task."""
    epochs: PositiveInt | None = None
    """Passes over the training tasks, after which the run ends if `iterations` has not ended it. Unset: tasks repeat for as
    long as there are iterations."""
    shuffle: bool = True
    """Shuffle the tasks of each epoch differently, by the run's seed. False: keep the order of the file."""
    drop_last: bool = False
    """Omit the rest of an epoch that fills no iteration. False: the next epoch fills the iteration up, also the last
    one."""
    curriculum: CurriculumConfig = Epochs()
    """Tasks that an iteration draws: pass after pass over all of them, or by their recent difficulty."""
    environments: dict[EnvironmentName, EnvironmentRollouts] = Field(default_factory=dict)
    """Limits of the environments of a mixture that differ from the run's, by the environment's name."""
    max_prompt_tokens: PositiveInt | None = None
    """Omit training tasks whose prompt, rendered with their tools, has more tokens. Unset: omit none."""
    max_turns: PositiveInt = 4
    """Model calls a rollout."""
    max_tokens: PositiveInt = 400
    """Tokens of a whole rollout, prompt included; it is truncated there."""
    cut_replies: Literal["end", "return"] = "end"
    """A reply that `generation.sampling.max_new_tokens` cut, in an environment with tools and a verifier. end: the rollout is
    truncated. return: a user message reports the cut, and the policy continues within its other limits. Not for agents,
    workers and commands, which decide it themselves."""
    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """First message of each conversation whose task row has neither `instructions` nor a system message. Not for
    agents, workers and commands, which begin their conversations themselves. Demonstrations of a warm start do not
    have it."""
    concurrency: Operational[PositiveInt | None] = 128
    """Rollouts in flight at once, in all shards together. Null: as many as there are."""
    distribution: Operational[Distribution] = InProcessCollection()
    """Over which workers the collection is spread, for training and evaluation alike."""
    timeout_seconds: Operational[PositiveFloat] = 120
    """Time limit of one rollout attempt, all turns and tools."""
    tool_timeout_seconds: Operational[PositiveFloat] = 20
    """Time limit of one tool call."""
    parallel_tool_calls: bool = False
    """Run the tool calls of one reply at the same time if their order does not matter: in an environment without
    session state, or on a remote server of this kind. Outputs keep the order of the calls either way."""
    dynamic_sampling: DynamicSampling | None = None
    """Unset: one round, whatever its rewards; groups without spread are not trained on either way."""
    branching: Branching | None = None
    """Unset: each rollout begins with its task."""
    retry: Operational[RetryPolicy] = RetryPolicy()
    max_failed_fraction: Operational[Fraction] = 0.2
    """The collect stage fails when a larger share of its rollouts failed."""
    reward_limit: Operational[Annotated[float, Field(gt=0, le=LARGEST_REWARD)]] = 1e6
    """Largest size of a reward, of its components and of a turn's reward. A rollout with a larger one fails (`bad_reward`), or
    is refused by validation if it was collected elsewhere."""

    def of_environment(self, name: str) -> RolloutConfig:
        """Return the settings for the rollouts of an environment of the mixture."""
        own = self.environments.get(name)
        known = type(self).model_fields.keys() & EnvironmentRollouts.model_fields.keys()
        changed = {key: value for key in known if (value := getattr(own, key, None)) is not None}
        return self.model_copy(update=changed)

    @property
    def counts_epochs(self) -> bool:
        """Return whether the first epoch begins with iteration 1 also in a run of an older version
        (`Run.first_draw`)."""
        return self.epochs is not None or self.drop_last or not self.shuffle

    @model_validator(mode="after")
    def _further_rounds(self) -> Self:
        if self.dynamic_sampling is not None and not self.shuffle:
            raise ValueError(
                "shuffle is false, but rollout.dynamic_sampling draws each round in another order. Set shuffle to "
                "true, or remove dynamic_sampling."
            )
        return self

    @model_validator(mode="after")
    def _no_passes(self) -> Self:
        """Refuse epochs with a curriculum, which draws some tasks more often than others."""
        if isinstance(self.curriculum, Epochs):
            return self
        for key, value, set_it in (
            ("epochs", self.epochs, self.epochs is not None),
            ("shuffle", self.shuffle, not self.shuffle),
            ("drop_last", self.drop_last, self.drop_last),
        ):
            if set_it:
                raise ValueError(
                    f"{key} is {value}, which counts passes over all tasks, but rollout.curriculum.kind is "
                    f"{self.curriculum.kind}, which draws by difficulty. Remove {key} (iterations ends the run), or "
                    "set rollout.curriculum.kind to epochs."
                )
        return self


class ValidationConfig(Section):
    """The gate between collection and training."""

    on_break: Literal["reject", "truncate", "split"] = "reject"
    """Treatment of a prompt that renders the recorded tokens differently: refuse the rollout, keep it up to the last
    contiguous turn, or start a new sequence of the same rollout. A sub-agent, a branch or a compacted history is not
    such a break."""
    min_group_size: PositiveInt = 2
    """Groups with fewer valid rollouts are omitted."""
    min_group_fraction: Fraction = 0.5
    """The same as a share of `rollout.group_size`, rounded up: the rest of a group that lost most of its rollouts is a
    biased sample (long and hard ones fail first) with a noisy baseline. Not for offline data."""
    max_quarantine_fraction: Operational[Fraction] = 0.5
    """The validate stage fails when a larger share was refused."""
    check_text: bool = True
    """Compare each rollout's recorded messages with its tokens, decoded with the policy's tokenizer. Not done if an
    agent or worker keeps the record (environment.kind agent, worker)."""
    recompute_tolerance: Operational[PositiveFloat | None] = 0.25
    """The train stage recomputes the log-probability of every trained token. A sequence that differs from the engine's
    record by more than this has weight 0 and is counted: the mean of the absolute difference over its tokens in
    nats, of at least 16. A few times `train/logprob_abs_diff_mean` of a good iteration is a sharp value. Not done
    under top-k, top-p or temperature 0, for which the engine's distribution differs from the trainer's. Null: never."""
    max_mismatched_fraction: Operational[Fraction] = 0.05
    """The train stage fails, and its weights become no version, when a larger share of the sequences differs so."""


Mode = Literal["sync", "batch-async", "fully-async", "windowed"]
Refit = Literal["in-flight", "drain"]
Ready = Literal["batch_size_reached", "loaded_batch_finished"]


class Asynchrony(Section):
    """Overlap of collecting and training."""

    mode: Mode = "sync"
    """sync: an iteration's rollouts begin when every replica has the weights that it trains. batch-async: a replica
    begins a rollout unless it would be too old, and accepts no new ones during its weight transfer. fully-async: the
    same bound, but rollouts never wait for weights; rollouts that begin during a transfer start on the new ones.
    windowed: as batch-async, and a step trains on the oldest finished groups among the oldest `window`."""
    staleness: Annotated[int, Field(ge=0)] = 0
    """The oldest age that is trained on, in policy versions. batch-async with 0 is sync; fully-async and windowed need 1
    or more."""
    window: PositiveInt = 1
    """windowed only: a step may choose among so many of the oldest groups. That costs age: `staleness` must be at least
    1 + ceil((window - 1) / groups of an iteration)."""
    ready: Ready = "batch_size_reached"
    """windowed only: when a step may begin. batch_size_reached: enough groups of the window are complete.
    loaded_batch_finished: every group of the window that has begun is, so that none is passed over for being slow."""
    refit: Refit = "in-flight"
    """in-flight: running generations are paused, resume with the new weights and record both versions. drain: a replica takes
    new weights only when its running rollouts have ended, so that a rollout has one version."""

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.mode == "sync" and self.staleness > 0:
            raise ValueError(
                f"staleness is {self.staleness}, but mode sync trains on nothing older than its own version. Set staleness to "
                "0, or mode to batch-async."
            )
        if self.mode in ("fully-async", "windowed") and self.staleness == 0:
            raise ValueError(
                f"staleness is 0, with which every rollout waits for the newest weights, but mode is {self.mode}. Set "
                "staleness to 1 or more, or mode to sync."
            )
        if self.window > 1 and self.mode != "windowed":
            raise ValueError(f"window is {self.window}, but mode is {self.mode}. Set mode to windowed, or window to 1.")
        if self.window > 1 and self.staleness < 2:
            raise ValueError(
                f"window is {self.window} and staleness {self.staleness}: a group that is passed over begins a version early "
                "and is trained another one late. Set staleness to 2 or more, or window to 1."
            )
        if self.window == 1 and self.ready != "batch_size_reached":
            raise ValueError(
                f"ready is {self.ready}, but without a window a step trains on its iteration's own groups, whichever finish "
                "first. Set window above 1, or leave ready out."
            )
        if self.mode == "fully-async" and self.refit == "drain":
            raise ValueError(
                "refit is drain, which holds new rollouts back until the running ones have ended, but mode fully-async never "
                "holds any back. Set refit to in-flight, or mode to batch-async."
            )
        return self

    def passed_over(self, groups: int) -> int:
        """Return the largest number of steps of so many groups that can pass over a group; proof in
        docs/asynchrony.md."""
        return -(-(self.window - 1) // groups)

    def start_lag(self, groups: int) -> int:
        """Return how many versions early a rollout may begin."""
        return self.staleness - self.passed_over(groups)

    def unfit_window(self, groups: int) -> str | None:
        """Why a window cannot be used with so many groups an iteration; None when it can."""
        late = self.passed_over(groups)
        if self.window == 1 or self.staleness > late:
            return None
        return (
            f"asynchrony.window is {self.window} with {groups} groups an iteration: a group can be late {late} times and must "
            f"then begin a version early, but asynchrony.staleness is {self.staleness}. Raise "
            f"it to {late + 1}, or set window to 1."
        )


NAMED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,62})(?:@(?P<version>[A-Za-z0-9._-]+))?")
"""Name of a dataset in the run's own store."""


CHAT_ROWS = ".jsonl"
"""Suffix of a file of chat rows."""


class OfflineConfig(Section):
    """Train from datasets that were collected before (`roundhouse collect`, a schedule), of this or another run."""

    datasets: Annotated[tuple[str, ...], Field(min_length=1)]
    """`nightly` is the newest version of a dataset of this store, `nightly@20261121T020000Z-v000012` one version,
    `nightly@all` every version at the run's start; a path or URI of a version's directory is one of any store, and
    a path that ends in `.jsonl` is a file of chat rows."""
    epochs: Operational[PositiveInt] = 1
    """Passes over all of it. The run's iterations follow from it; the key `iterations` does not count."""
    groups: PositiveInt | None = None
    """Groups (tasks) an iteration trains on, all from one version of a dataset. Unset: `rollout.prompts_per_iteration`."""
    max_age: Operational[Annotated[int, Field(ge=0)] | None] = 20
    """Largest number of policy versions between the collecting one and the run's first, if lineage connects them: both
    are in one line of runs and forks. null:
    unlimited."""
    max_age_days: Operational[PositiveFloat | None] = None
    """Days since the dataset was collected. Unset: any."""
    precheck_rollouts: Operational[Annotated[int, Field(ge=0)]] = 128
    """Rollouts of each version whose log-probabilities are computed under the starting policy before training; 0: none,
    and the three bounds below apply from the first iteration on only."""
    min_ess_fraction: Operational[Fraction] = 0.5
    """Kish's effective sample size of the importance weights exp(policy - recorded) of the tokens, as a share of the tokens:
    (sum w)² / (n sum w²). 1 for rollouts of the very policy. Held before training, and in every iteration."""
    min_rollout_ess_fraction: Operational[Fraction] = 0.05
    """The same for whole rollouts, whose weight is the product over their tokens. It falls faster for longer
    rollouts; lower it to 0 for very long ones."""
    max_clipped_fraction: Operational[Fraction] = 0.3
    """Share of the tokens whose importance weight is outside of `train.algorithm.mismatch_bounds`."""
    on_stale: Operational[Literal["refuse", "warn"]] = "refuse"
    """Behaviour beyond a bound. warn: it is logged and recorded, and training continues."""
    evaluate: Operational[bool] = True
    """Evaluate on held-out tasks by `evaluation`, which needs an engine. false: no engine, and nothing is promoted."""

    @field_validator("datasets")
    @classmethod
    def _named(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if "/" not in name and not name.endswith(CHAT_ROWS) and NAMED.fullmatch(name) is None:
                raise ValueError(
                    f"{name!r} is not a dataset. Give a name (nightly), a version (nightly@20261121T020000Z-v000012), all "
                    "versions (nightly@all), the path of a version's directory, or a file of chat rows (demos.jsonl)."
                )
        if len(set(names)) < len(names):
            raise ValueError(f"a dataset is named twice: {', '.join(names)}. For more passes over it, raise epochs.")
        return names
