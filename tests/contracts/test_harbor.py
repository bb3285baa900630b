"""Harbor's own package: it accepts and refuses the same directories, and its trials have the same rewards."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from roundhouse.errors import ConfigError, DataError
from roundhouse.plugins.harbor.environment import Harbor
from roundhouse.plugins.harbor.tasks import HarborTask, read_task
from tests.plugins.harbor.writing import TOML, script, stepped, toml, write_task

pytestmark = [pytest.mark.contract("harbor-0.26.0"), pytest.mark.timeout(900)]
PEER = Path(__file__).parent / "harbor_peer.py"
SCORE = "#!/bin/bash\n[ -e out.txt ] && right=1 || right=0\n"


def writes(text: str, file: str = "reward.txt") -> dict[str, str | None]:
    """A test that writes this reward, whatever was done."""
    return {"tests/test.sh": f"#!/bin/bash\ncat > /logs/verifier/{file} <<'END'\n{text}\nEND\n"}


PLAYED: dict[str, dict[str, str | None]] = {
    "plain": {},
    "named": {
        "task.toml": TOML + '[task]\nname = "acme/named"\n',
        "instruction.md": "<!-- canary 1 -->\n\n \nWrite.\n",
    },
    "files": {
        "environment/Dockerfile": "# files\nFROM ubuntu:24.04 AS base\nWORKDIR /srv/deep\nCOPY a.txt \\\n  b.txt ./\n"
        "COPY tree/ /data/\nCOPY tree .\nCOPY a.txt copy/of.txt\n",
        "environment/a.txt": "a\n",
        "environment/b.txt": "b\n",
        "environment/tree/deep/c.txt": "c\n",
        "environment/tree/go.sh": "#!/bin/sh\necho went\n",
        "tests/test.sh": "#!/bin/bash\n(pwd; find . /data /tests -type f | sort; cat copy/of.txt; ./go.sh; cat out.txt) 2>&1 | "
        "cksum | cut -d' ' -f1 > /logs/verifier/reward.txt\n",
    },
    "numbers": {
        "tests/test.sh": SCORE + 'echo "{\\"reward\\": $right, \\"style\\": 0.5}" > /logs/verifier/reward.json\n'
    },
    "one number": {"tests/test.sh": SCORE + 'echo "{\\"accuracy\\": 0.$right}" > /logs/verifier/reward.json; exit 3\n'},
    "truth": writes('{"reward": true}', "reward.json"),
    "both files": {
        "tests/test.sh": SCORE + "cd /logs/verifier; echo 7 > reward.txt; echo '{\"reward\": 0.25}' > reward.json\n"
    },
    "helper": {
        "tests/test.sh": '#!/bin/bash\n/tests/lib/check "$EXPECTED$MORE" > /logs/verifier/reward.txt\n',
        "tests/lib/check": '#!/bin/sh\n[ "$(cat out.txt)" = "$1" ] && echo 0.75 || echo -1e0\n',
        "task.toml": TOML.replace("timeout_sec = 20.0", 'timeout_sec = 20\nenv = {EXPECTED = "h", MORE = "el\'lo"}')
        + '[environment]\nworkdir = "/srv/x"\nenv = {WORD = "hel\'lo", EXPECTED = "other"}\n',
        "solution/solve.sh": '#!/bin/bash\necho "$WORD" > out.txt\n',
    },
    "old reward": {
        "tests/test.sh": "#!/bin/bash\ncat /tests/mark 2>/dev/null; exit 0\n",
        "solution/solve.sh": "#!/bin/bash\nmkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt\n",
    },
    "nothing": {"tests/test.sh": "#!/bin/bash\ntrue\n"},
    "empty": {"tests/test.sh": "#!/bin/bash\n: > /logs/verifier/reward.txt\n"},
    "word": writes("good"),
    "nan": writes("nan"),
    "huge": writes('{"reward": 1e999}', "reward.json"),
    "null": writes('{"reward": null}', "reward.json"),
    "text": writes('{"reward": "1"}', "reward.json"),
    "list": writes("[1]", "reward.json"),
    "no JSON": writes("{", "reward.json"),
    "hang": {"tests/test.sh": "#!/bin/bash\nsleep 1000\n", "task.toml": TOML.replace("20.0", "1")},
}
"""Files of tasks by name; both sides play them."""
SUM = (
    "(env | grep ^WORD; pwd; cd /; find app tests judge logs/artifacts -mindepth 1 -printf '%y %p\\n' | sort; cat app/*.txt "
    "logs/artifacts/*.txt; [ -x app/bin/go ] && echo x) 2>/dev/null | cksum | cut -d' ' -f1 > /logs/verifier/reward.txt"
)
"""Writes a number of the files that the tests see."""
NUMBERS = {
    **script(
        "steps/one/tests/test.sh",
        SCORE + 'echo "{\\"reward\\": 0.$right, \\"style\\": 0.5}" > /logs/verifier/reward.json',
    ),
    **script("steps/one/solution/solve.sh", "touch out.txt"),
    **script("steps/two/tests/test.sh", 'echo \'{"reward": 0.7, "speed": 3}\' > /logs/verifier/reward.json'),
    **script("steps/two/solution/solve.sh", "true"),
}
CHANGES = (
    "echo hello > out.txt; mkdir -p bin empty deep/er; echo a > /logs/artifacts/a.txt; echo b > b.txt",
    "ln b.txt hard.txt; cp b.txt bin/go; chmod +x bin/go; rm -f given.txt",
    "echo c > deep/er/c.tmp; echo d > deep/er/d.txt",
)
GIVEN = {"environment/Dockerfile": "FROM a\nWORKDIR /app\nCOPY given.txt .\n", "environment/given.txt": "given\n"}
STEPS: dict[str, dict[str, str | None]] = {
    "steps": {
        **GIVEN,
        **stepped(
            one='verifier.env = {WORD = "one"}', two="agent.timeout_sec = 30", three="", verifier='env = {WORD = "all"}'
        ),
        **script("tests/test.sh", SUM, "touch /tests/mark /logs/verifier/mark"),
        **script("solution/solve.sh", "pwd >> out.txt", "ls -A /tests /logs/verifier >> out.txt"),
        **script("steps/two/workdir/setup.sh", "(pwd; ls -A /tests /logs/verifier) > made.txt"),
        "steps/two/workdir/given.txt": "again\n",
        "steps/two/tests/extra": "extra\n",
        **script("steps/two/solution/solve.sh", "echo two >> out.txt"),
        **script("steps/three/tests/test.sh", SUM.replace("cksum", "wc -c")),
    },
    "steps mean": {**stepped(one="", two=""), **NUMBERS},
    "steps final": {**stepped('multi_step_reward_strategy = "final"', one="", two=""), **NUMBERS},
    "steps stop": {**stepped(one="min_reward = 0.1", two=""), **NUMBERS},
    "steps stop final": {
        **stepped('multi_step_reward_strategy = "final"', one="min_reward = {style = 0.5, reward = 0.1}", two=""),
        **NUMBERS,
    },
    "steps stop unnamed": {**stepped(one="min_reward = {speed = 0.1}", two=""), **NUMBERS},
    "steps setup": {**stepped(one="", two=""), **NUMBERS, **script("steps/two/workdir/setup.sh", "exit 3")},
    "steps unjudged": {**stepped(one="", two=""), **NUMBERS, **script("steps/two/tests/test.sh", "true")},
    "steps separate": {
        **GIVEN,
        **stepped(
            'artifacts = ["/app/out.txt"]',
            one="",
            two='artifacts = ["/app/deep"]\nverifier.environment_mode = "separate"',
        ),
        **script("tests/test.sh", SUM),
        **script("steps/one/solution/solve.sh", *CHANGES),
        **script("steps/two/solution/solve.sh", "echo more >> out.txt"),
        "steps/two/tests/Dockerfile": "FROM a\nWORKDIR /judge\nCOPY . .\nCOPY test.sh /tests/\n",
        **script("steps/two/tests/test.sh", SUM),
    },
    "separate": {
        **GIVEN,
        **toml(
            'artifacts = ["/app/out.txt", "/app/nothing", "/logs/artifacts/a.txt"]', 'environment_mode = "separate"'
        ),
        **script("tests/test.sh", SUM),
        **script("solution/solve.sh", *CHANGES),
    },
    "separate tests": {
        **GIVEN,
        **toml(
            'artifacts = [{source = "/app", exclude = ["*.tmp"], destination = "app"}]', 'environment_mode = "separate"'
        ),
        "tests/Dockerfile": "FROM a\nWORKDIR /judge\nCOPY . /tests/\nCOPY test.sh /app/old.txt\n",
        **script("tests/test.sh", SUM),
        **script("solution/solve.sh", *CHANGES),
    },
    "separate link": {
        **toml('artifacts = ["/app"]', 'environment_mode = "separate"'),
        **script("tests/test.sh", SUM),
        **script("solution/solve.sh", *CHANGES, "ln -s /tests/test.sh link.txt; ln -s ../../tests/test.sh deep/link"),
    },
    "separate environment": {
        **GIVEN,
        **toml(
            verifier='env = {WORD1 = "one"}\n[verifier.environment]\nworkdir = "/judge"\n'
            'env = {WORD2 = "two", WORD1 = "three"}\n'
            '[[verifier.collect]]\ncommand = "cat *.txt > /logs/artifacts/all.txt; exit 3"',
            rest='[environment]\nenv = {WORD3 = "four"}\n',
        ),
        **script("tests/test.sh", SUM),
        **script("solution/solve.sh", *CHANGES),
    },
    "separate without": {
        **toml('artifacts = ["/app/out.txt"]', 'environment_mode = "separate"'),
        **script("tests/test.sh", "cat /logs/verifier/reward.txt"),
    },
}
"""Tasks with steps and separate verifiers, which both sides play."""
PLAYED |= STEPS
REFUSED: dict[str, dict[str, str | None]] = {
    "no task.toml": {"task.toml": None},
    "no TOML": {"task.toml": "[agent\n"},
    "time": {"task.toml": '[agent]\ntimeout_sec = "soon"\n'},
    "table": {"task.toml": "environment = 3\n"},
    "variable": {"task.toml": "[environment.env]\nA = 1\n"},
    "package": {"task.toml": '[task]\nname = "alone"\n'},
    "mode": {"task.toml": '[environment]\nnetwork_mode = "some"\n'},
    "version": {"task.toml": "version = 1.0\n"},
    "no instruction": {"instruction.md": None},
    "no tests": {"tests/test.sh": None},
    "no Dockerfile": {"environment/Dockerfile": None, "environment/a.txt": "a\n"},
    "step name": {**stepped(**{"a:b": ""}), **script("tests/test.sh", "")},
    "step names": {**stepped(a="", A=""), **script("tests/test.sh", "")},
    "no step": {**stepped(a=""), **script("tests/test.sh", ""), "steps/a/instruction.md": None},
    "no step tests": stepped(a=""),
    "strategy": {**stepped('multi_step_reward_strategy = "best"', a=""), **script("tests/test.sh", "")},
    "threshold": {**stepped(a='min_reward = "high"'), **script("tests/test.sh", "")},
    "artifact": toml('artifacts = ["/app/../etc"]'),
    "destination": toml('artifacts = [{source = "/app", destination = "/x"}]'),
    "shared environment": toml(verifier='environment_mode = "shared"\n[verifier.environment]'),
}
ONLY_HERE: dict[str, tuple[dict[str, str | None], str]] = {
    "no tests copied": (
        {**toml(verifier='environment_mode = "separate"'), "tests/Dockerfile": "FROM a\nWORKDIR /judge\n"},
        "copies no file to /tests/test.sh",
    ),
    "overlap": (toml('artifacts = ["/app/a", "/app"]', 'environment_mode = "separate"'), "/app/a and /app overlap"),
    "relative": (toml('artifacts = ["out.txt"]', 'environment_mode = "separate"'), "an artifact with a relative path"),
    "health": (
        {**stepped(a='healthcheck = {command = "true"}'), **script("tests/test.sh", "")},
        r"\[\[steps\]\] healthcheck",
    ),
    "user": ({"task.toml": TOML.replace("60.0", '60.0\nuser = "agent"')}, "a user"),
    "secret": ({"task.toml": TOML + '[environment.env]\nA = "${HOME}"\n'}, "variables of this machine"),
    "gpu": ({"task.toml": TOML + "[environment]\ngpus = 1\n"}, "gpus"),
    "compose": ({"environment/docker-compose.yaml": "services: {}\n"}, "docker-compose.yaml"),
    "ignored": ({"tests/.harborignore": "a\n"}, ".harborignore"),
    "endless": ({"task.toml": TOML.replace("60.0", "inf")}, "agent.timeout_sec is inf"),
    "unnamed place": ({"environment/Dockerfile": "FROM python\n"}, "Set WORKDIR in its Dockerfile"),
}
"""Tasks that Harbor accepts and that are refused here, with a part of the reason."""
TEMPLATES = {
    "template": ("--verifier-mode", "shared"),
    "template-separate": ("--verifier-mode", "separate"),
    "template-steps": ("--steps", "2"),
}
"""Options of `harbor init` by the name of the task."""
FAILURES = (
    "RewardFileNotFoundError",
    "RewardFileEmptyError",
    "VerifierOutputParseError",
    "ValidationError",
    "VerifierTimeoutError",
    "RuntimeError",
)


@pytest.fixture(scope="module")
def cache() -> dict[str, Any]:
    return {}


@pytest.fixture
def theirs(foreign_python: Path, cache: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Harbor's word on each directory, and the directories, made once for the module."""
    if not cache:
        folder = tmp_path_factory.mktemp("harbor")
        for name, files in (PLAYED | REFUSED | {name: files for name, (files, _) in ONLY_HERE.items()}).items():
            write_task(folder / name, files, programs=("environment/tree/go.sh",) if name == "files" else ())
            if name in PLAYED:
                (folder / name / "play").touch()
        (folder / "helper" / "tests" / "lib" / "check").chmod(0o755)
        (folder / "named" / "tests" / "link").symlink_to("../instruction.md")
        for name in ("link out", "link in"):
            write_task(folder / name)
        (folder / "link out" / "tests" / "secret").symlink_to("/etc/passwd")
        (folder / "link in" / "tests" / "inner").symlink_to("../environment/Dockerfile")
        harbor = foreign_python.with_name("harbor")
        for name, options in TEMPLATES.items():
            command = [harbor, "init", "--task", "--no-pytest", "--include-canary-strings", *options, "-o", folder]
            subprocess.run([*command, f"acme/{name}"], check=True, capture_output=True)
            for path in (folder / name).rglob("instruction.md"):
                path.open("a").write("\nDo it.\n")
        directories = sorted(each for each in folder.iterdir() if each.is_dir())
        command = [foreign_python, PEER, tmp_path_factory.mktemp("trials"), *directories]
        cache["folder"] = folder
        cache["tasks"] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return cache


