"""The servers that a configuration names, their inference engines, and the datasets of its agents.

Invariant: a top-level entry is a server, or it resembles one and the reasons why it is not are reported, or it is an
ordinary value. An entry that resembles a server is never ignored.

    weather:                                  the instance's name
      resources_servers:                      its type
        example_single_tool_call:             its implementation; for a foreign server a directory <type>/<implementation>
          entrypoint: app.py

Four kinds of server:

    foreign   has `entrypoint`: started in its directory, as NeMo Gym does it
    external  has `url` and no entrypoint: runs elsewhere; it is checked and never started
    own       its implementation is one of `roundhouse_environment`, `roundhouse_agent`, `roundhouse_model`
    relay     `environment_servers: legacy_agent`: forwards `/run` and `/aggregate_metrics` of one agent unchanged, so its
              address is the agent's, and no process is started (see `relays`)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

ServerType = Literal["resources_servers", "responses_api_agents", "responses_api_models", "environment_servers"]
Kind = Literal["foreign", "external", "own", "relay"]

SERVER_TYPES: tuple[ServerType, ...] = (
    "resources_servers",
    "responses_api_agents",
    "responses_api_models",
    "environment_servers",
)
RELAY = "legacy_agent"
"""The environment server that only forwards to an agent. NeMo Gym's collector reaches every agent through one, since 0.7."""
OWN: dict[ServerType, str] = {
    "resources_servers": "roundhouse_environment",
    "responses_api_agents": "roundhouse_agent",
    "responses_api_models": "roundhouse_model",
}
"""Implementations that Roundhouse brings along."""

# fmt: off
RESERVED = frozenset((
    "config_paths", "entrypoint", "default_host", "head_server", "disallowed_ports", "head_server_deps", "python_version",
    "pip_install_verbose", "use_absolute_ip", "uv_pip_set_python", "skip_venv_if_present", "hf_token",
    "ray_head_node_address", "port_range_low", "port_range_high", "dry_run", "model_endpoint_readiness_timeout_seconds",
    "allow_openai_version_skew", "uv_cache_dir", "uv_venv_dir", "results_dir", "cache_dir", "_inherit_from", "_copy",
    "nemo_gym_log_dir", "verbose", "json", "query", "observability_enabled", "model_call_capture_dir", "token_id_capture",
    "component_name", "skip_verification", "skip_verification_reward",
    "server_spinup_timeout_seconds", "uv_lock_timeout_seconds", "telemetry", "allow_unsupported_pairing",
    "environment_server_name", "environment_server_routes", "environment_routing_mode",
))
# fmt: on
"""Top-level keys that are never servers."""

Domain = Literal[
    "math", "coding", "agent", "knowledge", "instruction_following", "long_context", "safety", "games", "translation",
    "e2e", "rlhf", "other",
]  # fmt: skip


class ServerFields(BaseModel):
    """Fields that all servers share; a server's further fields are kept as extras."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    entrypoint: str | None = None
    """Python file of a foreign server, relative to its directory."""
    url: str | None = Field(default=None, pattern=r"^https?://[^/\s]+")
    """Base URL of an external server."""
    host: str | None = None
    port: int | None = Field(default=None, ge=0, le=65535)
    """0 and unset: any free one."""
    num_workers: int | None = Field(default=None, ge=1)
    domain: Domain | None = None
    """Required of foreign resources servers."""
    datasets: list[DatasetEntry] | None = None


@dataclass(frozen=True, slots=True)
class InstanceReference:
    """{type, name}: one server's mention of another."""

    type: str
    name: str


@dataclass(frozen=True, slots=True)
class Instance:
    """One server of a configuration."""

    name: str
    type: ServerType
    implementation: str
    kind: Kind
    fields: ServerFields

    @property
    def path(self) -> tuple[str, str, str]:
        """Path of its fields in the configuration."""
        return self.name, self.type, self.implementation

    def references(self) -> dict[str, InstanceReference]:
        """Servers named by its first-level fields, by field."""
        values = dict(self.fields.model_extra or {})
        agent = values.get("agent_server")
        if self.type == "environment_servers" and isinstance(agent, Mapping):  # its type may be left out
            values["agent_server"] = {"type": "responses_api_agents", **agent}
        references = {field: as_reference(value) for field, value in values.items()}
        return {field: reference for field, reference in references.items() if reference is not None}

    def agents(self) -> list[str]:
        """Return the names of the agents that an environment server plays."""
        return [one.name for one in self.references().values() if one.type == "responses_api_agents"]


