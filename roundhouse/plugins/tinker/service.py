"""The train service's verbs on the Tinker API (thinkingmachines.ai), by its public SDK. Weights and optimizer stay there.

Invariant: only what Tinker computes exactly as the in-process engine would is sent (`translate`); a checkpoint is a pointer
to weights that Tinker keeps, with the cursor next to it:

    config.json, …        no tinker.json                                                            a start
    tinker.json           {"base_model": …, "weights": "tinker://…/weights/iteration-000012"}       a checkpoint
    trainer/state.json    the cursor

A Hugging Face directory is not written, so vLLM cannot serve such a checkpoint from here; Tinker samples from it
(`generation.backend: tinker`). Another provider
that speaks the same REST API is reached by `base_url` and its credentials.

What is sent of a loss batch has exactly the gradient that the in-process engine computes, or it is refused by name. Tinker
sums its losses over tokens and normalises nothing, so the scale, the weight and the
mismatch correction of a token go into its advantage (or weight), which is exact as long as their product is not negative:

    clipped        ppo                   −Σ min(A′·r, A′·clamp(r, 1 − clip_low, 1 + clip_high)),  A′ = scale·policy_weight·A
    cispo          cispo                 −Σ stop(clamp(r, …)) · A′ · cur
    first update   importance_sampling   −Σ A′ · r; r is 1 there, so that no clip acts
    cross-entropy  cross_entropy         −Σ scale · cross_entropy_weight · cur

A datum is a sequence without its last token, and its targets without the first: target i is what input i predicts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tinker
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from tinker import types

from roundhouse.config.models import OptimizerConfig
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.store.directories import ModelSource, on_this_machine, store_model
from roundhouse.store.location import Location
from roundhouse.store.stage import ModelFiles
from roundhouse.training.algorithms import LossSettings
from roundhouse.training.checkpoint import TRAINER_DIRECTORY, Cursor, load_cursor, save_cursor
from roundhouse.training.loss import borne_out, correction_weights
from roundhouse.training.service.verbs import Applied, Gradient, LossBatch, ModelFacts, Role, TokenBatch, ValueBatch

POINTER_FILE = "tinker.json"
GRAD_NORM = "unclipped_grad_l2:mean"
"""Tinker's name of the gradient norm among the metrics of an optimizer step."""


LossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo"]


@dataclass(frozen=True, slots=True)
class PlainDatum:
    """One sequence for Tinker, in plain arrays of n − 1 values."""

    tokens: np.ndarray
    """int32: the input."""
    loss_inputs: dict[str, np.ndarray]
    """target_tokens int64; weights, or logprobs and advantages, float32."""


@dataclass(frozen=True, slots=True)
class TinkerLoss:
    """A loss function of Tinker's, with its inputs."""

    name: LossName
    config: dict[str, float]
    datums: list[PlainDatum]


def scoring(batch: TokenBatch) -> TinkerLoss:
    """What asks for log-probabilities only."""
    return TinkerLoss("cross_entropy", {}, _datums(batch, weights=batch.predicted.astype(np.float32)))


def translate(batch: LossBatch, old_logprobs: np.ndarray) -> TinkerLoss:
    """The batch as one of Tinker's losses; `old_logprobs` [T] are `batch.old_logprobs`, or those just computed in their place.

    Raises:
        ConfigError: Tinker's API cannot compute a part of the loss.
        DataError: a weight is negative.
    """
    columns = batch.columns
    for name, key in (("reference_kl_weights", "kl_coefficient"), ("entropy_weights", "entropy_coefficient")):
        if getattr(columns, name).any():
            raise ConfigError(
                f"The batch has {name}, but the Tinker API lacks this term. Set train.algorithm.{key} to 0, or use another "
                "train.service.kind."
            )
    batch = _corrected(batch, old_logprobs)
    columns = batch.columns
    if columns.cross_entropy_weights.any():
        if columns.policy_weights.any():
            raise ConfigError(
                "The batch has policy weights and cross-entropy weights; the Tinker API computes one loss a call. Train with "
                "train.service.kind resident, ray, process or remote, or with one of the two alone."
            )
        return TinkerLoss(
            "cross_entropy", {}, _datums(batch.tokens, weights=_product(batch, columns.cross_entropy_weights))
        )
    loss, config = _policy_loss(batch.loss, first=batch.old_logprobs is None)
    advantages = _product(batch, columns.policy_weights) * columns.advantages
    return TinkerLoss(loss, config, _datums(batch.tokens, logprobs=old_logprobs, advantages=advantages))


