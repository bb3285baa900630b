import json
from pathlib import Path
from typing import Any

import pytest

from roundhouse.environments import check_sandboxes, environment_config
from roundhouse.environments.base import TaskRow, Verdict
from roundhouse.environments.sandbox import SandboxUnavailable
from roundhouse.environments.sandboxes import CommandResult, Sandbox
from roundhouse.errors import ConfigError
from roundhouse.plugins.example_environments.bug_fix import FUNCTIONS, TESTS, BugFix, Repository, cases, outcome

ENVIRONMENT = BugFix(problems=40)
BROKEN = Repository(("clamp", "chunks"), 0)
ROW: TaskRow = json.loads(json.dumps(ENVIRONMENT.row(BROKEN)))
RIGHT = "def clamp(value, low, high):\n    return max(low, min(value, high))\n"
PATH = "library/numbers.py"


async def judged(*commands: str, **files: str) -> Verdict:
    session = await ENVIRONMENT.seed_session(ROW)
    await session.write_files({name: text.encode() for name, text in files.items()})
    for command in commands:
        await session.run(command)
    verdict = await ENVIRONMENT.verify(session, ROW, {"output": []})
    await ENVIRONMENT.close_session(session)
    return verdict


async def test_any_right_source_is_rewarded_and_may_be_spread_over_files() -> None:
    assert (await judged(**{PATH: RIGHT})).reward == 1.0
    spread = {PATH: "from library.more import clamp\n", "library/more.py": RIGHT}
    assert (await judged(**spread)).reward == 1.0


async def test_a_repair_that_breaks_another_function_is_half_a_repair() -> None:
    verdict = await judged(**{PATH: RIGHT, "library/lists.py": "def chunks(xs, size): return [xs]\n"})
    assert verdict.reward_components == {"fixed": 0.7, "kept": 0.0}


GRANTED = "import json, os, sys\ndef clamp(value, low, high):\n    {}\n"
CHEATS = {
    "it edits the tests": ("sed -i 's/, expected)/, None)/; s/sys.exit(failed)/sys.exit(0)/' run_tests.py", ""),
    "it writes the results itself": ("true", 'open("results.json", "w").write("[]"); os._exit(0)'),
    "it asks for the expected results": ("true", 'return json.load(open("calls.json"))[0][3]'),
    "it never ends": ("true", "\n    while True: pass"),
    "it fills the disk": ("true", 'open("big", "w").write("x" * 5_000_000); return 0'),
    "it leaves no results": ("true", "os._exit(0)"),
    "it writes deep results": ("true", 'open("results.json", "w").write("[" * 100_000); os._exit(0)'),
    "it fills its own disk": ("head -c 5M /dev/zero > library/big.py", ""),
    "it deletes all": ("rm -r library", ""),
}


@pytest.mark.parametrize(("command", "body"), CHEATS.values(), ids=CHEATS)
async def test_what_repairs_nothing_earns_nothing(command: str, body: str) -> None:
    environment = BugFix(problems=40, sandbox=ENVIRONMENT.sandbox.model_copy(update={"command_seconds": 2.0}))
    session = await environment.seed_session(ROW)
    if body:
        await session.write_files({PATH: GRANTED.format(body).encode()})
    await session.run(command)
    assert (await environment.verify(session, ROW, {"output": []})).reward == 0.0
    await environment.close_session(session)


async def test_the_tools_show_the_bug_and_repair_it() -> None:
    session = await ENVIRONMENT.seed_session(ROW)
    tools = ENVIRONMENT.tools()
    shown = await tools["run"].call(session, f"python3 {TESTS}")
    assert shown.startswith("ok chunks(")
    assert "\nFAIL clamp(" in shown
    assert shown.endswith("exit status 1")
    replace = tools["replace"].call
    assert await replace(session, PATH, "return", "return") == "replaced"
    assert await replace(session, PATH, "low", "l") == f"error: {PATH} has the text 3 times"
    assert (await replace(session, "library/none.py", "a", "b")).startswith("error: library/none.py cannot be changed")
    assert await replace(session, PATH, "max(low, value)", "max(low, min(value, high))") == "replaced"
    assert "FAIL" not in await tools["run"].call(session, f"python3 {TESTS}")
    assert (await ENVIRONMENT.verify(session, ROW, {"output": []})).reward == 1.0
    await ENVIRONMENT.close_session(session)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_bug_of_every_function_is_found_by_its_hidden_tests(name: str) -> None:
    function = FUNCTIONS[name]
    for bug in range(len(function.bugs)):
        problem = next(
            each
            for split in BugFix().problems.values()
            for each in split
            if each.functions[0] == name and each.bug == bug
        )
        tests = cases(function, problem.key, 10)
        assert any(outcome(function.source(bug), name, arguments) != repr(result) for arguments, result in tests)
        assert function.source(bug).count(function.bugs[bug][1]) == 1


async def test_a_sandbox_that_fails_while_judging_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    session = await ENVIRONMENT.seed_session(ROW)
    monkeypatch.setattr("roundhouse.environments.sandboxes.local.CHILD", Path("/there/is/none"))
    with pytest.raises(SandboxUnavailable):
        await ENVIRONMENT.verify(session, ROW, {"output": []})
    await ENVIRONMENT.close_session(session)


class WithoutPython:
    """A sandbox that keeps files but has no programs."""

    def __init__(self, config: Any) -> None:
        self.files: dict[str, bytes] = {}

    async def start(self) -> None:
        pass

    async def run(self, command: str) -> CommandResult:
        return CommandResult(127, "")

    async def write_files(self, files: dict[str, bytes]) -> None:
        self.files |= files

    async def read_files(self) -> dict[str, bytes]:
        return self.files

    async def close(self) -> None:
        pass


def test_a_sandbox_without_python_is_refused_before_any_rollout() -> None:
    section = {"kind": "custom", "target": f"{__file__}:WithoutPython"}
    with pytest.raises(ConfigError, match="bug_fix needs sh, tar, python3 there, of which one is missing"):
        check_sandboxes(environment_config("bug_fix", json.dumps({"problems": 40, "sandbox": section})))
    assert issubclass(WithoutPython, Sandbox)
