"""A faulty S3 endpoint: a proxy in front of a correct one that disturbs some requests.

    python -m tests.chaos.faulty_s3 --upstream http://127.0.0.1:5000 --port 0 --rate 0.05 --seed 1

Invariant: the upstream holds only data that clients sent; faults affect only the replies:

    error        500 InternalError, the request was not done
    throttle     503 SlowDown, the request was not done
    refused      the connection breaks, the request was not done
    lost reply   the request was done, then the connection breaks
    truncated    the request was done, half of the answer's body comes, then the connection breaks
    slow         the answer comes seconds late

Some faults are only planted singly, because not every client of a campaign can survive them:

    expired          400 ExpiredToken, and 400 without a body to a HEAD
    portal           200 with a page of HTML, the request was not done
    damaged          the request was done, one byte of the answer's body differs
    unconditional    If-None-Match is dropped
    bare 412         a 412 lacks the <Condition> that S3 gives
    501, 400         this status, if the request has If-None-Match
    foreign 404      404 with a text, as of a proxy before a stopped service; the request was not done
    bare             404 without headers or a body, as of a service with headers of its own to a HEAD
    redirect         301 without an address or a region, the request was not done
    moved            301 of S3 that names another region, the request was not done
    whole            the request was done without its Range
    shifted          the request was done, with the Range one byte later
    short            the request was done, half of the answer's body comes, with that length and without a checksum
    skewed           403 RequestTimeTooSkewed with the date of 2020, and without a body to a HEAD
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
from collections import Counter

from aiohttp import ClientSession, ClientTimeout, web

FAULTS = ("error", "throttle", "refused", "lost reply", "truncated", "slow")
_HOP = {"transfer-encoding", "connection", "content-encoding", "content-length"}


class FaultyS3:
    """The proxy; `GET /rh/faults` returns the number of faults of each kind."""

    def __init__(self, upstream: str, rate: float, seed: int, slow_seconds: float) -> None:
        self._upstream = upstream.rstrip("/")
        self._rate = rate
        self._slow_seconds = slow_seconds
        self._rng = random.Random(seed)
        self.made: Counter[str] = Counter()

    def application(self) -> web.Application:
        application = web.Application(client_max_size=2**30)
        application.router.add_get("/rh/faults", self._tell)
        application.router.add_route("*", "/{path:.*}", self._answer)
        application.cleanup_ctx.append(self._session)
        return application

    async def _session(self, application: web.Application):  # type: ignore[no-untyped-def]
        self._http = ClientSession(timeout=ClientTimeout(total=60), auto_decompress=False)
        yield
        await self._http.close()

    def fault(self, request: web.Request) -> str:
        """Return the fault for this request; usually None."""
        return self._rng.choice(FAULTS) if self._rng.random() < self._rate else ""

    def path(self, request: web.Request) -> str:
        """Return the path and query for the upstream."""
        return request.raw_path

    def told(self, request: web.Request, body: bytes) -> bytes:
        """Return the part of an answer's body that the client receives."""
        return body

    async def _tell(self, request: web.Request) -> web.Response:
        return web.json_response(dict(self.made))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        fault = self.fault(request)
        if fault:
            self.made[fault] += 1
        if fault == "error":
            return _said(500, "InternalError")
        if fault == "throttle":
            return _said(503, "SlowDown")
        if fault == "expired":
            return web.Response(status=400) if request.method == "HEAD" else _said(400, "ExpiredToken")
        if fault == "portal":
            return web.Response(text="<html><body>Please log in.</body></html>", content_type="text/html")
        if fault == "foreign 404":
            return web.Response(status=404, text="404 page not found")
        if fault == "bare":
            return web.Response(status=404)
        if fault == "redirect":
            return web.Response(status=301)
        if fault == "moved":
            reply = web.Response(status=301) if request.method == "HEAD" else _said(301, "PermanentRedirect")
            reply.headers["x-amz-bucket-region"] = "eu-west-1"
            return reply
        if fault == "skewed":
            reply = web.Response(status=403) if request.method == "HEAD" else _said(403, "RequestTimeTooSkewed")
            reply.headers["Date"] = "Wed, 01 Jan 2020 00:00:00 GMT"
            return reply
        if fault in ("501", "400") and "If-None-Match" in request.headers:
            return _said(int(fault), "NotImplemented" if fault == "501" else "InvalidArgument")
        if fault == "refused":
            return _break(request)
        if fault == "slow":
            await asyncio.sleep(self._slow_seconds)
        header = {"unconditional": "if-none-match", "whole": "range", "shifted": "range"}.get(fault, "")
        changed = {}
        if fault == "shifted" and (bounds := re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))):
            changed["Range"] = f"bytes={int(bounds[1]) + 1}-{int(bounds[2]) + 1}"
        async with self._http.request(
            request.method,
            f"{self._upstream}{self.path(request)}",
            headers={name: value for name, value in request.headers.items() if name.lower() != header} | changed,
            data=await request.read(),
            allow_redirects=False,
        ) as upstream:
            body = await upstream.read()
            headers = {name: value for name, value in upstream.headers.items() if name.lower() not in _HOP}
            status, body = upstream.status, self.told(request, body)
        if fault == "damaged" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        if fault == "short" and request.method == "GET":
            body = body[: len(body) // 2]
            headers = {name: value for name, value in headers.items() if not name.lower().startswith("x-amz-checksum")}
        if fault == "bare 412":
            body = re.sub(rb"<Condition>.*?</Condition>", b"", body)
        if fault == "lost reply":
            return _break(request)
        if fault == "truncated" and body:
            return await _half(request, status, headers, body)
        reply = web.Response(status=status, headers=headers, body=body)
        if request.method == "HEAD":
            reply.headers["Content-Length"] = upstream.headers.get("Content-Length", "0")
        return reply


def _said(status: int, code: str) -> web.Response:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>planted</Message></Error>"
    return web.Response(status=status, body=body, content_type="application/xml")


def _break(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def _half(request: web.Request, status: int, headers: dict[str, str], body: bytes) -> web.StreamResponse:
    reply = web.StreamResponse(status=status, headers=headers)
    reply.content_length = len(body)
    await reply.prepare(request)
    await reply.write(body[: len(body) // 2])
    if request.transport is not None:
        request.transport.abort()
    return reply


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow-seconds", type=float, default=2.0)
    options = parser.parse_args()
    proxy = FaultyS3(options.upstream, options.rate, options.seed, options.slow_seconds)
    web.run_app(proxy.application(), host="127.0.0.1", port=options.port, print=None)


if __name__ == "__main__":
    main()
