"""Code inside vLLM's worker at a refit: load the weights, repair vLLM's omissions, prove that they are in use.

Invariant: `roundhouse_load` returns only after the model computes with the new weights. Status codes prove nothing
here: on CPU vLLM packs every linear layer into a oneDNN kernel and frees the weights; its reload leaves the head of a
model with tied embeddings on the old kernel without an error, and gives the kernel of a layer's experts unpacked
matrices. Each packed layer therefore multiplies a random vector, and the product is compared with the checkpoint's.

The module also adds the weight-transfer engines of transports to vLLM's.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from roundhouse.config.generation import transfer_engines
from roundhouse.generation.weights_probe import (
    EXPERT,
    UNQUANTIZED_EXPERTS,
    CheckpointTensors,
    beginnings,
    expert_layers,
    probe,
    probed_layers,
    refuse_kept,
)
from roundhouse.weight_sync.tensor_files import DIGEST_THREADS, iterate, torch_digest

logger = logging.getLogger(__name__)

PARENT_WATCH_SECONDS = 1.0
WORKER_NAME = "VllmWorker"
"""vLLM's name of the processes that its engine process starts."""


def _end_with_parent() -> None:
    """End this process when the replica that started it has died.

    vLLM's engine process does not notice its parent's death, and would hold its memory for ever. With separate workers
    (tensor parallelism), only they import this module, and they end it too.
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


class RefitExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`."""

    def roundhouse_load(self, directory: str) -> int:
        """Load a Hugging Face directory into the running model.

        Returns:
            Number of parameters and layers proved to hold the new weights.

        Raises:
            StaleWeights: at least one does not.
        """
        path, model = Path(directory), self.model_runner.get_model()  # type: ignore[attr-defined]
        before = self._random_weights()
        self.reload_weights(weights_iterator=iterate(path))  # type: ignore[attr-defined]
        load_copied(model, path)
        complete_reload(model)
        self._require_replaced(before)
        return probe(model, CheckpointTensors(path))

    _loaded = False
    """Weights have taken the place of the random ones that the engine starts with."""

    def _random_weights(self) -> dict[str, Any]:
        """The first numbers of each parameter, if the engine has started with random weights and none have come since."""
        starts_random = self.vllm_config.load_config.load_format == "dummy"  # type: ignore[attr-defined]
        if self._loaded or not starts_random:
            return {}
        return beginnings(self.model_runner.get_model())  # type: ignore[attr-defined]

    def _require_replaced(self, before: dict[str, Any]) -> None:
        refuse_kept(self.model_runner.get_model(), before)  # type: ignore[attr-defined]
        self._loaded = True

    def roundhouse_device(self) -> str:
        """Return the device that holds this worker's weights: `cpu`, or the GPU's number and its id."""
        device = next(self.model_runner.get_model().parameters()).device  # type: ignore[attr-defined]
        if device.type != "cuda":
            return str(device)
        return f"{device} {torch.cuda.get_device_properties(device).uuid}"

    def roundhouse_forget(self) -> None:
        """Clean up before the engine ends in a process that continues: vLLM's table of layers keeps reloaded ones for
        good."""
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        for layer in self.model_runner.get_model().modules():  # type: ignore[attr-defined]
            LAYERWISE_INFO.pop(layer, None)

    # A transfer, between the steps of vLLM's own interface: watch, start, update, arrived, finish, prove; or abandon.

    _arrivals: Arrivals | None = None
    _before: dict[str, Any] | None = None
    """What `_random_weights` returned when the transfer began."""

    def roundhouse_watch(self) -> None:
        """From here on, what vLLM's weight-transfer engine hands to the model is written down."""
        self._before = self._random_weights()
        self._arrivals = Arrivals(self.model_runner.get_model())  # type: ignore[attr-defined]

    def roundhouse_arrived(self) -> dict[str, str]:
        """Digest of each tensor that came, by its name."""
        assert self._arrivals is not None
        return self._arrivals.digests()

    def roundhouse_prove(self) -> int:
        """Prove the loaded tensors as at the end of `roundhouse_load`."""
        assert self._arrivals is not None
        arrivals, self._arrivals = self._arrivals, None
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        complete_reload(model)
        self._require_replaced(self._before or {})
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


class Arrivals:
    """Tensors that a weight-transfer engine loads: the digest of everything, and the tensors for `probe`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers = probed_layers(model)
        self._experts = {part for _, layer, parts in expert_layers(model) for each in parts.values() for part in each}
        self._kept: dict[str, Any] = {}
        self._digests: list[Future[tuple[str, str]]] = []
        self._pool = ThreadPoolExecutor(DIGEST_THREADS)
        load: Callable[[Iterable[tuple[str, Any]]], Any] = model.load_weights

        def watched(tensors: Iterable[tuple[str, Any]]) -> Any:
            came = list(tensors)
            for name, tensor in came:
                self._digests.append(self._pool.submit(torch_digest, name, tensor))
                if EXPERT.search(name):
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


def load_copied(model: Any, directory: Path) -> None:
    """Load the experts and sinks of GPT-OSS on a CPU: vLLM 0.32 copies them in a way that its reload does not see."""
    from vllm.platforms import current_platform

    if type(model).__name__ == "GptOssForCausalLM" and current_platform.is_cpu():
        model.load_weights((name, tensor) for name, tensor in iterate(directory) if _COPIED.search(name))


_COPIED = re.compile(r"\.experts\.|\.sinks$")


def complete_reload(model: Any) -> None:
    """Complete a reload of vLLM 0.32 on CPU (vllm-project/vllm#48312 collects such cases).

    The head of tied embeddings owns no tensor of the checkpoint, so the reload never reaches it: it is packed again.
    Experts' matrices are packed only at the first load; later loads put unpacked ones in place of the packed ones.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        if type(method := getattr(layer, "quant_method", None)).__name__ == UNQUANTIZED_EXPERTS:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)  # type: ignore[union-attr]
    language = getattr(model, "language_model", model)  # of a composite model
    embedding, head = (
        getattr(getattr(language, "model", None), "embed_tokens", None),
        getattr(language, "lm_head", None),
    )
    if embedding is None or head is None or not model.config.tie_word_embeddings:
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head.weight = embedding.weight
    dispatch_cpu_unquantized_gemm(head, remove_weight=False)


for _name, _target in transfer_engines().items():
    if _target and _name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(_name, *_target.split(":"))
