from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.collection.controller import TrainingStarted, replay
from roundhouse.errors import ConfigError
from roundhouse.plugins.lab.simulation.comparison import compare, makespan, variants
from roundhouse.plugins.lab.simulation.run import SimulatedReplica, Simulation, simulate
from roundhouse.plugins.lab.simulation.scenario import EngineScenario, Scenario, parse_scenario

FAULTS = {"rollout": 0.05, "transfer": 0.1, "training": 0.1, "replica_hours": 2.0, "replica_return_seconds": 300}


def scenario(mode="sync", staleness=0, asynchrony=None, **settings) -> Scenario:
    tree = {"iterations": 20, "groups": 8, "group_size": 4, "engine": {"replicas": 4, "slots": 8}}
    return parse_scenario(
        tree | settings | {"asynchrony": {"mode": mode, "staleness": staleness, **(asynchrony or {})}}
    )


def constant(value: float) -> dict:
    return {"kind": "constant", "value": value}


def test_a_synchronous_run_takes_what_pencil_and_paper_say():
    outcome = simulate(
        scenario(
            rollout=constant(10), trainer={"seconds": constant(7)}, engine={"refit_seconds": constant(2), "slots": 4}
        )
    )
    # 8 replicas of 4 slots take all 32 rollouts at once: refit, rollouts, train, one after the other
    assert outcome.seconds == pytest.approx(20 * (2 + 10 + 7))
    assert outcome.trainer_wait == pytest.approx(12 / 19)
    assert outcome.engine_idle == pytest.approx(9 / 19)


def test_an_asynchronous_run_is_as_fast_as_its_slower_side():
    engine = {"refit_seconds": constant(0), "slots": 4}
    for generation, training in ((10, 3), (3, 10)):
        outcome = simulate(
            scenario(
                "batch-async",
                2,
                iterations=200,
                rollout=constant(generation),
                trainer={"seconds": constant(training)},
                engine=engine,
            )
        )
        assert outcome.seconds / 200 == pytest.approx(10, rel=0.02)


def test_rollouts_of_a_full_replica_advance_as_its_speed_under_load_says():
    replica = SimulatedReplica("a", EngineScenario(slots=2, step_seconds=1.0, step_seconds_per_rollout=0.5), version=0)
    replica.begin(0.0, (0, 0), 1, 10)
    assert replica.next_end(0.0) == 15
    replica.begin(3.0, (0, 1), 1, 10)  # 2 units are done; the other 8 take 2 seconds each
    assert replica.next_end(3.0) == pytest.approx(19)
    assert replica.end(19.0)[0] == (0, 0)
    replica.pause(19.0)
    assert replica.next_end(25.0) is None
    replica.resume(25.0, 1)
    assert replica.next_end(25.0) == pytest.approx(28)
    key, slot = replica.end(28.0)
    assert (key, slot.versions) == ((0, 1), [0, 1])


@pytest.mark.parametrize("faults", [{}, FAULTS], ids=["", "faults"])
def test_staleness_zero_is_sync_event_for_event(faults):
    settings = {"faults": faults, "evaluate_every": 3}
    sync = simulate(scenario(**settings), keep_journal=True)
    other = simulate(scenario("batch-async", 0, **settings), keep_journal=True)
    assert other.journal == sync.journal
    assert other.ended_at == sync.ended_at


@pytest.mark.parametrize(
    ("mode", "staleness", "asynchrony"),
    [
        ("sync", 0, {}),
        ("batch-async", 1, {}),
        ("batch-async", 2, {"refit": "drain"}),
        ("fully-async", 3, {}),
        ("windowed", 3, {"window": 12}),
    ],
)
def test_under_faults_the_bound_holds_and_every_rollout_is_trained_on_or_on_record_as_failed(
    mode, staleness, asynchrony
):
    plan = scenario(mode, staleness, asynchrony, iterations=60, faults=FAULTS, evaluate_every=7)
    outcome = simulate(plan, keep_journal=True)  # it raises itself when a batch is over the bound or not whole
    assert outcome.ages.total() + outcome.failed == 60 * 8 * 4
    assert max(outcome.ages) <= staleness
    assert {"failed", "transfer failed", "replica lost"} == set(outcome.discarded)
    names = [f"replica-{number:04d}" for number in range(4)]
    again = replay(Simulation(plan).terms, names, outcome.journal)
    assert again.finished


def test_long_rollouts_are_trained_on_as_often_as_short_ones():
    """A trainer that takes the first ready rollouts would see long ones too rarely or too late."""
    journal = simulate(scenario("batch-async", 3, iterations=40), keep_journal=True).journal
    trained = {each.iteration: list(each.groups) for each in journal if isinstance(each, TrainingStarted)}
    assert trained == {k: list(range(8 * (k - 1), 8 * k)) for k in range(1, 41)}


def test_equal_scenarios_have_equal_outcomes_and_another_seed_has_not():
    one, same = simulate(scenario("batch-async", 1, faults=FAULTS)), simulate(scenario("batch-async", 1, faults=FAULTS))
    assert one.ended_at == same.ended_at
    assert simulate(scenario("batch-async", 1, faults=FAULTS, seed=1)).ended_at != one.ended_at


def test_the_figures_of_log_normal_rollouts():
    """sigma 1, a slot for each rollout, training and refit short: the case that the figures of the issue are about."""
    tree = {
        "iterations": 40,
        "groups": 32,
        "group_size": 8,
        "rollout": {"kind": "log-normal", "median": 60, "sigma": 1.0},
        "trainer": {"seconds": constant(60)},
    }
    rows = compare(list(variants(tree, ["batch-async"], [1, 4], [])))
    assert rows[1].speedup >= 1.6
    assert rows[2].speedup >= 2.2
    assert max(rows[1].ages) == 1
    assert max(rows[2].ages) == 4


def test_what_cannot_be_simulated_is_told():
    with pytest.raises(ConfigError, match=r"engine\.replicas: .*given: 0"):
        parse_scenario({"engine": {"replicas": 0}})
    with pytest.raises(ConfigError, match="mode sync trains on nothing older"):
        parse_scenario({"asynchrony": {"staleness": 2}})


def test_makespan_of_rollouts_in_slots():
    assert makespan([3, 1, 1, 2], 2) == 4
    assert makespan([], 4) == 0


def test_the_command_compares_and_writes_json(tmp_path):
    file = tmp_path / "scenario.yaml"
    file.write_text("iterations: 5\ngroups: 4\nengine: {slots: 4}\n")
    options = ["--config", str(file), "--mode", "batch-async", "--mode", "fully-async", "--staleness", "1", "--json"]
    result = CliRunner().invoke(
        app, ["simulate", *options, "--replicas", "2", "--replicas", "4", "--set", "group_size=2"]
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [(row["mode"], row["replicas"]) for row in rows] == [
        (mode, replicas) for replicas in (2, 4) for mode in ("sync", "batch-async", "fully-async")
    ]
    assert sum(rows[1]["ages"].values()) == pytest.approx(1)
    table = CliRunner().invoke(app, ["simulate", *options[:-1]])
    assert table.exit_code == 0
    assert "age of the trained rollouts" in table.stdout
