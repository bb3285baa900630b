"""Memory of a training step on a device, planned before anything starts: bytes per rank, by kind.

Invariant: a plan depends on the model's shape, the section `train` and the number of ranks alone. It needs neither weights
nor a GPU:
permanent memory is counted from shapes, and a pass's memory is measured by running the trainer's scorer on fake
tensors.

    weights, gradients     4 bytes per parameter, spread over the ranks; with `train.service.tensor_parallel`, unsplit ones over
                           fewer. Under an adapter: only its own gradients, and with bfloat16 2 bytes for frozen
                           matrices
    moments                8 bytes per trained parameter, spread; in 8 bits 2 1/16 of those in blocks
    frozen towers          of a composite model, in the number format that config.json states, spread; again for a reference
                           and a critic, which are loaded whole. The other lines count the language model alone
    reference              4 bytes per parameter, or 2 for matrices but embeddings with bfloat16, spread; 0 if it is the policy
                           without its adapter
    critic                 12 bytes per parameter (fewer in 8 bits), spread, with the policy's size without its output layer;
                           policy and critic learn in turn, so one of them has gradients
    gathered weights       FSDP2: the root's group and two layers, in the compute type; with expert parallelism a rank's experts
    whole gradients        FSDP2 before the reduction: 4 bytes per trained parameter that a rank gathers
    reduction              FSDP2: the largest group's gradient, and as much in float32
    activations, logits    of one microbatch, or a rank's part of it, at their common peak

Over several ranks the peak is in the backward pass or in the last reduction; the plan is the larger.
docs/training-at-scale.md has the details; `benchmarks/memory_plan.py` compares plans with measured peaks.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundhouse.config.models import OptimizerConfig, TrainConfig
from roundhouse.errors import ConfigError
from roundhouse.pretrained import build_model
from roundhouse.training.context_parallel import Context, refuse_unfit_heads
from roundhouse.training.expert_adapters import EXPERTS_OF_ONE, adapted_experts
from roundhouse.training.forward import Scorer
from roundhouse.training.language_model import frozen_towers, language_model
from roundhouse.training.layers import (
    attach,
    checkpoint_activations,
    decoder_layers,
    hold_in_bfloat16,
    replace_norms,
    used_in_bfloat16,
)
from roundhouse.training.optimizer import BLOCK, in_blocks
from roundhouse.training.packed_attention import (
    PACKED,
    check_packable,
    register_packed_attention,
    try_packed_pass,
    why_not_packed,
)
from roundhouse.training.packing import Microbatch, Span
from roundhouse.training.parallel import refuse_uneven
from roundhouse.training.tensor_parallel import (
    expert_modules,
    refuse_unfit_experts,
    refuse_unfit_shape,
    refuse_without_plan,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU by its vendor's data sheet."""

    bf16_flops: float
    """Dense bf16 FLOP/s, without sparsity."""
    memory: float
    """Bytes."""


DEVICES = {
    "B200": Device(2250e12, 180e9), "GH200 480GB": Device(989e12, 96e9), "H200": Device(989e12, 141e9),
    "H200 NVL": Device(835e12, 141e9), "H100 80GB HBM3": Device(989e12, 80e9), "H100 NVL": Device(835e12, 94e9),
    "H100 PCIe": Device(756e12, 80e9), "A100-SXM4-40GB": Device(312e12, 40e9), "A100-SXM4-80GB": Device(312e12, 80e9),
    "A100-PCIE-40GB": Device(312e12, 40e9), "A100 80GB PCIe": Device(312e12, 80e9), "L40S": Device(362e12, 48e9),
    "L40": Device(181e12, 48e9), "L4": Device(121e12, 24e9), "A40": Device(150e12, 48e9), "A30": Device(165e12, 24e9),
    "A10": Device(125e12, 24e9), "A10G": Device(70e12, 24e9),
}  # fmt: skip
"""By the device's whole name without "NVIDIA". A part of the name is not enough: an L40S has twice the peak of an L40, an H100
PCIe three quarters of the one on SXM."""
_SHORT = {"h100": "H100 80GB HBM3", "a100": "A100-SXM4-80GB", "gh200": "GH200 480GB"}
USABLE = 0.95
"""Usable share of a device's memory; the rest is for CUDA's context and unusable parts of the allocator's blocks."""


