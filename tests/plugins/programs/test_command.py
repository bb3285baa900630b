"""A program as an environment: unmodified SDK scripts, their verdicts and failures."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from roundhouse.config.consent import unnamed_code
from roundhouse.config.loading import parse_config
from roundhouse.environments.base import TaskRow
from roundhouse.errors import ConfigError
from roundhouse.plugins.programs.command import CommandClient
from roundhouse.plugins.programs.section import CommandEnvironment
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.trajectories.records import Rollout, Status
from tests.gym.collecting import collect
from tests.gym.playground import SAMPLING, ScriptedPolicy, calls, rollout_config, says

ROW: TaskRow = {"task_id": "t", "question": "3*4?", "answer": "12", "responses_create_params": {"input": "3*4?"}}

WITH_OPENAI = """
    import json, os
    from openai import OpenAI
    task = json.load(open(os.environ["ROUNDHOUSE_TASK"]))
    client = OpenAI()
    messages = [{"role": "user", "content": task["question"]}]
    tools = [{"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}]
    while True:
        choice = client.chat.completions.create(model="gpt-4o", messages=messages, tools=tools).choices[0]
        messages.append(choice.message)
        if not choice.message.tool_calls:
            break
        for call in choice.message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "12"})
    right = choice.message.content == task["answer"]
    json.dump({"reward": float(right), "metrics": {"messages": len(messages)}}, open(os.environ["ROUNDHOUSE_RESULT"], "w"))
"""
WITH_RESPONSES = """
    from openai import OpenAI
    print(OpenAI().responses.create(model="gpt-4o", input="3*4?").output_text)
"""
WITH_ANTHROPIC = """
    from anthropic import Anthropic
    message = Anthropic().messages.create(model="claude", max_tokens=8, messages=[{"role": "user", "content": "3*4?"}])
    print(message.content[0].text)
