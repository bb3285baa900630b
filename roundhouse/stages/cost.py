"""Cost of an iteration and a run, and a run's budget.

Invariants: costs come from the stages' records; a GPU costs while it is held, used or not. A judge without a price is
named with its tokens and never counts as free. The run's engine is not priced by token, because its GPUs are paid by
the hour. `trajectories.records` lists the causes of wasted tokens.

Budget:

    <store>/runs/<run>/budget/0001.json     the first raise: limits with new values, author, comment

A raise is written once and never changed. The budget is the configuration's with all raises: the largest value of each
limit counts, so it is the same after any restart, on any machine, in any order of raises.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, ValidationError

from roundhouse.config.environments import environments_in
from roundhouse.config.models import RunConfig
from roundhouse.config.operations import JudgePrice
from roundhouse.errors import BudgetReached, ConfigError, StoreError
from roundhouse.rollout.rubric import COMPLETION_TOKENS, PREFIXES, PROMPT_TOKENS
from roundhouse.store.lease import all_drivers
from roundhouse.store.lineage import read_identity
from roundhouse.store.location import AlreadyExists, Location, NotFound
from roundhouse.store.run import SKIPPED, Run
from roundhouse.store.stage import Manifest, Reference, Stage, StageKind, current_names, read_manifest, read_table
from roundhouse.trajectories.records import LedgerError

HOUR = 3600.0
BUDGETED = ("wall_hours", "gpu_hours", "cpu_hours", "generated_tokens", "money")
"""Names of `Budget`."""
_TOTAL_OF = {
    "time/iteration": ("wall_hours", HOUR),
    "cost/gpu_seconds": ("gpu_hours", HOUR),
    "cost/cpu_seconds": ("cpu_hours", HOUR),
    "cost/generated_tokens": ("generated_tokens", 1.0),
    "cost/total": ("money", 1.0),
}
"""Total that a metric adds to, and its unit in the metric's."""


OWN_ENGINE, UNKNOWN_JUDGE = "the run's own engine", "an unknown judge"
MILLION = 1e6


@dataclass(frozen=True, slots=True)
class JudgeTokens:
    """Tokens that one model read and wrote as the judge of rubrics and audits."""

    prompt: float = 0.0
    completion: float = 0.0


def judge_tokens(rollouts: pa.Table, environment: Mapping[str, Any]) -> dict[str, JudgeTokens]:
    """Sum the tokens of these rollouts' judges by model; cached answers are not counted again.

    Args:
        rollouts: the `rollouts` dataset, or its columns `group_id` and `metrics`.
        environment: section that judged them, as JSON. Its rubric and audit name the models; in a mixture, those of the
            rollout's part.
    """
    parts = environment.get("environments")
    tokens_by_model: dict[str, JudgeTokens] = {}
    for row in rollouts.select(["group_id", "metrics"]).to_pylist():
        metrics = dict(row["metrics"] or ())
        own = environment if parts is None else parts.get(row["group_id"].partition("/")[0], {})
        for section, prefix in PREFIXES.items():
            prompt, completion = (metrics.get(f"{prefix}_{name}", 0.0) for name in (PROMPT_TOKENS, COMPLETION_TOKENS))
            if prompt or completion:
                judge = (own.get(section) or {}).get("judge")
                if judge is None:
                    model = UNKNOWN_JUDGE
                elif judge.get("model") is None:
                    model = OWN_ENGINE
                else:
                    model = str(judge["model"])
                add_judges(tokens_by_model, {model: JudgeTokens(prompt, completion)})
    return tokens_by_model


def add_judges(totals: dict[str, JudgeTokens], more: Mapping[str, JudgeTokens]) -> None:
    """Add the tokens of each model."""
    for model, used in more.items():
        before = totals.get(model, JudgeTokens())
        totals[model] = JudgeTokens(before.prompt + used.prompt, before.completion + used.completion)


def judge_money(used: Mapping[str, JudgeTokens], prices: Mapping[str, JudgePrice]) -> float:
    """Return the cost of the judges that have a price."""
    return sum(
        (used[model].prompt * price.prompt + used[model].completion * price.completion) / MILLION
        for model, price in prices.items()
        if model in used
    )


