"""The `roundhouse` command with kills planted at exact operations: `python -m tests.chaos.planted train run.yaml`.

Invariant: the product's code is unchanged and has no hooks. This module wraps its operations on the store, the engine,
MLflow and Prefect. The wrapper records or kills according to the plan (`tests.chaos.strikes`) and otherwise only calls
through.

    ROUNDHOUSE_CHAOS_PLAN=plan.json python -m tests.chaos.planted train run.yaml

Training steps in separate processes are planted too (`tests.chaos.planted_step`).
"""

from __future__ import annotations

import functools
import os
import re
import signal
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.strikes import PLAN_VARIABLE, Operation, Plan, Strike

_ATTEMPT = re.compile(r"\ba(ttempt-)?\d{4}(-[0-9a-f]{8}(?=/))?\b")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}")
_ON_STORE = ("before", "torn", "unplaced", "after")
_ON_BUCKET = ("before", "after")
_CALL = ("before", "during", "after")


class Striker:
    """Counts the operations of this process and kills it at the planned one."""

    def __init__(self, plan: Plan, process: str) -> None:
        self._plan = plan
        self._process = process
        self._armed = plan.armed(process)
        self._counted: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._writing = threading.local()

    def begin(self, name: str, phases: tuple[str, ...]) -> dict[str, Strike]:
        """Begin an operation and return its strikes by phase."""
        with self._lock:
            self._counted[name] += 1
            nth = self._counted[name]
            self._plan.record(Operation(self._process, name, phases))
        return {strike.phase: strike for strike in self._armed if strike.name == name and strike.nth == nth}

    def strike(self, strike: Strike) -> None:
        """Die as the kernel would have it."""
        self._writing.due = {}
        self._plan.write_done(strike)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # the signal ends the process within this call

    def around(self, name: str, phases: tuple[str, ...], call: Callable[[], Any]) -> Any:
        due = self.begin(name, phases)
        if "before" in due:
            self.strike(due["before"])
        if "during" in due:
            threading.Timer(due["during"].milliseconds / 1000, self.strike, [due["during"]]).start()
        self._writing.due = due
        try:
            result = call()
        finally:
            self._writing.due = {}
        if "after" in due:
            self.strike(due["after"])
        return result

    def due(self) -> dict[str, Strike]:
        """Return the strikes for the current operation of this thread."""
        return getattr(self._writing, "due", {})


def plant(striker: Striker) -> None:
    """Lay the layer around the operations."""
    plant_store(striker)
    _plant_refit(striker)
    _plant_tracking(striker)
    _plant_prefect(striker)
    import roundhouse.stages.train as train_stage

    train_stage.STEP = "tests.chaos.planted_step"


def plant_store(striker: Striker) -> None:
    from roundhouse.store import location

    _plant_files(striker)
    within = threading.local()

    def planted(verb: str) -> None:
        original = getattr(location.Location, verb)
        operation = "write" if verb.startswith("write_") else verb

        @functools.wraps(original)
        def call(self: location.Location, *arguments: Any, **keywords: Any) -> Any:
            if getattr(within, "write_file", False):  # whose copy is a stream
                return original(self, *arguments, **keywords)
            folder = re.sub(r"^.*/runs/[^/]+/?", "", self.uri)
            # Beside the run: a step's report to the stage that started it. The lease is renewed by the clock, in no order.
            if "://" in folder or folder == "lease":
                return original(self, *arguments, **keywords)
            name = "/".join(part for part in (folder, arguments[0] if arguments else "") if part)
            phases = _ON_STORE if self.is_local and operation in ("write", "create") else _ON_BUCKET
            label = f"{operation} {_ATTEMPT.sub(lambda found: 'a' + (found[1] or '') + '*', name)}"
            within.write_file = verb == "write_file"
            try:
                return striker.around(label, phases, lambda: original(self, *arguments, **keywords))
            finally:
                within.write_file = False

        setattr(location.Location, verb, call)

    for verb in ("write", "write_file", "write_streamed", "create", "delete", "delete_tree"):
        planted(verb)


def _plant_files(striker: Striker) -> None:
    """Within a write: half of the bytes are synced and no more; all are, but under no name."""
    fsync, link, replace = os.fsync, os.link, os.replace

    def torn(descriptor: Any) -> None:
        state = os.fstat(descriptor)
        if "torn" in striker.due() and stat.S_ISREG(state.st_mode):
            os.truncate(f"/proc/self/fd/{descriptor}", state.st_size // 2)  # it may be open for reading alone
            fsync(descriptor)
            striker.strike(striker.due()["torn"])
        fsync(descriptor)

    def unplaced(place: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **keywords: Any) -> None:
            if "unplaced" in striker.due():
                striker.strike(striker.due()["unplaced"])
            place(*arguments, **keywords)

        return call

    os.fsync = torn  # type: ignore[assignment]
    os.link, os.replace = unplaced(link), unplaced(replace)


def _plant_refit(striker: Striker) -> None:
    from roundhouse.stages import refit

    ensure = refit.ensure_version

    def call(run: Any, checkpoint: Any, engine: Any = None) -> Any:
        wanted = f"refit version {checkpoint.policy_version}"
        return striker.around(wanted, _CALL, lambda: ensure(run, checkpoint, engine))

    refit.ensure_version = call


def _plant_tracking(striker: Striker) -> None:
    """Once MLflow is imported, which is late: a run without tracking shall not pay for it."""
    if "mlflow" in sys.modules:
        _plant_mlflow(striker)
        return
    from roundhouse.tracking import mlflow as tracking

    open_mlflow_run = tracking.open_mlflow_run

    @functools.wraps(open_mlflow_run)
    def opened(run: Any, uri: str) -> Any:
        _plant_mlflow(striker)
        return open_mlflow_run(run, uri)

    tracking.open_mlflow_run = opened


@functools.cache
def _plant_mlflow(striker: Striker) -> None:
    from mlflow.tracking import MlflowClient

    def planted(verb: str) -> None:
        original = getattr(MlflowClient, verb)

        @functools.wraps(original)
        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            return striker.around(f"mlflow {verb}", _CALL, lambda: original(self, *arguments, **keywords))

        setattr(MlflowClient, verb, call)

    for verb in ("create_run", "log_batch", "log_inputs", "log_text", "set_terminated"):
        planted(verb)


def _plant_prefect(striker: Striker) -> None:
    """In httpx: Prefect reads its settings when it is imported, which is after the services are up."""
    send = httpx.Client.send

    @functools.wraps(send)
    def call(self: Any, request: httpx.Request, *arguments: Any, **keywords: Any) -> httpx.Response:
        if request.method == "GET" or not type(self).__module__.startswith("prefect."):
            return send(self, request, *arguments, **keywords)
        name = f"prefect {request.method} {_UUID.sub('*', request.url.path.removeprefix('/api'))}"
        return striker.around(name, _CALL, lambda: send(self, request, *arguments, **keywords))

    httpx.Client.send = call  # type: ignore[method-assign]


def main() -> None:
    """Run the command under the plan of the environment."""
    from roundhouse.cli import main as command

    plant(Striker(Plan.load(Path(os.environ[PLAN_VARIABLE])), "flow"))
    command()


if __name__ == "__main__":
    main()