def known_device(name: str) -> Device | None:
    """Return the device with this torch name; None if no data sheet is known."""
    return DEVICES.get(name.removeprefix("NVIDIA ").strip())


def device_memory(name: str) -> float:
    """Return the bytes of a named device: `h100`, `A100-SXM4-40GB`, or `96GB` for an unlisted one.

    Raises:
        ConfigError: the name matches none of these.
    """
    if (size := re.fullmatch(r"(\d+(?:\.\d+)?)\s*GB", name.strip(), re.IGNORECASE)) is not None:
        return float(size[1]) * 1e9
    key = _SHORT.get(name.strip().lower(), name).removeprefix("NVIDIA ").strip().lower()
    for known, device in DEVICES.items():
        if known.lower() == key:
            return device.memory
    raise ConfigError(
        f"--device {name} is not known. Known are {', '.join([*_SHORT, *DEVICES])}; or give its memory, such as 96GB."
    )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of one rank at its peak."""

    parameters: int
    """Number of the model's parameters."""
    ranks: int
    tokens: int
    """Tokens of a microbatch."""
    bytes: dict[str, int]
    """Bytes by kind, in the order of the module's text; empty kinds are omitted."""

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def plan_memory(model: PreTrainedConfig, train: TrainConfig, ranks: int, tokens: int) -> MemoryPlan:
    """The plan of a training step.

    Args:
        model: config.json of the policy.
        tokens: of the longest microbatch; every one of them is taken to be trained on.

    Raises:
        ConfigError: the model cannot be trained with this section or so many ranks, or its passes cannot be followed without
            weights.
    """
    context, tensor, replicas, experts = train.parallelism.values()
    refuse_uneven(ranks, context, tensor, replicas, experts)
    refuse_unfit_layout(model, train)
    if train.packing == "auto":
        train = train.model_copy(update={"packing": why_not_packed(model) is None})
    built = _fake_model(model if tensor == 1 else _split(model, tensor), train, sharded=ranks > 1)
    over = ranks // (tensor * replicas)  # ranks that share a rank's part of the model
    towers = frozen_towers(built.model)
    tower_bytes = sum(parameter.numel() * parameter.itemsize for parameter in towers.values())
    with built.mode:
        whole = _language_numel(built.model)
        trained = sum(parameter.numel() for parameter in built.model.parameters() if parameter.requires_grad)
        learns = [parameter.shape for parameter in built.model.parameters() if parameter.requires_grad]
        low = _frozen_low(built.model, train, sharded=ranks > 1)
        if experts > 1:
            _leave_experts_of_one(built.model, experts)
        numel = _language_numel(built.model)
        layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in decoder_layers(built.model)]
    at_peak, logits_at_peak = _peak(built, train, tokens, sharded=ranks > 1)
    adapter = whole - trained if train.lora is not None else 0
    reference = train.algorithm.reference_source is not None and not train.reference_is_frozen
    section = train.algorithm.critic_section
    critic = 0 if section is None else _of_critic(model, built.model)
    copies = 1 + reference + (section is not None)
    eight = section is not None and section.optimizer.moments == "8-bit"
    learning = max(trained, critic)
    bytes_ = {
        "weights": (4 * whole - (2 * low if _adapts_low(model, train) else 0)) // over,
        "gradients": 4 * learning // over,
        "moments": _moments(learns, train.optimizer) // over,
        "critic": int((4 + (_IN_BLOCKS if eight else 8)) * critic) // over,
        "reference": (4 * (adapter or whole) - 2 * low) // over if reference else 0,
        "frozen towers": copies * tower_bytes // over,
    }
    passing = {"activations": at_peak - logits_at_peak, "logits": logits_at_peak}
    if ranks > 1:
        element, root, layer = language_model(built.model).dtype.itemsize, numel - sum(layers), max(layers)
        share = 1 - (whole - numel) / learning if trained == whole else 1.0  # of gradients; experts may be frozen
        reducing = {
            "gathered weights": element * (root + 2 * layer + max(root, layer)),
            "reduction": (element + 4) * max(root, layer) * learning // whole,
        }
        passing["gathered weights"] = element * (root + 2 * layer)
        after_reduction = dict(bytes_)
        if train.reduce_gradients == "update":
            bytes_["whole gradients"] = int(4 * learning * share)
            after_reduction = bytes_ | {"gradients": 0}  # parts of the sum exist once it is made
        bytes_ = max(after_reduction | passing, bytes_ | reducing, key=lambda each: sum(each.values()))
    else:
        bytes_ |= passing
    parameters = whole + sum(tower.numel() for tower in towers.values())
    if tensor > 1:
        parameters = sum(parameter.numel() for parameter in _without_bytes(model).parameters())
    return MemoryPlan(parameters, ranks, tokens, {kind: size for kind, size in bytes_.items() if size})