def unpriced_judges(used: Mapping[str, JudgeTokens], prices: Mapping[str, JudgePrice]) -> dict[str, float]:
    """Tokens, prompt and completion together, by the models without a price."""
    return {
        model: each.prompt + each.completion
        for model, each in used.items()
        if model not in prices and model != OWN_ENGINE
    }


def iteration_cost(
    config: RunConfig,
    manifests: Mapping[str, Manifest],
    seconds: float,
    judges: Mapping[str, JudgeTokens] | None = None,
) -> dict[str, float]:
    """The cost metrics of an iteration, for its report; those of validate and train are in their own manifests.

    Args:
        manifests: of its complete stages.
        seconds: wall time of the whole iteration.
        judges: tokens of the rubrics' judges in it, by model.
    """
    stages = [manifest for kind, manifest in manifests.items() if kind != StageKind.REPORT]
    engine = config.generation.replicas * config.generation.gpus_per_replica
    train = manifests.get(StageKind.TRAIN)
    in_stage = 0.0 if train is None else train.finished_at - train.started_at
    trainer_seconds = in_stage if config.train.service.runs_whole_steps else seconds
    gpu_seconds = engine * seconds + config.cost.trainer_gpus * trainer_seconds
    cpu_seconds = sum(manifest.resources.get("cpu_seconds", 0.0) for manifest in stages)
    prices = config.cost.prices
    metrics = {
        "cost/gpu_seconds": gpu_seconds,
        "cost/cpu_seconds": cpu_seconds,
        "cost/bytes_written": float(sum(entry.size for manifest in stages for entry in manifest.files)),
        "cost/stage_attempts": float(sum(manifest.attempt for manifest in stages)),
    }
    used = judges or {}
    if used:
        metrics["cost/judge_prompt_tokens"] = math.fsum(each.prompt for each in used.values())
        metrics["cost/judge_completion_tokens"] = math.fsum(each.completion for each in used.values())
    if prices.gpu_hour or prices.cpu_hour or prices.judges:
        resources = (gpu_seconds * prices.gpu_hour + cpu_seconds * prices.cpu_hour) / HOUR
        metrics["cost/total"] = resources + judge_money(used, prices.judges)
    values = {name: value for manifest in stages for name, value in manifest.metrics.items()}
    if generated := values.get("cost/generated_tokens"):
        wasted = sum(value for name, value in values.items() if is_waste(name))
        metrics["waste/token_fraction"] = wasted / generated
    return metrics


def iteration_judges(run: Run, iteration: int, kinds: Iterable[str]) -> dict[str, JudgeTokens]:
    """Tokens of the rubrics' judges in these stages of an iteration, by model."""
    tokens_by_model: dict[str, JudgeTokens] = {}
    sets = run.config.evaluation.sets
    for kind in kinds:
        if kind != StageKind.COLLECT and not kind.startswith(StageKind.EVALUATE):
            continue  # it does not sample
        name = kind.removeprefix(StageKind.EVALUATE).lstrip("-")
        environment = (sets[name].environment if name in sets else None) or run.config.environment
        judged = any((each.rubric or each.audit) is not None for each in environments_in(environment).values())
        if judged and (reference := run.stage(iteration, kind).reference()) is not None:
            section = environment.model_dump(mode="json")
            add_judges(tokens_by_model, judge_tokens(read_table(reference, "rollouts"), section))
    return tokens_by_model


def totals_after(before: Mapping[str, float], *metrics: Mapping[str, float]) -> dict[str, float]:
    """Totals of a run with one more iteration: by the names of `Budget`, and wasted tokens by reason.

    Args:
        before: totals of the iterations before; empty for the first.
        metrics: of the iteration's stages, the report's among them.
    """
    totals = dict.fromkeys(BUDGETED, 0.0) | dict(before)
    for iteration_metrics in metrics:
        for name, value in iteration_metrics.items():
            total, unit = _TOTAL_OF.get(name, (name, 1.0))
            if name in _TOTAL_OF or is_waste(name):
                totals[total] = totals.get(total, 0.0) + value / unit
    return totals


