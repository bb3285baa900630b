"""The base of every configuration section, and the number types that sections share.

Invariant: a section is frozen and closed to unknown keys, so that the digest of a run's configuration stays what it was
when the run began.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
ProperFraction = Annotated[float, Field(ge=0, lt=1)]
Target = Annotated[str, Field(pattern=r"^(?:[\w.]+|.+\.py):[\w.]+$")]
"""A class by name: `module:Class` or `path/to/file.py:Class` (`roundhouse.import_string`)."""


class Section(BaseModel):
    """Base of every configuration section: frozen, and closed to unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )


RECORDED = {"recorded": True}
"""Validation context of a configuration that a store holds: a run that began when a combination was not refused yet stays
readable. To start, continue or fork it is judged like any other."""


def is_recorded(info: ValidationInfo) -> bool:
    """Whether what is validated is a record, and not to be carried out."""
    return bool(info.context and info.context.get("recorded"))
