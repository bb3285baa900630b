"""The servers of a run's own NeMo Gym as pods of a cluster: a Job and a Service for the head server and for each other
server.

Invariant: a server's address is its Service's, which stays when its pod is replaced. A server that ends is restarted,
as often as allowed. All of them belong to the owner of the flow (its pod's Job), so deleting it ends them. Their names
are derived from all their dependencies: a flow that died and came back finds its servers; for another configuration
they are ended and made again.

    Secret      the configuration, as each server reads it: it listens on all addresses, the others are at their Services
    Services    gym-<run>-<uid>-<digest>-<server>
    Jobs        one pod each; the next one follows a Job after the end of its pod

    with pod_servers(run, environment, resolution, commands, logs) as head_url: …
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.errors import InfraError, RoundhouseError
from roundhouse.http.asgi import is_loopback
from roundhouse.logs import METRICS_VARIABLE
from roundhouse.plugins.kubernetes.cluster import ApiRefused, Cluster, Object, OwnedResources, connect, explained
from roundhouse.plugins.kubernetes.job import RunJobs, Unwanted, is_under_way
from roundhouse.plugins.kubernetes.names import LABEL, StageIdentity, gym_object_name, server_label
from roundhouse.plugins.kubernetes.stage_jobs import GYM_PLACE, PLACE, GymJob, gym_secret
from roundhouse.plugins.nemo_gym.config.instances import Instance, model_endpoints
from roundhouse.plugins.nemo_gym.config.resolve import Resolution
from roundhouse.plugins.nemo_gym.config.sources import EXTRA_ROOTS
from roundhouse.plugins.nemo_gym.section import NemoGymEnvironment
from roundhouse.plugins.nemo_gym.servers.commands import Command
from roundhouse.plugins.nemo_gym.servers.head import check_all
from roundhouse.plugins.nemo_gym.servers.own_server import CONFIG_DICT, CONFIG_PATH
from roundhouse.plugins.nemo_gym.servers.start import ENDING, LOOK_SECONDS
from roundhouse.store.location import Location
from roundhouse.store.run import Run

log = logging.getLogger(__name__)

HEAD = "head_server"
"""Role and name of the head server's pod; a key of the configuration that no server may have."""
ANY_HOST = "0.0.0.0"
FIRST_FREE_PORT = 1024
"""Lower ones are root's."""
_VARIABLE_BYTES = 128 * 1024
"""Linux' limit of `NAME=value`, in which a server is given its configuration."""
_SECRET_BYTES = 1024 * 1024
"""Kubernetes' limit of a Secret."""
_ADDRESS_BYTES = 256
"""Largest size of one server's address."""


@dataclass(frozen=True)
class GymPlan:
    """Objects that a start creates."""

    jobs: tuple[GymJob, ...]
    """The head server's first."""
    names: Mapping[str, str]
    """Names of the servers, by `identity.shard`."""
    values: Mapping[str, str]
    """Values of the Secret: the configuration as each server reads it."""
    secret: str
    urls: Mapping[str, str]
    """URLs of the servers by name, servers elsewhere included."""

    @property
    def head_url(self) -> str:
        return f"http://{self.jobs[0].host}:{self.jobs[0].port}"


def choose_ports(resolution: Resolution, infra: KubernetesInfra) -> None:
    """Give each server without a port one, the same at every start."""
    tree, metrics = resolution.tree, _metrics_port(infra)
    free = itertools.chain(
        (
            port
            for port in range(tree["port_range_low"], tree["port_range_high"] + 1)
            if port not in tree["disallowed_ports"] and port != metrics
        ),
        itertools.repeat(0),  # refused by `unfit_for_pods`
    )
    for instance in resolution.instances:
        if instance.kind != "external":
            _fields(tree, instance)["port"] = instance.fields.port or next(free)


