"""Resident ranks: n processes that hold one model together across iterations, behind the verbs of one process.

Invariant: the ranks (`roundhouse.training.service.ranks`) are one program, which a launcher runs in a thread while the
service is open, on this machine or on others. If one is lost or hangs, the running verb raises `InfraError` with the
cause, and none is left running. On other machines they also end after a silence of this process.
"""

from __future__ import annotations

import logging
import re
import secrets
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from pathlib import Path

import httpx
import psutil
from pydantic import ValidationError

from roundhouse.activity import ACTIVITY
from roundhouse.config.models import TrainConfig
from roundhouse.config.training import RankedService, ResidentService, TrainServiceConfig
from roundhouse.errors import ConfigError, InfraError, RoundhouseError, ServiceUnreachable
from roundhouse.health.policy import typed
from roundhouse.http.asgi import token_digest
from roundhouse.http.clients import http_client
from roundhouse.launch.base import Program, Stopped, open_launcher
from roundhouse.store.location import Location
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind
from roundhouse.training.service import protocol
from roundhouse.training.service.client import CONNECT_SECONDS, HttpChannel
from roundhouse.training.service.engine import TrainEngine
from roundhouse.training.service.ranks import HEARTBEAT_SECONDS, MODULE, SERVING, RanksSpec
from roundhouse.training.service.verbs import TrainService
from roundhouse.training.service.wire import ChannelService

logger = logging.getLogger(__name__)

START_SECONDS = 300.0
"""For ranks to import torch and find each other."""
CAUSE_SECONDS = 10.0
"""For a launcher to notice that a rank was lost, after the leading rank has."""
CAUSE_ELSEWHERE_SECONDS = 60.0
"""The same for other machines: their ranks are asked to end before their errors are combined."""
MARGIN_SECONDS = 5.0
"""For the leading rank to report that its peers hang, beyond the time limit of a collective."""
_RANK = re.compile(r"rank (\d+) of \d+: pid (\d+)")