def _corrected(batch: LossBatch, old_logprobs: np.ndarray) -> LossBatch:
    """Return the batch with the mismatch correction in its policy weights, and scale 0 in sequences that the weights do not
    bear out."""
    chosen = np.flatnonzero(batch.tokens.predicted)
    owner = np.repeat(np.arange(len(batch.tokens)), np.diff(batch.tokens.offsets))[chosen]
    old, gen = (torch.from_numpy(values[chosen]) for values in (old_logprobs, batch.gen_logprobs))
    sequence = torch.from_numpy(np.unique(owner, return_inverse=True)[1])
    scale, policy_weights = batch.scale.copy(), batch.columns.policy_weights.copy()
    if batch.tolerance is not None:
        scale[chosen] *= borne_out(old, gen, torch.from_numpy(batch.tolerance[chosen]), sequence).numpy()
    if (weights := correction_weights(old, gen, batch.loss, sequence)) is not None:
        policy_weights[chosen] *= weights.numpy()
    return replace(batch, scale=scale, columns=replace(batch.columns, policy_weights=policy_weights))


def loss_value(loss: TinkerLoss, log_probs: np.ndarray, batch: TokenBatch) -> float:
    """The loss at these log-probabilities ([T]), by the formulas above."""
    total, offset = 0.0, batch.offsets
    for index, datum in enumerate(loss.datums):
        cur = log_probs[offset[index] + 1 : offset[index + 1]].astype(np.float64)
        inputs = {name: values.astype(np.float64) for name, values in datum.loss_inputs.items()}
        if loss.name == "cross_entropy":
            total -= float((inputs["weights"] * cur).sum())
            continue
        ratio, advantages = np.exp(cur - inputs["logprobs"]), inputs["advantages"]
        low, high = loss.config.get("clip_low_threshold", 0.0), loss.config.get("clip_high_threshold", np.inf)
        clamped = np.clip(ratio, low, high)
        if loss.name == "cispo":
            total -= float((clamped * advantages * cur).sum())
        else:
            total -= float(np.minimum(advantages * ratio, advantages * clamped).sum())
    return total


def _policy_loss(settings: LossSettings, *, first: bool) -> tuple[LossName, dict[str, float]]:
    refused = {
        "dual_clip": settings.dual_clip is not None and not first,
        "importance_ratio": settings.importance_ratio != "token",
        "policy_loss": settings.policy_loss not in ("clipped", "cispo"),
    }
    if named := [name for name, unfit in refused.items() if unfit]:
        values = ", ".join(f"{name} {getattr(settings, name)!r}" for name in named)
        raise ConfigError(
            f"The Tinker API has no loss with {values}. It has the clipped loss and cispo with token ratios. For other "
            "losses set train.service.kind to resident, ray, process or remote."
        )
    bounds = {"clip_low_threshold": 1 - settings.clip_low, "clip_high_threshold": 1 + settings.clip_high}
    if settings.policy_loss == "cispo":
        return "cispo", bounds
    return ("importance_sampling", {}) if first else ("ppo", bounds)


def _product(batch: LossBatch, weights: np.ndarray) -> np.ndarray:
    product = batch.scale * weights
    if (product < 0).any():
        raise DataError(
            "A token's weight is negative: it cannot be moved into the advantage without turning the clip around."
        )
    return product


def _datums(batch: TokenBatch, **columns: np.ndarray) -> list[PlainDatum]:
    """The sequences with these [T] columns; values of tokens that are not predicted become 0."""
    datums = []
    for start, stop in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        predicted = batch.predicted[start + 1 : stop]
        inputs = {
            name: np.where(predicted, values[start + 1 : stop], 0).astype(np.float32)
            for name, values in columns.items()
        }
        targets = batch.token_ids[start + 1 : stop].astype(np.int64)
        datums.append(PlainDatum(batch.token_ids[start : stop - 1], {"target_tokens": targets, **inputs}))
    return datums


class TinkerPointer(BaseModel):
    """`tinker.json`: which weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_model: str
    lora_rank: int = 32
    seed: int = 0
    """Of the LoRA matrices' start."""
    weights: str | None = None
    """`tinker://` path; None is the base model with a new adapter."""


