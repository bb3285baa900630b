"""What runs inside vLLM's worker at a refit: load the weights, repair what vLLM forgets, prove that they are in.

Invariant: `roundhouse_load` returns only when the model computes with the new weights. Status codes prove nothing here: on CPU
vLLM packs every linear layer into a oneDNN kernel and frees the weights, and its reload leaves the head of a model with
tied embeddings on the old kernel without an error, and gives the kernel of a layer's experts matrices that are not packed. So
each packed layer is asked to multiply a random vector, and the product is compared with the checkpoint's.

The module also adds a weight-transfer engine that needs no GPU: tensors come by Gloo, and are loaded as vLLM's `nccl` engine
loads them. It differs from that engine in name and time limits alone: the same steps (init, start, update, finish, shutdown)
with the same names of their arguments.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from roundhouse.weight_sync.gloo import BATCH_BYTES, Described, GlooGroup, own_address
from roundhouse.weight_sync.tensor_files import DIGEST_THREADS, iterate, torch_digest, weight_files

logger = logging.getLogger(__name__)

PROBED_LAYERS = 2
"""Packed layers are probed in the first and the last decoder layer and in the head: a bounded cost for any size of model. Of a
layer's experts, as many as a token goes through: the first and the last that a worker has."""

PARENT_WATCH_SECONDS = 1.0
WORKER_NAME = "VllmWorker"
"""How vLLM names the processes that its engine process starts."""

GLOO = "gloo"
"""vLLM's name of the weight-transfer engine that this module adds."""

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
"""Relative to the size of the product. A layer left on other weights is off by about 1."""


def _end_with_parent() -> None:
    """End this process when the replica that started it has died.

    vLLM's engine process does not notice when its parent is killed, and would hold its memory for ever. Where it has workers
    of its own (tensor parallelism), this module is imported in them alone, and they end it too.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    engine = psutil.Process(parent.pid) if multiprocessing.current_process().name.startswith(WORKER_NAME) else None
    replica = engine.ppid() if engine else None

    def watch() -> None:
        while os.getppid() == parent.pid and (engine is None or engine.ppid() == replica):
            time.sleep(PARENT_WATCH_SECONDS)
        if engine is not None and os.getppid() == parent.pid:
            engine.kill()
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


_end_with_parent()


class StaleWeights(RuntimeError):
    """A layer does not compute with the weights that were loaded."""


class RefitExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`."""

    def roundhouse_load(self, directory: str) -> int:
        """Load a Hugging Face directory into the running model.

        Returns:
            Number of parameters and layers proved to hold the new weights.

        Raises:
            StaleWeights: at least one does not.
        """
        path = Path(directory)
        self.reload_weights(weights_iterator=iterate(path))  # type: ignore[attr-defined]
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        complete_reload(model)
        return probe(model, _Checkpoint(path))

    def roundhouse_forget(self) -> None:
        """Before the engine ends in a process that goes on: vLLM's table of layers holds those that were reloaded for good."""
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        for layer in self.model_runner.get_model().modules():  # type: ignore[attr-defined]
            LAYERWISE_INFO.pop(layer, None)

    # A transfer, between the steps of vLLM's own interface: start, watch, update, arrived, finish, prove; or abandon.

    _arrivals: Arrivals | None = None

    def roundhouse_watch(self) -> None:
        """From here on, what vLLM's weight-transfer engine hands to the model is written down."""
        self._arrivals = Arrivals(self.model_runner.get_model())  # type: ignore[attr-defined]

    def roundhouse_arrived(self) -> dict[str, str]:
        """Digest of each tensor that came, by its name."""
        assert self._arrivals is not None
        return self._arrivals.digests()

    def roundhouse_prove(self) -> int:
        """As at the end of `roundhouse_load`, against what came."""
        assert self._arrivals is not None
        arrivals, self._arrivals = self._arrivals, None
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        complete_reload(model)
        return probe(model, arrivals)

    def roundhouse_abandon(self) -> None:
        """End a transfer that broke off, so that weights can be loaded another way. The model holds a mixture."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._arrivals is not None:
            self._arrivals.stop()
            self._arrivals = None
        # A reload that begins while another is open resumes with the other's tensors.
        if self._weight_update_active:  # type: ignore[attr-defined]
            self.finish_weight_update()  # type: ignore[attr-defined]
        else:
            with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
                finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)  # type: ignore[attr-defined]


class Tensors(Protocol):
    """What was to be loaded, by name."""

    def get(self, name: str) -> Any | None:
        """None: there is no such tensor, or it is not at hand."""
        ...


class Arrivals:
    """What a weight-transfer engine hands to a model: the digest of everything, and the tensors that `probe` asks for."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers = _probed_layers(model)
        self._experts = {part for _, layer, parts in _expert_layers(model) for each in parts.values() for part in each}
        self._kept: dict[str, Any] = {}
        self._digests: list[Future[tuple[str, str]]] = []
        self._pool = ThreadPoolExecutor(DIGEST_THREADS)
        load: Callable[[Iterable[tuple[str, Any]]], Any] = model.load_weights

        def watched(tensors: Iterable[tuple[str, Any]]) -> Any:
            came = list(tensors)
            for name, tensor in came:
                self._digests.append(self._pool.submit(torch_digest, name, tensor))
                if _EXPERT.search(name):
                    probed = name in self._experts
                else:
                    parts = name.split(".")
                    in_layer = any(part.isdigit() for part in parts)
                    probed = not in_layer or tensor.dim() == 1 or bool(self._layers.intersection(parts))
                if probed:
                    # A copy: it must not keep the whole batch that it came in.
                    self._kept[name] = tensor.detach().cpu().clone()
            return load(came)

        model.load_weights = watched

    def stop(self) -> None:
        """Nothing is written down from here on."""
        self._model.__dict__.pop("load_weights", None)
        self._pool.shutdown()

    def digests(self) -> dict[str, str]:
        self.stop()
        return dict(one.result() for one in self._digests)

    def get(self, name: str) -> Any | None:
        return self._kept.get(name)


