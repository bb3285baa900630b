"""What a new algorithm costs: a configuration section, and a module that registers a class for it."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Literal

import pytest

from roundhouse.config.algorithms import AlgorithmConfig, CustomAlgorithmConfig, GRPOConfig, PolicyGradient, TokenLoss
from roundhouse.config.models import TrainConfig
from roundhouse.errors import ConfigError
from roundhouse.training import algorithms
from roundhouse.training.algorithms import Algorithm
from roundhouse.training.algorithms.built_in import GroupRelative
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.trainer import Trainer
from tests.training.tiny import records

SECTIONS = typing.get_args(typing.get_args(AlgorithmConfig)[0])


class SignOnlyConfig(PolicyGradient):
    """File one of two: the section."""

    kind: Literal["sign_only"] = "sign_only"
    size: float = 1.0


MODULE = '''
import numpy as np

from roundhouse.training.algorithms import register
from roundhouse.training.algorithms.policy_gradient import PolicyGradientAlgorithm
from tests.training.test_algorithm_registry import SignOnlyConfig


@register(SignOnlyConfig)
class SignOnly(PolicyGradientAlgorithm):
    """File two of two: +size above the group's mean, -size below."""

    def advantages(self, sequences, rewards, groups):
        return self.config.size * np.sign(rewards.values - groups.of_sequences(groups.means))
'''


def test_an_algorithm_is_added_by_a_section_and_one_module(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sign_only.py").write_text(MODULE)
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(tmp_path)])
    config = TrainConfig(threads=1, device="cpu").model_copy(update={"algorithm": SignOnlyConfig(size=3.0)})
    trainer = Trainer.load(model_dir, config)
    report = trainer.step(TrainingSequences.from_records(records()), 0)
    assert report.updates
    assert set(report.columns.column("advantage").to_pylist()) <= {3.0, -3.0, 0.0}
    assert report.metrics["advantages/max"] == 3.0


@pytest.mark.parametrize("section", [each for each in SECTIONS if each is not CustomAlgorithmConfig])
def test_every_section_of_the_configuration_has_an_algorithm(section: type[TokenLoss]) -> None:
    algorithm: Algorithm = algorithms.build_algorithm(section.model_construct())
    assert all(hasattr(type(algorithm), name) for name in ("loss", "needs_reference", "needs_log_probs", "compute"))


def test_a_section_that_extends_another_has_its_algorithm() -> None:
    class Narrower(GRPOConfig):
        pass

    assert type(algorithms.build_algorithm(Narrower())) is GroupRelative


def test_a_section_without_an_algorithm_is_refused_by_name() -> None:
    class Nameless(PolicyGradient):
        pass

    with pytest.raises(ConfigError, match="No algorithm is registered for Nameless"):
        algorithms.build_algorithm(Nameless())