class TinkerTrainService:
    """The verbs of `verbs.TrainService` on a LoRA model at Tinker.

    Args:
        optimizer: AdamW's constants; Tinker takes them with every step.
        start: what a directory without a pointer stands for.
        run: a name for checkpoints, unique among the account's runs.
        base_url, api_key: unset, the SDK's own environment variables hold.
        timeout_seconds: time limit of one request, its wait in Tinker's queue included.
    """

    def __init__(
        self,
        optimizer: OptimizerConfig,
        start: TinkerPointer,
        *,
        run: str,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout_seconds: float = 3600,
    ) -> None:
        self.optimizer, self.run, self.timeout_seconds = optimizer, run, timeout_seconds
        self._start = start
        self._facts: ModelFacts | None = None
        with _as_ours("open a session"):
            self._service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
        self._client: tinker.TrainingClient | None = None
        self._pointer: TinkerPointer | None = None
        self._has_gradient = False

    def facts(self) -> ModelFacts:
        if self._facts is None:
            raise DataError("No policy was loaded: call load_checkpoint first.")
        return self._facts

    def forward(self, batch: TokenBatch, role: Role = Role.POLICY) -> np.ndarray:
        _require_policy(role)
        loss = scoring(batch)
        output = self._result("forward", lambda: self._held().forward(_sdk(loss.datums), loss.name))
        return _log_probs(output, batch)

    def forward_backward(self, batch: LossBatch) -> Gradient:
        translate(batch, np.zeros_like(batch.scale))  # refused before anything is computed
        old = self.forward(batch.tokens) if batch.old_logprobs is None else batch.old_logprobs
        loss = translate(batch, old)
        call: Callable[[], Any] = lambda: self._held().forward_backward(  # noqa: E731
            _sdk(loss.datums), loss.name, loss.config or None
        )
        log_probs = _log_probs(self._result("forward_backward", call), batch.tokens)
        self._has_gradient = True
        value, tokens = loss_value(loss, log_probs, batch.tokens), sum(len(datum.tokens) for datum in loss.datums)
        return Gradient(
            loss=value,
            policy_loss=0.0 if loss.name == "cross_entropy" else value,
            log_probs=log_probs,
            shares={},
            microbatches=1,
            real_tokens=tokens,
            positions=tokens,
        )

    def value_backward(self, batch: ValueBatch) -> Gradient:
        raise ConfigError(
            "The Tinker client holds no critic. Set train.algorithm.kind to grpo, or use another train.service.kind."
        )

    def optim_step(self, learning_rate: float, max_grad_norm: float, role: Role = Role.POLICY) -> Applied:
        _require_policy(role)
        if not self._has_gradient:
            raise DataError("optim_step has no gradient to apply: call forward_backward first.")
        config = self.optimizer
        params = types.AdamParams(
            learning_rate=learning_rate,
            beta1=config.betas[0],
            beta2=config.betas[1],
            eps=config.eps,
            weight_decay=config.weight_decay,
            grad_clip_norm=max_grad_norm,
        )
        answer = self._result("optim_step", lambda: self._held().optim_step(params))
        self._has_gradient = False
        return Applied(grad_norm=(answer.metrics or {}).get(GRAD_NORM))

    def store_checkpoint(
        self, place: Location, attempt: str, cursor: Cursor | None, *, weights: bool = True
    ) -> ModelFiles:
        assert weights, "irreproducible state is stored completely"
        return store_model(lambda directory: self.save_checkpoint(directory, cursor), place, attempt)

    def save_checkpoint(self, directory: Path, cursor: Cursor | None) -> None:
        if cursor is None:
            raise ConfigError("Tinker stores weights and optimizer together. Set checkpoint.optimizer_every to 1.")
        assert self._pointer is not None or self._held()
        name = f"{self.run}-iteration-{cursor.iteration or 0:06d}"
        answer = self._result("save_state", lambda: self._held().save_state(name, overwrite=True))
        state = directory / TRAINER_DIRECTORY
        state.mkdir(parents=True, exist_ok=True)
        shape = {"vocab_size": self.facts().vocabulary, "max_position_embeddings": self.facts().positions}
        (directory / "config.json").write_text(json.dumps(shape))
        assert self._pointer is not None
        pointer = self._pointer.model_copy(update={"weights": answer.path})
        (directory / POINTER_FILE).write_text(pointer.model_dump_json(indent=2) + "\n")
        self._pointer = pointer
        save_cursor(cursor, state)

    def load_checkpoint(
        self, directory: ModelSource, *, trainer_state: ModelSource | None = None, role: Role = Role.POLICY
    ) -> Cursor:
        with on_this_machine(directory, trainer_state) as (model, state):
            return self._load(model, state, role)

    def _load(self, directory: Path, trainer_state: Path | None, role: Role) -> Cursor:
        _require_policy(role)
        pointer = read_pointer(directory) if (directory / POINTER_FILE).exists() else self._start
        self._facts = facts_of(directory)
        if self._pointer is not None and pointer.base_model != self._pointer.base_model:
            raise DataError(
                f"The checkpoint in {directory} is of another architecture: its base model is {pointer.base_model}, the loaded "
                f"one {self._pointer.base_model}."
            )
        cursor = Cursor() if trainer_state is None else load_cursor(trainer_state)
        with _as_ours("load weights"):
            self._client = self._created(pointer, with_optimizer=trainer_state is not None)
        self._pointer, self._has_gradient = pointer, False
        return cursor

    def sampler(self) -> tinker.SamplingClient:
        """A client that samples from a snapshot of the weights as they are now."""
        return self._result("sample from the weights", lambda: self._held().save_weights_and_get_sampling_client())

    def pointer_digest(self) -> str:
        """Of the pointer to the weights as they were last loaded or saved."""
        assert self._pointer is not None or self._held()
        return f"sha256:{hashlib.sha256(str(self._pointer).encode()).hexdigest()}"

    def close(self) -> None:
        self._client = None
        with _as_ours("close the session"):
            self._service.close("success").result(self.timeout_seconds)

    def _created(self, pointer: TinkerPointer, *, with_optimizer: bool) -> tinker.TrainingClient:
        service = self._service
        if pointer.weights is None:
            future: Any = service.create_lora_training_client(
                pointer.base_model, rank=pointer.lora_rank, seed=pointer.seed
            )
        elif with_optimizer:
            future = service.create_training_client_from_state_with_optimizer(pointer.weights)
        else:
            future = service.create_training_client_from_state(pointer.weights)
        return future.result(self.timeout_seconds)

    def _held(self) -> tinker.TrainingClient:
        if self._client is None:
            raise DataError("No policy was loaded: call load_checkpoint first.")
        return self._client

    def _result(self, verb: str, call: Callable[[], Any]) -> Any:
        with _as_ours(verb):
            return call().result(self.timeout_seconds)


