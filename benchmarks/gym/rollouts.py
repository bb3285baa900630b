"""CPU milliseconds and rollouts a second: `roundhouse gym collect` and its servers, and NeMo Gym's command and servers, on one
instant engine.

    python benchmarks/gym/rollouts.py                                         Roundhouse alone
    python benchmarks/gym/rollouts.py --peer-head http://127.0.0.1:11000 --peer-gym <its bin/gym> --engine-port 9100

The peer is a running `gym env start` of example_single_tool_call with its model server pointed at `--engine-port` (how to
start it: docs/nemo-gym.md); its servers, agent and collector are used as they are. Both sides are the commands that a person
types: they read the same task rows (one turn, or three with two tool calls in between) and write what they write, JSON lines of
inputs and rollouts, and aggregate metrics. CPU counts the command and every server that took part, and leaves the engine out. A
peer that is not given is reported as skipped.

Cases run in turn, `--repeats` times, so that a noisy machine is noisy for all; the table gives medians, and the last line is
JSON. A command spends CPU on imports: each is charged with the difference of a long and a short run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from roundhouse.environments.base import Environment, Verdict, task_row, tool

HERE = Path(__file__).resolve().parent
ENDS_WITH_US = (sys.executable, "-m", "roundhouse.die_with_parent", str(os.getpid()))
"""Before a command: the servers get SIGTERM when this process ends, however it ends."""
ROUNDHOUSE = (sys.executable, "-c", "from roundhouse.cli import main; main()")
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
PEER_AGENT = "example_single_tool_call_simple_agent"
PEER_RESOURCES = "example_single_tool_call"
SHORT = 64
"""Rollouts of the short run that the peer's imports are taken from."""


class Weather(Environment):
    """The peer's example: a tool that answers at once, a verifier that is always content."""

    name = "weather"

    def tasks(self, split: str) -> list[dict[str, Any]]:
        return []

    @tool("", city="")
    async def get_weather(self, session: None, city: str) -> dict[str, str]:
        return {"city": city, "weather_description": f"The weather in {city} is cold."}

    async def verify(self, session: None, row: dict[str, Any], response: dict[str, Any]) -> Verdict:
        return Verdict(1.0)


def rows(kind: str, count: int) -> list[dict[str, Any]]:
    """Task rows that tell the instant engine what to do."""
    schemas = Weather().tool_schemas()
    found = []
    for number in range(count):
        row = task_row(f"{kind} How is the weather, number {number}?", task_id=f"weather/{number}", tools=schemas)
        row["agent_ref"] = {"type": "responses_api_agents", "name": PEER_AGENT}
        found.append(row)
    return found


@dataclass
class Sample:
    """One run of a case: seconds of CPU and of wall time, for so many rollouts."""

    cpu: float
    wall: float
    rollouts: int


@dataclass
class Case:
    """One way to collect."""

    name: str
    run: Callable[[str, int], Sample]
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def cpu_ms(self, kind: str) -> float:
        return 1000 * statistics.median(sample.cpu / sample.rollouts for sample in self.samples[kind])

    def rate(self, kind: str) -> float:
        return statistics.median(sample.rollouts / sample.wall for sample in self.samples[kind])


def cpu_of(pids: list[int]) -> float:
    """CPU seconds that these processes and their children have used."""
    total = 0.0
    for pid in set(pids):  # an environment server that is a relay has its agent's
        process = psutil.Process(pid)
        for member in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = member.cpu_times()
                total += times.user + times.system
    return total


Play = Callable[[str, int], Sample]
"""Plays so many rollouts of a kind."""


def typed(command: Callable[[Path, Path], list[str]], pids: list[int]) -> Play:
    """A command that reads task rows and writes rollouts; `pids` are the servers that it needs, the engine not among them."""

    def once(kind: str, count: int) -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as directory:
            source, output = Path(directory, "rows.jsonl"), Path(directory, "rollouts.jsonl")
            source.write_text("".join(json.dumps(row) + "\n" for row in rows(kind, count)))
            servers, before, begun = cpu_of(pids), _children_cpu(), time.perf_counter()
            ended = subprocess.run(command(source, output), env=ENVIRONMENT, capture_output=True, cwd=directory)
            wall = time.perf_counter() - begun
            if ended.returncode:
                raise SystemExit(f"The command failed: {ended.stderr.decode()[-2000:]}")
            rewards = [json.loads(line)["reward"] for line in output.open()]
            if len(rewards) != count or len(set(rewards)) != 1:  # NeMo Gym 0.7 gives 0 to a rollout without a tool call
                raise SystemExit(f"{len(rewards)} of {count} rollouts were collected, with rewards {set(rewards)}.")
            return _children_cpu() - before + cpu_of(pids) - servers, wall

    def run(kind: str, count: int) -> Sample:
        short, long = once(kind, SHORT), once(kind, SHORT + count)
        return Sample(long[0] - short[0], long[1] - short[1], count)

    return run


def ours(concurrency: int, *place: str) -> Callable[[Path, Path], list[str]]:
    """`roundhouse gym collect` from a place."""
    base = (
        [*ROUNDHOUSE, "gym", "collect", "--agent", PEER_AGENT] if "--head" in place else [*ROUNDHOUSE, "gym", "collect"]
    )

    def command(source: Path, output: Path) -> list[str]:
        return [*base, "-i", str(source), "-o", str(output), "--concurrency", str(concurrency), *place]

    return command


