"""Resumption of interrupted rollouts, and when it is refused."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pytest

from roundhouse.environments.base import Environment, GymStep, Split, TaskRow, Verdict, final_text, task_row, tool
from roundhouse.generation.protocol import EngineUnreachable
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import LocalEnvironmentClient, LocalEpisodeClient
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.rollout.replay import JOURNAL, TurnJournal
from roundhouse.trajectories.records import Rollout, Status
from tests.gym.collecting import collect
from tests.gym.counter import Counter, counter_row
from tests.gym.interrupted import VERSION, as_read, interrupted_before, resumed
from tests.gym.playground import (
    SAMPLING,
    ScriptedPolicy,
    by_turn,
    calls,
    rollout_config,
    says,
    spec_of,
    turns_of,
    written,
)
from tests.gym.worlds import Climb, Mountain, climb_row

CONFIG = rollout_config(max_turns=12)


class Ledgers(Counter):
    """A counter with repeatable tool calls."""

    name = "ledgers"
    restoration = "replay"


ADDS = by_turn(
    calls(("add", {"n": 1})), calls(("add", {"n": 2}), ("total", {})), calls(("add", {"n": 3})), says("Six.")
)
"""Three replies with calls, one of them with two, and a last word."""


@dataclass
class Meter:
    """One rollout's readings."""

    readings: list[int]


class Meters(Environment):
    """Every reading differs: calls cannot be repeated, but a session has snapshots."""

    name = "meters"
    restoration = "snapshot"

    def __init__(self) -> None:
        self.clock = itertools.count(1)
        self.read_at: list[int] = []

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return [task_row("Read.", task_id="meter", tools=self.tool_schemas())]

    async def seed_session(self, row: TaskRow) -> Meter:
        return Meter([])

    async def snapshot_session(self, session: Meter) -> Any:
        return asdict(session)

    async def restore_session(self, row: TaskRow, snapshot: Any) -> Meter:
        if snapshot == {"readings": "damaged"}:
            raise ValueError("no such readings")
        return Meter(**snapshot)

    @tool("Read the meter.")
    async def read(self, session: Meter) -> str:
        session.readings.append(next(self.clock))
        self.read_at.append(session.readings[-1])
        return str(session.readings[-1])

    async def verify(self, session: Meter, row: TaskRow, response: dict[str, Any]) -> Verdict:
        return Verdict(float(sum(session.readings)), metrics={"words": float(len(final_text(response)))})


READS = by_turn(calls(("read", {})), calls(("read", {})), calls(("read", {})), says("Done."))


class WrittenMountain(Mountain):
    """A climb that can be written down."""

    restoration = "snapshot"

    async def snapshot(self, state: Any) -> Any:
        return asdict(state[0])

    async def restore(self, row: TaskRow, snapshot: Any) -> Any:
        climb = Climb(**snapshot)
        self.climbs.append(climb)
        return climb, row.get("plan")


async def alone(client: Any, row: TaskRow, script: Any) -> Rollout:
    """The rollout that nothing interrupts."""
    return await run_rollout(spec_of(row), ScriptedPolicy(script), client, CONFIG, SAMPLING)


# -- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", range(4))
async def test_a_session_that_was_written_down_goes_on_without_any_call_made_twice(cut: int) -> None:
    meters = Meters()
    client = LocalEnvironmentClient(meters)
    spec = spec_of(meters.tasks("train")[0])
    parts = await interrupted_before(cut, spec, READS, client, CONFIG)
    rollout, policy, journal = await resumed(parts, spec, READS, client, CONFIG)
    assert (rollout.status, len(rollout.turns), len(policy.seeds)) == (Status.COMPLETED, 4, 4 - cut)
    # The reading after the newest finished call was under way when the power went: that one alone is taken again.
    again = 1 if cut else 0
    assert meters.read_at == list(range(1, 4 + again))
    told = [int(item["output"]) for item in rollout.items if item["type"] == "function_call_output"]
    assert rollout.reward == sum(told), "verifier and policy know of the same readings"
    assert journal.resumptions.turns_resumed == cut


