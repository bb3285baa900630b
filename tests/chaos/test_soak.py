"""The soak's verdict: what grows is found, and what only wobbles is not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.soak import A_DAY, CASES, judge
from benchmarks.trend import trend

pytestmark = pytest.mark.real

SERIES = [case.name for case in CASES]


def samples(count: int = 400, **grows: Callable[[float], float]) -> list[dict[str, float]]:
    """A run of two days whose series wobble by a hundredth around a level, but those that are given."""
    rng = random.Random(1)
    found = []
    for number in range(count):
        iteration = 2 * A_DAY * number / count
        one: dict[str, float] = {"iteration": iteration, "load": 1.0}
        for case in CASES:
            level = {"memory": 5e8, "count": 30.0, "database": 1e5 * iteration, "cost": 0.4 * iteration}[case.kind]
            one[case.name] = level * (1 if case.kind in ("database", "cost") else rng.uniform(0.99, 1.01))
        one |= {name.replace("_", " "): grow(iteration) for name, grow in grows.items()}
        found.append(one)
    return found


def verdict(capsys: pytest.CaptureFixture[str], found: list[dict[str, float]]) -> tuple[int, list[str]]:
    failed = judge(found, {"store problems": 0})
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["failed"] == failed
    return failed, [line for line in lines if "GROWS" in line or "DEARER" in line]


def test_what_only_wobbles_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(capsys, samples()) == (0, [])


@pytest.mark.parametrize(
    ("name", "grow"),
    [
        ("flow_memory", lambda iteration: 5e8 + 30_000 * iteration),
        ("prefect_descriptors", lambda iteration: 30 + 0.01 * iteration),
        ("mlflow_database", lambda iteration: 20 * iteration**2),
        ("flow_CPU", lambda iteration: 0.4 * iteration + 1e-4 * iteration**2),
    ],
)
def test_what_grows_is_named(capsys: pytest.CaptureFixture[str], name: str, grow: Callable[[float], float]) -> None:
    grown: dict[str, Any] = {name: grow}
    failed, lines = verdict(capsys, samples(**grown))
    assert failed == 1
    assert lines[0].startswith(name.replace("_", " "))


def test_a_trend_says_how_sure_it_is() -> None:
    rng = random.Random(2)
    xs = [float(x) for x in range(600)]
    quiet = trend(xs, [3 * x + rng.gauss(0, 1) for x in xs])
    noisy = trend(xs, [3 * x + rng.gauss(0, 300) for x in xs])
    assert quiet.slope == pytest.approx(3, abs=quiet.margin)
    assert quiet.bend == pytest.approx(1, abs=0.01)
    assert not quiet.is_flat
    assert noisy.margin > 10 * quiet.margin
    assert trend(xs, [rng.gauss(7, 1) for _ in xs]).is_flat


def test_too_few_samples_are_no_trend() -> None:
    with pytest.raises(ValueError, match="too few"):
        trend([1.0, 2.0], [1.0, 2.0])


def test_a_run_too_short_for_trends_is_judged_by_its_facts_alone(capsys: pytest.CaptureFixture[str]) -> None:
    few = samples(count=3)
    assert judge(few, {"exit code": 0, "store problems": 0}) == 0
    assert "let it run longer" in capsys.readouterr().out
    assert judge(few, {"exit code": 70, "store problems": 0}) == 1
    assert judge([], {"exit code": 0, "store problems": 2}) == 1
