"""The bottleneck of an iteration and the gain of a change, from recorded durations with known causes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from roundhouse import plugins
from roundhouse.cli import app
from roundhouse.cli.training import print_symptoms
from roundhouse.config.loading import parse_config
from roundhouse.errors import StoreError
from roundhouse.plugins.lab.simulation.doctor import diagnose, load_slope
from roundhouse.plugins.lab.simulation.symptoms import symptoms
from roundhouse.store import stage as stages
from roundhouse.store.run import Run, open_run
from roundhouse.trajectories.records import FailureKind, Rollout, Status, Turn
from roundhouse.trajectories.schemas import rollouts_table, turns_table

GROUPS, SIZE, TOKENS = 4, 4, 50


def world(
    place: Path,
    *,
    slots: int,
    replicas: int = 1,
    train: float = 2.0,
    storage: float = 0.5,
    refit: float = 0.5,
    load: float = 0.0,
    waits: float | None = None,
    iterations: int = 5,
    **keys: Any,
) -> Run:
    """Record a run: the engine takes `0.01 (1 + load · others)` seconds per token, the other stages their given durations.

    Args:
        waits: recorded seconds per iteration between stages, waiting for the store; None: not recorded, as in old runs.
    """
    config = {
        "run_id": "r",
        "store": str(place),
        "iterations": iterations,
        "rollout": {"prompts_per_iteration": GROUPS, "group_size": SIZE, "concurrency": slots * replicas},
        "generation": {"replicas": replicas},
        "train": {"minibatches": 1},
    }
    run = open_run(parse_config(config | keys))
    draw, clock = np.random.default_rng(1), 1000.0
    for k in range(1, iterations + 1):
        clock = committed(run, k, "refit", clock, refit)
        rollouts, window = played(draw, clock, slots, replicas, load)
        clock = committed(run, k, "collect", clock, window, {"time/rollouts": window}, rollouts)
        clock = committed(run, k, "validate", clock, 0.1)
        clock = committed(run, k, "train", clock, train + storage / 2, {"time/compute": train})
        clock = committed(run, k, "checkpoint", clock, storage / 2)
        clock += waits or 0.0
        recorded = {"time/iteration": refit + window + 0.1 + train + storage + (waits or 0.0)}
        committed(run, k, "report", clock, 0.0, recorded | ({} if waits is None else {"time/store": waits}))
    return run


def played(
    draw: np.random.Generator, clock: float, slots: int, replicas: int, load: float
) -> tuple[list[Rollout], float]:
    """Rollouts in their slots, advanced in small steps of time, and how long all of them take."""
    left = (TOKENS * draw.lognormal(0, 0.6, GROUPS * SIZE)).astype(int) + 5
    work, began, ended = left.astype(float), np.full(len(left), np.nan), np.full(len(left), np.nan)
    waiting, running, now, step = list(range(len(left))), [list[int]() for _ in range(replicas)], 0.0, 0.002
    while waiting or any(running):
        for own in running:
            while waiting and len(own) < slots:
                own.append(waiting.pop(0))
                began[own[-1]] = now
        now += step
        for own in running:
            for each in list(own):
                work[each] -= step / (0.01 * (1 + load * (len(own) - 1)))
                if work[each] <= 0:
                    ended[each] = now
                    own.remove(each)
    made = []
    for i, tokens in enumerate(left.tolist()):
        turn = Turn(0, None, [1], 1, "d", [2] * tokens, [-0.1] * tokens, 0, "stop", 0.1)
        lasted = float(ended[i] - began[i])
        made.append(
            Rollout(
                f"g{i // SIZE}", i % SIZE, {}, "e", Status.COMPLETED, reward=1.0, turns=[turn], seconds=lasted,
                generation_seconds=lasted, started_at=clock + float(began[i]),
            )
        )  # fmt: skip
    return made, now


def committed(
    run: Run,
    k: int,
    kind: str,
    clock: float,
    lasted: float,
    metrics: dict[str, float] | None = None,
    rollouts: Any = None,
) -> float:
    """A stage that took so long; when it ended."""
    stage = run.checkpoint(k) if kind == "checkpoint" else run.stage(k, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages.time, "time", lambda: clock)
        attempt = run.begin(stage, policy_version=k)
        if rollouts is not None:
            attempt.write_table("turns", turns_table(rollouts))
            attempt.write_table("rollouts", rollouts_table(rollouts))
        patch.setattr(stages.time, "time", lambda: clock + lasted)
        attempt.commit(metrics=metrics or {})
    return clock + lasted


def mean_wall(run: Run) -> float:
    return diagnose(run, since=1).seconds


PAIRS = {
    "replicas, a slot each": ({"slots": 16, "load": 0.1}, {"slots": 8, "replicas": 2, "load": 0.1}, "replicas"),
    "replicas, queued": ({"slots": 4, "load": 0.3}, {"slots": 2, "replicas": 2, "load": 0.3}, "replicas"),
    "concurrency, idle engine": ({"slots": 4}, {"slots": 8}, "concurrency"),
    "concurrency, loaded engine": ({"slots": 4, "load": 0.15}, {"slots": 8, "load": 0.15}, "concurrency"),
    "concurrency, slots that are not always full": (
        {"slots": 8, "load": 0.25},
        {"slots": 16, "load": 0.25},
        "concurrency",
    ),
    "trainer ranks": ({"slots": 16, "train": 6.0}, {"slots": 16, "train": 6.0 / 2 / 0.85}, "trainer ranks"),
    "storage": ({"slots": 16, "storage": 4.0}, {"slots": 16, "storage": 4.0 / 2 / 0.85}, "storage"),
}


@pytest.mark.real
@pytest.mark.parametrize("name", PAIRS)
def test_the_predicted_iteration_is_that_of_the_run_with_the_change(name: str, tmp_path: Path) -> None:
    before, after, change = PAIRS[name]
    found = {each.change: each for each in diagnose(world(tmp_path / "before", **before), since=1).changes}
    real = mean_wall(world(tmp_path / "after", **after))
    assert found[change].seconds == pytest.approx(real, rel=0.1)


def test_what_binds_is_named_and_its_remedy_is_the_best(tmp_path: Path) -> None:
    trained = diagnose(world(tmp_path / "trained", slots=16, train=9.0), since=1)
    assert trained.binds == "train"
    assert trained.changes[0].change == "trainer ranks"
    generated = diagnose(world(tmp_path / "generated", slots=2, train=0.2), since=1)
    assert generated.binds == "generation"
    assert generated.changes[0].change == "concurrency"
    stored = diagnose(world(tmp_path / "stored", slots=16, storage=9.0, refit=3.0, train=0.2), since=1)
    assert stored.binds == "storage"
    assert stored.changes[0].change == "storage"


def test_the_parts_of_an_iteration_add_up_and_the_simulation_is_as_long(tmp_path: Path) -> None:
    found = diagnose(world(tmp_path, slots=4), since=1)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert found.simulated == pytest.approx(found.seconds, rel=1e-6)
    assert all(each.error > 0 for each in found.changes)


def test_waits_for_the_store_between_stages_are_storage(tmp_path: Path) -> None:
    found = diagnose(world(tmp_path / "before", slots=16, storage=0.0, refit=0.0, waits=6.0), since=1)
    assert found.binds == "storage"
    assert found.parts["storage"] == pytest.approx(6.0, abs=0.05)
    [storage] = [each for each in found.changes if each.change == "storage"]
    real = mean_wall(world(tmp_path / "after", slots=16, storage=0.0, refit=0.0, waits=3.0))
    assert storage.seconds == pytest.approx(real, rel=0.02)


def test_the_effect_of_load_is_read_from_the_rows_where_there_is_one(tmp_path: Path) -> None:
    slope, error = load_slope(world(tmp_path / "loaded", slots=16, load=0.1), range(1, 6))
    assert slope == pytest.approx(0.1, rel=0.25)
    assert 0 <= error < slope / 2
    assert load_slope(world(tmp_path / "free", slots=16), range(1, 6))[0] < 0.02


def test_what_cannot_be_diagnosed_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="a diagnosis takes two iterations"):
        diagnose(world(tmp_path / "one", slots=4, iterations=1))
    with pytest.raises(StoreError, match="its stages overlap"):
        diagnose(world(tmp_path / "ahead", slots=4, asynchrony={"mode": "batch-async", "staleness": 1}))


def test_the_command_prints_the_parts_and_the_changes(tmp_path: Path) -> None:
    world(tmp_path, slots=4)
    shown = CliRunner().invoke(app, ["runs", "doctor", "r", "--store", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "binds:" in shown.stdout
    found = json.loads(CliRunner().invoke(app, ["runs", "doctor", "r", "--store", str(tmp_path), "--json"]).stdout)
    gains = [each["gain"] for each in found["changes"]]
    assert gains == sorted(gains, reverse=True)


def sick(place: Path, rollouts: list[Rollout], metrics: dict[str, float] | None = None, **keys: Any) -> Run:
    """A run with one iteration on record, of these rollouts."""
    run = open_run(parse_config({"run_id": "r", "store": str(place), "iterations": 1} | keys))
    committed(run, 1, "collect", 1000.0, 10.0, {}, rollouts)
    committed(run, 1, "validate", 1010.0, 0.1, metrics)
    return run


def member(sample: int, /, said: str = "a word", **changes: Any) -> Rollout:
    turn = Turn(0, None, [1], 1, "d", [2], [-0.1], 0, "stop", 0.1)
    made = Rollout("g", sample, {}, "e", Status.COMPLETED, reward=float(sample % 2), turns=[turn], seconds=1.0)
    made.started_at, made.items = 1000.0, [{"role": "assistant", "content": said}]
    return replace(made, **changes)


TOOLS = {"responses_create_params": {"tools": [{"type": "function", "name": "add"}]}}
CALL = {"type": "function_call", "name": "add", "arguments": "{}"}
FAILED = {
    "status": Status.FAILED,
    "reward": None,
    "failure_kind": FailureKind.INFRA,
    "failure_code": "engine_unreachable",
}


@pytest.mark.parametrize(
    ("changes", "metrics", "symptom", "cause"),
    [
        ({}, {}, None, None),
        (FAILED | {"failure_detail": "refused"}, {}, "fail with engine_unreachable", "no HTTP server"),
        (
            FAILED | {"failure_kind": FailureKind.DATA, "failure_code": "verifier_failed"},
            {},
            "fail with verifier_failed",
            "its verifier or the task rows are at fault",
        ),
        (
            {"task": TOOLS, "said": '<tool_call>\n{"name": "add"'},
            {},
            "tool calls are not parsed",
            "tool_call_parser is",
        ),
        ({"task": TOOLS, "items": [CALL, {"role": "assistant", "content": "<tool_call>"}]}, {}, None, None),
        ({}, {"validate/token_breaks/merge": 3.0}, "token discontinuity", "merge"),
        ({"reward": 0.0}, {}, "every reward is 0", "verifier returns its default"),
        ({"reward": 0.0, "status": Status.TRUNCATED}, {}, "every reward is 0", "cut off"),
        ({"status": Status.TRUNCATED}, {}, "many rollouts are truncated", "cut off by a limit"),
        ({"environment_seconds": 0.9}, {}, "slow rollouts", "latency"),
    ],
)
def test_each_planted_symptom_is_told_with_its_cause_and_a_remedy_and_a_sound_run_has_none(
    tmp_path: Path, changes: dict[str, Any], metrics: dict[str, float], symptom: str | None, cause: str | None
) -> None:
    found = symptoms(sick(tmp_path, [member(sample, **changes) for sample in range(4)], metrics))
    assert [each.symptom for each in found if symptom is None or symptom not in each.symptom] == []
    for each in found:
        assert cause is not None
        assert cause in each.cause
        assert each.evidence
        assert each.remedy
    assert bool(found) is (symptom is not None)


def test_failures_that_depend_on_the_tokens_are_a_symptom(tmp_path: Path) -> None:
    long = Turn(0, None, [1], 1, "d", [2] * 9, [-0.1] * 9, 0, "stop", 0.1)
    data = FAILED | {"failure_kind": FailureKind.DATA, "failure_code": "verifier_failed", "turns": [long]}
    rollouts = [member(sample, **(data if sample < 8 else {})) for sample in range(32)]
    assert "failures depend on tokens" in [each.symptom for each in symptoms(sick(tmp_path, rollouts))]


def test_few_long_rollouts_that_an_iteration_waits_for_are_slow_for_want_of_parallelism(tmp_path: Path) -> None:
    rollouts = [member(sample, seconds=40.0 if sample == 0 else 1.0) for sample in range(16)]
    [found] = symptoms(sick(tmp_path, rollouts))
    assert "low parallelism" in found.cause
    assert "of 16 rollouts in flight" in found.evidence


def test_the_command_tells_symptoms_of_a_run_whose_times_it_cannot_judge(tmp_path: Path) -> None:
    sick(tmp_path, [member(sample, reward=0.0) for sample in range(4)])
    shown = CliRunner().invoke(app, ["runs", "doctor", "r", "--store", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "every reward is 0" in shown.stdout
    assert "no reported iteration with durations" in shown.stdout


def test_a_run_prints_its_symptoms_itself_and_a_sound_one_or_a_core_without_the_plugin_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_symptoms(sick(tmp_path / "sound", [member(sample) for sample in range(4)]))
    assert capsys.readouterr().out == ""
    cut = sick(tmp_path / "cut", [member(sample, reward=0.0, status=Status.TRUNCATED) for sample in range(4)])
    print_symptoms(cut)
    assert "→ raise generation.sampling.max_new_tokens" in capsys.readouterr().out
    monkeypatch.setattr(plugins, "__path__", [])
    print_symptoms(cut)
    assert capsys.readouterr().out == ""
