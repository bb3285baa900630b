"""Test an environment against recorded rollouts: are its answers and verdicts unchanged, and would the rollouts notice
a change.

Invariant: the corpus is the specification. A changed verdict, a changed answer and a rollout that cannot be followed
any more are findings. Nothing is random, so the same corpus and code give the same report.

The mutation score measures the corpus. A mutant is the environment's module with one change (an inverted comparison, a
number increased by one, a negated condition …) at a line that the corpus executes. It is caught if any verdict or
answer differs. Survivors show gaps of the corpus or the verifier.

    if answer == row["answer"]:   ->   if answer != row["answer"]:        caught by every rollout with a verdict
    reward = 1.0 if tidy else 0.9 ->   reward = 2.0 if tidy else 0.9      survives a corpus without a tidy rollout
"""

from __future__ import annotations

import ast
import copy
import inspect
import random
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from roundhouse.activity import run_interruptible
from roundhouse.config.models import EnvironmentConfig
from roundhouse.environments import class_of, load_any
from roundhouse.environments.base import GymnasiumEnvironment
from roundhouse.plugins.lab.replays.rollouts import Judged, judge
from roundhouse.plugins.lab.replays.verdicts import VerdictDiff, diff_of, judge_all, verdict_row
from roundhouse.rollout.clients import LocalEnvironmentClient, LocalEpisodeClient
from roundhouse.trajectories.records import Rollout

FIRST_BATCH = 2
"""Rollouts that a mutant judges before the first look at whether it is caught; twice as many before each further one."""
HANG_FACTOR, HANG_SECONDS = 20.0, 2.0
"""A mutant that takes so much longer than the environment itself, and at least so long, hangs: it is caught."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of an environment's module."""

    line: int
    change: str
    """Before and after, as source."""
    caught: bool


@dataclass(slots=True)
class EnvironmentReport:
    """Result of testing an environment with a corpus."""

    verdicts: VerdictDiff
    seconds: float
    """Wall time of judging the corpus."""
    mutants: list[Mutant] = field(default_factory=list)

    @property
    def score(self) -> float | None:
        """Return the share of the mutants that the corpus catches; None without mutants."""
        return sum(each.caught for each in self.mutants) / len(self.mutants) if self.mutants else None

    @property
    def unchanged(self) -> bool:
        """No verdict flipped and no rollout was refused."""
        return not self.verdicts.counts["flipped"] and not self.verdicts.counts["refused"]

    def as_json(self) -> dict[str, Any]:
        survivors = [asdict(each) for each in self.mutants if not each.caught]
        return {
            **self.verdicts.as_json(),
            "seconds": self.seconds,
            "mutation_score": self.score,
            "mutants": len(self.mutants),
            "survivors": survivors,
        }


def check_environment(
    rollouts: Sequence[Rollout], config: EnvironmentConfig, mutants: int = 0, seed: int = 0
) -> EnvironmentReport:
    """Hold an environment against a corpus.

    Args:
        mutants: how many are made, at most; 0: no mutation score.

    Raises:
        ConfigError: the environment cannot be loaded, or lives in a server while mutants are asked for.
    """
    start = time.perf_counter()
    report = EnvironmentReport(diff_of([verdict_row(each) for each in judge_all(rollouts, config)]), 0.0)
    report.seconds = time.perf_counter() - start
    if mutants:
        report.mutants = mutate(rollouts, config, mutants, seed)
    return report


def mutate(rollouts: Sequence[Rollout], config: EnvironmentConfig, count: int, seed: int = 0) -> list[Mutant]:
    """Mutants of the environment's module at lines that judging these rollouts executes, drawn by the seed."""
    original = load_any(config)
    module = sys.modules[class_of(config).__module__]
    source = inspect.getsource(module)
    start = time.perf_counter()
    with _executed_lines(module.__file__ or "") as lines:
        baseline = [_sense(each) for each in _judge(rollouts, original)]
    limit = max(HANG_SECONDS, HANG_FACTOR * (time.perf_counter() - start))
    sites = [number for number, (node, _) in enumerate(_sites(ast.parse(source))) if node.lineno in lines]
    mutants = []
    for number in sorted(random.Random(seed).sample(sites, min(count, len(sites)))):
        changed = ast.parse(source)
        node, change = _sites(changed)[number]
        before = _shown(node)
        change()
        caught = _caught(original, module, changed, rollouts, baseline, limit)
        mutants.append(Mutant(node.lineno, f"{before}  ->  {_shown(node)}", caught))
    return mutants


