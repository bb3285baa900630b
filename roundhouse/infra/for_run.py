"""The local services of one run, for the time that it runs in this process.

Invariant: when the block is left, Ray (and with it the engine that the run deployed) is given back, however it is left; the
pages stay, unless nobody else holds them and the block was left by an error. Within it, the engine is this run's alone. MLflow
is a view: its start is asked for and not waited for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from roundhouse.config.models import RunConfig
from roundhouse.infra.engine_lock import engine_lock
from roundhouse.infra.services import Services, has_engine_here, local_services, needed_services, state_directory
from roundhouse.infra.state import ServiceRecord
from roundhouse.logs import about
from roundhouse.observability import set_up_observability
from roundhouse.progress import announce

log = logging.getLogger(__name__)


@contextmanager
def services_of(config: RunConfig) -> Iterator[Services]:
    """Start what the run needs and is not up, and set the environment of this process for it."""
    set_up_observability()
    states: dict[str, str] = {}

    def on_progress(record: ServiceRecord) -> None:
        states[record.name] = record.status
        announce("services", text=", ".join(f"{name} {status}" for name, status in states.items()))

    wanted = needed_services(config)
    kept = ("prefect", "mlflow")
    with (
        about(run=config.run_id),
        local_services(
            state_directory(config), wanted, keep=kept, unawaited=("mlflow",), on_progress=on_progress
        ) as services,
        engine_lock(services.state, config.run_id) if has_engine_here(config) else nullcontext(),
    ):
        if "mlflow" in wanted and "KUBERNETES_SERVICE_HOST" in os.environ:
            log.warning(
                "MLflow runs in this pod and is lost with it. Set tracking.uri or MLFLOW_TRACKING_URI to a server that stays; "
                "`roundhouse runs track %s` writes a run to another one later.",
                config.run_id,
            )
        own_tracking = {"MLFLOW_TRACKING_URI": uri} if (uri := os.environ.get("MLFLOW_TRACKING_URI")) else {}
        os.environ.update(services.environment() | own_tracking)
        _quiet_libraries()
        pages: dict[str, str] = {}
        if "prefect" in wanted:
            pages = {"prefect": services.prefect_ui_url, "prefect_sign_in": services.prefect_sign_in_url}
        pages |= {"mlflow": services.mlflow_url} if services.is_coming("mlflow") else {}
        announce("pages", **pages)
        yield services


def _quiet_libraries() -> None:
    """Their logs go to Prefect and to files; the terminal shows the run."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