def facts_of(directory: Path) -> ModelFacts:
    """Of a `config.json`; Tinker does not report them.

    Raises:
        ConfigError: it is missing, or does not say how large the vocabulary is.
    """
    path = directory / "config.json"
    try:
        shape = json.loads(path.read_bytes())
        return ModelFacts(vocabulary=int(shape["vocab_size"]), positions=shape.get("max_position_embeddings"))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read: {error!r}. Give the base model's Hugging Face directory.") from error


def read_pointer(directory: Path) -> TinkerPointer:
    """`tinker.json`.

    Raises:
        ConfigError: it is missing or not valid.
    """
    path = directory / POINTER_FILE
    try:
        return TinkerPointer.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Continue from another version of the run.") from error


def _require_policy(role: Role) -> None:
    if role is not Role.POLICY:
        raise ConfigError(
            f"The Tinker client has no {role}. Set train.algorithm.kl_coefficient to 0, or use another train.service.kind."
        )


def _sdk(datums: list[PlainDatum]) -> list[types.Datum]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(datum.tokens.tolist()),
            loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in datum.loss_inputs.items()},
        )
        for datum in datums
    ]


def _log_probs(output: types.ForwardBackwardOutput, batch: TokenBatch) -> np.ndarray:
    """[T] log-probabilities of the predicted tokens."""
    log_probs = np.zeros(len(batch.token_ids), dtype=np.float32)
    if len(output.loss_fn_outputs) != len(batch):
        raise InfraError(f"Tinker answered {len(output.loss_fn_outputs)} sequences for {len(batch)}.")
    for index, answer in enumerate(output.loss_fn_outputs):
        start, stop = batch.offsets[index] + 1, batch.offsets[index + 1]
        values = answer["logprobs"].to_numpy()
        if values.shape != (stop - start,):
            raise InfraError(f"Tinker answered log-probabilities of shape {values.shape} for {stop - start} targets.")
        log_probs[start:stop] = np.where(batch.predicted[start:stop], values, 0)
    return log_probs


@contextmanager
def _as_ours(verb: str) -> Iterator[None]:
    """The SDK's errors, as the kinds that decide about a retry."""
    try:
        yield
    except (tinker.AuthenticationError, tinker.PermissionDeniedError) as error:
        raise ConfigError(f"Tinker refuses the credentials ({verb}): {error}. Set TINKER_API_KEY.") from error
    except (tinker.BadRequestError, tinker.UnprocessableEntityError, tinker.NotFoundError) as error:
        raise DataError(f"Tinker refuses {verb}: {error}") from error
    except tinker.RequestFailedError as error:
        kind = DataError if error.category == types.RequestErrorCategory.User else InfraError
        raise kind(f"Tinker failed at {verb}: {error}") from error
    except (tinker.TinkerError, FutureTimeoutError, ConnectionError) as error:
        raise InfraError(f"Tinker did not complete {verb}: {error!r}") from error
