"""Every metric of a run under its stable name: denominator, meaning, healthy values.

Invariant: every logged name is found here (`meaning_of`), and docs/metrics.md is this page printed:

    python -m roundhouse.stages.metric_catalogue > docs/metrics.md
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace

from roundhouse.training.metrics import METRICS, Denominator


@dataclass(frozen=True, slots=True)
class Entry:
    """One row. `*` in a name stands for the name of an environment, stage or outcome."""

    name: str
    over: str
    """Denominator of the mean; in brackets the kind of a value that is not a mean."""
    meaning: str
    healthy: str = ""

    def covers(self, metric: str) -> bool:
        pattern = ".+".join(re.escape(part) for part in self.name.split("*"))
        return re.fullmatch(pattern, metric) is not None


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """Rows that belong together."""

    title: str
    text: str
    entries: tuple[Entry, ...]


INTRODUCTION = """\
Metrics that a run logs to MLflow with each iteration, under stable names. The manifests of the stages hold the same numbers
(`iterations/<k>/<stage>/manifest.json`, key `metrics`). `*` stands for a name. Brackets in the second column mark
values that are not means. MLflow's own `system/*` (CPU, memory, disk, network) come every ten seconds,
`tracking.system_metrics`. In MLflow a character that it refuses in a name is `_` (`pass@1` is `pass_1`); a changed name
that is then like another ends with a digest."""

CLOSING = """\
The healthy ranges are rules of thumb: those of the mismatch are what NeMo RL's documentation and nightly tests use (float32
figures: measured here), those of ratio and clip fraction hold for the default bounds."""

_OVER = {each: each.value.replace("_", " ") for each in Denominator} | {
    Denominator.SUM: "(count)",
    Denominator.MAX: "(maximum)",
    Denominator.MIN: "(minimum)",
    Denominator.LAST: "(state)",
}


RESUMPTIONS = (
    Entry("rollout/resumed", "(count)", "interrupted rollouts that resumed after their finished model calls"),
    Entry("rollout/turns_resumed", "(count)", "model calls that were therefore not made again"),
    Entry(
        "rollout/restarted",
        "(count)",
        "times one began again all the same; reasons: `resumptions` in the details of the collect manifest",
    ),
    Entry(
        "rollout/repeated_tokens", "(count)", "generated tokens of calls that were on record and had to be made again"
    ),
    Entry(
        "rollout/shards", "(count)", "workers that the collection was spread over (`rollout.distribution`), all rounds"
    ),
    Entry("rollout/shards_lost", "(count)", "lost workers; another one continued their work"),
    Entry("rollout/shard_cpu_seconds", "(seconds)", "CPU time of all these workers, their start included"),
    Entry("rollout/kubernetes_calls", "(count)", "calls of the API server for a collection by Jobs, repeated ones too"),
)

ROLLOUTS = (
    Entry("rollout/turns_mean", "rollouts with a model call", "model calls of a rollout"),
    Entry("rollout/generated_tokens", "(sum)", "tokens generated"),
    Entry("rollout/generated_tokens_mean", "rollouts with a model call", "tokens that a rollout generated"),
    Entry("rollout/generated_tokens_max", "(maximum)", "the most", "below the limits: else rollouts are cut off"),
    Entry("rollout/total_tokens_mean", "rollouts with a model call", "length of the last prompt and its generation"),
    Entry("rollout/total_tokens_max", "(maximum)", "the longest", "< generation.max_model_len"),
    Entry("rollout/tokens_per_second", "(rate)", "tokens generated a second of the window"),
    Entry("rollout/seconds_mean", "rollouts with a model call", "wall time of a rollout's last attempt"),
    Entry("rollout/seconds_max", "(maximum)", "the slowest", "< 3 × the mean: it sets the pace"),
    Entry("rollout/generation_seconds_mean", "rollouts with a model call", "of it, waiting for the engine"),
    Entry("rollout/environment_seconds_mean", "rollouts with a model call", "of it, waiting for the environment"),
    Entry("rollout/*_rate", "requested rollouts", "share with this outcome", "failed < 0.01, truncated < 0.1"),
    Entry(
        "rollout/metrics_left_out",
        "(count)",
        "metrics of verdicts that were left out: no finite number, no printable name of up to 200 characters, or beyond 1,000",
        "none",
    ),
    Entry(
        "uneven_failures/*",
        "(probability)",
        "that chance alone makes the failures depend as much on the task, the successful calls, the turns, the tokens",
        "> 0.001: alert `uneven_failures`",
    ),
    Entry("failures/code/*", "(count)", "failed with this code: docs/failures.md", "none"),
    Entry("failures/*", "(count)", "failed for infrastructure (`infra`, after all attempts) or by their data", "none"),
)

REWARD = (
    Entry("reward/mean", "counted rollouts", "reward; failed and masked rollouts do not count", "rises"),
    Entry("reward/std", "counted rollouts", "sample standard deviation", "> 0: else nothing is learnt"),
    Entry("reward/min", "(minimum)", "smallest reward"),
    Entry("reward/max", "(maximum)", "largest reward"),
    Entry(
        "reward/above_lowest",
        "(count)",
        "rollouts with a reward above the lowest, or above 0 if it is positive",
        "more than rollouts that failed",
    ),
    Entry("reward/*", "counted rollouts that have it", "a component of the reward, by its name"),
    Entry("environment/*", "counted rollouts that report it", "metrics of the environment or the agent loop"),
)

AUDIT = (
    Entry("audit/rollouts", "(count)", "rewarded rollouts that `environment.audit` looked at"),
    Entry("audit/refused", "(count)", "of them, not confirmed: alert `reward_hacking`", "near 0"),
)

MIXTURE = (Entry("mixture/*/*", "(as above)", "the same of one environment of a mixture, by its name"),)

CATALOGUE = (
    MetricGroup(
        "Reward and rollouts",
        "Of the training rollouts of an iteration, before validation.",
        (*REWARD, *ROLLOUTS, *AUDIT, *MIXTURE, *RESUMPTIONS),
    ),
    MetricGroup(
        "Dynamic sampling",
        "Only with `rollout.dynamic_sampling`.",
        (
            Entry("dynamic_sampling/num_gen_batches", "(count)", "rounds of collection", "1 … 3"),
            Entry("dynamic_sampling/num_discarded_groups", "(count)", "groups without spread, which teach nothing"),
            Entry("dynamic_sampling/num_discarded_valid_samples", "(count)", "rollouts of groups beyond those wanted"),
            Entry("dynamic_sampling/filtered_reward", "rollouts of kept groups", "reward of the trained rollouts"),
        ),
    ),
    MetricGroup(
        "Branches",
        "Only with `rollout.branching`, in an iteration that branched a turn. These metrics count branches alone. All other "
        "metrics, `reward/*` included, count rollouts that begin with their task, except `rollout/tokens_per_second`.",
        (
            Entry("branching/groups", "(count)", "turns that were branched"),
            Entry(
                "branching/groups_with_spread",
                "(count)",
                "groups with different rewards: only these are trained on",
                "most",
            ),
            Entry("branching/rollouts", "(count)", "branches"),
            Entry("branching/failed", "(count)", "branches that failed, for whatever reason", "0"),
            Entry(
                "branching/not_rebuilt",
                "(count)",
                "branches in which the environment answered differently than recorded",
                "0",
            ),
            Entry("branching/generated_tokens", "(sum)", "tokens generated for branches: of their new turns"),
            Entry("branching/turn_mean", "branched turns", "number of the turn, the first of a rollout is 0"),
            Entry("branching/reward", "rewarded branches", "their reward"),
            Entry("branching/reward_before", "rollouts that were branched", "the reward that they had ended with"),
        ),
    ),
    MetricGroup(
        "Curriculum",
        "Only with `rollout.curriculum`, from records at the time when the tasks were drawn. With a window "
        "(`asynchrony.window`): tasks that the iteration drew itself.",
        (
            Entry("curriculum/unseen", "drawn tasks", "had no recent group"),
            Entry("curriculum/below_band", "drawn tasks", "had a recent success rate below the band"),
            Entry("curriculum/in_band", "drawn tasks", "had one in the band", "rises, then stays"),
            Entry("curriculum/above_band", "drawn tasks", "had one above the band"),
            Entry("curriculum/*", "(its own)", "metrics of a custom curriculum"),
        ),
    ),
    MetricGroup(
        "Ledger and validation",
        "`requested = completed + truncated + failed + masked + omitted`, in every iteration.",
        (
            Entry("ledger/*", "(count)", "rollouts with this outcome after validation", "failed and masked near 0"),
            Entry("validate/sequences", "(count)", "sequences that passed"),
            Entry("validate/quarantined", "(count)", "rollouts refused, with a reason", "0"),
            Entry("validate/filtered", "(count)", "rollouts omitted although nothing is wrong with them"),
            Entry(
                "validate/token_breaks",
                "(count)",
                "model calls with a prompt that renders the tokens so far differently",
                "0",
            ),
            Entry("validate/token_breaks/*", "(count)", "of them by likely cause (`docs/concepts.md`)", "0"),
            Entry("validate/forks", "(count)", "model calls of a sub-agent, a branch or a compacted history"),
            Entry("validate/forks/*", "(count)", "of them by kind (`docs/agents.md`)"),
            Entry("validate/text_proved", "(count)", "rollouts with text verified against their tokens"),
            Entry(
                "validate/spelled_control_tokens",
                "(count)",
                "control tokens that messages spell (`<|im_end|>` in a page); they are text, and details name the rollouts",
                "0",
            ),
            Entry("validate/unknown_tokens", "(count)", "generated tokens that the tokenizer lacks", "0"),
            Entry("validate/tokens", "(count)", "tokens in the sequences"),
            Entry("validate/trained_tokens", "(count)", "generated tokens among them that can be trained on"),
        ),
    ),
    MetricGroup(
        "Training",
        "Mismatch metrics compare the trainer before its first update with the engine, over the trained tokens; over all "
        "generated ones when no group had spread. Tokens are the trained ones, once an epoch.",
        (
            Entry("train/skipped", "(state)", "1 if the iteration was skipped ([failures](failures.md))", "absent"),
            Entry("train/checkpoint_bytes", "(bytes)", "of the new version, and of its trainer's state if stored"),
            Entry(
                "train/save_seconds", "(seconds)", "to write them to the store; not of `train.service.kind: process`"
            ),
            Entry(
                "train/state_wait_seconds",
                "(seconds)",
                "before the step, until the trainer's state of the version before was complete "
                "(`checkpoint.optimizer_beside_mib`)",
                "0",
            ),
            Entry(
                "train/retrained_iterations",
                "(count)",
                "trained again for the optimizer's state that their versions lack (`checkpoint.optimizer_every`)",
                "0, but after a restart",
            ),
            Entry(
                "train/kubernetes_calls", "(count)", "calls of the API server for a step as a Job, repeated ones too"
            ),
            Entry("train/kubernetes_seconds", "(seconds)", "of a step as a Job beyond its own: pods, images, imports"),
            Entry(
                "train/fetched_bytes",
                "(bytes)",
                "checkpoints that were not in `infra.trainer.cache_claim` when the step asked for them",
                "0 after a node's first step",
            ),
            *(
                Entry(f"train/{name}", _OVER[metric.denominator], metric.meaning, metric.healthy)
                for name, metric in METRICS.items()
            ),
        ),
    ),
    MetricGroup(
        "Staleness",
        "Only of overlapped runs ([asynchrony](asynchrony.md)), `asynchrony.staleness` above 0. `<a>` is an age: the number "
        "of versions between the weights that sampled a token and the weights that train on it.",
        (
            Entry("staleness/age_mean", "tokens", "age of the trained tokens", "as small as the trainer's wait allows"),
            Entry("staleness/age_max", "(maximum)", "their oldest age", "≤ asynchrony.staleness"),
            Entry("staleness/sequences_mixed", "sequences", "share with tokens of several versions"),
            Entry("staleness/share/age_*", "(share)", "of the trained tokens that are of this age"),
            Entry("staleness/logprob_abs_diff/age_*", "tokens", "abs(gen − old) of this age", "grows slowly with age"),
            Entry("staleness/importance_ratio/age_*", "tokens", "exp(old − gen) of this age", "near 1"),
            Entry(
                "staleness/ess/age_*",
                "(share)",
                "of the tokens that still count, by their ratios",
                "> 0.5",
            ),
            Entry(
                "time/rollout_wait",
                "(seconds)",
                "training stood still until its rollouts were there",
                "near 0",
            ),
        ),
    ),
    MetricGroup(
        "Offline data",
        "Only of runs that train from collected datasets ([offline training](offline-training.md)). At the iteration that such "
        "a run starts from: of a sample of the stalest dataset, before training; then: of the tokens that were trained on. "
        "The importance weight of a token is exp(policy - recorded log-probability).",
        (
            Entry(
                "offline/age_versions",
                "(maximum)",
                "policy versions since the data was collected, if known",
                "small",
            ),
            Entry("offline/age_days", "(maximum)", "days since then"),
            Entry(
                "offline/effective_tokens",
                "tokens",
                "Kish's effective sample of the tokens' importance weights",
                "> 0.5; falls while the policy moves away from the data",
            ),
            Entry("offline/effective_rollouts", "rollouts", "the same of whole rollouts", "> 0.05"),
            Entry("offline/clipped", "tokens", "weights outside of `train.algorithm.mismatch_bounds`", "< 0.3"),
            Entry("offline/logprob_difference", "tokens", "absolute difference of policy and recorded log-probability"),
        ),
    ),
    MetricGroup(
        "Evaluation",
        "Of held-out tasks, at the iterations of `evaluation.every`. Intervals are over tasks, of 95 %.",
        (
            Entry("evaluation/reward/mean", "tasks", "mean of the tasks' mean rewards", "rises"),
            Entry("evaluation/reward/stderr", "tasks", "its standard error"),
            Entry("evaluation/reward/low", "tasks", "lower end of its bootstrap interval"),
            Entry("evaluation/reward/high", "tasks", "upper end"),
            Entry("evaluation/tasks", "(count)", "tasks with a reward"),
            Entry(
                "evaluation/tasks_in_training",
                "(count)",
                "evaluated tasks that are training tasks, too, by id, prompt or content; not with `offline`",
                "0",
            ),
            Entry(
                "evaluation/pass_at_*",
                "tasks",
                "chance that one of k rollouts reaches evaluation.success_threshold (arXiv 2107.03374)",
            ),
            *(replace(row, name=f"evaluation/{row.name}") for row in (*REWARD[1:], *ROLLOUTS)),
            Entry(
                "evaluation/*/*",
                "(as above)",
                "the same of one of `evaluation.sets`, or of one environment of a mixture, by its name",
            ),
            Entry("promotion/promoted", "(state)", "1 when this version became the promoted one"),
            Entry("promotion/difference", "tasks", "reward less the promoted version's, task by task", "> 0"),
            Entry("promotion/difference_low", "tasks", "lower end of its interval; promoted when above 0"),
            Entry("promotion/difference_high", "tasks", "upper end"),
        ),
    ),
    MetricGroup(
        "Cost and waste",
        "`cost.prices` and `cost.trainer_gpus` set the prices. Wasted tokens were generated and not trained on, each for "
        "one reason.",
        (
            Entry("cost/gpu_seconds", "(seconds)", "GPUs held by engine and trainer, used or not"),
            Entry("cost/cpu_seconds", "(seconds)", "CPU of the processes that ran the stages"),
            Entry("cost/bytes_written", "(sum)", "committed to the store"),
            Entry("cost/generated_tokens", "(sum)", "tokens generated for training"),
            Entry("cost/judge_prompt_tokens", "(sum)", "read by rubrics' judges, in collection and evaluation"),
            Entry("cost/judge_completion_tokens", "(sum)", "written by them"),
            Entry("cost/repeated_rollouts", "(count)", "rollouts that needed more than one attempt", "near 0"),
            Entry("cost/stage_attempts", "(count)", "attempts of all stages", "one a stage"),
            Entry("cost/total", "(sum)", "by the price table, if set; without judges that lack a price"),
            Entry("waste/failed_tokens", "(sum)", "of rollouts without a reward", "near 0"),
            Entry("waste/quarantined_tokens", "(sum)", "of rollouts that validation refused", "0"),
            Entry("waste/omitted_tokens", "(sum)", "of groups too small or more than wanted"),
            Entry(
                "waste/untrained_tokens",
                "(sum)",
                "of sequences that the algorithm gave no weight: groups without spread",
            ),
            Entry(
                "waste/token_fraction",
                "generated tokens",
                "all of these",
                "< 0.5; above, tasks are too easy or too hard",
            ),
        ),
    ),
    MetricGroup(
        "Health",
        "Of the run's process, once a minute; not in a manifest. MLflow shows them among its system metrics.",
        (
            Entry("system/activity/*_in_flight", "(state)", "pieces of this work that are under way"),
            Entry(
                "system/activity/*_oldest_seconds",
                "(state)",
                "how long the oldest of them has been",
                "< its time limit",
            ),
            Entry("system/health/recent_errors", "(count)", "errors of the last five minutes", "0"),
        ),
    ),
    MetricGroup(
        "Time",
        "",
        (
            Entry(
                "time/iteration", "(seconds)", "wall time from report to report, without the time between two processes"
            ),
            Entry("time/rollouts", "(seconds)", "the window in which rollouts run"),
            Entry("time/compute", "(seconds)", "the trainer's computation"),
            Entry("time/store", "(seconds)", "in which the flow's process waited for the store, report to report"),
            Entry("time/*", "(seconds)", "wall time of the stage"),
            Entry(
                "cpu_time/*",
                "(seconds)",
                "CPU of the process that ran the stage; if stages run at the same time, of its threads",
            ),
            Entry("refit/replica_seconds_max", "(maximum)", "the slowest replica's loading of the weights"),
            Entry("refit/kubernetes_calls", "(count)", "calls of the API server for a RayService's refit"),
            Entry(
                "refit/engine_replacements",
                "(count)",
                "Ray clusters that were deleted and created again because the RayService's template had changed",
                "0, and 1 after a change of image, variables or sizes; more means that something keeps changing the template",
            ),
            Entry("overhead/orchestration", "(seconds)", "the iteration outside its stages: Prefect, artifacts"),
            Entry(
                "kubernetes/calls",
                "(count)",
                "calls of the API server for all stages of the iteration, repeated ones too",
                "about 10 a step; it does not grow with time",
            ),
            Entry("overhead/total", "(seconds)", "what Roundhouse adds: all but rollouts, computation and evaluation"),
            Entry("overhead/*", "(seconds)", "the stage outside rollouts and computation"),
            Entry("iteration", "(state)", "the iteration; its history lists the iterations that MLflow has"),
        ),
    ),
)


def meaning_of(metric: str) -> Entry | None:
    """Return the row of a logged metric, the most specific of several. None: it is not listed."""
    rows = [entry for section in CATALOGUE for entry in section.entries if entry.covers(metric)]
    return max(rows, key=lambda entry: len(entry.name), default=None)


def page() -> str:
    """docs/metrics.md."""
    lines = ["# Metrics", "", INTRODUCTION, ""]
    for section in CATALOGUE:
        lines += [f"## {section.title}", ""]
        lines += [section.text, ""] if section.text else []
        lines += ["| Metric | Mean over | Meaning | Healthy |", "|---|---|---|---|"]
        lines += [f"| `{row.name}` | {row.over} | {row.meaning} | {row.healthy} |" for row in section.entries]
        lines.append("")
    return "\n".join([*lines, CLOSING]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
