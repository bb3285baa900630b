"""Calls of a rollout stay at one of two real replicas, because its prefix cache holds the earlier ones."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from ray import serve

from roundhouse.config.models import Sampling
from roundhouse.generation.client import request_body
from roundhouse.generation.deployment import RayServeEngine, ServeEndpoint
from roundhouse.generation.protocol import session_header
from roundhouse.generation.serve_app import VIRTUAL_NODES, PolicyReplica, routing_options
from roundhouse.weight_sync.replica_state import ReplicaReport

pytestmark = pytest.mark.long

ROLLOUTS, TURNS = [f"a task@7/{sample}" for sample in range(8)], 3


def ask(endpoint: ServeEndpoint, messages: list[dict[str, Any]], headers: dict[str, str]) -> httpx.Response:
    body = request_body(messages, [], Sampling(max_new_tokens=4), 0, "policy")
    return httpx.post(f"{endpoint.http_url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def play(endpoint: ServeEndpoint, opening: str, headers: dict[str, str]) -> tuple[set[str], list[int]]:
    """The replicas that answered, and the tokens that each turn found in a prefix cache, of which the first prompt fills a
    block."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{opening} " + "12345 hello world " * 64}]
    replicas, found = set(), []
    for turn in range(TURNS):
        reply = ask(endpoint, messages, headers)
        replicas.add(reply.headers["x-replica-id"])
        found.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": f"again {turn}"}]
    return replicas, found


def until_both_are_routed_to(endpoint: ServeEndpoint) -> None:
    """Serve routes past a replica while it updates it, and hears a moment later than we do that it is ready again."""
    newest: list[str] = []
    while len(newest) < 6 or any(one == next_one for one, next_one in itertools.pairwise(newest[-6:])):
        newest.append(ask(endpoint, [{"role": "user", "content": "?"}], {}).headers["x-replica-id"])
        time.sleep(0.05)


def test_the_turns_of_a_rollout_go_to_one_replica_the_rollouts_to_both_and_the_prefixes_are_found(
    deployed: ServeEndpoint, refit: Callable[[str, int], list[ReplicaReport]]
) -> None:
    refit("first", 400)
    until_both_are_routed_to(deployed)
    named = [play(deployed, rollout, session_header(rollout)) for rollout in ROLLOUTS]
    unnamed = [play(deployed, f"unnamed {rollout}", {}) for rollout in ROLLOUTS]
    assert {len(replicas) for replicas, _ in named} == {1}
    shares = Counter(next(iter(replicas)) for replicas, _ in named)
    assert sorted(shares.values())[0] >= len(ROLLOUTS) // 4, shares
    assert len(shares) == 2
    assert all(min(later) > first for _, (first, *later) in named), named
    hits, without = (sum(sum(found) for _, found in played) for played in (named, unnamed))
    print(f"tokens found in the prefix cache: {hits} with the header, {without} without")
    assert {len(replicas) for replicas, _ in unnamed} == {2}
    assert without < hits


def test_the_rollouts_of_a_killed_replica_go_on_at_the_other(
    deployed: ServeEndpoint, refit: Callable[[str, int], list[ReplicaReport]]
) -> None:
    refit("second", 410)
    until_both_are_routed_to(deployed)
    lost, left = RayServeEngine(deployed).replicas()
    os.kill(lost.pid, signal.SIGKILL)
    answered = set()
    for rollout in ROLLOUTS:
        for _ in range(100):  # as the collector does it: a call that met the loss is made again
            with contextlib.suppress(httpx.TransportError):
                reply = ask(deployed, [{"role": "user", "content": "on"}], session_header(rollout))
                if reply.status_code == 200:
                    answered.add(reply.headers["x-replica-id"])
                    break
            time.sleep(0.1)
        else:
            pytest.fail(f"{rollout} was not answered")
    assert answered == {left.replica_id}
    refit("second", 411)


def test_the_deployment_has_a_router_of_sessions_unless_haproxy_stands_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)
    made = serve.deployment(**routing_options())(PolicyReplica)
    router = made._deployment_config.request_router_config
    assert router.get_request_router_class().__name__ == "ConsistentHashRouter"
    assert router.request_router_kwargs == {"num_virtual_nodes": VIRTUAL_NODES}
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert routing_options() == {}, "Serve refuses one, and HAProxy hashes the header itself"
