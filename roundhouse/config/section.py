"""The base of every configuration section, and the types of keys that sections share.

Invariant: a section is frozen and closed to unknown keys, so that the digest of a run's configuration stays what it was
when the run began.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
ProperFraction = Annotated[float, Field(ge=0, lt=1)]
Target = Annotated[str, Field(pattern=r"^(?:[\w.]+|.+\.py):[\w.]+$")]
"""A class by name: `module:Class` or `path/to/file.py:Class` (`roundhouse.imports`)."""


LAUNCHERS = {
    "subprocess": "roundhouse.launch.subprocesses:SubprocessLauncher",
    "ray": "roundhouse.launch.ray_actors:RayLauncher",
    "kubernetes": "roundhouse.launch.kubernetes_jobs:KubernetesLauncher",
}
"""What starts programs elsewhere: classes by name (`roundhouse.launch.base.Launcher`); a run may name its own as
`module:Class`."""


def _known_launcher(name: str) -> str:
    if name not in LAUNCHERS and ":" not in name:
        raise ValueError(f"{name!r} is no launcher. Set it to {', '.join(LAUNCHERS)}, or module:Class.")
    return name


LauncherName = Annotated[str, AfterValidator(_known_launcher)]


_MARK = {"operational": True}
T = TypeVar("T")
Operational = Annotated[T, Field(json_schema_extra=dict(_MARK))]
"""A key, or a whole section, that may differ between two starts of one run: it changes how and how long the run is carried out,
not what it is. Example: `threads: Operational[int] = 0`."""


def operational_keys(section: BaseModel, prefix: str = "") -> Iterator[str]:
    """The keys that are marked so, dotted; of a section that is, the section alone."""
    for name, field in type(section).model_fields.items():
        if field.json_schema_extra == _MARK:
            yield prefix + name
        elif isinstance(inner := getattr(section, name), BaseModel):
            yield from operational_keys(inner, f"{prefix}{name}.")


class Section(BaseModel):
    """Base of every configuration section: frozen, and closed to unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The explanations under the fields become descriptions here: pydantic's `use_attribute_docstrings` would parse the
        source of every section in each process that imports them, which takes a third as long as importing them."""
        made = handler(schema)
        properties = handler.resolve_ref_schema(made).get("properties", {})
        for section in cls.__mro__:
            if issubclass(section, Section):
                for name, explanation in _explanations(section).items():
                    if name in properties:
                        properties[name].setdefault("description", explanation)
        return made


@cache
def _explanations(section: type[Section]) -> dict[str, str]:
    """The strings under a section's own fields."""
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(found, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in pairwise(found.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


RECORDED = {"recorded": True}
"""Validation context of a configuration that a store holds: a run that began when a combination was not refused yet stays
readable. To start, continue or fork it is judged like any other."""


def is_recorded(info: ValidationInfo) -> bool:
    """Whether what is validated is a record, and not to be carried out."""
    return bool(info.context and info.context.get("recorded"))
