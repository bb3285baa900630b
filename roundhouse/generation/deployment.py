"""Deploy the policy and refit it, declaratively, through Serve's REST interface.

Invariant: the wanted state (application, `user_config` with version and weights) is written to Serve in one PUT; the
cluster then reaches it even if this process dies. A function here returns only after every replica that Serve counts
has reported the wanted version; otherwise it raises with the error of the replicas or of Serve. A refit changes only
`user_config`, so Serve calls `reconfigure` in the running replicas and restarts nothing.

An `EngineService` is a run's engine, behind Ray Serve or in an existing process. `ensure` returns only after every
replica has confirmed the wanted version of the weights; otherwise it raises with the cause. A run works the same with
both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from roundhouse.activity import announce
from roundhouse.config.engines import engine_traits
from roundhouse.config.generation import TOKEN_VARIABLE
from roundhouse.config.models import GenerationConfig
from roundhouse.config.placement import Reservation
from roundhouse.config.secrets import read_secret
from roundhouse.errors import DeploymentFailed, InfraError, RoundhouseError
from roundhouse.generation import serve_app
from roundhouse.generation.silence import (
    REPORT_SECONDS,
    SILENT_SECONDS,
    SilenceWatch,
    SilentReplica,
    actor_names,
    started_replicas,
)
from roundhouse.http.clients import async_http_client, http_client
from roundhouse.http.replies import MALFORMED
from roundhouse.trajectories.storable import shown
from roundhouse.weight_sync.base import load_transport
from roundhouse.weight_sync.replica_state import (
    RefitOptions,
    ReplicaReport,
    application_digest,
    arguments_of,
    desired_state,
)

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.03
SERVE_STATUS_SECONDS = 0.3
"""Serve's own status is asked for less often: it costs the dashboard some milliseconds."""
CALL_TIMEOUT_SECONDS = 10.0
REPLACE_CALLS = 3


class ServeUnreachable(InfraError):
    """Ray's dashboard does not answer."""


class EngineSilent(InfraError):
    """A replica of the engine does not answer, although Serve counts it as started."""


@dataclass(frozen=True, slots=True)
class ServeEndpoint:
    """Address of a Ray cluster's Serve."""

    dashboard_url: str
    """Base URL of Ray's dashboard, e.g. http://127.0.0.1:8265."""
    http_url: str
    """Base URL of Serve's answers, e.g. http://127.0.0.1:8000. Its port is used when the first deployment starts
    Serve."""
    token: str | None = None
    """Ray's authentication token (RAY_AUTH_TOKEN of the cluster); None without authentication."""


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
        config: serving configuration; a changed one replaces the replicas.
        model_dir: directory with config.json and tokenizer files, on every node. Weights in it are not read.
        serve: the cluster.
        weights: directory or URI of the weights. None starts the engines without weights, and they take no request yet.
            None does not change a deployment that has weights.
        version: policy version of the weights.
        options: transport of the weights and treatment of running generations.
        reserved: room for the trainer near the replica; a change replaces the replica.
        wait: False returns when Serve has accepted the wanted state, before any replica is up.

    Returns:
        The replicas, all ready; empty without `wait`.

    Raises:
        ConfigError: the model directory lacks files.
        DeploymentFailed: an engine cannot start, or weights cannot be loaded.
        EngineSilent: a replica does not answer in time, even after its replacement.
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
        # Serve itself would change several replicas one after another, so that some keep answering
        at_once = config.replicas == 1 or load_transport(config.weight_sync).all_replicas_at_once
        return client.wait(application, config.start_timeout_seconds, bring=at_once and current is not None)


def replicas_at(client: httpx.Client) -> list[ReplicaReport]:
    """Return the reports of the running replicas that answer."""
    return replicas_of(lambda: client.get("/rh/replicas"))


def replicas_of(ask: Callable[[], httpx.Response]) -> list[ReplicaReport]:
    """Return the replicas in an answer; empty if it reports none."""
    try:
        reply = ask()
        return _reports(reply) if reply.status_code == 200 else []
    except (httpx.HTTPError, *MALFORMED):
        return []


def _reports(reply: httpx.Response) -> list[ReplicaReport]:
    return [ReplicaReport.parse(status) for status in reply.json()["replicas"]]


