"""Deploy the policy and refit it, declaratively, through Serve's REST interface.

Invariant: the wanted state (application, `user_config` with version and weights) is written to Serve in one PUT; after that the
cluster brings itself there, also when this process dies. A function here returns only when every replica that Serve counts has
reported that it answers with the wanted version; otherwise it raises, with the replicas' or Serve's own words.

Only `user_config` changes at a refit, so Serve calls `reconfigure` in the running replicas and restarts nothing.

An `EngineService` is where a run's engine is: behind Ray Serve, or in a process that is there already. `ensure` returns only
when every replica has said itself that it answers with the wanted version of the weights; otherwise it raises with the cause.
Nothing of a run depends on which of the two it is.
"""

from __future__ import annotations

import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from roundhouse.config.generation import SAMPLED_BY_REQUEST, TOKEN_VARIABLE
from roundhouse.config.models import GenerationConfig
from roundhouse.config.placement import Reservation
from roundhouse.config.secrets import read_secret
from roundhouse.errors import DeploymentFailed, InfraError
from roundhouse.generation import serve_app
from roundhouse.weight_sync.base import load_transport
from roundhouse.weight_sync.replica_state import (
    RefitOptions,
    ReplicaReport,
    application_digest,
    arguments_of,
    desired_state,
)

POLL_SECONDS = 0.03
SERVE_STATUS_SECONDS = 0.3
"""Serve's own status is asked for less often: it costs the dashboard some milliseconds."""
CALL_TIMEOUT_SECONDS = 10.0


class ServeUnreachable(InfraError):
    """Ray's dashboard does not answer."""


@dataclass(frozen=True, slots=True)
class ServeEndpoint:
    """Where a Ray cluster's Serve is."""

    dashboard_url: str
    """Base URL of Ray's dashboard, e.g. http://127.0.0.1:8265."""
    http_url: str
    """Base URL where Serve answers, e.g. http://127.0.0.1:8000. Its port is used when the first deployment starts Serve."""
    token: str | None = None
    """Ray's authentication token (RAY_AUTH_TOKEN of the cluster); None where authentication is off."""


def ensure_deployed(
    config: GenerationConfig,
    model_dir: str,
    serve: ServeEndpoint,
    *,
    weights: str | None = None,
    version: int = 0,
    options: RefitOptions = RefitOptions(),
    reserved: Reservation | None = None,
    wait: bool = True,
) -> list[ReplicaReport]:
    """Deploy the policy, or bring a running deployment to this state.

    Args:
        config: how to serve; a changed one replaces the replicas.
        model_dir: directory with config.json and tokenizer files, on every node. Weights in it are not read.
        serve: the cluster.
        weights: directory or URI of the weights. None starts the engines without, and they take no request yet. On a deployment
            that has weights already, None leaves them.
        version: policy version of the weights.
        options: how the weights come to a replica, and what becomes of its running generations.
        reserved: room for the trainer near the replica; another one replaces the replica.
        wait: False returns when Serve has accepted the wanted state, before any replica is up.

    Returns:
        The replicas, all ready; empty without `wait`.

    Raises:
        ConfigError: the model directory lacks files.
        DeploymentFailed: an engine cannot start, or weights cannot be loaded.
        ServeUnreachable: the dashboard does not answer.
    """
    if httpx.URL(serve.http_url).host in ("127.0.0.1", "localhost"):
        # Serve is on this machine: what no replica could start from need not take the running ones down first.
        serve_app.check_model_directory(model_dir)
    with _Serve(serve) as client:
        present = client.applications()
        current = present.get(serve_app.APPLICATION)
        before = [] if current is None else [current["deployments"][0]["user_config"]]
        user_config = before[0] if before and weights is None else desired_state(version, weights, options, before)
        application = wanted_application(config, model_dir, user_config, reserved)
        client.put_applications(present | {serve_app.APPLICATION: application}, config.start_timeout_seconds)
        if not wait:
            return []
        # Serve itself would hand the change to one replica after another where there are more, so that some answer meanwhile
        at_once = config.replicas == 1 or load_transport(config.weight_sync).all_replicas_at_once
        return client.wait(application, config.start_timeout_seconds, bring=at_once and current is not None)


