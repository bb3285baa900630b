"""The train service in this process: a model, AdamW, and the verbs on them.

Invariant: a verb that raises, or has a loss or gradient norm that is not finite, leaves no gradient and changes no
weight. The weights after a verb depend on the weights, the optimizer's state and the request alone. A saved optimizer
state continues bit for bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roundhouse.config.models import TrainConfig
from roundhouse.cpu import threads_for
from roundhouse.errors import ConfigError, DataError, InfraError, RoundhouseError, StoreError
from roundhouse.images import ImageReader
from roundhouse.pretrained import caps_scores
from roundhouse.store.directories import ModelSource, on_this_machine, store_model
from roundhouse.store.location import Location
from roundhouse.store.stage import ModelFiles
from roundhouse.training.checkpoint import (
    CRITIC_DIRECTORY,
    TRAINER_DIRECTORY,
    Cursor,
    HeldWeights,
    held_weights,
    load_cursor,
    load_model,
    read_side_files,
    save_cursor,
    save_model,
    weights_in,
)
from roundhouse.training.context_parallel import refuse_unfit_heads
from roundhouse.training.expert_adapters import EXPERTS_OF_ONE, expert_adapters
from roundhouse.training.forward import (
    Critic,
    Prediction,
    Scorer,
    check_plain_logits,
    cpu_threads,
    recompute_log_probs,
    vocabulary_size,
)
from roundhouse.training.language_model import frozen_modules
from roundhouse.training.layers import (
    BASE,
    attach,
    checkpoint_activations,
    decoder_layers,
    hold_in_bfloat16,
    replace_norms,
    restore_adapter,
    restore_value_head,
    save_adapter,
    without_adapters,
)
from roundhouse.training.loss import LossTokens, MetricSums, token_loss, value_loss
from roundhouse.training.optimizer import build_optimizer, load_optimizer, save_optimizer, set_learning_rate
from roundhouse.training.packing import Dealer, build_microbatches, cost_model
from roundhouse.training.parallel import Ranks, clip_gradient, reduce_gradients, shard
from roundhouse.training.saved_tensors import files_of, matrix_types
from roundhouse.training.service.verbs import Applied, Gradient, LossBatch, ModelFacts, Role, TokenBatch, ValueBatch
from roundhouse.training.tensor_parallel import refuse_unfit_shape, split_experts, split_matrices, sum_partial_gradients
from roundhouse.weight_sync.base import Dtype
from roundhouse.weight_sync.sending import TransferBegun, WeightOffer, WeightSender, sending_transport
from roundhouse.weight_sync.tensor_files import weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel


logger = logging.getLogger(__name__)

REFUSALS = (DataError, ConfigError, StoreError)
"""Errors caused by the request itself: all ranks raise them alike and stay."""


class TrainEngine:
    """The verbs of `verbs.TrainService` on a model of transformers. It begins with `load_checkpoint`.

    Args:
        temperature: that the sequences were sampled at; log-probabilities are those of this distribution.
        ranks: the processes that hold the model together (`parallel.join`); each calls every verb with the same request.
    """

    def __init__(self, config: TrainConfig, *, temperature: float = 1.0, ranks: Ranks | None = None) -> None:
        if temperature <= 0:
            raise ConfigError(f"The sampling temperature is {temperature}: training needs sequences sampled above 0.")
        self.config, self.temperature = config, temperature
        self.ranks = ranks or Ranks()
        gpu = torch.cuda.is_available()
        if config.device == "cuda" and not gpu:
            raise ConfigError(
                "train.device is cuda, but torch finds no GPU. Set it to auto or cpu, or install torch for CUDA."
            )
        self.device = torch.device("cuda" if config.device != "cpu" and gpu else "cpu")
        if self.device.type == "cuda" and (advice := unfit_for_gpu(config)):
            logger.warning("On a GPU: %s. With train.device cuda these are the defaults.", "; ".join(advice))
        self._scorers: dict[Role, Scorer] = {}
        self._dealer: Dealer | None = None
        self._optimizers: dict[Role, torch.optim.Optimizer] = {}
        self._side_files: dict[str, bytes] = {}
        self._sender: WeightSender | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The policy."""
        return self._scorer(Role.POLICY).model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The policy's."""
        return self._optimizer(Role.POLICY)

    @property
    def threads(self) -> int:
        """CPU threads, by the policy's size unless the configuration names a number."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return threads_for(parameters, self.config.threads, processes=self.ranks.here)

    def facts(self) -> ModelFacts:
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return ModelFacts(vocabulary_size(self.model), positions, reproducible=self.device.type == "cpu")

    def forward(self, batch: TokenBatch, role: Role = Role.POLICY) -> np.ndarray:
        frozen = role is Role.REFERENCE and role not in self._scorers and self.config.reference_is_frozen
        with cpu_threads(self.threads), without_adapters(self.model) if frozen else nullcontext():
            log_probs = recompute_log_probs(
                self._scorer(Role.POLICY if frozen else role),
                batch,
                trained=batch.predicted,
                tokens_per_microbatch=self.config.tokens_per_microbatch,
                dealer=self._dealer,
            )
        return self.ranks.sum(log_probs)

    def forward_backward(self, batch: LossBatch) -> Gradient:
        tensors, sums = _LossTensors(batch, self.device), MetricSums()

        def loss(source: torch.Tensor, prediction: Prediction) -> tuple[torch.Tensor, torch.Tensor]:
            return token_loss(tensors.tokens(source, prediction), batch.loss, sums)

        with_entropy = bool(batch.columns.entropy_weights.any())
        return self._backward(Role.POLICY, batch.tokens, loss, sums, with_entropy=with_entropy)

    def value_backward(self, batch: ValueBatch) -> Gradient:
        sums, no_policy = MetricSums(), torch.zeros((), device=self.device)
        old, returns, scale = (
            torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
            for values in (batch.old_values, batch.returns, batch.scale)
        )

        def loss(source: torch.Tensor, prediction: Prediction) -> tuple[torch.Tensor, torch.Tensor]:
            values = prediction.log_probs
            return value_loss(values, old[source], returns[source], scale[source], batch.clip, sums), no_policy

        return self._backward(Role.CRITIC, batch.tokens, loss, sums)

    def optim_step(self, learning_rate: float, max_grad_norm: float, role: Role = Role.POLICY) -> Applied:
        model, optimizer = self._scorer(role).model, self._optimizer(role)
        if not any(parameter.grad is not None for parameter in model.parameters()):
            raise DataError("optim_step has no gradient to apply: call forward_backward first.")
        with cpu_threads(self.threads), self._without_gradient_on_error(role):
            if self.ranks.mesh is not None and self.ranks.columns > 1:
                sum_partial_gradients(model, self.ranks.mesh)
            norm = clip_gradient(model, max_grad_norm, self.ranks)
            if math.isfinite(norm):
                set_learning_rate(optimizer, learning_rate)
                optimizer.step()
        self._drop_gradient(role)
        return Applied(grad_norm=norm)

    def store_checkpoint(
        self, place: Location, attempt: str, cursor: Cursor | None, *, weights: bool = True
    ) -> ModelFiles:
        return store_model(lambda directory: self.save_checkpoint(directory, cursor, weights=weights), place, attempt)

    def save_checkpoint(self, directory: Path, cursor: Cursor | None, *, weights: bool = True) -> None:
        directory = Path(
            self.ranks.gather(str(directory))[0]
        )  # ranks of a program a step have a scratch directory each
        if weights:
            save_model(self.model, self._side_files, directory, self.ranks)
        if cursor is not None:
            state = directory / TRAINER_DIRECTORY
            if self.ranks.is_beside_leader:  # ranks that write
                state.mkdir(exist_ok=True)
            save_optimizer(self.model, self.optimizer, state, self.ranks)
            save_adapter(self.model, state, self.ranks)
            if Role.CRITIC in self._scorers:
                critic, place = self._scorer(Role.CRITIC).model, state / CRITIC_DIRECTORY
                save_model(critic, {}, place, self.ranks)
                save_optimizer(critic, self._optimizer(Role.CRITIC), place / TRAINER_DIRECTORY, self.ranks)
            if self.ranks.leads:
                save_cursor(cursor, state)
        self.ranks.wait()

    def load_checkpoint(
        self, directory: ModelSource, *, trainer_state: ModelSource | None = None, role: Role = Role.POLICY
    ) -> Cursor:
        with self._on_each_machine(directory, trainer_state) as (model, state):
            return self._load(model, state, role)

    @contextmanager
    def _on_each_machine(self, model: ModelSource, state: ModelSource | None) -> Iterator[tuple[Path, Path | None]]:
        """Directories of this machine: its first rank fetches them, or checks digests, and its neighbours read the same."""
        refused: RoundhouseError | None = None
        with ExitStack() as opened:
            own: tuple[Path, Path | None] | None = None
            with self._raised_by_all():
                if self.ranks.rank == self.ranks.first_here:
                    own = opened.enter_context(on_this_machine(model, state))
            result = self.ranks.gather(own)[self.ranks.first_here]
            assert result is not None, "of a first rank"
            try:
                yield result
            except REFUSALS as error:  # by all ranks, of which one may find next that its files are damaged
                refused = error
            except Exception:  # this rank's own: its peers do not come to the block's end
                with suppress(StoreError):
                    opened.close()
                raise
            with self._raised_by_all():
                opened.close()
        if refused is not None:
            raise refused

    def _load(self, directory: Path, trainer_state: Path | None, role: Role) -> Cursor:
        loaded: list[Scorer] = []

        def prepare(model: PreTrainedModel) -> None:
            if role is Role.POLICY:
                attach(model, self.config.lora, trainer_state, directory)
                if self.ranks.size > 1 and expert_adapters(model):
                    raise ConfigError(EXPERTS_OF_ONE)
                if role in self._scorers:
                    _require_same_architecture(self.model, model, directory)
            elif (ours := vocabulary_size(self.model)) != (theirs := vocabulary_size(model)):
                raise ConfigError(
                    f"The {role} in {directory} has a vocabulary of {theirs}, the policy of {ours}: their tokens differ."
                )
            if not role.learns:
                model.requires_grad_(False)
            if self._holds_frozen_low(role, directory, trainer_state):
                hold_in_bfloat16(model, sharded=self.ranks.size > 1)
            if role.learns and self.config.activation_checkpointing:
                checkpoint_activations(model)
            loaded.append(self._prepared(model, role))

        with self._raised_by_all():
            model = load_model(
                directory,
                packed=self.config.packing,
                device=self.device,
                prepare=prepare,
                ranks=self.ranks,
                values=role is Role.CRITIC,
            )
            cursor, optimizer = self._continued(model, role, directory, trainer_state)
            # before ranks have waited for each other: the directory may go when the leading one is done
            if role is Role.POLICY:
                self._side_files = read_side_files(directory)
        (scorer,) = loaded
        scorer.images = ImageReader.of_files(model.config.to_dict(), self._side_files)
        if scorer.logits_chunk:
            check_plain_logits(scorer)
        self._scorers[role] = scorer
        if optimizer is not None:
            self._optimizers[role] = optimizer
        if role is Role.POLICY and self.ranks.size > 1:
            sharing = self.ranks.sharing
            self._dealer = Dealer(self.ranks.rank // sharing, self.ranks.size // sharing, cost_model(model))
        return cursor

    def _continued(
        self, model: PreTrainedModel, role: Role, directory: Path, trainer_state: Path | None
    ) -> tuple[Cursor, torch.optim.Optimizer | None]:
        """The cursor and the optimizer of a model that was just loaded, and what else the state has of it."""
        if not role.learns:
            return Cursor(), None
        critic, cursor = self.config.algorithm.critic_section, Cursor()
        if role is Role.CRITIC:
            if critic is None:
                raise ConfigError(f"train.algorithm.kind is {self.config.algorithm.kind}, which has no critic.")
            optimizer = build_optimizer(model, critic.optimizer)
            if trainer_state is not None:
                restore_value_head(model, directory)
        else:
            optimizer = build_optimizer(model, self.config.optimizer)
            if trainer_state is not None:
                cursor = load_cursor(trainer_state)
                restore_adapter(model, trainer_state)
        if trainer_state is not None:
            load_optimizer(model, optimizer, trainer_state)
        return cursor, optimizer

    def _holds_frozen_low(self, role: Role, directory: Path, trainer_state: Path | None) -> bool:
        """Return whether frozen matrices are held in bfloat16: always for a model that is never saved, for an adapter's
        base if its files have them so, because saving must keep every bit."""
        if self.config.dtype != "bfloat16" or not role.learns:
            return self.config.dtype == "bfloat16"
        if role is not Role.POLICY or self.config.lora is None:
            return False  # nothing is frozen
        types = matrix_types(weight_files(directory))
        if trainer_state is None:
            return types == {"BF16"}
        return "BF16" in types | matrix_types(files_of(trainer_state, BASE))  # merged matrices are in float32

    @contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """The policy as a model that generates: attention over a key-value cache, and no layer that computes itself again.
        No verb is called before the block has ended."""
        scorer = self._scorer(Role.POLICY)
        model, attention = scorer.model, scorer.model.config._attn_implementation
        recomputing = [module for module in model.modules() if module.training]
        fused = model._supports_sdpa and not caps_scores(model.config)
        model.config._attn_implementation = "sdpa" if fused else "eager"
        for module in recomputing:
            module.training = False
        low = scorer.dtype == torch.bfloat16
        try:
            with cpu_threads(self.threads), torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=low):
                yield model
        finally:
            model.config._attn_implementation = attention
            for module in recomputing:
                module.training = True

    def weights_digest(self) -> tuple[str, int]:
        """`digest_of_tensors` of the weights that `store_checkpoint` would write now, and how many tensors they are."""
        weights = self.held_weights("float32")
        return weights.digest, len(weights.described)

    def begin_transfer(self, offer: WeightOffer, digest: str) -> TransferBegun:
        self.end_transfer()
        weights = self.held_weights(offer.dtype)
        if weights.digest != digest:
            raise DataError(
                f"The trainer holds weights with the digest {weights.digest}, and the checkpoint's is {digest}."
            )
        transport = sending_transport(offer.kind)
        self._sender = transport.sender(weights.described, lambda: self.weights_in(offer.dtype), offer)
        self._sender.begin()
        return TransferBegun(digest=weights.sent_digest, source=self._sender.source())

    def end_transfer(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None and not sender.end(2 * sender.seconds):
            raise InfraError(
                f"A replica did not receive a batch of weights within twice the time limit of {sender.seconds:g} s. "
                "The trainer stops; the next attempt begins from the last checkpoint."
            )

    def held_weights(self, dtype: Dtype) -> HeldWeights:
        """Describe the policy's weights and their conversion to this type; all ranks take part."""
        return held_weights(self.model, self.ranks, getattr(torch, dtype))

    def weights_in(self, dtype: Dtype) -> Generator[tuple[str, torch.Tensor]]:
        """`checkpoint.weights_in` of the policy."""
        return weights_in(self.model, self.ranks, getattr(torch, dtype))

    def close(self) -> None:
        try:
            self.end_transfer()
        finally:
            self._scorers.clear()
            self._optimizers.clear()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # torch would keep the memory for itself, and the engine has its turn

    def _backward(
        self, role: Role, tokens: TokenBatch, loss_of: _Loss, sums: MetricSums, *, with_entropy: bool = False
    ) -> Gradient:
        scorer = self._scorer(role)
        with cpu_threads(self.threads), self._without_gradient_on_error(role):
            gradient = self._accumulate(scorer, tokens, loss_of, sums, with_entropy)
        if not math.isfinite(gradient.loss):
            self._drop_gradient(role)
        return gradient

    def _accumulate(
        self, scorer: Scorer, tokens: TokenBatch, loss_of: _Loss, sums: MetricSums, with_entropy: bool
    ) -> Gradient:
        """Add the gradient up over the tokens' microbatches; `loss_of` adds to `sums`."""
        config = self.config
        log_probs = torch.zeros(len(tokens.token_ids), device=self.device)
        losses = torch.zeros(2, device=self.device)
        microbatches = build_microbatches(
            tokens,
            range(len(tokens)),
            tokens.predicted,
            budget=config.tokens_per_microbatch,
            packed=scorer.packed,
            dealer=self._dealer,
        )
        for number, microbatch in enumerate(microbatches, 1):
            if self.ranks.size > 1:
                last = number == len(microbatches)
                reduce_gradients(scorer, shards=last or config.reduce_gradients == "microbatch", replicas=last)
            prediction = scorer.predict(microbatch.to(self.device), with_entropy=with_entropy)
            if microbatch.real_tokens == 0:
                prediction.log_probs.sum().backward()
                continue
            source = torch.from_numpy(microbatch.source).to(self.device)
            log_probs[source] = prediction.log_probs.detach()
            loss, policy_loss = loss_of(source, prediction)
            loss.backward()
            losses += torch.stack([loss.detach(), policy_loss])
        working = [microbatch for microbatch in microbatches if microbatch.real_tokens]
        positions = sum(microbatch.input_ids.numel() for microbatch in working)
        idle = len(microbatches) - len(working)
        computed = np.array([len(working), sum(microbatch.real_tokens for microbatch in working), positions, idle])
        loss_sum, policy_sum = self.ranks.sum(losses.cpu().numpy()).tolist()
        passes, real_tokens, positions, idle = self.ranks.sum(computed).tolist()
        if self.ranks.size > 1:
            sums.add("idle_microbatches", torch.tensor(float(idle)))
        return Gradient(
            loss=loss_sum,
            policy_loss=policy_sum,
            log_probs=self.ranks.sum(log_probs.cpu().numpy()),
            shares=self.ranks.merge(sums.shares()),
            microbatches=passes,
            real_tokens=real_tokens,
            positions=positions,
        )

    def _scorer(self, role: Role) -> Scorer:
        if role not in self._scorers:
            raise DataError(f"No {role} was loaded: call load_checkpoint first.")
        return self._scorers[role]

    def _optimizer(self, role: Role) -> torch.optim.Optimizer:
        if role not in self._optimizers:
            raise DataError(f"No {role} that learns was loaded: call load_checkpoint first.")
        return self._optimizers[role]

    def _prepared(self, model: PreTrainedModel, role: Role) -> Scorer:
        """The model ready to score, its parameters on the device or spread over the ranks."""
        wrapper, chunk, sharded = Scorer, self.config.logits_chunk_tokens, self.ranks.size > 1
        if role is Role.CRITIC:
            wrapper, chunk = Critic, 0
        if self.ranks.context is not None:
            refuse_unfit_heads(model.config, self.ranks.context.size, self.ranks.columns)
        replace_norms(model)
        if self.ranks.mesh is not None and self.ranks.columns > 1:
            refuse_unfit_shape(model.config, self.ranks.columns)
            split_matrices(model, self.ranks.mesh)
        if self.ranks.experts is not None:
            split_experts(model, self.ranks.experts)
        scorer = wrapper(
            model,
            temperature=self.temperature,
            dtype=self.config.dtype,
            logits_chunk=chunk,
            sharded=sharded,
            context=self.ranks.context,
        )
        if sharded:
            parts = [*decoder_layers(model), *frozen_modules(model).values()]  # no pass gathers the frozen ones
            shard(scorer, parts, self.ranks, self.device.type, self.config.dtype)
        return scorer

    @contextmanager
    def _raised_by_all(self) -> Iterator[None]:
        """Let all ranks raise any fault of the request's files, of which each reads only its part."""
        own_error: RoundhouseError | None = None
        try:
            yield
        except REFUSALS as error:
            own_error = error
        problems = self.ranks.gather(None if own_error is None else (type(own_error), str(own_error)))
        if own_error is not None:
            raise own_error
        for rank, problem in enumerate(problems):
            if problem is not None:
                kind, text = problem
                raise kind(f"Rank {rank} of {self.ranks.size}: {text}")

    def _drop_gradient(self, role: Role) -> None:
        self._optimizer(role).zero_grad(set_to_none=True)

    @contextmanager
    def _without_gradient_on_error(self, role: Role) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._drop_gradient(role)
            raise