"""
PLAIN = """
    import json, os, sys, urllib.request
    def ask(key=os.environ["OPENAI_API_KEY"], **more):
        body = {"model": "any", "messages": [{"role": "user", "content": "3*4?"}], **more}
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
                                         {"Authorization": f"Bearer {key}", "Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request))["choices"][0]
"""


def in_a_tool_call(messages: list[dict[str, Any]], seed: int) -> Any:
    return says("12") if messages[-1]["role"] == "tool" else calls(("multiply", {}))


def answers(messages: list[dict[str, Any]], seed: int) -> Any:
    return says("12")


def program(tmp_path: Path, text: str) -> Path:
    (tmp_path / "agent.py").write_text(textwrap.dedent(text))
    return tmp_path / "agent.py"


async def play(
    tmp_path: Path, text: str, script: Any = answers, *, verifier: str | None = "judge", count: int = 1, **config: Any
) -> list[Rollout]:
    section = CommandEnvironment(
        kind="command",
        command=(sys.executable, str(program(tmp_path, text))),
        verifier=None if verifier is None else f"tests.gym.judging:{verifier}",
    )
    specs = plan_rollouts([ROW], count, seed=3, iteration=1)
    async with CommandClient(section) as environment:
        return await collect(
            specs, ScriptedPolicy(script), environment, rollout_config(**{"timeout_seconds": 60} | config), SAMPLING
        )


@pytest.mark.real
async def test_an_unmodified_openai_script_is_trained_on_turn_by_turn(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    rollouts = await play(tmp_path, WITH_OPENAI, in_a_tool_call, verifier=None, count=3)
    for rollout in rollouts:
        assert (rollout.status, rollout.reward, rollout.failure_detail) == (Status.COMPLETED, 1.0, "")
        assert rollout.metrics == {"llm_calls": 2.0, "messages": 4.0}
        assert [turn.parent for turn in rollout.turns] == [None, 0], (
            "the second prompt continues the first call's tokens"
        )
        assert all(turn.generation_token_ids for turn in rollout.turns)
        assert [item["type"] for item in rollout.items] == [
            "message",
            "function_call",
            "function_call_output",
            "message",
        ]
    assert len({rollout.seed for rollout in rollouts}) == 3


STREAMED = """
    import json, os
    from openai import OpenAI
    messages = [{"role": "user", "content": "3*4?"}]
    tools = [{"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}]
    while True:
        with OpenAI().chat.completions.stream(model="gpt-4o", messages=messages, tools=tools) as stream:
            for event in stream:
                if event.type == "chunk":
                    message = event.snapshot.choices[0].message  # its calls have their position in the stream
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "12"} for call in message.tool_calls]
    assert "index" in messages[1]["tool_calls"][0]
    json.dump({"reward": 1.0}, open(os.environ["ROUNDHOUSE_RESULT"], "w"))
"""


@pytest.mark.real
async def test_a_client_that_joins_a_streamed_tool_call_continues_its_tokens(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    [rollout] = await play(tmp_path, STREAMED, in_a_tool_call, verifier=None)
    assert (rollout.status, [turn.parent for turn in rollout.turns]) == (Status.COMPLETED, [None, 0]), (
        rollout.failure_detail
    )


WITH_FIELDS_OF_ITS_OWN = (
    PLAIN
    + """
    messages = [{"role": "user", "content": "3*4?"}]
    message = ask(messages=messages)["message"]
    parts = [{"type": "text", "text": message["content"]}]
    messages.append(message | {"content": parts, "provider_specific_fields": {"refusal": None}})
    ask(messages=[*messages, {"role": "user", "content": "Sure?"}])
    json.dump({"reward": 1.0}, open(os.environ["ROUNDHOUSE_RESULT"], "w"))
"""
)


async def test_a_reply_that_returns_with_fields_of_a_client_or_as_a_part_continues_its_tokens(tmp_path: Path) -> None:
    [rollout] = await play(tmp_path, WITH_FIELDS_OF_ITS_OWN, verifier=None)
    assert (rollout.status, [turn.parent for turn in rollout.turns]) == (Status.COMPLETED, [None, 0]), (
        rollout.failure_detail
    )


@pytest.mark.real
@pytest.mark.parametrize(("package", "text"), [("openai", WITH_RESPONSES), ("anthropic", WITH_ANTHROPIC)])
async def test_the_other_dialects_reach_the_policy_too(tmp_path: Path, package: str, text: str) -> None:
    pytest.importorskip(package)
    [rollout] = await play(tmp_path, text)
    assert (rollout.status, rollout.reward, len(rollout.turns)) == (Status.COMPLETED, 1.0, 1), rollout.failure_detail


async def test_a_verifier_judges_and_may_mask(tmp_path: Path) -> None:
    text = PLAIN + "    print(ask()['message']['content'])\n"
    [judged] = await play(tmp_path, text)
    assert (judged.status, judged.reward) == (Status.COMPLETED, 1.0), judged.failure_detail
    [masked] = await play(tmp_path, text, verifier="judge_and_mask")
    assert (masked.status, masked.reward) == (Status.MASKED, 0.5)


ASKS = PLAIN + "    ask()\n"


@pytest.mark.real
@pytest.mark.parametrize(
    ("text", "verifier", "code", "said"),
    [
        (PLAIN + "    sys.exit('out of ideas')\n", "judge", "command_failed", "exit code 1.*out of ideas"),
        (ASKS, None, "command_failed", "wrote no reward"),
        (ASKS + "    open(os.environ['ROUNDHOUSE_RESULT'], 'w').write('[]')\n", None, "command_failed", "holds a list"),
        (ASKS + "    open(os.environ['ROUNDHOUSE_RESULT'], 'w').write('{')\n", None, "command_failed", "not JSON"),
        (ASKS + "    os.mkfifo(os.environ['ROUNDHOUSE_RESULT'])\n", None, "command_failed", "not a regular file"),
        (ASKS + "    os.mkdir(os.environ['ROUNDHOUSE_RESULT'])\n", None, "command_failed", "not a regular file"),
        (
            ASKS + "    os.symlink('/etc/hosts', os.environ['ROUNDHOUSE_RESULT'])\n",
            None,
            "command_failed",
            "not a regular file",
        ),
        (
            ASKS + "    open(os.environ['ROUNDHOUSE_RESULT'], 'w').truncate(3 << 30)\n",
            None,
            "command_failed",
            "more than 16777216 bytes",
        ),
        (
            ASKS + "    log = os.readlink('/proc/self/fd/1'); os.remove(log); os.mkfifo(log); sys.exit(3)\n",
            None,
            "command_failed",
            "its log cannot be read",
        ),
        (
            ASKS + "    open(os.environ['ROUNDHOUSE_RESULT'], 'w').write('{\"reward\": \"good\"}')\n",
            None,
            "bad_reward",
            "reward is 'good'",
        ),
        (ASKS, "judge_badly", "verifier_failed", "no opinion"),
        (PLAIN, "judge", "no_trainable_tokens", "made no model call"),
        (PLAIN + "    ask(temperature=0.2)\n", "judge", "command_failed", "400"),
        (PLAIN + "    ask(stop=['x'])\n", "judge", "command_failed", "400"),
        (PLAIN + "    ask(key='stolen')\n", "judge", "command_failed", "401"),
    ],
)
async def test_a_program_that_fails_has_no_reward_and_a_reason(
    tmp_path: Path, text: str, verifier: str | None, code: str, said: str
) -> None:
    [rollout] = await play(tmp_path, text, verifier=verifier)
    assert (rollout.status, rollout.reward, rollout.failure_code) == (Status.FAILED, None, code), rollout.failure_detail
    assert re.search(said, rollout.failure_detail or "", re.DOTALL), rollout.failure_detail


@pytest.mark.real
async def test_a_limit_of_turns_ends_the_rollout_as_truncated_and_it_is_judged(tmp_path: Path) -> None:
    text = (
        PLAIN
        + """
    said = [ask() for _ in range(3)]
    print(said[0]["message"]["content"])
    assert said[2]["finish_reason"] == "length"
"""
    )
    [rollout] = await play(tmp_path, text, max_turns=2)
    assert (rollout.status, rollout.finish_reason, rollout.reward) == (Status.TRUNCATED, "max_turns", 1.0), (
        rollout.failure_detail
    )
    assert len(rollout.turns) == 2


@pytest.mark.real
async def test_the_time_limit_ends_the_program_and_what_it_started(tmp_path: Path) -> None:
    text = """
        import os, pathlib, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path(__file__).with_name("pids").write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    """
    [rollout] = await play(tmp_path, text, timeout_seconds=6, retry={"attempts": 1})
    assert rollout.failure_code == "rollout_timeout"
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


DAEMON = """
    if os.fork() == 0:
        os.setsid()
        daemon = os.fork()
        if daemon:
            open(os.path.join(os.path.dirname(sys.argv[0]), "daemon"), "w").write(str(daemon))
        else:
            os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], {})
        os._exit(0)
    os.wait()
