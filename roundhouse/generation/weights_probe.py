"""The proof that a running model computes with the weights that were loaded.

Invariant: `probe` returns only if something was compared and nothing differed. Parameters that the engine keeps as they are
must be equal; layers that it packs multiply a random vector, and the product is compared with the checkpoint's.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from roundhouse.weight_sync.tensor_files import weight_files

logger = logging.getLogger(__name__)

PROBED_LAYERS = 2
"""Packed layers are probed in the first and the last decoder layer and in the head: a bounded cost for any size of model. Of a
layer's experts, as many as a token goes through: the first and the last that a worker has."""

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
"""Relative to the size of the product. A layer left on other weights is off by about 1."""


class StaleWeights(RuntimeError):
    """A layer does not compute with the weights that were loaded."""


class Tensors(Protocol):
    """Tensors to load, by name."""

    def get(self, name: str) -> Any | None:
        """Return a tensor; None: it does not exist or is unavailable."""
        ...


def probe(model: Any, loaded: Tensors) -> int:
    """Compare the running model with its wanted weights; see the module's docstring.

    Raises:
        StaleWeights: names the first part that differs.
    """
    import torch

    loaded = _ByModelName(model, loaded)
    with torch.inference_mode():
        named = model.named_parameters()
        proved = sum(_prove_parameter(model, name, parameter, loaded) for name, parameter in named)
        proved += sum(_prove_layer(name, layer, parts, loaded) for name, layer, parts in _packed_layers(model))
        proved += sum(_prove_experts(name, layer, parts, loaded) for name, layer, parts in expert_layers(model))
    if proved == 0:
        raise StaleWeights("No parameter of the running model could be compared with the weights that were loaded.")
    return proved


class _ByModelName:
    """Tensors of files by their names in a model of vLLM, which renames the parts of a composite model."""

    def __init__(self, model: Any, tensors: Tensors) -> None:
        self._tensors = tensors
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        prefixes: dict[str, str | None] = getattr(mapper, "orig_to_new_prefix", {})
        self._prefixes = [(new, old) for old, new in prefixes.items() if new] if is_composite(model) else []
        language = getattr(model, "language_model", model)
        self._loaded = getattr(language, "permute_qk_weight_for_rotary", lambda name, tensor: (name, tensor))
        """Llama 4 orders the rows of its queries and keys otherwise than its files."""

    def get(self, name: str) -> Any | None:
        names = [name, *(old + name.removeprefix(new) for new, old in self._prefixes if name.startswith(new))]
        tensor = next((tensor for each in names if (tensor := self._tensors.get(each)) is not None), None)
        return None if tensor is None else self._loaded(name, tensor)[1]


def beginnings(model: Any) -> dict[str, Any]:
    """Return the first numbers of each parameter."""
    return {name: parameter.detach().flatten()[:BEGINNING].clone() for name, parameter in model.named_parameters()}


BEGINNING = 64


def refuse_kept(model: Any, before: dict[str, Any]) -> None:
    """Compare parameters with their random numbers from before the first load.

    Raises:
        StaleWeights: one has kept them, so the load did not reach it, and no later one will.
    """
    import torch

    for name, now in beginnings(model).items():
        old = before.get(name)
        if old is not None and now.numel() > 1 and not name.endswith("_scale") and torch.equal(old, now):
            raise StaleWeights(
                f"{name} has kept its random initial numbers: vLLM cannot exchange the weights of {type(model).__name__} "
                "while it runs. Set generation.backend to transformers."
            )


def text_config(model: Any) -> Any:
    """Return the configuration of a model's language model."""
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def is_composite(model: Any) -> bool:
    return text_config(model) is not model.config


class CheckpointTensors:
    """Tensors by name, opened once and read when asked for."""

    def __init__(self, directory: Path) -> None:
        from safetensors import safe_open

        self._where: dict[str, Any] = {}
        for shard in weight_files(directory):
            file = safe_open(shard, "pt", device="cpu")
            self._where.update(dict.fromkeys(file.keys(), file))

    def get(self, name: str) -> Any | None:
        file = self._where.get(name)
        return None if file is None else file.get_tensor(name)


