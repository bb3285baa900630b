"""Offline training on a real, small policy and its own rollouts: results, refusals, and equal bytes after kills."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError, RoundhouseError, StoreError
from roundhouse.sql.lineage import trained_on
from roundhouse.stages.datasets import dataset_versions, retain_versions, users_of_datasets
from roundhouse.stages.fork import fork_run, offline_config
from roundhouse.stages.freshness import StaleData, importance_of, kish
from roundhouse.stages.offline import age_of, batch_at, batch_of, batches_of_an_epoch, with_iterations
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.trainer_home import release_trainers
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, read_manifest, read_table
from tests import fork_server
from tests.stages.offline_world import chance_of_low, collect, make_config, train_to_the_end

pytestmark = pytest.mark.usefixtures("no_resident_trainer")

GROUPS = 8


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run, Reference, Reference]:
    """A run with its starting policy, and two datasets of it."""
    directory = tmp_path_factory.mktemp("offline")
    run = open_run(make_config(directory))
    start = starting_policy(run)
    collect(run, start, draw=1, groups=GROUPS, size=8)
    collect(run, start, draw=2, groups=GROUPS, size=8)
    return directory, run, start, dataset_versions(run.config.store, "night")[0]


def offline(run: Run, new_id: str, *datasets: str, **given: Any) -> RunConfig:
    bounds = ["min_ess_fraction=0.001", "min_rollout_ess_fraction=0.001", "max_clipped_fraction=0.9"]
    overrides = [
        *(f"offline.{bound}" for bound in bounds),
        *given.pop("overrides", []),
    ]  # so small a policy leaves its data fast
    return offline_config(
        run.config.store, run.run_id, new_id, datasets or ("night@all",), overrides=overrides, **given
    )


def trained(run: Run, iteration: int) -> dict[str, float]:
    reference = run.stage(iteration, "train").reference()
    assert reference is not None
    return read_manifest(reference).metrics


def weights(run: Run, version: int) -> str:
    reference = run.checkpoint(version).reference()
    assert reference is not None
    [digest] = [
        entry.sha256 for entry in read_manifest(reference).model_files.named() if entry.path == "model.safetensors"
    ]
    return digest


@pytest.mark.real
@pytest.mark.parametrize("method", ["grpo", "rejection"])
def test_a_policy_learns_what_is_rewarded_from_data_alone(world: Any, method: str) -> None:
    _, base, start, _ = world
    run = train_to_the_end(offline(base, f"learns-{method}", method=method, overrides=["offline.epochs=4"]))
    assert run.config.iterations == 16
    end = run.checkpoint(16).reference()
    assert end is not None
    assert chance_of_low(end, GROUPS) > chance_of_low(start, GROUPS) + 0.05


@pytest.mark.real
def test_a_policy_moves_towards_its_teacher_on_data_alone(world: Any) -> None:
    _, base, _, _ = world
    teacher = train_to_the_end(offline(base, "teacher", overrides=["offline.epochs=4"])).checkpoint(16).reference()
    assert teacher is not None
    config = offline(base, "pupil", method="distillation", teacher=teacher.uri, overrides=["offline.epochs=2"])
    run = train_to_the_end(config)
    gaps = [trained(run, k)["train/teacher_kl"] for k in (1, 8)]
    assert gaps[1] < gaps[0]


def test_a_dataset_of_branches_alone_is_trained_on(world: Any) -> None:
    """As in docs/replay.md: `roundhouse branch`, then `roundhouse train-offline … --dataset branches@all`."""
    _, base, start, _ = world
    collect(base, start, name="branches", branched=True)
    run = train_to_the_end(offline(base, "from-branches", "branches@all"))
    assert run.config.iterations == 2
    assert weights(run, 1) != weights(run, 0), "it learnt"


def test_what_a_run_trains_from_is_fixed_with_digests_and_seen_by_why(world: Any) -> None:
    _, base, _, _ = world
    run = train_to_the_end(offline(base, "fixed"))
    prepared = run.stage(0, "offline").reference()
    assert prepared is not None
    inputs = list(read_manifest(prepared).inputs.values())
    assert inputs == dataset_versions(base.config.store, "night")
    collect(base, base.checkpoint(0).reference(), draw=9, name="later")
    for k in (1, 2, 3, 4):
        reference = run.stage(k, "validate").reference()
        assert reference is not None
        manifest = read_manifest(reference)
        assert manifest.inputs["dataset"] in inputs
        groups = set(read_table(reference, "sequences").column("group_id").to_pylist())
        assert groups == set(batch_of(run, k)[1].groups)
    found = trained_on(base.config.store, "fixed", 4)
    assert {entry["dataset"] for entry in found.iterations} == {"night@v000000-i000001", "night@v000000-i000002"}
    assert {row["row"]: row["prompt"] for row in found.rows}["task/3"] == "prompt 3"


def test_a_copied_version_is_trained_on_when_the_original_is_gone(world: Any, tmp_path: Path) -> None:
    """As docs/offline-training.md advises for data of another store."""
    _, base, start, _ = world
    collect(base, start, draw=3, name="moved")
    [original] = dataset_versions(base.config.store, "moved")
    place = Path(original.uri.removeprefix("file://"))
    shutil.copytree(place, tmp_path / "copy")
    shutil.rmtree(place)
    run = train_to_the_end(offline(base, "from-a-copy", str(tmp_path / "copy")))
    [used] = batch_of(run, 1)[0]
    assert (used.uri, used.digest) == (f"file://{tmp_path}/copy", original.digest)
    assert weights(run, run.config.iterations) != weights(base, 0)


def test_fresh_data_is_told_to_be_fresh(world: Any) -> None:
    _, base, _, _ = world
    run = train_to_the_end(offline(base, "fresh"))
    prepared = run.stage(0, "offline").reference()
    assert prepared is not None
    metrics = read_manifest(prepared).metrics
    assert metrics["offline/age_versions"] == 0
    assert metrics["offline/effective_tokens"] == pytest.approx(1, abs=1e-4)
    assert metrics["offline/effective_rollouts"] == pytest.approx(1, abs=1e-4)
    assert metrics["offline/clipped"] == 0
    first, last = trained(run, 1), trained(run, 4)
    assert first["offline/effective_rollouts"] > last["offline/effective_rollouts"], (
        "the policy moves away from the data"
    )


@pytest.fixture(scope="module")
def far(world: Any) -> Run:
    """A run with a policy far away from the datasets of the base."""
    _, base, _, _ = world
    overrides = ["offline.epochs=4", "train.optimizer.learning_rate=0.02", "offline.on_stale=warn"]
    return train_to_the_end(offline(base, "far", overrides=overrides))


def test_data_that_the_policy_has_left_behind_is_refused_with_numbers(far: Run) -> None:
    config = offline(far, "refused", overrides=["offline.max_age=10", "offline.min_ess_fraction=0.9"])
    with pytest.raises(StaleData) as told:
        train_to_the_end(config)
    message = str(told.value)
    assert "16 policy versions before" in message
    assert "offline.max_age=10" in message
    assert "offline.min_ess_fraction=0.9" in message
    assert "offline.on_stale=warn" in message
    run = with_iterations(open_run(config))
    assert run.stage(16, "offline").reference() is None
    evidence = json.loads(run.stage(16, "offline").location.read("freshness-a0001.json"))
    assert evidence["datasets"][0]["importance"]["effective_tokens"] < 0.9


def test_a_warning_lets_the_same_run_go_on_and_stays_on_record(far: Run) -> None:
    settings = ["offline.max_age=10", "offline.on_stale=warn", "offline.precheck_rollouts=32"]
    run = train_to_the_end(offline(far, "warned", overrides=settings))
    prepared = run.stage(16, "offline").reference()
    assert prepared is not None
    assert "max_age=10" in str(read_manifest(prepared).details["stale"])
    assert run.checkpoint(run.config.iterations).reference() is not None


def test_a_run_stops_before_a_version_whose_step_saw_too_little_of_the_data(world: Any) -> None:
    _, base, _, _ = world
    overrides = ["offline.epochs=6", "train.optimizer.learning_rate=0.05", "offline.max_clipped_fraction=0.05"]
    config = offline(base, "drifts", overrides=overrides)
    with pytest.raises(StaleData, match="The data of iteration"):
        train_to_the_end(config)
    run = open_run(config)
    newest = run.latest_checkpoint()
    assert newest is not None
    assert 0 < newest.policy_version < 24
    assert run.stage(newest.policy_version + 1, "train").reference() is None


def test_age_is_counted_along_the_line_of_forks_and_unknown_off_it(world: Any, far: Run) -> None:
    _, base, _, dataset = world
    made_with = read_manifest(dataset).inputs["weights"]
    assert age_of(base, made_with) == 0
    assert age_of(far, made_with) == 0, "it started from the version that collected"
    config = offline(far, "child", at="3", overrides=["offline.on_stale=warn"])
    child = fork_run(config)
    assert age_of(child, made_with) == 3
    beyond = far.checkpoint(5).reference()
    assert age_of(child, beyond) is None, "the parent went on without the child"
    assert age_of(base, beyond) is None


@pytest.mark.long
def test_a_killed_run_goes_on_with_the_same_data_to_the_same_weights(world: Any, tmp_path: Path) -> None:
    _, base, _, _ = world
    names = ("whole", "killed")
    configs = {name: offline(base, name, overrides=["offline.epochs=2"]) for name in names}
    whole = train_to_the_end(configs["whole"])
    release_trainers()
    file = tmp_path / "config.json"
    file.write_text(configs["killed"].model_dump_json())
    command = [sys.executable, "-m", "tests.stages.offline_world", str(file)]
    seen = []
    for wanted in (5, 0):
        process = fork_server.start(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            seen.append(int(line))
            if int(line) == wanted:
                os.kill(process.pid, signal.SIGKILL)
        process.wait(120)
    killed = with_iterations(open_run(configs["killed"]))
    assert [weights(killed, k) for k in range(1, 9)] == [weights(whole, k) for k in range(1, 9)]
    assert seen.count(8) == 1
    assert [batch_of(killed, k)[1] for k in range(1, 9)] == [batch_of(whole, k)[1] for k in range(1, 9)]


def test_more_epochs_continue_a_finished_run(world: Any) -> None:
    _, base, _, _ = world
    train_to_the_end(offline(base, "longer"))
    run = train_to_the_end(offline(base, "longer", overrides=["offline.epochs=2"]))
    assert run.config.iterations == 8
    assert run.checkpoint(8).reference() is not None


def test_a_dataset_that_a_run_trains_from_outlives_retention(world: Any) -> None:
    _, base, start, _ = world
    for draw in (1, 2, 3):
        collect(base, start, name="kept", draw=draw, groups=2)
    first, second, third = dataset_versions(base.config.store, "kept")
    train_to_the_end(offline(base, "uses", "kept@v000000-i000001"))
    assert users_of_datasets(base.config.store)[first.uri] == ["uses"]
    assert retain_versions(base.config.store, "kept", 1, dry_run=True) == [second.uri]
    assert retain_versions(base.config.store, "kept", keep_days=1) == [], "all are young"
    later = read_manifest(third).finished_at + 2 * 86400
    assert retain_versions(base.config.store, "kept", keep_days=1, now=later) == [second.uri]
    assert dataset_versions(base.config.store, "kept") == [first, third], "the newest stays, however old"


@pytest.mark.parametrize(
    ("keys", "kind", "said"),
    [
        ({"datasets": ["nothing"]}, StoreError, "datasets there: "),
        ({"datasets": ["night@v9"]}, StoreError, "complete versions: v000000-i000001"),
        ({"datasets": ["night@all"], "temperature": 0.5}, ConfigError, "generation.sampling.temperature"),
        ({"datasets": ["/tmp/nowhere/at/all"]}, ConfigError, "no complete collection"),
    ],
)
def test_data_that_cannot_be_right_is_refused_with_the_remedy(
    world: Any, keys: dict[str, Any], kind: type[RoundhouseError], said: str
) -> None:
    _, base, _, _ = world
    temperature = keys.get("temperature", 1.0)
    run_id = f"refused-{abs(hash(str(keys)))}"
    config = offline(base, run_id, *keys["datasets"], overrides=[f"generation.sampling.temperature={temperature}"])
    with pytest.raises(kind, match=said):
        train_to_the_end(config)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"kind": "grpo"}, "mismatch_correction is auto"),
        ({"kind": "grpo", "mismatch_correction": "seq-mask-tis"}, "mismatch_bounds"),
        ({"kind": "grpo", "mismatch_correction": "tis", "kl_coefficient": 0.1}, "kl_importance_weighting"),
    ],
)
def test_a_loss_that_takes_the_data_for_its_own_is_refused_at_load(algorithm: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config({"run_id": "x", "offline": {"datasets": ["night"]}, "train": {"algorithm": algorithm}})


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    size=st.integers(1, 9),
    seed=st.integers(0, 5),
    epochs=st.integers(1, 3),
)
def test_an_epoch_has_every_group_once_and_a_batch_one_dataset(
    sizes: list[int], size: int, seed: int, epochs: int
) -> None:
    groups = [[f"{index}/{number}" for number in range(count)] for index, count in enumerate(sizes)]
    count = batches_of_an_epoch(sizes, size)
    for epoch in range(epochs):
        batches = [batch_at(groups, size, seed, epoch * count + place) for place in range(count)]
        assert sorted(group for batch in batches for group in batch.groups) == sorted(
            group for own in groups for group in own
        )
        assert all(batch.epoch == epoch + 1 and 0 < len(batch.groups) <= size for batch in batches)
        assert all(group.startswith(f"{batch.dataset}/") for batch in batches for group in batch.groups)


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=40))
def test_an_effective_sample_is_between_one_and_all(log_weights: list[float]) -> None:
    share = kish(np.array(log_weights))
    assert 1 / len(log_weights) <= share * (1 + 1e-9)
    assert share <= 1 + 1e-9


def test_importance_by_hand() -> None:
    difference = np.log(np.array([1.0, 1.0, 4.0, 0.25]))
    found = importance_of(difference, np.array([7, 7, 9, 9]), (0.5, 2.0))
    assert found.effective_tokens == pytest.approx((6.25**2) / (4 * (1 + 1 + 16 + 0.0625)))
    assert found.effective_rollouts == pytest.approx(1), "both rollouts weigh 1 in all"
    assert (found.tokens, found.rollouts, found.clipped) == (4, 2, 0.5)
