"""Every benchmark runs with its smallest arguments, through `make` if it has a target.

The measured values are meaningless here (the machine is busy, the cases are tiny). Each test shows that the documented
command starts, runs all of its parts against the current library, and ends with its line of JSON.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"

BY_MAKE = {
    "soak": "--iterations 3 --minutes 5",
    "bench-restart": "--repeats 1 --stages train",
    "bench-gym": "--rollouts 20 --concurrency 8 --repeats 1 --kinds turns=1",
    "bench-hosted": "--rollouts 20 --repeats 1",
    "bench-journal": "--rollouts 20 --repeats 1",
    "bench-train": "--quick --kind quickstart",
    "bench-packing": "--repeats 1",
    "bench-mfu": "--tokens 512 --long 1024 --repeats 1",
    "bench-trl": "--repeats 1",
    "bench-validate": "--rollouts 256 --batch 64",
    "bench-replay": "--rollouts 96 --mutated 8 --triples 2 --iterations 1",
    "bench-bisect": "--healthy 1 --only entropy",
    "bench-doctor": "--iterations 3 --only verifier --pace 0.1",
    "bench-bill": "--kills 4 --forks 1 --iterations 1 --seed 2",
    "bench-view": "--rollouts 2000 --repeats 1 --no-s3",
    "bench-async": "--iterations 3 --seeds 1",
    "bench-overlap": "--iterations 2 --median 0.5",
    "bench-overhead": "--iterations 3 --set policy.steps=20 rollout.prompts_per_iteration=4 generation.backend=trainer",
    "bench-hacking": "--seeds 1 --iterations 1 --set policy.steps=20 rollout.prompts_per_iteration=4",
    "bench-delta": "--hidden 64 --layers 2 --steps 1 --groups 1",
    "bench-refit": "--refits 3 --callers 2 --hidden 64 --layers 2 --repeats 1 --backend transformers",
    "bench-checkpoint": "--gigabytes 0.2 --shard-mib 64",
    "bench-plan": "--sizes 1 --settings 1",
    "bench-precision": "--models qwen3_moe --engines bfloat16 --prompts 4 --tokens 8",
}
BY_SCRIPT = {
    "composite.py": "--rounds 1",
    "publication.py": "--layers 1 --iterations 2 --collection 0 --s3",
    "hindsight.py": "--seeds 0 --iterations 2",
    "mutation_score.py": "--mutants 2 --tasks 1 --repeats 2 --only lookup",
    "gym/shards.py": "--rollouts 32 --concurrency 8 --repeats 1 --shards 1 2",
    "learning_curves.py": "--algorithms grpo --seeds 0 --iterations 1 --output {tmp}/curves --work {tmp}/work "
    "--set policy.steps=20 evaluation.tasks=4 rollout.prompts_per_iteration=4",
}
NEEDS_A_STATE = {"bench-pages"}
"""It opens the pages of a run that is there, and is run on the soak's."""
NEEDS_A_MODEL = {"pretrained.py", "pretrained_trl.py", "reasoning_gym_replies.py", "reasoning_gym_survey.py"}
"""Of 93 MB and minutes an iteration; tests/e2e/test_pretrained.py runs their configuration, cut down."""
NEEDS_A_CLUSTER = {"kubernetes_jobs.py", "kubernetes_shards.py"}
PARTS = {
    "soak_engine.py",
    "timed_engine.py",
    "gym/instant_engine.py",
    "process_tree.py",
    "restart_timed.py",
    "trl_peer.py",
    "refit_load.py",
    "waiting.py",
}
"""Started or imported by the others."""


def scripts() -> set[str]:
    """Benchmarks that can be started, relative to benchmarks/."""
    found = BENCHMARKS.rglob("*.py")
    return {str(path.relative_to(BENCHMARKS)) for path in found if '__name__ == "__main__"' in path.read_text()}