@dataclass(frozen=True, slots=True)
class AlmostServer:
    """An entry with the shape of a server that is not a valid server."""

    name: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} looks like a server but is not valid: {'; '.join(self.reasons)}."


def find_instances(tree: Mapping[str, Any]) -> tuple[list[Instance], list[AlmostServer]]:
    """Return the servers of a tree; fill its interpolations as far as possible."""
    instances: list[Instance] = []
    almost: list[AlmostServer] = []
    for name, entry in tree.items():
        if name in RESERVED or not isinstance(entry, Mapping):
            continue
        server = _instance(str(name), entry)
        if isinstance(server, Instance):
            instances.append(server)
        elif server is not None:
            almost.append(server)
    return instances, almost


def unresolved_references(instances: Iterable[Instance]) -> list[str]:
    """One sentence for each reference to a server that is not there, with the nearest names."""
    instances = list(instances)
    servers = {InstanceReference(one.type, one.name) for one in instances}
    problems = []
    for instance in instances:
        for field, reference in instance.references().items():
            if reference in servers or reference.name == "???":  # an unset name is reported as such
                continue
            names = sorted(one.name for one in servers if one.type == reference.type)
            near = difflib.get_close_matches(reference.name, names, n=3)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"Configured: {', '.join(names) or 'none'}."
            problems.append(
                f"{'.'.join(instance.path)}.{field} refers to {reference.type}/{reference.name}, which is not configured. "
                f"{hint}"
            )
    return problems


def as_reference(value: Any) -> InstanceReference | None:
    """Return {type: one of `SERVER_TYPES`, name: text} as a reference; None for anything else."""
    if (
        not isinstance(value, Mapping)
        or value.get("type") not in SERVER_TYPES
        or not isinstance(value.get("name"), str)
    ):
        return None
    return InstanceReference(value["type"], value["name"])


def _instance(name: str, entry: Mapping[str, Any]) -> Instance | AlmostServer | None:
    types = [one for one in SERVER_TYPES if one in entry]
    blocks = {one: entry[one] for one in types if isinstance(entry[one], Mapping)}
    runs_or_is_reached = (
        implementation == OWN.get(kind) or (isinstance(values, Mapping) and ("entrypoint" in values or "url" in values))
        for kind, block in blocks.items()
        for implementation, values in block.items()
    )
    if not any(runs_or_is_reached):
        return None
    if len(types) > 1:
        return AlmostServer(name, (f"it has {' and '.join(types)}; one server has one type",))
    server_type = types[0]
    block = blocks[server_type]
    if len(block) != 1:
        return AlmostServer(
            name, (f"{server_type} holds {', '.join(map(str, block))}; it must hold one implementation",)
        )
    implementation, values = next(iter(block.items()))
    if not isinstance(values, Mapping):
        return AlmostServer(name, (f"{server_type}.{implementation} is {values!r}; it must be a mapping",))
    return _validated(name, server_type, str(implementation), values)


def _validated(
    name: str, server_type: ServerType, implementation: str, values: Mapping[str, Any]
) -> Instance | AlmostServer:
    place = f"{server_type}.{implementation}"
    try:
        fields = ServerFields.model_validate(dict(values))
    except ValidationError as error:
        reasons = [
            f"{place}.{'.'.join(str(part) for part in item['loc'])}: {item['msg']} (it is {item['input']!r:.80})"
            for item in error.errors()
        ]
        return AlmostServer(name, tuple(reasons))
    if server_type == "environment_servers" and implementation == RELAY and fields.url is None:
        relay = Instance(name, server_type, implementation, "relay", fields)
        if len(relay.agents()) == 1:
            return relay
        return AlmostServer(
            name, (f"{place}.agent_server must name one agent: {{type: responses_api_agents, name: …}}",)
        )
    if implementation == OWN.get(server_type) and fields.entrypoint is None:
        kind: Kind = "own" if fields.url is None else "external"
        return Instance(name, server_type, implementation, kind, fields)
    if fields.entrypoint is None:
        return Instance(name, server_type, implementation, "external", fields)
    if server_type == "resources_servers" and fields.domain is None:
        return AlmostServer(name, (f"{place}.domain is required of resources servers",))
    if fields.entrypoint.startswith("/"):
        return AlmostServer(
            name, (f"{place}.entrypoint is {fields.entrypoint!r}; it must be relative to its directory",)
        )
    return Instance(name, server_type, implementation, "foreign", fields)