_Loss = Callable[[torch.Tensor, Prediction], tuple[torch.Tensor, torch.Tensor]]
"""Function from a microbatch's predicted tokens, as positions in the batch, and their values to the loss and its
policy term (detached)."""


class _LossTensors:
    """A loss batch on the device; microbatches take their tokens from it."""

    def __init__(self, batch: LossBatch, device: torch.device) -> None:
        def moved(values: np.ndarray | None) -> torch.Tensor | None:
            return None if values is None else torch.from_numpy(np.ascontiguousarray(values)).to(device)

        columns = batch.columns
        self.old, self.ref = moved(batch.old_logprobs), moved(batch.ref_logprobs)
        self.columns: dict[str, Any] = {
            "gen": moved(batch.gen_logprobs),
            "scale": moved(batch.scale),
            "advantages": moved(columns.advantages),
            "policy_weights": moved(columns.policy_weights),
            "kl_weights": moved(columns.reference_kl_weights),
            "entropy_weights": moved(columns.entropy_weights),
            "sequence": moved(np.repeat(np.arange(len(batch.tokens)), np.diff(batch.tokens.offsets))),
        }
        if batch.tolerance is not None:
            self.columns["tolerance"] = moved(batch.tolerance)
        if columns.cross_entropy_weights.any():
            self.columns["cross_entropy_weights"] = moved(columns.cross_entropy_weights)

    def tokens(self, source: torch.Tensor, prediction: Prediction) -> LossTokens:
        """The tokens at these positions, with the log-probabilities just computed for them."""
        cur = prediction.log_probs
        return LossTokens(
            cur=cur,
            old=cur.detach() if self.old is None else self.old[source],
            ref=None if self.ref is None else self.ref[source],
            entropy=prediction.entropy,
            **{name: values[source] for name, values in self.columns.items()},
        )


def _require_same_architecture(held: PreTrainedModel, found: PreTrainedModel, directory: Path) -> None:
    ours = {name: tuple(parameter.shape) for name, parameter in held.named_parameters()}
    theirs = {name: tuple(parameter.shape) for name, parameter in found.named_parameters()}
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if differing:
        name = differing[0]
        raise DataError(
            f"The checkpoint in {directory} is of another architecture: {name} is {theirs.get(name, 'absent')}, in the loaded "
            f"model {ours.get(name, 'absent')} ({len(differing)} parameters differ). Start a service for that model."
        )


def unfit_for_gpu(config: TrainConfig) -> list[str]:
    """The settings that fit a CPU's small models and run a GPU out of memory or time: key, value and what to set instead."""
    warnings = []
    if config.dtype == "float32":
        warnings.append("train.dtype is float32, which lacks fused attention and halves the speed; set bfloat16")
    if config.logits_chunk_tokens == 0:
        warnings.append("train.logits_chunk_tokens is 0, so logits of a whole microbatch exist; set 1024")
    if not config.activation_checkpointing:
        warnings.append("train.activation_checkpointing is false, which long sequences need; set true")
    return warnings
