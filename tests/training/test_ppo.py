"""PPO with a critic: advantages, losses and gradients against plain loops; its state over a restart; and that both learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from roundhouse.config.algorithms import AlgorithmConfig
from roundhouse.config.loading import parse_config
from roundhouse.config.models import TrainConfig
from roundhouse.errors import ConfigError, DataError
from roundhouse.training.algorithms import AlgorithmInputs, TokenSignals, build_algorithm
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.critic import CriticStep, with_ends
from roundhouse.training.loss import MetricSums, value_loss
from roundhouse.training.metrics import METRICS
from roundhouse.training.service.verbs import Role
from roundhouse.training.trainer import NonFiniteError, Trainer
from tests.training import reference
from tests.training.test_learning import parity_rollouts
from tests.training.tiny import VOCABULARY, make_model, plain_model, record, records, sequences

BETA = 0.9
OPTIMIZER = {"learning_rate": 1e-3, "betas": (BETA, 0.95), "warmup_steps": 0, "max_grad_norm": 1e9}


def config(algorithm: dict[str, Any] | None = None, **changes: Any) -> TrainConfig:
    plain = {"kind": "ppo", "critic": {"optimizer": OPTIMIZER}, "mismatch_correction": "none"}
    section = plain | (algorithm or {})
    base = {"optimizer": OPTIMIZER, "minibatches": 1, "threads": 1, "device": "cpu"}
    return TrainConfig.model_validate(base | changes | {"algorithm": section})


def rows() -> list[dict[str, Any]]:
    """Uneven sequences of two turns: two truncated ones, and a truncated rollout that was split into two sequences."""
    found = records(groups=3, size=4)
    found += [record("split/0", "g0", 1.0, rollout="split"), record("split/1", "g0", 1.0, rollout="split")]
    for index in (2, 7, -2, -1):
        found[index]["truncated"] = True
    return found


def predicted(batch: TrainingSequences, seed: int = 5) -> AlgorithmInputs:
    """Values and log-probabilities of no model."""
    draw = np.random.default_rng(seed)
    values, old, ref = (draw.normal(size=len(batch.token_ids)).astype(np.float32) for _ in range(3))
    final = np.where(batch.truncated, draw.normal(size=len(batch)), 0).astype(np.float32)
    return AlgorithmInputs(old=old, reference=ref, values=values * batch.loss_mask, final_values=final)


def computed(batch: TrainingSequences, inputs: AlgorithmInputs, **keys: Any) -> TokenSignals:
    section: Any = TypeAdapter(AlgorithmConfig).validate_python({"kind": "ppo", **keys})
    return build_algorithm(section).compute(batch, inputs)


def loops(
    given: list[dict[str, Any]], inputs: AlgorithmInputs, gamma: float, lam: float, kl: float = 0.0
) -> list[dict[int, tuple[float, float]]]:
    """Advantage and return of each generated token, sequence by sequence, from the last token to the first."""
    assert inputs.values is not None
    assert inputs.final_values is not None
    last_of = {row["rollout_id"]: s for s, row in enumerate(given)}
    found, first = [], 0
    for row in given:
        tokens = {}
        following = float(inputs.final_values[last_of[row["rollout_id"]]])
        ahead, reward = 0.0, row["reward"]
        for t in reversed(range(len(row["token_ids"]))):
            if not row["loss_mask"][t]:
                continue
            value = float(inputs.values[first + t])
            if kl:
                assert inputs.old is not None
                assert inputs.reference is not None
                reward -= kl * float(inputs.old[first + t] - inputs.reference[first + t])
            ahead = reward + gamma * following - value + gamma * lam * ahead
            tokens[t] = (ahead, ahead + value)
            following, reward = value, 0.0
        found.append(tokens)
        first += len(row["token_ids"])
    return found


@pytest.mark.parametrize(("gamma", "lam", "kl"), [(1.0, 1.0, 0.0), (0.97, 0.9, 0.0), (0.9, 0.0, 0.0), (1.0, 0.95, 0.2)])
def test_advantages_and_returns_are_those_of_a_plain_loop(gamma: float, lam: float, kl: float) -> None:
    batch = TrainingSequences.from_records(rows())
    inputs = predicted(batch)
    keys = {"kl_coefficient": kl, "kl_placement": "reward"} if kl else {}
    signals = computed(batch, inputs, gamma=gamma, gae_lambda=lam, whiten_advantages=False, **keys)
    assert signals.returns is not None
    for s, tokens in enumerate(loops(rows(), inputs, gamma, lam, kl)):
        first = int(batch.offsets[s])
        for t, (advantage, target) in tokens.items():
            assert signals.columns.advantages[first + t] == pytest.approx(advantage, abs=1e-6, rel=1e-6)
            assert signals.returns[first + t] == pytest.approx(target, abs=1e-6, rel=1e-6)
    assert not signals.columns.advantages[~batch.loss_mask].any()


def test_on_whole_answers_the_advantages_are_those_of_trl() -> None:
    """The loop of PPOTrainer over a rectangle of answers, scores on the last token; gamma 0.99, lambda 0.95."""
    count, length, gamma, lam = 3, 7, 0.99, 0.95
    given = [
        record(f"s{i}", "g", float(i))
        | {"token_ids": [1] * (length + 1), "loss_mask": [0] + [1] * length, "gen_logprobs": [-1.0] * (length + 1)}
        for i in range(count)
    ]
    batch = TrainingSequences.from_records(given)
    inputs = predicted(batch)
    assert inputs.values is not None
    values = torch.from_numpy(inputs.values.reshape(count, length + 1)[:, 1:]).double()
    rewards = torch.zeros(count, length, dtype=torch.float64)
    rewards[:, -1] = torch.arange(count)
    lastgaelam: Any = 0
    reversed_advantages = []
    for t in reversed(range(length)):
        nextvalues = values[:, t + 1] if t < length - 1 else 0.0
        delta = rewards[:, t] + gamma * nextvalues - values[:, t]
        lastgaelam = delta + gamma * lam * lastgaelam
        reversed_advantages.append(lastgaelam)
    expected = torch.stack(reversed_advantages[::-1], dim=1)
    signals = computed(batch, inputs, gamma=gamma, gae_lambda=lam, whiten_advantages=False)
    found = signals.columns.advantages.reshape(count, length + 1)[:, 1:]
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)


def test_whitened_advantages_have_mean_0_and_variance_1_over_what_is_trained() -> None:
    batch = TrainingSequences.from_records(rows())
    signals = computed(batch, predicted(batch), mask_truncated=True)
    trained = signals.columns.advantages[signals.columns.policy_weights != 0]
    assert 0 < len(trained) < batch.loss_mask.sum()
    assert trained.mean() == pytest.approx(0, abs=1e-6)
    assert trained.var() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_value_loss_and_its_gradient_are_those_of_a_plain_loop(clip: float | None) -> None:
    draw = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(40, generator=draw) for _ in range(3))
    old = values + 0.3 * old
    scale = torch.full((40,), 1 / 40)
    ours = values.clone().requires_grad_(True)
    sums = MetricSums()
    loss = value_loss(ours, old, returns, scale, clip, sums)
    loss.backward()
    total, gradient, clipped = 0.0, [], 0
    for v, before, target in zip(values.tolist(), old.tolist(), returns.tolist(), strict=True):
        bounded = v if clip is None else min(max(v, before - clip), before + clip)
        plain, bound = (v - target) ** 2, (bounded - target) ** 2
        total += max(plain, bound) / 2 / 40
        clipped += bound > plain
        gradient.append((v - target) / 40 if plain >= bound else 0.0)
    assert float(loss.detach()) == pytest.approx(total, abs=1e-6)
    assert ours.grad is not None
    np.testing.assert_allclose(ours.grad.numpy(), gradient, atol=1e-6)
    assert sums.values().get("value_clip_fraction", 0.0) == pytest.approx(clipped / 40)
    assert (clipped > 0) == (clip is not None)


def critic_of(trainer: Trainer) -> Any:
    return trainer.engine._scorers[Role.CRITIC].model


def with_random_head(trainer: Trainer) -> Trainer:
    """The critic as if it had learnt: a fresh head is zero and gives the layers below no gradient."""
    draw = torch.Generator().manual_seed(1)
    head = critic_of(trainer).get_output_embeddings()
    for parameter in head.parameters():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    return trainer


def plain_values(model: Any, head: Any, row: dict[str, Any]) -> tuple[dict[int, Any], Any]:
    """Return the value before each generated token of a sequence computed alone, and after its last one."""
    hidden = model.model(input_ids=torch.tensor([row["token_ids"]])).last_hidden_state[0]
    every = hidden @ head.weight[0] + head.bias[0]
    at = [t for t, trained in enumerate(row["loss_mask"]) if trained]
    return {t: every[t - 1] for t in at}, every[at[-1]]


def first_moments(trainer: Trainer, role: Role) -> dict[str, torch.Tensor]:
    """The gradient of a first update, read back from AdamW's first moment."""
    model, state = trainer.engine._scorers[role].model, trainer.engine._optimizer(role).state
    return {name: state[p]["exp_avg"] / (1 - BETA) for name, p in model.named_parameters()}


def relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    difference = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    return (difference / sum(float(value.double().square().sum()) for value in expected.values())) ** 0.5


def test_the_critics_values_are_those_of_its_sequences_alone(model_dir: Path) -> None:
    trainer, batch = with_random_head(Trainer.load(model_dir, config())), TrainingSequences.from_records(rows())
    section = trainer.learner.config.algorithm.critic_section
    assert section is not None
    step = CriticStep.begin(trainer.engine, section, batch)
    model, head = plain_model(model_dir), critic_of(trainer).get_output_embeddings()
    for s, row in enumerate(rows()):
        values, final = plain_values(model, head, row)
        for t, value in values.items():
            assert step.values[int(batch.offsets[s]) + t] == pytest.approx(float(value.detach()), abs=1e-5)
        assert step.final_values[s] == pytest.approx(float(final.detach()) if row.get("truncated") else 0.0, abs=1e-5)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("aggregation", ["token", "rollout"])
def test_the_gradients_of_a_step_are_those_of_a_naive_ppo(model_dir: Path, packing: bool, aggregation: str) -> None:
    keys = {"gamma": 0.98, "gae_lambda": 0.9, "loss_aggregation": aggregation}
    settings = config(
        {"critic": {"optimizer": OPTIMIZER, "value_clip": 0.05}, **keys}, packing=packing, tokens_per_microbatch=40
    )
    trainer = with_random_head(Trainer.load(model_dir, settings))
    policy, critic, given = plain_model(model_dir), plain_model(model_dir), rows()
    head = torch.nn.Linear(32, 1)
    head.load_state_dict(critic_of(trainer).get_output_embeddings().state_dict())
    pairs = [plain_values(critic, head, row) for row in given]
    batch = TrainingSequences.from_records(given)
    values, final = np.zeros(len(batch.token_ids), np.float32), np.zeros(len(batch), np.float32)
    for s, (by_token, end) in enumerate(pairs):
        for t, value in by_token.items():
            values[int(batch.offsets[s]) + t] = value.detach()
        final[s] = float(end.detach()) if given[s].get("truncated") else 0.0
    estimates = loops(given, AlgorithmInputs(values=values, final_values=final), 0.98, 0.9)
    every = np.array([advantage for tokens in estimates for advantage, _ in tokens.values()])
    policy_terms, value_terms = [], []
    for row, tokens, (by_token, _) in zip(given, estimates, pairs, strict=True):
        cur = reference.log_probs(policy, row)[0]
        whitened = [(tokens[t][0] - every.mean()) / every.std() for t in cur]
        curs = list(cur.values())
        policy_terms.append(
            reference.policy_terms(curs, [c.detach() for c in curs], [0.0] * len(curs), whitened, clip_high=0.2)
        )
        value_terms.append([(by_token[t] - tokens[t][1]) ** 2 / 2 for t in cur])
    names = [row["rollout_id"] for row in given]
    policy_loss, critic_loss = (reference.mean(terms, aggregation, names) for terms in (policy_terms, value_terms))
    (policy_loss + critic_loss).backward()
    report = trainer.step(batch, 1)
    assert report.metrics["num_microbatches"] > 1
    expected = {name: p.grad for name, p in policy.named_parameters()}
    assert relative(first_moments(trainer, Role.POLICY), expected) < 1e-5
    expected = {name: p.grad for name, p in critic.named_parameters() if p.grad is not None}
    assert head.weight.grad is not None
    expected |= {"lm_head.weight": head.weight.grad, "lm_head.bias": head.bias.grad}
    assert relative(first_moments(trainer, Role.CRITIC), expected) < 1e-5
    assert report.metrics.keys() <= METRICS.keys()
    targets = np.array([tokens[t][1] for tokens in estimates for t in sorted(tokens)])
    explained = 1 - (targets - values[batch.loss_mask]).var() / targets.var()
    assert report.metrics["explained_variance"] == pytest.approx(explained, abs=1e-4)
    assert report.metrics["value_mean"] == pytest.approx(values[batch.loss_mask].mean(), abs=1e-5)