def model_endpoints(instances: Iterable[Instance]) -> dict[str, str]:
    """Return the inference engines of the model servers: `<instance>.<field>` by the address to probe, where any HTTP
    answer counts.

    Each engine is listed once, with the field that names it, because a judge may use it and not the policy. A model
    server answers as soon as it has started, with or without an engine, so the engines are probed as well.
    """
    endpoints: dict[str, str] = {}
    for instance in instances:
        if instance.type != "responses_api_models" or instance.kind == "external":
            continue
        for field, value in (instance.fields.model_extra or {}).items():
            if not field.endswith("base_url"):
                continue
            for url in value if isinstance(value, list) else [value]:
                if isinstance(url, str) and url.startswith(("http://", "https://")):
                    trimmed = url.rstrip("/")
                    address = f"{trimmed}/models" if trimmed.endswith("/v1") else trimmed
                    endpoints.setdefault(address, f"{instance.name}.{field}")
    return endpoints


License = Literal[
    "Apache 2.0",
    "MIT",
    "Creative Commons Attribution 4.0 International",
    "Creative Commons Attribution-ShareAlike 4.0 International",
    "CC BY-SA 4.0",
    "CC BY-NC 3.0",
    "NVIDIA Internal Use Only, Do Not Distribute",
    "NVIDIA Evaluation Dataset License Agreement",
    "TBD",
    "GNU General Public License v3.0",
]
"""The licences that NeMo Gym accepts."""

_Repeats = Annotated[int, Field(ge=1)]


class _DatasetEntry(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)


class GitlabArtifact(_DatasetEntry):
    """A file of GitLab's model registry."""

    dataset_name: str
    version: str
    artifact_fpath: str


class GitlabSource(GitlabArtifact):
    """The same, as a `source`."""

    type: Literal["gitlab"]


class HuggingFaceArtifact(_DatasetEntry):
    """A dataset of the Hugging Face hub, or one file of it."""

    repo_id: str
    artifact_fpath: str | None = None


class HuggingFaceSource(HuggingFaceArtifact):
    """The same, as a `source`."""

    type: Literal["huggingface"]


class Dataset(_DatasetEntry):
    """Entry of an agent's `datasets`: rows to train, validate or try on.

    A valid entry names a file and a type, and a licence if it is used for training or validation. Unknown fields are
    kept, because other tools use them.
    """

    name: str
    type: Literal["train", "validation", "example"]
    jsonl_fpath: str
    """JSON lines file of task rows, relative to a search root."""
    num_repeats: _Repeats = 1
    source: Annotated[GitlabSource | HuggingFaceSource, Field(discriminator="type")] | None = None
    """Source of a missing file."""
    gitlab_identifier: GitlabArtifact | None = None
    """The older form of a gitlab source."""
    huggingface_identifier: HuggingFaceArtifact | None = None
    """The older form of a huggingface source."""
    license: License | None = None

    @model_validator(mode="after")
    def _complete(self) -> Dataset:
        if self.type != "example" and self.license is None:
            raise ValueError(f"the {self.type} dataset {self.name!r} needs a license")
        if self.source is not None and (self.gitlab_identifier or self.huggingface_identifier):
            raise ValueError(f"the dataset {self.name!r} names its source twice: keep `source`, drop the *_identifier")
        return self


class BenchmarkDataset(_DatasetEntry):
    """Rows that a script prepares."""

    name: str
    type: Literal["benchmark"]
    jsonl_fpath: str
    prepare_script: str
    prompt_config: str | None = None
    num_repeats: _Repeats = 1


DatasetEntry = Annotated[Dataset | BenchmarkDataset, Field(discriminator="type")]