def counted_tokens(replicas: Iterable[ReplicaReport]) -> dict[str, int]:
    """Return the replicas' numbers of generated tokens so far, by counter."""
    return {each.token_counter: each.generated_tokens or 0 for each in replicas if each.token_counter is not None}


def counted_at(engine_url: str) -> dict[str, int]:
    """Return `counted_tokens` of the engine at this base URL; empty if it does not report them."""
    with _client(engine_url, {}) as client:
        return counted_tokens(replicas_at(client))


def engine_arguments(config: GenerationConfig) -> dict[str, Any]:
    """Return an engine's start arguments as JSON. A change of any value requires another engine."""
    # `replicas` and time limits do not belong to an engine: a change must not restart engines.
    limits = {"start_timeout_seconds", "request_timeout_seconds", "refit_timeout_seconds"}
    # These come with each desired state.
    refits = {"weight_sync", "inflight_requests", "keep_prefix_cache"}
    # A built-in engine receives the sampling with each request; a custom engine is made for it.
    sampling = {"sampling"} if engine_traits(config.backend).opener is not None else set()
    return config.model_dump(mode="json", exclude={"replicas", "engine_url", *sampling, *limits, *refits})


def wanted_application(
    config: GenerationConfig, model_dir: str, user_config: dict[str, Any], reserved: Reservation | None = None
) -> dict[str, Any]:
    """Return the application in Serve's schema, with its wanted state."""
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

    def _call(self, method: str, body: Any = None, seconds: float = CALL_TIMEOUT_SECONDS) -> httpx.Response:
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
        return reply

    def _reported(self) -> dict[str, dict[str, Any]]:
        """Return Serve's report on the cluster's applications, by name."""
        reply = self._call("GET")
        try:
            return dict(reply.json()["applications"])
        except MALFORMED as error:
            raise DeploymentFailed(
                f"Ray's dashboard at {self._serve.dashboard_url} answered {reply.status_code} without Serve's applications "
                f"({type(error).__name__}: {shown(error)}). Does Ray's dashboard answer there?"
            ) from error

    def applications(self) -> dict[str, dict[str, Any]]:
        """The cluster's applications by name, each as it was last wanted."""
        return {
            name: each["deployed_app_config"]
            for name, each in self._reported().items()
            if each.get("deployed_app_config")
        }

    def put_applications(self, applications: Mapping[str, dict[str, Any]], seconds: float) -> None:
        """Write the wanted state of all applications of the cluster; omitted ones are taken down.

        Args:
            seconds: time limit of the answer. If Serve is not running, its controller and proxies start first, so the
                start's limit applies.
        """
        url = httpx.URL(self._serve.http_url)
        http_options = {"host": url.host, "port": url.port or 80}
        self._call("PUT", {"http_options": http_options, "applications": list(applications.values())}, seconds)

    def _bring(self, digest: str, user_config: dict[str, Any]) -> list[ReplicaReport]:
        """Send running replicas the desired state that Serve has stored. Serve's control loop would deliver it after
        two or three intervals of 0.1 s, and still does if no replica accepts it here (the result is then empty)."""
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
        watch, silent, is_second_try = SilenceWatch(), list[SilentReplica](), False
        reports: list[ReplicaReport] = []
        while time.monotonic() < deadline:
            reports = self._bring(digest, user_config) if bring else replicas_at(self._http)
            bring = False
            watch.hear(replica.replica_id for replica in reports)
            if all_there(reports, count, digest, user_config):
                return reports
            if time.monotonic() >= next_look:
                status = self._application_status(digest)
                silent = watch.silent(started_replicas(status))
                if watch.is_report_due(silent):
                    announce("engine", text=f"waiting: {'; '.join(map(str, silent))}")
                if silent and silent[0].seconds > SILENT_SECONDS and not is_second_try:
                    is_second_try, deadline = True, time.monotonic() + timeout
                    self._replace(application, status, [s for s in silent if s.seconds > SILENT_SECONDS], deadline)
                next_look = time.monotonic() + SERVE_STATUS_SECONDS
            time.sleep(POLL_SECONDS)
        raise EngineSilent(
            f"Not all {count} replicas answered with version {user_config['policy_version']} within {timeout:g} s "
            f"(generation.start_timeout_seconds). Silent: {'; '.join(map(str, silent)) or 'none has started'}. Answers: "
            f"{[f'{r.replica_id}: version {r.policy_version}, {r.error}' for r in reports]}. Look at the nodes of silent "
            "replicas, and end their processes."
        )

    def _replace(
        self, application: dict[str, Any], status: dict[str, Any], silent: list[SilentReplica], deadline: float
    ) -> None:
        """Have another replica end the silent ones, since Serve replaces no replica that holds still in an update. If none can,
        take the application down and deploy it again."""
        actors = actor_names(status, silent)
        is_replaced = self._end_replicas(actors)
        which = "it is replaced" if len(actors) == 1 else "they are replaced"
        text = f"{'; '.join(map(str, silent))}: {which if is_replaced else 'all replicas are restarted'}"
        logger.warning("%s", text)
        announce("engine", text=text)
        if not is_replaced:
            self._restart(application, deadline)

    def _end_replicas(self, actors: list[str]) -> bool:
        """Return whether a replica that answers has ended these. Serve may hand a call to a silent one, so ask again."""
        if self._serve.token is None or not actors:
            return False
        headers = {"Authorization": f"Bearer {self._serve.token}"}
        for _ in range(REPLACE_CALLS):
            with suppress(httpx.HTTPError):
                reply = self._http.post("/rh/replaced", json={"actors": actors}, headers=headers)
                return reply.status_code == 200
        return False

    def _restart(self, application: dict[str, Any], deadline: float) -> None:
        """Take the application down and deploy it again."""
        others = {name: each for name, each in self.applications().items() if name != application["name"]}
        limit = max(CALL_TIMEOUT_SECONDS, deadline - time.monotonic())
        self.put_applications(others, limit)
        while application["name"] in self._reported() and time.monotonic() < deadline:
            time.sleep(SERVE_STATUS_SECONDS)
        self.put_applications(others | {application["name"]: application}, limit)

    def _application_status(self, digest: str) -> dict[str, Any]:
        """Return the application as Serve reports it.

        Raises:
            DeploymentFailed: Serve reports that it cannot be deployed.
        """
        application = self._reported().get(serve_app.APPLICATION)
        if application is None:
            return {"deployments": {}}
        if application["status"] in ("DEPLOY_FAILED", "UNHEALTHY"):
            messages = [
                application.get("message"),
                *(each.get("message") for each in application["deployments"].values()),
            ]
            cause = last_lines("\n".join(filter(None, messages)))
            raise DeploymentFailed(f"The policy deployment failed: {cause}")
        for deployment in application["deployments"].values():
            message = deployment.get("message") or ""
            lost = "ActorDiedError" in message  # killed during its start or refit: Serve retries a few times
            if "Error" in message and not lost and not is_of_another(message, digest):
                raise DeploymentFailed(f"A replica of the policy cannot start: {last_lines(message)}")
        return application