def theirs(gym: str, concurrency: int) -> Callable[[Path, Path], list[str]]:
    """The peer's own collector."""
    base = [gym, "eval", "run", "--no-serve", "--agent", PEER_AGENT, "--concurrency", str(concurrency)]
    return lambda source, output: [*base, "--input", str(source), "--output", str(output)]


@contextlib.contextmanager
def started(engine: str) -> Iterator[tuple[str, list[int]]]:
    """`roundhouse gym start` with an agent, a resources and a model server of ours: the head's URL, and the servers' pids."""
    reference = {"type": "resources_servers", "name": "weather"}
    model = {"type": "responses_api_models", "name": "policy_model"}
    tree = {
        "weather": {
            "resources_servers": {
                "roundhouse_environment": {"environment": {"kind": "custom", "target": "rollouts:Weather"}}
            }
        },
        PEER_AGENT: {
            "responses_api_agents": {"roundhouse_agent": {"resources_server": reference, "model_server": model}}
        },
        "policy_model": {"responses_api_models": {"roundhouse_model": {"base_url": [f"{engine}/v1"]}}},
    }
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "servers.json").write_text(json.dumps(tree))  # JSON is YAML
        command = [*ROUNDHOUSE, "gym", "start", "servers.json", "--no-ray", "--head-port", "0", "--json"]
        process = subprocess.Popen(
            [*ENDS_WITH_US, *command], env=ENVIRONMENT, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            yield ready["head"], [server["pid"] for server in ready["servers"]]
        finally:
            process.terminate()
            process.wait()


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def served(*command: str) -> Iterator[int]:
    """A process that is stopped at the end; its pid."""
    process = subprocess.Popen([*ENDS_WITH_US, sys.executable, *command], env=ENVIRONMENT)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, seconds: float = 30) -> None:
    """Until something answers."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=1).read()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def instances(head: str) -> list[dict[str, Any]]:
    """The peer's servers, from its head server."""
    with urllib.request.urlopen(f"{head}/server_instances", timeout=10) as reply:
        found: list[dict[str, Any]] = json.load(reply)
    return found


def report(cases: list[Case], kinds: list[str], peer: Case | None) -> None:
    """The table, and the line of JSON."""
    results = []
    for kind in kinds:
        print(f"\n{kind}\n{'case':<44}{'CPU ms/rollout':>16}{'rollouts/s':>12}{'of the peer':>14}")
        for case in cases:
            ratio = None if peer is None else case.cpu_ms(kind) / peer.cpu_ms(kind)
            shown = "skipped" if ratio is None else f"{ratio:.3f}"
            print(f"{case.name:<44}{case.cpu_ms(kind):>16.2f}{case.rate(kind):>12.0f}{shown:>14}")
            for unit, value, theirs_ in (
                ("CPU ms/rollout", case.cpu_ms(kind), peer and peer.cpu_ms(kind)),
                ("rollouts/s", case.rate(kind), peer and peer.rate(kind)),
            ):
                row = {"case": f"{case.name}, {kind}", "value": round(value, 3), "unit": unit}
                results.append(row | {"peer": theirs_, "ratio": theirs_ and round(value / theirs_, 4)})
    machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    print("\n" + json.dumps({"bench": "gym", "results": results, "machine": machine}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=["turns=1", "turns=3", "turns=3 tokens=4096+1024"])
    parser.add_argument("--engine-port", type=int, help="port of the instant engine that the peer's model server uses")
    parser.add_argument("--peer-head", help="URL of NeMo Gym's head server")
    parser.add_argument("--peer-gym", help="NeMo Gym's `gym` command")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        engine_port, server_port = options.engine_port or free_port(), free_port()
        stack.enter_context(served(str(HERE / "instant_engine.py"), "--port", str(engine_port)))
        server = "roundhouse.plugins.nemo_gym.servers.resources"
        pid = stack.enter_context(served("-m", server, "--environment", "rollouts:Weather", "--port", str(server_port)))
        engine, resources = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{server_port}"
        wait_for(f"{engine}/v1/models")
        wait_for(resources)

        head, own_pids = stack.enter_context(started(engine))
        in_process = ["--environment", "rollouts:Weather", "--engine-url", engine]
        rows_file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".jsonl"))
        rows_file.write(json.dumps(rows("turns=1", 1)[0]) + "\n")
        rows_file.flush()

        def remote(url: str) -> list[str]:
            parameters = json.dumps({"url": url, "train_tasks": rows_file.name})
            return ["--environment", "remote", "--parameters", parameters, "--engine-url", engine]

        def case(name: str, pids: list[int], *place: str) -> Case:
            return Case(name, typed(ours(options.concurrency, *place), pids))

        cases = [
            case("gym collect, environment in process", [], *in_process),
            case("gym collect, our resources server", [pid], *remote(resources)),
            case("gym collect, our agent and servers", own_pids, "--head", head),
        ]
        peer = None
        if options.peer_head and options.peer_gym:
            found = instances(options.peer_head)
            theirs_ = next(entry for entry in found if entry["process_name"] == PEER_RESOURCES)
            cases.append(case("gym collect, the peer's resources server", [theirs_["pid"]], *remote(theirs_["url"])))
            peer = Case(
                "the peer's whole",
                typed(theirs(options.peer_gym, options.concurrency), [entry["pid"] for entry in found]),
            )
            cases.append(peer)
        for _ in range(options.repeats):
            for kind in options.kinds:
                for case_ in cases:
                    case_.samples.setdefault(kind, []).append(case_.run(kind, options.rollouts))
    report(cases, options.kinds, peer)


if __name__ == "__main__":
    main()
