"""Rollouts that are interrupted between two model calls, and their continuation."""

import contextlib
import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from roundhouse.config.models import RolloutConfig
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.rollout.protocol import EnvironmentClient
from roundhouse.rollout.replay import TurnJournal
from roundhouse.trajectories.records import Rollout
from tests.gym.playground import SAMPLING, Script, ScriptedPolicy

VERSION = 3
"""The policy version that `ScriptedPolicy` answers with."""


class PowerCut(BaseException):
    """Ends a rollout as a kill would: nothing handles it."""


async def interrupted_before(
    call: int, spec: RolloutSpec, script: Script, client: EnvironmentClient, config: RolloutConfig
) -> list[pa.Table]:
    """Play until `call`, which never comes back; the journal's parts, each as it is read from a file."""
    journal, parts = TurnJournal(VERSION), []

    def cut(messages: list[dict[str, Any]], seed: int) -> Any:
        parts.append(journal.take())
        if len(policy.seeds) > call:
            raise PowerCut
        return script(messages, seed)

    policy = ScriptedPolicy(cut)
    with contextlib.suppress(PowerCut):
        await run_rollout(spec, policy, client, config, SAMPLING, recorded=journal.recorded(spec, client.restoration))
    return [as_read(part) for part in (*parts, journal.take()) if part is not None]


async def resumed(
    parts: list[pa.Table],
    spec: RolloutSpec,
    script: Script,
    client: EnvironmentClient,
    config: RolloutConfig,
    version: int = VERSION,
) -> tuple[Rollout, ScriptedPolicy, TurnJournal]:
    """Resume from the parts; return the outcome, the policy and the journal."""
    journal, policy = TurnJournal(version), ScriptedPolicy(script)
    for part in parts:
        journal.read(part)
    recorded = journal.recorded(spec, client.restoration)
    rollout = await run_rollout(spec, policy, client, config, SAMPLING, recorded=recorded)
    journal.finished(rollout)
    return rollout, policy, journal


def as_read(part: pa.Table) -> pa.Table:
    """A part after its way through a file."""
    sink = io.BytesIO()
    pq.write_table(part, sink)
    return pq.read_table(io.BytesIO(sink.getvalue()))