def run_totals(run: Run, iteration: int) -> dict[str, float]:
    """Totals of all iterations up to a reported one; all 0 before the first."""
    reference = run.stage(iteration, StageKind.REPORT).reference()
    recorded = {} if reference is None else read_manifest(reference).details.get("totals", {})
    return totals_after(current_names(recorded))


def bill_of(run: Run) -> dict[str, dict[str, float]]:
    """Assign each generated token and CPU second of a run on record to one cause, with money if a price is set.

    Tokens are counted in the generated rows, never in copies: a re-scored dataset, a replay of validation, the
    checkpoints of a fork and the recorded turns before a branch add none.

        trained       a step gave them weight                      failed, quarantined, omitted, untrained   see above
        skipped       the iteration was skipped on purpose          pending     collected, not trained on yet
        masked        the loss skips their turn                     datasets    collected for datasets
        evaluated     held-out rollouts                             branched    new turns of branches
        replayed      by stages of replays                          judged      answers of a rubric's judge, and
                                                                                stored rollouts judged anew (CPU)
        repeated      recorded calls that had to be made again
        interrupted   counted by the engine but in no row: calls in flight when a process was killed
        driver        the same, before the first refit was complete: the checks of the engine

    The money of judges covers their prompt and completion tokens (`cost.prices.judges`). CPU seconds of a driver's
    process, and of its programs, shards and trainers on the same machine (`roundhouse.store.lease`), outside the stages
    that it completed:

        interrupted   it disappeared: killed attempts, without the use after the last renewal of the lease (10 s, a sixth of its
                      time). For any driver: programs that ended without a result
        pending       it is running
        driver        it ended: the flow around the stages, failed attempts, checkpoints deleted since

    Not on record: killed programs on other machines (Jobs, Ray); calls in flight at a replica that has since ended, at
    an engine that aborts them with their client (vLLM under Ray Serve), or in overlapped stages, where counts cannot be
    separated.

    Returns:
        `{"tokens": {cause: …}, "cpu_seconds": {cause: …}, "money": {cause: …}, "unpriced_judge_tokens": {model: …}}`:
        the last
        with prompt and completion tokens together.

    Raises:
        LedgerError: an iteration's causes are more than its tokens.
    """
    bill = _Bill()
    _add_iterations(run, bill)
    _add_replays(run, bill)
    _add_datasets(run, bill)
    _add(bill.seconds, _outside_of_stages(run.location, bill.committed))
    _add(bill.tokens, _unrecorded_tokens(bill.sampled))
    if written := math.fsum(each.completion for each in bill.judges.values()):
        bill.tokens["judged"] = written
    prices = run.config.cost.prices
    hour = prices.cpu_hour / HOUR
    money = {cause: used * hour for cause, used in bill.seconds.items()} if hour else {}
    if paid := judge_money(bill.judges, prices.judges):
        _add(money, {"judged": paid})
    unpriced = unpriced_judges(bill.judges, prices.judges)
    return {"tokens": bill.tokens, "cpu_seconds": bill.seconds, "money": money, "unpriced_judge_tokens": unpriced}


@dataclass(slots=True)
class _Bill:
    """Intermediate sums of `bill_of`."""

    tokens: dict[str, float] = field(default_factory=dict)
    """By cause, as `seconds`."""
    seconds: dict[str, float] = field(default_factory=dict)
    judges: dict[str, JudgeTokens] = field(default_factory=dict)
    """By model."""
    committed: list[Manifest] = field(default_factory=list)
    """Manifests of all stages that the run's drivers may have completed."""
    sampled: list[tuple[Manifest, float]] = field(default_factory=list)
    """Stages at the engine, with the tokens that they had of it."""

    def add_sampled(
        self, manifest: Manifest, generated: float, judges: Mapping[str, JudgeTokens] | None = None
    ) -> None:
        """Add a stage's tokens in rows and its judges' tokens."""
        own = JudgeTokens() if judges is None else judges.get(OWN_ENGINE, JudgeTokens())
        tokens = generated + own.completion + manifest.metrics.get("rollout/repeated_tokens", 0.0)
        if tokens or "engine_tokens" in manifest.details:
            self.sampled.append((manifest, tokens))