def _prove_parameter(model: Any, name: str, parameter: Any, checkpoint: Tensors) -> bool:
    """Parameters that vLLM keeps as they are (norms, embeddings) must equal the checkpoint's."""
    import torch

    if parameter.numel() == 0 or parameter.dim() == 0:
        return False
    tensor = checkpoint.get(name)
    if tensor is not None and hasattr(owner := model.get_submodule(name.rpartition(".")[0]), "shard_indices"):
        tensor = _own_rows(owner, tensor)
    if tensor is None or tensor.shape[1:] != parameter.shape[1:] or tensor.shape[0] > parameter.shape[0]:
        return False
    if not torch.equal(parameter[: tensor.shape[0]].cpu(), tensor.to(parameter.dtype)):
        raise StaleWeights(f"{name} does not hold the weights that were loaded.")
    return True


def probed_layers(model: Any) -> set[str]:
    return {"0", str(getattr(text_config(model), "num_hidden_layers", PROBED_LAYERS) - 1)}


def _packed_layers(model: Any) -> Iterator[tuple[str, Any, list[str]]]:
    """Return layers with weights that vLLM stacks or packs, and the checkpoint's names of their parts."""
    stacked: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    probed = probed_layers(model)
    for name, module in model.named_modules():
        if type(getattr(module, "quant_method", None)).__name__ not in _UNQUANTIZED:
            continue
        if name.rpartition(".")[2] == "lm_head":
            prefix = name.removesuffix("lm_head")
            tied = model.config.tie_word_embeddings
            yield name, module, [f"{prefix}model.embed_tokens.weight" if tied else f"{prefix}lm_head.weight"]
        elif probed.intersection(name.split(".")) and "embed_tokens" not in name:
            parent, _, own = name.rpartition(".")
            yield name, module, [f"{parent}.{part}.weight" for part in stacked.get(own, [own])]


_UNQUANTIZED = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
UNQUANTIZED_EXPERTS = "UnquantizedFusedMoEMethod"
EXPERT = re.compile(r"\.experts\.\d+\.")
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's matrices by model family: act(gate · x) * (up · x), and the projection back."""


def expert_layers(model: Any) -> Iterator[tuple[str, Any, dict[int, list[str]]]]:
    """Return the expert layers to probe; for each expert number, the checkpoint's possible matrix names."""
    probed = probed_layers(model)
    for name, layer in model.named_modules():
        if type(getattr(layer, "quant_method", None)).__name__ != UNQUANTIZED_EXPERTS:
            continue
        if probed.intersection(name.split(".")):
            stem = name.removesuffix(".routed_experts")
            spread = layer.expert_map  # over the workers
            local = [number for number in range(layer.global_num_experts) if spread is None or spread[number] >= 0]
            count = min(layer.moe_config.experts_per_token, len(local))
            parts = [part for names in _GATED for part in names]
            chosen = dict.fromkeys([*local[:count], *local[-count:]])
            yield name, layer, {each: [f"{stem}.{each}.{part}.weight" for part in parts] for each in chosen}


def _prove_experts(name: str, layer: Any, parts: dict[int, list[str]], checkpoint: Tensors) -> bool:
    """Send two random vectors through as many experts as a token uses.

    Returns:
        False if the kind of layer is unknown, or its kernel cannot be called alone: on GPUs, on which this was never
            run, a
        kernel's error does not prove wrong weights.
    """
    import torch
    from torch.nn.functional import gelu, silu

    method, config = layer.quant_method, layer.moe_config
    acts: dict[str, Callable[[Any], Any]] = {"silu": silu, "gelu": gelu}
    act = acts.get(str(getattr(config.activation, "value", config.activation)))
    moved = config.moe_parallel_config.enable_eplb  # vLLM has copies of experts, under separate numbers
    if act is None or config.has_bias or method.is_monolithic or layer.apply_router_weight_on_input or moved:
        return False
    experts = {}
    for number, names in parts.items():
        tensors = [tensor for part in names if (tensor := checkpoint.get(part)) is not None]
        if len(tensors) != len(_GATED[0]):
            return False
        experts[number] = tensors
    count = min(config.experts_per_token, len(experts))
    ids = torch.tensor([[*experts][:count], [*experts][-count:]], dtype=torch.int32)
    shares = torch.linspace(0.5, 1.0, 2 * count).reshape(2, count)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, config.hidden_dim_unpadded, generator=draw).to(config.in_dtype)
    own = config.intermediate_size_per_partition_unpadded
    rows = slice(config.tp_rank * own, (config.tp_rank + 1) * own)
    expected = torch.zeros(x.shape)
    for token, (numbers, factors) in enumerate(zip(ids.tolist(), shares, strict=True)):
        for number, factor in zip(numbers, factors, strict=True):
            gate, up, down = (tensor.to(x.dtype).float() for tensor in experts[number])
            inner = act(gate[rows] @ x[token].float()) * (up[rows] @ x[token].float())
            expected[token] += factor * (down[:, rows] @ inner)
    device = layer.w13_weight.device
    try:
        got = method.apply(layer, x.to(device), shares.to(device), ids.to(device), None, None).float().cpu()
    except Exception as error:
        if device.type == "cpu":
            raise
        logger.warning("The experts of %s are not proved: %r", name, error)
        return False
    bound = TOLERANCE.get(str(x.dtype).removeprefix("torch."), 5e-2) * float(expected.abs().max() + 1e-6)
    if not float((got - expected).abs().max()) <= bound:
        raise StaleWeights(f"The experts of {name} do not compute with the weights that were loaded.")
    return True