"""


@pytest.mark.real
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", ""),
        ("    import signal; os.kill(os.getpid(), signal.SIGKILL)\n", "command_failed"),
        (
            "    import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)\n",
            "rollout_timeout",
        ),
    ],
)
async def test_a_process_that_left_session_and_environment_ends_with_the_program(
    tmp_path: Path, end: str, code: str
) -> None:
    text = ASKS + DAEMON + "    json.dump({'reward': 1.0}, open(os.environ['ROUNDHOUSE_RESULT'], 'w'))\n" + end
    [rollout] = await play(tmp_path, text, verifier=None, timeout_seconds=8, retry={"attempts": 1})
    assert (rollout.failure_code or "", rollout.reward) == (code, None if code else 1.0), rollout.failure_detail
    assert code != "command_failed" or "was killed by signal 9" in rollout.failure_detail
    assert not psutil.pid_exists(int((tmp_path / "daemon").read_text()))


@pytest.mark.real
async def test_a_tree_of_any_depth_is_deleted_after_its_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    text = (
        ASKS
        + """
    json.dump({"reward": 1.0}, open(os.environ["ROUNDHOUSE_RESULT"], "w"))
    for _ in range(1500):
        os.mkdir("d")
        os.symlink(os.path.dirname(sys.argv[0]), "link")
        os.chdir("d")
    os.mkdir("closed", 0)
"""
    )
    [rollout] = await play(tmp_path, text, verifier=None)
    assert (rollout.status, rollout.reward) == (Status.COMPLETED, 1.0), rollout.failure_detail
    assert os.listdir(tmp_path) == ["agent.py"]


@pytest.mark.real
async def test_output_without_end_ends_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundhouse.plugins.programs.command.MOST_OUTPUT_BYTES", 2**20)
    [rollout] = await play(tmp_path, "while True:\n    print('again')\n")
    assert rollout.failure_code == "command_failed"
    assert re.search(r"more than 1 MiB to its standard output.*again", rollout.failure_detail or "", re.DOTALL)


@pytest.mark.real
async def test_a_process_that_a_verifier_leaves_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", str(tmp_path / "child"))
    section = CommandEnvironment(
        kind="command",
        command=(sys.executable, str(program(tmp_path, ASKS))),
        verifier="tests.gym.judging:leave_a_process",
    )
    async with CommandClient(section) as environment:
        specs = plan_rollouts([ROW], 1, seed=3, iteration=1)
        [rollout] = await collect(specs, ScriptedPolicy(answers), environment, rollout_config(), SAMPLING)
    assert rollout.reward == 1.0, rollout.failure_detail
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.real
async def test_a_verifier_that_writes_into_foreign_descriptors_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be any rollout's, since the shared memory is overwritten too: each of them is retried by default."""
    monkeypatch.setenv("KEPT", str(tmp_path / "written"))
    config = {"retry": {"attempts": 1}, "timeout_seconds": 60}
    rollouts = await play(tmp_path, ASKS, verifier="write_into_every_descriptor_once", count=2, **config)
    details = {rollout.failure_code: rollout.failure_detail or "" for rollout in rollouts if rollout.reward is None}
    assert details.keys() == {"environment_lost"}
    assert "wrote into a file descriptor that it did not open" in details["environment_lost"]