def replicas_at(client: httpx.Client) -> list[ReplicaReport]:
    """The running replicas, as they describe themselves; empty when none answers."""
    return replicas_of(lambda: client.get("/rh/replicas"))


def replicas_of(ask: Callable[[], httpx.Response]) -> list[ReplicaReport]:
    """The replicas that an answer reports; empty where there is none."""
    try:
        reply = ask()
        return [ReplicaReport.parse(status) for status in reply.json()["replicas"]] if reply.status_code == 200 else []
    except (httpx.HTTPError, ValueError, KeyError):
        return []


def counted_tokens(replicas: Iterable[ReplicaReport]) -> dict[str, int]:
    """What replicas have generated up to now, by counter."""
    return {each.token_counter: each.generated_tokens or 0 for each in replicas if each.token_counter is not None}


def counted_at(engine_url: str) -> dict[str, int]:
    """`counted_tokens` of the engine of this base URL; empty where it does not say."""
    with _client(engine_url, {}) as client:
        return counted_tokens(replicas_at(client))


def engine_arguments(config: GenerationConfig) -> dict[str, Any]:
    """What an engine is started with, as JSON. Another value of any of it means another engine."""
    # `replicas` and time limits are none of an engine's business: changing them must not restart engines.
    limits = {"start_timeout_seconds", "request_timeout_seconds", "refit_timeout_seconds"}
    # These come with each desired state.
    refits = {"weight_sync", "inflight_requests", "keep_prefix_cache"}
    # A built-in engine is told with each request how to draw; one of your own is made for it.
    sampling = {"sampling"} if config.backend in SAMPLED_BY_REQUEST else set()
    return config.model_dump(mode="json", exclude={"replicas", "engine_url", *sampling, *limits, *refits})


def wanted_application(
    config: GenerationConfig, model_dir: str, user_config: dict[str, Any], reserved: Reservation | None = None
) -> dict[str, Any]:
    """The application as Serve's schema has it, with what is wanted of it."""
    near = None if reserved is None else asdict(reserved)
    # Serve hands a change to a fifth of the replicas at a time, or to one, unless the transport needs all at once
    pace = {"rolling_update_percentage": 1.0} if load_transport(config.weight_sync).all_replicas_at_once else {}
    return {
        "name": serve_app.APPLICATION,
        "route_prefix": "/",
        "import_path": serve_app.IMPORT_PATH,
        "args": arguments_of(engine_arguments(config), model_dir, near),
        "deployments": [
            {
                "name": serve_app.DEPLOYMENT,
                "num_replicas": config.replicas,
                "user_config": user_config,
                **pace,
            },
        ],
    }