def _prove_layer(name: str, layer: Any, parts: list[str], checkpoint: Tensors) -> bool:
    import torch

    tensors = [tensor for part in parts if (tensor := checkpoint.get(part)) is not None]
    if len(tensors) != len(parts) or tensors[0].dim() != 2:  # a convolution is compared as it is
        return False
    tensors = _own_shards(layer, tensors)
    reference = next((p for p in layer.parameters() if p.numel()), None)
    dtype = getattr(layer, "params_dtype", None) or (reference.dtype if reference is not None else tensors[0].dtype)
    device = reference.device if reference is not None else "cpu"
    x = torch.randn(2, tensors[0].shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = torch.cat([x.float() @ tensor.to(dtype).float().T for tensor in tensors], dim=-1)
    got = layer.quant_method.apply(layer, x.to(device))[..., : expected.shape[-1]].float().cpu()
    bound = TOLERANCE.get(str(dtype).removeprefix("torch."), 5e-2) * float(expected.abs().max() + 1e-6)
    if not float((got - expected).abs().max()) <= bound:
        raise StaleWeights(f"{name} does not compute with the weights that were loaded.")
    return True


def _own_rows(embedding: Any, tensor: Any) -> Any:
    """Return this tensor-parallel worker's part of the vocabulary, of an embedding or a head."""
    shard = embedding.shard_indices
    return tensor[shard.org_vocab_start_index : shard.org_vocab_end_index]


def _own_shards(layer: Any, tensors: list[Any]) -> list[Any]:
    """Return this tensor-parallel worker's part of a layer's matrices [outputs, inputs].

    A row-parallel layer has columns, a column-parallel one rows of each part, and every worker has all of a replicated
    one, such as a router. With more workers than key-value heads, `num_kv_head_replicas` neighbours have the same rows
    of K and V.
    """
    if hasattr(layer, "shard_indices"):
        return [_own_rows(layer, tensor) for tensor in tensors]
    if getattr(layer, "tp_size", 1) == 1 or not hasattr(layer, "input_size_per_partition"):
        return tensors
    inputs = layer.input_size_per_partition
    if inputs < tensors[0].shape[1]:
        return [tensor[:, layer.tp_rank * inputs :][:, :inputs] for tensor in tensors]
    sizes, copies = layer.output_partition_sizes, getattr(layer, "num_kv_head_replicas", 1)
    ranks = [layer.tp_rank // (copies if place else 1) for place in range(len(sizes))]
    return [tensor[rank * size :][:size] for tensor, size, rank in zip(tensors, sizes, ranks, strict=True)]


def require_proofs(proofs: Sequence[Any], weights: str) -> None:
    """Raise unless each worker of a replica has compared at least one part of its model.

    Args:
        proofs: number of parts that each worker has proved.

    Raises:
        StaleWeights: a worker has proved nothing.
    """
    if not proofs or any(not isinstance(parts, int) or parts < 1 for parts in proofs):
        raise StaleWeights(
            f"Of the replica's workers, not each has proved that it computes with {weights}: {list(proofs)}."
        )