def _client(url: str, headers: dict[str, str]) -> httpx.Client:
    return http_client(url, headers=headers, timeout=CALL_TIMEOUT_SECONDS)


def is_of_another(said: str, digest: str) -> bool:
    """Return whether an error belongs to a replica of another application: a departing one may still fail to start."""
    return serve_app.FAILED_NOTE in said and serve_app.FAILED_NOTE + digest not in said


def last_lines(text: str) -> str:
    """The end of a traceback, which names the cause."""
    lines = [line for line in text.strip().splitlines() if serve_app.FAILED_NOTE not in line]
    return "\n".join(lines[-8:])


def all_there(found: list[ReplicaReport], count: int, digest: str, user_config: dict[str, Any]) -> bool:
    """True when exactly the wanted replicas hold the wanted weights.

    Raises:
        DeploymentFailed: a replica reports that it cannot have them.
        WeightsUnreachable: it could not read them now.
    """
    for replica in found:
        if replica.failed_request == user_config["request"]:
            raise refusal_of(replica, f"Replica {replica.replica_id} cannot be refitted. {replica.error}")
    if len(found) != count or any(replica.application != digest for replica in found):
        return False
    if (what_for := user_config.get("asleep")) is not None:
        return all(replica.asleep == what_for for replica in found)
    if user_config["weights"] is None:
        return True
    version, weights = user_config["policy_version"], user_config["weights"]
    ready_ids = {r.replica_id for r in found if r.ready and r.policy_version == version and r.weights == weights}
    return len(ready_ids) == count


