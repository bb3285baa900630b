"""Keys of a configuration that restrict it, or that nothing here follows: all of them are reported before a server starts.

Pairings: a resources server can name the agents (`allowed_agents`) and model servers (`allowed_model_types`) that it is judged
with. Our servers count as those whose contract they have.

Keys without a counterpart: one sentence names all of them, each with its remedy. Where NeMo Gym's own servers run too, it is a
warning, because they follow these keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from roundhouse.plugins.nemo_gym.config.instances import OWN, Instance, InstanceReference

OVERRIDE, OVERRIDE_VARIABLE = "allow_unsupported_pairing", "NEMO_GYM_ALLOW_UNSUPPORTED_PAIRING"

NO_MODEL = "dummy_model"
"""Stands for a model server that is chosen later."""

NO_COUNTERPART: dict[str, str] = {
    "global_aiohttp_intended_concurrency": "set global_aiohttp_connector_limit",
    "global_aiohttp_intended_concurrency_per_host": "set global_aiohttp_connector_limit_per_host",
    "global_aiohttp_client_request_debug": "set ROUNDHOUSE_LOG_LEVEL=debug",
    "profiling_enabled": "read the metrics of the servers, ROUNDHOUSE_METRICS",
    "profiling_results_dirpath": "read the metrics of the servers, ROUNDHOUSE_METRICS",
    "telemetry": "read the metrics of the servers, ROUNDHOUSE_METRICS",
    "model_call_capture_dir": "record calls with token_id_capture.enabled; a run reads them by environment.tokens captured",
    "server_spinup_timeout_seconds": "set --start-seconds, or environment.start_timeout_seconds of a run",
    "environment_routing_mode": "name an agent in each row (agent_ref), or --agent",
    "environment_server_name": "name an agent in each row (agent_ref), or --agent",
    "environment_server_routes": "name an agent in each row (agent_ref), or --agent",
    "rollout_collection_driver": "write a loop around `roundhouse gym collect`",
    "dispatch_budget_s": "end the collection with SIGTERM and continue with --resume",
    "drain_margin_s": "end the collection with SIGTERM and continue with --resume",
}
"""Top-level keys of NeMo Gym that Roundhouse's servers and collector do not follow, and what to use in place of each."""


def keys_without_counterpart(tree: Mapping[str, Any]) -> str | None:
    """Return one sentence that names all such keys of a configuration, or None."""
    named = [
        f"{key} ({remedy})" for key, remedy in NO_COUNTERPART.items() if tree.get(key) not in (None, False, {}, [])
    ]
    if not named:
        return None
    return (
        f"Roundhouse's servers and collector do not follow {len(named)} key(s) of this configuration. Remove each; instead: "
        f"{'; '.join(named)}."
    )


def pairing_problems(
    tree: Mapping[str, Any], instances: Iterable[Instance], environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return a sentence for each agent or model server that a resources server does not accept."""
    if tree.get(OVERRIDE) or environ.get(OVERRIDE_VARIABLE, "").lower() not in ("", "0", "false"):
        return []
    servers = {InstanceReference(one.type, one.name): one for one in instances}
    problems = []
    for agent in servers.values():
        references = agent.references()
        resources = servers.get(references["resources_server"]) if "resources_server" in references else None
        if agent.type != "responses_api_agents" or resources is None:
            continue
        model = servers.get(references["model_server"]) if "model_server" in references else None
        for key, server in (("allowed_agents", agent), ("allowed_model_types", model)):
            allowed = _names((resources.fields.model_extra or {}).get(key))
            if server is None or not allowed or _implementations(server) & {*allowed, NO_MODEL}:
                continue
            problems.append(
                f"{'.'.join(resources.path)}.{key} is {', '.join(allowed)}; {agent.name} plays it with "
                f"{'.'.join(server.path)}. Name an accepted one, or set {OVERRIDE}: true."
            )
    return problems


def _names(value: Any) -> Sequence[str]:
    if isinstance(value, str):
        return [value]
    return [str(one) for one in value] if isinstance(value, list | tuple) else []


def _implementations(server: Instance) -> set[str]:
    """Return the implementation, and NeMo Gym's implementation of the same contract."""
    if server.implementation != OWN.get(server.type):
        return {server.implementation}
    if server.type == "responses_api_models":
        return {server.implementation, "vllm_model"}
    gymnasium = (server.fields.model_extra or {}).get("protocol") == "gymnasium"
    return {server.implementation, "gymnasium_agent" if gymnasium else "simple_agent"}