@pytest.mark.parametrize("name", [*PLAYED, *TEMPLATES, "link in"])
def test_a_task_is_read_as_harbor_reads_it(name: str, theirs: dict[str, Any]) -> None:
    task, other = read_task(theirs["folder"] / name), theirs["tasks"][name]
    times = [task.toml.agent.timeout_sec, task.toml.verifier.timeout_sec]
    instructions = [step.instruction for step in task.steps]
    assert [task.name, instructions, times] == [other["name"], other["instructions"], other["timeouts"]]


@pytest.mark.parametrize("name", [*REFUSED, "link out"])
def test_a_directory_that_harbor_refuses_is_refused_before_a_run(name: str, theirs: dict[str, Any]) -> None:
    assert "refused" in theirs["tasks"][name]
    with pytest.raises(ConfigError, match=f"{name} is not a task that can be played"):
        read_task(theirs["folder"] / name)


@pytest.mark.parametrize("name", ONLY_HERE)
def test_a_feature_that_is_missing_here_is_refused_by_its_name(name: str, theirs: dict[str, Any]) -> None:
    assert "refused" not in theirs["tasks"][name]
    with pytest.raises(ConfigError, match=ONLY_HERE[name][1]):
        read_task(theirs["folder"] / name)


async def judged(task: HarborTask, folder: Path, solve: bool) -> dict[str, Any]:
    """Return the reward and the numbers of the state after the solution, or of the first state; or the failure."""
    environment = Harbor(str(folder), heldout_fraction=0)
    [row] = environment.tasks("train")
    session = await environment.seed_session(json.loads(json.dumps(row)))
    try:
        for number, step in enumerate(task.steps):
            if number and await environment.follow_up(session, row, {}) != step.instruction:
                break
            if solve:
                assert step.solution is not None
                await environment.run(session, step.solution)
        verdict = await environment.verify(session, row, {})
    except DataError as error:
        return {"error": str(error)}
    finally:
        await environment.close_session(session)
    return {"reward": verdict.reward, "metrics": verdict.metrics}


@pytest.mark.parametrize("name", PLAYED)
async def test_a_state_has_the_reward_of_harbors_verifier(name: str, theirs: dict[str, Any]) -> None:
    folder = theirs["folder"] / name
    for state in ("solved", "unsolved"):
        ours = await judged(read_task(folder), folder, state == "solved")
        other = theirs["tasks"][name][state]
        if "error" in other:
            assert other["error"] in FAILURES
            assert "error" in ours, state
            continue
        rewards = other["rewards"]
        primary = rewards["reward"] if "reward" in rewards else next(iter(rewards.values()))
        metrics = {f"{step}.{name}": each[name] for step, each in other["steps"].items() for name in each}
        assert ours == {"reward": primary, "metrics": (rewards if len(rewards) > 1 else {}) | metrics}, state


def test_states_with_and_without_a_reward_were_compared(theirs: dict[str, Any]) -> None:
    played = {name: theirs["tasks"][name] for name in PLAYED}
    rewarded = [name for name, each in played.items() if "rewards" in each["solved"]]
    different = [name for name in rewarded if played[name]["solved"] != played[name]["unsolved"]]
    assert (len(rewarded), len(different)) == (21, 19)