@pytest.mark.real
async def test_an_engine_that_fails_is_the_failure_and_not_the_program(tmp_path: Path) -> None:
    from roundhouse.generation.protocol import EngineUnreachable

    def gone(messages: list[dict[str, Any]], seed: int) -> Any:
        return EngineUnreachable("nobody there")

    [rollout] = await play(tmp_path, ASKS, gone, retry={"attempts": 1})
    assert (rollout.failure_code, rollout.failure_kind) == ("engine_unreachable", "infra"), rollout.failure_detail


@pytest.mark.real
async def test_only_named_variables_of_the_collector_reach_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("SEARCH_KEY", "given")
    monkeypatch.setenv("KEPT", str(tmp_path / "kept"))
    text = program(
        tmp_path, ASKS + "    print(os.environ.get('AWS_SECRET_ACCESS_KEY'), os.environ.get('SEARCH_KEY'))\n"
    )
    section = CommandEnvironment(
        kind="command",
        command=(sys.executable, str(text)),
        verifier="tests.gym.judging:keep_output",
        variables=("SEARCH_KEY",),
    )
    async with CommandClient(section) as environment:
        await collect(plan_rollouts([ROW], 1, 0, 1), ScriptedPolicy(answers), environment, rollout_config(), SAMPLING)
    assert (tmp_path / "kept").read_text().strip() == "None given"


@pytest.mark.real
async def test_a_path_from_where_you_are_is_found_although_the_program_runs_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`command: [python, agent.py]` as in the documentation; a word that is not a file stays unchanged."""
    program(tmp_path, ASKS + "    print(*sys.argv[1:], os.path.basename(os.getcwd()))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEPT", str(tmp_path / "kept"))
    words = (sys.executable, "agent.py", "--url=http://host//path", "nothing.py", "x" * 5000)
    section = CommandEnvironment(kind="command", command=words, verifier="tests.gym.judging:keep_output")
    async with CommandClient(section) as environment:
        await collect(plan_rollouts([ROW], 1, 0, 1), ScriptedPolicy(answers), environment, rollout_config(), SAMPLING)
    assert (tmp_path / "kept").read_text().split() == [*words[2:], "work"]


def config(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    given = {
        "kind": "command",
        "command": [sys.executable, "agent.py"],
        "train_tasks": str(tmp_path / "rows.jsonl"),
    } | keys
    return {"run_id": "r", "environment": given}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"command": ["no-such-program"]}, r"environment\.command begins with 'no-such-program'"),
        ({"verifier": "tests.gym.judging:nothing"}, r"environment\.verifier is .* has no function nothing.*judge"),
        ({"variables": ["NOT_SET_ANYWHERE"]}, r"environment\.variables names NOT_SET_ANYWHERE"),
        ({"command": []}, r"environment\.command|environment\.command\.command"),
        ({"train_tasks": None}, r"environment\.train_tasks is unset"),
    ],
)
def test_what_cannot_be_started_is_refused_with_the_key(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_environment(parse_config(config(tmp_path, **keys)).environment)


def test_held_out_rows_are_read(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text(json.dumps(ROW | {"task_id": "held"}) + "\n")
    given = parse_config(config(tmp_path, heldout_tasks=str(tmp_path / "held.jsonl")))
    environment = open_environment(given.environment)
    assert [row["task_id"] for split in ("train", "heldout") for row in environment.tasks(split)] == ["t", "held"]


def test_a_stored_command_is_not_run_unnamed(tmp_path: Path) -> None:
    found = unnamed_code(parse_config(config(tmp_path, verifier="mine:judge")), [])
    assert found.keys() == {"environment.command", "environment.verifier"}


async def test_nothing_is_left_of_a_closed_environment() -> None:
    section = CommandEnvironment(kind="command", command=(sys.executable, "-c", "pass"))
    environment = CommandClient(section)
    directory, _, server = environment.host.opened()
    await environment.close()
    assert not directory.exists()
    with pytest.raises(OSError, match=r"refused|Connect"):
        await asyncio.open_connection("127.0.0.1", server.port)
