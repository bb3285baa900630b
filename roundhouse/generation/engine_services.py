"""Where a run's engine is, and how it is brought to a version: behind Ray Serve, or in a process that is there already.

Invariant: `ensure` returns only when every replica has said itself that it answers with the wanted version of the weights;
otherwise it raises with the cause. Nothing of a run depends on which of the two it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from roundhouse.config.colocation import Reservation
from roundhouse.config.generation import TOKEN_VARIABLE
from roundhouse.config.models import GenerationConfig
from roundhouse.config.secrets import read_secret
from roundhouse.errors import DeploymentFailed, InfraError
from roundhouse.generation import deployment
from roundhouse.generation.deployment import ServeEndpoint
from roundhouse.weight_sync.replica_state import RefitOptions, ReplicaReport, desired_state

STATUS_SECONDS = 10.0
"""Time limit of a question that needs no work."""


class EngineGone(InfraError):
    """The engine's process does not answer."""


class EngineService(Protocol):
    """An engine, wherever it runs."""

    @property
    def url(self) -> str:
        """Base URL of its chat completions."""
        ...

    def replicas(self) -> list[ReplicaReport]:
        """The running replicas in their own words; empty when none answers."""
        ...

    def application(self, config: GenerationConfig, model_dir: str) -> str:
        """`application_digest` that replicas of such an engine report; those of another one report another."""
        ...

    def start(self, config: GenerationConfig, model_dir: str) -> None:
        """Ask for it, without weights, and do not wait."""
        ...

    def ensure(
        self,
        config: GenerationConfig,
        model_dir: str,
        weights: str,
        version: int,
        options: RefitOptions = RefitOptions(),
    ) -> list[ReplicaReport]:
        """Bring all replicas to these weights.

        Raises:
            InfraError: it does not answer.
            DeploymentFailed: an engine cannot start, or refuses the weights.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """What has been spent on it by this object, by name; empty where there is nothing to tell."""
        ...


@dataclass(frozen=True)
class RayServeEngine:
    """The policy's application on a Ray cluster."""

    serve: ServeEndpoint
    reserved: Reservation | None = None

    @property
    def url(self) -> str:
        return self.serve.http_url

    def replicas(self) -> list[ReplicaReport]:
        return deployment.replicas(self.serve)

    def application(self, config: GenerationConfig, model_dir: str) -> str:
        return deployment.digest_of(deployment.wanted_application(config, model_dir, {}, self.reserved))

    def start(self, config: GenerationConfig, model_dir: str) -> None:
        deployment.ensure_deployed(config, model_dir, self.serve, reserved=self.reserved, wait=False)

    def ensure(
        self,
        config: GenerationConfig,
        model_dir: str,
        weights: str,
        version: int,
        options: RefitOptions = RefitOptions(),
    ) -> list[ReplicaReport]:
        return deployment.ensure_deployed(
            config, model_dir, self.serve, weights=weights, version=version, options=options, reserved=self.reserved
        )

    def metrics(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class ProcessEngine:
    """A standalone engine (`roundhouse.generation.standalone`); its token comes from the environment."""

    url: str

    def replicas(self) -> list[ReplicaReport]:
        try:
            with _client(self.url) as client:
                reply = client.get("/rh/replicas", timeout=STATUS_SECONDS)
            return (
                [ReplicaReport.parse(status) for status in reply.json()["replicas"]] if reply.status_code == 200 else []
            )
        except (httpx.HTTPError, ValueError, KeyError):
            return []

    def application(self, config: GenerationConfig, model_dir: str) -> str:
        return deployment.digest_of(deployment.wanted_application(config, model_dir, {}))

    def start(self, config: GenerationConfig, model_dir: str) -> None:
        self._apply(config, model_dir, {"policy_version": 0}, STATUS_SECONDS)

    def ensure(
        self,
        config: GenerationConfig,
        model_dir: str,
        weights: str,
        version: int,
        options: RefitOptions = RefitOptions(),
    ) -> list[ReplicaReport]:
        wanted = desired_state(version, weights, options, [replica.desired for replica in self.replicas()])
        found = self._apply(config, model_dir, wanted, config.start_timeout_seconds + config.refit_timeout_seconds)
        for replica in found:
            there = replica.ready and (replica.policy_version, replica.weights) == (version, weights)
            if not (there if options.asleep is None else replica.asleep == options.asleep):
                raise DeploymentFailed(f"The engine at {self.url} cannot be refitted. {replica.error}")
        return found

    def metrics(self) -> dict[str, float]:
        return {}

    def _apply(
        self, config: GenerationConfig, model_dir: str, wanted: dict[str, Any], seconds: float
    ) -> list[ReplicaReport]:
        body = {
            "generation": deployment.engine_arguments(config),
            "model_dir": model_dir,
            "desired": wanted,
        }
        token = read_secret(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            with _client(self.url) as client:
                reply = client.post("/rh/desired", json=body, headers=headers, timeout=seconds)
        except httpx.HTTPError as error:
            raise EngineGone(
                f"The engine at {self.url} does not answer: {type(error).__name__}: {error}. Is it running, and "
                "generation.engine_url right?"
            ) from error
        if reply.status_code == 401:
            raise DeploymentFailed(f"The engine at {self.url} refuses the token. Set {TOKEN_VARIABLE} as it has it.")
        if reply.status_code >= 400:
            raise DeploymentFailed(f"The engine at {self.url} refuses ({reply.status_code}): {reply.text[-2000:]}")
        return [ReplicaReport.parse(status) for status in reply.json()["replicas"]]


def _client(url: str) -> httpx.Client:
    """Certificate authorities are read for https alone: 25 ms a client."""
    return httpx.Client(base_url=url, verify=url.startswith("https://"))
