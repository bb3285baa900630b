"""No server fills the memory of a client: replies have a limit, and none is unpacked."""

import asyncio
import contextlib
import gzip
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import httpx2
import pytest

from roundhouse.config.models import GenerationConfig, Sampling
from roundhouse.config.rubrics import Rubric
from roundhouse.errors import DataError, InfraError
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.http.clients import async_http_client, http_client
from roundhouse.http.replies import ReplyRefused
from roundhouse.rollout.rubric import RubricJudge

ROOT = Path(__file__).parents[2]
REPLIES = {
    "announced": b"Content-Length: 1048577\r\n\r\n" + b"0" * 1048577,
    "endless": b"Connection: close\r\n\r\n" + b"0" * (3 << 20),
    "gzip": b"Connection: close\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(b"0" * 1000),
}


@asynccontextmanager
async def answering(reply: bytes, status: bytes = b"200 OK") -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + status + b"\r\n" + reply)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def connection(url: str) -> None:
    client = pytest.importorskip("roundhouse.plugins.nemo_gym.clients.connection").Connection(url)
    try:
        await client.get("tools")
    finally:
        await client.close()


async def policy(url: str) -> None:
    async with HttpPolicyClient(url, GenerationConfig()) as client:
        await client.complete([{"role": "user", "content": "hi"}], [], Sampling(), 1)


async def sync(url: str, seconds: float = 20) -> None:
    with http_client(url, timeout=seconds) as client:
        await asyncio.to_thread(client.get, url)


async def async_client(url: str, seconds: float = 20) -> None:
    async with async_http_client(httpx, url, timeout=seconds) as client:
        await client.get(url)


async def mcp(url: str) -> None:
    async with async_http_client(httpx2, url, timeout=20) as client:
        await client.get(url)


@pytest.mark.parametrize("ask", [connection, policy, sync, async_client, mcp])
@pytest.mark.parametrize("kind", list(REPLIES))
async def test_a_reply_beyond_the_limit_or_compressed_is_refused_with_the_remedy(
    kind: str, ask: Callable[[str], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDHOUSE_MAX_BODY_MIB", "1")
    async with answering(REPLIES[kind]) as url:
        with pytest.raises(ReplyRefused, match="Turn compression off" if kind == "gzip" else "ROUNDHOUSE_MAX_BODY_MIB"):
            await ask(url)


async def judge(url: str) -> None:
    criteria = {"criteria": {"a": {"question": "?"}}, "judge": {"base_url": url, "model": "m"}}
    rubric = RubricJudge(Rubric.model_validate(criteria))
    try:
        await rubric.post([])
    finally:
        await rubric.close()


@pytest.mark.parametrize("ask", [connection, policy, sync, async_client, mcp, judge])
async def test_no_client_follows_a_redirect(ask: Callable[[str], Awaitable[None]]) -> None:
    followed = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        followed.append(await reader.readuntil(b"\r\n"))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        elsewhere = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/latest/meta-data"
        reply = f"Location: {elsewhere}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        async with answering(reply, b"307 Temporary Redirect") as url:
            with contextlib.suppress(InfraError, DataError):
                await ask(url)
    assert not followed


@pytest.mark.parametrize("ask", [sync, async_client])
async def test_a_body_that_comes_byte_by_byte_has_the_time_of_one_read(
    ask: Callable[[str, float], Awaitable[None]],
) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"0")
                await writer.drain()
                await asyncio.sleep(0.05)

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(httpx.ReadTimeout, match="has not sent the whole reply"):
            await asyncio.wait_for(ask(url, 0.5), 20)


@pytest.mark.parametrize("ask", [policy, sync, async_client])
async def test_no_client_sends_a_cookie_back_that_a_server_has_set(ask: Callable[[str], Awaitable[None]]) -> None:
    """A cookie of bytes that no header may hold would fail every later request of the client."""
    requests = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                requests.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(
                    b"HTTP/1.1 307 Elsewhere\r\nSet-Cookie: a=\xff\r\nSet-Cookie: b=c\r\nContent-Length: 0\r\n\r\n"
                )

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://localhost:{server.sockets[0].getsockname()[1]}"
        if ask is policy:
            async with HttpPolicyClient(url, GenerationConfig()) as client:
                for _ in range(2):
                    with contextlib.suppress(InfraError):
                        await client.complete([{"role": "user", "content": "hi"}], [], Sampling(), 1)
        elif ask is sync:
            with http_client(url, timeout=5) as http:
                await asyncio.to_thread(lambda: [http.get("/"), http.get("/")])
        else:
            async with async_http_client(httpx, url, timeout=5) as http:
                await http.get("/")
                await http.get("/")
    assert [b"cookie" in request.lower() for request in requests[-2:]] == [False, False]


@pytest.mark.parametrize("charset", ["idna", "base64", "utf-7", "nonsense"])
async def test_the_text_of_a_reply_does_not_depend_on_the_charset_that_it_names(charset: str) -> None:
    head = f"Connection: close\r\nContent-Type: text/html; charset={charset}\r\n\r\n".encode()
    async with (
        answering(head + "ü\udcff".encode(errors="surrogateescape")) as url,
        async_http_client(httpx, url) as client,
    ):
        assert (await client.get(url)).text == "ü\ufffd"


DRIPS = {
    "headers": (b"HTTP/1.1 200 OK\r\nX: ", b"0"),
    "interim replies": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "events": (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", b":\n"),
}


@pytest.mark.parametrize("ask", [sync, async_client])
@pytest.mark.parametrize("kind", DRIPS)
async def test_a_reply_without_end_has_the_time_of_one_read(
    kind: str, ask: Callable[[str, float], Awaitable[None]]
) -> None:
    beginning, drop = DRIPS[kind]

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(beginning)
        with contextlib.suppress(ConnectionError):
            for _ in range(200):  # the server ends, so that a client without the limit fails the test and ends
                writer.write(drop)
                await writer.drain()
                await asyncio.sleep(0.05)
        writer.close()

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(httpx.ReadTimeout):
            await asyncio.wait_for(ask(url, 0.3), 20)


UNLIMITED = re.compile(
    r"aiohttp\.ClientSession\(|httpx2?\.(Client|AsyncClient|get|post|put|request|stream)\(|urlopen\(|"
    r"await reply\.(read|json|text)\("
)


def test_every_http_client_is_made_with_the_limit() -> None:
    found = []
    for folder in ("roundhouse", "flows", "tasks"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if file.name != "clients.py" and (match := UNLIMITED.search(file.read_text())):
                found.append(f"{file.relative_to(ROOT)}: {match[0]}")
    assert not found, "make these by roundhouse.http.clients"
