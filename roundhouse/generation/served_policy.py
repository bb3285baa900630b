"""One replica's policy: its weights, and its permission to answer.

Invariant: every answer is labelled, token by token, with the versions of the weights that generated it. The gate holds
new requests during a refit. Running ones are awaited, continue with the new weights, or restart (`running`). If the
desired weights are unavailable, requests get 503, never an answer of a wrong version or a mixture:

    wanted asleep  ──gate, sleep────────────> no weights; 503 with the reason, until the next desired state wakes it
    wanted version ──bring, digest, check──> refused: engine untouched; 503 with the reason, tried again with growing
    pauses
                  ──load, probe───────────> failed: engine poisoned; 503, unhealthy, so that Serve restarts the replica
                  ──proved────────────────> ready
                  ──lost afterwards───────> 503 with the reason, until a desired state has them loaded again
    by transfer   ──no seat, no group─────> engine untouched; the checkpoint is read at once
                  ──broken off────────────> 503 with the reason, until the checkpoint is loaded and proved

Weights are checked before the engine is touched: `check_weights` requires exactly the tensors of the served model, in
their shapes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from roundhouse.config.models import GenerationConfig
from roundhouse.errors import DataError, InfraError, StoreError
from roundhouse.generation.protocol import (
    Draw,
    Engine,
    EnginePoisoned,
    Generated,
    GenerationAborted,
    WeightsLost,
    WeightsRefused,
)
from roundhouse.health.policy import Kind, kind_of
from roundhouse.pretrained import build_model, is_left_out, load_pretrained, text_part
from roundhouse.retry import Backoff
from roundhouse.weight_sync.base import (
    DirectTransport,
    FetchedWeights,
    WeightChange,
    WeightSource,
    WeightTransferFailed,
    fetch_weights,
    parse_source,
    transport_class,
)
from roundhouse.weight_sync.cache import NodeCache, node_cache
from roundhouse.weight_sync.replica_state import SAMPLED, DesiredPolicy
from roundhouse.weight_sync.tensor_files import TensorFile, weight_files

logger = logging.getLogger(__name__)

RETRIES = Backoff(2.0, longest=60.0)
"""Pauses between retries of a refit with refused weights."""
PROBE_TOKENS = 32
"""Length of the sequence whose log-probabilities every replica reports after a refit."""

_SHAPING_KEYS = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, from the files' headers.

    Raises:
        WeightsRefused: a file is missing, damaged or cut short.
    """
    try:
        return {tensor.name: tensor.shape for path in weight_files(directory) for tensor in TensorFile(path).tensors()}
    except DataError as error:
        raise WeightsRefused(str(error)) from error


def expected_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor in files of a model of this config.json. Tied ones are counted once, and
    tensors that transformers fuses on loading, such as experts, are listed as in the files."""
    from transformers.core_model_loading import revert_weight_conversion

    model = _without_bytes(model_dir)
    # a parameter that two modules share is listed once (tied embeddings)
    own = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=True)}
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, own).items()}


def _without_bytes(model_dir: Path) -> Any:
    import torch
    from transformers import AutoConfig

    config = load_pretrained(AutoConfig, model_dir)
    with torch.device("meta"):
        return build_model(config)


def check_weights(directory: Path, model_dir: Path, expected: dict[str, tuple[int, ...]]) -> None:
    """Refuse weights that are not whole or not of the served model, before the engine is touched.

    Raises:
        WeightsRefused: names the first thing that is wrong.
    """
    path = directory / "config.json"
    if path.is_file():
        try:
            new, known = json.loads(path.read_text()), json.loads((model_dir / "config.json").read_text())
        except ValueError as error:
            raise WeightsRefused(f"{path} is not JSON: {error}.") from error
        composite = "text_config" in known  # its parts may leave out what is the default
        for key in _SHAPING_KEYS:
            if new.get(key) != known.get(key) and not (composite and (key not in new or key not in known)):
                raise WeightsRefused(
                    f"{path} has {key}={new.get(key)}, the served model has {known.get(key)}. A refit replaces weights of the "
                    "same model; deploy another model with its own run."
                )
    shapes = tensor_shapes(directory)
    served = json.loads((model_dir / "config.json").read_text())
    # A checkpoint may repeat a tensor although it is tied to another.
    is_tied = served.get("tie_word_embeddings", served.get("text_config", {}).get("tie_word_embeddings", False))
    tied = {name for name in shapes if is_tied and name.split(".")[-2:] == ["lm_head", "weight"]}
    for name, shape in expected.items():
        if name not in shapes:
            raise WeightsRefused(
                f"{directory} lacks the tensor {name}. The weights are incomplete or of another model."
            )
        if shapes[name] != shape:
            raise WeightsRefused(f"{name} in {directory} has shape {shapes[name]}, the served model wants {shape}.")
    surplus = sorted(shapes.keys() - expected.keys() - tied)
    if surplus:
        model = _without_bytes(model_dir)
        surplus = [name for name in surplus if not is_left_out(model, name)]
    if surplus:
        raise WeightsRefused(f"{directory} has the tensor {surplus[0]}, which the served model has not.")


class PolicyUnavailable(InfraError):
    """This replica must not answer now; the text has the reason."""


class SamplingRefused(DataError):
    """The request would draw from another distribution than the run's; `parameter` is the first field that differs."""

    def __init__(self, text: str, parameter: str = "temperature") -> None:
        super().__init__(text)
        self.parameter = parameter


