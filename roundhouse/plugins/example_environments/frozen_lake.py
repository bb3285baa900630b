"""A game of several turns in the Gymnasium protocol: cross a frozen lake without falling in.

Invariants: the return of an episode is 1 exactly if the goal was reached, else 0. The lake does not slip, so an episode
is a function of its moves. Every lake can be crossed within the allowed steps, and its shortest way has at least three
moves.

    P.#.        the policy answers with one of up, down, left, right; the environment shows the lake after the move, until the
    ...#        policy is on G (1), in a hole # (0), or has made `steps` moves (truncated, 0). Other answers cost a move and get
    .#.G        an error text.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roundhouse.environments.base import GymnasiumEnvironment, GymStep, Split, TaskList, TaskRow, final_text, task_row
from roundhouse.environments.generated import Message, deal, distinct, says, split_problems, user

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
SHORTEST = 3
PROMPT = "Cross the lake from P to G. Holes are #. Answer up, down, left or right."
Place = tuple[int, int]


@dataclass(slots=True)
class LakeWalk:
    """One episode: the lake and the policy's position on it."""

    lake: list[str]
    place: Place
    steps_left: int

    def shown(self) -> str:
        row, column = self.place
        lines = list(self.lake)
        lines[row] = lines[row][:column] + "P" + lines[row][column + 1 :]
        return "\n".join(lines)


class FrozenLake(GymnasiumEnvironment):
    """Square lakes of `size`, with `holes` holes and `steps` moves."""

    name = "frozen_lake"
    restoration = "replay"

    def __init__(
        self, size: int = 4, holes: int = 4, steps: int = 10, problems: int = 2000, heldout_fraction: float = 0.2
    ) -> None:
        self._steps = steps
        lakes = distinct(lambda rng: draw(size, holes, steps, rng), "/".join, problems, f"frozen_lake of size {size}")
        self.problems = split_problems(lakes, _task_id, heldout_fraction)

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return TaskList(
            self.problems[split],
            lambda lines: task_row(
                PROMPT, task_id=_task_id(lines), lake=[line.replace("P", ".") for line in lines], start=find(lines, "P")
            ),
        )

    async def reset(self, row: TaskRow) -> tuple[LakeWalk, str]:
        walk = LakeWalk(list(row["lake"]), (int(row["start"][0]), int(row["start"][1])), self._steps)
        return walk, walk.shown()

    async def step(self, state: LakeWalk, response: dict[str, Any]) -> GymStep:
        return moved(state, final_text(response).strip().lower())

    def demonstrations(self, split: Split, count: int, good_fraction: float, seed: int) -> list[list[Message]]:
        """`good_fraction` of them take a shortest way, the rest walk at random."""
        rng = random.Random(seed)
        procedures = deal({"right": good_fraction, "random": 1 - good_fraction}, count, rng)
        conversations: list[list[Message]] = []
        for procedure in procedures:
            lines = rng.choice(self.problems[split])
            start = find(lines, "P")
            walk = LakeWalk([line.replace("P", ".") for line in lines], start, self._steps)
            way = way_to_goal(walk.lake, start) or []
            messages = [user(PROMPT), user(walk.shown())]
            for turn in range(self._steps):
                move = way[turn] if procedure == "right" else rng.choice(sorted(MOVES))
                messages.append(says(move))
                step = moved(walk, move)
                if step.observation is not None:
                    messages.append(user(step.observation))
                if step.done:
                    break
            conversations.append(messages)
        return conversations


def moved(walk: LakeWalk, move: str) -> GymStep:
    """Make a move; at the edge of the lake the position does not change."""
    walk.steps_left -= 1
    last = walk.steps_left == 0
    if move not in MOVES:
        return GymStep(
            "Answer up, down, left or right.", truncated=last, metrics={"steps_left": float(walk.steps_left)}
        )
    walk.place = neighbour(walk.lake, walk.place, move)
    cell = walk.lake[walk.place[0]][walk.place[1]]
    over = cell in "G#"
    observation = None if over or last else walk.shown()
    metrics = {"steps_left": float(walk.steps_left), "fell_in": float(cell == "#")}
    return GymStep(observation, float(cell == "G"), terminated=over, truncated=last and not over, metrics=metrics)


def neighbour(lake: Sequence[str], place: Place, move: str) -> Place:
    down, right = MOVES[move]
    row, column = place[0] + down, place[1] + right
    return (row, column) if 0 <= row < len(lake) and 0 <= column < len(lake[0]) else place


def way_to_goal(lake: Sequence[str], start: Place) -> list[str] | None:
    """Return a shortest way as moves, or None."""
    ways: dict[Place, list[str]] = {start: []}
    queue = deque([start])
    while queue:
        place = queue.popleft()
        if lake[place[0]][place[1]] == "G":
            return ways[place]
        for move in MOVES:
            beyond = neighbour(lake, place, move)
            if beyond not in ways and lake[beyond[0]][beyond[1]] != "#":
                ways[beyond] = [*ways[place], move]
                queue.append(beyond)
    return None


def draw(size: int, holes: int, steps: int, rng: random.Random) -> tuple[str, ...]:
    """A lake that can be crossed in 3 to `steps` moves."""
    while True:
        cells = ["P", "G", *"#" * holes, *"." * (size * size - holes - 2)]
        rng.shuffle(cells)
        lines = tuple("".join(cells[row * size : (row + 1) * size]) for row in range(size))
        way = way_to_goal(lines, find(lines, "P"))
        if way is not None and SHORTEST <= len(way) <= steps:
            return lines


def find(lines: Sequence[str], sign: str) -> Place:
    row = next(number for number, line in enumerate(lines) if sign in line)
    return row, lines[row].index(sign)


def _task_id(lines: Sequence[str]) -> str:
    return f"frozen_lake/{'/'.join(lines)}"
