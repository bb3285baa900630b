"""Requests to an S3 bucket, on an endpoint that fails, throttles, is slow or breaks connections.

Invariant: a request either gets its answer or ends in `StoreUnavailable` or the bucket's own refusal, within `ATTEMPT_SECONDS`
of its last attempt; attempts are repeated for what may pass by itself, with growing pauses drawn at random, so that many
writers that were throttled at once do not come back at once. Nothing here depends on wall-clock time.

Expired credentials are read anew before each further attempt, since a person or a credential process may renew them.

`create` relies on conditional writes (If-None-Match). `verify_conditional_writes` tests a bucket for them: a service that
ignores the condition lets two writers win.

The limits can be changed by the environment variables ROUNDHOUSE_STORE_RETRY_SECONDS and ROUNDHOUSE_STORE_ATTEMPT_SECONDS.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn, TypeVar

from roundhouse.config.secrets import masked_text
from roundhouse.errors import ConfigError, InfraError, StoreError
from roundhouse.http.clients import is_on_this_machine, proxy_note
from roundhouse.retry import Backoff

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

RETRY_SECONDS = 120.0
"""No attempt begins later than this after the first one failed."""
ATTEMPT_SECONDS = 600.0
"""One attempt may take this long, however slowly its bytes come."""
PAUSES = Backoff(0.1, longest=10.0, spread=0.5)
CHUNK_BYTES = 16 * 2**20
"""Objects of twice this size and more are written in parts of it, so that a cut costs a part and not the whole."""
PARTS_IN_FLIGHT = 4
"""Parts per upload in flight; an upload holds this many times `CHUNK_BYTES` in memory."""
_MOST_PARTS = 10_000
_DELETE_SECONDS = 10.0
_MOST_SKEW_SECONDS = 15 * 60.0
"""Between the clock of a request and S3's."""

_CONNECTIONS = {"connect_timeout": 10, "read_timeout": 60, "retries": {"mode": "standard", "total_max_attempts": 2}}
_PASSING_STATUS = {408, 409, 429}
_PASSING_CODES = {"BadDigest", "IncompleteBody", "RequestTimeout", "SlowDown", "XAmzContentSHA256Mismatch"}
_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "InvalidTokenId", "RequestExpired", "TokenRefreshRequired"}
"""S3, MinIO and Ceph name expired credentials by these codes."""
_BARE_BAD_REQUEST = "400"
"""Code of a refusal without a body: S3 answers a HEAD with expired credentials so."""


class StoreUnavailable(StoreError, InfraError):
    """The bucket did not answer in time. Nothing is damaged; the same work may succeed later."""


class NoConditionalWrites(StoreError):
    """The service of the bucket ignores or refuses If-None-Match, so that it cannot choose one of several writers."""

    def __init__(self, symptom: str) -> None:
        super().__init__(
            f"The service at {endpoint() or 'the endpoint of AWS'} {symptom}. Use storage with conditional writes "
            "(If-None-Match: *), such as AWS S3, MinIO or Ceph: upgrade the service, let the proxy before it pass this header, "
            "or name another `store`."
        )


class ForeignReply(ConnectionError):
    """Another program than S3 answered, such as the login page of a network."""


