"""A day of operation in an hour: thousands of iterations of the real train flow, and whether anything grows that should not.

    python -m benchmarks.soak [--iterations 2880] [--minutes 60] [--directory DIR]

Real: `roundhouse train` with Prefect server, MLflow server, store on disk, collector, validation, trainer, checkpoints and
retention. Replaced: inference (`soak_engine.py`, which answers at once), and the policy is so small that a training step costs
milliseconds. An iteration of a real run is taken for 30 s, so a day is 2,880 iterations.

Every few seconds memory, threads, open descriptors and CPU seconds of the flow's process and of both servers, and the sizes of
both databases and of Prefect's directory are written down beside the number of finished iterations. At the end a line is
fitted through each (`trend.py`), the first half left out. Exits with 1 when memory or descriptors grow beyond their limits, a
database grows faster than linearly, or an iteration gets dearer. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.trend import BLOCKS, Trend, trend
from roundhouse.config.included_environments import CalculatorEnvironment
from roundhouse.config.training import WarmStartPolicy
from roundhouse.environments import load
from roundhouse.infra import services
from roundhouse.policy.warm_start import make_starting_policy
from roundhouse.store.run import load_run
from roundhouse.store.verification import verify

ITERATION_SECONDS = 30.0
A_DAY = int(24 * 3600 / ITERATION_SECONDS)
WARM_UP = 0.5
"""Share of the iterations at the start that no trend is taken from: caches of servers and allocators fill for hundreds."""
MEMORY_A_DAY = 0.10
"""A process may grow by this share of itself in a day of iterations, the slope's upper limit counted."""
DESCRIPTORS_A_DAY = 5.0
BEND = 1.3
"""A database's growth an iteration may be this much larger in the second half of the run than in the first."""
DEARER_A_DAY = 0.25
"""The flow's CPU seconds of an iteration may grow by this share in a day."""
SAMPLE_SECONDS = 3.0
LEAST_SAMPLES = 3 * BLOCKS
ALLOWED = {"exit code": (0, -signal.SIGTERM, 128 + signal.SIGTERM), "store problems": (0,)}
"""The facts that fail a soak, with what they may be: the run ends by itself, or is ended when the minutes are over."""


@dataclass(frozen=True)
class Case:
    """A series, what of it is shown, and what it must not do."""

    name: str
    unit: str
    factor: float
    kind: str
    """memory, count, database or cost."""


