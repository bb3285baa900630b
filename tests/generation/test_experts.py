"""Refits of a mixture of experts in vLLM: it agrees with transformers, and the proof detects an expert that was not updated.

vLLM runs in a separate process (this module as a script), because its environment must be set before the import.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.models import GenerationConfig
from roundhouse.generation.vllm_engine import environment

ROOT = Path(__file__).parents[2]
TOKENS = list(range(10, 40))
EXPERT = "model.layers.1.mlp.experts."


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_refit_brings_every_expert_and_a_stale_one_is_found(tmp_path: Path) -> None:
    config = GenerationConfig(kv_cache_gib=0.125, max_model_len=64, engine_args={"tensor_parallel_size": 2})
    command = [sys.executable, "-m", __spec__.name, config.model_dump_json(), str(tmp_path)]
    variables = os.environ | environment(config) | {"PYTHONPATH": str(ROOT)}
    variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # an engine process with workers, as a replica has it
    ended = subprocess.run(command, check=True, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)
    found = json.loads(ended.stdout.splitlines()[-1])
    assert all(off < 1e-3 for off in found["off"]), "log-probabilities after three refits, beside those of transformers"
    assert found["apart"] > 0.1, "of the two models"
    assert found["stale"] == {"nothing": [False] * 2, "0": [True] * 2, "3": [True] * 2}, "by each of two workers"
    assert all("The experts of" in error for error in found["unpacked"]), (
        "vLLM packs them itself: complete_reload need not"
    )


def main(config: GenerationConfig, work: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    from roundhouse.generation.vllm_engine import engine_arguments
    from roundhouse.generation.vllm_worker import RefitExtension
    from roundhouse.generation.weights_probe import CheckpointTensors, StaleWeights, probe
    from roundhouse.weight_sync.tensor_files import iterate
    from tests.generation import tiny

    def says(worker: Any, directory: str, load: bool) -> str:
        """Return the proof's result for the weights in this directory; `load`: after a reload by vLLM alone."""
        if load:
            worker.reload_weights(weights_iterator=iterate(Path(directory)))
        try:
            probe(worker.model_runner.get_model(), CheckpointTensors(Path(directory)))
        except StaleWeights as error:
            return str(error)
        return ""

    def reference(directory: Path) -> list[float]:
        model = AutoModelForCausalLM.from_pretrained(directory).float().eval()
        with torch.no_grad():
            scores = torch.log_softmax(model(torch.tensor([TOKENS])).logits[0], -1)
        return [float(scores[at - 1, token]) for at, token in enumerate(TOKENS) if at]

    def computed() -> list[float]:
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
        [answer] = llm.generate([{"prompt_token_ids": TOKENS}], sampling, use_tqdm=False)
        return [next(iter(each.values())).logprob for each in answer.prompt_logprobs[1:]]

    def off(one: list[float], other: list[float]) -> float:
        return max(abs(a - b) for a, b in zip(one, other, strict=True))

    models = [tiny.make_moe_model(work / name, seed=seed) for seed, name in enumerate("ab", 1)]
    wanted = [reference(model) for model in models]
    llm = LLM(**engine_arguments(config, str(models[0])))
    found: dict[str, Any] = {"off": [], "apart": off(*wanted), "stale": {}}
    for at in (0, 1, 0):
        llm.collective_rpc(RefitExtension.roundhouse_load, args=(str(models[at]),))
        found["off"].append(off(computed(), wanted[at]))
    tensors = load_file(models[0] / "model.safetensors")
    for expert in ("nothing", "0", "3"):
        other = work / expert
        other.mkdir()
        own = [f"{EXPERT}{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]
        save_file(tensors | {name: tensors[name] + 1 for name in own if name in tensors}, other / "model.safetensors")
        found["stale"][expert] = [bool(said) for said in llm.collective_rpc(says, args=(str(other), False))]
    found["unpacked"] = llm.collective_rpc(says, args=(str(models[1]), True))
    print(json.dumps(found), flush=True)
    os._exit(0)  # vLLM's workers end with it


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions travel to the workers
    main(GenerationConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
