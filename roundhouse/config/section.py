"""The base of every configuration section, and the number types that sections share.

Invariant: a section is frozen and closed to unknown keys, so that the digest of a run's configuration stays what it was
when the run began.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
ProperFraction = Annotated[float, Field(ge=0, lt=1)]
Target = Annotated[str, Field(pattern=r"^(?:[\w.]+|.+\.py):[\w.]+$")]
"""A class by name: `module:Class` or `path/to/file.py:Class` (`roundhouse.symbols`)."""


class Section(BaseModel):
    """Base of every configuration section: frozen, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True)
