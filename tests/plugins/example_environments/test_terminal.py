import json
from typing import Any

import pytest

from roundhouse.environments import environment_config, load_any
from roundhouse.environments.base import TaskRow
from roundhouse.environments.sandboxed import shown
from roundhouse.environments.sandboxes import CommandResult, Sandbox
from roundhouse.plugins.example_environments.terminal import CHORES, Chore, Terminal
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import LocalEnvironmentClient
from tests.gym.environments.playing import SPLITS
from tests.gym.playground import SAMPLING, ScriptedPolicy, by_turn, calls, rollout_config, says, spec_of

TERMINAL = Terminal(problems=120)
CHORE = Chore(
    "Sort a.txt.", (("a.txt", "b\na\n"), ("c.txt", "x\n")), (("a.txt", "a\nb\n"), ("c.txt", "x\n")), "sort", ""
)
ROW = TERMINAL.row(CHORE)


async def parts(row: TaskRow, *commands: str) -> dict[str, float]:
    session = await TERMINAL.seed_session(row)
    for command in commands:
        await session.run(command)
    verdict = await TERMINAL.verify(session, row, {"output": []})
    await TERMINAL.close_session(session)
    assert verdict.reward == sum(verdict.reward_components.values())
    return verdict.reward_components


@pytest.mark.parametrize(
    ("command", "reward"),
    [
        ("sort -o a.txt a.txt", 1.0),
        ("printf 'a\\nb\\n' > a.txt", 1.0),
        ("sort -o a.txt a.txt; rm c.txt", 0.8),
        ("sort -o a.txt a.txt; echo more > new", 0.8),
        ("sort -o a.txt a.txt; ln -s a.txt link; mkdir empty; mkfifo pipe", 1.0),
        ("true", 0.0),
        ("sort a.txt > sorted.txt", 0.0),
        ("rm a.txt; ln -s c.txt a.txt", 0.0),
        ("sort -o a.txt a.txt; chmod 0 a.txt", 0.0),
        ("sort -o a.txt a.txt; head -c 5M /dev/zero > big", 0.0),
        ("printf '\\377' > a.txt", 0.0),
    ],
)
async def test_only_the_final_files_are_judged(command: str, reward: float) -> None:
    assert sum((await parts(ROW, command)).values()) == reward


async def test_an_answer_may_be_written_in_any_form_of_the_same_path() -> None:
    row = ROW | {"wanted": {**ROW["files"], "answer.txt": "logs/ant.log"}}
    for text in ("logs/ant.log", "./logs/ant.log\\n", " logs/ant.log \\n\\n"):
        assert sum((await parts(row, f"printf '{text}' > answer.txt")).values()) == 1.0
    assert sum((await parts(row, "echo ant.log > answer.txt")).values()) == 0.0


async def test_the_policy_is_shown_output_status_and_limits_and_its_mistakes() -> None:
    session = await TERMINAL.seed_session(ROW)
    tools = TERMINAL.tools()
    assert await tools["run"].call(session, "cat a.txt") == "b\na"
    assert await tools["run"].call(session, "true") == "exit status 0"
    assert await tools["run"].call(session, "ls nothing; exit 4") == (
        "ls: cannot access 'nothing': No such file or directory\nexit status 4"
    )
    assert await tools["write"].call(session, "d/e.txt", "new\n") == "written"
    assert await tools["run"].call(session, "cat d/e.txt") == "new"
    assert (await tools["write"].call(session, "/etc/x", "new")).startswith("error: '/etc/x' is not a path")
    assert await tools["run"].call(session, "a\0b") == "sh: a command cannot contain NUL characters\nexit status 2"
    await TERMINAL.close_session(session)
    assert shown(CommandResult(-9, "x", timed_out=True)) == "x\nkilled: it reached its time limit"


async def test_a_listing_is_the_same_in_every_rollout() -> None:
    listings = []
    for _ in range(2):
        session = await TERMINAL.seed_session(ROW)
        listings.append(await TERMINAL.run(session, "ls -gno --full-time *.txt"))
        await TERMINAL.close_session(session)
    assert listings[0] == listings[1]


def test_every_chore_is_among_the_problems_of_both_splits() -> None:
    openings = {
        split: {row["responses_create_params"]["input"][0]["content"].split()[0] for row in Terminal().tasks(split)}
        for split in SPLITS
    }
    assert len(CHORES) == len(openings["train"]) == len(openings["heldout"])


@pytest.mark.parametrize(
    ("command", "outcome"),
    [("sort -o a.txt a.txt; cat a.txt", "equal"), ("cat /dev/urandom | head -c 9 | od", "refused")],
)
async def test_a_stored_rollout_is_judged_again_by_its_commands_or_refused_with_the_one_that_differs(
    command: str, outcome: str
) -> None:
    judge = pytest.importorskip("roundhouse.plugins.lab.replays.rollouts").judge
    policy = ScriptedPolicy(by_turn(calls(("run", {"command": command})), says("Done.")))
    async with LocalEnvironmentClient(TERMINAL) as client:
        rollout = await run_rollout(spec_of(ROW), policy, client, rollout_config(), SAMPLING)
        [judged] = [each async for each in judge([rollout], client)]
    assert (judged.outcome, judged.reason) == (outcome, "" if outcome == "equal" else "other_answer")


class Recorded:
    """A sandbox that records calls and runs nothing."""

    def __init__(self, config: Any, answer: str) -> None:
        self.answer = answer
        self.files: dict[str, bytes] = {}

    async def start(self) -> None:
        pass

    async def run(self, command: str) -> CommandResult:
        return CommandResult(0, self.answer)

    async def write_files(self, files: dict[str, bytes]) -> None:
        self.files |= files

    async def read_files(self) -> dict[str, bytes]:
        return self.files

    async def close(self) -> None:
        pass


async def test_a_sandbox_of_ones_own_is_one_class_and_one_section() -> None:
    section = {"kind": "custom", "target": f"{__file__}:Recorded", "parameters": {"answer": "mine"}}
    environment = load_any(environment_config("terminal", json.dumps({"problems": 40, "sandbox": section})))
    assert isinstance(environment, Terminal)
    environment.check_sandbox()
    session: Sandbox = await environment.seed_session(ROW)
    assert await environment.run(session, "anything") == "mine"
