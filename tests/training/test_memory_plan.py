"""A memory plan counts permanent tensors by their shapes, and finds the memory of a pass without weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import GraniteMoeSWAConfig, LlamaConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3MoeConfig
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.config.loading import parse_config
from roundhouse.config.models import TrainConfig
from roundhouse.config.placement import trainer_machines
from roundhouse.errors import ConfigError
from roundhouse.infra.checks import machine
from roundhouse.stages import machine_fit
from roundhouse.training import memory_plan
from roundhouse.training.memory_plan import USABLE, MemoryPlan, device_memory, plan_memory, remedies

SMALL = Qwen2Config(
    vocab_size=4096, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=1024, tie_word_embeddings=False,
)  # fmt: skip
LARGE = LlamaConfig(
    vocab_size=128_256, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
    intermediate_size=28_672, dtype="bfloat16",
)  # fmt: skip
ROUTED: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 512, "moe_intermediate_size": 512, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


PLANS: dict[tuple[Any, ...], MemoryPlan] = {}
"""Plans made so far: a pass over meta tensors takes half a second, and many tests compare with the same plan."""


def plan(ranks: int = 1, tokens: int = 512, shape: Any = SMALL, **train: Any) -> MemoryPlan:
    key = (ranks, tokens, shape.to_json_string(), json.dumps(train))
    if key not in PLANS:
        PLANS[key] = plan_memory(shape, TrainConfig.model_validate(train), ranks, tokens)
    return PLANS[key]


def test_what_stays_is_sixteen_bytes_a_parameter_and_four_for_a_reference() -> None:
    found = plan(algorithm={"kl_coefficient": 0.1})
    kept = {kind: found.bytes[kind] / found.parameters for kind in ("weights", "gradients", "moments", "reference")}
    assert kept == {"weights": 4, "gradients": 4, "moments": 8, "reference": 4}
    shared = plan(4)
    assert shared.bytes["weights"] == found.parameters
    assert shared.bytes["whole gradients"] == 4 * found.parameters
    assert "whole gradients" not in plan(4, reduce_gradients="microbatch").bytes
    assert plan(lora={"rank": 4}).bytes["moments"] < 0.1 * found.bytes["moments"]


def test_what_does_not_learn_is_two_bytes_a_parameter_in_bfloat16_and_a_reference_under_an_adapter_none() -> None:
    low = Qwen2Config(**SMALL.to_dict() | {"dtype": "bfloat16"})
    train: dict[str, Any] = {"dtype": "bfloat16", "algorithm": {"kl_coefficient": 0.1}}
    found = plan(shape=low, **train)
    vectors = 4 * (2 * 256 + 256 + 2 * 128) + 256
    frozen = 2 * (
        found.parameters + vectors + 4096 * 256
    )  # norms, biases and the embedding are looked up or added in float32
    assert found.bytes["reference"] == frozen
    assert plan(4, shape=low, **train).bytes["reference"] == frozen // 4
    adapter = {"lora": {"rank": 4}}
    adapted = plan(shape=low, **train, **adapter)
    assert "reference" not in adapted.bytes
    learning = adapted.parameters - found.parameters
    assert adapted.bytes["weights"] == frozen + 4 * learning
    assert plan(shape=SMALL, **train, **adapter).bytes["weights"] == 4 * adapted.parameters, "its files have more bits"
    assert adapted.bytes["activations"] < plan(shape=SMALL, **train, **adapter).bytes["activations"], "none are cast"
    renewed = train | {"algorithm": {"kl_coefficient": 0.1, "reference_every": 2}}
    assert plan(shape=low, **renewed, **adapter).bytes["reference"] == frozen


def test_8_bit_moments_are_a_quarter_where_rows_have_whole_blocks() -> None:
    whole, found = plan(), plan(optimizer={"moments": "8-bit"})
    in_blocks = found.parameters - (4 * (2 * 256 + 256 + 2 * 128) + 256)  # but norms, and biases of q, k and v
    assert found.bytes["moments"] == pytest.approx(2.0625 * in_blocks + 8 * (found.parameters - in_blocks), abs=1)
    assert found.total == whole.total - whole.bytes["moments"] + found.bytes["moments"]
    critic = plan(algorithm={"kind": "ppo", "critic": {"optimizer": {"moments": "8-bit"}}})
    assert critic.bytes["critic"] == pytest.approx(plan(algorithm={"kind": "ppo"}).bytes["critic"] * 6.0625 / 12, abs=1)


def test_a_critic_is_twelve_bytes_a_parameter_more_and_has_gradients_where_an_adapter_leaves_the_policy_few() -> None:
    without, found = plan(), plan(algorithm={"kind": "ppo"})
    critic = found.parameters - 4096 * 256 + 257  # without the output layer of SMALL, which is untied, but with a head
    assert found.bytes["critic"] == 12 * critic
    assert found.total == without.total + 12 * critic
    assert plan(4, algorithm={"kind": "ppo"}).bytes["critic"] == 3 * critic
    adapter = plan(algorithm={"kind": "ppo"}, lora={"rank": 4})
    assert adapter.bytes["critic"] == 12 * critic
    assert adapter.bytes["gradients"] == 4 * critic


def test_logits_are_those_of_a_chunk_and_recomputed_activations_are_a_layers() -> None:
    found = plan()
    logits = 512 * 4096 * 4
    assert 2 * logits <= found.bytes["logits"] <= 4 * logits
    chunked = plan(logits_chunk_tokens=64)
    assert chunked.bytes.get("logits", 0) <= found.bytes["logits"] // 4
    both = [plan(logits_chunk_tokens=64, activation_checkpointing=on).bytes["activations"] for on in (False, True)]
    assert both[1] < 0.5 * both[0]
    twice = [plan(tokens=tokens, logits_chunk_tokens=64).bytes["activations"] for tokens in (512, 1024)]
    assert twice[1] < 2.1 * twice[0], "linear in the tokens: attention keeps no square"


@pytest.mark.parametrize(
    "train",
    [{}, {"logits_chunk_tokens": 64}, {"activation_checkpointing": True}, {"packing": False, "lora": {"rank": 4}}],
    ids=["plain", "chunked", "checkpointed", "padded adapter"],
)
def test_of_many_layers_alike_a_few_are_followed(train: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Qwen2Config(**{**SMALL.to_dict(), "num_hidden_layers": 13, "layer_types": None})
    short = plan(shape=shape, **train)
    monkeypatch.setattr(memory_plan, "_FOLLOWED", (13, 13))
    assert plan_memory(shape, TrainConfig.model_validate(train), 1, 512) == short


def test_ranks_that_share_a_microbatch_hold_their_part_of_its_activations_and_logits() -> None:
    service = {"kind": "resident", "processes": 4, "context_parallel": 4}
    whole, shared = plan(4, 2048), plan(4, 2048, service=service)
    for kind in ("activations", "logits"):
        assert shared.bytes[kind] == pytest.approx(whole.bytes[kind] / 4, rel=0.1), kind
    for kind in ("weights", "moments", "gathered weights"):
        assert shared.bytes[kind] == whole.bytes[kind]
    with pytest.raises(
        ConfigError,
        match="data_parallel_replicate 1, and their product does not divide 6 ranks",
    ):
        plan(6, service=service)
    ranks = TrainConfig.model_validate({"service": service | {"context_parallel": 1}})
    saved = {"dtype": "bfloat16", "logits_chunk_tokens": 1024, "activation_checkpointing": True}
    settings = saved | {"reduce_gradients": "microbatch"}
    halves = plan(4, 16_384, service=service | {"context_parallel": 2}, **settings).total
    assert plan(4, 16_384, **settings).total > halves, "the microbatch is what takes the memory"
    assert remedies(SMALL, ranks, 4, 16_384, halves) == [
        *(f"train.{key}={str(value).lower()}" for key, value in settings.items()), "train.service.context_parallel=2",
    ]  # fmt: skip
    three = {"kind": "resident", "processes": 3, "context_parallel": 3}
    with pytest.raises(ConfigError, match=r"attention has 4 heads, and 2 of keys and values, .* Set it to 1 or 2 or 4"):
        plan(3, service=three)


def test_ranks_of_a_replica_hold_the_whole_model_together() -> None:
    service = {"kind": "resident", "processes": 8, "data_parallel_replicate": 2}
    alone, found = plan(4), plan(8, service=service)
    assert found.bytes == alone.bytes
    assert plan(8).total < found.total
    savings = {"dtype": "bfloat16", "logits_chunk_tokens": 1024, "activation_checkpointing": True}
    train = TrainConfig.model_validate({"service": service, "reduce_gradients": "microbatch"} | savings)
    assert remedies(SMALL, train, 8, 512, plan_memory(SMALL, train, 8, 512).total - 1) == [
        "train.service.data_parallel_replicate=1"
    ]


def test_ranks_that_split_the_matrices_hold_their_part_of_the_layers() -> None:
    service = {"kind": "resident", "processes": 8, "tensor_parallel": 2}
    whole, split = plan(8, 2048), plan(8, 2048, service=service)
    assert split.parameters == whole.parameters
    embeddings = 2 * 4096 * 256
    layers = whole.parameters - embeddings
    for kind, each in (("weights", 4), ("moments", 8)):
        assert split.bytes[kind] == pytest.approx(each * (layers / 8 + embeddings / 4), rel=0.01), (
            "norms are whole, too"
        )
    assert split.bytes["gathered weights"] < whole.bytes["gathered weights"]
    assert split.bytes["activations"] < whole.bytes["activations"]
    three = {"kind": "resident", "processes": 6, "tensor_parallel": 3}
    with pytest.raises(ConfigError, match=r"does not divide the policy's 4 heads. Set it to 1 or 2"):
        plan(6, service=three)
    with pytest.raises(
        ConfigError, match=r"tensor_parallel is set, but Qwen3MoeForCausalLM splits its layers by .* to 1"
    ):
        plan(8, shape=Qwen3MoeConfig(num_hidden_layers=1, intermediate_size=1024), service=service)


def test_ranks_with_different_experts_gather_their_own_alone() -> None:
    shape = Qwen3MoeConfig(**ROUTED)
    settings: dict[str, Any] = {"shape": shape, "dtype": "bfloat16"}
    service = {"kind": "resident", "processes": 4, "expert_parallel": 4}
    whole, spread = plan(4, 2048, **settings), plan(4, 2048, service=service, **settings)
    others = shape.num_hidden_layers * 3 * 512 * 256 * 6  # experts of a layer that a rank has not
    assert spread.parameters == whole.parameters
    for kind in ("weights", "moments"):
        assert spread.bytes[kind] == whole.bytes[kind]
    assert whole.bytes["whole gradients"] - spread.bytes["whole gradients"] == 4 * others
    assert spread.bytes["gathered weights"] < whole.bytes["gathered weights"]
    each = {"logits_chunk_tokens": 1024, "activation_checkpointing": True, "reduce_gradients": "microbatch"}
    train = TrainConfig.model_validate({"service": service | {"expert_parallel": 1}, "dtype": "bfloat16"} | each)
    enough = plan(4, 2048, service=service, **settings, **each).total
    assert remedies(shape, train, 4, 2048, enough)[-1] == "train.service.expert_parallel=4"


@pytest.mark.parametrize(
    ("shape", "changes", "ranks", "told"),
    [
        (Qwen3Config, {}, 4, "expert_parallel is 4, but Qwen3ForCausalLM has no matrix to split .* Set it to 1"),
        (
            Qwen3MoeConfig,
            {"num_experts": 6},
            4,
            "is 4, which does not divide the policy's 6 experts. Set it to 1 or 2 or 3 or",
        ),
        (Qwen3MoeConfig, {}, 6, "expert_parallel is 4, which does not divide 6 ranks"),
        (
            GraniteMoeSWAConfig,
            {},
            4,
            "is 4, but GraniteMoeSWAForCausalLM spreads its experts by .*moe_tp_experts; only",
        ),
    ],
)
def test_experts_that_ranks_cannot_have_are_refused(shape: Any, changes: Any, ranks: int, told: str) -> None:
    service = {"kind": "resident", "processes": 4, "expert_parallel": 4}
    with pytest.raises(ConfigError, match=told):
        plan(ranks, shape=shape(**ROUTED | changes), service=service, dtype="bfloat16")


@pytest.mark.nightly
def test_seventy_billion_parameters_are_planned_and_made_to_fit() -> None:
    memory = USABLE * device_memory("h100")
    train = TrainConfig()
    assert plan(64, 4096, LARGE).total > memory
    found = remedies(LARGE, train, 64, 4096, memory)
    changed = train.model_copy(
        update={"dtype": "bfloat16", "logits_chunk_tokens": 1024, "activation_checkpointing": True}
        | {"reduce_gradients": "microbatch"}
    )
    assert found == [
        "train.dtype=bfloat16",
        "train.logits_chunk_tokens=1024",
        "train.activation_checkpointing=true",
        "train.reduce_gradients=microbatch",
    ]
    assert plan_memory(LARGE, changed, 64, 4096).total <= memory


QWEN = {
    "dtype": "bfloat16",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
    "head_dim": 128,
}
SHAPES: dict[str, Any] = {
    "0.5B": Qwen2Config(
        **QWEN | {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64}, hidden_size=896, num_hidden_layers=24,
        intermediate_size=4864, tie_word_embeddings=True,
    ),
    "1.5B": Qwen2Config(
        **QWEN | {"num_attention_heads": 12, "num_key_value_heads": 2}, hidden_size=1536, num_hidden_layers=28,
        intermediate_size=8960, tie_word_embeddings=True,
    ),
    "8B": Qwen3Config(**QWEN, hidden_size=4096, num_hidden_layers=36, intermediate_size=12_288),
    "32B": Qwen3Config(
        **QWEN | {"num_attention_heads": 64}, hidden_size=5120, num_hidden_layers=64, intermediate_size=25_600
    ),
    "30B-A3B": Qwen3MoeConfig(
        **QWEN | {"num_key_value_heads": 4}, hidden_size=2048, num_hidden_layers=48, intermediate_size=6144,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
    ),
    "70B": LARGE,
}  # fmt: skip
_GPU_PAGE = Path(__file__).parents[2] / "docs/gpu.md"
_RECIPE = re.compile(r"^# (\S+) on (\d+) (\S+): (\S+) GB a rank\n(.*?)(?=^---|^```)", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("model", "ranks", "device", "told", "recipe"),
    [
        pytest.param(*found, id=" ".join(found[:3]), marks=[] if number == 1 else pytest.mark.nightly)
        for number, found in enumerate(_RECIPE.findall(_GPU_PAGE.read_text()))
    ],
)
def test_a_recipe_of_the_page_on_gpus_fits_as_it_says(
    model: str, ranks: str, device: str, told: str, recipe: str
) -> None:
    common = yaml.safe_load(_GPU_PAGE.read_text().split("```yaml\n")[1].split("```")[0])["train"]
    keys = yaml.safe_load(recipe)
    config = parse_config({"run_id": "r"} | keys | {"train": common | keys["train"]})
    settings = config.train
    assert getattr(settings.service, "processes", 1) * trainer_machines(config) == int(ranks)
    found = plan_memory(SHAPES[model], settings, int(ranks), settings.tokens_per_microbatch or 0)
    assert found.total / 1e9 == pytest.approx(float(told), rel=0.02)
    assert found.total <= USABLE * device_memory(device)


def test_every_size_of_the_page_on_gpus_has_a_recipe() -> None:
    assert {found[0] for found in _RECIPE.findall(_GPU_PAGE.read_text())} == SHAPES.keys()


def test_devices_are_named_as_people_name_them() -> None:
    assert device_memory("h100") == device_memory("NVIDIA H100 80GB HBM3") == 80e9
    assert device_memory("l40s") == 48e9
    assert device_memory("96GB") == 96e9
    with pytest.raises(ConfigError, match=r"--device tpu is not known. Known are h100, .* such as 96GB"):
        device_memory("tpu")


def test_doctor_refuses_a_model_that_does_not_fit_and_names_what_makes_it_fit(
    tmp_path: Path,
) -> None:
    SMALL.save_pretrained(tmp_path / "model")
    run = tmp_path / "run.yaml"
    run.write_text(f"run_id: r\nstore: {tmp_path}/store\npolicy: {{kind: pretrained, path: {tmp_path}/model}}\n")
    said = []
    for device in ("h100", "0.35GB"):
        result = CliRunner().invoke(app, ["doctor", str(run), "--device", device, "--state", str(tmp_path)])
        said.append(" ".join(result.output.split()))
    assert result.exit_code == 1
    assert "ok memory plan: 0.01 B parameters on 1 rank, microbatches of 4096 tokens" in said[0]
    assert "ok refit: 0.0 GB: about 0.0 s by transfer from one sender over links of 400 Gb/s a GPU" in said[0]
    assert "fail memory plan: does not fit" in said[1]
    assert "Set train.dtype=bfloat16, train.logits_chunk_tokens=1024" in said[1]


def test_an_adapters_frozen_matrices_are_planned_as_the_files_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One float32 matrix keeps all of them in float32, with any dtype in config.json."""
    plans = list[MemoryPlan]()
    monkeypatch.setattr(memory_plan, "plan_memory", lambda *given: plans.append(plan_memory(*given)) or plans[-1])
    tree = {"run_id": "r", "store": str(tmp_path / "store"), "policy": {"kind": "pretrained", "path": str(tmp_path)}}
    config = parse_config(tree | {"train": {"dtype": "bfloat16", "lora": {"rank": 4}}})
    model = Qwen2ForCausalLM(Qwen2Config(**SMALL.to_dict())).to(torch.bfloat16)
    for head in (torch.bfloat16, torch.float32):
        model.lm_head.to(head)
        model.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
        machine.memory_plan(config, "h100", None)
    low, whole = (each.bytes["weights"] for each in plans)
    assert low < whole
    assert whole == plan(dtype="bfloat16", lora={"rank": 4}).bytes["weights"]


def test_a_run_that_does_not_fit_is_refused_before_it_starts_unless_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Qwen2ForCausalLM(SMALL).save_pretrained(tmp_path)
    tree = {"run_id": "r", "store": str(tmp_path / "store"), "policy": {"kind": "pretrained", "path": str(tmp_path)}}
    service = {"kind": "resident", "processes": 2}
    train = {"device": "cpu", "service": service}
    for free, keys in ((2**40, {}), (300 * 2**20, {"check_memory": False})):
        monkeypatch.setattr(machine_fit, "available_memory", lambda free=free: free)
        machine_fit.refuse_unfit_memory(parse_config(tree | {"train": train | keys}))
    with pytest.raises(
        ConfigError, match=r"does not fit: 0.01 B .* on 2 ranks, .* 0.1 GiB usable .* train.check_memory to"
    ):
        machine_fit.refuse_unfit_memory(parse_config(tree | {"train": train}))
