"""Ranks that hold one model together and stay, behind the verbs of one process: `… ranks --spec spec.json`, under
torchrun.

Invariant: every rank performs each verb with the same request, in the leading rank's order. A rank that fails alone
ends with its error, because its peers would wait for it; errors of the request itself (a refused batch or directory)
are raised alike by all, and they stay.

    driver ── HTTP ──> rank 0: the server of `server.py` ── broadcasts each verb ──> rank 1 … n - 1
                                                            (gloo, whatever the model's own backend)

Rank 0 writes the line `serving on http://<address>:<port>` when it serves, and each rank `rank 1 of 2: pid 123`. The
driver's side is `roundhouse.launch.resident_ranks`. On the driver's machine the server listens on loopback; elsewhere
at the launcher's address (`ADDRESS_VARIABLE`), and all ranks end after `SILENT_SECONDS` without the driver, which holds
the token. The first rank of each machine reads a model; the ranks of the leading machine write it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path
from typing import Any

from roundhouse.imports import gc_paused

with gc_paused():
    import numpy as np
    import torch
    import torch.distributed as distributed
    import uvicorn
    from pydantic import BaseModel, ConfigDict

    from roundhouse.config.models import TrainConfig
    from roundhouse.die_with_parent import end_with_parent
    from roundhouse.errors import InfraError, RoundhouseError
    from roundhouse.health.policy import typed
    from roundhouse.http.ports import LOOPBACK
    from roundhouse.store.directories import LoadedModels, ModelSource
    from roundhouse.training.checkpoint import Cursor, HeldWeights
    from roundhouse.training.parallel import Ranks, join, leave
    from roundhouse.training.service.engine import REFUSALS, TrainEngine
    from roundhouse.training.service.job_entry import ADDRESS_VARIABLE, exit_code, read_spec, tell_error
    from roundhouse.training.service.protocol import LoadCheckpoint, SavedCursor
    from roundhouse.training.service.served import ServedTrainEngine
    from roundhouse.training.service.server import Service, build_app
    from roundhouse.training.service.verbs import Applied, Gradient, LossBatch, Role, TokenBatch, ValueBatch
    from roundhouse.training.service.wire import loading, pack, unpack
    from roundhouse.weight_sync.base import Dtype

logger = logging.getLogger(__name__)

MODULE = "roundhouse.training.service.ranks"
IDLE = timedelta(days=365)
"""Time limit for the next verb: the engine generates in between, and a rank sees a closed connection when its leader
ends."""
MAX_BODY_BYTES = 1 << 34
SILENT_SECONDS = 300.0
"""Silence after which a driver counts as gone; its heartbeat comes every `HEARTBEAT_SECONDS`."""
HEARTBEAT_SECONDS = 20.0
SERVING = "serving on "


class RanksSpec(BaseModel):
    """Specification of the ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    place: str = ""
    """URI of the directory for the error of a rank that fails."""
    train: TrainConfig
    """Its `device` and `threads` are used; the rest comes with the session."""
    timeout_seconds: float
    """For one collective: a rank that hangs is noticed after this."""
    token_sha256: str
    """`token_digest` of the driver's bearer token, which is written nowhere."""


class Verbs:
    """The verbs that the leading rank has its peers do, one after the other."""

    def __init__(self, ranks: Ranks) -> None:
        self._group = distributed.new_group(backend="gloo", timeout=IDLE) if ranks.size > 1 else None

    def send(self, verb: str, body: bytes = b"", **arguments: Any) -> None:
        """From the leading rank to all."""
        if self._group is None:
            return
        head = json.dumps({"verb": verb, **arguments}).encode()
        payload = torch.from_numpy(np.frombuffer(head + body, np.uint8).copy())
        distributed.broadcast(torch.tensor([len(head), len(payload)]), 0, group=self._group)
        distributed.broadcast(payload, 0, group=self._group)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """The next one: its name under `verb`, with its arguments, and its body.

        Raises:
            InfraError: the leading rank is gone.
        """
        sizes = torch.zeros(2, dtype=torch.int64)
        try:
            distributed.broadcast(sizes, 0, group=self._group)
            payload = torch.empty(int(sizes[1]), dtype=torch.uint8)
            distributed.broadcast(payload, 0, group=self._group)
        except RuntimeError as error:
            raise InfraError(f"The leading rank is gone: {error}") from error
        data = payload.numpy().tobytes()
        return json.loads(data[: int(sizes[0])]), data[int(sizes[0]) :]


