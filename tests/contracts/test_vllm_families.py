"""vLLM on CPU against transformers: families of docs/models.md as tiny random models, in one process."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.training.families import FAMILIES

pytestmark = [pytest.mark.contract("torchvision-0.28.0"), pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
FARTHEST = {"equal": 1e-4, "bfloat16": 0.25}
"""Largest distance of a log-probability, in nats; in bfloat16 that of rounding (docs/models.md)."""
CHILD = """
import torch
from torchvision.transforms.v2 import functional
assert functional.resize(torch.zeros(3, 4, 4), [2, 2]).shape == (3, 2, 2)
"""
SCRIPT = f"""
import subprocess, sys
from roundhouse import imports
assert imports.broken_torch_extensions() == {{}} and imports.lacks_compiled_operators()
imports.mend_extensions_of_children((), True)
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
"""


@pytest.fixture
def variables(foreign_python: Path) -> dict[str, str]:
    """Environment variables of a process that has PyPI's torchvision, which is built for CUDA."""
    [packages] = foreign_python.parents[1].glob("lib/*/site-packages")
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{packages}", "OMP_NUM_THREADS": "1"}


@pytest.mark.skipif("+cpu" not in metadata.version("torch"), reason="its compiled library fits a torch for CUDA")
def test_torchvision_for_cuda_is_imported_with_torch_for_cpu_and_in_children(variables: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, env=variables)


def test_log_probabilities_of_vllm_after_a_refit_equal_those_of_transformers(
    variables: dict[str, str], tmp_path: Path
) -> None:
    families = [family for family in FAMILIES if family.vllm in FARTHEST]
    requests = [
        json.dumps(
            {
                "model_type": each.model_type,
                "directory": str(tmp_path / each.model_type),
                "dtype": "float32" if each.vllm == "equal" else each.vllm,
            }
        )
        for each in families
    ]
    peer = [sys.executable, "-m", "tests.contracts.vllm_peer"]
    ended = subprocess.run(
        peer, input="\n".join(requests), check=True, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True
    )
    replies = [json.loads(line) for line in ended.stdout.splitlines()]
    results = {family.model_type: reply for family, reply in zip(families, replies, strict=True)}
    for name, reply in results.items():
        print(f"{name:20}", *(f"{key} {value:.2g}" for key, value in reply.items() if key != "error"))
    assert {name: reply["error"] for name, reply in results.items() if "error" in reply} == {}
    farthest = {family.model_type: FARTHEST[family.vllm] for family in families}
    assert {name: reply["off"] for name, reply in results.items() if reply["off"] > farthest[name]} == {}


def test_vllm_sees_the_images_that_the_trainer_sees(variables: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.contracts.vllm_sees", str(tmp_path)]
    ended = subprocess.run(command, check=True, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)
    assert float(ended.stdout) < 1e-4