@pytest.mark.parametrize("cut", range(1, 4))
async def test_an_episode_that_was_written_down_goes_on_where_it_was(cut: int) -> None:
    script = by_turn(says("1"), says("2"), says("1"), says("3"))
    row = climb_row(top=7)
    whole = await alone(LocalEpisodeClient(Mountain()), row, script)
    world = WrittenMountain()
    client = LocalEpisodeClient(world)
    parts = await interrupted_before(cut, spec_of(row), script, client, CONFIG)
    rollout, policy, _ = await resumed(parts, spec_of(row), script, client, CONFIG)
    assert written(rollout) == written(whole)
    assert len(policy.seeds) == 4 - cut
    assert [climb.steps for climb in world.climbs] == [cut, 4], (
        "the second world began at the step of the first's snapshot"
    )


async def test_several_calls_in_one_reply_are_repeated_in_their_order_also_where_they_ran_together() -> None:
    client = LocalEnvironmentClient(Ledgers())
    row = counter_row()
    whole = await alone(client, row, ADDS)
    assert whole.reward == pytest.approx(0.6)
    for cut in range(5):
        parts = await interrupted_before(cut, spec_of(row), ADDS, client, CONFIG)
        rollout, policy, _ = await resumed(parts, spec_of(row), ADDS, client, CONFIG)
        assert written(rollout) == written(whole)
        assert len(policy.seeds) == 4 - cut


async def test_an_attempt_that_follows_on_a_dead_engine_asks_only_for_what_it_had_not_answered() -> None:
    asked: list[int] = []

    def script(messages: list[dict[str, Any]], seed: int) -> Any:
        asked.append(turns_of(messages))
        return EngineUnreachable("restarting") if len(asked) == 3 else ADDS(messages, seed)

    journal, client = TurnJournal(VERSION), LocalEnvironmentClient(Ledgers())
    (rollout,) = await collect(
        plan_rollouts([counter_row()], 1, 0, 1), ScriptedPolicy(script), client, CONFIG, SAMPLING, journal=journal
    )
    assert (rollout.status, rollout.attempt, rollout.reward) == (Status.COMPLETED, 2, pytest.approx(0.6))
    assert asked == [0, 1, 2, 2, 3]
    assert (journal.resumptions.rollouts_resumed, journal.resumptions.turns_resumed) == (1, 2)


async def test_a_rollout_that_is_interrupted_again_and_again_makes_each_call_once() -> None:
    client, spec = LocalEnvironmentClient(Ledgers()), spec_of(counter_row())
    parts: list[pa.Table] = []
    for _ in range(4):
        journal, policy = TurnJournal(VERSION), ScriptedPolicy(once(ADDS))
        for part in parts:
            journal.read(part)
        recorded = journal.recorded(spec, client.restoration)
        rollout = await run_rollout(spec, policy, client, CONFIG, SAMPLING, recorded=recorded)
        parts.append(as_read(journal.take()))
    assert rollout.status is Status.COMPLETED
    assert written(rollout) == written(await alone(client, counter_row(), ADDS))
    rows = pa.concat_tables(parts).to_pylist()
    assert [row["number"] for row in rows if row["event"] == "call"] == [0, 1, 2, 3]
    assert journal.resumptions.rollouts_resumed == 3, "read from the parts of those before it"


def once(script: Any) -> Any:
    """The script's reply to the first request; then the engine is gone."""
    asked: list[int] = []

    def reply(messages: list[dict[str, Any]], seed: int) -> Any:
        asked.append(seed)
        return script(messages, seed) if len(asked) == 1 else EngineUnreachable("gone")

    return reply


# -- starting afresh --------------------------------------------------------------------------------------------------


