"""Programs as processes on the nodes of a Ray cluster.

Invariant: a program is the child of an actor that reserves its CPUs and GPUs, and ends with it: the actor ends when its driver
does, when its node is lost, and before `run` returns. An actor is never restarted: what it was doing is lost, and the stage
tries again. Spec, report and error pass through the program's place in the store, so that nothing of ours is pickled.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import ray
from pydantic import BaseModel
from ray.exceptions import RayError

from roundhouse.config.operations import LocalInfra, RayCluster
from roundhouse.errors import ConfigError, InfraError, RoundhouseError
from roundhouse.launch.base import Launcher, Program, Say, Stopped
from roundhouse.launch.subprocesses import ENDING_SECONDS, POLL_SECONDS, SubprocessLauncher
from roundhouse.store.location import Location
from roundhouse.store.run import Run
from roundhouse.training.service.actor import join_cluster
from roundhouse.training.service.job_entry import error_of, exit_code, read_error, tell_error

LAST_LINES = 12
ANSWER_SECONDS = 30.0
"""For an actor that runs to say what its program wrote."""


class PlacedSpec(BaseModel):
    """Stands for a spec that lies at its program's place already."""


class ProgramHost:
    """The actor: runs one program beside it, and answers calls meanwhile."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._stopped = threading.Event()

    def run(self, place: str, fields: dict[str, Any]) -> int:
        """The program's exit code; its error lies at its place."""
        program = Program(place=Location(place), place_field="place", spec=PlacedSpec(), **fields)
        launcher = SubprocessLauncher(None)
        try:
            launcher.run_prepared(program, self._lines.append, self._stopped)
            return 0
        except Stopped:
            return 0
        except RoundhouseError as error:
            tell_error(place, error)
            return exit_code(error)
        finally:
            launcher.close()

    def lines(self, since: int) -> list[str]:
        """What the program has written, from this line on."""
        return self._lines[since:]

    def stop(self) -> None:
        """Have the program end; `run` returns then."""
        self._stopped.set()


class RayLauncher(Launcher):
    """An actor for each program, on the cluster of `infra.ray`."""

    ending_seconds = ENDING_SECONDS + 2 * ANSWER_SECONDS

    def __init__(self, run: Run | None) -> None:
        infra = None if run is None else run.config.infra
        if infra is not None and not isinstance(infra, LocalInfra):
            raise ConfigError(
                f"The launcher ray needs infra.kind local, which has the section ray; it is {infra.kind}."
            )
        self._cluster = RayCluster() if infra is None else infra.ray
        join_cluster(self._cluster.address, "infra.ray.address")

    def run(self, program: Program, said: Say, stopped: threading.Event) -> Location:
        program.prepare()
        wanted = self._cluster.trainer if program.stage == "train" else self._cluster.collector
        host = ray.remote(ProgramHost).options(
            num_cpus=wanted.cpus, num_gpus=wanted.gpus, max_restarts=0, max_concurrency=3
        )
        actor: Any = host.remote()
        try:
            code, last = self._wait(program, actor, f"{wanted.cpus:g} CPUs and {wanted.gpus:g} GPUs", said, stopped)
        except RayError as error:
            raise InfraError(f"{program.what} was lost with its Ray actor: {error}") from error
        finally:
            ray.kill(actor)
        if code != 0:
            raise read_error(program.place) or error_of(code, f"{program.what}'s process", "\n".join(last))
        return program.place

    def _wait(
        self, program: Program, actor: Any, room: str, said: Say, stopped: threading.Event
    ) -> tuple[int, list[str]]:
        """The exit code and the last lines of a program, once it has ended."""
        deadline = time.monotonic() + program.timeout_seconds
        # What the actor needs of a program, as plain values; the spec lies at its place.
        ended = actor.run.remote(
            program.place.uri,
            {
                "what": program.what,
                "module": program.module,
                "stage": program.stage,
                "label": program.label,
                "ranks": program.ranks,
                "timeout_seconds": program.timeout_seconds,
                "timeout_key": program.timeout_key,
                "environment": dict(program.environment),
            },
        )
        answer, heard, is_asked = actor.lines.remote(0), list[str](), False
        said(f"waits for {room} on the Ray cluster")
        while True:
            is_over = bool(ray.wait([ended], timeout=POLL_SECONDS)[0])
            if is_over:
                answer = actor.lines.remote(len(heard))
                ray.wait([answer], timeout=ANSWER_SECONDS)
            if ray.wait([answer], timeout=0)[0]:
                lines = ray.get(answer)
                heard += lines
                for line in lines:
                    said(line)
                answer = actor.lines.remote(len(heard))
            if is_over:
                if is_asked:
                    raise Stopped
                return ray.get(ended), heard[-LAST_LINES:]
            if stopped.is_set() and not is_asked:
                is_asked, deadline = True, time.monotonic() + ENDING_SECONDS + ANSWER_SECONDS
                actor.stop.remote()
            if time.monotonic() >= deadline:
                if is_asked:
                    raise Stopped
                last = "\n".join(heard[-LAST_LINES:]) or f"nothing: has a node {room} (infra.ray)?"
                raise InfraError(
                    f"{program.what} took longer than {program.timeout_key} ({program.timeout_seconds:.0f} s), the wait for "
                    f"{room} of the Ray cluster included, and was ended. The last it said: {last}"
                )
