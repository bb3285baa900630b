"""Task directories of Harbor without its package: files, limits, sandboxes and failures."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.environments import check_sandboxes, load_any
from roundhouse.environments.sandboxes import FilesRefused
from roundhouse.errors import ConfigError
from roundhouse.plugins.harbor import tasks as reading
from roundhouse.plugins.harbor.dockerfile import copied_files, read_dockerfile
from roundhouse.plugins.harbor.trial import unpacked
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.trajectories.records import Rollout, Status
from tests.gym.playground import SAMPLING, ScriptedPolicy, by_turn, calls, rollout_config, says
from tests.plugins.harbor.writing import TOML, script, stepped, toml, write_task

RUN = "FROM ubuntu:24.04\nWORKDIR /app\nRUN apt-get update\n"
CONTAINER = {"kind": "container", "image": "tasks/{task}:1"}


def section(path: Path, **keys: Any) -> Any:
    return parse_config({"run_id": "r", "environment": {"kind": "harbor", "path": str(path), **keys}}).environment


async def play(path: Path, *replies: Any, max_turns: int = 10, **keys: Any) -> dict[str, Rollout]:
    """Play a rollout of each task. Return them by the name of the task."""
    async with open_environment(section(path, heldout_fraction=0, **keys)) as environment:
        rollouts = {}
        for spec in plan_rollouts(environment.tasks("train"), group_size=1, seed=1, iteration=0):
            policy = ScriptedPolicy(by_turn(*replies))
            rollout = await run_rollout(spec, policy, environment, rollout_config(max_turns=max_turns), SAMPLING)
            rollouts[rollout.task["name"]] = rollout
        return rollouts


def run(command: str) -> Any:
    return calls(("run", {"command": command}))


async def test_the_policy_works_on_the_files_and_the_tests_arrive_after_its_last_turn(tmp_path: Path) -> None:
    files = {"environment/Dockerfile": "FROM a\nWORKDIR /app/x\nCOPY in.txt /data/\n", "environment/in.txt": "hello\n"}
    write_task(tmp_path / "copy", files)
    replies = [
        run("pwd; ls /tests /logs /solution; cat /data/in.txt; touch /new /data/new"),
        calls(("write", {"path": "../x/out.txt", "content": "hello"}), ("write", {"path": "/usr/x", "content": ""})),
        says("Done."),
    ]
    rollout = (await play(tmp_path, *replies))["copy"]
    outputs = [item["output"] for item in rollout.items if item["type"] == "function_call_output"]
    assert outputs[0].splitlines()[0] == "/app/x"
    assert "test.sh" not in outputs[0]
    assert "hello\n" in outputs[0]
    assert "touch: cannot touch '/new'" in outputs[0]
    assert outputs[1] == "written"
    assert "Read-only" in outputs[2]
    assert (rollout.status, rollout.reward) == (Status.COMPLETED, 1.0)


UNUSABLE = {
    "missing": ("exit 0", "verifier_failed", "wrote neither /logs/verifier/reward.json nor reward.txt"),
    "nan": ("echo nan > /logs/verifier/reward.txt", "bad_reward", "not finite"),
    "large": ("echo 1e300 > /logs/verifier/reward.txt", "bad_reward", "reward_limit"),
    "word": ("echo well > /logs/verifier/reward.txt", "verifier_failed", "could not convert string to float: 'well"),
    "two": ("""echo '{"a": 1, "b": 2}' > /logs/verifier/reward.json""", "verifier_failed", "Set environment.weights"),
    "hang": ("sleep 100", "verifier_failed", "did not end within [verifier] timeout_sec = 1 s"),
    "long": (
        "head -c 20000 /dev/zero > /logs/verifier/reward.txt",
        "verifier_failed",
        "larger than environment.sandbox",
    ),
}


async def test_tests_without_a_usable_reward_fail_the_rollout(tmp_path: Path) -> None:
    for name, (test, _, _) in UNUSABLE.items():
        toml = TOML.replace("20.0", "1") if name == "hang" else TOML
        write_task(tmp_path / name, {"tests/test.sh": f"#!/bin/bash\n{test}\n", "task.toml": toml})
    rollouts = await play(tmp_path, says("Done."))
    for name, (_, code, detail) in UNUSABLE.items():
        rollout = rollouts[name]
        assert (rollout.status, rollout.reward, rollout.failure_code) == (Status.FAILED, None, code), name
        assert detail in (rollout.failure_detail or ""), name


async def test_weights_make_components_of_the_numbers(tmp_path: Path) -> None:
    for name, text in (("a", '{"right": 1, "style": 0.5, "x": 3}'), ("b", '{"right": 1}')):
        write_task(tmp_path / name, {"tests/test.sh": f"#!/bin/sh\necho '{text}' > /logs/verifier/reward.json\n"})
    rollouts = await play(tmp_path, says("Done."), weights={"right": 0.8, "style": 0.2})
    assert rollouts["a"].reward == pytest.approx(0.9)
    assert rollouts["a"].reward_components == pytest.approx({"right": 0.8, "style": 0.1})
    assert rollouts["a"].metrics["x"] == 3
    assert (rollouts["b"].failure_code, rollouts["b"].reward) == ("verifier_failed", None)


async def test_after_the_time_of_the_task_commands_are_refused_and_the_state_is_judged(tmp_path: Path) -> None:
    write_task(tmp_path / "slow", {"task.toml": TOML.replace("60.0", "4")})
    late = [
        run("echo hello > out.txt"),
        run("sleep 9"),
        run("rm out.txt"),
        calls(("write", {"path": "out.txt", "content": ""})),
    ]
    rollout = (await play(tmp_path, *late, says("Done.")))["slow"]
    outputs = [item["output"] for item in rollout.items if item["type"] == "function_call_output"]
    assert outputs[1] == "killed: it reached its time limit"
    assert "the time limit of the task ([agent] timeout_sec = 4 s) is over" in outputs[2]
    assert outputs[3].startswith("error: the time limit of the task")
    assert rollout.reward == 1.0


JUDGE = "[ -e $STEP.txt ] && echo $SCORE > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
STEPS = {
    **stepped(verifier="env = {SCORE = '1'}", one="verifier.env = {STEP = 'one'}\nmin_reward = 1", two=""),
    **script("tests/judge", JUDGE),
    **script("tests/test.sh", ". /tests/judge"),
    **script("steps/two/tests/test.sh", "STEP=two SCORE=0.5 . /tests/judge"),
    **script("steps/two/workdir/setup.sh", "echo made > given.txt"),
}


async def test_the_instructions_of_steps_follow_each_other_in_one_conversation(tmp_path: Path) -> None:
    write_task(tmp_path / "a", STEPS)
    work = [run("touch one.txt; ls"), says("One."), run("ls -A . /tests /logs/verifier; touch two.txt"), says("Two.")]
    rollout = (await play(tmp_path, *work))["a"]
    assert [item["content"] for item in rollout.items if item.get("role") == "user"] == ["Do one.\n", "Do two.\n"]
    outputs = [item["output"].split() for item in rollout.items if item["type"] == "function_call_output"]
    assert outputs == [
        ["one.txt"],
        [".:", "given.txt", "one.txt", "setup.sh", "/logs/verifier:", "/tests:"],
    ]
    assert (rollout.status, rollout.reward) == (Status.COMPLETED, 0.75)
    assert (rollout.metrics["one.reward"], rollout.metrics["two.reward"]) == (1.0, 0.5)
    cut = (await play(tmp_path, *work, max_turns=1))["a"]
    assert (cut.status, cut.reward, cut.metrics["two.reward"]) == (Status.TRUNCATED, 0.5, 0.0)


async def test_a_step_that_cannot_begin_or_be_judged_fails_the_rollout(tmp_path: Path) -> None:
    passed = {**STEPS, "steps/one/tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n"}
    write_task(tmp_path / "setup", {**passed, **script("steps/two/workdir/setup.sh", "echo no such thing; exit 3")})
    write_task(tmp_path / "first", {**STEPS, **script("steps/one/workdir/setup.sh", "exit 4")})
    write_task(tmp_path / "tests", {**passed, **script("steps/two/tests/test.sh", "true")})
    for name, code, detail in (
        ("setup", "seed_failed", "setup: setup.sh of step two ended with 3. no such thing"),
        ("first", "seed_failed", "first: setup.sh of step one ended with 4."),
        ("tests", "verifier_failed", "tests: tests/test.sh wrote neither"),
    ):
        rollout = (await play(tmp_path / name, says("Done.")))[name]
        assert (rollout.status, rollout.reward, rollout.failure_code) == (Status.FAILED, None, code)
        assert detail in rollout.failure_detail


async def test_a_separate_verifier_gets_the_regular_files_of_the_artifacts_alone(tmp_path: Path) -> None:
    files = {
        **toml('artifacts = ["/app/out", "/data"]', 'environment_mode = "separate"'),
        "tests/Dockerfile": "FROM a\nWORKDIR /judge\nCOPY test.sh expected /tests/\nCOPY expected /data/\n",
        "tests/expected": "hello\n",
        **script(
            "tests/test.sh",
            "cd /app/out; ./a/true && cmp a/b /tests/expected && [ ! -e link ] && [ ! -e ../x ] && [ ! -e /data/expected ] && "
            "echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt",
        ),
    }
    write_task(tmp_path / "apart", files)
    make = "mkdir -p out/a; ln -s /tests/expected out/link; echo x > x; cp /bin/true out/a"
    rollout = (await play(tmp_path, run(f"{make}; echo hello > out/a/b"), says("Done.")))["apart"]
    assert (rollout.reward, rollout.failure_detail) == (1.0, "")
    linked = (await play(tmp_path, run(f"{make}; ln -s /tests/expected out/a/b"), says("Done.")))["apart"]
    assert linked.reward == 0.0
    large = (await play(tmp_path, run("mkdir out; head -c 5000000 /dev/urandom > out/a"), says("Done.")))["apart"]
    assert (large.reward, large.failure_code) == (None, "verifier_failed")
    assert "more than 4194304 bytes" in large.failure_detail


def test_an_archive_of_a_sandbox_has_no_effect_outside_of_its_artifact() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind, target in (
            (".", tarfile.DIRTYPE, ""),
            ("./a", tarfile.REGTYPE, ""),
            ("./hard", tarfile.LNKTYPE, "./a"),
            ("./far", tarfile.LNKTYPE, "../../tests/test.sh"),
            ("./link", tarfile.SYMTYPE, "a"),
            ("./pipe", tarfile.FIFOTYPE, ""),
            ("../up", tarfile.REGTYPE, ""),
            ("/tests/test.sh", tarfile.REGTYPE, ""),
            ("./../app2/x", tarfile.REGTYPE, ""),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, target, 0o4755
            tar.addfile(member)
    assert unpacked(buffer.getvalue(), "/app") == (["/app"], {"/app/a": (b"", True), "/app/hard": (b"", True)})
    with pytest.raises(FilesRefused, match="the archive of /app cannot be read"):
        unpacked(b"no archive", "/app")


def test_a_verifier_with_an_image_needs_a_name_for_it(tmp_path: Path) -> None:
    separate = toml(verifier='environment_mode = "separate"')
    write_task(tmp_path / "Needy", {**separate, "tests/Dockerfile": RUN})
    for sandbox, reason in (
        ({"kind": "local"}, "environment.sandbox.kind is local, with image unset"),
        ({**CONTAINER, "image": "one:1"}, "environment.sandbox.kind is container, with image one:1"),
    ):
        with pytest.raises(ConfigError, match=r"needs an image of its verifier alone \(RUN apt-get update\)") as error:
            load_any(section(tmp_path, sandbox=sandbox))
        assert reason in str(error.value)
    environment: Any = load_any(section(tmp_path, sandbox=CONTAINER, heldout_fraction=0))
    [task] = environment.problems["train"]
    made = [environment._section(task, place) for place in (task.place, task.steps[0].verifier)]
    assert [(each.image, each.directories) for each in made] == [
        ("tasks/needy:1", ("/app", "/tests", "/logs")),
        ("tasks/needy-verifier:1", ("/logs",)),
    ]
    steps = {**stepped(one='verifier.environment = {docker_image = "a/b:2", workdir = "/"}'), **script("tests/test.sh")}
    write_task(tmp_path / "steps" / "s", steps)
    environment = load_any(
        section(tmp_path / "steps", sandbox={**CONTAINER, "image": "{docker_image}{task}"}, heldout_fraction=0)
    )
    [task] = environment.problems["train"]
    assert environment._section(task, task.steps[0].verifier).image == "a/b:2s-one-verifier"


TEST_SH = script("tests/test.sh", "true")
BAD: list[tuple[dict[str, str | None], str]] = [
    ({**stepped(**{"../a": ""}), **TEST_SH}, r"steps\.0\.name is '\.\./a'"),
    ({**stepped(**{"a.": ""}), **TEST_SH}, r"steps\.0\.name is 'a\.'"),
    ({**stepped(a="", A=""), **TEST_SH}, "two steps have one name"),
    (
        {**stepped(a="min_reward = true"), **TEST_SH, "steps/a/instruction.md": None},
        "steps/a/instruction.md is missing",
    ),
    ({**stepped(a=""), **TEST_SH, "steps/a/instruction.md": " \n"}, "steps/a/instruction.md is empty"),
    (stepped(a=""), "steps/a/tests/test.sh is missing"),
    ({**stepped(a='min_reward = "high"'), **TEST_SH}, r"steps\.0\.min_reward"),
    ({**stepped('multi_step_reward_strategy = "best"', a=""), **TEST_SH}, "multi_step_reward_strategy is 'best'"),
    ({**stepped(a='agent.user = "root"'), **TEST_SH}, "a user"),
    ({**stepped(a='verifier.env = {A = "${HOME}"}'), **TEST_SH}, "variables of this machine"),
    ({**stepped(a="healthcheck.command = 'true'"), **TEST_SH}, r"\[\[steps\]\] healthcheck"),
    ({**stepped(a=""), **TEST_SH, "steps/a/trajectory.json": "{}"}, r"trajectory\.json"),
    (toml(verifier='environment_mode = "apart"'), "verifier.environment_mode is 'apart'"),
    (
        toml(verifier='environment_mode = "shared"\nenvironment = {}'),
        "environment_mode is shared, but an environment is set",
    ),
    (toml(verifier='environment = {os = "windows"}'), r"\[environment\] os"),
    (toml(verifier="environment = {gpus = 1}"), "gpus"),
    ({**toml(verifier="environment = {}"), "tests/docker-compose.yaml": ""}, "docker-compose.yaml"),
    (toml(verifier='collect = [{command = "true", service = "db"}]'), "a service of docker-compose"),
    (toml('artifacts = [{source = "/a", service = "db"}]'), "a service of docker-compose"),
    (toml('artifacts = ["/a/../b"]'), r"artifacts\.0\.source is '/a/\.\./b'"),
    (toml('artifacts = [{source = "/a", destination = "../b"}]'), r"artifacts\.0\.destination"),
    (toml('artifacts = ["out"]', 'environment_mode = "separate"'), "an artifact with a relative path"),
    (toml('artifacts = ["/app", "/app/a"]', 'environment_mode = "separate"'), "artifacts /app/a and /app overlap"),
    (
        {**toml(verifier='environment_mode = "separate"'), "tests/Dockerfile": "FROM a\nWORKDIR /judge\n"},
        "copies no file to /tests/test.sh",
    ),
    (
        {**toml(verifier="environment = {}"), "tests/Dockerfile": "FROM a\n"},
        "the working directory of tests/ is not known",
    ),
]


@pytest.mark.parametrize(("files", "reason"), BAD)
def test_wrong_steps_verifiers_and_artifacts_are_refused(
    tmp_path: Path, files: dict[str, str | None], reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"a is not a task that can be played: .*{reason}"):
        load_any(section(write_task(tmp_path / "a", files)))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"environment/Dockerfile": RUN}, "RUN apt-get update"),
        ({"environment/Dockerfile": "FROM a\nWORKDIR /usr/src/app\n"}, "/usr/src/app"),
        ({"environment/Dockerfile": "FROM a\nWORKDIR /app\nCOPY Dockerfile /\n"}, "'/'"),
        ({"environment/Dockerfile": "FROM a\nWORKDIR /app\nCOPY --chown=1 Dockerfile .\n"}, "COPY --chown=1"),
        ({"environment/Dockerfile": "FROM a\nWORKDIR /app\nFROM b\nWORKDIR /app"}, "FROM b"),
        ({"task.toml": TOML + '[environment]\ndocker_image = "a/b:1"\n'}, "docker_image"),
    ],
)
def test_a_task_that_needs_an_image_is_refused_without_one(
    tmp_path: Path, files: dict[str, str | None], reason: str
) -> None:
    write_task(tmp_path / "Needy", files)
    with pytest.raises(ConfigError) as error:
        load_any(section(tmp_path))
    assert reason in str(error.value)
    assert "environment.sandbox.kind is local, with image unset. Build its Dockerfile" in str(error.value)
    environment: Any = load_any(section(tmp_path, sandbox=CONTAINER, heldout_fraction=0))
    [task] = environment.problems["train"]
    made = environment._section(task, task.place)
    assert (made.image, made.directories, made.command_seconds) == ("tasks/needy:1", ("/tests", "/logs"), 20.0)


def test_the_image_and_the_network_of_a_task_are_checked(tmp_path: Path) -> None:
    write_task(tmp_path / "odd", {"task.toml": TOML + '[environment]\ndocker_image = "--privileged"\n'})
    with pytest.raises(ConfigError, match="is '--privileged', not the name of an image"):
        load_any(section(tmp_path, sandbox={**CONTAINER, "image": "{docker_image}"}))
    write_task(tmp_path / "cut off" / "a", {"task.toml": TOML + '[environment]\nnetwork_mode = "no-network"\n'})
    with pytest.raises(ConfigError, match=r"network_mode no-network, but environment\.sandbox\.network is bridge"):
        load_any(section(tmp_path / "cut off", sandbox={**CONTAINER, "network": "bridge"}))


def many(folder: Path) -> None:
    for number in range(3):
        (folder / f"tests/{number}").write_text("x")


def large(folder: Path) -> None:
    (folder / "tests/large").write_bytes(bytes(200))


def linked_folder(folder: Path) -> None:
    (folder / "tests/more").symlink_to("/etc")


def linked_instruction(folder: Path) -> None:
    (folder / "instruction.md").unlink()
    (folder / "instruction.md").symlink_to("/etc/hostname")


def loop(folder: Path) -> None:
    (folder / "tests/loop").symlink_to("loop")


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "tests/pipe")


@pytest.mark.parametrize(
    "change", [many, large, linked_folder, linked_instruction, loop, pipe], ids=lambda each: each.__name__
)
def test_files_that_are_too_many_too_large_or_elsewhere_are_refused(
    tmp_path: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_task(tmp_path / "a")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    monkeypatch.setattr(reading, "MOST_BYTES", size + 100)
    monkeypatch.setattr(reading, "MOST_FILES", 7)
    load_any(section(tmp_path))
    change(folder)
    with pytest.raises(ConfigError, match="is not a task that can be played"):
        load_any(section(tmp_path))


def test_tasks_are_found_by_directory_and_by_pattern_and_split_by_name(tmp_path: Path) -> None:
    for number in range(12):
        write_task(tmp_path / "all" / f"t{number}")
    environment: Any = load_any(section(tmp_path / "all", heldout_fraction=0.3))
    ids = [{row["task_id"] for row in environment.tasks(split)} for split in ("train", "heldout")]
    assert (len(ids[0] | ids[1]), ids[0] & ids[1], len(ids[1]) > 0) == (12, set(), True)
    one: Any = load_any(section(tmp_path / "all" / "t1[01]", heldout_fraction=0))
    assert {row["task_id"] for row in one.tasks("train")} == {"harbor/t10", "harbor/t11"}
    write_task(tmp_path / "other" / "t1")
    for pattern, message in (("*/t1", "have the name t1"), ("none", "has no task directory")):
        with pytest.raises(ConfigError, match=message):
            load_any(section(tmp_path / pattern))
    (tmp_path / "other" / "notes").mkdir()
    with pytest.raises(ConfigError, match=r"other/notes is not a task .*: task\.toml is missing"):
        load_any(section(tmp_path / "other"))


def test_a_right_demonstration_is_the_solution_with_its_real_output(tmp_path: Path) -> None:
    write_task(tmp_path / "a", {"solution/solve.sh": "#!/bin/bash\necho hello | tee out.txt\n"})
    environment: Any = load_any(section(tmp_path, heldout_fraction=0))
    ((_, call, answer, end),) = environment.demonstrations("train", 1, 1.0, seed=0)
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"command": "echo hello | tee out.txt"}
    assert (answer["content"], end["content"]) == ("hello", "Done.")
    (tmp_path / "a" / "solution" / "solve.sh").unlink()
    with pytest.raises(ConfigError, match=r"a has no solution/solve\.sh"):
        load_any(section(tmp_path, heldout_fraction=0)).demonstrations("train", 1, 1.0, seed=0)


def test_a_demonstration_of_steps_ends_with_the_last_one_that_begins(tmp_path: Path) -> None:
    solutions = {name: script(f"steps/{name}/solution/solve.sh", f"touch {name}.txt") for name in ("one", "two")}
    write_task(tmp_path / "a", {**STEPS, **solutions["one"], **solutions["two"]})
    environment: Any = load_any(section(tmp_path, heldout_fraction=0))
    (right,) = environment.demonstrations("train", 1, 1.0, seed=0)
    assert [each["role"] for each in right] == ["user", "assistant", "tool", "assistant"] * 2
    assert [each["content"] for each in right if each["role"] == "user"] == ["Do one.\n", "Do two.\n"]
    (wrong,) = environment.demonstrations("train", 1, 0.0, seed=0)
    assert len(wrong) == 4


async def test_a_directory_that_changed_after_its_row_was_made_is_not_played(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "a")
    [row] = load_any(section(tmp_path, heldout_fraction=0)).tasks("train")
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
    environment: Any = load_any(section(tmp_path, heldout_fraction=0))
    with pytest.raises(Exception, match="The directory of a has changed"):
        await environment.seed_session(row)


def test_one_sandbox_is_started_before_a_run(tmp_path: Path) -> None:
    write_task(
        tmp_path / "a", {"environment/Dockerfile": "FROM a\nWORKDIR /app\nCOPY big .\n", "environment/big": "x" * 2**21}
    )
    check_sandboxes(section(tmp_path))
    with pytest.raises(ConfigError, match=r"sandbox\.kind is local: no task begins there: The files of a cannot"):
        check_sandboxes(section(tmp_path, sandbox={"kind": "local", "disk_mib": 1}))


def test_copies_go_where_a_build_puts_them() -> None:
    context = {name: (name.encode(), False) for name in ("Dockerfile", "a", "d/b", "d/e/c")}
    text = "from x\nWORKDIR /w\nCOPY a b\nCOPY a /w\nCOPY d d2\nCOPY ./d/ .\n"
    text += "WORKDIR sub\nCOPY a /w/d2/\nCOPY . all\nCOPY d/b a /t/\n"
    build = read_dockerfile(text)
    files = copied_files(build.copies, context)
    assert (build.workdir, build.image) == ("/w/sub", "")
    assert {path: content.decode() for path, (content, _) in files.items()} == {
        "/w/b": "d/b", "/w/a": "a", "/w/d2/b": "d/b", "/w/d2/e/c": "d/e/c", "/w/e/c": "d/e/c", "/w/d2/a": "a",
        "/w/sub/all/Dockerfile": "Dockerfile", "/w/sub/all/a": "a", "/w/sub/all/d/b": "d/b", "/w/sub/all/d/e/c": "d/e/c",
        "/t/b": "d/b", "/t/a": "a",
    }  # fmt: skip
    with pytest.raises(ValueError, match="copies gone, which is missing"):
        copied_files(read_dockerfile("FROM x\nWORKDIR /w\nCOPY gone .").copies, context)
