"""Check that state and store can be written, and that running or configured services answer.

Invariant: a service that is not running is not a fault, because a run starts its services; a required service that does
not answer is. A probe leaves nothing, and ends within its time limit even if a bucket's host does not answer.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import httpx

from roundhouse import plugins
from roundhouse.config.environments import SingleEnvironment, environment_traits, environments_in
from roundhouse.config.models import RunConfig
from roundhouse.environments import check_sandboxes, first_task
from roundhouse.errors import ConfigError, RoundhouseError
from roundhouse.generation.exchange import problem_of
from roundhouse.http import ports
from roundhouse.http.clients import http_client
from roundhouse.infra import processes
from roundhouse.infra.checks import Finding, fail, ok, warn
from roundhouse.infra.checks.machine import nearest_existing
from roundhouse.infra.services import Services, status
from roundhouse.infra.state import ServiceRecord
from roundhouse.policy.starting import starting_policy_of
from roundhouse.rollout.clients import first_question
from roundhouse.rollout.rubric import refuse_unfit_criteria
from roundhouse.store.bucket import NoConditionalWrites
from roundhouse.store.location import Location

STORE_SECONDS = 15.0


def state(directory: Path) -> list[Finding]:
    try:
        with tempfile.TemporaryFile(dir=nearest_existing(directory)):
            pass
    except OSError as error:
        remedy = "Make it writable, or set infra.state to a directory that you own."
        return [fail("state", f"{directory} cannot be written: {error.strerror} ({error.filename})", remedy)]
    return [ok("state", f"{directory} can be written")]


def store(uri: str, time_limit: float = STORE_SECONDS) -> list[Finding]:
    """Write, read, conditional create and delete of one small object."""
    outcome: list[Finding] = []

    def work() -> None:
        try:
            outcome.append(_probe(uri))
        except Exception as error:  # noqa: BLE001 - whatever a storage library raises is the finding
            outcome.append(fail("store", f"{uri}: {type(error).__name__}: {error}", _remedy(uri)))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(time_limit)
    return outcome[:] or [fail("store", f"{uri} did not answer within {time_limit:.0f} s", _remedy(uri))]


def _probe(uri: str) -> Finding:
    try:
        location = Location(uri)
        if location.is_local:
            # A store that is not there yet is not made by looking at it.
            location = Location(str(nearest_existing(location.local_path)))
        location.verify_exclusive_creation()
        name, data = f"doctor-{uuid.uuid4().hex}", b"probe"
        try:
            location.write(name, data)
            if location.read(name) != data:
                return fail("store", f"{uri} gives back other bytes than were written", _remedy(uri))
        finally:
            with suppress(RoundhouseError):
                location.delete(name)
    except NoConditionalWrites as error:
        return fail("store", f"{uri}: {error}", "Use storage with conditional writes (If-None-Match), as S3 has them.")
    except (RoundhouseError, NotADirectoryError) as error:
        return fail("store", f"{uri}: {error}", _remedy(uri))
    return ok("store", f"{uri}: write, read, conditional create and delete work")


def _remedy(uri: str) -> str:
    if uri.startswith("s3://"):
        endpoint = os.environ.get("AWS_ENDPOINT_URL", "the default one")
        return f"Check bucket, credentials (AWS_ACCESS_KEY_ID, …), region and endpoint (AWS_ENDPOINT_URL: {endpoint})."
    return "Make the directory writable, or set `store` to another one."


PROBE_SECONDS = 2.0
ROUTES = {"prefect": "/api/health", "mlflow": "/health", "ray": "/api/version", "deployments": "/health"}
"""Health route of each service of `SERVICE_SPECS`; of the others, the root."""


def services(state_dir: Path) -> list[Finding]:
    """Check each service of the state directory, the engine behind Ray, and remains of an earlier supervisor."""
    report = status(state_dir)
    running = [record for record in report.records.values() if record.status != "stopped"]
    findings = [_service(report, record) for record in running]
    if report.is_ready("ray"):
        code = _status(f"{report.serve_url}/v1/models")
        if code is None:
            engine = ok("engine endpoint", f"no engine is deployed at {report.serve_url}; a run does that")
        elif code >= 400:
            remedy = f"Look at {report.state.path / 'ray' / 'session_latest' / 'logs' / 'serve'}."
            engine = fail("engine endpoint", f"{report.serve_url}/v1/models: HTTP {code}", remedy)
        else:
            engine = ok("engine endpoint", f"{report.serve_url} answers")
        findings.append(engine)
    if not running:
        findings = []
        for name in ("prefect", "mlflow"):
            record = report.records.get(name)
            port = record.ports.get("http") if record else None
            if port and not ports.is_free(port):
                owner = ports.describe_owner(port) or "another process"
                findings.append(
                    warn(f"port of {name}", f"{port} is now used by {owner}", "Nothing: a free one will be taken.")
                )
        findings = [ok("services", "not running; a run starts them, or `roundhouse up`"), *findings]
        if report.state.path.exists() and (orphans := processes.members(report.state)):
            numbers = ", ".join(str(process.pid) for process in orphans[:5])
            findings.append(
                warn("services", f"{len(orphans)} processes without supervisor ({numbers})", "roundhouse down")
            )
    return findings


def configured(config: RunConfig) -> list[Finding]:
    """Check the configured services other than the local ones."""
    findings = []
    if config.tracking.in_mlflow and (uri := config.tracking.uri or "").startswith("http"):
        findings.append(_answers("tracking", f"{uri}/health", "Start it, or leave tracking.uri unset."))
    for key, environment in environments_in(config.environment).items():
        findings += _environment(environment, key)
    return findings + _engine(config) + _policy(config)


def _engine(config: RunConfig) -> list[Finding]:
    """Exchange a rollout's requests with an engine that exists before the run: the named one, or that of local
    services."""
    url = config.generation.engine_url
    if url is None:
        services = status(Path(config.infra.state) / "services")
        if not services.is_ready("ray") or _status(f"{services.serve_url}/v1/models") != 200:
            return []
        url = services.serve_url
    try:
        question = first_question(config.environment)
    except ConfigError:
        return []  # the environment is a separate finding
    if problem := problem_of(url, config.generation, *question):
        return [fail("engine", f"{problem.symptom}: {problem.cause}", problem.remedy)]
    return [ok("engine", f"{url}: models, chat, tokenize and recorded tokens work as a rollout needs them")]


NEAR_SECONDS, FAR_SECONDS = 0.002, 0.01
"""Time to open a connection: within a rack, and the most that a rollout of many calls should pay for each."""


def topology(config: RunConfig) -> list[Finding]:
    """Measure the distance of engine and environment servers, if rollouts call both: one node is best, one rack is
    good, another site is bad."""
    urls = {"generation.engine_url": config.generation.engine_url} | {
        f"{key}.url": getattr(environment, "url", None)
        for key, environment in environments_in(config.environment).items()
    }
    seconds = {key: _seconds_to(url) for key, url in urls.items() if url is not None}
    measured = {key: each for key, each in seconds.items() if each is not None}
    detail = (
        ", ".join(f"{key}: {each * 1000:.1f} ms" for key, each in measured.items()) or "engine and environment are here"
    )
    if far := [key for key, each in measured.items() if each > FAR_SECONDS]:
        remedy = (
            f"Bring {' and '.join(far)} closer: its latency delays every call. Use the same node, else the same rack."
        )
        return [warn("topology", detail, remedy)]
    where = "on one rack" if any(each > NEAR_SECONDS for each in measured.values()) else "as near as one node"
    return [ok("topology", detail if not measured else f"{detail}: {where}")]


def _seconds_to(url: str) -> float | None:
    """Return the time to open a connection, the best of three; None if it fails."""
    parts = httpx.URL(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        try:
            with socket.create_connection((parts.host, port), timeout=PROBE_SECONDS):
                taken.append(time.perf_counter() - start)
        except OSError:
            return None
    return min(taken)


def foreign() -> list[Finding]:
    """Servers that the shell points to; local runs use their own."""
    findings = []
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        url = os.environ.get(name, "")
        if url.startswith("http") and not _status(
            url.removesuffix("/api") + ("/api/health" if "PREFECT" in name else "")
        ):
            findings.append(warn(name, f"{url} does not answer", f"Unset {name} or start that server."))
    return findings


def _service(found: Services, record: ServiceRecord) -> Finding:
    if record.status in ("starting", "restarting", "stopping"):
        return warn(record.name, f"{record.status} ({record.url})", f"Wait, or look at {record.log}.")
    if record.status == "failed":
        return fail(record.name, record.detail, f"Look at {record.log}, then `roundhouse up`.")
    headers = {"Authorization": f"Bearer {found.ray_token}"} if record.name == "ray" else {}
    code = _status(record.url + ROUTES.get(record.name, "/"), headers)
    if code is None or code >= 500:
        answer = "no answer" if code is None else f"HTTP {code}"
        return fail(
            record.name, f"{record.url}: {answer}", f"Look at {record.log}; `roundhouse down`, then `roundhouse up`."
        )
    again = f", restarted {record.restarts} times" if record.restarts else ""
    return ok(record.name, f"{record.url} answers{again}")


def _policy(config: RunConfig) -> list[Finding]:
    """Check that a policy's files on this machine are whole."""
    policy = starting_policy_of(config)
    try:
        found = policy.check()
    except ConfigError as error:
        return [fail("policy", str(error), policy.remedy)]
    return [] if found is None else [ok("policy", found)]


