"""NexRL's trainers as algorithms of a run: `train.algorithm: {kind: custom, target: path/to/file.py:MyTrainer}`.

Invariant: a trainer only computes the advantages. The run, or in a loop of your own `TrainerLoop`, does padding, batches,
the loss, checkpoints and weights; training reads `advantages` and nothing else of the trainer.

    class MyTrainer(SelfHostedTrainer):
        def _prepare_batch(self, batch):                          Batch of tensors, one row a sequence
            batch.values["advantages"] = …                        [B], or [B, T] of `responses`
            return batch, {"custom/mean": …}

    class MyRemote(RemoteApiTrainer):
        def _prepare_trajectories(self, trajectories, metrics):   one dictionary a sequence
            for trajectory in trajectories:
                trajectory["advantages"] = …                      a number, or one for each generated token
            return trajectories

Columns of a batch: `input_ids`, `attention_mask`, `position_ids` and `loss_mask` ([B, P + T]), `prompts` ([B, P],
padded on the left), `responses` ([B, T], padded on the right), and the fields of the trajectories. A response begins
with a sequence's first generated token.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from roundhouse.config.algorithms import GRPOConfig, PolicyGradient
from roundhouse.errors import ConfigError, DataError
from roundhouse.plugins.nexrl.pool import Batch, Trajectory
from roundhouse.plugins.nexrl.trainer_loop import TrainerLoop
from roundhouse.training.algorithms.policy_gradient import Groups, PolicyGradientAlgorithm, Rewards
from roundhouse.training.batch import TrainingSequences

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
EPSILON = 1e-8


class BaseTrainer(PolicyGradientAlgorithm, TrainerLoop):
    """A source of advantages with NexRL's hooks: a subclass of one of the two below, or for a loop of your own a class
    that defines `train`."""

    def __init__(self, config: PolicyGradient | Mapping[str, Any], **parameters: Any) -> None:
        """
        Args:
            config: the section of a run; in a loop of your own NexRL's configuration, or its section `trainer`.
            parameters: `train.algorithm.parameters`, at `_parameters`.

        Raises:
            ConfigError: as `TrainerLoop`, or `policy_loss` names no function.
        """
        if isinstance(config, PolicyGradient):
            section = config
        else:
            TrainerLoop.__init__(self, config)
            algorithm = self.run_config.train.algorithm
            section = algorithm if isinstance(algorithm, PolicyGradient) else GRPOConfig(policy_loss="reinforce")
        PolicyGradientAlgorithm.__init__(self, section)
        self._config, self._parameters = config, parameters

    def as_algorithm(self) -> BaseTrainer:
        return self

    def advantages(self, sequences: TrainingSequences, rewards: Rewards, groups: Groups) -> np.ndarray:
        trajectories = trajectories_of(sequences, rewards)
        metrics: dict[str, Any] = {}
        by_token = self._advantages(sequences, trajectories, metrics)
        if metrics:
            log.info("%s: %s", type(self).__name__, metrics)
        return by_token

    def _advantages(
        self, sequences: TrainingSequences, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> np.ndarray:
        """Return [T] advantages."""
        raise NotImplementedError


class SelfHostedTrainer(BaseTrainer):
    """A trainer that prepares a batch of padded tensors."""

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        """Write `batch.values["advantages"]`; return the batch and metrics, which are logged."""
        raise NotImplementedError(f"{type(self).__name__} does not define _prepare_batch")

    def _process_trajectories(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with padded tensors; see the module's docstring."""
        import torch

        starts = [int(np.argmax(each["loss_mask"])) for each in trajectories]
        wide = max(starts)
        long = max(len(each["tokens"]) - start for each, start in zip(trajectories, starts, strict=True))
        processed = []
        for each, start in zip(trajectories, starts, strict=True):
            tokens, mask = list(each["tokens"]), list(each["loss_mask"])
            left, right = [0] * (wide - start), [0] * (long - (len(tokens) - start))
            attention = torch.tensor([*left, *([1] * len(tokens)), *right])
            columns = {
                "input_ids": torch.tensor([*left, *tokens, *right]),
                "attention_mask": attention,
                "position_ids": (attention.cumsum(0) - 1).clamp(min=0),
                "loss_mask": torch.tensor([*left, *mask, *right]),
                "prompts": torch.tensor([*left, *tokens[:start]]),
                "responses": torch.tensor([*tokens[start:], *right]),
            }
            processed.append({**each, **columns})
        return processed

    def _advantages(
        self, sequences: TrainingSequences, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> np.ndarray:
        import torch

        batch = Batch.from_trajectories(self._process_trajectories(trajectories))
        for name, column in batch.values.items():
            if all(isinstance(value, torch.Tensor) and value.shape == column[0].shape for value in column):
                batch.values[name] = torch.stack(column)
        batch, own = self._prepare_batch(batch)
        metrics.update(own)
        values = torch.as_tensor(_advantages_of(self, batch.values)).float().numpy()
        prompt = batch.values["prompts"].shape[1]
        rows = []
        for row, trajectory in zip(values, trajectories, strict=True):
            length, start = len(trajectory["tokens"]), int(np.argmax(trajectory["loss_mask"]))
            if row.ndim == 0:
                rows.append(np.full(length, row))
            else:  # of the responses, or of the whole row
                responses = row[prompt:] if len(row) == batch.values["input_ids"].shape[1] else row
                rows.append(np.concatenate([np.zeros(start), responses[: length - start]]))
        return np.concatenate(rows)


class RemoteApiTrainer(BaseTrainer):
    """A trainer that prepares trajectories."""

    _service_holder: Any = None

    def _prepare_trajectories(self, trajectories: list[Trajectory], metrics: dict[str, Any]) -> list[Trajectory]:
        """Write `advantages` of each trajectory, in their order."""
        raise NotImplementedError(f"{type(self).__name__} does not define _prepare_trajectories")

    def set_service_holder(self, service_holder: Any) -> None:
        """Train by `service_holder.train(datums, config=…)` in a loop of your own; a run's service is `train.service`."""
        self._service_holder = service_holder

    def train(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """Take a step here, or with a service holder there; return the metrics, and the holder's reply if it is a mapping."""
        if self._service_holder is None:
            return super().train(trajectories)
        metrics: dict[str, Any] = {}
        datums = self._convert_trajectories_to_datums(self._prepare_trajectories(list(trajectories), metrics))
        reply = self._service_holder.train(datums, config=self._config)
        return {**metrics, **(reply if isinstance(reply, Mapping) else {})}

    def _convert_trajectories_to_datums(self, trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
        """Return for each trajectory the tokens before and after every prediction, with weight, log-probability and
        advantage of the latter."""
        datums = []
        for each in trajectories:
            mask = [float(value) for value in each["loss_mask"][1:]]
            values = np.broadcast_to(np.asarray(_advantages_of(self, each), dtype=float), int(sum(mask)))
            advantages = np.zeros(len(mask))
            advantages[np.asarray(mask, dtype=bool)] = values
            datum = {"input_tokens": list(each["tokens"][:-1]), "target_tokens": list(each["tokens"][1:])}
            logprobs = [float(value) for value in each["logprobs"][1:]]
            datums.append({**datum, "weights": mask, "logprobs": logprobs, "advantages": advantages.tolist()})
        return datums

    def _advantages(
        self, sequences: TrainingSequences, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> np.ndarray:
        prepared = self._prepare_trajectories(trajectories, metrics)
        if [each.get("sequence_id") for each in prepared] != sequences.sequence_ids:
            raise DataError(
                f"{type(self).__name__}._prepare_trajectories left out or moved trajectories. Return all, in order."
            )
        rows = []
        for each in prepared:
            mask = np.asarray(each["loss_mask"], dtype=bool)
            row = np.zeros(len(mask))
            row[mask] = _advantages_of(self, each)
            rows.append(row)
        return np.concatenate(rows)


class SelfHostedGrpoTrainer(SelfHostedTrainer):
    """NexRL's GRPO: (reward - mean) / (std + 1e-8) within the trajectories of one group. A subclass overrides one of the hooks.

    A KL penalty in the reward is the run's (`train.algorithm.kl_placement`), and so are the old log-probabilities.
    """

    _NOT_CALLED = ("_apply_kl_penalty", "_compute_old_log_probs")

    def __init__(self, config: PolicyGradient | Mapping[str, Any], **parameters: Any) -> None:
        """
        Raises:
            ConfigError: as `BaseTrainer`, or the subclass defines a hook that is not called.
        """
        super().__init__(config, **parameters)
        if unused := [name for name in self._NOT_CALLED if hasattr(self, name)]:
            raise ConfigError(
                f"{type(self).__name__} defines {', '.join(unused)}, which is not called here. Leave it out, and set "
                "train.algorithm.kl_placement, kl_coefficient and importance_ratio."
            )

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        self._log_rollout_metrics(batch)
        batch.values["token_level_scores"] = self._reward_fn(batch)
        batch = self._compute_advantage(batch)
        metrics: dict[str, Any] = dict(self._compute_data_metrics(batch))
        columns = (batch.values["token_level_scores"].sum(-1), _per_sequence(batch))
        rows = [{"reward": reward, "advantages": value} for reward, value in zip(*columns, strict=True)]
        log_grpo_metrics(rows, metrics)
        return batch, metrics

    def _reward_fn(self, batch: Batch) -> torch.Tensor:
        """Return [B, T] scores of the responses' tokens: the reward at the last token that the policy generated."""
        import torch

        responses = batch.values["responses"]
        mask = batch.values["loss_mask"][:, -responses.shape[1] :]
        last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
        scores = torch.zeros(responses.shape, dtype=torch.float64)
        scores[torch.arange(len(scores)), last] = torch.tensor(batch.values["reward"], dtype=torch.float64)
        return scores

    def _compute_advantage(self, batch: Batch) -> Batch:
        """Write `advantages` ([B], or [B, T] of the responses) from `token_level_scores`."""
        rewards = batch.values["token_level_scores"].sum(-1).tolist()
        groups = zip(batch.values["group_id"], rewards, strict=True)
        rows = compute_grpo_advantage_for_trajectories([{"group_id": group, "reward": each} for group, each in groups])
        batch.values["advantages"] = [each["advantages"] for each in rows]
        return batch

    def _compute_data_metrics(self, batch: Batch) -> dict[str, Any]:
        """Return metrics of the prepared batch."""
        return {}

    def _log_rollout_metrics(self, batch: Batch) -> None:
        """Log metrics of the batch before it is prepared."""


def _per_sequence(batch: Batch) -> list[float]:
    """Return the mean advantage of each sequence's response."""
    import torch

    values = torch.as_tensor(batch.values["advantages"]).float()
    return [float(row.mean()) for row in values]


class RemoteApiGrpoTrainer(RemoteApiTrainer):
    """The same on trajectories."""

    def _prepare_trajectories(self, trajectories: list[Trajectory], metrics: dict[str, Any]) -> list[Trajectory]:
        prepared = compute_grpo_advantage_for_trajectories(trajectories)
        log_grpo_metrics(prepared, metrics)
        return prepared


class RemoteApiCrossEntropyTrainer(RemoteApiTrainer):
    """Every trajectory counts the same: with `policy_loss: reinforce`, the likelihood of its tokens."""

    def _prepare_trajectories(self, trajectories: list[Trajectory], metrics: dict[str, Any]) -> list[Trajectory]:
        return [{**each, "advantages": 1.0} for each in trajectories]

    def trainable_sequences(self, sequences: TrainingSequences, groups: Groups) -> np.ndarray:
        return np.ones(len(sequences), dtype=bool)


def compute_grpo_advantage_for_trajectories(
    trajectories: Sequence[Trajectory], logger: logging.Logger | None = None, use_run_ids: bool = False
) -> list[Trajectory]:
    """Return the trajectories with `advantages`, from the rewards of those with the same `group_id` (or `run_id`)."""
    field = "run_id" if use_run_ids else "group_id"
    rewards: dict[Any, list[float]] = defaultdict(list)
    for each in trajectories:
        rewards[each[field]].append(float(each["reward"]))
    means = {group: float(np.mean(values)) for group, values in rewards.items()}
    spreads = {group: float(np.std(values, ddof=1)) if len(values) > 1 else 0.0 for group, values in rewards.items()}
    return [
        {**each, "advantages": (float(each["reward"]) - means[each[field]]) / (spreads[each[field]] + EPSILON)}
        for each in trajectories
    ]


def log_grpo_metrics(trajectories: Sequence[Trajectory], metrics: dict[str, Any]) -> None:
    """Add the mean and the deviation of rewards and advantages to the metrics."""
    for name in ("reward", "advantages"):
        values = [float(each[name]) for each in trajectories]
        metrics |= {f"grpo/{name}/mean": float(np.mean(values)), f"grpo/{name}/std": float(np.std(values))}


def trajectories_of(sequences: TrainingSequences, rewards: Rewards) -> list[Trajectory]:
    """Return a run's sequences as NexRL's trajectories, with the shaped rewards."""
    trajectories = []
    for index, sequence_id in enumerate(sequences.sequence_ids):
        tokens = slice(int(sequences.offsets[index]), int(sequences.offsets[index + 1]))
        rollout = sequences.rollout_ids[index]
        trajectories.append(
            {
                "sequence_id": sequence_id,
                "group_id": sequences.group_ids[index],
                "run_id": rollout,
                "reward": float(rewards.values[index]),
                "tokens": sequences.token_ids[tokens].tolist(),
                "loss_mask": sequences.loss_mask[tokens].astype(int).tolist(),
                "logprobs": sequences.gen_logprobs[tokens].tolist(),
                "is_truncated": bool(sequences.truncated[index]),
                "policy_version": int(sequences.policy_versions[index]),
            }
        )
    return trajectories


def _advantages_of(trainer: BaseTrainer, values: Any) -> Any:
    for name in ("advantages", "advantage"):
        if values.get(name) is not None:
            return values[name]
    raise DataError(f"{type(trainer).__name__} wrote no advantages: set `advantages` in its hook.")