class LeadingEngine(TrainEngine):
    """The leading rank's part of the model; its verbs are those of all ranks."""

    def __init__(self, config: TrainConfig, temperature: float, ranks: Ranks, verbs: Verbs) -> None:
        super().__init__(config, temperature=temperature, ranks=ranks)
        self._verbs = verbs
        verbs.send("begin", config.model_dump_json().encode(), temperature=temperature)

    def forward(self, batch: TokenBatch, role: Role = Role.POLICY) -> np.ndarray:
        self._verbs.send("forward", pack(batch), role=role)
        return super().forward(batch, role)

    def forward_backward(self, batch: LossBatch) -> Gradient:
        self._verbs.send("forward_backward", pack(batch))
        return super().forward_backward(batch)

    def value_backward(self, batch: ValueBatch) -> Gradient:
        self._verbs.send("value_backward", pack(batch))
        return super().value_backward(batch)

    def optim_step(self, learning_rate: float, max_grad_norm: float, role: Role = Role.POLICY) -> Applied:
        self._verbs.send("optim_step", learning_rate=learning_rate, max_grad_norm=max_grad_norm, role=role)
        return super().optim_step(learning_rate, max_grad_norm, role)

    def save_checkpoint(self, directory: Path, cursor: Cursor | None, *, weights: bool = True) -> None:
        body = SavedCursor(cursor).model_dump_json().encode()
        self._verbs.send("save_checkpoint", body, directory=str(directory), weights=weights)
        super().save_checkpoint(directory, cursor, weights=weights)

    def load_checkpoint(
        self, directory: ModelSource, *, trainer_state: ModelSource | None = None, role: Role = Role.POLICY
    ) -> Cursor:
        request = loading(directory, trainer_state, role)
        self._verbs.send("load_checkpoint", request.model_dump_json().encode())
        return super().load_checkpoint(directory, trainer_state=trainer_state, role=role)

    def held_weights(self, dtype: Dtype) -> HeldWeights:
        self._verbs.send("held_weights", dtype=dtype)
        return super().held_weights(dtype)

    def weights_in(self, dtype: Dtype) -> Generator[tuple[str, torch.Tensor]]:
        self._verbs.send("weights_in", dtype=dtype)
        return super().weights_in(dtype)

    def close(self) -> None:
        self.end_transfer()
        self._verbs.send("close")
        super().close()


def follow(ranks: Ranks, verbs: Verbs, scratch: Path) -> None:
    """Repeat the leading rank's verbs until this process is ended."""
    engine, models = None, LoadedModels(scratch / "cache")
    while True:
        head, body = verbs.receive()
        if head["verb"] == "end":
            return
        try:
            if head["verb"] == "begin":
                config = TrainConfig.model_validate_json(body)
                engine = TrainEngine(config, temperature=head["temperature"], ranks=ranks)
            else:
                assert engine is not None, "a session begins before its verbs"
                _do(engine, head, body, models)
        except REFUSALS as error:  # the leading rank answers it
            logger.info("rank %d: %s: %s", ranks.rank, head["verb"], error)


