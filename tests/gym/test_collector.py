"""The rollout engine: order, bounds, retries, outages, cancellation."""

import asyncio
from typing import Any

import pytest

from roundhouse.config.models import CalculatorEnvironment, RetryPolicy
from roundhouse.generation.protocol import EngineRejected, EngineUnreachable
from roundhouse.rollout.clients import LocalEnvironmentClient, open_environment
from roundhouse.rollout.plan import ReorderError, plan_rollouts, reorder
from roundhouse.rollout.protocol import retry_delay
from roundhouse.trajectories.records import FailureKind, Ledger, Rollout, Status
from tests.gym.collecting import collect
from tests.gym.counter import Counter, counter_row
from tests.gym.playground import SAMPLING, Reply, ScriptedPolicy, by_turn, calls, rollout_config, says, turns_of


def specs_of(tasks: int, group_size: int = 1):
    return plan_rollouts([counter_row(f"task {index}") for index in range(tasks)], group_size, seed=1, iteration=0)


async def run(policy: ScriptedPolicy, tasks: int = 8, on_rollout: Any = None, **config: Any) -> list[Rollout]:
    environment = LocalEnvironmentClient(Counter())
    return await collect(specs_of(tasks), policy, environment, rollout_config(**config), SAMPLING, on_rollout)


def uneven(seed: int) -> float:
    return 0.0005 * (seed % 40)


async def test_rollouts_are_handed_over_as_they_complete_and_returned_in_the_plans_order():
    completed: list[str] = []
    policy = ScriptedPolicy(by_turn(calls(("add", {"n": 1})), says("1")), seconds=uneven)
    rollouts = await run(
        policy, tasks=30, concurrency=30, on_rollout=lambda rollout: completed.append(rollout.rollout_id)
    )
    planned = [spec.rollout_id for spec in specs_of(30)]
    assert [rollout.rollout_id for rollout in rollouts] == planned
    assert sorted(completed) == sorted(planned)
    assert completed != planned


@pytest.mark.parametrize("concurrency", [1, 3, 100])
async def test_the_result_does_not_depend_on_the_concurrency_which_is_never_exceeded(concurrency: int):
    policy = ScriptedPolicy(by_turn(calls(("add", {"n": 1})), says("1")), seconds=uneven)
    rollouts = await run(policy, tasks=12, concurrency=concurrency)
    assert policy.busiest == min(concurrency, 12)
    assert [(rollout.seed, rollout.items, rollout.reward) for rollout in rollouts] == [
        (rollout.seed, rollout.items, rollout.reward) for rollout in await run(ScriptedPolicy(policy.script), tasks=12)
    ]


async def test_work_that_has_not_begun_does_not_exist_yet():
    policy = ScriptedPolicy(by_turn(says("x")), seconds=0.01)
    before = len(asyncio.all_tasks())
    seen: list[int] = []
    await run(policy, tasks=200, concurrency=5, on_rollout=lambda _: seen.append(len(asyncio.all_tasks())))
    assert max(seen) <= before + 5


async def test_an_infrastructure_failure_is_retried_with_the_same_seeds_until_it_passes():
    failures = {"left": 2}

    def script(messages: list[dict[str, Any]], seed: int) -> Reply:
        if turns_of(messages) == 1 and failures["left"]:
            failures["left"] -= 1
            return EngineUnreachable("connection refused")
        return by_turn(calls(("add", {"n": 2})), says("2"))(messages, seed)

    policy = ScriptedPolicy(script)
    (rollout,) = await run(policy, tasks=1)
    assert (rollout.status, rollout.attempt, rollout.reward) == (Status.COMPLETED, 3, pytest.approx(0.2))
    assert len(rollout.turns) == 2, "nothing of the failed attempts is left in it"
    assert policy.seeds == policy.seeds[:2] * 3


async def test_an_unreachable_engine_is_retried_and_then_a_typed_failure():
    policy = ScriptedPolicy(by_turn(EngineUnreachable("connection refused")))
    (rollout,) = await run(policy, tasks=1)
    assert (rollout.status, rollout.failure_kind) == (Status.FAILED, FailureKind.INFRA)
    assert (rollout.failure_code, rollout.attempt, rollout.reward) == ("engine_unreachable", 3, None)
    assert len(policy.seeds) == 3


