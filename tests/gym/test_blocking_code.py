"""Code of the user's own that blocks: its rollout ends by its limit, the others are not touched."""

import signal
import sys

import psutil
import pytest

from roundhouse.config.environments import CustomEnvironment
from roundhouse.config.models import EnvironmentConfig
from roundhouse.config.rubrics import Rubric
from roundhouse.rollout import environment_process
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import LocalEnvironmentClient, LocalEpisodeClient, open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.trajectories.records import FailureKind, Rollout, Status
from tests import fork_server
from tests.gym.blocking_world import Blocking, Later, Unordered, Unshowable
from tests.gym.collecting import collect
from tests.gym.counter import Counter, counter_row
from tests.gym.playground import (
    SAMPLING,
    ScriptedPolicy,
    anything,
    by_turn,
    calls,
    comparable,
    rollout_config,
    says,
    spec_of,
)
from tests.gym.worlds import Mountain, climb_row

pytestmark = pytest.mark.real

WORLD = "tests.gym.blocking_world"
ROWS = [{"how": how, "prompt": "x", "task_id": how or "fine"} for how in ("", "regex", "sleep")]
POLICY = ScriptedPolicy(by_turn(calls(("wait", {})), says("done")))


def hosted(target: type) -> CustomEnvironment:
    return CustomEnvironment(kind="custom", target=f"{target.__module__}:{target.__name__}")


def environment_processes() -> list[int]:
    children = psutil.Process().children(recursive=True)
    children = [each for each in children if each.status() != psutil.STATUS_ZOMBIE]
    return [each.pid for each in children if "roundhouse.environments.host" in " ".join(each.cmdline())]


async def play(rows: list[tuple[str, str]], **limits: float) -> dict[str, list[Rollout]]:
    """Two rollouts of each row (how, where) and four that do not block, by the name of their task."""
    world = Blocking()
    tasks = [world.row(how, where) for how, where in rows] + [world.row(""), world.row("", "tool")]
    config = rollout_config(retry={"attempts": 1}, **limits)
    async with open_environment(hosted(Blocking)) as environment:
        rollouts = await collect(plan_rollouts(tasks, 2, 0, 0), POLICY, environment, config, SAMPLING)
    assert not environment_processes()
    found: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(rollout.task["task_id"], []).append(rollout)
    for name in ("verify-fine", "tool-fine"):
        assert [each.reward for each in found.pop(name)] == [1.0, 1.0]
    return found


@pytest.mark.parametrize(("how", "where", "limit"), [("sleep", "verify", "rollout"), ("loop", "tool", "tool")])
async def test_a_call_that_blocks_a_thread_ends_by_its_limit_and_no_other_rollout_fails(how, where, limit):
    key = "timeout_seconds" if limit == "rollout" else "tool_timeout_seconds"
    found = await play([(how, where)], **{key: 5.0})
    for rollout in found[f"{where}-{how}"]:
        assert rollout.failure_code == f"{limit}_timeout"
        assert "stands at" in rollout.failure_detail
        assert "blocking_world.py:" in rollout.failure_detail
        assert "in block" in rollout.failure_detail


async def costs_its_rollout_alone(
    section: EnvironmentConfig, monkeypatch: pytest.MonkeyPatch, seconds: float = 16.0
) -> None:
    """Play the rows of `ROWS` in an environment whose judge or player blocks as they ask."""
    monkeypatch.setattr(environment_process, "HELD_SECONDS", 1.0)
    config = rollout_config(retry={"attempts": 1}, timeout_seconds=seconds)  # a new process starts in this time
    async with open_environment(section) as environment:
        specs = plan_rollouts(environment.tasks("train"), 1, 0, 0)
        rollouts = await collect(specs, ScriptedPolicy(by_turn(says("done"))), environment, config, SAMPLING)
    assert not environment_processes()
    codes = {each.group_id: each.failure_code for each in rollouts}
    assert codes == {"fine": "", "regex": "environment_blocked", "sleep": "rollout_timeout"}
    assert [each.reward for each in rollouts if each.group_id == "fine"] == [1.0]
    assert all("blocking_world.py:" in each.failure_detail for each in rollouts if each.group_id != "fine")


async def test_a_criterion_that_blocks_costs_its_rollout_alone(monkeypatch: pytest.MonkeyPatch):
    rubric = Rubric.model_validate({"criteria": {"mine": {"function": f"{WORLD}:score"}}, "own_weight": 0})
    section = CustomEnvironment(kind="custom", target=f"{WORLD}:Plain", rubric=rubric)
    await costs_its_rollout_alone(section, monkeypatch)


async def test_a_call_that_holds_the_interpreters_lock_costs_its_rollout_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment_process, "HELD_SECONDS", 1.0)
    found = await play([("regex", "tool")])
    for rollouts in found.values():
        for rollout in rollouts:
            assert (rollout.failure_code, rollout.attempt) == ("environment_blocked", 1)
            assert "blocking_world.py:" in rollout.failure_detail


