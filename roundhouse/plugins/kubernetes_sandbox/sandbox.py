"""A sandbox that is a pod of a warm pool, by the resources of kubernetes-sigs/agent-sandbox.

Invariants
- A sandbox is a SandboxClaim (`extensions.agents.x-k8s.io/v1beta1`). The claim has a shutdown time, at which the
  controller
  deletes it with its pod, even if the collector was killed.
- Its SandboxTemplate confines the pod (runtime class, network policy, user, memory); `runtime_class` is compared with
  the pod
  before anything runs in it.
- When a command ends, all its processes are killed, as in a local sandbox.

Commands run by `exec` of the API server; each is a websocket, read frame by frame up to the limit of output.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import json
import os
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from roundhouse.environments.sandbox import SandboxKilled, SandboxOverloaded, SandboxUnavailable
from roundhouse.environments.sandboxes import COMMAND, KILLED, VARIABLES, WORK, ExecutedSandbox, Execution
from roundhouse.plugins.kubernetes_sandbox.section import KubernetesSandbox

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

GROUP, VERSION, CLAIMS, SANDBOXES = "extensions.agents.x-k8s.io", "v1beta1", "sandboxclaims", "sandboxes"
CORE_GROUP = "agents.x-k8s.io"
POD_NAME = "agents.x-k8s.io/pod-name"
"""Annotation of a Sandbox whose pod was adopted from the pool; other pods have the Sandbox's name."""
CALL_SECONDS, POLL_SECONDS, GRACE_SECONDS = 30.0, 0.2, 60.0
CALLS = 64
"""Requests and commands at once, of all sandboxes of a process."""
STDIN, STDOUT, ERROR = 0, 1, 3
"""Channels of an exec; the first byte of each frame. Others are ignored, such as notices of a closed channel."""


