"""The base of every configuration section, and shared types of keys.

Invariant: a section is frozen and closed to unknown keys, so the digest of a run's configuration never changes.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationInfo, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from roundhouse import plugins

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
ProperFraction = Annotated[float, Field(ge=0, lt=1)]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Consent:
    """Mark of a key that a store cannot set without consent (`roundhouse.config.consent`).

    A key without this mark does not decide which code runs, which files are read, or which server receives a secret.
    """

    use: Literal["code", "endpoint", "secret", "data", "parameters"]
    """code: a class, program, image, directory or server that the run uses; its default needs no consent. endpoint: the
    address of a server that receives the secrets and data of its section. secret: the name of a secret of this
    machine. data: a local file whose rows go to the endpoints of its section and of the sections below. parameters:
    a mapping that may name secrets."""
    built_in: frozenset[str] = frozenset()
    """Further values that need no consent."""
    role: plugins.Role | None = None
    """Names of plug-ins of this role need no consent either: a person installed them."""
    code_keys: tuple[str, ...] = ()
    """Keys of `parameters` that name code."""


Code = Annotated[T, Consent("code")]
Endpoint = Annotated[T, Consent("endpoint")]
Url = Annotated[str, Field(pattern=r"^https?://[^/]+"), Consent("endpoint")]
DataFile = Annotated[T, Consent("data")]
SecretFile = Annotated[str, Consent("secret")]
"""Path of a file that holds a secret, such as a mounted one."""
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
TARGET = r"^(?:[\w.]+|.+\.py):[\w.]+$"
Target = Annotated[str, Field(pattern=TARGET), Consent("code")]
"""A class by name: `module:Class` or `path/to/file.py:Class` (`roundhouse.imports`)."""


def _known_launcher(name: str) -> str:
    if ":" not in name and name not in (known := plugins.names("launcher")):
        raise ValueError(f"{name!r} is not a launcher. Set it to {', '.join(known)}, or module:Class.")
    return name


LauncherName = Annotated[str, AfterValidator(_known_launcher), Consent("code", role="launcher")]
"""Starts programs elsewhere: a `roundhouse.launch.base.Launcher` by the name of its plug-in, or `module:Class`."""


_MARK = {"operational": True}
Operational = Annotated[T, Field(json_schema_extra=dict(_MARK))]
"""A key, or a whole section, that may differ between two starts of one run: it changes the execution, not the result.
Example:
`threads: Operational[int] = 0`."""


def operational_keys(section: BaseModel, prefix: str = "") -> Iterator[str]:
    """The keys that are marked so, dotted; of a section that is, the section alone."""
    for name, field in type(section).model_fields.items():
        if field.json_schema_extra == _MARK:
            yield prefix + name
        elif isinstance(inner := getattr(section, name), BaseModel):
            yield from operational_keys(inner, f"{prefix}{name}.")


LONGEST_SECONDS = 1e9
"""Waits of more than 9.2e9 seconds overflow in Python's threads and in the kernel's timers."""


class Section(BaseModel):
    """Base of every configuration section: frozen, and closed to unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    @model_validator(mode="after")
    def _refuse_endless_times(self, info: ValidationInfo) -> Self:
        if not is_recorded(info):
            for name in _times(type(self)):
                value = getattr(self, name)
                if isinstance(value, int | float) and value > LONGEST_SECONDS:
                    raise ValueError(f"{name} is {value:g}: the limit is {LONGEST_SECONDS:g} seconds (31 years).")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The explanations under the fields become descriptions here: pydantic's `use_attribute_docstrings` would parse the
        source of every section in each process that imports them, which takes a third as long as importing them."""
        json_schema = handler(schema)
        properties = handler.resolve_ref_schema(json_schema).get("properties", {})
        for section in cls.__mro__:
            if issubclass(section, Section):
                for name, explanation in _explanations(section).items():
                    if name in properties:
                        properties[name].setdefault("description", explanation)
        return json_schema


@cache
def _times(section: type[Section]) -> tuple[str, ...]:
    """Return the keys of a section that are times in seconds."""
    return tuple(name for name in section.model_fields if name.endswith("seconds"))


@cache
def _explanations(section: type[Section]) -> dict[str, str]:
    """The strings under a section's own fields."""
    (class_node,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(class_node, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in pairwise(class_node.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


RECORDED = {"recorded": True}
"""Validation context of a configuration that a store holds: a run that began when a combination was not refused yet stays
readable. To start, continue or fork it is judged like any other."""


def is_recorded(info: ValidationInfo) -> bool:
    """Return whether the validated data is a record, not to be executed."""
    return bool(info.context and info.context.get("recorded"))
