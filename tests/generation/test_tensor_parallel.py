"""The proof of a refit with two workers per matrix: each proves its own shard and no other.

vLLM runs in a separate process (this module as a script), because its environment must be set before the import.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from roundhouse.config.models import GenerationConfig
from roundhouse.generation.vllm_engine import environment

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
LAYER = "model.layers.1."
SPLIT_BY_ROWS = ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj")
SPLIT_BY_COLUMNS = ("self_attn.o_proj", "mlp.down_proj")
ON_BOTH = ("self_attn.k_proj", "self_attn.v_proj", "input_layernorm")
"""One key-value head for two workers, and what is not split."""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_each_worker_proves_its_own_shard_of_every_kind_of_layer(tmp_path: Path) -> None:
    """Planted: a checkpoint that differs from the loaded one in the half that the second worker has, tensor by tensor."""
    config = GenerationConfig(kv_cache_gib=0.125, max_model_len=64, engine_args={"tensor_parallel_size": 2})
    variables = os.environ | environment(config) | {"PYTHONPATH": str(ROOT)}
    variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # an engine process with workers, as a replica has it
    command = [sys.executable, "-m", __spec__.name, config.model_dump_json(), str(tmp_path)]
    replica = subprocess.Popen(
        command, cwd=ROOT, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert replica.stdout is not None
    *_, last = itertools.takewhile(lambda line: line != "ready\n", replica.stdout)
    stale = json.loads(last)
    assert stale.pop("nothing") == [False, False]
    both = {LAYER + name for name in ON_BOTH}
    assert stale == {name: [name.removesuffix(".weight") in both, True] for name in stale}
    wanted = {LAYER + name for name in (*SPLIT_BY_ROWS, *SPLIT_BY_COLUMNS, *ON_BOTH)} | {"model.embed_tokens"}
    assert {name.removesuffix(".weight") for name in stale} == wanted
    started = psutil.Process(replica.pid).children(recursive=True)
    assert len(started) >= 3, "the engine process and its workers"
    replica.kill()
    replica.wait()
    assert not psutil.wait_procs(started, timeout=30)[1], "a killed replica leaves none of its processes"


def test_workers_with_the_same_key_value_head_have_the_same_rows_of_it() -> None:
    import torch

    from roundhouse.generation.weights_probe import _own_shards

    q, k = torch.arange(8.0).reshape(8, 1), torch.arange(2.0).reshape(2, 1)
    for rank, (of_q, of_k) in enumerate([([0, 1], 0), ([2, 3], 0), ([4, 5], 1), ([6, 7], 1)]):
        layer = SimpleNamespace(
            tp_size=4, tp_rank=rank, input_size_per_partition=1, output_partition_sizes=[2, 1], num_kv_head_replicas=2
        )
        own = _own_shards(layer, [q, k])
        assert [part.flatten().tolist() for part in own] == [of_q, [of_k]]


def test_a_replicated_layer_is_proved_whole() -> None:
    """A router of experts reports the size of the group but is not split."""
    import torch

    from roundhouse.generation.weights_probe import _own_shards

    router = torch.ones(4, 2)
    [own] = _own_shards(SimpleNamespace(tp_size=2, tp_rank=1, input_size=2, output_partition_sizes=[4]), [router])
    assert own is router


def halved(name: str, tensor: Any) -> Any:
    """The tensor with the part of the second of two workers changed; all of it where both have the same."""
    changed, middle = tensor.clone(), [size // 2 for size in tensor.shape]
    if any(kind in name for kind in ON_BOTH):
        changed += 1
    elif any(kind in name for kind in SPLIT_BY_COLUMNS):
        changed[:, middle[1] :] += 1
    else:
        changed[middle[0] :] += 1
    return changed


def main(config: GenerationConfig, work: Path) -> None:
    """Print, by changed tensor, the workers that report a difference."""
    from safetensors.torch import load_file, save_file
    from vllm import LLM

    from roundhouse.generation.vllm_engine import engine_arguments
    from roundhouse.generation.vllm_worker import RefitExtension
    from roundhouse.generation.weights_probe import CheckpointTensors, StaleWeights, probe
    from tests.generation import tiny

    def holds_other_weights(worker: RefitExtension, directory: str) -> bool:
        try:
            probe(worker.model_runner.get_model(), CheckpointTensors(Path(directory)))  # type: ignore[attr-defined]
        except StaleWeights:
            return True
        return False

    model = tiny.make_model(work / "model", seed=1)
    tensors = load_file(model / "model.safetensors")
    llm = LLM(**engine_arguments(config, str(model)))
    llm.collective_rpc("roundhouse_load", args=(str(model),))
    stale = {"nothing": llm.collective_rpc(holds_other_weights, args=(str(model),))}
    for name in tensors:
        if (name.startswith(LAYER) and not any(skipped in name for skipped in ("post_", "q_norm", "k_norm"))) or (
            "embed" in name
        ):
            other = work / name
            other.mkdir()
            save_file(tensors | {name: halved(name, tensors[name])}, other / "model.safetensors")
            stale[name] = llm.collective_rpc(holds_other_weights, args=(str(other),))
    print(f"{json.dumps(stale)}\nready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions travel to the workers
    main(GenerationConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
