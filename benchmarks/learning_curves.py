"""Learning curves: a configuration's task, trained with several algorithms and seeds by the library alone, in one process.

    python benchmarks/learning_curves.py [--algorithms grpo rloo gspo] [--seeds 0 1 2] [--iterations 25] [--config FILE]
                                         [--set KEY=VALUE …] [--label NAME] [--output docs/images/learning-curves] [--work DIR]

No server, no workflow engine, no vLLM: transformers generates in this process, the environment judges, `validate` proves the
tokens, the trainer takes its step. All runs start from the same warm start and differ in algorithm and in the seed of tasks
and sampling. Each leaves its last weights in `--work`, in a directory of its label and seed, which a later run may name as a
teacher. Where a rubric gives the reward, scores are the environment's own part of it. `--output` gets .json (written after
every run, and read to skip those already there) and .png. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from roundhouse.config.algorithms import DistillationConfig
from roundhouse.config.loading import load_config
from roundhouse.config.models import RunConfig, Sampling
from roundhouse.config.training import WarmStartPolicy
from roundhouse.environments import load
from roundhouse.environments.base import TaskRow
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.client import request_body
from roundhouse.generation.protocol import Completion, read_request
from roundhouse.generation.transformers_engine import TransformersEngine
from roundhouse.policy.warm_start import make_starting_policy
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import RolloutSpec, plan_rollouts, sample_tasks
from roundhouse.rollout.recording import plan_branches
from roundhouse.rollout.rubric import OWN
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.trainer import Trainer
from roundhouse.trajectories.records import Rollout, groups_with_spread
from roundhouse.trajectories.validation import validate
from tests.gym.collecting import collect

MODEL, HELDOUT_SEED = "policy", 7


class PolicyInProcess:
    """A `PolicyClient` on an engine of this process."""

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self.codec = ChatCodec(str(directory), config.generation.max_model_len)
        self.engine = TransformersEngine(config.generation, str(directory), self.codec)
        self.version = 0

    async def take(self, directory: Path, version: int) -> None:
        await self.engine.load_weights(str(directory))
        self.version = version

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int
    ) -> Completion:
        begun = time.perf_counter()
        request = read_request(request_body(messages, tools, sampling, seed, MODEL), MODEL)
        prompt = self.codec.prompt(request)
        generated = await self.engine.generate(prompt.token_ids, prompt.draw)
        message, finish_reason = self.codec.message(generated, request.tools)
        return Completion(
            message=message,
            finish_reason=finish_reason,
            prompt_token_ids=prompt.token_ids,
            generation_token_ids=generated.token_ids,
            generation_log_probs=generated.log_probs,
            policy_version=self.version,
            latency_seconds=time.perf_counter() - begun,
        )


def two_calls(row: TaskRow, items: Sequence[dict[str, Any]]) -> bool:
    """A criterion for a rubric: the rollout called a tool twice, as the quickstart's task needs it."""
    return sum(item.get("type") == "function_call" for item in items) == 2


