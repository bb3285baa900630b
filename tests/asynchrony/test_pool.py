from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.collection.pool import Put, Ready, Reason, Trajectory, TrajectoryPool, fill_from_stages
from roundhouse.errors import DataError
from roundhouse.store.location import Location
from roundhouse.store.manifest import Provenance
from roundhouse.store.stage import Stage
from roundhouse.trajectories.records import FailureKind, Rollout, Status, Turn
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from roundhouse.trajectories.tokens import digest_tokens


def rollout(group="g", sample=0, versions=(0,), *, status=Status.COMPLETED, environment="calculator") -> Rollout:
    turns, prompt = [], [1, 2]
    for number, version in enumerate(versions):
        new = prompt if number == 0 else [7]
        whole = prompt if number == 0 else [*whole, 3, 4, 7]  # noqa: F821 (bound by the turn before)
        parent = number - 1 if number else None
        turns.append(
            Turn(number, parent, new, len(whole), digest_tokens(whole), [3, 4], [-0.5, -0.25], version, "stop", 0.1)
        )
    failed = status is Status.FAILED
    return Rollout(
        group_id=group,
        sample=sample,
        task={"task_id": group},
        environment=environment,
        status=status,
        reward=None if failed else 1.0,
        turns=turns,
        finish_reason="" if failed else "stop",
        failure_kind=FailureKind.INFRA if failed else None,
        failure_code="engine_timeout" if failed else "",
    )


def trajectory(group="g", sample=0, versions=(0,), iteration=1, tag="default", **settings) -> Trajectory:
    return Trajectory(rollout(group, sample, versions, **settings), iteration, tag)


def names(batch) -> list[tuple[str, int]]:
    return [(t.rollout.group_id, t.rollout.sample) for t in batch.trajectories]


def test_the_simple_store_hands_out_what_came_first():
    pool = TrajectoryPool(keys=(), batch_size=2)
    for sample in range(3):
        assert pool.put(trajectory(sample=sample)).word is Put.SUCCESS
    assert names(pool.get_batch()) == [("g", 0), ("g", 1)]
    assert pool.get_batch() is None
    assert not pool.is_empty()


def test_the_grouped_store_hands_out_whole_groups_only():
    pool = TrajectoryPool(("group_id",), 2, batch_size=2)
    for group, sample in [("a", 0), ("b", 1), ("c", 0), ("b", 0)]:
        pool.put(trajectory(group, sample))
    assert names(pool.get_batch()) == [("b", 1), ("b", 0)]
    assert pool.get_batch() is None


def test_the_hierarchical_store_keeps_equal_ids_of_two_environments_apart():
    pool = TrajectoryPool(("environment", "group_id"), 2, batch_size=2)
    pool.put(trajectory("a", 0, environment="sql"))
    pool.put(trajectory("a", 1, environment="sort"))
    assert pool.get_batch() is None
    pool.put(trajectory("a", 2, environment="sql"))
    batch = pool.get_batch()
    assert {t.rollout.environment for t in batch.trajectories} == {"sql"}


@pytest.mark.parametrize(
    ("ready", "loaded", "put", "taken"),
    [
        (Ready.BATCH_SIZE_REACHED, 8, 4, 4),
        (Ready.LOADED_BATCH_FINISHED, 8, 7, None),
        (Ready.LOADED_BATCH_FINISHED, 8, 8, 8),
        (Ready.LOADED_BATCH_FINISHED, 3, 3, 3),
        (Ready.BOTH, 8, 7, None),
        (Ready.BOTH, 3, 3, None),
        (Ready.BOTH, 8, 8, 4),
    ],
)
def test_ready_rules(ready, loaded, put, taken):
    pool = TrajectoryPool(keys=(), batch_size=4, ready=ready)
    pool.expect(loaded)
    for sample in range(put):
        pool.put(trajectory(sample=sample))
    batch = pool.get_batch()
    assert (None if batch is None else len(batch)) == taken


def test_a_loaded_batch_is_finished_when_the_rest_has_failed():
    pool = TrajectoryPool(keys=(), batch_size=4, ready=Ready.LOADED_BATCH_FINISHED)
    pool.expect(2)
    pool.put(trajectory(sample=0))
    assert pool.put(trajectory(sample=1, status=Status.FAILED)).reason is Reason.FAILED
    assert len(pool.get_batch()) == 1


def test_while_weights_are_exchanged_nothing_is_put_and_the_same_trajectory_is_accepted_after():
    pool = TrajectoryPool(keys=())
    pool.lock()
    answer = pool.put(trajectory())
    assert (answer.word, answer.reason) == (Put.RE_ROLLOUT, Reason.LOCKED)
    assert pool.put(trajectory(tag="other")).word is Put.SUCCESS, "another model is not concerned"
    pool.unlock()
    assert pool.put(trajectory()).word is Put.SUCCESS
    assert pool.put(trajectory()).reason is Reason.DUPLICATE


def test_a_trajectory_is_judged_by_the_oldest_of_its_turns():
    pool = TrajectoryPool(keys=(), staleness=1)
    answer = pool.put(trajectory(versions=(3, 4, 5), iteration=6))
    assert (answer.word, answer.reason) == (Put.RE_ROLLOUT, Reason.STALE)
    assert pool.put(trajectory(versions=(4, 5), iteration=6)).word is Put.SUCCESS


def test_what_is_evicted_is_told_with_its_reason_and_can_come_again():
    pool = TrajectoryPool(("group_id",), 2, batch_size=2, staleness=1)
    pool.put(trajectory(sample=0, versions=(1,), iteration=2))
    pool.put(trajectory(sample=1, versions=(2,), iteration=2))
    out = pool.evict(trained_version=3)
    assert [(t.rollout.sample, reason) for t, reason in out] == [(0, Reason.STALE)]
    assert pool.get_batch() is None, "the group is not whole any more"
    assert pool.put(trajectory(sample=0, versions=(3,), iteration=2)).word is Put.SUCCESS
    assert len(pool.get_batch()) == 2