def _add_iterations(run: Run, bill: _Bill) -> None:
    """Add the stages of the run's iterations and its checkpoints."""
    for k in _numbers(run.location / "iterations"):
        manifests = _stages_of(run.location, k)
        bill.committed += manifests.values()
        own = _collected_tokens(run.location, k, manifests)
        _add(bill.tokens, own)
        for kind, manifest in manifests.items():
            used = manifest.resources.get("cpu_seconds", 0.0)
            judges = iteration_judges(run, k, [kind])
            add_judges(bill.judges, judges)
            evaluating = kind.startswith(StageKind.EVALUATE) or kind == StageKind.PROMOTE
            generated = sum(own.values()) if kind == StageKind.COLLECT else 0.0
            if evaluating and kind != StageKind.PROMOTE:
                generated = _generated(run.location, k, kind)
                _add(bill.tokens, {"evaluated": generated})
            bill.add_sampled(manifest, generated, judges)
            if repeated := manifest.metrics.get("rollout/repeated_tokens"):
                _add(bill.tokens, {"repeated": repeated})
            if kind == StageKind.COLLECT and (whole := sum(own.values())):
                _add(bill.seconds, {cause: used * count / whole for cause, count in own.items()})
            else:
                _add(bill.seconds, {"evaluated" if evaluating else "trained": used})
    for version in run.checkpoint_versions():
        manifest = read_manifest(_present(run.checkpoint(version)))
        bill.committed.append(manifest)
        _add(bill.seconds, {"trained": manifest.resources.get("cpu_seconds", 0.0)})


def _collected_tokens(place: Location, k: int, manifests: Mapping[str, Manifest]) -> dict[str, float]:
    """Tokens of an iteration's collection by cause; they add up to all of them."""
    if StageKind.COLLECT not in manifests:
        return {}
    generated = _generated(place, k, StageKind.COLLECT)
    validated, train = manifests.get(StageKind.VALIDATE), manifests.get(StageKind.TRAIN)
    if train is not None and SKIPPED in train.details:
        return {"skipped": generated}
    if validated is None or train is None:
        return {"pending": generated}
    metrics = validated.metrics | train.metrics
    tokens = {name[len("waste/") : -len("_tokens")]: value for name, value in metrics.items() if is_waste(name)}
    trained_tokens = metrics.get("validate/trained_tokens", 0.0)
    tokens["trained"] = trained_tokens - tokens.get("untrained", 0.0)
    tokens["masked"] = generated - math.fsum(tokens.values())
    if tokens["masked"] < 0 or tokens["trained"] < 0:
        raise LedgerError(
            f"Iteration {k} of {place.uri}: of {generated:.0f} generated tokens, the causes are {tokens}."
        )
    return {cause: count for cause, count in tokens.items() if count}


def _unrecorded_tokens(sampled: Sequence[tuple[Manifest, float]]) -> dict[str, float]:
    """Return, by cause, the tokens that the engine generated up to a recorded count, without those of the stages that
    ended since the previous count: `driver` before the first count, then `interrupted`.

    A count made during another stage, or with other replicas than the previous count, is not used.
    """
    ordered = sorted(sampled, key=lambda each: each[0].finished_at)
    is_within, earliest = [], math.inf
    for manifest, _ in reversed(ordered):
        is_within.append(earliest < manifest.finished_at)
        earliest = min(earliest, manifest.started_at)
    before, recorded, causes = dict[str, int](), 0.0, dict[str, float]()
    for (manifest, tokens), within in zip(ordered, reversed(is_within), strict=True):
        recorded += tokens
        counts = manifest.details.get("engine_tokens")
        if not counts or within:
            continue
        unrecorded = sum(counts.values()) - sum(before.values()) - recorded
        if unrecorded > 0 and (not before or counts.keys() == before.keys()):
            _add(causes, {"interrupted" if before else "driver": unrecorded})
        before, recorded = counts, 0.0
    return causes


