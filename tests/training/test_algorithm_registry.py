"""A new algorithm is a class with its section, declared as a plug-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundhouse.config.algorithms import CustomAlgorithmConfig, GRPOConfig, TokenLoss
from roundhouse.config.kinds import Kinds, kind_of
from roundhouse.config.models import TrainConfig
from roundhouse.errors import ConfigError
from roundhouse.training import algorithms
from roundhouse.training.algorithms import Algorithm
from roundhouse.training.algorithms.built_in import GroupRelative
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.trainer import Trainer
from tests.plugins.packages import install
from tests.training.tiny import records

SECTIONS = [*Kinds("algorithm").sections()]

MODULE = '''
from typing import Literal

import numpy as np

from roundhouse.config.algorithms import PolicyGradient
from roundhouse.plugins import Plugin
from roundhouse.training.algorithms.policy_gradient import PolicyGradientAlgorithm


class SignOnlyConfig(PolicyGradient):
    """Learn from the sign of the advantage."""

    kind: Literal["sign_only"] = "sign_only"
    size: float = 1.0


class SignOnly(PolicyGradientAlgorithm):
    """+size above the group's mean, -size below."""

    def advantages(self, sequences, rewards, groups):
        return self.config.size * np.sign(rewards.values - groups.of_sequences(groups.means))


SIGN_ONLY = Plugin(SignOnly, SignOnlyConfig)
'''


def test_a_package_adds_an_algorithm_by_one_class_and_its_section(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", "rh-sign", {"algorithm.sign_only": "rh_sign:SIGN_ONLY"}, {"rh_sign": MODULE})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    config = TrainConfig.model_validate(
        {"threads": 1, "device": "cpu", "algorithm": {"kind": "sign_only", "size": 3.0}}
    )
    trainer = Trainer.load(model_dir, config)
    report = trainer.step(TrainingSequences.from_records(records()), 0)
    assert report.updates
    assert set(report.columns.column("advantage").to_pylist()) <= {3.0, -3.0, 0.0}
    assert report.metrics["advantages/max"] == 3.0


@pytest.mark.parametrize("section", [each for each in SECTIONS if each is not CustomAlgorithmConfig])
def test_every_section_of_the_configuration_has_an_algorithm(section: type[TokenLoss]) -> None:
    algorithm: Algorithm = algorithms.build_algorithm(section.model_construct(kind=kind_of(section)))
    assert all(hasattr(type(algorithm), name) for name in ("loss", "needs_reference", "needs_log_probs", "compute"))


def test_a_section_that_extends_another_has_its_algorithm() -> None:
    class Narrower(GRPOConfig):
        pass

    assert type(algorithms.build_algorithm(Narrower())) is GroupRelative


def test_a_plugin_whose_class_is_no_algorithm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = MODULE.replace("SIGN_ONLY = Plugin(SignOnly,", "SIGN_ONLY = Plugin(dict,")
    install(tmp_path / "site", "rh-no-sign", {"algorithm.sign_only": "rh_no_sign:SIGN_ONLY"}, {"rh_no_sign": source})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    config = TrainConfig.model_validate({"algorithm": {"kind": "sign_only"}})
    with pytest.raises(ConfigError, match="dict of its plug-in has no loss, needs_reference"):
        algorithms.build_algorithm(config.algorithm)