def unfit_for_pods(resolution: Resolution, infra: KubernetesInfra) -> list[str]:
    """Return the parts of a configuration with chosen ports that cannot work in pods: key, value and remedy."""
    problems = []
    for instance in resolution.instances:
        key, fields = ".".join(instance.path), instance.fields
        if instance.kind == "external":
            if _is_loopback(str(fields.url)):
                problems.append(f"{key}.url is {fields.url}, which in each pod is the pod itself. {_REACHED}")
            continue
        if fields.host not in (None, ANY_HOST) and not is_loopback(str(fields.host)):
            problems.append(
                f"{key}.host is {fields.host}, but a server of infra.kind kubernetes is at its Service. Remove it, or give a "
                "server that runs elsewhere a url and no entrypoint."
            )
        port = _fields(resolution.tree, instance)["port"]
        if not port:
            problems.append(f"No port from port_range_low to port_range_high is left for {key}. Raise the second.")
        elif port == _metrics_port(infra):
            problems.append(f"{key}.port is {port}, which {METRICS_VARIABLE} uses. Name another one, or remove it.")
        elif port < FIRST_FREE_PORT:
            problems.append(
                f"{key}.port is {port}, which a pod that is not root cannot take. Name another, or remove it."
            )
    problems += [
        f"{field} names {url}, which in each pod is the pod itself. {_REACHED}"
        for url, field in model_endpoints(resolution.instances).items()
        if _is_loopback(url)
    ]
    ray = resolution.tree.get("ray_head_node_address")
    if ray and any(one.kind == "foreign" for one in resolution.instances):
        problems.append(
            f"ray_head_node_address is {ray}, but a server joins a cluster of Ray through a node of it on its own machine, "
            "which its pod does not have. Remove it: each foreign server has a separate Ray in its pod."
        )
    pods = len(resolution.instances) + 1
    size = len(CONFIG_DICT) + len(resolution.yaml().encode()) + _ADDRESS_BYTES * pods
    if size > _VARIABLE_BYTES or size * pods > _SECRET_BYTES:
        problems.append(
            f"it is {size} bytes for each of {pods} pods, of which one takes {_VARIABLE_BYTES}, and all together "
            f"{_SECRET_BYTES}. Name fewer servers."
        )
    return problems


_REACHED = "Name an address that pods reach, such as a Service's."


def _metrics_port(infra: KubernetesInfra) -> int | None:
    port = (infra.environment | infra.gym.environment).get(METRICS_VARIABLE, "").rpartition(":")[2]
    return int(port) if port.isdigit() else None


def _is_loopback(url: str) -> bool:
    return is_loopback(urlsplit(url).hostname or "")


def plan_pods(run: Run, resolution: Resolution, commands: Sequence[Command], flow: Object | None) -> GymPlan:
    """Return the objects to create for a configuration with chosen ports: equal arguments give equal names."""
    infra = run.config.infra.cluster
    assert infra is not None, "the servers run in pods"
    programs = {each.instance.name: each for each in commands}
    depends = [
        resolution.yaml(),
        [[name, each.arguments, str(each.directory), each.environment] for name, each in sorted(programs.items())],
        infra.gym.model_dump(mode="json"),
        infra.environment,
        None if flow is None else flow["metadata"]["uid"],
    ]
    digest = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:32]
    labels = {name: server_label(name) for name in (HEAD, *programs)}
    services = {name: gym_object_name(run.run_id, run.uid, digest, label) for name, label in labels.items()}
    tree = resolution.tree
    tree["head_server"]["host"] = f"{services[HEAD]}.{infra.namespace}.svc"
    for each in programs.values():
        _fields(tree, each.instance)["host"] = f"{services[each.instance.name]}.{infra.namespace}.svc"
    secret = gym_object_name(run.run_id, run.uid, digest, "config")

    def job(name: str, role: str, port: int, arguments: tuple[str, ...], variables: Mapping[str, str]) -> GymJob:
        return GymJob(
            StageIdentity(run.run_id, run.uid, 0, "gym", digest, shard=labels[name], extra=run.config.tracking.labels),
            infra,
            store=Location(run.config.store).uri,
            service_name=services[name],
            port=port,
            role=role,
            arguments=arguments,
            variables=variables,
            secret_variables={CONFIG_DICT: (secret, labels[name])},
            directory=str(programs[name].directory) if _is_foreign(programs.get(name)) else None,
            flow=flow,
        )

    jobs = [
        job(HEAD, HEAD, resolution.head_address()[1], ("python", "-m", "roundhouse.plugins.nemo_gym.servers.head"), {})
    ]
    values = {labels[HEAD]: resolution.masked_yaml()}
    for name, command in programs.items():
        instance, arguments = command.instance, command.arguments
        program, variables = arguments, command.environment
        if not _is_foreign(command):  # by the image's own interpreter, on its own path
            program = ("python", *arguments[1:])
            variables = {variable: variables[variable] for variable in (EXTRA_ROOTS, CONFIG_PATH)}
        jobs.append(job(name, instance.type, resolution.address(instance)[1], program, variables))
        read = deepcopy(resolution.tree)  # by the server itself, which is reached from other pods
        _fields(read, instance)["host"] = ANY_HOST
        values[labels[name]] = Resolution(read).yaml()
    urls = {one.name: resolution.base_url(one) for one in resolution.instances}
    return GymPlan(tuple(jobs), {label: name for name, label in labels.items()}, values, secret, urls)