def complete_reload(model: Any) -> None:
    """On CPU, what a reload of vLLM 0.32 leaves undone (vllm-project/vllm#48312 collects such cases).

    The head of tied embeddings owns no tensor of the checkpoint, so the reload never reaches it: it is packed anew. Matrices of
    experts are packed at the first load alone; at the others they are put as they are where the packed ones were.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        if type(method := getattr(layer, "quant_method", None)).__name__ == _UNQUANTIZED_EXPERTS:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)  # type: ignore[union-attr]
    embedding, head = getattr(getattr(model, "model", None), "embed_tokens", None), getattr(model, "lm_head", None)
    if embedding is None or head is None or not model.config.tie_word_embeddings:
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head.weight = embedding.weight
    dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def probe(model: Any, loaded: Tensors) -> int:
    """Compare the running model with what it was to load; see the module's docstring.

    Raises:
        StaleWeights: names the first part that differs.
    """
    import torch

    with torch.inference_mode():
        named = model.named_parameters()
        proved = sum(_prove_parameter(model, name, parameter, loaded) for name, parameter in named)
        proved += sum(_prove_layer(name, layer, parts, loaded) for name, layer, parts in _packed_layers(model))
        proved += sum(_prove_experts(name, layer, parts, loaded) for name, layer, parts in _expert_layers(model))
    if proved == 0:
        raise StaleWeights("No parameter of the running model could be compared with the weights that were loaded.")
    return proved


class _Checkpoint:
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


def _probed_layers(model: Any) -> set[str]:
    return {"0", str(getattr(model.config, "num_hidden_layers", PROBED_LAYERS) - 1)}


def _packed_layers(model: Any) -> Iterator[tuple[str, Any, list[str]]]:
    """Layers whose weights vLLM stacks or packs, with the checkpoint's names of their parts."""
    stacked: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    wanted = _probed_layers(model)
    for name, module in model.named_modules():
        if type(getattr(module, "quant_method", None)).__name__ not in _UNQUANTIZED:
            continue
        if name == "lm_head":
            tied = model.config.tie_word_embeddings
            yield name, module, ["model.embed_tokens.weight" if tied else "lm_head.weight"]
        elif wanted.intersection(name.split(".")) and "embed_tokens" not in name:
            parent, _, own = name.rpartition(".")
            yield name, module, [f"{parent}.{part}.weight" for part in stacked.get(own, [own])]


