"""The inference engines behind the model servers of a configuration.

Invariant: each engine is named once, with the field that names it, since it may be a judge's and not the policy's. A model
server answers as soon as it has started, whatever is behind it; so these are asked as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from roundhouse.compat.nemo_gym.config.instances import Instance


def model_endpoints(instances: Iterable[Instance]) -> dict[str, str]:
    """From the address to ask (any HTTP answer will do) to `<instance>.<field>`."""
    found: dict[str, str] = {}
    for instance in instances:
        if instance.type != "responses_api_models" or instance.kind == "external":
            continue
        for field, value in (instance.fields.model_extra or {}).items():
            for url in _urls(value) if field.endswith("base_url") else ():
                found.setdefault(_probe(url), f"{instance.name}.{field}")
    return found


def _urls(value: Any) -> list[str]:
    listed = value if isinstance(value, list) else [value]
    return [url for url in listed if isinstance(url, str) and url.startswith(("http://", "https://"))]


def _probe(url: str) -> str:
    trimmed = url.rstrip("/")
    return f"{trimmed}/models" if trimmed.endswith("/v1") else trimmed