class Gate:
    """Requests enter while it is open, and wait in front of it while it is closed."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._inside = 0

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        while not self._open.is_set():
            await self._open.wait()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._empty.set()

    async def close(self, until_empty: bool) -> None:
        """Admit no more requests; with `until_empty`, wait until those inside have left."""
        self._open.clear()
        if until_empty:
            await self._empty.wait()

    def open(self) -> None:
        self._open.set()


class ServedPolicy:
    """The engine of a replica together with the version it holds."""

    def __init__(
        self, engine: Engine, model_dir: str, replica_id: str, application: str = "", cache: NodeCache | None = None
    ) -> None:
        self.engine = engine
        self.replica_id = replica_id
        self.application = application
        self.placement_group: str | None = None
        """Ray ID of the placement group, if a trainer has a place near this replica."""
        self._model_dir = Path(model_dir)
        self._expected: dict[str, tuple[int, ...]] | None = None
        self._gate = Gate()
        self._gate.open()
        self._changing = asyncio.Lock()
        self._desired: DesiredPolicy | None = None
        self._held: DesiredPolicy | None = None
        self._cache = cache
        self._weights: FetchedWeights | None = None
        self._probe: list[float] | None = None
        self._error: str | None = "No weights were given yet."
        self._failed_request: int | None = None
        self._failure_may_pass = False
        self._poisoned = False
        self._asleep: str | None = None
        self._generated_tokens, self._counter = 0, uuid.uuid4().hex
        self._refits = 0
        self._refit_seconds = 0.0
        self._retry: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[int]:
        """Hold the weights still for one request; gives the version that answers.

        Raises:
            PolicyUnavailable: the desired weights are not in.
        """
        async with self._gate.entered():
            if self._error is not None or self._held is None:
                raise PolicyUnavailable(self._error or "No weights were given yet.")
            yield self._held.policy_version

    async def answer(self, prompt_token_ids: Sequence[int], draw: Draw) -> Generated:
        """Return the engine's answer with the versions that generated it. A generation that a refit aborted restarts on
        the new weights.

        Raises:
            PolicyUnavailable: the desired weights are not loaded, or are lost.
        """
        while True:
            async with self.answering() as version:
                try:
                    generated = await self.engine.generate(prompt_token_ids, draw)
                except GenerationAborted:
                    continue
                except EnginePoisoned as error:
                    if isinstance(error, WeightsLost):
                        self._error = f"The weights are to be loaded again: {error}"
                    elif self._error is None:
                        raise
                    raise PolicyUnavailable(self._error) from error
                self._generated_tokens += len(generated.token_ids)
                if generated.versions is None:
                    return replace(generated, versions=[(version, len(generated.token_ids))])
                return generated

    def require_sampling(self, draw: Draw) -> None:
        """Hold a request against the sampling that is wanted.

        Raises:
            SamplingRefused: it asks for another.
        """
        allowed = None if self._desired is None else self._desired.sampling
        if allowed is None:
            return
        sampling = {name: getattr(draw, name) for name in SAMPLED}
        if sampling not in allowed:
            nearest = max(
                allowed, key=lambda each: sum(each.get(name) == sampling[name] for name in sampling), default={}
            )
            other = next(name for name in sampling if nearest.get(name) != sampling[name])
            raise SamplingRefused(
                f"The request asks for {sampling}, but the run samples with {allowed}, and its trainer computes ratios for "
                f"that distribution. Send one of these (the defaults are temperature 1, top_p 1, no "
                "top_k), or set the run's generation.sampling to the values of the agent.",
                other,
            )

    @property
    def samples_as_wanted_only(self) -> bool:
        return self._desired is not None and self._desired.sampling is not None

    async def apply(self, desired: DesiredPolicy) -> None:
        """Bring the engine to `desired`. Never raises for weights that cannot be had: `status` and 503 report that."""
        async with self._changing:
            if self._desired is not None and (desired.request or 0) < (self._desired.request or 0):
                return
            # Under the lock a retry is asleep or waits for the lock, so cancelling it cannot break off a refit.
            if self._retry is not None:
                self._retry.cancel()
                self._retry = None
            self._desired = desired
            if desired.asleep is None:
                await self._reach(desired)
                return
            if self._poisoned:
                return
            # Requests inside are waited for; those in front of the gate and later ones are refused until the engine is awake.
            await self._gate.close(until_empty=True)
            try:
                if self._asleep is None:
                    await self.engine.sleep()
                self._asleep, self._error = desired.asleep, f"The engine sleeps: {desired.asleep}"
                self._failed_request = None
            except Exception as error:  # noqa: BLE001 (border of a change: the engine may be half asleep)
                self._poison(desired, error, "Going to sleep")
            finally:
                self._gate.open()

    async def _reach(self, desired: DesiredPolicy, attempt: int = 1) -> None:
        if desired.weights is None or (desired.same_weights(self._held) and self._error is None):
            return
        try:
            await self._refit(desired)
        except (DataError, StoreError, OSError) as error:
            if self._poisoned:
                self._poison(desired, error)
                return
            self._error = f"Version {desired.policy_version} cannot be loaded from {desired.weights}: {error}"
            self._failed_request, self._failure_may_pass = desired.request, kind_of(error) is Kind.INFRA
            logger.error("%s", self._error)

            async def again() -> None:
                await asyncio.sleep(RETRIES.pause(attempt))
                async with self._changing:
                    await self._reach(desired, attempt + 1)

            self._retry = asyncio.create_task(again())
        except Exception as error:  # noqa: BLE001 (border of a refit: whatever broke, the engine may be half changed)
            self._poison(desired, error)

    async def _refit(self, desired: DesiredPolicy) -> None:
        started = time.perf_counter()
        source, note = parse_source(desired.source), None
        transport = None if source is None else transport_class(source.kind)
        if source is not None and transport is not None and issubclass(transport, DirectTransport):
            try:
                transport.check_replica(self.engine, source, self.replica_id)
                start = time.perf_counter()
                change = WeightChange(
                    desired.policy_version, desired.digest, desired.running, desired.keep_prefix_cache
                )
                async with self._changed(desired):
                    digest, tensors = await transport.receive(self.engine, source, self.replica_id, change)
                seconds = {"transfer": time.perf_counter() - start}
                self._hold(FetchedWeights(None, digest, tensors, source.kind, seconds=seconds), desired, started)
                return
            except WeightTransferFailed as error:
                note = f"{source.kind}: {error}"
                logger.warning("version %d is read from its checkpoint, not by %s", desired.policy_version, note)
        # Requests are answered while weights are fetched, proved and checked; only the change itself shuts them out.
        fetched = await asyncio.to_thread(self._fetch, desired, source)
        fetched.note = fetched.note or note
        ready = time.perf_counter()
        try:
            async with self._changed(desired):
                await self.engine.load_weights(
                    str(fetched.directory), desired.policy_version, desired.running, desired.keep_prefix_cache
                )
        except BaseException:
            fetched.release()
            raise
        fetched.seconds["load"] = time.perf_counter() - ready
        self._hold(fetched, desired, started)

    @asynccontextmanager
    async def _changed(self, desired: DesiredPolicy) -> AsyncIterator[None]:
        """Requests are shut out while the block changes the engine's weights to the desired ones, and proved after it."""
        await self._gate.close(until_empty=desired.running == "drain")
        try:
            if self._asleep is not None:
                await self.engine.wake()
                self._asleep = None
            yield
            # Log-probabilities of a sequence that is the same for every replica of the model
            vocabulary = int(text_part(json.loads((self._model_dir / "config.json").read_text()))["vocab_size"])
            length = min(PROBE_TOKENS, self.engine.max_model_len - 1)
            scores = await self.engine.score([(7919 * place + 13) % vocabulary for place in range(length)])
            if not all(map(math.isfinite, scores)):
                raise EnginePoisoned("The probe's log-probabilities are not finite: the weights hold NaN or infinity.")
            self._probe = scores
            self._held, self._error, self._failed_request = desired, None, None
        except WeightTransferFailed as error:
            if error.touched:
                self._error = (
                    f"Version {desired.policy_version} is read from its checkpoint: its transfer failed: {error}"
                )
            raise
        except BaseException:
            self._poisoned = True
            self._error = f"A refit to version {desired.policy_version} broke off."
            raise
        finally:
            self._gate.open()

    def _hold(self, fetched: FetchedWeights, desired: DesiredPolicy, started: float) -> None:
        self._refits += 1
        self._refit_seconds = time.perf_counter() - started
        if self._weights is not None:
            self._weights.release()
        self._weights = fetched
        logger.info("version %d from %s in %.3f s", desired.policy_version, desired.weights, self._refit_seconds)

    def _fetch(self, desired: DesiredPolicy, source: WeightSource | None) -> FetchedWeights:
        assert desired.weights is not None
        if self._cache is None:
            self._cache = node_cache(int(GenerationConfig().weights_cache_gib * 2**30))
        fetched = fetch_weights(desired.weights, source, desired.digest, self._cache, self._weights)
        assert fetched.directory is not None
        try:
            if self._expected is None:
                self._expected = expected_shapes(self._model_dir)
            check_weights(fetched.directory, self._model_dir, self._expected)
        except BaseException:
            fetched.release()
            raise
        return fetched

    def _poison(self, desired: DesiredPolicy, error: Exception, doing: str | None = None) -> None:
        self._poisoned = True
        doing = doing or f"Loading version {desired.policy_version} from {desired.weights}"
        self._error = f"{doing} failed: {type(error).__name__}: {error}"
        self._failed_request, self._failure_may_pass = desired.request, False
        logger.exception("%s", self._error)

    async def close(self) -> None:
        """Shut the engine down; refuse all unanswered requests."""
        async with self._changing:
            if self._retry is not None:
                self._retry.cancel()
            self._error = "The engine was shut down."
            try:
                self.engine.shutdown()
            finally:
                if self._weights is not None:
                    self._weights.release()

    async def check_health(self) -> None:
        """Raises when only a restart helps."""
        if self._poisoned:
            raise EnginePoisoned(self._error or "The engine is poisoned.")
        await self.engine.check_health()

    def status(self) -> dict[str, Any]:
        """Return this replica's state for `/rh/status`."""
        weights = self._held
        return {
            "replica_id": self.replica_id,
            "pid": os.getpid(),
            "devices": list(getattr(self.engine, "devices", ())),
            "application": self.application,
            "ready": self._error is None,
            "policy_version": None if weights is None else weights.policy_version,
            "weights": None if weights is None else weights.weights,
            "digest": None if self._weights is None else self._weights.digest,
            "tensors": None if self._weights is None else self._weights.tensors,
            "probe": self._probe,
            "transport": None if self._weights is None else self._weights.transport,
            "transport_note": None if self._weights is None else self._weights.note,
            "seconds": {} if self._weights is None else self._weights.seconds,
            "desired": None if self._desired is None else asdict(self._desired),
            "asleep": self._asleep,
            "placement_group": self.placement_group,
            "error": self._error,
            # The error may be of the desired state before, while the newest is being applied.
            "failed_request": self._failed_request,
            "failure_may_pass": self._failure_may_pass,
            "poisoned": self._poisoned,
            # Of whole answers: a caller that leaves ends its own before. Another counter begins at 0.
            "generated_tokens": self._generated_tokens,
            "token_counter": self._counter,
            "refits": self._refits,
            "refit_seconds": self._refit_seconds,
        }
