import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.config.models import CalculatorEnvironment, SortEnvironment
from roundhouse.environments import Calculator, Sort, load
from roundhouse.environments.generated import deal, split_problems


def questions(rows) -> list[str]:
    return [row["responses_create_params"]["input"][0]["content"] for row in rows]


@given(st.sets(st.integers(), min_size=5), st.floats(0, 0.5))
def test_a_split_is_complete_and_disjoint(problems: set[int], fraction: float) -> None:
    parts = split_problems(problems | set(range(50)), str, fraction)
    assert Counter(parts["train"] + parts["heldout"]) == Counter(problems | set(range(50)))


@given(st.sets(st.integers(), min_size=5))
def test_a_larger_held_out_share_only_adds_to_the_smaller(problems: set[int]) -> None:
    fifth, half = (split_problems(problems | set(range(50)), str, fraction)["heldout"] for fraction in (0.2, 0.5))
    assert set(fifth) <= set(half)


def test_calculator_tasks_are_all_880_problems_and_share_none() -> None:
    environment = Calculator()
    train, heldout = questions(environment.tasks("train")), questions(environment.tasks("heldout"))
    every = {f"What is {a}*{b}+{c}?" for a in range(2, 13) for b in range(2, 6) for c in range(1, 21)}
    assert set(train) | set(heldout) == every
    assert len(train) + len(heldout) == len(every) == 880
    assert 0.15 < len(heldout) / 880 < 0.25


def test_sort_tasks_are_all_orders_and_share_none() -> None:
    environment = Sort(digits=4)
    train, heldout = questions(environment.tasks("train")), questions(environment.tasks("heldout"))
    assert len(set(train) | set(heldout)) == len(train) + len(heldout) == 9 * 8 * 7 * 6
    assert "Sort 4 1 6 2." in {*train, *heldout}


@pytest.mark.parametrize("config", [CalculatorEnvironment(), SortEnvironment(digits=3)])
def test_task_ids_are_unique_over_both_splits_and_the_order_never_changes(config) -> None:
    first, second = load(config), load(config)
    ids = [[row["task_id"] for split in ("train", "heldout") for row in each.tasks(split)] for each in (first, second)]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == len(ids[0])


def test_consecutive_tasks_are_unrelated_problems() -> None:
    rows = Calculator().tasks("train")[:64]
    assert len({row["task_id"].split("*")[0] for row in rows}) >= 8


def test_a_slice_of_tasks_is_the_same_rows() -> None:
    rows = Sort(digits=3).tasks("train")
    assert list(rows[3:6]) == [rows[3], rows[4], rows[5]]
    assert rows[-1] == list(rows)[-1]


@given(st.floats(0, 1), st.integers(0, 400))
def test_dealing_gives_each_name_its_share_to_the_nearest_whole(share: float, count: int) -> None:
    dealt = Counter(deal({"a": share, "b": 1 - share}, count, random.Random(0)))
    assert dealt.total() == count
    assert abs(dealt["a"] - share * count) <= 0.5 + 1e-6
