"""`roundhouse otel export`: write the traces of a run to a file, or send them to a collector.

Invariant: memory is bounded. Rollouts are read in batches of rows. Each line or request is one `ExportTraceServiceRequest` with
whole traces, of about `REQUEST_BYTES`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote

import typer

from roundhouse import __version__
from roundhouse.cli.options import DEFAULT_STORE, StoreOption, out, written
from roundhouse.errors import ConfigError, DataError, InfraError, StoreError
from roundhouse.http.clients import http_client, proxy_note
from roundhouse.plugins.otel.spans import Span, attributes, iteration_spans, rollout_spans, run_span
from roundhouse.retry import Backoff
from roundhouse.sql.parts import located
from roundhouse.stages.report import iteration_manifests
from roundhouse.store.run import Run, load_run
from roundhouse.store.stage import Manifest

SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
"""Version of the conventions."""
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
"""Environment variable of OpenTelemetry: `name=value` pairs with commas between them."""
REQUEST_BYTES = 1_000_000
ROWS = 64
"""Rollouts and turns read at once."""
RETRIED = (429, 502, 503, 504)
"""Status codes that OTLP retries."""
ATTEMPTS, PAUSES = 6, Backoff(0.5, longest=10)
TURNS = (
    "rollout_id",
    "turn",
    "parent",
    "prompt_length",
    "policy_version",
    "finish_reason",
    "latency_seconds",
    "reward",
)
"""Columns of turns that are read, in addition to the number of generated tokens."""

app = typer.Typer(no_args_is_help=True, help="Traces in the conventions of OpenTelemetry.")


@app.command()
def export(
    run_id: Annotated[str, typer.Argument(metavar="RUN")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write, OTLP/JSON.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help=f"Collector, such as http://localhost:4318. Its headers: {HEADERS}.")
    ] = None,
    since: Annotated[int, typer.Option(help="First iteration to export.", min=0)] = 0,
    messages: Annotated[
        bool, typer.Option("--messages", help="Include texts: messages, arguments and results of tools, failures.")
    ] = False,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Export a run's complete stages and rollouts as traces. Exporting again gives the same spans."""
    if (output is None) == (endpoint is None):
        raise ConfigError("Name one destination: --output FILE or --endpoint URL.")
    traces = Export(load_run(store, run_id), since, messages)
    if output is not None:
        part = output.with_name(f"{output.name}.{os.getpid()}.part")
        with written("--output", output):
            try:
                with part.open("wb") as file:
                    traces.send(lambda line: file.write(line + b"\n"))
                part.replace(output)
            finally:
                part.unlink(missing_ok=True)
    else:
        with collector(str(endpoint)) as send:
            traces.send(send)
    skipped = f", {traces.skipped} rollouts without a start left out" if traces.skipped else ""
    out(f"{traces.spans} spans in {traces.requests} requests{skipped}")


