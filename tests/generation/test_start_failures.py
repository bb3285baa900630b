"""An engine that cannot start reports the reason within seconds. The last tests with the shared deployment, because they
replace it."""

from __future__ import annotations

import json
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from roundhouse.errors import ConfigError, DeploymentFailed
from roundhouse.generation import deployment
from roundhouse.generation.deployment import ServeEndpoint, ServeUnreachable

pytestmark = pytest.mark.real


def test_a_missing_model_directory_is_refused_before_the_running_one_is_touched(deployed, config, tmp_path):
    before = deployment.RayServeEngine(deployed).replicas()
    with pytest.raises(ConfigError, match="does not exist"):
        deployment.ensure_deployed(config, str(tmp_path / "nowhere"), deployed)
    assert {r.pid for r in deployment.RayServeEngine(deployed).replicas()} == {r.pid for r in before}


def test_a_dashboard_that_is_not_there_is_unreachable(config, policies):
    nowhere = ServeEndpoint("http://127.0.0.1:9", "http://127.0.0.1:9")
    with pytest.raises(ServeUnreachable, match="Is Ray up"):
        deployment.ensure_deployed(config, str(policies["first"]), nowhere)


def test_a_wrong_token_is_named(deployed, config, policies):
    stranger = ServeEndpoint(deployed.dashboard_url, deployed.http_url, "wrong" * 8)
    with pytest.raises(DeploymentFailed, match="token"):
        deployment.ensure_deployed(config, str(policies["first"]), stranger)


@pytest.mark.long
def test_a_model_that_the_engine_does_not_know_fails_with_the_engines_words_and_another_starts(
    deployed, config, policies, tmp_path
):
    strange = tmp_path / "strange"
    shutil.copytree(policies["first"], strange)
    model = json.loads((strange / "config.json").read_text()) | {
        "architectures": ["Nonsense"],
        "model_type": "nonsense",
    }
    (strange / "config.json").write_text(json.dumps(model))
    started = time.monotonic()
    with pytest.raises(DeploymentFailed, match="nonsense"):
        deployment.ensure_deployed(config, str(strange), deployed)
    # Most of it is importing vLLM on a busy machine.
    assert time.monotonic() - started < 120
    # The second replica that cannot start fails while the next application starts. Its error is not that one's.
    first, other = str(policies["first"]), config.model_copy(update={"backend": "transformers"})
    again = deployment.ensure_deployed(other, first, deployed, weights=first, version=2)
    assert [(replica.ready, replica.policy_version, replica.error) for replica in again] == [(True, 2, None)] * 2


def test_a_dashboard_that_starts_serve_before_it_answers_is_waited_for(config, policies, monkeypatch):
    """On a busy machine Serve's controller took longer than a call may, and a run ended with `does not answer`."""
    monkeypatch.setattr(deployment, "CALL_TIMEOUT_SECONDS", 0.2)

    class Dashboard(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(b'{"applications": {}}')

        def do_PUT(self) -> None:
            written.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            time.sleep(0.6)  # thrice what an ordinary call may take
            self._answer(b"{}")

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    written: list[dict] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Dashboard) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        started = deployment.ensure_deployed(config, str(policies["first"]), ServeEndpoint(url, url), wait=False)
        server.shutdown()
    assert started == []
    assert [application["name"] for application in written[0]["applications"]] == ["policy"]
