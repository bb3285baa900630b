"""A configuration section with a key `kind`, which selects its form among the plug-ins of a role.

Invariant: validating a section imports the code of its own kind only; the JSON schema, the reference page and error messages
list all kinds that can be loaded.

    SandboxConfig = Annotated[SandboxSection, Kinds("sandbox")]
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, SchemaValidator, core_schema

from roundhouse import plugins
from roundhouse.config.section import Section
from roundhouse.errors import ConfigError


@dataclass(frozen=True)
class Kinds:
    """Mark of a type: its value is a section of one of the role's kinds."""

    role: plugins.Role
    besides: tuple[str, ...] = ()
    """Kinds that are refused here."""

    def names(self) -> list[str]:
        return [name for name in plugins.names(self.role) if name not in self.besides]

    def sections(self) -> Iterator[type[Section]]:
        """Yield the sections that can be loaded; `roundhouse plugins list` shows the problems of the others."""
        for name in self.names():
            try:
                yield plugins.section(self.role, name)
            except ConfigError:
                continue

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._validated)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        kinds = {kind_of(section): section.__pydantic_core_schema__ for section in self.sections()}
        return handler(core_schema.tagged_union_schema(kinds, discriminator="kind"))

    def _validated(self, value: Any, info: ValidationInfo) -> Section:
        kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
        if kind is None:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": "'kind'"})
        if not isinstance(kind, str) or kind not in self.names():
            expected = ", ".join(map(repr, self.names()))
            raise PydanticKnownError(
                "union_tag_invalid", {"discriminator": "'kind'", "tag": str(kind), "expected_tags": expected}
            )
        try:
            section: type[Section] = plugins.section(self.role, kind)
        except ConfigError as error:
            raise PydanticCustomError("broken_plugin", "{text}", {"text": str(error)}) from error
        return _validator(kind, section).validate_python(value, context=info.context)


def kind_of(section: type[Section]) -> str:
    """Return the kind of this section."""
    kind: str = section.model_fields["kind"].annotation.__args__[0]  # type: ignore[union-attr]
    return kind


@functools.lru_cache(maxsize=256)
def _validator(kind: str, section: type[Section]) -> SchemaValidator:
    """Return the validator of a section that puts the kind into the place of an error, as pydantic does for a union."""
    return SchemaValidator(core_schema.tagged_union_schema({kind: section.__pydantic_core_schema__}, "kind"))