class Export:
    """Reads a run's traces and counts them."""

    def __init__(self, run: Run, since: int, messages: bool) -> None:
        self.run, self.since, self.messages = run, since, messages
        self.spans = self.requests = self.skipped = 0

    def send(self, send: Callable[[bytes], object]) -> None:
        """Pass each request on as JSON.

        Raises:
            StoreError: the run has no complete stage from that iteration on, or a file is damaged.
        """
        waiting: list[str] = []
        for trace in self._traces():
            waiting += [json.dumps(span, separators=(",", ":"), allow_nan=False) for span in trace]
            if sum(map(len, waiting)) >= REQUEST_BYTES:
                self._pass_on(waiting, send)
                waiting = []
        self._pass_on(waiting, send)

    def _pass_on(self, spans: list[str], send: Callable[[bytes], object]) -> None:
        if spans:
            resource = {"attributes": attributes({"service.name": "roundhouse", "roundhouse.run_id": self.run.run_id})}
            scope = {"name": "roundhouse.plugins.otel", "version": __version__}
            head = f'{{"scope":{json.dumps(scope)},"schemaUrl":"{SCHEMA}","spans":[{",".join(spans)}]}}'
            send(f'{{"resourceSpans":[{{"resource":{json.dumps(resource)},"scopeSpans":[{head}]}}]}}'.encode())
            self.spans, self.requests = self.spans + len(spans), self.requests + 1

    def _traces(self) -> Iterator[list[Span]]:
        finished = None
        for name in sorted((self.run.location / "iterations").names()):
            if not name.isdigit() or int(name) < self.since:
                continue
            if manifests := list(iteration_manifests(self.run, int(name)).values()):
                finished = max(finished or 0.0, *(each.finished_at for each in manifests))
                yield list(iteration_spans(self.run, int(name), manifests))
                for manifest in manifests:
                    yield from self._rollouts(manifest)
        if finished is None:
            raise StoreError(f"Run {self.run.run_id!r} has no complete stage from iteration {self.since} on to export.")
        yield [run_span(self.run, finished)]

    def _rollouts(self, manifest: Manifest) -> Iterator[list[Span]]:
        place = self.run.stage(manifest.iteration, manifest.kind).location.uri
        for entry in manifest.files:
            if not entry.path.startswith("rollouts-"):
                continue
            turns = rows(f"{place}/turns-{entry.path.removeprefix('rollouts-')}", "turns")
            for row in rows(f"{place}/{entry.path}", "rollouts"):
                own = [next(turns, {}) for _ in range(row["turns"])]
                if any(turn.get("rollout_id") != row["rollout_id"] for turn in own):
                    raise StoreError(
                        f"{place}/{entry.path}: the turns of {row['rollout_id']} are missing or out of order."
                    )
                if row["started_at"]:
                    yield rollout_spans(self.run, manifest, row, own, self.messages)
                else:
                    self.skipped += 1


def rows(uri: str, dataset: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, turns without tokens.

    Raises:
        StoreError: the file is missing or damaged.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    filesystem, path = located(uri)
    try:
        with pq.ParquetFile(path, filesystem=filesystem, page_checksum_verification=True) as file:
            names = [name for name in TURNS if name in file.schema_arrow.names] + ["generation_token_ids"]
            for batch in file.iter_batches(ROWS, columns=names if dataset == "turns" else None, use_threads=False):
                if dataset == "turns":
                    lengths = pc.list_value_length(batch.column("generation_token_ids"))
                    batch = batch.drop_columns(["generation_token_ids"]).append_column("generated", lengths)
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"{uri} cannot be read: {error}. Run `roundhouse store verify`.") from error


@contextlib.contextmanager
def collector(url: str) -> Iterator[Callable[[bytes], None]]:
    """Open a collector, and yield a function that sends a request to it.

    Raises:
        ConfigError: the collector refuses a request.
        DataError: it refuses some of the spans.
        InfraError: it does not answer, or is busy for too long.
    """
    import httpx

    address = url.rstrip("/") + "/v1/traces"
    pairs = (pair.partition("=") for pair in os.environ.get(HEADERS, "").split(",") if "=" in pair)
    headers = {name.strip(): unquote(value.strip()) for name, _, value in pairs}

    def send(line: bytes) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                reply = http.post(address, content=line)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}.{proxy_note(url)}"
            else:
                problem = f"answered {reply.status_code}: {reply.text[:300]}"
                if reply.status_code not in RETRIED:
                    break
            if attempt == ATTEMPTS:
                raise InfraError(f"{address} did not take the spans in {ATTEMPTS} attempts. The last one: {problem}")
            time.sleep(PAUSES.pause(attempt))
        if not reply.is_success:
            raise ConfigError(f"{address} {problem}. Correct --endpoint, or the headers in {HEADERS}.")
        if b"rejectedSpans" in reply.content and int(reply.json()["partialSuccess"]["rejectedSpans"]):
            raise DataError(f"{address} refused spans: {reply.text[:300]}")

    with http_client(url, foreign=True, timeout=60, headers={**headers, "content-type": "application/json"}) as http:
        yield send