def _frozen_low(model: PreTrainedModel, train: TrainConfig, *, sharded: bool) -> int:
    """Count the numbers in 2 bytes of such a model when it is frozen, without adapters."""
    frozen = [each for each in used_in_bfloat16(model, sharded=sharded) if train.lora is None or not each.requires_grad]
    return sum(parameter.numel() for parameter in frozen) if train.dtype == "bfloat16" else 0


def _adapts_low(model: PreTrainedConfig, train: TrainConfig) -> bool:
    """Return whether an adapter's frozen model is held so, too."""
    return train.lora is not None and train.dtype == _published_dtype(model) == "bfloat16"


def _published_dtype(model: PreTrainedConfig) -> str:
    return str(model.get_text_config().dtype or model.dtype).removeprefix("torch.")


def _moments(shapes: Iterable[torch.Size], optimizer: OptimizerConfig) -> int:
    """Bytes of AdamW's moments of parameters with these shapes."""
    eight = optimizer.moments == "8-bit"
    return int(sum((_IN_BLOCKS if eight and in_blocks(shape) else 8) * shape.numel() for shape in shapes))


_IN_BLOCKS = 2 * (1 + 4 / BLOCK)
"""Bytes of two 8-bit moments per parameter, and their scales."""


def _of_critic(shape: PreTrainedConfig, policy: PreTrainedModel) -> int:
    """Parameters of a critic on this model: one output in the place of one for each token."""
    text = shape.get_text_config()
    output = 0 if shape.tie_word_embeddings else policy.get_output_embeddings().weight.numel()
    adapters = sum(p.numel() for name, p in policy.named_parameters() if ".lora_" in name)
    return _language_numel(policy) - adapters - output + text.hidden_size + 1


def _language_numel(model: PreTrainedModel) -> int:
    """Count the parameters of the language model."""
    towers = sum(parameter.numel() for parameter in frozen_towers(model).values())
    return sum(parameter.numel() for parameter in model.parameters()) - towers


