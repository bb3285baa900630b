"""Environment servers that forward to one agent: `environment_servers: legacy_agent`.

Invariant: each agent has an environment server, because NeMo Gym's collector (from 0.7) posts a row to the environment
server of its agent. A relay is not a process: its host and port refer to its agent's, so they are equal wherever the
agent is placed, and a row reaches the agent without another hop.

    weather_environment_server:
      environment_servers:
        legacy_agent:
          agent_server: {type: responses_api_agents, name: weather_agent}
          host: ${weather_agent.responses_api_agents.simple_agent.host}
          port: ${weather_agent.responses_api_agents.simple_agent.port}
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from roundhouse.plugins.nemo_gym.config.instances import RELAY, Instance, InstanceReference, ServerFields

AGENTS: Final = "responses_api_agents"
ENVIRONMENTS: Final = "environment_servers"
SUFFIX = "_environment_server"
_WITHOUT_EFFECT = (
    "host",
    "port",
    "num_workers",
    "max_concurrent_episodes",
    "queue_timeout_seconds",
    "default_episode_timeout_seconds",
    "cleanup_timeout_seconds",
)


def add_relays(tree: dict[str, Any], instances: Iterable[Instance]) -> list[Instance]:
    """Add a relay to `tree` for each agent that no environment server fronts. Return the added ones."""
    instances = list(instances)
    fronted = {agent for one in instances if one.type == ENVIRONMENTS for agent in one.agents()}
    added = []
    for agent in instances:
        if agent.type != AGENTS or agent.name in fronted:
            continue
        name = relay_name(agent, tree)
        reference = {"type": AGENTS, "name": agent.name}
        fields = {"entrypoint": "app.py", "agent_server": reference}
        tree[name] = {ENVIRONMENTS: {RELAY: fields}}
        added.append(Instance(name, ENVIRONMENTS, RELAY, "relay", ServerFields.model_validate(fields)))
    return added


def relay_name(agent: Instance, taken: Iterable[str]) -> str:
    """Return the name that NeMo Gym gives the relay of an agent: `weather_simple_agent` -> `weather_environment_server`."""
    implementation = agent.implementation
    stem = agent.name.removesuffix(f"_{implementation}").removesuffix(implementation).rstrip("_")
    if stem == agent.name:
        stem = agent.name.removesuffix("_agent").rstrip("_")
    name = f"{stem or implementation}{SUFFIX}"
    taken = set(taken)
    if name in taken:
        name = f"{agent.name}{SUFFIX}"
    while name in taken:
        name += SUFFIX
    return name


def place_relays(tree: dict[str, Any], relays: Iterable[Instance], instances: Iterable[Instance]) -> None:
    """Write references to the agent's host and port into each relay."""
    agents = {InstanceReference(one.type, one.name): one for one in instances}
    for relay in relays:
        agent = agents.get(InstanceReference(AGENTS, relay.agents()[0]))
        if agent is None:  # reported as an unresolved reference
            continue
        place = ".".join(agent.path)
        fields = tree[relay.name][relay.type][relay.implementation]
        fields |= {"host": f"${{{place}.host}}", "port": f"${{{place}.port}}"}


def relay_warnings(relays: Sequence[Instance]) -> list[str]:
    """Return one sentence for each relay that sets limits or an address."""
    warnings = []
    for relay in relays:
        named = relay.fields.model_fields_set | set(relay.fields.model_extra or {})
        if keys := [key for key in _WITHOUT_EFFECT if key in named]:
            warnings.append(
                f"{'.'.join(relay.path)}: {', '.join(keys)} has no effect. A legacy_agent forwards to its agent and has the "
                "agent's address. Set these of the agent."
            )
    return warnings
