"""A policy small enough to compute exactly, behind the verbs of a train service: one row of logits per previous token.

Loss, statistics and gradient are the library's own `token_loss`; only the model differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from roundhouse.config.models import TrainConfig
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.checkpoint import Cursor
from roundhouse.training.loss import LossTokens, MetricSums, token_loss
from roundhouse.training.service.verbs import Applied, Gradient, LossBatch, ModelFacts, Role, TokenBatch, ValueBatch
from roundhouse.training.trainer import Trainer


class BigramService:
    """`verbs.TrainService` over logits [V, V]; plain gradient descent, or AdamW."""

    def __init__(self, logits: torch.Tensor, reference: torch.Tensor | None = None, *, adam: bool = True) -> None:
        self.models = {Role.POLICY: logits.clone().requires_grad_(True)}
        if reference is not None:
            self.models[Role.REFERENCE] = reference
        policy = [self.models[Role.POLICY]]
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(policy) if adam else torch.optim.SGD(policy)
        self.gradients: list[bytes] = []
        """Of each `optim_step`."""

    def facts(self) -> ModelFacts:
        return ModelFacts(vocabulary=len(self.models[Role.POLICY]), positions=None)

    def log_probs(self, batch: TokenBatch, role: Role = Role.POLICY) -> torch.Tensor:
        """[T], 0 where not predicted."""
        tokens = torch.from_numpy(batch.token_ids.astype(np.int64))
        every = torch.log_softmax(self.models[role], -1)
        found = every[torch.roll(tokens, 1), tokens]
        return torch.where(torch.from_numpy(batch.predicted), found, torch.zeros_like(found))

    def forward(self, batch: TokenBatch, role: Role = Role.POLICY) -> np.ndarray:
        return self.log_probs(batch, role).detach().numpy()

    def forward_backward(self, batch: LossBatch) -> Gradient:
        found, sums = self.log_probs(batch.tokens), MetricSums()
        chosen = torch.from_numpy(np.flatnonzero(batch.tokens.predicted))
        columns = {name: getattr(batch.columns, name) for name in ("advantages", "policy_weights", "entropy_weights")}
        columns |= {"kl_weights": batch.columns.reference_kl_weights, "gen": batch.gen_logprobs, "scale": batch.scale}
        columns["cross_entropy_weights"] = batch.columns.cross_entropy_weights
        taken: dict[str, Any] = {name: torch.from_numpy(values)[chosen] for name, values in columns.items()}
        owner = np.repeat(np.arange(len(batch.tokens)), np.diff(batch.tokens.offsets))
        taken["sequence"] = torch.from_numpy(owner)[chosen]
        if batch.tolerance is not None:
            taken["tolerance"] = torch.from_numpy(batch.tolerance)[chosen]
        if batch.ref_logprobs is not None:
            taken["ref"] = torch.from_numpy(batch.ref_logprobs)[chosen]
        cur = found[chosen]
        old = cur.detach() if batch.old_logprobs is None else torch.from_numpy(batch.old_logprobs)[chosen]
        loss, policy_loss = token_loss(LossTokens(cur=cur, old=old, **taken), batch.loss, sums)
        loss.backward()
        return Gradient(
            loss=float(loss.detach()),
            policy_loss=float(policy_loss),
            log_probs=found.detach().numpy(),
            shares=sums.shares(),
            microbatches=1,
            real_tokens=len(batch.tokens.token_ids),
            positions=len(batch.tokens.token_ids),
        )

    def value_backward(self, batch: ValueBatch) -> Gradient:
        raise NotImplementedError("no algorithm with a critic is tried on it")

    def optim_step(self, learning_rate: float, max_grad_norm: float, role: Role = Role.POLICY) -> Applied:
        policy = self.models[Role.POLICY]
        assert policy.grad is not None
        self.gradients.append(policy.grad.numpy().tobytes())
        norm = float(torch.nn.utils.clip_grad_norm_([policy], max_grad_norm))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Applied(grad_norm=norm)

    def load_checkpoint(
        self, directory: Path, *, trainer_state: Path | None = None, role: Role = Role.POLICY
    ) -> Cursor:
        return Cursor()

    def save_checkpoint(self, directory: Path, cursor: Cursor | None) -> None:
        raise NotImplementedError("a test keeps the tensors")

    def close(self) -> None:
        pass


def trainer_over(service: BigramService, config: TrainConfig, *, seed: int = 0) -> Trainer:
    nowhere = Path("nowhere")
    return Trainer.over(service, nowhere, config, reference_dir=nowhere, seed=seed)


def rollouts(logits: torch.Tensor, count: int, tokens: int, *, group_size: int, seed: int) -> TrainingSequences:
    """Sample `count` sequences with this policy, each from a different first token; every reward is 0."""
    generator = torch.Generator().manual_seed(seed)
    every = torch.log_softmax(logits.detach(), -1)
    ids = torch.arange(count)[:, None] % len(logits)
    log_probs = torch.zeros(count, 1)
    for _ in range(tokens):
        drawn = torch.multinomial(every[ids[:, -1]].exp(), 1, generator=generator)
        log_probs = torch.cat([log_probs, every[ids[:, -1:], drawn]], 1)
        ids = torch.cat([ids, drawn], 1)
    return TrainingSequences.from_records(
        [
            {
                "sequence_id": str(i),
                "rollout_id": str(i),
                "group_id": str(i // group_size),
                "token_ids": own,
                "loss_mask": [0] + [1] * tokens,
                "gen_logprobs": values,
                "policy_version": 0,
                "reward": 0.0,
            }
            for i, (own, values) in enumerate(zip(ids.tolist(), log_probs.tolist(), strict=True))
        ]
    )


def exact_kl(policy: torch.Tensor, reference: torch.Tensor) -> float:
    """KL(policy ‖ reference) of the next token, the mean over all tokens before."""
    ours, theirs = torch.log_softmax(policy.detach().double(), -1), torch.log_softmax(reference.double(), -1)
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())
