"""The template of a Ray cluster, and the differences between it and a living cluster. Pure.

Invariant: two templates are equal if KubeRay makes equal pods of them. KubeRay reads a template into Go's values and writes it
again, so empty values vanish and quantities change their text: 1024Mi becomes 1Gi. The autoscaler writes replicas; Kueue
writes labels, node selectors, tolerations and `suspend`. These are left out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

Object = dict[str, Any]

_OTHERS = {"replicas", "scaleStrategy", "suspend", "metadata", "nodeSelector", "tolerations", "schedulingGates"}
_AMOUNTS = {"requests", "limits"}
_QUANTITY = re.compile(r"^(\d+(?:\.\d+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$")
_UNITS = {
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** (power + 1) for power, unit in enumerate("kMGTP")},
    **{f"{unit}i": Decimal(1024) ** (power + 1) for power, unit in enumerate("KMGTP")},
}
_MOST_DIFFERENCES = 5


def template_digest(template: Object) -> str:
    """Return the digest of a `rayClusterConfig`; equal templates have equal digests."""
    return hashlib.sha256(json.dumps(_comparable(template), sort_keys=True).encode()).hexdigest()[:16]


def differences(template: Object, cluster: Object) -> list[str]:
    """Return the fields in which the spec of a RayCluster differs from a template, at most `_MOST_DIFFERENCES`.

    >>> differences({"rayVersion": "2.61.0"}, {"rayVersion": "2.60.0"})
    ["rayVersion: '2.60.0' -> '2.61.0'"]
    """
    return list(_differences(_comparable(template), _comparable(cluster), ""))[:_MOST_DIFFERENCES]


def _differences(wanted: Any, current: Any, path: str) -> Iterator[str]:
    if isinstance(wanted, dict) and isinstance(current, dict):
        for key in sorted(wanted.keys() | current.keys()):
            yield from _differences(wanted.get(key), current.get(key), f"{path}.{key}" if path else key)
    elif isinstance(wanted, list) and isinstance(current, list) and len(wanted) == len(current):
        for index, pair in enumerate(zip(wanted, current, strict=True)):
            yield from _differences(*pair, f"{path}[{index}]")
    elif wanted != current:
        yield f"{path}: {current!r} -> {wanted!r}"


def _comparable(value: Any, key: str = "", parent: str = "") -> Any:
    if isinstance(value, dict):
        items = {name: _comparable(item, name, key) for name, item in value.items() if name not in _OTHERS}
        return {name: item for name, item in items.items() if item not in (None, {}, [], "", False)}
    if isinstance(value, list):
        return [_comparable(item, key, parent) for item in value]
    if (parent in _AMOUNTS or key == "sizeLimit") and (match := _QUANTITY.match(str(value))) is not None:
        return str((Decimal(match[1]) * _UNITS.get(match[2], Decimal(1))).normalize())
    return value