CASES = (
    Case("flow memory", "MiB", 2**-20, "memory"),
    Case("prefect memory", "MiB", 2**-20, "memory"),
    Case("mlflow memory", "MiB", 2**-20, "memory"),
    Case("flow threads", "threads", 1, "count"),
    Case("flow descriptors", "descriptors", 1, "count"),
    Case("prefect descriptors", "descriptors", 1, "count"),
    Case("mlflow descriptors", "descriptors", 1, "count"),
    Case("prefect database", "KiB", 2**-10, "database"),
    Case("prefect directory", "KiB", 2**-10, "database"),
    Case("mlflow database", "KiB", 2**-10, "database"),
    Case("flow CPU", "s", 1, "cost"),
    Case("prefect CPU", "s", 1, "cost"),
    Case("mlflow CPU", "s", 1, "cost"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.split("\n\n")[0])
    parser.add_argument("--iterations", type=int, default=A_DAY)
    parser.add_argument("--minutes", type=float, default=90, help="end the run after this time, however far it is")
    parser.add_argument("--directory", type=Path, help="keep everything here")
    parser.add_argument("--judge", type=Path, metavar="SAMPLES", help="only judge the samples of an earlier soak")
    options = parser.parse_args()
    if options.judge is not None:
        sys.exit(judge([json.loads(line) for line in options.judge.read_text().splitlines()], {}))
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.directory or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        samples, facts = _soak(directory, options.iterations, options.minutes)
        failed = judge(samples, facts)
    sys.exit(1 if failed else 0)


def _soak(directory: Path, iterations: int, minutes: float) -> tuple[list[dict[str, float]], dict[str, Any]]:
    with _engine(directory) as url:
        configuration = _configuration(directory, url, iterations)
        state = directory / "state" / "services"
        services.up(state, ("prefect", "mlflow"))
        try:
            begun = time.monotonic()
            with (directory / "flow.log").open("wb") as log:
                command = [str(Path(sys.executable).with_name("roundhouse")), "train", str(configuration)]
                flow = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            samples = _sample_until_end(flow, directory, begun + minutes * 60)
            seconds = time.monotonic() - begun
        finally:
            services.down(state)
    return samples, _facts(directory, flow.returncode, seconds)


def _sample_until_end(flow: subprocess.Popen[bytes], directory: Path, deadline: float) -> list[dict[str, float]]:
    samples: list[dict[str, float]] = []
    with (directory / "samples.jsonl").open("w") as stream:
        while flow.poll() is None:
            if time.monotonic() > deadline:
                flow.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    flow.wait(60)
                if flow.poll() is None:
                    flow.kill()
                    flow.wait()
                break
            if (sample := _sample(flow.pid, directory)) is not None:
                samples.append(sample)
                stream.write(json.dumps(sample) + "\n")
                stream.flush()
            time.sleep(SAMPLE_SECONDS)
    return samples


def _sample(flow: int, directory: Path) -> dict[str, float] | None:
    """One look; None before the first iteration, and while a server is not up."""
    state = directory / "state" / "services"
    records = services.status(state).records
    try:
        pids = {"flow": flow, "prefect": records["prefect"].pid, "mlflow": records["mlflow"].pid}
        iteration = json.loads((directory / "store/runs/soak/latest.json").read_bytes())["policy_version"]
        sample: dict[str, float] = {"iteration": iteration, "at": time.time(), "load": os.getloadavg()[0]}
        for name, pid in pids.items():
            sample |= _process(name, pid)
    except (OSError, KeyError, ValueError, psutil.Error):
        return None
    if iteration == 0:
        return None
    for name in ("prefect", "mlflow"):
        sample[f"{name} database"] = sum(file.stat().st_size for file in (state / name).glob(f"{name}.db*"))
    sample["prefect directory"] = sum(file.stat().st_size for file in (state / "prefect").rglob("*") if file.is_file())
    return sample


def _process(name: str, pid: int) -> dict[str, float]:
    """Memory, threads, descriptors and CPU seconds of a process and its children."""
    process = psutil.Process(pid)
    found = {f"{name} {what}": 0.0 for what in ("memory", "threads", "descriptors", "CPU")}
    for member in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            found[f"{name} memory"] += member.memory_info().rss
            found[f"{name} threads"] += member.num_threads()
            found[f"{name} descriptors"] += member.num_fds()
            found[f"{name} CPU"] += times.user + times.system
    return found


def _facts(directory: Path, code: int | None, seconds: float) -> dict[str, Any]:
    """What lies in the store at the end."""
    run = load_run(str(directory / "store"), "soak")
    latest = run.latest_checkpoint()
    iterations = 0 if latest is None else latest.policy_version
    files = [file for file in (directory / "store").rglob("*") if file.is_file()]
    found = verify(str(directory / "store"))
    return {
        "exit code": code,
        "iterations": iterations,
        "wall seconds": round(seconds),
        "simulated hours": round(iterations * ITERATION_SECONDS / 3600, 1),
        "checkpoints kept": len(run.checkpoint_versions()),
        "store objects": len(files),
        "store objects an iteration": round(len(files) / max(1, iterations), 1),
        "store bytes an iteration": round(sum(file.stat().st_size for file in files) / max(1, iterations)),
        "store problems": len(found.problems),
    }


def judge(samples: list[dict[str, float]], facts: dict[str, Any]) -> int:
    """Print the table and the line of JSON; how many cases failed."""
    last = samples[-1]["iteration"] if samples else 0
    kept = [sample for sample in samples if sample["iteration"] >= WARM_UP * last]
    results: list[dict[str, Any]] = [{"case": name, "value": value, "unit": ""} for name, value in facts.items()]
    for name, value in facts.items():
        print(f"{name:<30}{value:>12}")
    failed = sum(facts.get(fact, 0) not in allowed for fact, allowed in ALLOWED.items())
    if len(kept) < LEAST_SAMPLES:
        print(f"\nno trends: {len(kept)} samples after the warm-up, {LEAST_SAMPLES} are needed; let it run longer")
    else:
        failed += _judge_trends(samples, kept, results)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(json.dumps({"bench": "soak", "failed": failed, "results": results, "machine": machine}))
    return failed


def _judge_trends(samples: list[dict[str, float]], kept: list[dict[str, float]], results: list[dict[str, Any]]) -> int:
    failed = 0
    print(f"\n{'':<22}{'at the end':>12}{'an iteration':>24}{'a day':>10}{'bend':>7}  verdict")
    for case in CASES:
        found = _trend_of(case, kept)
        fault = _fault(case, found)
        failed += fault is not None
        print(
            f"{case.name:<22}{found.level * case.factor:>8.1f} {case.unit:<11.11}"
            f"{found.slope * case.factor:>10.4f} ± {found.margin * case.factor:<8.4f}"
            f"{found.slope * case.factor * A_DAY:>10.1f}{found.bend:>7.2f}  {fault or 'ok'}"
        )
        results += [
            {"case": f"{case.name} at the end", "value": round(found.level * case.factor, 3), "unit": case.unit},
            {"case": f"{case.name} an iteration", "value": found.slope * case.factor, "unit": case.unit},
            {"case": f"{case.name} an iteration, margin", "value": found.margin * case.factor, "unit": case.unit},
        ]
    print(f"load of the machine: {min(s['load'] for s in samples):.1f} to {max(s['load'] for s in samples):.1f}")
    return failed


def _trend_of(case: Case, samples: list[dict[str, float]]) -> Trend:
    """Of a cost: of its growth from sample to sample, so that a level trend is an iteration that costs the same for ever."""
    xs = [sample["iteration"] for sample in samples]
    ys = [sample[case.name] for sample in samples]
    if case.kind == "cost":
        step = max(1, len(xs) // 100)
        pairs = [(xs[i], xs[i + step], ys[i], ys[i + step]) for i in range(0, len(xs) - step, step)]
        pairs = [pair for pair in pairs if pair[1] > pair[0]]
        xs, ys = [pair[0] for pair in pairs], [(pair[3] - pair[2]) / (pair[1] - pair[0]) for pair in pairs]
    return trend(xs, ys)


def _fault(case: Case, found: Trend) -> str | None:
    """What is wrong; None when nothing is. A trend that cannot be told from none is none."""
    certain = (found.slope - found.margin) * A_DAY
    if case.kind == "memory" and certain > MEMORY_A_DAY * found.level:
        return f"GROWS by {100 * found.slope * A_DAY / found.level:.0f} % of itself a day"
    if case.kind == "count" and certain > DESCRIPTORS_A_DAY:
        return "GROWS"
    if case.kind == "database" and found.bend > BEND:
        return "GROWS FASTER THAN LINEARLY"
    if case.kind == "cost" and certain > DEARER_A_DAY * found.level:
        return "GETS DEARER"
    return None


def small_policy(directory: Path) -> None:
    """A policy so small that a training step costs milliseconds, made unless it is there."""
    if not directory.exists():
        small = WarmStartPolicy(hidden_size=16, layers=1, heads=1, head_dim=16, intermediate_size=32, steps=20)
        make_starting_policy(small, load(CalculatorEnvironment()), 0, directory)


def _configuration(directory: Path, engine: str, iterations: int) -> Path:
    policy = directory / "policy"
    small_policy(policy)
    settings = {
        "run_id": "soak",
        "iterations": iterations,
        "store": str(directory / "store"),
        "policy": {"kind": "pretrained", "path": str(policy)},
        "generation": {
            "backend": "transformers",
            "engine_url": engine,
            "max_model_len": 256,
            "sampling": {"max_new_tokens": 48},
        },
        "rollout": {"prompts_per_iteration": 4, "group_size": 4},
        "train": {"optimizer": {"learning_rate": 3e-4}},
        # What the engine's log-probabilities are drawn from is no policy.
        "validation": {"recompute_tolerance": None},
        "evaluation": {"every": 100, "tasks": 8},
        "infra": {"kind": "local", "state": str(directory / "state")},
    }
    path = directory / "soak.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@contextlib.contextmanager
def _engine(directory: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (directory / "engine.log").open("wb") as log:
        command = [sys.executable, str(Path(__file__).with_name("soak_engine.py")), "--port", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{url}/rh/replicas", timeout=1)
                break
            if time.monotonic() > deadline or process.poll() is not None:
                raise TimeoutError(f"the engine does not answer; see {directory / 'engine.log'}")
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
