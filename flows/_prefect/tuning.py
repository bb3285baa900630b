"""Prefect defaults that are too expensive for iterations of a few seconds.

* Before a tagged task starts, the client requests a concurrency slot for each tag: a fifth of an iteration's wall time
in the quickstart.
  Flow runs therefore carry tags and task runs none; a flow run's tags find its tasks as well.
* Its first import imports pandas if installed, half a second, for cache keys of data frames, which no task here has. A
process that uses
  Prefect imports this module first.
* A flow run keeps a state of all its sub-flows' results until it ends, to derive dependencies: three KiB an iteration.
Iterations do not
  use earlier results; they read the store.
* For each flow it builds a model and a form of the parameters: a fifth of a second for a run's configuration. Flows
therefore take an
  `OpaqueConfig`, which validates itself. Such flows are not deployed; deployments have separate forms.
* Its server answers 503 when two SQLite transactions collide, and the client repeats the request after two seconds. It
is repeated sooner
  at first; the total patience stays the same.
* Each client, one per iteration, reads all certificate authorities, even for a server without TLS: 0.05 s. A process
reads them once.
* At the end of a flow run Prefect joins its heartbeat thread, half a second on average. An iteration's flow run has
none, because it runs
  in its parent's process.
"""

from __future__ import annotations

import functools
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Annotated, Any, ParamSpec, TypeVar

import httpx
from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from roundhouse.config.models import RunConfig
from roundhouse.imports import gc_paused, hide_packages

with hide_packages("pandas"), gc_paused():
    import prefect.cache_policies
    import prefect.main  # noqa: F401

from prefect import tags
from prefect.client import orchestration
from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient
from prefect.context import FlowRunContext, TagsContext, refresh_global_settings_context
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, get_current_settings, temporary_settings

P = ParamSpec("P")
R = TypeVar("R")

SOON_SECONDS = (0.05, 0.15, 0.5)
"""Pauses before the first tries again after a 503 that names none; those after them are Prefect's."""


def _ask_again_soon(client: type[httpx.AsyncClient] | type[httpx.Client]) -> None:
    """Have one of Prefect's clients give a 503 that names no pause a short one, the first few times that a request is sent."""
    retried: Callable[..., Any] = vars(client)["_send_with_retry"]

    def send_with_retry(self: Any, *args: Any, send: Callable[..., Any], **kwargs: Any) -> Any:
        pauses = iter(SOON_SECONDS)

        def named(response: httpx.Response) -> httpx.Response:
            if response.status_code == 503 and "Retry-After" not in response.headers and (pause := next(pauses, None)):
                response.headers["Retry-After"] = str(pause)
            return response

        async def send_async(*given: Any, **named_given: Any) -> httpx.Response:
            return named(await send(*given, **named_given))

        def send_sync(*given: Any, **named_given: Any) -> httpx.Response:
            return named(send(*given, **named_given))

        own = send_async if isinstance(self, httpx.AsyncClient) else send_sync
        return retried(self, *args, send=own, **kwargs)

    setattr(client, "_send_with_retry", send_with_retry)  # noqa: B010 (a method of another's class)


vars(orchestration)["ssl"] = SimpleNamespace(
    SSLContext=ssl.SSLContext, create_default_context=functools.cache(ssl.create_default_context)
)
_ask_again_soon(PrefectHttpxAsyncClient)
_ask_again_soon(PrefectHttpxSyncClient)


class _AsAWhole:
    """A single value for pydantic, without inspection of its parts."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(source.model_validate)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "object"}


OpaqueConfig = Annotated[RunConfig, _AsAWhole]
"""A run's configuration as a parameter of a flow."""


def tagged(flow: Callable[P, R], *names: str) -> Callable[P, R]:
    """Return the flow with these tags, which runs at the server that the environment names."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        take_environment()
        with tags(*names):
            return flow(*args, **kwargs)

    return run


def take_environment() -> None:
    """Let Prefect read its settings again if the environment names another server.

    Prefect reads its settings on import. A process that imported it before the services started would run flows at a
    temporary server.
    """
    if (get_current_settings().api.url or "") != os.environ.get("PREFECT_API_URL", ""):
        refresh_global_settings_context()


@contextmanager
def untagged_tasks() -> Iterator[None]:
    """Tasks in the block do not inherit the tags of their flow run."""
    with TagsContext(current_tags=set()):
        yield


@contextmanager
def without_heartbeats() -> Iterator[None]:
    """Disable the heartbeat of flow runs that start in the block."""
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield


def forget_results() -> None:
    """Release the result states of this flow run's sub-flows and tasks."""
    context = FlowRunContext.get()
    if context is not None:
        context.run_results.clear()