class _Serve:
    """Serve's REST interface and our own status route."""

    def __init__(self, serve: ServeEndpoint) -> None:
        self._serve = serve
        headers = {"Authorization": f"Bearer {serve.token}"} if serve.token else {}
        self._dashboard = _client(serve.dashboard_url, headers)
        self._http = _client(serve.http_url, {})

    def __enter__(self) -> _Serve:
        return self

    def __exit__(self, *_: object) -> None:
        self._dashboard.close()
        self._http.close()

    def _call(self, method: str, body: Any = None, seconds: float = CALL_TIMEOUT_SECONDS) -> Any:
        limits = httpx.Timeout(CALL_TIMEOUT_SECONDS, read=seconds)
        try:
            reply = self._dashboard.request(method, "/api/serve/applications/", json=body, timeout=limits)
        except httpx.HTTPError as error:
            raise ServeUnreachable(
                f"Ray's dashboard at {self._serve.dashboard_url} does not answer: {error}. Is Ray up (`roundhouse doctor`)?"
            ) from error
        if reply.status_code == 401:
            raise DeploymentFailed(
                f"Ray's dashboard at {self._serve.dashboard_url} refuses the token (401). Pass the cluster's RAY_AUTH_TOKEN."
            )
        if reply.status_code >= 400:
            raise DeploymentFailed(f"Serve refuses the deployment ({reply.status_code}): {reply.text[-2000:]}")
        return reply.json() if method == "GET" else None

    def applications(self) -> dict[str, dict[str, Any]]:
        """The cluster's applications by name, each as it was last wanted."""
        found = self._call("GET")["applications"]
        return {name: each["deployed_app_config"] for name, each in found.items() if each.get("deployed_app_config")}

    def put_applications(self, applications: Mapping[str, dict[str, Any]], seconds: float) -> None:
        """Write the wanted state of all applications of the cluster; one that is left out is taken down.

        Args:
            seconds: limit of the answer. Where Serve is not up, its controller and proxies start before it comes, so it has
                the limit of what is started.
        """
        url = httpx.URL(self._serve.http_url)
        http_options = {"host": url.host, "port": url.port or 80}
        self._call("PUT", {"http_options": http_options, "applications": list(applications.values())}, seconds)

    def _bring(self, digest: str, user_config: dict[str, Any]) -> list[ReplicaReport]:
        """Hand running replicas the desired state that Serve has stored. Its control loop would bring it after two or three
        intervals of 0.1 s, and still does where no replica takes it this way (the result is empty then)."""
        if self._serve.token is None:
            return []
        headers = {"Authorization": f"Bearer {self._serve.token}"}
        body = {"application": digest, "desired": user_config}
        return replicas_of(lambda: self._http.post("/rh/desired", json=body, headers=headers))

    def wait(self, application: dict[str, Any], timeout: float, bring: bool = False) -> list[ReplicaReport]:
        """Until the application's replicas, and no others, hold its `user_config`."""
        deployment = application["deployments"][0]
        count, user_config = deployment["num_replicas"], deployment["user_config"]
        digest = application_digest(application["args"])
        deadline, next_look = time.monotonic() + timeout, time.monotonic() + SERVE_STATUS_SECONDS
        found: list[ReplicaReport] = []
        while time.monotonic() < deadline:
            found = self._bring(digest, user_config) if bring else replicas_at(self._http)
            bring = False
            if all_there(found, count, digest, user_config):
                return found
            if time.monotonic() >= next_look:
                self._raise_what_serve_says(digest)
                next_look = time.monotonic() + SERVE_STATUS_SECONDS
            time.sleep(POLL_SECONDS)
        raise DeploymentFailed(
            f"Not all {count} replicas answered with version {user_config['policy_version']} within {timeout:g} s. "
            f"They say: {[f'{r.replica_id}: version {r.policy_version}, {r.error}' for r in found]}"
        )

    def _raise_what_serve_says(self, digest: str) -> None:
        application = self._call("GET")["applications"].get(serve_app.APPLICATION)
        if application is None:
            return
        if application["status"] in ("DEPLOY_FAILED", "UNHEALTHY"):
            said = [application.get("message"), *(each.get("message") for each in application["deployments"].values())]
            cause = last_lines("\n".join(filter(None, said)))
            raise DeploymentFailed(f"The policy deployment failed: {cause}")
        for deployment in application["deployments"].values():
            message = deployment.get("message") or ""
            lost = (
                "ActorDiedError" in message
            )  # killed while it started or was refitted: Serve tries again, then gives up
            if "Error" in message and not lost and not is_of_another(message, digest):
                raise DeploymentFailed(f"A replica of the policy cannot start: {last_lines(message)}")


def _client(url: str, headers: dict[str, str]) -> httpx.Client:
    # Reading the certificates of all authorities costs 30 ms of CPU; plain HTTP needs none.
    verify: ssl.SSLContext | bool = httpx.create_ssl_context() if url.startswith("https://") else False
    # A proxy of the environment is for the world outside, and would read the tokens.
    return httpx.Client(base_url=url, headers=headers, timeout=CALL_TIMEOUT_SECONDS, verify=verify, trust_env=False)