def test_however_an_update_is_cut_the_critics_gradient_is_the_same(model_dir: Path) -> None:
    found = []
    for packing in (True, False):
        for budget in (100_000, 60, 1):
            trainer = with_random_head(
                Trainer.load(model_dir, config(packing=packing, tokens_per_microbatch=budget, epochs=2))
            )
            report = trainer.step(TrainingSequences.from_records(rows()), 1)
            assert report.metrics["critic_updates"] == 2
            found.append({name: p.detach() for name, p in critic_of(trainer).named_parameters()})
    assert max(relative(each, found[0]) for each in found[1:]) < 2e-5


@pytest.mark.parametrize(
    "change",
    [
        {"value_clip": 0.001},
        {"optimizer": OPTIMIZER | {"betas": (0.5, 0.6)}},
        {"optimizer": OPTIMIZER | {"learning_rate": 2e-4}},
    ],
    ids=["value_clip", "optimizer", "learning_rate"],
)
def test_a_key_of_the_critic_changes_what_it_learns(model_dir: Path, change: dict[str, Any]) -> None:
    found = []
    for critic in ({"optimizer": OPTIMIZER}, {"optimizer": OPTIMIZER} | change):
        trainer = with_random_head(Trainer.load(model_dir, config({"critic": critic}, epochs=3)))
        trainer.step(sequences(), 1)
        found.append({name: p.detach().clone() for name, p in critic_of(trainer).named_parameters()})
    assert relative(*found) > 1e-4