class ClaimedPod(ExecutedSandbox):
    """See the module."""

    def __init__(self, config: KubernetesSandbox) -> None:
        super().__init__(config)
        self._config = config
        self._claim = f"roundhouse-{uuid.uuid4().hex[:20]}"
        self._pod = ""
        self._claimed = False

    async def start(self) -> None:
        self._claimed = True
        await _in_thread(self._call, "create a SandboxClaim", self._create)
        self._pod = await self._wait()
        if self._config.runtime_class is not None:
            pod = await self._get("get a pod", f"/api/v1/namespaces/{self._namespace}/pods/{self._pod}")
            if (runtime_class := pod["spec"].get("runtimeClassName")) != self._config.runtime_class:
                raise SandboxUnavailable(
                    f"environment.sandbox.runtime_class is {self._config.runtime_class}, but pods of the warm pool "
                    f"{self._config.warm_pool} have {runtime_class}. Set runtimeClassName in its SandboxTemplate."
                )

    async def execute(self, arguments: Sequence[str], stdin: bytes, output_bytes: int) -> Execution:
        seconds = self.limits.command_seconds
        input_prefix = f"head -c {len(stdin)} | " if stdin else ""  # older servers know no end of stdin
        script = f"cd {WORK} || exit 125; {input_prefix}{COMMAND}"
        variables = [f"{name}={value}" for name, value in VARIABLES.items()]
        command = ["env", *variables, "sh", "-c", script, f"{seconds:g}", *arguments]
        start = time.monotonic()
        status, output = await _in_thread(self._exec, command, stdin, output_bytes + 1)
        elapsed = time.monotonic() - start
        truncated = status is None
        if truncated:
            await _in_thread(self._exec, ["sh", "-c", "kill -9 -1"], b"", 100)
        timed_out = status in KILLED and elapsed >= seconds
        return Execution(-9 if status is None else status, output[:output_bytes], timed_out, truncated)

    async def close(self) -> None:
        if self._claimed:
            await _in_thread(self._call, "delete a SandboxClaim", self._delete)
            self._claimed = False

    @property
    def _namespace(self) -> str:
        return self._config.namespace

    def _claims(self) -> str:
        return f"/apis/{GROUP}/{VERSION}/namespaces/{self._namespace}/{CLAIMS}"

    def _create(self) -> None:
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=self.limits.lifetime_seconds)
        lifecycle = {"shutdownTime": end.strftime("%Y-%m-%dT%H:%M:%SZ"), "shutdownPolicy": "Delete"}
        claim = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "SandboxClaim",
            "metadata": {"name": self._claim, "labels": {"roundhouse/sandbox": "claimed"}},
            "spec": {"warmPoolRef": {"name": self._config.warm_pool}, "lifecycle": lifecycle},
        }
        self._request("POST", self._claims(), claim)

    async def _wait(self) -> str:
        """The pod of the claim, once it is ready. Meanwhile it holds no thread, which sandboxes that run need."""
        deadline = time.monotonic() + self._config.start_seconds
        while True:
            claim = await self._get("read a SandboxClaim", f"{self._claims()}/{self._claim}")
            status = claim.get("status", {})
            conditions = {each["type"]: each for each in status.get("conditions", [])}
            ready = conditions.get("Ready", {})
            if ready.get("status") == "True" and (name := status.get("sandbox", {}).get("name")):
                path = f"/apis/{CORE_GROUP}/{VERSION}/namespaces/{self._namespace}/{SANDBOXES}/{name}"
                sandbox = await self._get("read a Sandbox", path)
                return str(sandbox["metadata"].get("annotations", {}).get(POD_NAME, name))
            if time.monotonic() > deadline:
                raise SandboxUnavailable(
                    f"The warm pool {self._config.warm_pool} returned no sandbox within {self._config.start_seconds:g} s "
                    f"(environment.sandbox.start_seconds): {ready.get('message') or 'its claim has no condition Ready'}. See "
                    f"`kubectl -n {self._namespace} get sandboxwarmpools,sandboxclaims`, and that the controller of "
                    "agent-sandbox runs."
                )
            await asyncio.sleep(POLL_SECONDS)

    def _delete(self) -> None:
        from kubernetes.client.exceptions import ApiException

        try:
            self._request("DELETE", f"{self._claims()}/{self._claim}")
        except ApiException as error:
            if error.status != 404:
                raise

    async def _get(self, doing: str, path: str) -> dict[str, Any]:
        reply: dict[str, Any] = await _in_thread(self._call, doing, self._request, "GET", path)
        return reply

    def _request(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        client = connect(self._config.context)
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        parameters = client.param_serialize(
            method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        answer = client.call_api(*parameters, _request_timeout=CALL_SECONDS).response
        if answer.status >= 300:
            from kubernetes.client.exceptions import ApiException

            raise ApiException(status=answer.status, reason=answer.data.decode(errors="replace")[:500])
        reply: dict[str, Any] = json.loads(answer.data)
        return reply

    def _call(self, doing: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the API server; a refusal becomes an error with a hint."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return function(*arguments)
        except ApiException as error:
            raise SandboxUnavailable(
                f"The API server refuses to {doing} in namespace {self._namespace} ({error.status}): {error.reason}. Install "
                f"agent-sandbox with its extensions, create the SandboxWarmPool {self._config.warm_pool} "
                "(environment.sandbox.warm_pool), and allow the collector's service account to create, get and delete "
                "sandboxclaims, to get sandboxes and pods, and to create pods/exec."
            ) from error
        except (HTTPError, OSError) as error:
            raise SandboxUnavailable(f"The API server does not answer: {type(error).__name__}: {error}.") from error

    def _exec(self, command: Sequence[str], stdin: bytes, output_bytes: int) -> tuple[int | None, bytes]:
        """Return exit status and output of a command in the pod; no status if the output exceeds the limit.

        Raises:
            SandboxKilled: the pod is gone, or the connection broke.
            SandboxOverloaded: the command did not end in time.
        """
        from kubernetes.stream import ws_client
        from websocket import WebSocketException, WebSocketTimeoutException

        configuration = connect(self._config.context).configuration
        authorization = configuration.auth_settings().get("BearerToken")
        query = [("stdin", str(bool(stdin)).lower()), ("stdout", "true"), ("stderr", "false"), ("tty", "false")]
        query += [("command", part) for part in command]
        path = f"{configuration.host}/api/v1/namespaces/{self._namespace}/pods/{self._pod}/exec?{urlencode(query)}"
        headers = {"authorization": authorization["value"]} if authorization else {}
        deadline = time.monotonic() + self.limits.command_seconds + GRACE_SECONDS
        try:
            connection = ws_client.create_websocket(configuration, ws_client.get_websocket_url(path), headers)
            try:
                connection.settimeout(GRACE_SECONDS)
                for start in range(0, len(stdin), 2**16):
                    connection.send_binary(bytes([STDIN]) + stdin[start : start + 2**16])
                return _read(connection, output_bytes, deadline)
            finally:
                connection.close()
        except WebSocketTimeoutException as error:
            raise SandboxOverloaded(
                f"A command in the pod {self._pod} did not end within {self.limits.command_seconds + GRACE_SECONDS:g} s."
            ) from error
        except (WebSocketException, OSError, ValueError, KeyError, LookupError) as error:
            raise SandboxKilled(
                f"The pod {self._pod} of a sandbox is gone, or the connection to it broke: {error}. Its lifetime "
                f"(environment.sandbox.lifetime_seconds) is {self.limits.lifetime_seconds:g} s."
            ) from error


def _read(connection: Any, output_bytes: int, deadline: float) -> tuple[int | None, bytes]:
    """Frames of an exec until its status or the limit."""
    from websocket import WebSocketTimeoutException

    output = bytearray()
    while True:
        if (left := deadline - time.monotonic()) <= 0:
            raise WebSocketTimeoutException("the time is over")
        connection.settimeout(left)
        frame = connection.recv()
        content = frame.encode() if isinstance(frame, str) else frame
        if not content:
            raise ValueError("it was closed without a status")
        if content[0] == STDOUT:
            output += content[1:]
            if len(output) >= output_bytes:
                return None, bytes(output)
        elif content[0] == ERROR:
            status = json.loads(content[1:])
            if status["status"] == "Success":
                return 0, bytes(output)
            [code] = [each["message"] for each in status["details"]["causes"] if each["reason"] == "ExitCode"]
            return int(code), bytes(output)


@functools.cache
def connect(context: str | None) -> ApiClient:
    """The cluster of this pod's service account, or of the kubeconfig.

    Raises:
        SandboxUnavailable: there is neither.
    """
    from kubernetes import client, config

    settings = client.Configuration()
    try:
        if context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=settings)
        else:
            config.load_kube_config(
                config_file=os.environ.get("KUBECONFIG"), context=context, client_configuration=settings
            )
    except config.ConfigException as error:
        raise SandboxUnavailable(
            f"environment.sandbox.kind is kubernetes, but no cluster is configured here: {error}. Set KUBECONFIG, or "
            "environment.sandbox.context to one of its contexts; in a pod, mount the token of a service account."
        ) from error
    settings.connection_pool_maxsize = CALLS
    return client.ApiClient(settings)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CALLS, thread_name_prefix="sandbox-pod")


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_threads(), function, *arguments)