async def test_code_that_a_call_left_behind_and_that_holds_the_lock_counts_as_an_attempt(
    monkeypatch: pytest.MonkeyPatch,
):
    """The owner of the code is unknown: without a limit of attempts, its rollout would restart endlessly."""
    monkeypatch.setattr(environment_process, "HELD_SECONDS", 1.0)
    [spec] = plan_rollouts([Later().row("")], 1, 0, 0)
    config = rollout_config(retry={"attempts": 2}, timeout_seconds=30.0)
    async with open_environment(hosted(Later)) as environment:
        [rollout] = await collect([spec], POLICY, environment, config, SAMPLING)
    assert (rollout.failure_code, rollout.attempt) == ("environment_lost", 2)


def test_code_in_the_collector_that_holds_the_lock_ends_the_process_with_its_place():
    code = "from roundhouse.user_code import lock_limit\nfrom tests.gym.blocking_world import block\n"
    code += "with lock_limit(1.0):\n    block('regex')\n"
    ended = fork_server.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGPROF
    assert "blocking_world.py" in ended.stderr
    assert "in block" in ended.stderr


async def test_an_error_that_cannot_be_shown_fails_its_rollout():
    [spec] = plan_rollouts([Blocking().row("")], 1, 0, 0)
    config = rollout_config(retry={"attempts": 1}, timeout_seconds=20.0)
    async with open_environment(hosted(Unshowable)) as environment:
        rollout = await run_rollout(spec, POLICY, environment, config, SAMPLING)
    assert rollout.failure_code == "verifier_failed"
    assert "raised Mute (to show it raises ValueError)" in rollout.failure_detail


async def test_parallel_calls_that_block_are_named_too():
    world, config = Blocking(), rollout_config(retry={"attempts": 1}, timeout_seconds=2.0, parallel_tool_calls=True)
    policy = ScriptedPolicy(by_turn(calls(("wait", {}), ("wait", {})), says("done")))
    [spec] = plan_rollouts([world.row("sleep", "tool")], 1, 0, 0)
    async with open_environment(hosted(Unordered)) as environment:
        rollout = await run_rollout(spec, policy, environment, config, SAMPLING)
    assert rollout.failure_code == "rollout_timeout"
    assert "blocking_world.py:" in rollout.failure_detail


async def test_a_tool_that_quits_or_is_cancelled_from_within_is_a_failure_of_its_code():
    found = await play([("quit", "tool"), ("cancel", "tool")])
    for how, error in (("quit", "SystemExit(3)"), ("cancel", "CancelledError()")):
        for rollout in found[f"tool-{how}"]:
            assert (rollout.failure_kind, rollout.failure_code) == (FailureKind.DATA, "step_failed")
            assert f"call_tool raised {error}" in rollout.failure_detail


async def test_code_that_ends_its_process_costs_its_rollout_alone():
    found = await play([("exit", "verify")])
    assert [each.failure_code for each in found["verify-exit"]] == ["environment_lost"] * 2
    assert "exit status 3" in found["verify-exit"][0].failure_detail


async def test_a_process_with_too_many_stuck_threads_gets_no_more_sessions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment_process, "MOST_ABANDONED", 1)
    config = rollout_config(retry={"attempts": 1}, tool_timeout_seconds=2.0)
    async with open_environment(hosted(Blocking)) as environment:
        first = environment_processes()
        await run_rollout(spec_of(Blocking().row("sleep", "tool")), POLICY, environment, config, SAMPLING)
        rollout = await run_rollout(spec_of(Blocking().row("")), POLICY, environment, config, SAMPLING)
        assert rollout.status is Status.COMPLETED
        second = environment_processes()
    assert len(first) == len(second) == 1
    assert first != second


async def test_rollouts_in_a_process_of_its_own_are_those_in_this_process():
    rows = [counter_row(f"task {index}") for index in range(8)]
    rows += [counter_row("x", verdict=kind) for kind in ("mask", "raises", "nan", "text", "infra")]
    rows += [counter_row("y", seed=kind) for kind in ("raises", "infra")]
    specs, config = plan_rollouts(rows, 2, seed=1, iteration=0), rollout_config(max_turns=4, retry={"attempts": 1})
    local = await collect(specs, ScriptedPolicy(anything), LocalEnvironmentClient(Counter()), config, SAMPLING)
    async with open_environment(hosted(Counter)) as environment:
        apart = await collect(specs, ScriptedPolicy(anything), environment, config, SAMPLING)
    assert [comparable(rollout) for rollout in local] == [comparable(rollout) for rollout in apart]


async def test_episodes_in_a_process_of_its_own_are_those_in_this_process():
    rows = [climb_row(f"climb {plan}", plan=plan) for plan in ("", "silent", "raises", "nan")]
    specs, config = plan_rollouts(rows, 1, seed=1, iteration=0), rollout_config(max_turns=4, retry={"attempts": 1})
    policy = ScriptedPolicy(by_turn(calls(("look", {})), says("1"), says("2")))
    local = await collect(specs, policy, LocalEpisodeClient(Mountain()), config, SAMPLING)
    async with open_environment(hosted(Mountain)) as environment:
        apart = await collect(specs, policy, environment, config, SAMPLING)
    assert [comparable(rollout) for rollout in local] == [comparable(rollout) for rollout in apart]