def _do(engine: TrainEngine, head: dict[str, Any], body: bytes, models: LoadedModels) -> None:
    verb = head["verb"]
    if verb == "forward":
        engine.forward(unpack(TokenBatch, body), Role(head["role"]))
    elif verb == "forward_backward":
        engine.forward_backward(unpack(LossBatch, body))
    elif verb == "value_backward":
        engine.value_backward(unpack(ValueBatch, body))
    elif verb == "optim_step":
        engine.optim_step(head["learning_rate"], head["max_grad_norm"], Role(head["role"]))
    elif verb == "save_checkpoint":
        cursor = SavedCursor.model_validate_json(body).root
        engine.save_checkpoint(Path(head["directory"]), cursor, weights=head["weights"])
    elif verb == "load_checkpoint":
        request = LoadCheckpoint.model_validate_json(body)
        state = request.trainer_state and models.here(request.trainer_state)
        engine.load_checkpoint(models.here(request.model), trainer_state=state, role=request.role)
        models.loaded(request.role, request.model)
    elif verb == "held_weights":
        engine.held_weights(head["dtype"])
    elif verb == "weights_in":
        deque(engine.weights_in(head["dtype"]), maxlen=0)
    else:
        assert verb == "close", verb
        engine.close()


def serve(spec: RanksSpec, ranks: Ranks, verbs: Verbs, scratch: Path) -> None:
    """The leading rank: answer the driver until this process is ended, or, elsewhere, until the driver is gone."""
    address, watched = os.environ.get(ADDRESS_VARIABLE, LOOPBACK), ADDRESS_VARIABLE in os.environ
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as bound:
        engine = ServedTrainEngine(
            None,
            spec.train,
            scratch,
            open_engine=lambda config, temperature: LeadingEngine(config, temperature, ranks, verbs),
        )
        service = Service(engine, token_sha256=spec.token_sha256, idle_seconds=0.0, max_body_bytes=MAX_BODY_BYTES)
        server = uvicorn.Server(uvicorn.Config(build_app(service), log_level="warning"))
        # not in the main thread, in which uvicorn would handle SIGTERM and wait for a hanging verb
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        host = f"[{address}]" if ":" in address else address
        _say(f"{SERVING}http://{host}:{bound.getsockname()[1]}")
        looks = 0  # two, since a process that was stopped meanwhile has heard nothing either
        while thread.is_alive() and looks < 2:
            thread.join(SILENT_SECONDS / 10)
            looks = looks + 1 if watched and time.monotonic() - service.heard_at > SILENT_SECONDS else 0
        silent = f"nothing was heard for {SILENT_SECONDS:g} s of the flow that started the ranks"
        service.is_over = True  # no verb begins from here on
        if thread.is_alive() and not service.turn.locked():
            logger.warning("%s: they end", silent)
            verbs.send("end")
            server.should_exit = True
            return
        raise InfraError(f"In a verb {silent}." if thread.is_alive() else "The server of the leading rank has ended.")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")  # in one piece, whatever else is written
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--spec", required=True, help="JSON file or its URI in the store; see RanksSpec")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    if "RANK" in os.environ:
        # torchrun may lack the time to end its children: a rank in a collective does not handle SIGTERM
        end_with_parent(signal.SIGKILL)
    place: str | None = None
    try:
        spec = read_spec(RanksSpec, options.spec, "group of ranks")
        place = spec.place
        device = "cuda" if spec.train.device != "cpu" and torch.cuda.is_available() else "cpu"
        timeout = timedelta(seconds=spec.timeout_seconds)
        ranks = join(device, timeout, **spec.train.parallelism)
        _say(f"rank {ranks.rank} of {ranks.size}: pid {os.getpid()}")
        verbs = Verbs(ranks)
        with tempfile.TemporaryDirectory(prefix="roundhouse-rank-", ignore_cleanup_errors=True) as scratch:
            if ranks.leads:
                serve(spec, ranks, verbs, Path(scratch))
            else:
                follow(ranks, verbs, Path(scratch))
    except Exception as error:  # ends the process
        known = typed(error)
        if not isinstance(known, RoundhouseError):
            known = InfraError(f"A rank failed: {error!r}")
            logger.exception("the rank ends")
        tell_error(place, known)
        sys.stdout.flush()
        os._exit(exit_code(known))  # a verb may be under way in its thread, and wait for peers that are gone
    leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