class ResidentRanks(ChannelService):
    """The verbs on `service.processes` ranks per machine of the launcher.

    Args:
        at: the run and the iteration that they are started in; None: without a run, on this machine.

    Raises:
        ConfigError: the launcher starts programs on other machines without a run; or a machine has fewer GPUs than
            ranks.
        InfraError: the ranks do not start.
    """

    def __init__(
        self,
        config: TrainConfig,
        service: ResidentService,
        *,
        owner: str,
        temperature: float,
        at: tuple[Run, int] | None = None,
    ) -> None:
        config = config.model_copy(update={"service": service})
        token = secrets.token_hex(16)
        self.ranks = RunningRanks(config, service, token_digest(token), at)
        http = http_client(
            self.ranks.url,
            headers={protocol.PROTOCOL_HEADER: protocol.PROTOCOL, "authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(service.timeout_seconds + MARGIN_SECONDS, connect=CONNECT_SECONDS),
        )
        opening = protocol.OpenSession(owner=owner, config=config, temperature=temperature)
        super().__init__(RanksChannel(http, opening, self.ranks))


def open_ranks(config: TrainConfig, temperature: float, service: TrainServiceConfig | None = None) -> TrainService:
    """Open the engine of a train server's or actor's session: ranks on its machine, or one process.

    Args:
        service: number and sharing of the ranks; None takes `config.service`.

    Raises:
        ConfigError: ranks cannot share as the section requires.
        InfraError: they do not start.
    """
    layout = service or config.service
    assert isinstance(layout, RankedService)
    if layout.processes == 1:
        return TrainEngine(config, temperature=temperature)
    keys = (*RankedService.model_fields, "timeout_seconds")
    resident = ResidentService.model_validate({key: getattr(layout, key) for key in keys})
    try:
        config = TrainConfig.model_validate({**dict(config), "service": resident})
    except ValidationError as error:
        raise ConfigError(f"The train server's ranks cannot do this: {error.errors()[0]['msg']}") from error
    return ResidentRanks(config, resident, owner="the server", temperature=temperature)


class RanksChannel(HttpChannel):
    """Calls of the leading rank: none is repeated, because an answer that is lost means that the rank is."""

    remedy = ""

    def __init__(self, http: httpx.Client, opening: protocol.OpenSession, ranks: RunningRanks) -> None:
        super().__init__(http, opening, retry_seconds=0.0, timeout_seconds=ranks.service.timeout_seconds)
        self._ranks = ranks
        self._closed = threading.Event()
        # a separate context: it does not belong to the stage that happened to open the service
        threading.Thread(target=Context().run, args=(self._say_alive,), name="rank-heartbeat", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._ranks.close()
        self.http.close()

    def _say_alive(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            # a verb reports the ranks' state; the client may be closed
            with suppress(httpx.TransportError, RuntimeError):
                self.http.get("/v1/alive", timeout=HEARTBEAT_SECONDS)

    def _until_answered(self, what: str, attempt: Callable[[], httpx.Response]) -> bytes:
        limit = self._ranks.service.timeout_seconds + MARGIN_SECONDS
        try:
            with ACTIVITY.track("train", "verb", what, patience=limit):
                return super()._until_answered(what, attempt)
        except InfraError as error:
            raise self._ranks.lost(what, error) from error


class RunningRanks:
    """The ranks as a program in a separate thread, which also ties them to this process's life."""

    def __init__(
        self, config: TrainConfig, service: ResidentService, token_sha256: str, at: tuple[Run, int] | None
    ) -> None:
        self.service, self.url = service, ""
        self.pids: dict[int, int] = {}
        """Process IDs on their machines, by rank, of the ranks whose output arrives here."""
        self._stopped, self._known = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._said = "nothing"
        self._scratch = tempfile.TemporaryDirectory(prefix="roundhouse-ranks-", ignore_cleanup_errors=True)
        self._launcher = open_launcher(service.launcher, "train.service.launcher", None if at is None else at[0])
        place, digest = Location(Path(self._scratch.name).as_uri()), secrets.token_hex(16)
        if not self._launcher.same_machine:
            if at is None:
                self._launcher.close()
                raise ConfigError(
                    f"train.service.launcher is {service.launcher}, which starts ranks on other machines and needs a run for "
                    "that. To train without a run, set it to subprocess."
                )
            run, iteration = at
            place = run.stage(iteration, StageKind.TRAIN).location / f"jobs/ranks-{digest[:8]}"
        program = Program(
            what="The group of resident ranks",
            module=MODULE,
            spec=RanksSpec(train=config, timeout_seconds=service.timeout_seconds, token_sha256=token_sha256),
            place=place,
            place_field="place",
            stage="train",
            timeout_seconds=threading.TIMEOUT_MAX,
            timeout_key="train.service.timeout_seconds",
            ranks=service.processes,
            iteration=0 if at is None else at[1],
            digest=digest,
            label="ranks",
            stays=True,
        )
        # a separate context: it does not belong to the stage that happened to open the service
        self._thread = threading.Thread(target=Context().run, args=(self._run, program), name="ranks", daemon=True)
        self._thread.start()
        limit = START_SECONDS + self._launcher.waiting_seconds
        try:
            with ACTIVITY.track("train", "ranks", service.launcher, patience=limit):
                started = self._known.wait(limit)
            if not started or not self.url:
                raise self._error or InfraError(
                    f"The resident ranks did not start within {limit:.0f} s. Last output: {self._said}."
                )
        except BaseException:
            self.close()
            raise

    def lost(self, what: str, error: InfraError) -> InfraError:
        """Why a call was not answered, in words that name the rank; all ranks are ended."""
        self._thread.join(CAUSE_SECONDS if self._launcher.same_machine else CAUSE_ELSEWHERE_SECONDS)
        known = sorted(self.pids.items()) if self._launcher.same_machine else []
        states = ", ".join(f"rank {rank} (pid {pid}) {_state(pid)}" for rank, pid in known)
        ended = self._error
        self.close()
        limit = self.service.timeout_seconds
        cause: object = ended or error
        if ended is None and isinstance(error, ServiceUnreachable):
            where = states or f"is {self.url} within reach of the flow?"
            cause = f"no answer within train.service.timeout_seconds ({limit:g} s): {where}"
        leader_error = "" if cause is error else f" Message of the leading rank: {error}"
        reason = str(cause).rstrip(".")
        return InfraError(
            f"The resident ranks were lost in {what}: {reason}. Their weights are lost; the next attempt restarts them from "
            f"the last checkpoint.{leader_error}"
        )

    def close(self) -> None:
        """End all ranks."""
        self._stopped.set()
        self._thread.join(self._launcher.ending_seconds + CAUSE_SECONDS)
        self._launcher.close()
        self._scratch.cleanup()

    def _run(self, program: Program) -> None:
        try:
            self._launcher.run(program, self._heard, self._stopped)
            self._error = InfraError("The resident ranks have ended by themselves: they heard nothing of this process.")
        except Stopped:
            pass
        except Exception as error:  # noqa: BLE001 - reported by the thread that waits for the ranks
            known = typed(error)
            self._error = known if isinstance(known, RoundhouseError) else InfraError(f"The ranks' launcher: {error!r}")
        finally:
            self._known.set()

    def _heard(self, line: str) -> None:
        if line.startswith(SERVING):
            self.url = line.removeprefix(SERVING)
            self._known.set()
        elif (match := _RANK.fullmatch(line)) is not None:
            self.pids[int(match[1])] = int(match[2])
        else:
            self._said = line
            logger.debug("ranks: %s", line)


def _state(pid: int) -> str:
    """Return the state of a process of this machine: running, sleeping, stopped, …"""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"
