"""NeMo RL's generation example and NeMo Gym's integration patterns, by their own names."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Self

import pytest
import torch

import roundhouse.plugins.nemo_rl as ours
from roundhouse.errors import ConfigError, DataError
from roundhouse.plugins.nemo_rl.generation import (
    BatchedDataDict,
    RayVirtualCluster,
    VllmConfig,
    VllmGeneration,
    configure_generation_config,
    get_tokenizer,
)
from roundhouse.plugins.nemo_rl.gym_rollouts import NemoGym, RolloutCollectionHelper, load_jsonl, save_jsonl
from tests.generation import tiny


@pytest.mark.real
def test_the_example_of_nemo_rls_guide_generates_and_its_keys_act(tmp_path: Path) -> None:
    model = str(tiny.make_model(tmp_path / "untied", seed=3, tie=False))
    config = VllmConfig(
        model_name=model,
        max_new_tokens=7,
        temperature=0.7,
        top_p=1,
        top_k=None,
        backend="hf",
        vllm_cfg={"tensor_parallel_size": 1, "gpu_memory_utilization": 0.8, "max_model_len": 64},
    )
    tokenizer = get_tokenizer(config["model_name"])
    cluster = RayVirtualCluster(bundle_ct_per_node_list=[1], use_gpus=False)
    with pytest.raises(ConfigError, match="call configure_generation_config"):
        VllmGeneration(cluster, config)
    config = configure_generation_config(config, tokenizer)
    assert config["_pad_token_id"] == tokenizer.pad_token_id
    generator = VllmGeneration(cluster, config)
    data = BatchedDataDict(
        {"input_ids": torch.tensor([[40, 50, 60], [70, 0, 0]]), "input_lengths": torch.tensor([3, 1])}
    )
    generator.prepare_for_generation()
    output = generator.generate(data, greedy=False)
    again = generator.generate(data, greedy=True)
    assert torch.equal(generator.generate(data, greedy=True)["output_ids"], again["output_ids"])
    generator.finish_generation()
    assert output["output_ids"][1, 0] == 70
    assert int(output["generation_lengths"].max()) <= 7
    assert torch.equal(output["unpadded_sequence_lengths"], data["input_lengths"] + output["generation_lengths"])


def test_a_configuration_and_a_cluster_that_cannot_be_are_refused() -> None:
    config = VllmConfig(model_name="/m", backend="sglang", vllm_cfg={"unheard_of": 1, "use_deep_gemm": True})
    with pytest.raises(ConfigError) as refused:
        configure_generation_config(config, None)
    for part in ("unheard_of: 1", "use_deep_gemm: true", "policy.generation.backend: sglang", "needs CUDA"):
        assert part in str(refused.value)
    with pytest.raises(ConfigError, match="2 nodes"):
        RayVirtualCluster([4, 4])
    wide = VllmConfig(model_name="/m", vllm_cfg={"tensor_parallel_size": 2}, _pad_token_id=0, stop_token_ids=[1])
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but the cluster has 1"):
        VllmGeneration(RayVirtualCluster([1]), wide)


def test_a_batch_is_cut_joined_and_padded_by_rows() -> None:
    first = BatchedDataDict({"ids": torch.tensor([[1, 2]]), "name": ["a"]})
    second = BatchedDataDict({"ids": torch.tensor([[3], [4]]), "name": ["b", "c"]})
    whole = BatchedDataDict.from_batches([first, second], {"ids": 9})
    assert whole["ids"].tolist() == [[1, 2], [3, 9], [4, 9]]
    assert (whole.size, whole.slice(1, 3)["name"], whole.get_batch(1, 2)["name"]) == (3, ["b", "c"], ["c"])
    chosen = whole.select_indices([2, 0])
    assert (chosen["ids"].tolist(), chosen["name"]) == ([[4, 9], [1, 2]], ["c", "a"])
    assert whole.to("cpu")["ids"].device.type == "cpu"
    assert BatchedDataDict().size == 0


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("nemo_rl.algorithms.utils", "get_tokenizer"),
        ("nemo_rl.distributed.virtual_cluster", "RayVirtualCluster"),
        ("nemo_rl.distributed.batched_data_dict", "BatchedDataDict"),
        ("nemo_rl.models.generation.interfaces", "configure_generation_config"),
        ("nemo_rl.models.generation.interfaces", "GenerationDatumSpec"),
        ("nemo_rl.models.generation.vllm", "VllmGeneration"),
        ("nemo_rl.models.generation.vllm", "VllmConfig"),
        ("nemo_rl.environments.penguin", "Penguin"),
    ],
)
def test_the_names_are_imported_from_nemo_rls_modules(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is getattr(ours, name)


class Source:
    """Plays a row: its own number as reward, the later rows first."""

    async def run(self, row: dict[str, Any]) -> dict[str, Any]:
        import asyncio

        await asyncio.sleep((3 - row["n"]) * 0.01)
        if row["n"] < 0:
            raise DataError("no such row")
        item = {
            "type": "message",
            "role": "assistant",
            "content": "x",
            "prompt_token_ids": [1, 2],
            "generation_token_ids": [row["n"]],
            "generation_log_probs": [-0.5],
        }
        return {"reward": float(row["n"]), "response": {"output": [item]}}

    async def aggregate(self, agent: str, rows: Any) -> dict[str, Any]:
        return {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...


class Words:
    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


async def test_rollouts_come_in_the_order_of_the_examples_with_their_tokens(tmp_path: Path) -> None:
    examples = [{"n": number} for number in (0, 1, 2)]
    results = await NemoGym(Source()).run_rollouts(examples, Words())
    assert [result["reward"] for result in results] == [0.0, 1.0, 2.0]
    assert [message["content"] for message in results[2]["message_log"]] == ["1 2", "2"]
    assert results[2]["input_message_log"] == results[2]["message_log"][:1]
    with pytest.raises(DataError, match="no such row"):
        await RolloutCollectionHelper(Source(), 2).run_examples([{"n": 1}, {"n": -1}])
    file = tmp_path / "rollouts.jsonl"
    save_jsonl([result["full_result"] for result in results], file)
    assert load_jsonl(file) == [result["full_result"] for result in results]
    file.write_text('{"a": 1}\n3\n')
    with pytest.raises(DataError, match="line 2 is not a JSON object"):
        load_jsonl(file)
