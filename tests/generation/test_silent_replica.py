"""A real replica under Serve is stopped by a signal before a refit: it alone is replaced, and the refit continues."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from roundhouse.config.models import GenerationConfig
from roundhouse.generation import deployment
from roundhouse.generation.deployment import RayServeEngine, ServeEndpoint
from tests.generation import tiny

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(1200)]


def test_only_the_replica_that_a_signal_stops_before_a_refit_is_replaced(
    ray: ServeEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = str(tiny.make_model(tmp_path / "model", seed=1))
    config = GenerationConfig(backend="transformers", replicas=2, max_model_len=64, start_timeout_seconds=600)
    engine = RayServeEngine(ray)
    stopped, other = engine.ensure(config, model, model, 1)
    process = psutil.Process(stopped.pid)
    monkeypatch.setattr(deployment, "SILENT_SECONDS", 8.0)
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        replicas = engine.ensure(config, model, model, 2)
        assert [one.policy_version for one in replicas] == [2, 2]
        assert [one.pid for one in replicas if one.pid == other.pid] == [other.pid]
        assert stopped.pid not in {one.pid for one in replicas}
        assert f"replica {stopped.replica_id} (process {stopped.pid}" in caplog.text
        process.wait(60)
    finally:
        if process.is_running():
            process.kill()
