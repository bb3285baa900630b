"""Requests to an S3 bucket, on an endpoint that fails, throttles, is slow or breaks connections.

Invariant: a request either gets its answer or ends in `StoreUnavailable` or the bucket's own refusal, within `ATTEMPT_SECONDS`
of its last attempt; attempts are repeated for what may pass by itself, with growing pauses drawn at random, so that many
writers that were throttled at once do not come back at once. Nothing here depends on wall-clock time.

The limits can be changed by the environment variables ROUNDHOUSE_STORE_RETRY_SECONDS and ROUNDHOUSE_STORE_ATTEMPT_SECONDS.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import fsspec

from roundhouse.errors import ConfigError, InfraError, StoreError
from roundhouse.retry import Backoff

Result = TypeVar("Result")

RETRY_SECONDS = 120.0
"""No attempt begins later than this after the first one failed."""
ATTEMPT_SECONDS = 600.0
"""One attempt may take this long, however slowly its bytes come."""
PAUSES = Backoff(0.1, longest=10.0, spread=0.5)
CHUNK_BYTES = 16 * 2**20
"""Objects of twice this size and more are written in parts of it, so that a cut costs a part and not the whole."""
PARTS_IN_FLIGHT = 4
"""Of one object: this many times `CHUNK_BYTES` is what an upload holds in memory."""
_MOST_PARTS = 10_000

_CONNECTIONS = {"connect_timeout": 10, "read_timeout": 60, "retries": {"mode": "standard", "total_max_attempts": 2}}
_PASSING_STATUS = {408, 409, 429}
_PASSING_CODES = {"BadDigest", "IncompleteBody", "RequestTimeout", "SlowDown", "XAmzContentSHA256Mismatch"}


class StoreUnavailable(StoreError, InfraError):
    """The bucket did not answer in time. Nothing is damaged; the same work may succeed later."""


def endpoint() -> str | None:
    """Where buckets are looked for; None: at AWS itself."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def open_bucket() -> Any:
    """A file system of fsspec for `s3://`; credentials, region and endpoint come from the environment."""
    filesystem = fsspec.filesystem("s3", use_listings_cache=False, default_fill_cache=False, config_kwargs=_CONNECTIONS)
    filesystem.retries = 2
    return filesystem


def answered(request: Callable[[float], Result]) -> Result:
    """What the request returns, asked again while its failures may pass.

    Args:
        request: called with its time limit in seconds.

    Raises:
        StoreUnavailable: it still fails when the time is over.
        OSError: what the bucket says no to, such as FileNotFoundError, or the client, such as a request without credentials.
    """
    from botocore.exceptions import BotoCoreError, NoCredentialsError

    patience, limit = _limit("RETRY", RETRY_SECONDS), _limit("ATTEMPT", ATTEMPT_SECONDS)
    begun = time.monotonic()
    for attempts in itertools.count(1):
        try:
            return request(limit)
        except Exception as error:
            if not may_pass(error):
                if isinstance(error, NoCredentialsError):
                    raise PermissionError(str(error)) from error
                if isinstance(error, BotoCoreError):
                    raise OSError(f"{type(error).__name__}: {error}") from error
                raise  # with its own cause, which holds S3's answer
            spent, pause = time.monotonic() - begun, PAUSES.pause(attempts)
            if spent + pause > patience:
                last = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                raise StoreUnavailable(
                    f"no answer after {attempts} attempts in {spent:.0f} s, the last with {last}. "
                    "Is the endpoint (AWS_ENDPOINT_URL) right and up? Start again when it is: what was committed is kept"
                ) from error
            time.sleep(pause)
    raise AssertionError("the count never ends")


def upload(filesystem: Any, path: str, chunks: Iterable[bytes], part_bytes: int = CHUNK_BYTES) -> None:
    """Write an object in parts as its bytes come; it appears whole, or not at all.

    Args:
        path: `bucket/key`.
        part_bytes: of a part but the last; at least 5 MiB, and a ten-thousandth of the object (S3's limits).
    """
    bucket, _, key = path.partition("/")
    place = {"Bucket": bucket, "Key": key}

    def call(operation: str, **arguments: Any) -> Any:
        return answered(lambda seconds: filesystem.call_s3(operation, **place, **arguments, timeout=seconds))

    parts = _parts(chunks, part_bytes)
    first = next(parts, b"")
    if len(first) < part_bytes:
        call("put_object", Body=first)
        return
    opened = {"UploadId": call("create_multipart_upload")["UploadId"]}

    def send(number: int, body: bytes) -> dict[str, Any]:
        return {
            "PartNumber": number,
            "ETag": call("upload_part", PartNumber=number, Body=body, **opened)["ETag"],
        }

    try:
        with ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="upload") as pool:
            done, sent = [], []
            for number, body in enumerate(itertools.chain([first], parts), 1):
                sent.append(pool.submit(send, number, body))
                if len(sent) == PARTS_IN_FLIGHT:
                    done.append(sent.pop(0).result())
            done += [one.result() for one in sent]
        call("complete_multipart_upload", MultipartUpload={"Parts": done}, **opened)
    except BaseException as error:
        if code_of(error) == "NoSuchUpload" and filesystem.exists(path):
            return  # it was completed, and the reply was lost
        with contextlib.suppress(Exception):
            filesystem.call_s3("abort_multipart_upload", **place, **opened)
        raise
    finally:
        filesystem.invalidate_cache(path)


def part_bytes_for(size: int) -> int:
    """Bytes of a part, so that an object of this size has no more parts than S3 takes."""
    return max(CHUNK_BYTES, -(-size // _MOST_PARTS))


def _parts(chunks: Iterable[bytes], part_bytes: int) -> Iterator[bytes]:
    waiting = bytearray()
    for chunk in chunks:
        waiting += chunk
        while len(waiting) >= part_bytes:
            yield bytes(waiting[:part_bytes])
            del waiting[:part_bytes]
    if waiting:
        yield bytes(waiting)


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    from aiohttp import ClientError as BrokenReply
    from botocore.exceptions import ConnectionError as Unreachable
    from botocore.exceptions import HTTPClientError
    from botocore.parsers import ResponseParserError

    if (response := _response(error)) is not None:
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return code_of(error) in _PASSING_CODES or status in _PASSING_STATUS or (status >= 500 and status != 501)
    passing = (HTTPClientError, Unreachable, BrokenReply, ResponseParserError, TimeoutError, ConnectionError)
    return isinstance(error, passing)


def code_of(error: BaseException) -> str:
    """S3's code of an error, such as SlowDown; empty when S3 did not say one."""
    response = _response(error)
    return "" if response is None else str(response.get("Error", {}).get("Code", ""))


def _response(error: BaseException) -> dict[str, Any] | None:
    """S3's answer: on the client's error, or on the one that s3fs made of it."""
    for each in (error, error.__cause__):
        if isinstance(found := getattr(each, "response", None), dict):
            return found
    return None


def _limit(name: str, default: float) -> float:
    variable = f"ROUNDHOUSE_STORE_{name}_SECONDS"
    given = os.environ.get(variable)
    try:
        seconds = default if given is None else float(given)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 86_400:
        raise ConfigError(f"{variable} is {given!r}: give seconds, above 0 and below 86400.")
    return seconds
