from roundhouse.environments.single_turn import BOXES, COLUMNS, ROWS, Sudoku, solutions
from tests.gym.environments.playing import judge, message

SUDOKU = Sudoku(problems=50)
ROW = {"given": "1.3434.22143432."}


def test_there_are_288_solved_grids_and_each_satisfies_all_units() -> None:
    assert len(set(solutions())) == 288
    assert all(len({grid[cell] for cell in unit}) == 4 for grid in solutions() for unit in ROWS + COLUMNS + BOXES)


async def test_the_solution_is_rewarded_and_near_misses_get_their_parts() -> None:
    solved = await judge(SUDOKU, ROW, message("1234\n3412\n2143\n4321\n"))
    assert solved.reward == 1.0
    assert solved.reward_components == {"form": 0.1, "rows": 0.3, "columns": 0.3, "boxes": 0.3}
    one_off = await judge(SUDOKU, ROW, message("1134\n3412\n2143\n4321"))
    assert 0.1 < one_off.reward < 1.0
    assert one_off.reward_components["rows"] == 0.3 * 3 / 4


async def test_a_grid_that_changes_a_given_cell_or_has_another_shape_earns_nothing() -> None:
    for text in ("2143\n3412\n1234\n4321", "1234 3412 2143 4321", "1234\n3412\n2143", "1234\n3412\n2143\n432x", ""):
        assert (await judge(SUDOKU, ROW, message(text))).reward == 0.0


def test_every_problem_has_exactly_one_solution() -> None:
    for problem in SUDOKU.problems["train"]:
        fitting = [
            grid
            for grid in solutions()
            if all(told in (".", cell) for told, cell in zip(problem.given, grid, strict=True))
        ]
        assert fitting == [problem.solution]