async def afresh(parts: list[pa.Table], spec: Any, script: Any, client: Any, **options: Any) -> tuple[Rollout, str]:
    """Resume, which must be refused: all calls are repeated once. Return the outcome and the recorded reason."""
    rollout, policy, journal = await resumed(parts, spec, script, client, CONFIG, **options)
    assert len(policy.seeds) == len(rollout.turns)
    assert journal.resumptions.rollouts_resumed == 0
    (reason,) = journal.resumptions.rollouts_restarted.elements()
    return rollout, reason


async def test_an_environment_that_declares_nothing_starts_again_and_the_reason_is_counted() -> None:
    client, row = LocalEnvironmentClient(Counter()), counter_row()
    parts = await interrupted_before(2, spec_of(row), ADDS, client, CONFIG)
    assert all(each["message"] is None and each["generation_token_ids"] is None for each in parts[0].to_pylist())
    rollout, reason = await afresh(parts, spec_of(row), ADDS, client)
    assert reason == "not_restorable"
    _, _, journal = await resumed(parts, spec_of(row), ADDS, client, CONFIG)
    lost = rollout.turns[: sum(part.num_rows for part in parts)]
    assert journal.resumptions.lost_tokens == sum(len(turn.generation_token_ids) for turn in lost) > 0
    again = TurnJournal(VERSION)
    again.read(journal.take())
    assert again.resumptions.lost_tokens == journal.resumptions.lost_tokens, "the next attempt reads it from the parts"
    assert written(rollout) == written(await alone(client, row, ADDS))


async def test_where_the_environment_answers_otherwise_the_rollout_starts_afresh_with_the_new_answers() -> None:
    class Restless(Meters):
        restoration = "replay"

    client = LocalEnvironmentClient(meters := Restless())
    spec = spec_of(meters.tasks("train")[0])
    parts = await interrupted_before(2, spec, READS, client, CONFIG)
    rollout, reason = await afresh(parts, spec, READS, client)
    assert reason == "other_answer"
    assert rollout.status is Status.COMPLETED
    told = [int(item["output"]) for item in rollout.items if item["type"] == "function_call_output"]
    assert told == [4, 5, 6], "readings 1 and 2 are of before the interruption, 3 of the replay"


async def test_another_request_than_the_recorded_one_gets_no_recorded_reply() -> None:
    client, row = LocalEnvironmentClient(Ledgers()), counter_row()
    parts = await interrupted_before(2, spec_of(row), ADDS, client, CONFIG)
    other = counter_row()
    other["responses_create_params"]["input"][0]["content"] = "Add other things up."
    _, reason = await afresh(parts, spec_of(other), ADDS, client)
    assert reason == "other_request"


async def test_an_episode_that_ends_before_its_recorded_calls_do_starts_afresh() -> None:
    class Shrunken(Mountain):
        restoration = "replay"

        async def step(self, state: Any, response: dict[str, Any]) -> GymStep:
            step = await super().step(state, response)
            over = len(self.climbs) > 1 and state[0].steps == 2
            return GymStep(step.observation, step.reward, terminated=step.terminated or over, metrics=step.metrics)

    script, row = by_turn(says("1")), climb_row(top=5)
    client = LocalEpisodeClient(Shrunken())
    parts = await interrupted_before(4, spec_of(row), script, client, CONFIG)
    rollout, reason = await afresh(parts, spec_of(row), script, client)
    assert reason == "other_answer"
    assert len(rollout.turns) == 2

    failing = climb_row(top=5, plan="step raises")
    rollout, reason = await afresh(parts, spec_of(failing), script, client)
    assert reason == "ended_early"
    assert rollout.failure_code == "step_failed"