def _outside_of_stages(place: Location, committed: Sequence[Manifest]) -> dict[str, float]:
    """CPU seconds that the drivers of a run or replay and their programs used, without those of the stages that they committed,
    by cause."""
    seconds_by_cause: dict[str, float] = {}
    drivers = all_drivers(place)
    for driver in drivers:
        in_stages = math.fsum(
            manifest.resources.get("cpu_seconds", 0.0) - manifest.resources.get("other_processes_cpu_seconds", 0.0)
            for manifest in committed
            if manifest.lease == driver.token
        )
        alive = driver is drivers[-1] and not driver.is_over
        cause = "driver" if driver.released else "pending" if alive else "interrupted"
        outside = max(0.0, driver.cpu_seconds - in_stages)
        lost = min(outside, driver.lost_cpu_seconds)
        _add(seconds_by_cause, {"interrupted": lost})
        _add(seconds_by_cause, {cause: outside - lost})
    return {cause: used for cause, used in seconds_by_cause.items() if used}


def _add_replays(run: Run, bill: _Bill) -> None:
    """Add the replays of the run; their tokens are the sampled ones."""
    replays = Location(run.config.store) / "replays"
    for name in replays.names():
        place = replays / name
        try:
            identity = read_identity(place)
            if identity["replay"]["run_uid"] != run.uid:
                continue
        except NotFound:
            continue
        committed: list[Manifest] = []
        for k in _numbers(place / "iterations"):
            for kind, manifest in _stages_of(place, k).items():
                committed.append(manifest)
                _add(bill.seconds, {"replayed": manifest.resources.get("cpu_seconds", 0.0)})
                if kind == StageKind.COLLECT or kind.startswith(StageKind.EVALUATE):
                    table = read_table(_present(_stage_at(place, k, kind)), "rollouts")
                    judges = judge_tokens(table, identity["config"].get("environment", {}))
                    generated = _sum(table["generated_tokens"])
                    _add(bill.tokens, {"replayed": generated})
                    add_judges(bill.judges, judges)
                    bill.add_sampled(manifest, generated, judges)
        _add(bill.seconds, {"replayed": math.fsum(_outside_of_stages(place, committed).values())})


def _add_datasets(run: Run, bill: _Bill) -> None:
    """Add the dataset versions of the run: collected, branched, or judged anew."""
    datasets = Location(run.config.store) / "datasets"
    for place in [datasets / f"{name}/{label}" for name in datasets.names() for label in (datasets / name).names()]:
        if (reference := Stage(place, kind=StageKind.COLLECT, run_id="", iteration=0).reference()) is None:
            continue
        manifest = read_manifest(reference)
        if manifest.run_id != run.run_id or manifest.finished_at < run.created_at:
            continue
        bill.committed.append(manifest)
        cause = (
            "branched" if "branched" in manifest.details else "judged" if "rollouts" in manifest.inputs else "datasets"
        )
        _add(bill.seconds, {cause: manifest.resources.get("cpu_seconds", 0.0)})
        table, section = read_table(reference, "rollouts"), run.config.environment.model_dump(mode="json")
        if cause == "judged":  # those judged anew without a reward are as they were before
            table, section = table.filter(pc.is_valid(table["reward"])), manifest.details["judge"]["environment"]
        judges, generated = judge_tokens(table, section), 0.0
        add_judges(bill.judges, judges)
        if cause == "datasets":
            generated = _sum(table["generated_tokens"])
        elif cause == "branched":
            turns = read_table(reference, "turns")
            generated = _sum(pc.list_value_length(turns.filter(turns["trained"])["generation_token_ids"]))
        if cause != "judged":
            _add(bill.tokens, {cause: generated})
        bill.add_sampled(manifest, generated, judges)


def _generated(place: Location, k: int, kind: str) -> float:
    """Generated tokens in the rows of a stage that samples."""
    return _sum(read_table(_present(_stage_at(place, k, kind)), "rollouts")["generated_tokens"])


def _sum(column: pa.ChunkedArray) -> float:
    return float(pc.sum(column).as_py() or 0)


def _stages_of(place: Location, k: int) -> dict[str, Manifest]:
    """Manifests of an iteration's complete stages, without those of a checkpoint."""
    root = place / f"iterations/{k:06d}"
    references = {kind: _stage_at(place, k, kind).reference() for kind in root.names()}
    return {kind: read_manifest(reference) for kind, reference in references.items() if reference is not None}


