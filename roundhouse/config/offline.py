"""Offline training: from collected datasets instead of fresh rollouts, and how stale these may be.

Invariant: a run with this section refits and collects nothing. Data that the policy has moved away from is told by numbers, age
and effective sample size, and refused or warned about; it is never trained on in silence.

    offline:
      datasets: [nightly@all]
      epochs: 2
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from roundhouse.config.section import Fraction, Operational, PositiveFloat, PositiveInt, Section

NAMED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,62})(?:@(?P<version>[A-Za-z0-9._-]+))?")
"""How a dataset of the run's own store is named."""


class OfflineConfig(Section):
    """Train from datasets that were collected before (`roundhouse collect`, a schedule), of this or another run."""

    datasets: Annotated[tuple[str, ...], Field(min_length=1)]
    """`nightly` is the newest version of a dataset of this store, `nightly@20261121T020000Z-v000012` one version, `nightly@all`
    every version there is when the run begins; a path or URI of a version's directory is one of any store."""
    epochs: Operational[PositiveInt] = 1
    """Passes over all of it. The run's iterations follow from it; the key `iterations` does not count."""
    groups: PositiveInt | None = None
    """Groups (tasks) an iteration trains on, all from one version of a dataset. Unset: `rollout.prompts_per_iteration`."""
    max_age: Operational[Annotated[int, Field(ge=0)] | None] = 20
    """Policy versions between the one that collected and the one that training starts from, where lineage tells it: both lie on
    one line of runs and forks. null: any."""
    max_age_days: Operational[PositiveFloat | None] = None
    """Days since the dataset was collected. Unset: any."""
    precheck_rollouts: Operational[Annotated[int, Field(ge=0)]] = 128
    """Rollouts of each version whose log-probabilities are computed under the starting policy before training; 0: none, and the
    three bounds below are held from the first iteration on only."""
    min_ess_fraction: Operational[Fraction] = 0.5
    """Kish's effective sample size of the importance weights exp(policy - recorded) of the tokens, as a share of the tokens:
    (sum w)² / (n sum w²). 1 for rollouts of the very policy. Held before training, and in every iteration."""
    min_rollout_ess_fraction: Operational[Fraction] = 0.05
    """The same of whole rollouts, whose weight is the product over their tokens: how much of the data the policy could have
    said. It falls faster the longer rollouts are; lower it to 0 for very long ones."""
    max_clipped_fraction: Operational[Fraction] = 0.3
    """Share of the tokens whose importance weight lies outside of `train.algorithm.mismatch_bounds`."""
    on_stale: Operational[Literal["refuse", "warn"]] = "refuse"
    """What happens beyond a bound. warn: it is logged and recorded, and training goes on."""
    evaluate: Operational[bool] = True
    """Evaluate on held-out tasks as `evaluation` says, which needs an engine. false: no engine, and nothing is promoted."""

    @field_validator("datasets")
    @classmethod
    def _named(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if "/" not in name and NAMED.fullmatch(name) is None:
                raise ValueError(
                    f"{name!r} is no dataset: give a name (nightly), a version (nightly@20261121T020000Z-v000012), all "
                    "versions (nightly@all) or the path of a version's directory."
                )
        if len(set(names)) < len(names):
            raise ValueError(f"a dataset is named twice: {', '.join(names)}. For more passes over it, raise epochs.")
        return names