def targets() -> dict[str, str]:
    """Make's bench targets and soak, with the script each starts."""
    recipes = re.findall(r"^(soak|bench-[a-z]+):.*\n\t.*?(?:-m (benchmarks\.\w+)|benchmarks/(\S+\.py))", MAKEFILE, re.M)
    return {target: path or module.removeprefix("benchmarks.") + ".py" for target, module, path in recipes}


MAKEFILE = (ROOT / "Makefile").read_text()


def test_each_benchmark_is_run_here_or_says_what_it_needs() -> None:
    by_make = {script for target, script in targets().items() if target in BY_MAKE.keys() | NEEDS_A_STATE}
    assert set(targets()) == BY_MAKE.keys() | NEEDS_A_STATE
    assert scripts() - by_make == BY_SCRIPT.keys() | NEEDS_A_CLUSTER | NEEDS_A_MODEL | PARTS & scripts()


def test_each_target_of_make_is_declared_phony() -> None:
    declared = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.M).group(1).split())
    assert declared == set(re.findall(r"^([a-z][a-z0-9-]*):", MAKEFILE, re.M))


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Directory for the files of benchmarks, with a short name because vLLM and chromium create sockets in it."""
    directory = Path(tempfile.mkdtemp(prefix="rhb", dir="/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def _ends_with_json(command: list[str], scratch: Path) -> dict:
    environment = os.environ | {"TMPDIR": str(scratch), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    said = f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert lines, said
    assert lines[-1].startswith("{"), said
    report = json.loads(lines[-1])
    assert report["results"], said
    # 1 may be the verdict of a limit in seconds, which a busy machine misses; make says so as 2.
    assert done.returncode in (0, 1, 2), said
    return report


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_soak_runs_and_its_pages_open(scratch: Path) -> None:
    """The one after the other: `bench-pages` opens the run that the soak left."""
    kept = scratch / "soak"
    arguments = f"{BY_MAKE['soak']} --directory {kept}"
    report = _ends_with_json(["make", "-s", "-o", "setup", "soak", f"BENCH_ARGS={arguments}"], scratch)
    assert report["failed"] == 0
    assert {"case": "iterations", "value": 3, "unit": ""} in report["results"]
    if shutil.which("chromium") is None:
        pytest.skip("needs chromium to open the pages of the soak: apt-get install chromium")
    arguments = f"--state {kept}/state --run soak --repeats 1"
    _ends_with_json(["make", "-s", "-o", "setup", "bench-pages", f"BENCH_ARGS={arguments}"], scratch)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_bill_of_runs_that_are_killed_is_what_engine_and_system_count(scratch: Path) -> None:
    pytest.importorskip("roundhouse.plugins.lab")
    from tests.plugins.lab.replays.billed import UNRECORDED_SECONDS

    command = ["make", "-s", "-o", "setup", "bench-bill", f"BENCH_ARGS={BY_MAKE['bench-bill']}"]
    counted = {each["case"]: each for each in _ends_with_json(command, scratch)["results"]}
    kills, tokens, seconds = (counted[case] for case in ("kills", "tokens on the bill", "CPU seconds not on the bill"))
    assert kills["value"] >= 2
    assert tokens["value"] == tokens["counted"]
    lost = kills.get("driver", 0) * UNRECORDED_SECONDS / seconds["counted"]
    assert -0.01 < seconds["value"] < 0.01 + lost


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", [name for name in BY_MAKE if name not in ("soak", "bench-bill")])
def test_a_target_of_make_runs(target: str, scratch: Path) -> None:
    _ends_with_json(["make", "-s", "-o", "setup", target, f"BENCH_ARGS={BY_MAKE[target]}"], scratch)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", BY_SCRIPT)
def test_a_script_without_a_target_runs(script: str, scratch: Path) -> None:
    _ends_with_json([sys.executable, str(BENCHMARKS / script), *BY_SCRIPT[script].format(tmp=scratch).split()], scratch)
