"""The model server: NeMo Gym's `vllm_model` on the wire, with failover between engines and token capture.

app = build_app(ModelServerConfig(base_url=["http://127.0.0.1:8000"]), "policy_model")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from roundhouse.plugins.programs.model_server.section import ModelServerConfig


def build_app(config: ModelServerConfig, instance_name: str = "policy_model") -> ASGIApp:
    """The server of a configuration; see `app.build_app`."""
    # Imported late: this package's checks and paths are used without a server.
    from roundhouse.plugins.programs.model_server import app

    return app.build_app(config, instance_name)
