"""NeMo RL's generation example by its own names: a cluster, a batch, a configuration, and an engine of this system.

config = VllmConfig(model_name="/models/small", max_new_tokens=100, temperature=0.7, backend="vllm",
                    vllm_cfg={"tensor_parallel_size": 1, "max_model_len": 2048})
config = configure_generation_config(config, get_tokenizer(config["model_name"]))
generator = VllmGeneration(RayVirtualCluster([1]), config)
generator.prepare_for_generation()
output = generator.generate(BatchedDataDict({"input_ids": …, "input_lengths": …}), greedy=False)
generator.finish_generation()
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from roundhouse.config.generation import GenerationConfig as EngineConfig
from roundhouse.errors import ConfigError
from roundhouse.generation.interface import TokenizedGeneration, create_backend
from roundhouse.generation.interface import configure_generation_config as complete
from roundhouse.plugins.nemo_rl.configuration import translate_configuration
from roundhouse.pretrained import load_pretrained

if TYPE_CHECKING:
    import torch


class GenerationConfig(dict[str, Any]):
    """The keys of `policy.generation`, with `model_name`."""


VllmConfig = GenerationConfig


def get_tokenizer(tokenizer: str | Mapping[str, Any]) -> Any:
    """Return the tokenizer of a model, or of a configuration with its `name`; one without padding pads with its end.

    Raises:
        ConfigError: the tokenizer can only be loaded by its own code.
        OSError: the model is not on this machine.
    """
    from transformers import AutoTokenizer

    loaded = load_pretrained(AutoTokenizer, tokenizer if isinstance(tokenizer, str) else tokenizer["name"])
    if loaded.pad_token is None:
        loaded.pad_token = loaded.eos_token
    return loaded


def configure_generation_config(config: GenerationConfig, tokenizer: Any, is_eval: bool = False) -> GenerationConfig:
    """Return the configuration with the tokenizer's padding and end-of-turn tokens.

    Raises:
        ConfigError: lists the keys without a counterpart, or the tokenizer does not define an end-of-turn token.
    """
    tokenized = complete(_engine_config(config), tokenizer)
    tokens = {"_pad_token_id": tokenized.pad_token_id, "stop_token_ids": sorted(tokenized.stop_token_ids)}
    return GenerationConfig({**config, **tokens})


def _engine_config(config: Mapping[str, Any]) -> EngineConfig:
    own = {name: value for name, value in config.items() if name not in ("_pad_token_id", "stop_token_ids")}
    tree = translate_configuration({"policy": {"generation": own}}, "VllmConfig") or {}
    return EngineConfig.model_validate(tree.get("generation", {}))


class RayVirtualCluster:
    """The processes that an engine may use: so many on each node."""

    def __init__(
        self,
        bundle_ct_per_node_list: Sequence[int],
        use_gpus: bool = True,
        max_colocated_worker_groups: int = 1,
        num_gpus_per_node: int = 8,
        name: str = "",
    ) -> None:
        """
        Raises:
            ConfigError: there are several nodes, which an engine in this process cannot use.
        """
        if len(bundle_ct_per_node_list) != 1:
            raise ConfigError(
                f"RayVirtualCluster: {len(bundle_ct_per_node_list)} nodes. Give one; a run has as many as generation.replicas "
                "and infra name."
            )
        self.name, self.use_gpus, self.num_gpus_per_node = name, use_gpus, num_gpus_per_node
        self._bundles = list(bundle_ct_per_node_list)

    def world_size(self) -> int:
        """Return the number of processes."""
        return sum(self._bundles)

    def node_count(self) -> int:
        return len(self._bundles)

    def shutdown(self) -> bool:
        """Do nothing: the engine ends with `finish_generation`."""
        return True


class BatchedDataDict(dict[str, Any]):
    """Columns of one length: tensors or lists."""

    @property
    def size(self) -> int:
        """The number of rows."""
        return 0 if not self else len(next(iter(self.values())))

    @classmethod
    def from_batches(
        cls, batches: Iterable[Mapping[str, Any]], pad_value_dict: Mapping[str, Any] | None = None
    ) -> Self:
        """Return the rows of all batches; tensors of other widths are padded on the right, with 0 unless another is given."""
        import torch
        from torch.nn.functional import pad

        parts = list(batches)
        joined: dict[str, Any] = {}
        for name in parts[0] if parts else ():
            columns = [part[name] for part in parts]
            if isinstance(columns[0], torch.Tensor) and columns[0].dim() > 1:
                width = max(column.shape[1] for column in columns)
                value = (pad_value_dict or {}).get(name, 0)
                columns = [pad(column, (0, width - column.shape[1]), value=value) for column in columns]
            is_tensor = isinstance(columns[0], torch.Tensor)
            joined[name] = torch.cat(columns) if is_tensor else [value for column in columns for value in column]
        return cls(joined)

    def slice(self, start: int, end: int) -> Self:
        """Return the rows from `start` to `end`."""
        return type(self)({name: column[start:end] for name, column in self.items()})

    def get_batch(self, batch_idx: int, batch_size: int) -> Self:
        """Return the batch of this number."""
        return self.slice(batch_idx * batch_size, (batch_idx + 1) * batch_size)

    def select_indices(self, indices: Sequence[int]) -> Self:
        """Return these rows."""
        import torch

        rows = list(indices)
        return type(self)(
            {
                name: column[rows] if isinstance(column, torch.Tensor) else [column[row] for row in rows]
                for name, column in self.items()
            }
        )

    def to(self, device: Any) -> Self:
        """Return the batch with its tensors on this device."""
        return type(self)({name: value.to(device) if hasattr(value, "to") else value for name, value in self.items()})


class VllmGeneration:
    """An engine in this process, by NeMo RL's constructor: `backend` of the configuration is vllm or hf."""

    def __init__(self, cluster: RayVirtualCluster, config: GenerationConfig) -> None:
        """
        Raises:
            ConfigError: the configuration was not completed, asks for more processes than the cluster has, or names no engine.
        """
        if "_pad_token_id" not in config:
            raise ConfigError("VllmGeneration: call configure_generation_config(config, tokenizer) first.")
        engine = _engine_config(config)
        width = int(engine.engine_args.get("tensor_parallel_size", 1))
        if width > cluster.world_size():
            raise ConfigError(
                f"vllm_cfg.tensor_parallel_size is {width}, but the cluster has {cluster.world_size()} processes. Give "
                f"RayVirtualCluster([{width}])."
            )
        stops = frozenset(config["stop_token_ids"])
        self.cfg, self.cluster = config, cluster
        self._backend = create_backend(
            TokenizedGeneration(engine, config["_pad_token_id"], stops), config["model_name"]
        )

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        self._backend.prepare_for_generation()
        return True

    def generate(self, data: Mapping[str, Any], greedy: bool = False) -> BatchedDataDict:
        """Continue each row of `input_ids`, right-padded, with `input_lengths` or an `attention_mask`."""
        rows: dict[str, Any] = dict(data)
        if "attention_mask" not in rows:
            rows["attention_mask"] = _mask_of(rows["input_ids"], rows["input_lengths"])
        output: Any = self._backend.generate(rows, greedy)  # type: ignore[arg-type]
        return BatchedDataDict(output)

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        self._backend.finish_generation()
        return True

    def shutdown(self) -> bool:
        """End the engine."""
        return self.finish_generation()


def _mask_of(input_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    import torch

    return (torch.arange(input_ids.shape[1])[None] < lengths[:, None]).long()