async def train(config: RunConfig, start: Path, iterations: int, kept: Path) -> dict[str, Any]:
    """One run, its last weights in `kept`: reward by iteration, and of the held-out tasks before and after."""
    cpu, curve, generated = time.process_time(), [], 0
    reference = _reference(config, start)
    trainer = Trainer.load(start, config.train, seed=config.seed, reference_dir=reference)
    policy = PolicyInProcess(config, start)
    await policy.engine.start()
    await policy.take(start, 0)
    before, sampled_before = await _heldout(config, policy, True), await _heldout(config, policy, False)
    for iteration in range(1, iterations + 1):
        rows = sample_tasks(
            open_environment(config.environment).tasks("train"),
            config.seed,
            iteration,
            config.rollout.prompts_per_iteration,
        )
        rollouts = await roll_out(config, policy, rows, config.rollout.group_size, iteration)
        branches = await branch(config, policy, rollouts, iteration)
        validated = validate(
            [*rollouts, *branches],
            config.validation,
            vocabulary_size=policy.codec.vocabulary,
            policy_version=policy.version,
        )
        trainer.step(TrainingSequences.from_table(validated.sequences), iteration)
        with tempfile.TemporaryDirectory() as directory:
            trainer.save(Path(directory))
            await policy.take(Path(directory), iteration)
        curve.append(statistics.fmean(own_rewards(config, rollouts)))
        seconds = time.process_time() - cpu
        print(f"{kept.name}: iteration {iteration}, reward {curve[-1]:.3f}, {seconds:.0f} CPU s", file=sys.stderr)
        generated += sum(rollout.generated_tokens for rollout in (*rollouts, *branches))
    trainer.save(kept)
    after, sampled_after = await _heldout(config, policy, True), await _heldout(config, policy, False)
    policy.engine.shutdown()
    return {
        "reward": [round(value, 4) for value in curve],
        "heldout_before": score(config, before)[0],
        "heldout_after": score(config, after)[0],
        "sampled_before": score(config, sampled_before),
        "sampled_after": score(config, sampled_after),
        "turns_after": turns(sampled_after),
        "generated_tokens": generated,
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def _reference(config: RunConfig, start: Path) -> Path | None:
    """The second policy that the algorithm reads: the starting one, a teacher, or none."""
    algorithm = config.train.algorithm
    if isinstance(algorithm, DistillationConfig):
        return Path(algorithm.teacher)
    return start if algorithm.reference_source == "start" else None


async def roll_out(
    config: RunConfig,
    policy: PolicyInProcess,
    rows: Sequence[Any],
    group_size: int,
    iteration: int,
    greedy: bool = False,
) -> list[Rollout]:
    specs = plan_rollouts(rows, group_size, HELDOUT_SEED if greedy else config.seed, iteration)
    return await _made(config, policy, specs, greedy)


async def branch(config: RunConfig, policy: PolicyInProcess, rollouts: list[Rollout], iteration: int) -> list[Rollout]:
    """The branches of an iteration's rollouts; none without `rollout.branching`."""
    if config.rollout.branching is None:
        return []
    groups = groups_with_spread(rollouts)
    specs = plan_branches(rollouts, groups, config.rollout.branching, config.seed, iteration)
    return await _made(config, policy, specs)


async def _made(
    config: RunConfig, policy: PolicyInProcess, specs: Sequence[RolloutSpec], greedy: bool = False
) -> list[Rollout]:
    sampling = config.generation.sampling
    if greedy:
        sampling = sampling.model_copy(update={"temperature": 0.0})
    async with open_environment(config.environment) as environment:
        return await collect(specs, policy, environment, config.rollout, sampling, on_policy=not greedy)


async def _heldout(config: RunConfig, policy: PolicyInProcess, greedy: bool) -> list[Rollout]:
    """One rollout of each held-out task."""
    rows = list(open_environment(config.environment).tasks("heldout"))[: config.evaluation.tasks]
    return await roll_out(config, policy, rows, 1, 0, greedy)


def own_rewards(config: RunConfig, rollouts: Sequence[Rollout]) -> list[float]:
    """The environment's own rewards of those that have one; a rubric keeps its share of the whole."""
    if (rubric := getattr(config.environment, "rubric", None)) is None:
        return [each.reward for each in rollouts if each.reward is not None]
    whole = rubric.own_weight + sum(each.weight for each in rubric.criteria.values())
    return [
        each.reward_components[OWN] * whole / rubric.own_weight for each in rollouts if OWN in each.reward_components
    ]


def score(config: RunConfig, rollouts: Sequence[Rollout]) -> tuple[float, float, int]:
    """Mean of the environment's own reward, its standard error, and of how many rollouts."""
    rewards = own_rewards(config, rollouts)
    error = statistics.stdev(rewards) / len(rewards) ** 0.5
    return round(statistics.fmean(rewards), 4), round(error, 4), len(rewards)


def turns(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean turns of all rollouts, the share with the whole reward of 1, and the mean turns of those."""
    whole = [len(each.turns) for each in rollouts if each.reward is not None and each.reward > 1 - 1e-9]
    return {
        "turns": round(statistics.fmean(len(each.turns) for each in rollouts), 2),
        "whole": round(len(whole) / len(rollouts), 4),
        "turns_of_whole": round(statistics.fmean(whole), 2) if whole else 0.0,
    }


def plot(runs: Sequence[dict[str, Any]], file: Path, what: str) -> None:
    """Each algorithm's mean over seeds, with the range between its worst and best seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), dpi=110)
    axes.set_prop_cycle(color=mpl.color_sequences["tab20"])
    for kind in dict.fromkeys(run["algorithm"] for run in runs):
        curves = [run["reward"] for run in runs if run["algorithm"] == kind]
        columns = list(zip(*curves, strict=True))
        steps = range(1, len(columns) + 1)
        (line,) = axes.plot(steps, [statistics.fmean(c) for c in columns], label=f"{kind} ({len(curves)} seeds)")
        axes.fill_between(
            steps, [min(c) for c in columns], [max(c) for c in columns], color=line.get_color(), alpha=0.15
        )
    axes.set(xlabel="iteration", ylabel="mean reward of the training rollouts", ylim=(0, 1))
    axes.set_title(f"{what}: mean over seeds, and the range between the worst and the best")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--algorithms", nargs="+", default=["grpo", "rloo", "gspo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--set", nargs="*", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--label", help="the runs' name in place of the algorithm's")
    parser.add_argument("--output", type=Path, default=Path("docs/images/learning-curves"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "roundhouse-learning-curves")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)

    def configured(kind: str, *more: str) -> RunConfig:
        return load_config(arguments.config, [f"train.algorithm.kind={kind}", *arguments.overrides, *more])

    base = configured(arguments.algorithms[0])
    start = arguments.work / "start"
    if not start.is_dir():
        arguments.work.mkdir(parents=True, exist_ok=True)
        assert isinstance(base.policy, WarmStartPolicy), "the curves begin with a warm start"
        make_starting_policy(base.policy, load(base.environment), 0, start)
    results = arguments.output.with_suffix(".json")
    runs: list[dict[str, Any]] = json.loads(results.read_text())["runs"] if results.is_file() else []
    for kind in arguments.algorithms:
        for seed in arguments.seeds:
            label = arguments.label or kind
            if any(run["algorithm"] == label and run["seed"] == seed for run in runs):
                continue
            config = configured(kind, f"seed={seed}", "train.threads=1")
            made = asyncio.run(train(config, start, arguments.iterations, arguments.work / f"{label}-{seed}"))
            runs.append({"algorithm": label, "seed": seed} | made)
            results.write_text(
                json.dumps({"machine": platform.processor() or platform.machine(), "runs": runs}, indent=1)
            )
            plot(runs, arguments.output.with_suffix(".png"), base.run_id)
    last = [{"algorithm": r["algorithm"], "seed": r["seed"], "last": statistics.fmean(r["reward"][-3:])} for r in runs]
    print(json.dumps({"bench": "learning_curves", "results": last}))


if __name__ == "__main__":
    main()
