"""Configuration section of `environment.kind: skyrl_gym`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from roundhouse.config.environments import EnvironmentSection
from roundhouse.config.section import Code, DataFile, ProperFraction


class SkyRLGymSection(EnvironmentSection):
    """Rows of a SkyRL data set, each played by the skyrl-gym environment that it names."""

    kind: Literal["skyrl_gym"]
    data: DataFile[str]
    """A .jsonl, .csv or .parquet file, or `hf:NAME` of a Hugging Face data set, with a column `prompt`. The other columns are
    the `extras` of the environment."""
    subset: str | None = None
    """Configuration of a Hugging Face data set."""
    split: str = "train"
    """Split of a Hugging Face data set to read."""
    env: Code[str | None] = None
    """Id of an environment of skyrl-gym, or `module:Class` of a `BaseTextEnv`. Unset: each row's `env_class`."""
    env_config: dict[str, Any] = Field(default_factory=dict)
    """The environment's own configuration, such as `db_path` of text2sql."""
    heldout: ProperFraction = 0.2
    """Share of the prompts that are held out from training."""
