"""MLflow's own server takes the traces of a run by OTLP, each span once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from typer.testing import CliRunner

from roundhouse.cli import app
from tests.plugins.otel.receivers import recorded_store
from tests.tracking.served import faulty_server

pytestmark = pytest.mark.real


def test_mlflow_has_agents_model_calls_and_tokens_once_after_two_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = recorded_store(tmp_path / "recorded")
    with faulty_server(tmp_path, monkeypatch) as server:
        client = MlflowClient(server.url)
        experiment = client.create_experiment("traces")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-mlflow-experiment-id={experiment}")
        for _ in range(2):
            words = ["otel", "export", "earlier", "--store", str(store), "--endpoint", server.url, "--messages"]
            assert CliRunner().invoke(app, words).output == "156 spans in 1 requests\n"
        traces = client.search_traces(locations=[experiment], max_results=100)
        spans = [span for trace in traces for span in trace.data.spans]
        assert len(spans) == 156
        kinds = Counter(span.span_type for span in spans)
        assert kinds["AGENT"] == kinds["CHAT_MODEL"] == len(traces) - 1
        [verified] = [each for each in traces if each.info.trace_metadata.get("mlflow.trace.session") == CONVERSATION]
        assert '"total_tokens": ' in verified.info.trace_metadata["mlflow.trace.tokenUsage"]
        assert "Sort" in verified.info.request_preview
        assert '"role": "assistant"' in verified.info.response_preview


CONVERSATION = "earlier/2/evaluate/sort/43/0"
"""One rollout of the recorded run."""
