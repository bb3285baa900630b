"""Replays with one thing corrected name the cause of a metric's regression, and name nothing without a cause."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.errors import ConfigError, StoreError
from roundhouse.plugins.lab.replays.bisect import Trial, bisect, likely_cause
from roundhouse.plugins.lab.replays.narrowing import smallest_set
from roundhouse.plugins.lab.replays.readings import OtherWeights, Reading, find_fall
from roundhouse.stages.datasets import dataset_names
from roundhouse.store.replays import load_replay, replay_names
from roundhouse.store.run import Run
from roundhouse.store.stage import Reference
from roundhouse.store.verification import verify
from tests.plugins.lab.replays.planted import HEALTHY, PLANTS, Plant, planted_run

pytestmark = pytest.mark.real

IN_SHORT = ("entropy",)


def plants() -> list[object]:
    """The quickest plant; all others if time permits."""
    marks = {plant.name: () if plant.name in IN_SHORT else (pytest.mark.nightly,) for plant in PLANTS}
    return [pytest.param(plant, id=plant.name, marks=marks[plant.name]) for plant in PLANTS]


@pytest.mark.parametrize("plant", plants())
def test_a_planted_cause_is_named_with_its_iteration(plant: Plant, tmp_path: Path) -> None:
    run = planted_run(tmp_path, plant)
    found = bisect(run.config.store, run.run_id)
    if found.fall is None and plant.cause in ("rows", "configuration"):
        pytest.skip("the plant does no harm with this machine's arithmetic: there is no fall to explain")
    assert found.fall is not None
    assert (found.cause, found.iteration) == (plant.cause, plant.since), found.as_json()
    assert found.stage_runs <= np.log2(run.config.iterations) + 6


def test_the_command_names_the_reward_code_and_leaves_a_sound_store(tmp_path: Path) -> None:
    plant = next(plant for plant in PLANTS if plant.name == "verifier turned")
    run = planted_run(tmp_path, plant)
    before = {name: run.location.size(name) for name in run.location.tree()}
    arguments = ["bisect", run.run_id, "--store", run.config.store, "--trust-store"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 1, "it exits with 1 where the metric fell"
    assert "Cause: reward, iteration 5." in " ".join(shown.stdout.split()), shown.output
    assert {name: run.location.size(name) for name in run.location.tree()} == before, "the run is only read"
    [kept] = replay_names(run.config.store)
    assert load_replay(run.config.store, kept)
    assert dataset_names(run.config.store) == [kept], "what the deciding replay read"
    assert verify(run.config.store).problems == []
    again = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert (again["cause"], again["iteration"]) == ("reward", 5)
    assert bisect(run.config.store, run.run_id, evaluate=True).cause == "", "no engine is there to measure by"
    assert replay_names(run.config.store) == [kept], "another search leaves what this one kept"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 4))
def test_a_healthy_run_has_no_verdict(seed: int, tmp_path: Path) -> None:
    run = planted_run(tmp_path, HEALTHY, seed=seed)
    assert bisect(run.config.store, run.run_id).cause == ""


def reading(version: int, mean: float, samples: int = 200, tasks: int = 4) -> Reading:
    count = round(mean * samples)
    return Reading(version, {str(task): [1.0] * count + [0.0] * (samples - count) for task in range(tasks)})


@pytest.mark.parametrize(
    ("trials", "likely"),
    [
        ([("code", 0.1), ("configuration", None), ("rows", None)], "configuration"),
        ([("code", 0.1), ("rows", None), ("rows", 0.2)], "rows"),
        ([("engine", None), ("configuration", None)], ""),
        ([("code", 0.1), ("configuration", None), ("rows", 0.9)], ""),
        ([("code", 0.1), ("configuration", 0.1)], ""),
    ],
)
def test_the_cause_that_was_not_measured_is_likely_if_there_is_one(
    trials: list[tuple[str, float | None]], likely: str
) -> None:
    tried = [Trial(cause, "", value, value) for cause, value in trials]
    assert likely_cause(tried) == likely


def test_rollouts_of_further_versions_count_if_two_say_too_little() -> None:
    class Known(OtherWeights):
        """Weights that the rollouts of version 3 identify."""

        def _estimate(self, checkpoint: Reference, pool: Sequence[int]) -> float | None:
            pools.append(list(pool))
            return 0.7 if 3 in pool else None

    pools: list[list[int]] = []
    other = Known(cast("Run", None), {4: [], 5: []})
    checkpoint = cast("Reference", None)
    assert other.value_of(checkpoint) is None
    other.further = lambda: iter([(3, []), (6, [])])
    pools.clear()
    assert other.value_of(checkpoint) == 0.7
    assert pools == [[4, 5], [4, 5, 3]], "no more versions than needed"


def test_a_fall_is_one_that_chance_does_not_explain() -> None:
    assert find_fall([reading(k, 0.5 + 0.02 * (k % 2)) for k in range(20)]) is None
    found = find_fall([reading(k, value) for k, value in enumerate([0.3, 0.5, 0.7, 0.69, 0.4, 0.3])])
    assert found is not None
    assert (found.good, found.bad) == (3, 4)
    assert found.before == pytest.approx(0.69)
    assert found.standard_errors > 4
    few = [reading(k, value, samples=4) for k, value in enumerate([0.75, 0.5])]
    assert find_fall(few) is None, "so few rollouts say nothing"


def test_a_slow_fall_begins_where_most_of_it_was_still_to_come() -> None:
    found = find_fall([reading(k, value, samples=60) for k, value in enumerate([0.8, 0.78, 0.72, 0.66, 0.6, 0.5])])
    assert found is not None
    assert (found.good, found.bad) == (2, 4)


@pytest.mark.parametrize("wanted", [{3}, {0, 7}, {1, 2, 6}, {3, 12}, {0, 5, 10, 15}])
def test_the_smallest_set_is_found_in_as_many_trials_as_are_said_beforehand(wanted: set[int]) -> None:
    asked = []

    def does_it(some: list[int]) -> bool:
        asked.append(some)
        return wanted <= set(some)

    assert smallest_set(range(16), does_it, 100) == (sorted(wanted), True)
    k = len(wanted)
    assert len(asked) <= 2 * k * (1 + np.log2(16 / k))
    asked.clear()
    few, proved = smallest_set(range(16), does_it, 4)
    assert wanted <= set(few)
    assert not proved
    assert len(asked) == 4


def test_a_set_that_was_never_seen_to_do_it_is_not_returned() -> None:
    """Of 4, 3 suffice and so do 2 of them, but no larger proper set that contains these two."""
    few, _ = smallest_set(range(4), lambda some: some in ([0, 1, 2], [0, 1]), 100)
    assert few in ([0, 1, 2], [0, 1], [0, 1, 2, 3])


@pytest.mark.nightly
def test_two_poisoned_groups_of_sixteen_are_the_smallest_set(tmp_path: Path) -> None:
    plant = next(plant for plant in PLANTS if plant.name == "two of sixteen groups poisoned")
    run = planted_run(tmp_path, plant, iterations=4)
    arguments = ["bisect", run.run_id, "--store", run.config.store, "--trust-store", "--json", "--budget", "60"]
    shown = CliRunner().invoke(app, arguments)
    found = json.loads(shown.stdout)
    if found["fall"] is None:
        pytest.skip("the plant does no harm with this machine's arithmetic: there is no fall to explain")
    assert (found["cause"], found["iteration"]) == ("rows", 4), found
    assert found["groups"] == ["train/3", "train/12"], found
    assert found["smallest"]
    assert found["narrowing_bound"] == 60
    assert 0 < found["narrowing_runs"] <= 60
    assert "the smallest set of 16 groups: at most 60 stage runs" in " ".join(shown.stderr.split())


def test_what_cannot_be_bisected_is_told(tmp_path: Path) -> None:
    run = planted_run(tmp_path, HEALTHY, iterations=1)
    with pytest.raises(ConfigError, match="held_out_reward, reward can be bisected"):
        bisect(run.config.store, run.run_id, "loss")
    with pytest.raises(StoreError, match="a fall takes two"):
        bisect(run.config.store, run.run_id, "reward")