def test_a_full_pool_asks_for_the_rollout_later():
    pool = TrajectoryPool(keys=(), capacity=1)
    pool.put(trajectory(sample=0))
    assert pool.put(trajectory(sample=1)).reason is Reason.CAPACITY


def test_a_controller_takes_exactly_its_groups_short_of_what_failed():
    pool = TrajectoryPool(("group_id",), 2, batch_size=2)
    for group, sample, iteration in [("b", 1, 1), ("a", 0, 1), ("a", 1, 1), ("a", 0, 2), ("a", 1, 2)]:
        pool.put(trajectory(group, sample, iteration=iteration))
    batch = pool.take([(1, "a"), (1, "b")])
    assert [(t.iteration, *t.name[1:]) for t in batch.trajectories] == [(1, "a/0"), (1, "a/1"), (1, "b/1")]
    assert [t.iteration for t in pool.contents()] == [2, 2]
    assert pool.put(trajectory("b", 1, iteration=1)).reason is Reason.DUPLICATE, "it was trained on"


def test_bad_settings_are_told():
    with pytest.raises(DataError, match="'colour'"):
        TrajectoryPool(("colour",), 2, batch_size=2)
    with pytest.raises(DataError, match="no multiple"):
        TrajectoryPool(("group_id",), 2, batch_size=3)


def test_a_task_that_comes_again_in_the_next_iteration_makes_a_group_of_its_own():
    pool = TrajectoryPool(("group_id",), 2, batch_size=2)
    pool.put(trajectory("a", 0, iteration=1))
    pool.put(trajectory("a", 1, iteration=2))
    assert pool.get_batch() is None
    pool.put(trajectory("a", 1, iteration=1))
    assert {t.iteration for t in pool.get_batch().trajectories} == {1}


@given(st.data())
def test_whatever_is_put_comes_out_once_or_is_told_of(data):
    pool = TrajectoryPool(("group_id",), 2, batch_size=2, staleness=1)
    held: set[tuple[int, str]] = set()
    out: list[tuple[int, str]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["put", "put", "put", "take", "evict", "lock"])):
            case "put":
                item = trajectory(
                    data.draw(st.sampled_from("abc")),
                    data.draw(st.integers(0, 1)),
                    (data.draw(st.integers(0, 3)),),
                    data.draw(st.integers(1, 3)),
                )
                answer = pool.put(item)
                assert (answer.word is Put.SUCCESS) == (answer.reason is Reason.NONE)
                if answer.word is Put.SUCCESS:
                    assert item.iteration - 1 - min(item.versions) <= 1
                    assert item.name not in held
                    assert item.name not in out
                    held.add(item.name)
            case "take":
                if (batch := pool.get_batch()) is not None:
                    assert len(batch) == 2
                    out += [t.name for t in batch.trajectories]
                    held -= set(out)
            case "evict":
                gone = {t.name for t, _ in pool.evict(trained_version=data.draw(st.integers(0, 4)))}
                assert gone <= held
                held -= gone
            case "lock":
                pool.lock()
                assert pool.put(trajectory("z")).reason is Reason.LOCKED
                pool.unlock()
        assert {t.name for t in pool.contents()} == held
    assert len(out) == len(set(out))


def collect_stage(store_uri: str, iteration: int) -> Stage:
    return Stage(
        Location(store_uri) / f"iterations/{iteration:06d}/collect", kind="collect", run_id="r", iteration=iteration
    )


def write_part(stage: Stage, rollouts: list[Rollout]) -> None:
    attempt = stage.begin(Provenance(policy_version=0, config_digest="", code_version="", seed=0))
    attempt.write_table("turns", turns_table(rollouts))
    attempt.write_table("rollouts", rollouts_table(rollouts))


def test_after_a_crash_the_pool_is_what_the_datasets_say(store_uri):
    before = TrajectoryPool(("group_id",), 2, batch_size=2, staleness=1)
    stages = {k: collect_stage(store_uri, k) for k in (5, 6)}
    five = [rollout("a", 0, (4,)), rollout("a", 1, (3, 4)), rollout("b", 0, (4, 4, 5))]
    six = [rollout("a", 0, (5,)), rollout("c", 0, (5,), status=Status.FAILED)]
    write_part(stages[5], five[:2])
    write_part(stages[5], [five[1], five[2]])  # a second attempt adopted one rollout and went on
    write_part(stages[6], six)
    for iteration, rollouts in ((5, five), (6, six[:1])):
        for item in rollouts:
            assert before.put(Trajectory(item, iteration)).word is Put.SUCCESS

    after = TrajectoryPool(("group_id",), 2, batch_size=2, staleness=1)
    put = fill_from_stages(after, {k: stage.location for k, stage in stages.items()})
    assert after.contents() == before.contents()
    assert [t.versions for t in after.contents()] == [(4,), (3, 4), (4, 4, 5), (5,)]
    assert {k: len(found) for k, found in put.items()} == {5: 3, 6: 1}
    assert names(after.get_batch()) == [("a", 0), ("a", 1)]


def test_what_grew_too_old_while_the_process_was_down_is_not_filled_in(tmp_path):
    stage = collect_stage(str(tmp_path), 7)
    write_part(stage, [rollout("a", 0, (4,)), rollout("a", 1, (5,))])
    pool = TrajectoryPool(("group_id",), 2, batch_size=2, staleness=1)
    fill_from_stages(pool, {7: stage.location})
    assert [t.rollout.sample for t in pool.contents()] == [1]
