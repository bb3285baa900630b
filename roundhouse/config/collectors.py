"""Which configurations can be collected by Jobs (`rollout.distribution.kind: job`).

Invariant: in one that passes, all that a collector's pod calls has an address that means the same in the pod as in the flow.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from roundhouse.config.distribution import JobShards
from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.remote_environments import AgentEnvironment, RemoteEnvironment

if TYPE_CHECKING:
    from roundhouse.config.models import RunConfig


def refuse_unfit_collectors(config: RunConfig) -> None:
    """Refuse what a collector's pod could not work with.

    Raises:
        ValueError: names the key, its value and the remedy.
    """
    distribution, infra = config.rollout.distribution, config.infra
    if not isinstance(distribution, JobShards):
        return
    if not isinstance(infra, KubernetesInfra):
        raise ValueError(
            f"rollout.distribution.kind is job, but infra.kind is {infra.kind}: Jobs are a cluster's. Set infra.kind to "
            "kubernetes, or rollout.distribution.kind to process."
        )
    if infra.collector is None:
        raise ValueError(
            "rollout.distribution.kind is job, but infra.collector, which says what a shard's pod is, is unset. Add it "
            "(infra.collector: {image: …, cpu: …, memory: …}), or set rollout.distribution.kind to process."
        )
    urls = {"generation.engine_url": config.generation.engine_url}
    if infra.engine is not None:
        urls["infra.engine.url"] = infra.engine.url
    elif config.generation.engine_url is None:
        raise ValueError(
            "rollout.distribution.kind is job, but generation.engine_url and infra.engine are unset: the engine would run "
            "beside the flow, where pods do not reach it. Set one of them."
        )
    environment = config.environment
    if isinstance(environment, RemoteEnvironment | AgentEnvironment):
        urls["environment.url"] = environment.url
    for key, url in urls.items():
        if url is not None and _is_loopback(url):
            raise ValueError(
                f"{key} is {url}, which is the pod itself in each pod of rollout.distribution.kind job. Name an address that "
                "pods reach, such as a Service's, or set rollout.distribution.kind to process."
            )


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