def _environment(config: SingleEnvironment, key: str) -> list[Finding]:
    """A server answers; of another one task is drawn as a run draws it, and one sandbox started; a judge is asked."""
    addresses = environment_traits(config).addresses
    if addresses is not None:
        findings = [
            fail(each.name, each.problem, each.remedy) if each.problem else _answers(each.name, each.url, each.remedy)
            for each in plugins.resolve(addresses)(config, key)
        ]
    else:
        try:
            drawn = "in another process" if first_task(config) is None else "a task was drawn"
            check_sandboxes(config)
            findings = [ok("environment", f"{config.kind}: {drawn}")]
        except ConfigError as error:
            findings = [fail("environment", str(error), "Correct the section environment.")]
    for name, criteria in (("rubric", config.rubric), ("audit", config.audit)):
        if criteria is None:
            continue
        try:
            refuse_unfit_criteria(criteria, f"{key}.{name}", ask=True)
            findings.append(ok("judge", f"{key}.{name} can judge"))
        except ConfigError as error:
            findings.append(fail("judge", str(error), f"Correct {key}.{name}."))
    return findings


def _answers(name: str, url: str, remedy: str) -> Finding:
    code = _status(url)
    if code is None or code >= 500:
        return fail(name, f"{url}: {'no answer' if code is None else f'HTTP {code}'}", remedy)
    return ok(name, f"{url} answers")


def _status(url: str, headers: dict[str, str] | None = None) -> int | None:
    """Return the HTTP status, or None without an answer. Proxies are not used, because these services must be
    reachable directly."""
    try:
        with (
            http_client(url, timeout=PROBE_SECONDS) as http,
            http.stream("GET", url, headers=headers) as reply,  # its body is not read
        ):
            return reply.status_code
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