def is_of_another(said: str, digest: str) -> bool:
    """Whether an error is that of a replica of another application: one that is on its way out may still fail to start."""
    return serve_app.FAILED_NOTE in said and serve_app.FAILED_NOTE + digest not in said


def last_lines(text: str) -> str:
    """The end of a traceback, which names the cause."""
    lines = [line for line in text.strip().splitlines() if serve_app.FAILED_NOTE not in line]
    return "\n".join(lines[-8:])


def all_there(found: list[ReplicaReport], count: int, digest: str, user_config: dict[str, Any]) -> bool:
    """True when exactly the wanted replicas hold the wanted weights.

    Raises:
        DeploymentFailed: a replica says that it cannot have them.
    """
    for replica in found:
        if replica.failed_request == user_config["request"]:
            raise DeploymentFailed(f"Replica {replica.replica_id} cannot be refitted. {replica.error}")
    if len(found) != count or any(replica.application != digest for replica in found):
        return False
    if (what_for := user_config.get("asleep")) is not None:
        return all(replica.asleep == what_for for replica in found)
    if user_config["weights"] is None:
        return True
    version, weights = user_config["policy_version"], user_config["weights"]
    there = {r.replica_id for r in found if r.ready and r.policy_version == version and r.weights == weights}
    return len(there) == count


class EngineGone(InfraError):
    """The engine's process does not answer."""


class EngineService(ABC):
    """An engine, wherever it runs."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Base URL of its chat completions."""

    def replicas(self) -> list[ReplicaReport]:
        """The running replicas in their own words; empty when none answers."""
        with _client(self.url, {}) as client:
            return replicas_at(client)

    def application(self, config: GenerationConfig, model_dir: str) -> str:
        """`application_digest` that replicas of such an engine report; those of another one report another."""
        return application_digest(arguments_of(engine_arguments(config), model_dir, None))

    @abstractmethod
    def start(self, config: GenerationConfig, model_dir: str) -> None:
        """Ask for it, without weights, and do not wait."""

    @abstractmethod
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

    def metrics(self) -> dict[str, float]:
        """What this object spent on it, by name; empty if nothing was measured."""
        return {}


@dataclass(frozen=True)
class RayServeEngine(EngineService):
    """The policy's application on a Ray cluster."""

    serve: ServeEndpoint
    reserved: Reservation | None = None

    @property
    def url(self) -> str:
        return self.serve.http_url

    def application(self, config: GenerationConfig, model_dir: str) -> str:
        return application_digest(wanted_application(config, model_dir, {}, self.reserved)["args"])

    def start(self, config: GenerationConfig, model_dir: str) -> None:
        ensure_deployed(config, model_dir, self.serve, reserved=self.reserved, wait=False)

    def ensure(
        self,
        config: GenerationConfig,
        model_dir: str,
        weights: str,
        version: int,
        options: RefitOptions = RefitOptions(),
    ) -> list[ReplicaReport]:
        return ensure_deployed(
            config, model_dir, self.serve, weights=weights, version=version, options=options, reserved=self.reserved
        )


@dataclass(frozen=True)
class ProcessEngine(EngineService):
    """A standalone engine (`roundhouse.generation.standalone`); its token comes from the environment."""

    address: str

    @property
    def url(self) -> str:
        return self.address

    def start(self, config: GenerationConfig, model_dir: str) -> None:
        self._apply(config, model_dir, {"policy_version": 0}, CALL_TIMEOUT_SECONDS)

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

    def _apply(
        self, config: GenerationConfig, model_dir: str, wanted: dict[str, Any], seconds: float
    ) -> list[ReplicaReport]:
        body = {
            "generation": engine_arguments(config),
            "model_dir": model_dir,
            "desired": wanted,
        }
        token = read_secret(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            with _client(self.url, {}) as client:
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
