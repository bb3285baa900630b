"""One replica's policy: which weights it answers with, and whether it may answer at all.

Invariant: every answer is labelled with the version whose weights drew all of its tokens. Requests and refits exclude each
other through the gate: a refit waits for the requests inside, requests that come meanwhile wait for the refit. When the
wanted weights cannot be had, no request is answered (503), neither with the wrong version nor with a mixture:

    wanted version ──fetch, check──> refused: engine untouched; 503 with the reason, tried again with growing pauses
                  ──load──────────> failed: engine poisoned; 503, unhealthy, so that Serve restarts the replica
                  ──verified──────> ready
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from roundhouse.errors import InfraError
from roundhouse.generation import weights
from roundhouse.generation.engine import Engine, EnginePoisoned, WeightsRefused

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 2.0, 60.0


class PolicyUnavailable(InfraError):
    """This replica must not answer now; the text says why."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The deployment's `user_config`."""

    policy_version: int
    weights: str | None = None
    """Hugging Face directory: a path, file:// or s3:// URI. None: weights will come later."""
    digest: str | None = None
    """`roundhouse.generation.weights.digest_of` of the weights; checked when given."""
    request: int | None = None
    """Grows with each wish (nanoseconds since the epoch). A newer wish for the same weights tries them again; an older one that
    arrives late is ignored."""

    @classmethod
    def parse(cls, user_config: dict[str, Any]) -> Wanted:
        unknown = sorted(set(user_config) - set(cls.__slots__))
        if unknown or type(user_config.get("policy_version")) is not int:
            raise ValueError(
                f"user_config is {user_config!r}; it must hold policy_version (a whole number) and may hold "
                "weights, digest and request."
            )
        return cls(**user_config)

    def same_weights(self, other: Wanted | None) -> bool:
        return other is not None and replace(self, request=None) == replace(other, request=None)


class Gate:
    """Either requests are inside, or it is closed; never both."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._inside = 0

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        while not self._open.is_set():
            await self._open.wait()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._empty.set()

    async def close(self) -> None:
        """Let nobody in any more, and wait until nobody is inside."""
        self._open.clear()
        await self._empty.wait()

    def open(self) -> None:
        self._open.set()


class ServedPolicy:
    """The engine of a replica together with the version it holds."""

    def __init__(self, engine: Engine, model_dir: str, replica_id: str, application: str = "") -> None:
        self.engine = engine
        self.replica_id = replica_id
        self.application = application
        self._model_dir = Path(model_dir)
        self._expected: dict[str, tuple[int, ...]] | None = None
        self._gate = Gate()
        self._gate.open()
        self._changing = asyncio.Lock()
        self._wanted: Wanted | None = None
        self._held: Wanted | None = None
        self._error: str | None = "No weights were given yet."
        self._failed_request: int | None = None
        self._poisoned = False
        self._refits = 0
        self._refit_seconds = 0.0
        self._retry: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[int]:
        """Hold the weights still for one request; gives the version that answers.

        Raises:
            PolicyUnavailable: the wanted weights are not in.
        """
        async with self._gate.entered():
            if self._error is not None or self._held is None:
                raise PolicyUnavailable(self._error or "No weights were given yet.")
            yield self._held.policy_version

    async def want(self, wanted: Wanted) -> None:
        """Bring the engine to `wanted`. Never raises for weights that cannot be had: `status` and 503 tell."""
        async with self._changing:
            if self._wanted is not None and (wanted.request or 0) < (self._wanted.request or 0):
                return
            # Under the lock a retry is asleep or waits for the lock, so cancelling it cannot break off a refit.
            if self._retry is not None:
                self._retry.cancel()
                self._retry = None
            self._wanted = wanted
            await self._bring(wanted, FIRST_RETRY_SECONDS)

    async def _bring(self, wanted: Wanted, pause: float) -> None:
        if wanted.weights is None or (wanted.same_weights(self._held) and self._error is None):
            return
        try:
            await self._refit(wanted)
        except (WeightsRefused, OSError) as error:
            if self._poisoned:
                self._poison(wanted, error)
                return
            self._refuse(wanted, error, pause)
        except Exception as error:  # noqa: BLE001 (border of a refit: whatever broke, the engine may be half changed)
            self._poison(wanted, error)

    async def _refit(self, wanted: Wanted) -> None:
        assert wanted.weights is not None
        started = time.perf_counter()
        # Fetching and checking go on beside the requests; only the change itself shuts them out.
        directory = await asyncio.to_thread(self._fetch, wanted)
        await self._gate.close()
        try:
            await self.engine.load_weights(str(directory))
            self._held, self._error, self._failed_request = wanted, None, None
            self._refits += 1
            self._refit_seconds = time.perf_counter() - started
        except BaseException:
            self._poisoned = True
            self._error = f"A refit to version {wanted.policy_version} broke off."
            raise
        finally:
            self._gate.open()
        logger.info("version %d from %s in %.3f s", wanted.policy_version, wanted.weights, self._refit_seconds)

    def _fetch(self, wanted: Wanted) -> Path:
        assert wanted.weights is not None
        directory = weights.fetch(wanted.weights)
        if self._expected is None:
            self._expected = weights.expected_shapes(self._model_dir)
        weights.check(directory, self._model_dir, self._expected, wanted.digest)
        return directory

    def _refuse(self, wanted: Wanted, error: Exception, pause: float) -> None:
        self._error = f"Version {wanted.policy_version} cannot be loaded from {wanted.weights}: {error}"
        self._failed_request = wanted.request
        logger.error("%s", self._error)

        async def again() -> None:
            await asyncio.sleep(pause)
            async with self._changing:
                await self._bring(wanted, min(pause * 2, LAST_RETRY_SECONDS))

        self._retry = asyncio.create_task(again())

    def _poison(self, wanted: Wanted, error: Exception) -> None:
        self._poisoned = True
        self._error = (
            f"Loading version {wanted.policy_version} from {wanted.weights} failed: {type(error).__name__}: {error}"
        )
        self._failed_request = wanted.request
        logger.exception("%s", self._error)

    async def check_health(self) -> None:
        """Raises when only a restart helps."""
        if self._poisoned:
            raise EnginePoisoned(self._error or "The engine is poisoned.")
        await self.engine.check_health()

    def status(self) -> dict[str, Any]:
        """What this replica serves, for `/rh/status`."""
        held = self._held
        return {
            "replica_id": self.replica_id,
            "pid": os.getpid(),
            "application": self.application,
            "ready": self._error is None,
            "policy_version": None if held is None else held.policy_version,
            "weights": None if held is None else held.weights,
            "digest": None if held is None else held.digest,
            "wanted": None if self._wanted is None else asdict(self._wanted),
            "error": self._error,
            # The error may be of the wish before, while the newest is being fulfilled.
            "failed_request": self._failed_request,
            "poisoned": self._poisoned,
            "refits": self._refits,
            "refit_seconds": self._refit_seconds,
        }
