"""`prefect.yaml` and the work pool's base job template, as `roundhouse deploy` reads them.

Invariant: parsed files can be registered: every job variable is one of the template's and of its type, every schedule
has a name. Both files have Prefect's formats.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from roundhouse.config.section import PositiveInt
from roundhouse.config.yaml_text import read_yaml
from roundhouse.errors import ConfigError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]{0,99}$")]
Settings = dict[str, Any]
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScheduleEntry(_Entry):
    """When a deployment runs by itself."""

    slug: Name
    """Its name: the same name is the same schedule, whatever else changes."""
    cron: str
    timezone: str = "UTC"
    active: bool = True
    parameters: Settings = Field(default_factory=dict)
    """On top of the deployment's."""


class WorkPoolEntry(_Entry):
    """Work pool in which a deployment's flow runs become pods."""

    name: Name
    work_queue_name: str | None = None
    job_variables: Settings = Field(default_factory=dict)


class DeploymentEntry(_Entry):
    """One flow, as people and schedules start it."""

    name: Name
    entrypoint: str
    """Module and function: roundhouse_flows.deployments.train."""
    work_pool: WorkPoolEntry
    description: str | None = None
    parameters: Settings = Field(default_factory=dict)
    schedules: tuple[ScheduleEntry, ...] = ()
    tags: tuple[str, ...] = ()
    concurrency_limit: PositiveInt | None = None

    def flow(self) -> Any:
        """Return the flow.

        Raises:
            ConfigError: the flow does not exist.
        """
        module, _, function = self.entrypoint.rpartition(".")
        try:
            return getattr(importlib.import_module(module), function)
        except (ImportError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"deployments.{self.name}.entrypoint {self.entrypoint!r}: {error}. Name module and function, such as "
                "roundhouse_flows.deployments.train."
            ) from error


class DeploymentsFile(_Entry):
    """The file."""

    deployments: tuple[DeploymentEntry, ...]
    name: str | None = None
    prefect_version: str | None = Field(default=None, alias="prefect-version")
    definitions: Settings = Field(default_factory=dict)
    """Anchors."""

    def pool_names(self) -> list[str]:
        return sorted({entry.work_pool.name for entry in self.deployments})


class JobTemplate(_Entry):
    """A base job template of Prefect."""

    job_configuration: Settings
    variables: Settings

    def in_namespace(self, namespace: str) -> JobTemplate:
        """Return the template with another default of its variable `namespace`.

        Raises:
            ConfigError: it does not define this variable, or the name is not one of a namespace.
        """
        if not _NAMESPACE.fullmatch(namespace):
            raise ConfigError(
                f"--namespace {namespace!r}: a name has 1 to 63 lower-case letters, digits and inner hyphens."
            )
        properties = self.variables["properties"]
        if "namespace" not in properties:
            raise ConfigError("--namespace: the job template has no variable `namespace`. Add it, or omit the option.")
        changed = properties | {"namespace": properties["namespace"] | {"default": namespace}}
        return self.model_copy(update={"variables": self.variables | {"properties": changed}})

    def refuse_unknown(self, variables: Mapping[str, Any], where: str) -> None:
        """Raises:
        ConfigError: a job variable that the template does not have, or a value of another type.
        """
        import jsonschema

        known = self.variables["properties"]
        for name, value in variables.items():
            first, _, rest = name.partition(".")
            if first not in known:
                near = difflib.get_close_matches(first, known, 1)
                raise ConfigError(
                    f"{where}.{name}: the job template lacks this variable. "
                    f"{f'Did you mean {near[0]}?' if near else 'It has: ' + ', '.join(sorted(known)) + '.'}"
                )
            if not rest:
                errors = list(jsonschema.Draft202012Validator(known[first]).iter_errors(value))
                if errors:
                    raise ConfigError(f"{where}.{name} is {value!r}: {errors[0].message}.")


def read_deployments(file: Path, template: JobTemplate) -> DeploymentsFile:
    """Raises:
    ConfigError: the file is missing or wrong; it names file, key and value.
    """
    try:
        deployments = DeploymentsFile.model_validate(_yaml(file))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{file}: {key}: {first['msg']} (it is {str(first['input'])[:100]!r}).") from None
    names = [entry.name for entry in deployments.deployments]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{file}: two deployments are called {twice[0]!r}. Give one another name.")
    for entry in deployments.deployments:
        template.refuse_unknown(entry.work_pool.job_variables, f"{file}: {entry.name}.work_pool.job_variables")
        slugs = [schedule.slug for schedule in entry.schedules]
        if len(set(slugs)) != len(slugs):
            raise ConfigError(f"{file}: {entry.name} has two schedules of one slug: {slugs}.")
    return deployments


def read_template(file: Path) -> JobTemplate:
    """Read a base job template.

    Raises:
        ConfigError: the file is missing, or is not a base job template.
    """
    try:
        return JobTemplate.model_validate(_yaml(file))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{file} is not a base job template: {first['loc'][0]}: {first['msg']}.") from None


def _yaml(file: Path) -> Any:
    if not file.is_file():
        raise ConfigError(f"No file {file}. Run this in the repository, or name the file.")
    tree = read_yaml(file)
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds no mapping.")
    return tree