async def test_a_data_failure_is_not_retried_and_costs_no_other_rollout():
    def script(messages: list[dict[str, Any]], seed: int) -> Reply:
        return EngineRejected("no") if seed % 3 == 0 else says("x")

    policy = ScriptedPolicy(script)
    rollouts = await run(policy, tasks=30)
    failed = [rollout for rollout in rollouts if rollout.status is Status.FAILED]
    assert failed
    assert {rollout.attempt for rollout in failed} == {1}
    assert len(policy.seeds) == 30
    assert Ledger.from_rollouts(rollouts, requested=30).failures == {"engine_rejected": len(failed)}


async def test_an_engine_that_is_gone_for_all_ends_in_failures_without_trying_each():
    policy = ScriptedPolicy(by_turn(EngineUnreachable("connection refused")))
    rollouts = await run(policy, tasks=500, concurrency=8)
    assert Ledger.from_rollouts(rollouts, requested=500).failures == {"engine_unreachable": 500}
    assert len(policy.seeds) <= 3 * 16
    assert rollouts[-1].failure_detail.startswith("Not tried: 8 rollouts before it failed in a row. ")


async def test_an_engine_that_comes_back_is_no_outage():
    answered = {"calls": 0}

    def script(messages: list[dict[str, Any]], seed: int) -> Reply:
        answered["calls"] += 1
        return EngineUnreachable("restarting") if answered["calls"] <= 12 else says("x")

    rollouts = await run(ScriptedPolicy(script), tasks=100, concurrency=8)
    assert {rollout.status for rollout in rollouts} == {Status.COMPLETED}


async def test_cancelling_leaves_no_task_running():
    policy = ScriptedPolicy(by_turn(calls(("hang", {}))))
    before = asyncio.all_tasks()
    task = asyncio.create_task(run(policy, tasks=20, concurrency=10))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before


async def test_an_error_where_rollouts_are_handed_over_ends_the_collection():
    def disk_full(rollout: Rollout) -> None:
        raise OSError(28, "No space left on device")

    before = asyncio.all_tasks()
    with pytest.raises(OSError, match="No space left"):
        await run(ScriptedPolicy(by_turn(says("x")), seconds=0.01), tasks=50, on_rollout=disk_full)
    assert asyncio.all_tasks() == before


async def test_collecting_nothing_gives_nothing():
    assert await run(ScriptedPolicy(by_turn(says("x"))), tasks=0) == []


def test_delays_grow_are_bounded_and_differ_between_rollouts():
    retry = RetryPolicy(attempts=9, first_delay_seconds=1, factor=2, max_delay_seconds=8)
    for attempt, longest in enumerate([1, 2, 4, 8, 8], 1):
        delays = [retry_delay(retry, attempt, seed) for seed in range(200)]
        assert max(delays) <= longest
        assert min(delays) >= longest / 2
        assert len(set(delays)) > 190
    assert retry_delay(retry, 1, 7) == retry_delay(retry, 1, 7)


@pytest.mark.parametrize(
    ("results", "named"),
    [
        ([(0, "a"), (1, "b")], "missing [2]"),
        ([(0, "a"), (1, "b"), (2, "c"), (1, "d")], "duplicate [1]"),
        ([(0, "a"), (1, "b"), (2, "c"), (3, "d"), (-1, "e")], "out of range [-1, 3]"),
        ([(0, "a"), (1, "b"), (2, "c"), ("2", "d"), (None, "e")], "no whole number ['2', None]"),
    ],
)
def test_reordering_names_what_does_not_match_the_plan(results: list[tuple[Any, str]], named: str):
    with pytest.raises(ReorderError) as error:
        reorder(results, 3)
    assert named in str(error.value)


def test_reordering_restores_the_plans_order():
    assert reorder([(2, "c"), (0, "a"), (1, "b")], 3) == ["a", "b", "c"]


async def test_a_configured_environment_opens_in_process_with_its_tasks():
    async with open_environment(CalculatorEnvironment()) as environment:
        train = {row["task_id"] for row in environment.tasks("train")}
        heldout = {row["task_id"] for row in environment.tasks("heldout")}
        assert train
        assert not train & heldout
        session = await environment.seed_session(environment.tasks("train")[0])
        assert (await session.call_tool("calculate", {"expression": "3*4"})).text == "12"
