"""Engines that generate with the trainer's weights.

Invariant: weights are neither published nor loaded twice. A refit gives the engine the train service that holds the
version, and proves by the digest of its present weights that it is the checkpoint's. During training the engine sleeps
without the service, so no token is generated from changing weights.

    flow's process    lend(checkpoint, service) ── refit ──> engine.take(service)      requests are answered
                      train step                ── sleep ──> engine releases it        requests are refused until the next refit

The HTTP server is a thread of the flow's process (`standalone.engine_of_this_process`): rollouts reach it like any
other engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from roundhouse.config.engines import engine_traits
from roundhouse.config.generation import InflightRequests
from roundhouse.config.models import GenerationConfig, RunConfig
from roundhouse.errors import ConfigError
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.interface import ListGeneration, TokenizedGeneration
from roundhouse.generation.protocol import Draw, Generated, WeightsRefused
from roundhouse.generation.transformers_engine import (
    TransformersEngine,
    Waiting,
    generate_batch,
    key_value_bytes,
)
from roundhouse.imports import lean_transformers
from roundhouse.pretrained import load_pretrained
from roundhouse.store.stage import WEIGHTS_DIGEST, read_manifest
from roundhouse.training.service.verbs import TrainService
from roundhouse.weight_sync.base import (
    DirectTransport,
    Published,
    RunCheckpoint,
    WeightChange,
    WeightSource,
    WeightTransferFailed,
)
from roundhouse.weight_sync.replica_state import ReplicaReport

if TYPE_CHECKING:
    from roundhouse.training.service.engine import TrainEngine

_lent: dict[str, TrainService] = {}
"""The train service that holds a checkpoint, by its URI; empty while the trainer works."""


def lend(checkpoint: str, service: TrainService) -> None:
    """Let this process's engine generate from the weights of the service, which are those of the checkpoint at this URI."""
    _lent.clear()
    _lent[checkpoint] = service


class LentWeights(WeightSource):
    kind: str = "trainer"
    checkpoint: str
    """URI under which the service was lent."""


class TrainersWeights(DirectTransport):
    """No way at all: the engine takes hold of the trainer in its own process."""

    Source = LentWeights
    publishes_engine_format = False

    def check(self, run: RunConfig) -> None:
        if engine_traits(run.generation.backend).train_service is None:
            raise ValueError(
                f"generation.weight_sync is trainer, but generation.backend is {run.generation.backend}, which loads "
                "separate weights. Set generation.backend to trainer, or generation.weight_sync to store."
            )

    @contextmanager
    def publish(self, checkpoint: RunCheckpoint, replicas: Sequence[ReplicaReport]) -> Iterator[Published]:
        reference, digest = checkpoint.reference, None
        generation, first = checkpoint.run.config.generation, checkpoint.run.first_version
        if (
            generation.backend == "trainer" and reference.policy_version > first
        ):  # which may be in another number format
            digest = read_manifest(reference).details.get(WEIGHTS_DIGEST)
        yield Published(digest, LentWeights(dtype=checkpoint.dtype, checkpoint=reference.uri))

    @classmethod
    def check_replica(cls, engine: object, source: LentWeights, replica_id: str) -> None:
        if source.checkpoint not in _lent:
            raise WeightTransferFailed(f"the trainer of this process does not hold {source.checkpoint}", touched=False)

    @classmethod
    async def receive(cls, engine: Any, source: LentWeights, replica_id: str, change: WeightChange) -> tuple[str, int]:
        digest, tensors = await engine.take(_lent[source.checkpoint], change.version)
        if change.digest not in (None, digest):
            raise WeightTransferFailed(
                f"the trainer holds weights of digest {digest}, the checkpoint's is {change.digest}", touched=True
            )
        return digest, tensors


class LentEngine:
    """Base of engines that generate from a train service's weights; they receive them only by `take`."""

    async def load_weights(
        self, directory: str, version: int = 0, running: InflightRequests = "drain", keep_prefix_cache: bool = False
    ) -> None:
        """Raises:
        WeightsRefused: always.
        """
        raise WeightsRefused(f"The trainer does not hold version {version}, and this engine has no other weights.")

    async def sleep(self) -> None:
        _lent.clear()

    async def wake(self) -> None:
        """`take` follows."""


class TrainerEngine(LentEngine, TransformersEngine):
    """`Engine` over the model of the trainer in this process, with its number format and threads.

    Raises:
        ConfigError: `mcore_generation_config` is too small for one request of `max_model_len`.
    """

    def __init__(self, config: GenerationConfig, model_dir: str, codec: ChatCodec) -> None:
        super().__init__(config, model_dir, codec)
        self._service: Any = None
        self._tokens: int | None = None
        """Largest number of tokens of all requests in a batch, including padding; None: unlimited."""
        options = config.mcore_generation_config
        if options is None:
            return
        with lean_transformers():
            from transformers import AutoConfig

            shape = load_pretrained(AutoConfig, model_dir)
        buffered = int(options.buffer_size_gb * 2**30 / key_value_bytes(shape, config.dtype))
        if buffered < self.max_model_len:
            raise ConfigError(
                f"generation.mcore_generation_config.buffer_size_gb is {options.buffer_size_gb:g}, which has room for the keys "
                f"and values of {buffered} tokens, but generation.max_model_len is {self.max_model_len}. Raise the first, or "
                "lower the second."
            )
        self._tokens = min(buffered, options.max_tokens)

    async def start(self) -> None:
        self._loop = asyncio.create_task(self._serve())

    async def take(self, service: Any, version: int) -> tuple[str, int]:
        """Generate from the service's weights from now on; their digest, and how many tensors they are."""

        def take() -> tuple[str, int]:
            self._service, self._version = service, version
            return service.weights_digest()

        return await self._run(take)

    async def sleep(self) -> None:
        await super().sleep()
        await self._run(lambda: None)  # an abandoned batch still holds the model for one token
        self._service = None

    @contextmanager
    def _computing(self) -> Iterator[Any]:
        with self._service.generating() as model:
            yield model

    def _have_room(self, batch: Sequence[Waiting]) -> bool:
        longest = max(len(prompt) for prompt, *_ in batch) + max(draw.max_tokens for _, draw, _ in batch)
        return super()._have_room(batch) and (self._tokens is None or len(batch) * longest <= self._tokens)


class TrainerGeneration(ListGeneration):
    """The seed's interface over a train service in this process, for batches of tensors.

    Args:
        service: holds the policy; its verbs are called before `prepare_for_generation` or after `finish_generation`.
    """

    def __init__(self, tokenized: TokenizedGeneration, service: TrainEngine) -> None:
        super().__init__(tokenized, "")
        self._service = service
        self._opened = ExitStack()
        self._model: Any = None

    def prepare_for_generation(self) -> None:
        if self._model is None:
            self._model = self._opened.enter_context(self._service.generating())

    def finish_generation(self) -> None:
        self._opened.close()
        self._model = None

    def answer(self, prompts: list[list[int]], draws: list[Draw]) -> list[Generated]:
        if self._model is None:
            raise ConfigError("The trainer does not generate yet: call prepare_for_generation first.")
        return generate_batch(self._model, prompts, draws, self.tokenized.stop_token_ids)
