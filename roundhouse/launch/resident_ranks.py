"""Resident ranks: n processes that hold one model together across iterations, behind the verbs of one process.

Invariant: the ranks (`roundhouse.training.service.ranks`) are one program, which a launcher runs in a thread as long as the
service is open. When one is lost or hangs, the verb under way raises `InfraError` with the cause, and none is left running.
"""

from __future__ import annotations

import logging
import re
import secrets
import tempfile
import threading
from collections.abc import Callable
from contextvars import Context
from pathlib import Path

import httpx
import psutil
from pydantic import ValidationError

from roundhouse.activity import ACTIVITY
from roundhouse.config.models import TrainConfig
from roundhouse.config.training import TOKEN_VARIABLE, RankedService, ResidentService, TrainServiceConfig
from roundhouse.errors import ConfigError, InfraError, RoundhouseError
from roundhouse.launch.base import Program, Stopped, open_launcher
from roundhouse.store.location import Location
from roundhouse.training.service import protocol
from roundhouse.training.service.client import CONNECT_SECONDS, HttpChannel
from roundhouse.training.service.engine import TrainEngine
from roundhouse.training.service.ranks import MODULE, SERVING, RanksSpec
from roundhouse.training.service.verbs import TrainService
from roundhouse.training.service.wire import ChannelService

logger = logging.getLogger(__name__)

START_SECONDS = 300.0
"""For ranks to import torch and find each other."""
CAUSE_SECONDS = 10.0
"""For a launcher to notice that a rank was lost, after the leading rank has."""
MARGIN_SECONDS = 5.0
"""For the leading rank to report that its peers hang, beyond the time limit of a collective."""
_RANK = re.compile(r"rank (\d+) of \d+: pid (\d+)")


class ResidentRanks(ChannelService):
    """The verbs on `service.processes` ranks of this machine.

    Raises:
        ConfigError: the launcher starts programs elsewhere, or the machine has fewer GPUs than ranks.
        InfraError: the ranks do not start.
    """

    def __init__(self, config: TrainConfig, service: ResidentService, *, owner: str, temperature: float) -> None:
        config = config.model_copy(update={"service": service})
        token = secrets.token_hex(16)
        self.ranks = RunningRanks(config, service, token)
        http = httpx.Client(
            base_url=self.ranks.url,
            headers={protocol.PROTOCOL_HEADER: protocol.PROTOCOL, "authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(service.timeout_seconds + MARGIN_SECONDS, connect=CONNECT_SECONDS),
            trust_env=False,  # no proxy of the environment is given calls and token
        )
        opening = protocol.OpenSession(owner=owner, config=config, temperature=temperature)
        super().__init__(RanksChannel(http, opening, self.ranks))


def open_ranks(config: TrainConfig, temperature: float, service: TrainServiceConfig | None = None) -> TrainService:
    """The engine of a session of a train server or actor: ranks on its machine, or one process without any.

    Args:
        service: how many there are and what they share; None takes `config.service`.

    Raises:
        ConfigError: ranks cannot share what the section asks for.
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

    def __init__(self, http: httpx.Client, opening: protocol.OpenSession, ranks: RunningRanks) -> None:
        super().__init__(http, opening, retry_seconds=0.0, timeout_seconds=ranks.service.timeout_seconds)
        self._ranks = ranks

    def close(self) -> None:
        self._ranks.close()
        self.http.close()

    def _until_answered(self, what: str, attempt: Callable[[], httpx.Response]) -> bytes:
        limit = self._ranks.service.timeout_seconds + MARGIN_SECONDS
        try:
            with ACTIVITY.track("train", "verb", what, patience=limit):
                return super()._until_answered(what, attempt)
        except InfraError as error:
            raise self._ranks.lost(what, error) from error


class RunningRanks:
    """The ranks as a program that runs in a thread of its own, which also ties them to this process's life."""

    def __init__(self, config: TrainConfig, service: ResidentService, token: str) -> None:
        self.service, self.url = service, ""
        self.pids: dict[int, int] = {}
        """Process ids, by rank."""
        self._stopped, self._known = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._scratch = tempfile.TemporaryDirectory(prefix="roundhouse-ranks-", ignore_cleanup_errors=True)
        self._launcher = open_launcher(service.launcher, "train.service.launcher", None)
        if not self._launcher.same_machine:
            self._launcher.close()
            raise ConfigError(
                f"train.service.launcher is {service.launcher}, which starts programs elsewhere; resident ranks are on the "
                "flow's machine. Set it to subprocess."
            )
        program = Program(
            what="The group of resident ranks",
            module=MODULE,
            spec=RanksSpec(train=config, timeout_seconds=service.timeout_seconds),
            place=Location(Path(self._scratch.name).as_uri()),
            place_field="place",
            stage="train",
            timeout_seconds=threading.TIMEOUT_MAX,
            timeout_key="train.service.timeout_seconds",
            ranks=service.processes,
            environment={TOKEN_VARIABLE: token},
        )
        # its own context: it is no part of the work of the stage that happened to open the service
        self._thread = threading.Thread(target=Context().run, args=(self._run, program), name="ranks", daemon=True)
        self._thread.start()
        if not self._known.wait(START_SECONDS) or not self.url:
            error = self._error or InfraError(f"The resident ranks did not start within {START_SECONDS:.0f} s.")
            self.close()
            raise error

    def lost(self, what: str, error: InfraError) -> InfraError:
        """Why a call was not answered, in words that name the rank; all ranks are ended."""
        self._thread.join(CAUSE_SECONDS)
        states = ", ".join(f"rank {rank} (pid {pid}) {_state(pid)}" for rank, pid in sorted(self.pids.items()))
        ended = self._error
        self.close()
        limit = self.service.timeout_seconds
        cause = ended or f"no answer within train.service.timeout_seconds ({limit:g} s): {states}"
        return InfraError(
            f"The resident ranks were lost in {what}: {cause}. Their weights are lost; the next attempt starts them anew from "
            f"the last checkpoint. The leading rank said: {error}"
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
            self._error = InfraError("The resident ranks have ended.")
        except Stopped:
            pass
        except RoundhouseError as error:
            self._error = error
        finally:
            self._known.set()

    def _heard(self, line: str) -> None:
        if line.startswith(SERVING):
            self.url = line.removeprefix(SERVING)
            self._known.set()
        elif (found := _RANK.fullmatch(line)) is not None:
            self.pids[int(found[1])] = int(found[2])
        else:
            logger.debug("ranks: %s", line)


def _state(pid: int) -> str:
    """Of a process of this machine: running, sleeping, stopped, …"""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"
