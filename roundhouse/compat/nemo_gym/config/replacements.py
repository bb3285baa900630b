"""NeMo Gym's own servers replaced by ours of the same contract (`roundhouse gym start --ours`).

Invariant: a replaced server keeps its instance name, its place and its fields, so that references to it and clients of it see
no difference; what ours does not know is refused by its configuration, not dropped.

    responses_api_agents: simple_agent, gymnasium_agent   ->  roundhouse_agent
    responses_api_models: vllm_model                      ->  roundhouse_model
"""

from __future__ import annotations

from typing import Any

from roundhouse.compat.nemo_gym.config.instances import OWN

_REPLACED: dict[str, tuple[str, dict[str, Any]]] = {
    "simple_agent": ("responses_api_agents", {}),
    "gymnasium_agent": ("responses_api_agents", {"protocol": "gymnasium", "max_steps": 10}),
    "vllm_model": ("responses_api_models", {}),
}
"""From an implementation to its type and to what it does that ours has to be told."""


def use_own_servers(tree: dict[str, Any]) -> list[str]:
    """Replace in place; the names of the instances that were."""
    replaced = []
    for name, entry in tree.items():
        for implementation, (server_type, told) in _REPLACED.items():
            block = entry.get(server_type) if isinstance(entry, dict) else None
            fields = block.pop(implementation, None) if isinstance(block, dict) else None
            if isinstance(fields, dict):
                own = {key: value for key, value in fields.items() if key != "entrypoint"}
                block[OWN[server_type]] = {**told, **own}  # type: ignore[index]
                replaced.append(str(name))
    return replaced