def _caught(
    original: Any,
    module: types.ModuleType,
    tree: ast.Module,
    rollouts: Sequence[Rollout],
    baseline: list[Any],
    limit: float,
) -> bool:
    names: dict[str, Any] = {
        "__name__": module.__name__,
        "__file__": module.__file__,
        "__package__": module.__package__,
    }
    mutated = copy.copy(original)
    try:
        with _time_limit(limit):
            exec(compile(ast.fix_missing_locations(tree), module.__file__ or "mutant", "exec"), names)
            mutated.__class__ = names[type(original).__name__]
            begin, size = 0, FIRST_BATCH
            while begin < len(rollouts):
                part = slice(begin, begin + size)
                if [_sense(each) for each in _judge(rollouts[part], mutated)] != baseline[part]:
                    return True
                begin, size = begin + size, 2 * size
    except Exception:  # noqa: BLE001 - whatever a mutant raises, it is noticed
        return True
    return False


def _judge(rollouts: Sequence[Rollout], environment: Any) -> list[Judged]:
    client_class = LocalEpisodeClient if isinstance(environment, GymnasiumEnvironment) else LocalEnvironmentClient

    async def work() -> list[Judged]:
        async with client_class(environment) as client:
            return [each async for each in judge(rollouts, client)]

    return run_interruptible(work())


def _sense(judged: Judged) -> tuple[Any, ...]:
    """Return the compared part of a verdict."""
    after = judged.after
    return (
        judged.outcome,
        judged.reason,
        after and (after.reward, after.status, after.reward_components, after.metrics),
    )


@contextmanager
def _executed_lines(file: str) -> Iterator[set[int]]:
    """Lines of a file that the block executes, filled while it runs."""
    lines: set[int] = set()

    def on_call(frame: types.FrameType, event: str, _: Any) -> Any:
        return on_line if frame.f_code.co_filename == file else None

    def on_line(frame: types.FrameType, event: str, _: Any) -> Any:
        lines.add(frame.f_lineno)
        return on_line

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield lines
    finally:
        sys.settrace(before)


class _Hangs(Exception):
    """A mutant does not come to an end."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """End the block by an exception at the time limit; without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise _Hangs

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}


def _sites(tree: ast.Module) -> list[tuple[Any, Callable[[], None]]]:
    """Each node within a function that can be changed, with its change, always in the same order. Conditions of loops are left
    as they are: turned, they would not end."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(inner): inner for each in functions for statement in each.body for inner in ast.walk(statement)}
    for node in list(inside.values()):
        if isinstance(node, ast.While):
            for inner in ast.walk(node.test):
                inside.pop(id(inner), None)
    return [(node, change) for node in inside.values() if (change := _change(node)) is not None]


def _shown(node: ast.AST) -> str:
    """A node's source; of a statement, its first line."""
    return ast.unparse(node).splitlines()[0]


def _change(node: ast.AST) -> Callable[[], None] | None:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        return lambda: node.ops.__setitem__(0, _COMPARED[type(node.ops[0])]())
    if isinstance(node, ast.BoolOp):
        return lambda: setattr(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    if isinstance(node, ast.BinOp) and type(node.op) in _CALCULATED:
        return lambda: setattr(node, "op", _CALCULATED[type(node.op)]())
    if isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.BoolOp):
        return lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return lambda: setattr(node, "value", not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return lambda: setattr(node, "value", node.value + 1)  # type: ignore[operator]
    return None