def endpoint() -> str | None:
    """Return the service endpoint; None: AWS."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def open_bucket() -> Any:
    """Return a file system of fsspec for `s3://`. Credentials, region and endpoint come from the environment."""
    from roundhouse.store.bucket_client import BucketClient

    url = endpoint()
    direct: dict[str, Any] = {"proxies": {}} if url is not None and is_on_this_machine(url) else {}
    filesystem = BucketClient(
        endpoint_url=url, use_listings_cache=False, default_fill_cache=False, config_kwargs=_CONNECTIONS | direct
    )
    filesystem.retries = 2
    return filesystem


def answered(filesystem: Any, request: Callable[[float], Result]) -> Result:
    """Return the result of the request. Repeat it while its failures may pass.

    Args:
        filesystem: of the bucket; it reads its credentials anew after they have expired.
        request: called with its time limit in seconds.

    Raises:
        StoreUnavailable: it still fails when the time is over.
        OSError: a refusal of the bucket, such as FileNotFoundError, or of the client, such as a request without credentials.
    """
    patience, limit = _limit("RETRY", RETRY_SECONDS), _limit("ATTEMPT", ATTEMPT_SECONDS)
    start, last = time.monotonic(), None
    for attempts in itertools.count(1):
        try:
            if last is not None and has_expired_credentials(last):
                filesystem.connect(refresh=True)
            return request(limit)
        except Exception as error:
            if not may_pass(error):
                _raise_refusal(error)
            spent, pause = time.monotonic() - start, PAUSES.pause(attempts)
            if spent + pause > patience:
                raise StoreUnavailable(_last_words(error, attempts, spent)) from error
            if has_expired_credentials(error) and (last is None or not has_expired_credentials(last)):
                logger.warning(
                    "The credentials of the bucket have expired. Waiting up to %.0f s for new ones.", patience
                )
            last = error
            time.sleep(pause)
    raise AssertionError("the count never ends")


def _raise_refusal(error: Exception) -> NoReturn:
    """Raise an error of the client as an OSError, and any other with its own cause, which holds S3's answer."""
    from botocore.exceptions import BotoCoreError, NoCredentialsError

    if isinstance(error, NoCredentialsError):
        raise PermissionError(str(error)) from error
    if isinstance(error, BotoCoreError):
        raise OSError(f"{type(error).__name__}: {error}") from error
    raise error


def _last_words(error: Exception, attempts: int, spent: float) -> str:
    last = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if has_expired_credentials(error):
        remedy = (
            "The credentials have expired: renew them (AWS_SESSION_TOKEN, `aws sso login` or the credential process), then "
            "start again. Committed data is kept"
        )
    else:
        note = proxy_note(endpoint() or "https://s3.amazonaws.com")
        remedy = f"Check that the endpoint (AWS_ENDPOINT_URL) is right and up.{note} Then start again. Committed data is kept"
    return f"no answer after {attempts} attempts in {spent:.0f} s, the last with {last.rstrip('.')}. {remedy}"


def create(filesystem: Any, path: str, data: bytes) -> None:
    """Create an object by a conditional write.

    Args:
        path: `bucket/key`.

    Raises:
        FileExistsError: the object exists.
        NoConditionalWrites: the service refuses the condition.
    """

    def request(seconds: float) -> None:
        try:
            filesystem.pipe_file(path, data, mode="create", chunksize=CHUNK_BYTES, timeout=seconds)
        except OSError as error:
            status = _status_of(error)
            if status == 412:  # s3fs recognizes it only by a <Condition>, which some services omit
                raise FileExistsError(path) from error
            if status in (400, 501) and code_of(error) not in _EXPIRED_CODES | _PASSING_CODES:
                raise NoConditionalWrites(
                    f"refuses a conditional write ({status}: {masked_text(str(error))})"
                ) from error
            raise

    answered(filesystem, request)


@dataclass(frozen=True)
class BucketProbe:
    """A test of a bucket's conditional writes. Two probes of one bucket are equal, so that a process makes only the first."""

    endpoint: str | None
    bucket: str
    filesystem: Any = field(compare=False)
    path: str = field(compare=False)
    """`bucket/key` of an object that the probe makes and deletes."""


@functools.cache
def verify_conditional_writes(probe: BucketProbe) -> None:
    """Write an object, and reject a service that lets a conditional write replace it.

    Raises:
        NoConditionalWrites: the service ignores or refuses the condition.
    """
    filesystem, path = probe.filesystem, probe.path
    answered(filesystem, lambda seconds: filesystem.pipe_file(path, b"first", timeout=seconds))
    try:
        create(filesystem, path, b"second")
    except FileExistsError:
        return
    finally:
        with contextlib.suppress(Exception):
            filesystem.rm_file(path, timeout=_DELETE_SECONDS)
    raise NoConditionalWrites("ignores the condition of a write and lets a second writer replace an object")