def refuse_unfit_layout(model: PreTrainedConfig, train: TrainConfig) -> None:
    """Refuse a model that the ranks of `train.service` cannot share, or that cannot be packed.

    Raises:
        ConfigError: packed sequences would mix in its layers, its heads, inner features or experts do not divide, or
            transformers lacks a plan that splits it.
    """
    context, tensor, _, experts = train.parallelism.values()
    packs = train.packing if context == 1 else bool(train.packing)  # context parallelism needs packed rows
    without_bytes = _without_bytes(model, packed=packs is True)
    if packs is True:
        check_packable(without_bytes)
        try_packed_pass(without_bytes)
    if tensor > 1:
        refuse_unfit_shape(model, tensor)
        refuse_without_plan(without_bytes)
    if context > 1:
        refuse_unfit_heads(model, context, tensor)
    if experts > 1:
        refuse_unfit_experts(without_bytes, experts)
    names = () if train.lora is None else train.lora.target_modules
    if getattr(train.service, "processes", 1) > 1 and adapted_experts(without_bytes, names):
        raise ConfigError(EXPERTS_OF_ONE)


def _leave_experts_of_one(model: PreTrainedModel, ranks: int) -> None:
    """Leave each layer the experts of one of so many ranks, which computes as many tokens as it sends to all of them."""
    for module in expert_modules(model):
        for name, whole in list(module.named_parameters(recurse=False)):
            part = torch.empty(len(whole) // ranks, *whole.shape[1:], dtype=whole.dtype)
            module.register_parameter(name, torch.nn.Parameter(part, whole.requires_grad))
        own: Any = module
        own.num_experts, own._is_expert_parallel, own.forward = own.num_experts // ranks, True, _exchanging(own.forward)


def _exchanging(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap the experts' forward pass with the tensors that the exchange makes: two per token, its input and its
    output."""

    def forward(hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        pairs = index_TK.reshape(-1, 1)
        received = hidden_TD[pairs.argsort(0)[:, 0] // index_TK.shape[1]].clone()
        returned = compute(received, torch.zeros_like(pairs), torch.ones_like(pairs, dtype=hidden_TD.dtype)).clone()
        ordered = torch.empty_like(returned)
        ordered[pairs.argsort(0)[:, 0]] = returned
        return (ordered.view(*index_TK.shape, -1) * weights_TK.unsqueeze(-1)).sum(1)

    return forward


def tensors_of(model: PreTrainedConfig) -> int:
    """Return the tensors of a checkpoint of this model, in which each expert has separate matrices."""
    count = 0
    for name, parameter in _without_bytes(model).named_parameters():
        fused = parameter.shape[0] if ".experts." in name and parameter.dim() == 3 else 1
        count += fused * (2 if fused > 1 and "gate_up" in name else 1)
    return count


def _without_bytes(model: PreTrainedConfig, *, packed: bool = False) -> PreTrainedModel:
    attention = {"attn_implementation": PACKED} if packed else {}
    if packed:
        register_packed_attention()
    with torch.device("meta"):
        model_on_meta: PreTrainedModel = build_model(copy.deepcopy(model), **attention)
    return model_on_meta.eval()


def _split(model: PreTrainedConfig, tensor: int) -> PreTrainedConfig:
    """Return the shape of a rank's part of the model if so many ranks split its layers."""
    split = copy.deepcopy(model)
    text: Any = split.get_text_config()
    heads = text.num_attention_heads
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    text.num_attention_heads = heads // tensor
    text.num_key_value_heads = (getattr(text, "num_key_value_heads", None) or heads) // tensor
    text.intermediate_size //= tensor
    return split


def remedies(model: PreTrainedConfig, train: TrainConfig, ranks: int, tokens: int, memory: float) -> list[str]:
    """Return settings that make the step fit, the cheapest first, in the form of `--set`; all of them if none suffices.

    Args:
        memory: bytes that a rank may take.
    """
    settings: list[str] = []
    context, tensor, replicas, experts = train.parallelism.values()
    sizes = (2, 4, 8, 16, 32, 64)
    for key, value in _SAVINGS:
        if getattr(train, key) == value or (key == "reduce_gradients" and ranks == 1):
            continue
        train = train.model_copy(update={key: value})
        settings.append(f"train.{key}={str(value).lower()}")
        if plan_memory(model, train, ranks, tokens).total <= memory:
            return settings
    if (service := train.service).has_ranks:
        if replicas > 1:
            service = service.model_copy(update={"data_parallel_replicate": 1})
            train = train.model_copy(update={"service": service})
            settings.append("train.service.data_parallel_replicate=1")
            if plan_memory(model, train, ranks, tokens).total <= memory:
                return settings
        for key, now in (("expert_parallel", experts), ("context_parallel", context if train.packing else max(sizes))):
            for size in sizes:
                if size <= now or ranks % (size * tensor):
                    continue
                shared = train.model_copy(update={"service": service.model_copy(update={key: size})})
                with suppress(ConfigError):  # the policy's heads or experts do not divide, or it lacks a plan
                    if plan_memory(model, shared, ranks, tokens).total <= memory:
                        return [*settings, f"train.service.{key}={size}"]
    for count in sizes:
        if count <= ranks or count % (context * tensor) or count % experts:
            continue
        if plan_memory(model, train, count, tokens).total <= memory:
            return [*settings, f"train.service.processes={count}"]
    return [
        *settings,
        "fewer train.tokens_per_microbatch and generation.max_model_len, train.lora, or a smaller model",
    ]


_SAVINGS: tuple[tuple[str, Any], ...] = (
    ("dtype", "bfloat16"),
    ("logits_chunk_tokens", 1024),
    ("activation_checkpointing", True),
    ("reduce_gradients", "microbatch"),
)


@dataclass(frozen=True, slots=True)
class _Fake:
    """A model without bytes."""

    model: PreTrainedModel
    mode: FakeTensorMode


def _fake_model(config: PreTrainedConfig, train: TrainConfig, *, sharded: bool) -> _Fake:
    register_packed_attention()
    compute = torch.bfloat16 if sharded and train.dtype == "bfloat16" else torch.float32
    with torch.device("meta"):
        model = build_model(
            copy.deepcopy(config),  # transformers writes the dtype into it
            dtype=compute,
            **({"attn_implementation": PACKED} if train.packing else {}),
        ).eval()
        for tower in frozen_towers(model).values():
            tower.requires_grad_(False)
            tower.data = tower.data.to(torch.bfloat16 if _published_dtype(config) == "bfloat16" else torch.float32)
        attach(model, train.lora, None, Path())
    if _adapts_low(config, train):
        hold_in_bfloat16(model, sharded=sharded)
    if train.activation_checkpointing:
        checkpoint_activations(model)
    replace_norms(model, tried=False)
    with FakeTensorMode() as mode:
        fake_parameters: dict[int, torch.nn.Parameter] = {}  # of tied weights one
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in fake_parameters:
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                    fake_parameters[id(parameter)] = torch.nn.Parameter(fake, parameter.requires_grad)
                setattr(module, name, fake_parameters[id(parameter)])
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
    return _Fake(model, mode)


_FOLLOWED = 4, 6
"""Layer counts to measure if all layers are alike: each adds the same, so two points give the line."""


def _peak(built: _Fake, train: TrainConfig, tokens: int, *, sharded: bool) -> tuple[int, int]:
    """Return the peak bytes of a pass, and the logits among them. Reduce the number of layers if they are alike."""
    layers = decoder_layers(built.model)
    shapes = {tuple((name, parameter.shape) for name, parameter in layer.named_parameters()) for layer in layers}
    kinds = set(getattr(built.model.config.get_text_config(), "layer_types", None) or ())
    stack = next(
        (part for part in built.model.modules() if isinstance(part, torch.nn.ModuleList) and list(part) == layers), None
    )
    if stack is None or len(layers) <= _FOLLOWED[1] or len(shapes) > 1 or len(kinds) > 1:
        return _pass(built, train, tokens, sharded=sharded)
    few, more = _FOLLOWED
    del stack[more:]
    high = _pass(built, train, tokens, sharded=sharded)
    del stack[few:]
    low = _pass(built, train, tokens, sharded=sharded)
    return tuple(a + (len(layers) - few) * (b - a) // (more - few) for a, b in zip(low, high, strict=True))  # type: ignore[return-value]


def _pass(built: _Fake, train: TrainConfig, tokens: int, *, sharded: bool) -> tuple[int, int]:
    """Forward and backward of the second microbatch, which finds the gradients of the first."""
    context = train.parallelism["context_parallel"]
    scorer = Scorer(
        built.model,
        temperature=0.9,
        dtype=train.dtype,
        logits_chunk=train.logits_chunk_tokens,
        sharded=sharded,
        context=_WithoutPeers(0, context, torch.clone, torch.clone) if context > 1 else None,
    )
    entropy = getattr(train.algorithm, "entropy_coefficient", 0.0) > 0
    with built.mode:
        for parameter in built.model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        tensors = [tensor for p in built.model.parameters() for tensor in (p, p.grad) if tensor is not None]
        length = -(-tokens // context) * context
        ids, count = torch.zeros(1, length, dtype=torch.long), torch.arange(length)
        row = Microbatch(  # one sequence; every token but the first is predicted
            input_ids=ids,
            position_ids=count[None],
            attention_mask=None if train.packing else torch.ones(1, length, dtype=torch.long),
            spans=(Span(0, length, 1, length, None, None),) if train.packing else None,
            predict=count,
            targets=ids[0],
            source=None,  # type: ignore[arg-type]  # numpy's, which the passes do not read
            real_tokens=length,
        )
        try:
            with _LiveBytes(
                [*tensors, *built.model.buffers()], built.model.config.get_text_config().vocab_size
            ) as live:
                prediction = scorer.predict(row, with_entropy=entropy)
                loss = prediction.log_probs.sum()
                if prediction.entropy is not None:
                    loss = loss + prediction.entropy.sum()
                del prediction
                loss.backward()
        except RuntimeError as error:
            raise ConfigError(
                f"{type(built.model).__name__} cannot be planned in {built.model.dtype}: its layers need values, not only "
                f"shapes ({str(error).splitlines()[0][:200]}). Measure one step instead: python -m benchmarks.mfu."
            ) from error
    return live.at_peak, live.logits_at_peak


class _WithoutPeers(Context):
    """The first rank of a context group, by itself."""

    def part(self, microbatch: Microbatch) -> tuple[Microbatch, torch.Tensor]:
        own = microbatch.input_ids.shape[1] // self.size
        ids, positions, mine = microbatch.input_ids[:, :own], microbatch.position_ids[:, :own], microbatch.predict[:own]
        return replace(microbatch, input_ids=ids, position_ids=positions, predict=mine, targets=ids[0]), mine


class _LiveBytes(TorchDispatchMode):
    """Track the bytes of tensors that operations make until they are released.

    Args:
        held: tensors that do not count.
        vocabulary: tensors of so many columns are logits.
    """

    def __init__(self, held: list[torch.Tensor], vocabulary: int) -> None:
        super().__init__()
        self._known = {id(tensor.untyped_storage()): (0, False) for tensor in held}
        self._held = [tensor.untyped_storage() for tensor in held]  # an id is good for as long as its object lives
        self._vocabulary = vocabulary
        self._now = self._logits = 0
        self.at_peak = 0
        self.logits_at_peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if (key := id(storage)) in self._known:
                continue
            size, logits = storage.nbytes(), tensor.ndim >= 2 and tensor.shape[-1] == self._vocabulary
            self._known[key] = size, logits
            self._now += size
            self._logits += size if logits else 0
            weakref.finalize(storage, self._drop, key)
        if self._now > self.at_peak:
            self.at_peak, self.logits_at_peak = self._now, self._logits
        return result

    def _drop(self, key: int) -> None:
        size, logits = self._known.pop(key)
        self._now -= size
        self._logits -= size if logits else 0
