from __future__ import annotations

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.config.rollout import Asynchrony
from roundhouse.config.stale_rollouts import refuse_unsound, unsound, with_correction
from roundhouse.errors import ConfigError

STALE = Asynchrony(mode="batch-async", staleness=1)


def config(algorithm: dict | None = None, **settings):
    return parse_config(
        {"run_id": "t", "train": {"algorithm": algorithm or {}, **settings.pop("train", {})}, **settings}
    )


def test_on_policy_nothing_is_refused_and_nothing_changed():
    plain = config()
    assert unsound(Asynchrony(), plain) == []
    assert with_correction(Asynchrony(), plain) is plain


def test_a_run_that_may_be_stale_is_corrected_by_default_and_passes():
    corrected = with_correction(STALE, config())
    assert corrected.train.algorithm.mismatch_correction == "tis"
    refuse_unsound(STALE, corrected)


def test_a_correction_that_was_turned_off_is_refused_and_not_replaced():
    chosen = config({"mismatch_correction": "none"})
    assert with_correction(STALE, chosen) is chosen
    with pytest.raises(ConfigError, match=r"mismatch_correction is none: .*staleness is 1.*Set it to tis"):
        refuse_unsound(STALE, chosen)


@pytest.mark.parametrize(
    ("algorithm", "settings", "key"),
    [
        ({"mismatch_correction": "seq-mask-tis"}, {}, "train.algorithm.mismatch_bounds"),
        (
            {"mismatch_correction": "tis", "importance_ratio": "on_policy"},
            {"train": {"minibatches": 1}},
            "train.algorithm.importance_ratio",
        ),
        ({"mismatch_correction": "tis", "kl_coefficient": 0.1}, {}, "train.algorithm.kl_importance_weighting"),
    ],
)
def test_what_cannot_be_right_is_named_with_key_value_and_remedy(algorithm, settings, key):
    found = unsound(STALE, config(algorithm, **settings))
    assert [item.partition(" ")[0] for item in found] == [key]
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        refuse_unsound(STALE, config(algorithm, **settings))


def test_rounds_are_let_through_and_refused_with_a_window():
    rounds = {"rollout": {"prompts_per_iteration": 4, "dynamic_sampling": {}}}
    for mode in ("batch-async", "fully-async"):
        config(asynchrony={"mode": mode, "staleness": 1}, **rounds)
    with pytest.raises(
        ConfigError,
        match=r"rollout.dynamic_sampling is set: asynchrony.window is 3.*Unset it, or set .*fully-async and window to 1",
    ):
        config(asynchrony={"mode": "windowed", "staleness": 3, "window": 3}, **rounds)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"mismatch_correction": "icepop"},
        {"mismatch_correction": "seq-mask-tis", "mismatch_bounds": [0.8, 1.25]},
        {"mismatch_correction": "tis", "kl_coefficient": 0.1, "kl_importance_weighting": True},
        {"kind": "gspo", "mismatch_correction": "tis"},
        {"kind": "cross_entropy"},
        {"kind": "reinforce_plus_plus", "mismatch_correction": "tis"},
    ],
)
def test_what_can_be_right_is_let_through(algorithm):
    refuse_unsound(STALE, config(algorithm))


def test_a_loaded_configuration_that_may_be_stale_is_corrected_or_refused():
    asynchrony = {"mode": "batch-async", "staleness": 2}
    assert config(asynchrony=asynchrony).train.algorithm.mismatch_correction == "tis"
    assert config(asynchrony={"mode": "batch-async"}).train.algorithm.mismatch_correction == "auto"
    with pytest.raises(ConfigError, match=r"mismatch_correction is none: asynchrony.staleness is 2.*Set it to tis"):
        config({"mismatch_correction": "none"}, asynchrony=asynchrony)
    with pytest.raises(ConfigError, match=r"asynchrony.window is 10 with 4 groups.*Raise it to 4, or set window to 1"):
        config(asynchrony={"mode": "windowed", "staleness": 3, "window": 10}, rollout={"prompts_per_iteration": 4})
