"""A collection by several processes equals that of one, and only lost rollouts are repeated."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.activity import ACTIVITY, Stalled, supervised
from roundhouse.collection.sharded_attempt import ShardedAttempt
from roundhouse.collection.shards import Shard, shares, split
from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, StoreError
from roundhouse.launch.subprocesses import SubprocessLauncher
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.stages.collect import collect_dataset, collect_iteration, read_rollouts
from roundhouse.stages.datasets import TaskDraw
from roundhouse.stages.evaluate import evaluate_version
from roundhouse.stages.metric_catalogue import meaning_of
from roundhouse.stages.validate import validate_iteration
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import WRITERS, Reference, read_manifest
from roundhouse.store.verification import find_garbage, verify
from roundhouse.training.service.job_entry import REPORT
from roundhouse.trajectories.records import Rollout, derive_seed
from roundhouse.trajectories.schemas import rollouts_table, summaries_from_tables, turns_table
from tests import fork_server
from tests.stages.test_interrupted_collect import CALLS, COLLECTING, GROUP, GuessingEngine, dataset, recorded_seeds
from tests.stages.test_interrupted_collect import engine as engine
from tests.stages.test_interrupted_collect import settings as guessing
from tests.waiting import until

pytestmark = pytest.mark.real

TASKS = 5


def settings(store: str, shards: int, **rollout: Any) -> dict[str, Any]:
    tree = guessing(store) | {"generation": {"max_model_len": 100_000, "sampling": {"max_new_tokens": 1000}}}
    tree["rollout"] |= {
        "prompts_per_iteration": TASKS,
        "concurrency": 40,
        "retry": {"attempts": 4, "first_delay_seconds": 0.01},
    }
    if shards:
        tree["rollout"]["distribution"] = {"kind": "process", "shards": shards}
    tree["rollout"] |= rollout
    return tree


def begun(store: str, shards: int, **rollout: Any) -> tuple[Run, Reference]:
    run = open_run(parse_config(settings(store, shards, **rollout)))
    refit = run.stage(1, "refit")
    return run, refit.reference() or run.begin(refit, policy_version=0).commit()


def sequences_digest(run: Run, rollouts: Reference) -> str:
    validated = read_manifest(validate_iteration(run, 1, rollouts, 256))
    return next(entry.sha256 for entry in validated.files if entry.path.startswith("sequences-"))


def workers() -> dict[str, int]:
    """Process ids of the workers that this process waits for, by shard."""
    found = (
        re.fullmatch(r"pid (\d+), log .*/(\w+)\.log", w.where) for w in ACTIVITY.in_flight() if w.kind == "process"
    )
    return {match[2]: int(match[1]) for match in found if match is not None}


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


class Begun:
    """A collection under way in a thread."""

    def __init__(self, run: Run, weights: Reference, url: str) -> None:
        self.found: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(run, weights, url), daemon=True)
        self._thread.start()

    def _run(self, *arguments: Any) -> None:
        run, weights, url = arguments
        try:
            self.found.append(collect_iteration(run, 1, weights, url))
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.found.append(error)

    def result(self) -> Reference:
        self._thread.join(90)
        [found] = self.found
        if isinstance(found, BaseException):
            raise found
        return found


# -- the plan -------------------------------------------------------------------------------------------------------


@given(groups=st.integers(0, 40), size=st.integers(1, 4), count=st.integers(1, 50))
def test_every_rollout_is_in_one_shard_with_its_group_and_shards_differ_by_one_group(
    groups: int, size: int, count: int
) -> None:
    plan = [RolloutSpec(f"g{group}", sample, {}, group) for group in range(groups) for sample in range(size)]
    shards = split(plan, count)
    assert [spec for shard in shards for spec in shard.specs] == plan
    sizes = [len({spec.group_id for spec in shard.specs}) for shard in shards]
    assert sum(sizes) == groups, "no group is in two"
    assert len(shards) == min(groups, count)
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert [shard.digest() for shard in split(plan, count)] == [shard.digest() for shard in shards]


@given(whole=st.integers(1, 500), count=st.integers(1, 200))
def test_concurrency_is_shared_and_not_multiplied(whole: int, count: int) -> None:
    parts = shares(whole, count)
    assert sum(parts) == max(whole, count)
    assert max(parts) - min(parts) <= 1


def test_a_worker_reads_the_parts_that_can_be_its_own() -> None:
    shard = Shard(2, 5, [])
    own, other, unsharded, otherwise = (
        "rollouts-a0001-s0002of0005-01-00000.parquet",
        "rollouts-a0001-s0003of0005-01-00000.parquet",
        "rollouts-a0001-00000.parquet",
        "journal-a0001-s0001of0002-01-00000.parquet",
    )
    assert [shard.may_be_in(name) for name in (own, other, unsharded, otherwise)] == [True, False, True, True]


# -- the same as one process ----------------------------------------------------------------------------------------


def test_any_number_of_shards_collects_the_same_rollouts_and_byte_equal_sequences(
    tmp_path: Path, engine: GuessingEngine
) -> None:
    run, weights = begun(f"{tmp_path}/alone", 0)
    alone = collect_iteration(run, 1, weights, engine.url)
    everything, rows, digest = set(engine.answered), dataset(alone), sequences_digest(run, alone)
    plain = {name for name in read_manifest(alone).metrics if not name.startswith("time/")}
    for count in (1, 2, 5):
        engine.answered.clear()
        told: list[tuple[int, int]] = []
        run, weights = begun(f"{tmp_path}/{count}", count)
        sharded = collect_iteration(run, 1, weights, engine.url, lambda *progress, told=told: told.append(progress))
        assert sorted(engine.answered) == sorted(everything), "each call once"
        assert dataset(sharded) == rows
        assert sequences_digest(run, sharded) == digest
        manifest = read_manifest(sharded)
        assert manifest.counts == read_manifest(alone).counts
        assert plain <= manifest.metrics.keys()
        assert manifest.metrics["rollout/shards"] == count
        assert manifest.metrics["reward/mean"] == read_manifest(alone).metrics["reward/mean"]
        assert all(meaning_of(name) for name in manifest.metrics)
        assert told[-1] == (TASKS * GROUP, TASKS * GROUP)
        left = set(run.stage(1, "collect").location.tree())
        assert left == {"attempt-0001.json", "manifest.json", *(entry.path for entry in manifest.files)}
        assert len(manifest.files) == 2 * count
        assert verify(f"{tmp_path}/{count}").problems == []


def test_shards_work_on_a_bucket(s3_server: str, engine: GuessingEngine) -> None:
    import uuid

    import s3fs

    name = f"rh-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem().call_s3("create_bucket", Bucket=name)
    run, weights = begun(f"s3://{name}/store", 2)
    reference = collect_iteration(run, 1, weights, engine.url)
    assert reference.counts["completed"] == TASKS * GROUP == len(read_rollouts(reference))
    assert not any(name.startswith(WRITERS) for name in run.stage(1, "collect").location.tree())
    assert verify(f"s3://{name}/store").problems == []


@pytest.mark.long
def test_shards_on_a_ray_cluster_collect_what_processes_collect(
    ray_cluster: None, tmp_path: Path, engine: GuessingEngine
) -> None:
    digests = []
    for count, distribution in ((0, {}), (2, {"distribution": {"kind": "process", "shards": 2, "launcher": "ray"}})):
        run, weights = begun(f"{tmp_path}/{count}", 0, **distribution)
        reference = collect_iteration(run, 1, weights, engine.url)
        digests.append(sequences_digest(run, reference))
    assert digests[0] == digests[1]
    assert read_manifest(reference).metrics["rollout/shards"] == 2


def test_evaluations_datasets_and_rounds_of_dynamic_sampling_are_sharded_too(
    tmp_path: Path, engine: GuessingEngine
) -> None:
    """No guess is ever right here, so no group has spread: both rounds are collected, and all is in the one stage."""
    sampling = {"dynamic_sampling": {"max_rounds": 2, "on_exhausted": "continue"}, "prompts_per_iteration": 2}
    found = []
    for count in (0, 2):
        run, weights = begun(f"{tmp_path}/{count}", count, **sampling)
        config = run.config.model_copy(update={"evaluation": run.config.evaluation.model_copy(update={"tasks": 4})})
        run = Run(run.location, config, run.uid, run.created_at, run.code_version)
        evaluated = evaluate_version(run, 0, engine.url)
        collected = collect_dataset(run, "nightly", TaskDraw(1), weights, engine.url)
        details = read_manifest(collected).details["dynamic_sampling"]
        metrics = {name: value for name, value in read_manifest(evaluated).metrics.items() if "seconds" not in name}
        found.append((dataset(evaluated), dataset(collected), details, metrics))
    assert found[0] == found[1]
    assert found[0][2]["rounds"] == 2
    assert len(found[0][1]) == 2 * 2 * GROUP


# -- losses ---------------------------------------------------------------------------------------------------------


def test_a_shard_that_is_killed_in_the_middle_is_the_only_one_that_goes_on_and_makes_only_what_is_missing(
    tmp_path: Path, engine: GuessingEngine
) -> None:
    run, weights = begun(f"{tmp_path}/alone", 0)
    expected = sequences_digest(run, collect_iteration(run, 1, weights, engine.url))
    everything = set(engine.answered)
    engine.answered.clear()

    run, weights = begun(f"{tmp_path}/killed", 2)
    engine.healthy = 43
    collecting = Begun(run, weights, engine.url)
    until(lambda: len(recorded_seeds(run.stage(1, "collect").location)) == engine.healthy)
    first = workers()
    os.kill(first["s0002of0002"], signal.SIGKILL)
    until(lambda: workers().get("s0002of0002") not in (None, first["s0002of0002"]))
    assert workers()["s0001of0002"] == first["s0001of0002"], "nobody touched the other one"
    engine.healthy = 10**6
    engine.go_on.set()
    reference = collecting.result()
    assert len(engine.answered) == len(set(engine.answered)), "no finished call was made again"
    assert set(engine.answered) == everything
    assert sequences_digest(run, reference) == expected
    manifest = read_manifest(reference)
    assert manifest.metrics["rollout/shards_lost"] == 1
    assert manifest.details["resumptions"]["turns_resumed"] > 0
    assert {garbage.name.rsplit("/", 1)[-1].split("-")[0] for garbage in find_garbage(f"{tmp_path}/killed")} <= {
        "rollouts",
        "turns",
    }


@pytest.mark.parametrize("then", [2, 3])
def test_a_stage_that_is_killed_takes_its_workers_with_it_and_goes_on_with_any_number_of_them(
    tmp_path: Path, engine: GuessingEngine, then: int
) -> None:
    store = str(tmp_path)
    run, weights = begun(store, 2)
    engine.silent = second = calls_of_shard_2(run, 2, CALLS)
    process = fork_server.start([sys.executable, "-c", COLLECTING, json.dumps(settings(store, 2)), engine.url])
    location = run.stage(1, "collect").location
    try:
        until(lambda: any(name.endswith(f"/{REPORT}") for name in location.tree()))
        until(lambda: len(engine.answered) == TASKS * GROUP * CALLS - len(second))
        until(lambda: len(children_of(process.pid)) == 1)  # one shard is whole, one waits
        until(lambda: calls_of_shard_2(run, 2, 3) <= engine.unanswered)  # each answer before has arrived
        pids = children_of(process.pid)
    finally:
        process.kill()
        process.wait()
    until(lambda: not any(is_alive(pid) for pid in pids))
    assert len(recorded_seeds(location)) == len(engine.answered), "told to end, it wrote down what it had"

    engine.silent = ()
    run, weights = begun(store, then)
    reference = collect_iteration(run, 1, weights, engine.url)
    assert len(engine.answered) == len(set(engine.answered)) == TASKS * GROUP * CALLS
    assert reference.counts["completed"] == TASKS * GROUP
    assert len({rollout.rollout_id for rollout in read_rollouts(reference)}) == TASKS * GROUP
    if then == 2:
        attempts = [shard["attempt"] for shard in read_manifest(reference).details["distribution"]["shards"]]
        assert attempts == [1, 2], "the whole one had no worker again"


def calls_of_shard_2(run: Run, first: int, end: int) -> set[int]:
    """Seeds of the calls from number `first` (from 0) to before `end`, of the rollouts of the second of two shards."""
    from roundhouse.rollout.clients import open_environment
    from roundhouse.rollout.plan import plan_rollouts, round_tasks

    tasks = open_environment(run.config.environment).tasks("train")
    plan = plan_rollouts(round_tasks(tasks, run.config.rollout, run.config.seed, 1, 1), GROUP, run.config.seed, 1)
    return {derive_seed(spec.seed, number) for spec in split(plan, 2)[1].specs for number in range(first, end)}


def children_of(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def test_a_stage_that_is_given_up_names_its_shards_and_ends_them(tmp_path: Path, engine: GuessingEngine) -> None:
    run, weights = begun(str(tmp_path), 2)
    engine.healthy = 17
    seen: set[int] = set()

    def watch() -> None:
        while not ended.wait(0.02):
            seen.update(workers().values())

    ended = threading.Event()
    threading.Thread(target=watch, daemon=True).start()
    # the workers import for seconds before they say anything
    with pytest.raises(Stalled, match=r"collect: (process|shard)"):
        supervised(lambda: collect_iteration(run, 1, weights, engine.url), "collect", "iteration 1", 12)
    ended.set()
    assert len(seen) == 2
    assert not any(is_alive(pid) for pid in seen)
    assert len(recorded_seeds(run.stage(1, "collect").location)) == engine.healthy


# -- errors ---------------------------------------------------------------------------------------------------------


def test_failures_are_weighed_over_all_shards_and_the_next_attempt_makes_only_these_again(
    tmp_path: Path, engine: GuessingEngine
) -> None:
    from roundhouse.errors import TooFewRollouts

    run, weights = begun(str(tmp_path), 2, retry={"attempts": 1, "first_delay_seconds": 0.01})
    engine.silent, engine.broken = calls_of_shard_2(run, 2, CALLS), True
    with pytest.raises(TooFewRollouts, match=r"12 of 20 rollouts failed.*max_failed_fraction"):
        collect_iteration(run, 1, weights, engine.url)
    engine.silent = ()
    reference = collect_iteration(run, 1, weights, engine.url)
    assert len(engine.answered) == len(set(engine.answered)) == TASKS * GROUP * CALLS
    attempts = [shard["attempt"] for shard in read_manifest(reference).details["distribution"]["shards"]]
    assert attempts == [1, 2]


def test_an_error_of_a_worker_reaches_the_stage_as_it_was_raised_there(tmp_path: Path) -> None:
    run, _ = begun(str(tmp_path / "store"), 2)
    attempt = ShardedAttempt(run, run.stage(1, "collect"), 0)
    shard = Shard(1, 2, [RolloutSpec("g", 0, {"task_id": "g"}, 1)])
    task = attempt.task(shard, run.config.generation.sampling, "http://127.0.0.1:9", 1)
    (tmp_path / "file").write_text("no directory")
    broken = task.spec.model_copy(update={"stage": (tmp_path / "file" / "stage").as_uri()})
    with SubprocessLauncher(run) as processes, pytest.raises(StoreError, match=r"writers s0001of0002 of attempt"):
        processes.run(replace(task, spec=broken), lambda line: None, threading.Event())


def test_a_damaged_report_or_part_costs_its_shard_and_no_more(tmp_path: Path, engine: GuessingEngine) -> None:
    run, weights = begun(str(tmp_path), 2)
    engine.silent, engine.broken = calls_of_shard_2(run, 2, CALLS), True
    with pytest.raises(Exception, match="rollouts failed"):
        collect_iteration(run, 1, weights, engine.url)
    location = run.stage(1, "collect").location
    name = next(name for name in location.names() if re.match(r"turns-.*s0001of0002", name))
    location.write(name, location.read(name)[:-20])
    engine.silent = ()
    reference = collect_iteration(run, 1, weights, engine.url)
    assert reference.counts["completed"] == TASKS * GROUP
    assert verify(str(tmp_path)).problems == []


@pytest.mark.parametrize(
    ("distribution", "message"),
    [
        ({"kind": "process", "shards": 41}, r"shards \(41\) is above rollout.concurrency \(40\).*raise the second"),
        ({"kind": "process", "timeout_seconds": 60}, r"timeout_seconds \(60\).*rollout.timeout_seconds \(120\)"),
        ({"kind": "slurm"}, r"rollout.distribution"),
    ],
)
def test_what_cannot_work_is_refused_at_load(distribution: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        parse_config(settings("/tmp/x", 0, distribution=distribution))


# -- outlines -------------------------------------------------------------------------------------------------------


@pytest.fixture
def rollouts(tmp_path: Path, engine: GuessingEngine) -> list[Rollout]:
    run, weights = begun(str(tmp_path), 0)
    return read_rollouts(collect_iteration(run, 1, weights, engine.url))


def test_an_outline_counts_as_its_rollout_and_holds_none_of_its_tokens(rollouts: list[Rollout]) -> None:
    from roundhouse.collection.collector import rollout_metrics

    rollouts[3].turns.clear()
    outlines = summaries_from_tables(rollouts_table(rollouts), turns_table(rollouts))
    assert rollout_metrics(outlines) == rollout_metrics(rollouts)
    assert [outline.rollout_id for outline in outlines] == [rollout.rollout_id for rollout in rollouts]
    assert {token for outline in outlines for turn in outline.turns for token in turn.generation_token_ids} == {0}
    assert not any(outline.items or outline.task for outline in outlines)