def _is_foreign(command: Command | None) -> bool:
    return command is not None and command.instance.kind == "foreign"


def _fields(tree: Object, instance: Instance) -> Object:
    fields: Object = tree[instance.name][instance.type][instance.implementation]
    return fields


@contextmanager
def pod_servers(
    run: Run, environment: NemoGymEnvironment, resolution: Resolution, commands: Sequence[Command], logs: Path
) -> Iterator[str]:
    """The servers, for the time of the block, all healthy at its beginning; the head server's URL.

    Raises:
        ConfigError: the cluster does not take them, or a pod cannot start.
        InfraError: a server ended too often, or did not answer in time.
    """
    infra = run.config.infra.cluster
    assert infra is not None, "the servers run in pods"
    cluster = connect(infra)
    try:
        own = OwnedResources(cluster, infra.namespace)
        plan = plan_pods(run, resolution, commands, own.flow())
        servers = PodServers(cluster, own, plan, environment, logs)
        try:
            servers.start()
            yield plan.head_url
        finally:
            servers.close()
    finally:
        cluster.close()


class PodServers:
    """The pods of a plan, each kept by a thread."""

    def __init__(
        self, cluster: Cluster, own: OwnedResources, plan: GymPlan, environment: NemoGymEnvironment, logs: Path
    ) -> None:
        head = plan.jobs[0]
        self._cluster, self._own, self._plan, self._logs = cluster, own, plan, logs
        self._environment = environment
        self._run_uid, self._namespace = head.identity.run_uid, head.namespace
        self._jobs = RunJobs(cluster, self._namespace, self._run_uid)
        self._stops = {role: threading.Event() for role in (*ENDING, HEAD)}
        self._threads: dict[str, list[threading.Thread]] = {role: [] for role in self._stops}
        self._failed: dict[str, RoundhouseError] = {}
        self._said: dict[str, str] = {}
        """Last output of each server's pod, or its reason for waiting."""

    def start(self) -> None:
        """Create missing objects, and return when every server has answered once.

        Raises:
            ConfigError, InfraError: see `pod_servers`.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        self._refuse_beside_another_flow()
        self._jobs.end_others({PLACE: GYM_PLACE}, {self._plan.jobs[0].identity.digest})
        owner = self._own.owner(self._plan.jobs[0])
        # An object of this name is this run's, with the same content, by its name; the flow may not read Secrets.
        body = gym_secret(self._plan.secret, self._plan.jobs[0], owner, self._plan.values)
        try:
            self._cluster.create(self._own.path("v1", "secrets"), body)
        except ApiRefused as refused:
            if refused.status != 409:
                raise explained(refused, f"create secrets in namespace {self._namespace}") from refused
        for job in self._plan.jobs:
            self._own.ensure("v1", "services", job.service(owner))
        for job in self._plan.jobs:
            name = f"gym {self._plan.names[job.identity.shard]}"
            thread = threading.Thread(target=self._keep, args=(job,), name=name, daemon=True)
            self._threads[job.role].append(thread)
            thread.start()
        self._until_healthy()

    def close(self) -> None:
        """End agents, then resources servers, models and the head server, and delete their objects."""
        for role, stop in self._stops.items():
            stop.set()
            for thread in self._threads[role]:
                thread.join()
        self._jobs.close()
        try:
            if self._failed:  # its thread has ended, and may have left a running Job
                with RunJobs(self._cluster, self._namespace, self._run_uid) as rest:
                    rest.end_others({PLACE: GYM_PLACE}, ())
            for job in self._plan.jobs:
                self._cluster.delete(f"{self._own.path('v1', 'services')}/{job.service_name}")
            self._cluster.delete(f"{self._own.path('v1', 'secrets')}/{self._plan.secret}")
        except (ApiRefused, RoundhouseError) as error:
            log.warning("gym: not all of its objects could be deleted: %s They end with the flow's.", error)

    def _refuse_beside_another_flow(self) -> None:
        """Servers of this run that belong to another flow's Job are left to it while it is under way.

        Raises:
            InfraError: there are such.
        """
        flow, path = self._plan.jobs[0].flow, self._own.path("batch/v1", "jobs")
        selector = f"{LABEL}run-uid={self._run_uid},{LABEL}stage=gym"
        for server in self._cluster.get(path, labelSelector=selector).get("items") or []:
            [owner] = server["metadata"]["ownerReferences"]
            if owner["kind"] != "Job" or (flow is not None and flow["metadata"]["uid"] == owner["uid"]):
                continue
            try:
                other = self._cluster.get(f"{path}/{owner['name']}")
            except ApiRefused as refused:
                if refused.status == 404:
                    continue
                raise explained(refused, f"get jobs in namespace {self._namespace}") from refused
            if other["metadata"]["uid"] == owner["uid"] and is_under_way(other):
                raise InfraError(
                    f"The gym servers of this run belong to Job {owner['name']}, and its flow is running. Wait for its end, or "
                    f"delete it: kubectl -n {self._namespace} delete job {owner['name']}"
                )

    def _keep(self, job: GymJob) -> None:
        """Keep the server running until its role is stopped; restart it, as often as allowed, after it has ended."""
        name, stop = self._plan.names[job.identity.shard], self._stops[job.role]
        with (self._logs / f"{name}.log").open("w") as output:

            def say(line: str) -> None:
                self._said[name] = line
                if not output.closed:  # the end of a log may come late
                    output.write(f"{line}\n")
                    output.flush()

            for restarted in itertools.count():
                try:
                    self._jobs.run(job, say, left=lambda number: False, stopped=stop)
                    error = InfraError("It ended by itself, with exit code 0.")
                except Unwanted:
                    return
                except InfraError as ended:
                    error = ended
                except RoundhouseError as final:
                    self._give_up(name, final)
                    return
                except ApiRefused as refused:
                    self._give_up(name, explained(refused, f"keep the Job of {name}"))
                    return
                if stop.is_set():
                    return
                if restarted >= self._environment.restarts:
                    self._give_up(name, error)
                    return
                log.warning("gym: %s ended and is started again: %s", name, error)

    def _give_up(self, name: str, error: RoundhouseError) -> None:
        log.error("gym: %s has ended and is not restarted: %s", name, error)
        self._failed[name] = error

    def _until_healthy(self) -> None:
        seconds = self._environment.start_timeout_seconds
        deadline, waiting = time.monotonic() + seconds, {HEAD: self._plan.head_url, **self._plan.urls}
        total = len(waiting)
        while waiting:
            for name, error in self._failed.items():
                raise type(error)(f"{name}, a server of environment.config_paths: {error}")
            statuses = asyncio.run(check_all(waiting.values()))
            for name, status in zip(list(waiting), statuses, strict=True):
                if status == "success":
                    del waiting[name]
                    log.info("gym: %s is ready (%d/%d)", name, total - len(waiting), total)
            if waiting and time.monotonic() > deadline:
                lines = [f"{name} at {url}: {self._said.get(name, 'runs elsewhere')}" for name, url in waiting.items()]
                raise InfraError(
                    f"Not everything answered within {seconds:g} s (environment.start_timeout_seconds), asked from here:\n"
                    + "\n".join(lines)
                )
            if waiting:
                time.sleep(LOOK_SECONDS)