def upload(filesystem: Any, path: str, chunks: Iterable[bytes], part_bytes: int = CHUNK_BYTES) -> None:
    """Write an object in parts as its bytes come; it appears whole, or not at all.

    Args:
        path: `bucket/key`.
        part_bytes: of a part but the last; at least 5 MiB, and a ten-thousandth of the object (S3's limits).
    """
    bucket, _, key = path.partition("/")
    place = {"Bucket": bucket, "Key": key}

    def call(operation: str, **arguments: Any) -> Any:
        return answered(
            filesystem, lambda seconds: filesystem.call_s3(operation, **place, **arguments, timeout=seconds)
        )

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
            uploaded, sent = [], []
            for number, body in enumerate(itertools.chain([first], parts), 1):
                sent.append(pool.submit(send, number, body))
                if len(sent) == PARTS_IN_FLIGHT:
                    uploaded.append(sent.pop(0).result())
            uploaded += [one.result() for one in sent]
        call("complete_multipart_upload", MultipartUpload={"Parts": uploaded}, **opened)
    except BaseException as error:
        if code_of(error) == "NoSuchUpload" and filesystem.exists(path):
            return  # it was completed, and the reply was lost
        with contextlib.suppress(Exception):
            filesystem.call_s3("abort_multipart_upload", **place, **opened)
        raise
    finally:
        filesystem.invalidate_cache(path)


def part_bytes_for(size: int) -> int:
    """Return the part size at which an object of this size does not exceed S3's number of parts."""
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
    """Return whether the same request may succeed later."""
    from aiohttp import ClientError as BrokenReply
    from botocore.exceptions import ConnectionError as Unreachable
    from botocore.exceptions import FlexibleChecksumError, HTTPClientError
    from botocore.parsers import ResponseParserError

    if has_expired_credentials(error):
        return True
    if status := _status_of(error):
        return code_of(error) in _PASSING_CODES or status in _PASSING_STATUS or (status >= 500 and status != 501)
    transport = (HTTPClientError, Unreachable, BrokenReply, ResponseParserError, FlexibleChecksumError)
    return isinstance(error, (*transport, TimeoutError, ConnectionError))


def has_expired_credentials(error: BaseException) -> bool:
    """Return whether a request failed since its credentials are too old, or could not be renewed."""
    from botocore.exceptions import CredentialRetrievalError, SSOError, TokenRetrievalError

    if isinstance(error, (CredentialRetrievalError, SSOError, TokenRetrievalError)):
        return True
    return code_of(error) in _EXPIRED_CODES | {_BARE_BAD_REQUEST}


def is_clock_wrong(error: BaseException) -> bool:
    """Return whether S3 refused a request since this machine's clock is wrong; the reply to a HEAD has only its date."""
    if code_of(error) == "RequestTimeTooSkewed":
        return True
    headers = ((_response(error) or {}).get("ResponseMetadata") or {}).get("HTTPHeaders") or {}
    try:
        server_time = parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return False
    return abs(server_time - time.time()) > _MOST_SKEW_SECONDS


def is_redirected(error: BaseException) -> bool:
    """Return whether S3 names another region for the bucket, also after the client has followed it once."""
    return _status_of(error) == 301


def code_of(error: BaseException) -> str:
    """Return S3's code of an error, such as SlowDown; empty if the reply does not contain one."""
    response = _response(error)
    return "" if response is None else str(response.get("Error", {}).get("Code", ""))


def _status_of(error: BaseException) -> int:
    """Return the HTTP status of S3's answer; 0 if the error is not an answer."""
    response = _response(error)
    return 0 if response is None else int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _response(error: BaseException) -> dict[str, Any] | None:
    """Return S3's response from the client's error, or from the s3fs error that wraps it."""
    for each in (error, error.__cause__):
        if isinstance(response := getattr(each, "response", None), dict):
            return response
    return None


def _limit(name: str, default: float) -> float:
    variable = f"ROUNDHOUSE_STORE_{name}_SECONDS"
    value = os.environ.get(variable)
    try:
        seconds = default if value is None else float(value)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 86_400:
        raise ConfigError(f"{variable} is {value!r}: give seconds, above 0 and below 86400.")
    return seconds