async def test_an_episode_that_begins_otherwise_starts_afresh_and_every_world_is_closed_once() -> None:
    class Repeatable(Mountain):
        restoration = "replay"

    script, world = by_turn(says("1")), Repeatable()
    client = LocalEpisodeClient(world)
    parts = await interrupted_before(2, spec_of(climb_row(top=5)), script, client, CONFIG)
    rollout, reason = await afresh(parts, spec_of(climb_row(top=4)), script, client)
    assert (rollout.status, reason, len(rollout.turns)) == (Status.COMPLETED, "other_answer", 4)
    assert [climb.closed for climb in world.climbs] == [1, 1, 1], "interrupted, replayed, afresh"


async def test_calls_of_another_seed_or_policy_version_are_not_used() -> None:
    client, row = LocalEnvironmentClient(Ledgers()), counter_row()
    parts = await interrupted_before(2, spec_of(row), ADDS, client, CONFIG)
    _, reason = await afresh(parts, spec_of(row, seed=6), ADDS, client)
    assert reason == "other_seed"
    _, reason = await afresh(parts, spec_of(row), ADDS, client, version=VERSION + 1)
    assert reason == "other_policy_version"


async def test_calls_behind_a_lost_part_are_not_used() -> None:
    client, row = LocalEnvironmentClient(Ledgers()), counter_row()
    first, *later = await interrupted_before(3, spec_of(row), ADDS, client, CONFIG)
    assert first.num_rows == 1
    _, reason = await afresh(later, spec_of(row), ADDS, client)
    assert reason == "incomplete_journal"


async def test_a_snapshot_that_cannot_be_restored_or_written_is_told() -> None:
    meters = Meters()
    client, spec = LocalEnvironmentClient(meters), spec_of(meters.tasks("train")[0])
    parts = await interrupted_before(2, spec, READS, client, CONFIG)
    newest = parts[-1].to_pylist()[-1] | {"snapshot": '{"readings": "damaged"}'}
    damaged = [*parts[:-1], pa.Table.from_pylist([newest], schema=JOURNAL)]
    _, reason = await afresh(damaged, spec, READS, client)
    assert reason == "not_restored"

    class Secretive(Meters):
        async def snapshot_session(self, session: Meter) -> Any:
            return {session.readings}

    rollout, _, _ = await resumed([], spec, READS, LocalEnvironmentClient(Secretive()), CONFIG)
    assert (rollout.status, rollout.failure_code, rollout.reward) == (Status.FAILED, "snapshot_failed", None)


# -- the journal ------------------------------------------------------------------------------------------------------


async def test_a_finished_rollout_leaves_nothing_in_the_journal_and_a_failed_engine_leaves_its_calls() -> None:
    client, specs = LocalEnvironmentClient(Ledgers()), plan_rollouts([counter_row()], 3, 0, 1)
    journal = TurnJournal(VERSION)
    await collect(specs, ScriptedPolicy(ADDS), client, CONFIG, SAMPLING, journal.finished, journal=journal)
    assert journal.take() is None
    config = rollout_config(max_turns=12, retry={"attempts": 1})
    gone = ScriptedPolicy(once(ADDS))
    await collect(specs[:1], gone, client, config, SAMPLING, journal.finished, journal=journal)
    assert journal.take().num_rows == 1
    assert journal.take() is None


async def test_only_the_newest_call_of_a_part_has_a_snapshot_and_log_probabilities_are_exact() -> None:
    meters, journal = Meters(), TurnJournal(VERSION)
    client, spec = LocalEnvironmentClient(meters), spec_of(meters.tasks("train")[0])
    recorded = journal.recorded(spec, client.restoration)
    rollout = await run_rollout(spec, ScriptedPolicy(READS), client, CONFIG, SAMPLING, recorded=recorded)
    rows = as_read(journal.take()).to_pylist()
    assert [row["snapshot"] for row in rows] == [None, None, None, '{"readings": [1, 2, 3]}']
    assert [row["generation_log_probs"] for row in rows] == [turn.generation_log_probs for turn in rollout.turns]
    assert sum(len(row["prompt_token_ids"]) for row in rows) < rollout.turns[-1].prompt_length, (
        "a prompt's new tokens only"
    )