def _stage_at(place: Location, k: int, kind: str) -> Stage:
    return Stage(place / f"iterations/{k:06d}/{kind}", kind=kind, run_id="", iteration=k)


def _present(stage: Stage) -> Reference:
    reference = stage.reference()
    assert reference is not None, "it was listed as complete"
    return reference


def _numbers(place: Location) -> list[int]:
    return sorted(int(name) for name in place.names() if name.isdigit())


def _add(totals: dict[str, float], more: Mapping[str, float]) -> None:
    for cause, value in more.items():
        totals[cause] = totals.get(cause, 0.0) + value


def is_waste(name: str) -> bool:
    """Return whether a metric or a total counts tokens wasted for one reason."""
    return name.startswith("waste/") and name.endswith("_tokens")


PLACE = "budget"


class Raise(BaseModel):
    """A person's word on the budget."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    limits: dict[str, float]
    """New values, by the names of `cost.budget`."""
    comment: str = ""
    by: str = ""
    at: float
    """Seconds since the epoch."""


def raises(run: Run) -> list[Raise]:
    """All raises, oldest first.

    Raises:
        StoreError: one is damaged.
    """
    place, raises_so_far = run.location / PLACE, list[Raise]()
    while True:  # by number, since a bucket may list late
        name = f"{len(raises_so_far) + 1:04d}.json"
        try:
            raises_so_far.append(Raise.model_validate_json(place.read(name)))
        except NotFound:
            return raises_so_far
        except ValidationError as error:
            raise StoreError(f"{place.uri}/{name} does not raise a budget. Correct or delete it. {error}") from error


def budget_of(run: Run) -> dict[str, float]:
    """The limits that count now, by name; unset ones are left out."""
    limits: dict[str, float] = run.config.cost.budget.model_dump(exclude_none=True)
    for raised in raises(run) if limits else []:
        limits = {name: max(limit, raised.limits.get(name, limit)) for name, limit in limits.items()}
    return limits


def raise_budget(run: Run, limits: Mapping[str, float], comment: str = "", by: str = "") -> Raise:
    """Raise the run's budget. A limit that the present configuration does not set may be set on the machine that runs
    it.

    Raises:
        ConfigError: the name is not a budget limit, or the value does not raise it.
    """
    present = budget_of(run)
    for name, value in limits.items():
        if name not in BUDGETED:
            raise ConfigError(f"budget {name} is unknown. Limits: {', '.join(BUDGETED)}.")
        if not math.isfinite(value):
            raise ConfigError(f"budget {name}={value:g} is not a limit. Give a finite number, such as {name}=1e12.")
        if not value > present.get(name, 0.0):
            raise ConfigError(
                f"budget {name}={value:g} does not raise the limit of {present.get(name, 0.0):g}. Give more."
            )
    raised = Raise(limits=dict(limits), comment=comment, by=by, at=time.time())
    place, number = run.location / PLACE, len(raises(run)) + 1
    while True:
        try:
            place.create(f"{number:04d}.json", (raised.model_dump_json(indent=1) + "\n").encode())
            return raised
        except AlreadyExists:
            number += 1


def over_budget(limits: Mapping[str, float], totals: Mapping[str, float]) -> list[str]:
    """Return one line per exceeded limit, with the key to raise and the excess."""
    lines = []
    for name, limit in limits.items():
        if (used := totals[name]) >= limit:
            beyond = f", {used - limit:.4g} too much" if used > limit else ""
            lines.append(f"{used:.6g} of cost.budget.{name}={limit:g} are used{beyond}")
    return lines


def used_up(run: Run, iteration: int) -> list[str]:
    """Return one line per reason that keeps iteration `iteration` from starting; empty if the budget lasts."""
    if not run.config.cost.budget.model_dump(exclude_none=True):
        return []
    return over_budget(budget_of(run), run_totals(run, iteration - 1))


def budget_reached(run: Run, iteration: int, lines: list[str]) -> BudgetReached:
    """The error that ends a run which waits for a person."""
    return BudgetReached(
        f"Run {run.run_id} is paused before iteration {iteration}: {'; '.join(lines)}. Raise the limit to resume: "
        f"`roundhouse runs resume {run.run_id} --budget <limit>=<more>`."
    )