def contents(directory: Path) -> dict[str, bytes]:
    """Without digests.json, which notes times and stays on the machine."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != "digests.json"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    "changes",
    [{}, {"lora": {"rank": 2}}, {"activation_checkpointing": True, "logits_chunk_tokens": 7}],
    ids=["whole", "adapter", "recomputed"],
)
def test_a_trainer_that_is_saved_and_loaded_continues_byte_for_byte(
    model_dir: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    settings = config({"critic": {"optimizer": OPTIMIZER | {"warmup_steps": 9}}}, minibatches=2, **changes)
    through = Trainer.load(model_dir, settings, seed=3)
    through.step(sequences(seed=1), 1)
    through.save(tmp_path / "first")
    through.step(sequences(seed=2), 2)
    through.save(tmp_path / "second")
    again = Trainer.load(tmp_path / "first", settings, trainer_state=tmp_path / "first/trainer", seed=3)
    again.step(sequences(seed=2), 2)
    again.save(tmp_path / "resumed")
    assert contents(tmp_path / "resumed") == contents(tmp_path / "second")
    saved = contents(tmp_path / "second")
    critic = {name for name in saved if name.startswith("trainer/critic/")}
    assert {"trainer/critic/model.safetensors", "trainer/critic/trainer/optimizer.safetensors"} <= critic
    assert all(saved[name] != contents(tmp_path / "first")[name] for name in critic if name.endswith("r.safetensors"))


def test_a_checkpoint_that_has_lost_its_critic_is_refused(model_dir: Path, tmp_path: Path) -> None:
    trainer = Trainer.load(model_dir, config())
    trainer.step(sequences(), 1)
    trainer.save(tmp_path / "saved")
    state = tmp_path / "saved/trainer"
    (state / "critic").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"critic is not there, but the critic has learnt from 1 iterations"):
        Trainer.load(tmp_path / "saved", config(), trainer_state=state)


def test_a_run_that_had_no_critic_begins_one_from_its_policy(model_dir: Path, tmp_path: Path) -> None:
    plain = Trainer.load(model_dir, TrainConfig(minibatches=1, threads=1, device="cpu"))
    plain.step(sequences(), 1)
    plain.save(tmp_path / "saved")
    trainer = Trainer.load(tmp_path / "saved", config(), trainer_state=tmp_path / "saved/trainer")
    critic = dict(critic_of(trainer).named_parameters())
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, critic[name])
    assert not critic["lm_head.weight"].any()


def test_a_critic_begins_from_the_model_that_is_named(model_dir: Path, reference_dir: Path, tmp_path: Path) -> None:
    trainer = Trainer.load(model_dir, config(), critic_dir=reference_dir)
    expected = plain_model(reference_dir).model.embed_tokens.weight
    assert torch.equal(critic_of(trainer).get_input_embeddings().weight, expected)
    other = make_model(tmp_path / "other", vocabulary=VOCABULARY + 8)
    with pytest.raises(ConfigError, match=r"critic in .* has a vocabulary of 72, the policy of 64"):
        Trainer.load(model_dir, config(), critic_dir=other)


def test_in_the_warm_up_the_critic_learns_and_the_policy_stays(model_dir: Path) -> None:
    settings = config({"critic": {"optimizer": OPTIMIZER, "warmup_iterations": 1}})
    trainer = Trainer.load(model_dir, settings)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    first = trainer.step(sequences(seed=1), 1)
    assert first.updates == 0
    assert first.metrics["critic_updates"] == 1
    assert first.metrics["token_mult_prob_error"] > 1, "measured all the same"
    assert all(torch.equal(p, q) for p, q in zip(before, trainer.model.parameters(), strict=True))
    assert critic_of(trainer).get_output_embeddings().weight.any()
    second = trainer.step(sequences(seed=2), 2)
    assert second.updates == 1
    assert not all(torch.equal(p, q) for p, q in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"service": {"kind": "tinker", "base_model": "m"}}, "train.service.kind is tinker, which holds one model"),
        (
            {"service": {"kind": "resident", "processes": 4, "tensor_parallel": 2}},
            "train.service.tensor_parallel is 2: a critic's layers are not split",
        ),
    ],
    ids=["tinker", "tensor"],
)
def test_a_service_that_cannot_train_a_critic_is_refused_at_load(changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValidationError, match=wrong):
        config(**changes)


def test_a_critic_whose_loss_is_not_finite_stops_the_trainer_after_the_policys_update(model_dir: Path) -> None:
    trainer = Trainer.load(model_dir, config())
    critic_of(trainer).get_output_embeddings().bias.data.fill_(1e30)  # finite, and its square is not
    with pytest.raises(
        NonFiniteError, match=r"value_loss is inf.*lower train.algorithm.critic.optimizer.learning_rate"
    ):
        trainer.step(sequences(), 1)
    with pytest.raises(DataError, match="has to be loaded again"):
        trainer.step(sequences(), 1)


def test_samples_of_another_policy_need_a_correction() -> None:
    def algorithm(section: dict[str, Any], **keys: Any) -> Any:
        return parse_config({"run_id": "r", "train": {"algorithm": {"kind": "ppo", **keys}}} | section).train.algorithm

    offline = {"offline": {"datasets": ["d"]}}
    with pytest.raises(ConfigError, match="mismatch_correction is auto"):
        algorithm(offline)
    assert algorithm(offline, mismatch_correction="tis").critic_section is not None
    assert algorithm({"asynchrony": {"mode": "batch-async", "staleness": 1}}).mismatch_correction == "tis"


def test_a_truncated_sequence_asks_for_the_value_behind_its_last_token() -> None:
    batch = TrainingSequences.from_records(rows())
    asked = with_ends(batch)
    assert int(asked.predicted.sum()) == int(batch.loss_mask.sum()) + int(batch.truncated.sum())
    assert asked.predicted[asked.offsets[1:] - 1].all()


@pytest.mark.real
def test_the_critic_comes_to_explain_the_rewards_of_a_parity_task_and_the_policy_to_earn_them(tmp_path: Path) -> None:
    optimizer = {"learning_rate": 3e-3, "warmup_steps": 4}
    settings = TrainConfig.model_validate(
        {
            "algorithm": {"kind": "ppo", "critic": {"optimizer": optimizer}},
            "optimizer": optimizer,
            "minibatches": 4,
            "threads": 1,
            "device": "cpu",
        }
    )
    directory = make_model(tmp_path / "policy")
    trainer, sampler = Trainer.load(directory, settings), plain_model(directory)
    rewards, explained = [], []
    for iteration in range(1, 21):
        sampler.load_state_dict(trainer.model.state_dict())
        report = trainer.step(TrainingSequences.from_records(parity_rollouts(sampler, iteration)), iteration)
        rewards.append(report.metrics["reward"])
        explained.append(report.metrics["explained_variance"])
    assert sum(rewards[:4]) / 4 < 0.65
    assert sum(rewards[-4:]) / 4 > 0.8, rewards
    assert explained[0] == pytest.approx(0, abs=1e-6), "a new critic says 0"
    assert max(explained) > 0.2, explained