class WeightsUnreachable(InfraError):
    """A replica could not read the weights now: its store or its machine failed."""


def refusal_of(replica: ReplicaReport, text: str) -> RoundhouseError:
    """Return the error of a replica that does not hold the desired weights, of a kind that is retried if it may pass."""
    return (WeightsUnreachable if replica.failure_may_pass else DeploymentFailed)(text)


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
            InfraError: it does not answer (`EngineGone`, `EngineSilent`).
            DeploymentFailed: an engine cannot start, or refuses the weights.
        """

    def release(self, *, next_pod_resumes: bool = False) -> None:
        """Take away the replicas that this run asked for, if they hold machines that others could use. Do not wait.

        Args:
            next_pod_resumes: the process ends by a signal. Keep the replicas if the cluster starts another pod for the run.

        Raises:
            InfraError: the engine's cluster does not answer.
        """

    def metrics(self) -> dict[str, float]:
        """Return this object's costs by name; empty if nothing was measured."""
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
        desired = desired_state(version, weights, options, [replica.desired for replica in self.replicas()])
        reports = self._apply(config, model_dir, desired, config.start_timeout_seconds + config.refit_timeout_seconds)
        for replica in reports:
            is_ready = replica.ready and (replica.policy_version, replica.weights) == (version, weights)
            if not (is_ready if options.asleep is None else replica.asleep == options.asleep):
                raise refusal_of(replica, f"The engine at {self.url} cannot be refitted. {replica.error}")
        return reports

    async def _post_while_alive(
        self, body: dict[str, Any], headers: dict[str, str], seconds: float, silence: float
    ) -> httpx.Response:
        """Return the reply to a desired state. The engine has to answer other requests meanwhile.

        Args:
            seconds: time limit of the reply.
            silence: seconds without any answer that are allowed, since an engine that starts may hold up its process.

        Raises:
            EngineSilent: it answers nothing for so long.
        """
        async with async_http_client(httpx, self.url, timeout=CALL_TIMEOUT_SECONDS) as client:
            reply = asyncio.create_task(client.post("/rh/desired", json=body, headers=headers, timeout=seconds))
            last_answer = time.monotonic()
            try:
                while not (await asyncio.wait([reply], timeout=REPORT_SECONDS))[0]:
                    with suppress(httpx.TransportError):
                        await client.get("/rh/replicas")
                        last_answer = time.monotonic()
                    if (silent := time.monotonic() - last_answer) > silence:
                        raise EngineSilent(
                            f"The engine at {self.url} has not answered for {silent:.0f} s (generation.start_timeout_seconds). "
                            "Look at its process, and start it again."
                        )
                    if silent > REPORT_SECONDS:
                        announce("engine", text=f"waiting: {self.url} has not answered for {silent:.0f} s")
                return reply.result()
            finally:
                reply.cancel()

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
            reply = asyncio.run(self._post_while_alive(body, headers, seconds, config.start_timeout_seconds))
        except httpx.HTTPError as error:
            raise EngineGone(
                f"The engine at {self.url} does not answer: {type(error).__name__}: {error}. Is it running, and "
                "generation.engine_url right?"
            ) from error
        if reply.status_code == 401:
            raise DeploymentFailed(f"The engine at {self.url} refuses the token. Set {TOKEN_VARIABLE} as it has it.")
        if reply.status_code >= 400:
            raise DeploymentFailed(f"The engine at {self.url} refuses ({reply.status_code}): {reply.text[-2000:]}")
        try:
            return _reports(reply)
        except MALFORMED as error:
            raise DeploymentFailed(
                f"{self.url}/rh/desired answered {reply.status_code} with something else than reports of replicas "
                f"({type(error).__name__}: {shown(error)}). Is it an engine of Roundhouse (generation.engine_url)?"
            ) from error