_UNQUANTIZED = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
_UNQUANTIZED_EXPERTS = "UnquantizedFusedMoEMethod"
_EXPERT = re.compile(r"\.experts\.\d+\.")
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""How families of models name an expert's matrices: act(gate · x) * (up · x), and what projects it back."""


def _expert_layers(model: Any) -> Iterator[tuple[str, Any, dict[int, list[str]]]]:
    """Layers of experts that are probed; by the number of each expert, what the checkpoint may name its matrices."""
    wanted = _probed_layers(model)
    for name, layer in model.named_modules():
        if type(getattr(layer, "quant_method", None)).__name__ != _UNQUANTIZED_EXPERTS:
            continue
        if wanted.intersection(name.split(".")):
            stem = name.removesuffix(".routed_experts")
            spread = layer.expert_map  # over the workers
            local = [number for number in range(layer.global_num_experts) if spread is None or spread[number] >= 0]
            count = min(layer.moe_config.experts_per_token, len(local))
            parts = [part for names in _GATED for part in names]
            chosen = dict.fromkeys([*local[:count], *local[-count:]])
            yield name, layer, {each: [f"{stem}.{each}.{part}.weight" for part in parts] for each in chosen}


def _prove_experts(name: str, layer: Any, parts: dict[int, list[str]], checkpoint: Tensors) -> bool:
    """Two random vectors go through as many experts as a token does.

    Returns:
        False where the layer is of a kind that is not known here, or its kernel cannot be called by itself: on GPUs, where this
        was never run, an error of the kernel is no verdict on the weights.
    """
    import torch
    from torch.nn.functional import gelu, silu

    method, config = layer.quant_method, layer.moe_config
    acts: dict[str, Callable[[Any], Any]] = {"silu": silu, "gelu": gelu}
    act = acts.get(str(getattr(config.activation, "value", config.activation)))
    moved = config.moe_parallel_config.enable_eplb  # vLLM has copies of experts, under numbers of its own
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
    if len(tensors) != len(parts):
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
    """Of an embedding or a head, what this tensor-parallel worker has of the vocabulary."""
    shard = embedding.shard_indices
    return tensor[shard.org_vocab_start_index : shard.org_vocab_end_index]


def _own_shards(layer: Any, tensors: list[Any]) -> list[Any]:
    """What this tensor-parallel worker has of a layer's matrices [outputs, inputs].

    A row-parallel layer has columns, a column-parallel one rows of each part, and every worker has all of a replicated one, as
    of a router. Where there are more workers than key-value heads, `num_kv_head_replicas` neighbours have the same rows of K
    and V.
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


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """How a worker finds its group. Fields that `nccl` has too mean the same."""

    master_address: str
    master_port: int
    rank_offset: int
    """Rank of this engine's first worker."""
    world_size: int
    packed_buffer_size_bytes: int = BATCH_BYTES
    group: str
    """Prefix of this group's keys in the store at `master_address`."""
    seconds: float
    """Time limit of the meeting, and of each batch."""


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What comes, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """A worker's end."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    _group: GlooGroup | None = None
    _bound = BATCH_BYTES

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        from torch.distributed import PrefixStore, TCPStore

        limit = timedelta(seconds=init_info.seconds)
        address, port = init_info.master_address, init_info.master_port
        store = TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
        # The rank as vLLM's nccl engine counts it: over data-parallel engines, then over the workers of one.
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        own = own_address(address, port)
        self._bound = init_info.packed_buffer_size_bytes
        self._group = GlooGroup(PrefixStore(init_info.group, store), rank, init_info.world_size, own, init_info.seconds)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        if self._group is None:
            raise RuntimeError("There is no group to receive weights from. Call init_transfer_engine first.")
        given = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        described = [Described(name, dtype, tuple(shape)) for name, dtype, shape in given]
        with disable_mtp_completeness_check():
            for tensors in self._group.receive(described, self._bound):
                self.model.load_weights(tensors)  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._group = None


if GLOO not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(GLOO, GlooWeightTransferEngine)
