"""An S3 endpoint in this process with faults that a test plants singly: the chaos proxy under control.

with endpoint(s3_server) as planted:
    planted.plant("truncated", "GET .*part", times=2)     the next two such requests meet the fault
    planted.hide = re.compile("rollouts-a0001")           listings lack these keys
    planted.rewritten = ("<Key>", "<Key>x")                listings have the second text for the first, a regular expression
    planted.ghosts = {"store/x/rollouts-a0009.parquet"}   listings show these keys, which do not exist
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import s3fs
from aiohttp import web

from tests.chaos.faulty_s3 import FaultyS3


@dataclass
class Planted:
    fault: str
    pattern: re.Pattern[str]
    left: int


class Endpoint(FaultyS3):
    """The proxy, with faults by request line (`METHOD path?query`)."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream, rate=0, seed=0, slow_seconds=1.0)
        self.hide: re.Pattern[str] | None = None
        self.ghosts: set[str] = set()
        self.repeats_pages = False
        self.rewritten: tuple[str, str] | None = None
        self.refused_key: str | None = None
        self.seen: list[str] = []
        self._planted: list[Planted] = []

    def plant(self, fault: str, pattern: str, times: int = 10**9) -> None:
        self._planted.append(Planted(fault, re.compile(pattern), times))

    def heal(self) -> None:
        self._planted.clear()
        self.hide, self.ghosts, self.rewritten = None, set(), None

    def fault(self, request: web.Request) -> str:
        line = f"{request.method} {request.raw_path}"
        self.seen.append(line)
        if self.refused_key is not None and f"Credential={self.refused_key}/" in request.headers.get(
            "Authorization", ""
        ):
            return "expired"
        for planted in self._planted:
            if planted.left > 0 and planted.pattern.match(line):
                planted.left -= 1
                return planted.fault
        return ""

    def path(self, request: web.Request) -> str:
        return re.sub(r"&?continuation-token=p", "", request.raw_path) if self.repeats_pages else request.raw_path

    def told(self, request: web.Request, body: bytes) -> bytes:
        if "list-type" not in request.query:
            return body
        text = body.decode()
        if self.repeats_pages:
            more = "<IsTruncated>true</IsTruncated><NextContinuationToken>p</NextContinuationToken>"
            text = re.sub(r"<IsTruncated>\w+</IsTruncated>", more, text)
        if self.rewritten is not None:
            text = re.sub(*self.rewritten, text)
        if self.hide is not None:
            hidden = self.hide
            text = re.sub(
                r"<Contents>.*?</Contents>|<CommonPrefixes>.*?</CommonPrefixes>",
                lambda found: "" if hidden.search(found[0]) else found[0],
                text,
                flags=re.DOTALL,
            )
        prefix = request.query.get("prefix", "")
        shown = [_ENTRY.format(key) for key in sorted(self.ghosts) if key.startswith(prefix)]
        return text.replace("</ListBucketResult>", "".join(shown) + "</ListBucketResult>").encode()


_ENTRY = (
    "<Contents><Key>{}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>x</ETag><Size>9</Size>"
    "<StorageClass>STANDARD</StorageClass></Contents>"
)


@contextmanager
def endpoint(upstream: str) -> Iterator[Endpoint]:
    """The endpoint of AWS_ENDPOINT_URL for the time of the block."""
    proxy, loop, ready, done = Endpoint(upstream), asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    ports: list[int] = []

    async def serve() -> None:
        runner = web.AppRunner(proxy.application(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(runner.addresses[0][1])
        ready.set()
        await done.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(30)
    before = os.environ.get("AWS_ENDPOINT_URL")
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{ports[0]}"
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        yield proxy
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        if before is None:
            del os.environ["AWS_ENDPOINT_URL"]
        else:
            os.environ["AWS_ENDPOINT_URL"] = before
        loop.call_soon_threadsafe(done.set)
        thread.join(10)
