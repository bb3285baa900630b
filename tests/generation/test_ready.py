"""An engine's probes and metrics, of a real process: ready only with the wanted version."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from roundhouse.errors import DeploymentFailed
from roundhouse.generation.deployment import ProcessEngine
from roundhouse.trajectories.records import CallStage
from tests.generation.test_standalone import CONFIG, engine_process

pytestmark = pytest.mark.real


def test_an_engine_is_ready_with_the_wanted_version_reports_both_and_logs_a_refusal_as_a_line_of_json(
    policies: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = str(policies["first"])
    with engine_process(fresh=True, ROUNDHOUSE_LOG="json", ROUNDHOUSE_LOG_LEVEL="debug") as url:
        assert httpx.get(f"{url}/ready").status_code == 503
        engine = ProcessEngine(url)
        engine.ensure(CONFIG, model, model, 1)
        assert httpx.get(f"{url}/ready").json()["policy_version"] == 1
        asked = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked).json()["choices"][0]["message"]
        with pytest.raises(DeploymentFailed):
            engine.ensure(CONFIG, model, str(tmp_path), 2)
        refused = httpx.get(f"{url}/ready")
        assert (refused.status_code, refused.json()["desired"]["policy_version"]) == (503, 2)
        page = httpx.get(f"{url}/metrics").text
        assert "roundhouse_engine_ready 0.0" in page
        assert "roundhouse_engine_policy_version 1.0" in page
        assert "roundhouse_engine_wanted_version 2.0" in page
        engine.ensure(CONFIG, model, str(policies["second"]), 2)
        assert "roundhouse_engine_ready 1.0" in httpx.get(f"{url}/metrics").text
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert any(line["level"] == "error" and "Version 2 cannot be loaded" in line["message"] for line in lines)
    told = dict(line["message"].split(": ", 1) for line in lines if line["message"].startswith("LF"))
    assert list(told) == [stage.value for stage in CallStage]
    assert told["LF1 Request"] == json.dumps(asked, separators=(",", ":"))
    assert told["LF3 Prompt Token IDs"] == str(answer["prompt_token_ids"])
    assert told["LF4 Generation Token IDs"] == str(answer["generation_token_ids"])
