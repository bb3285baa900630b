from dataclasses import asdict

from hypothesis import given, settings
from hypothesis import strategies as st

from roundhouse.trajectories.records import FailureKind, Status, derive_seed, digest_tokens
from roundhouse.trajectories.schemas import (
    ROLLOUTS,
    TURNS,
    rebuild_prompts,
    rollouts_from_tables,
    rollouts_table,
    turns_table,
)
from tests.trajectories.rollouts import rollout, turn


def test_rollouts_and_turns_survive_the_way_through_arrow() -> None:
    failed = rollout("h", 0, reward=None, status=Status.FAILED)
    failed.failure_kind, failed.failure_code, failed.failure_detail = FailureKind.INFRA, "engine_timeout", "60 s"
    failed.turns = []
    scored = rollout("g", 1, reward=0.25)
    scored.reward_components = {"exact": 0.25}
    scored.metrics = {"tool_calls": 2.0}
    originals = [rollout("g", 0), scored, failed]
    rollouts, turns = rollouts_table(originals), turns_table(originals)
    assert (rollouts.schema, turns.schema) == (ROLLOUTS, TURNS)
    assert [asdict(one) for one in rollouts_from_tables(rollouts, turns)] == [asdict(one) for one in originals]


def test_a_failed_rollout_has_a_null_reward_in_the_dataset() -> None:
    table = rollouts_table([rollout(reward=None, status=Status.FAILED)])
    assert table.column("reward").null_count == 1


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 99), min_size=1), st.lists(st.integers(0, 99))), min_size=1, max_size=6)
)
def test_whole_prompts_come_back_from_the_stored_parts(parts: list[tuple[list[int], list[int]]]) -> None:
    history: list[int] = []
    turns, prompts = [], []
    for index, (new, generated) in enumerate(parts):
        turns.append(turn(index, history, new, generated))
        prompts.append([*history, *new])
        history = [*prompts[-1], *generated]
    assert rebuild_prompts(turns) == prompts
    assert [one.prompt_digest for one in turns] == [digest_tokens(prompt) for prompt in prompts]


def test_stored_tokens_are_linear_in_the_turns() -> None:
    history: list[int] = []
    turns = []
    for index in range(50):
        turns.append(turn(index, history, [1] * 10, [2] * 5))
        history += [1] * 10 + [2] * 5
    assert sum(len(one.prompt_token_ids) + len(one.generation_token_ids) for one in turns) == 50 * 15


def test_seeds_depend_on_every_part_and_on_nothing_else() -> None:
    assert derive_seed(1, 2, "a") == derive_seed(1, 2, "a")
    assert len({derive_seed(seed, turn) for seed in range(50) for turn in range(50)}) == 2500
    assert derive_seed(1, 23) != derive_seed(12, 3)


def test_turns_written_before_they_could_be_excluded_are_trained_on() -> None:
    sound = rollout()
    sound.turns[0].trained = False
    tables = rollouts_table([sound]), turns_table([sound])
    assert [each.trained for each in rollouts_from_tables(*tables)[0].turns] == [False, True]
    older = tables[1].drop_columns(["trained"])
    assert [each.trained for each in rollouts_from_tables(tables[0], older)[0].turns] == [True, True]
