"""The S3 client of the store, which verifies that S3 answers.

Invariants
- A success counts only with the field that every S3 service gives for its operation, such as the ETag of a written object.
  The login page of a network answers each request with 200 and HTML, so a status alone proves nothing.
- An object is missing only if S3 reports it: a proxy before a service that restarts answers 404, too.
- A range has the bytes that were requested. A proxy may ignore the range, or compress the body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_plus

from s3fs import S3FileSystem

from roundhouse.store.bucket import ForeignReply

_PAGE, _PREFIX, _RANGE = "roundhouse_page", "roundhouse_prefix", "roundhouse_range"
_REDIRECTS = {301, 302, 303, 307, 308}
_OWN_HEADERS = ("x-amz", "x-goog", "x-guploader")
"""Beginnings of headers that only a service of S3's protocol sends; AWS, MinIO and Ceph number every request in one."""
_PAGES = ("text/", "application/json")
"""Content types that no S3 service has for an error."""
_PROOFS: dict[str, set[str]] = {
    "CompleteMultipartUpload": {"ETag"},
    "CopyObject": {"CopyObjectResult"},
    "CreateMultipartUpload": {"UploadId"},
    "GetObject": {"ETag"},
    "HeadObject": {"ETag"},
    "ListObjectsV2": {"IsTruncated", "KeyCount", "MaxKeys", "Name"},
    "PutObject": {"ETag"},
    "UploadPart": {"ETag"},
    "UploadPartCopy": {"CopyPartResult"},
}
"""Fields by operation, any of which shows that S3 answered. A reply of another operation must not be a page of HTML."""


class BucketClient(S3FileSystem):
    """A file system of one or more buckets that raises `ForeignReply` for the reply of another program."""

    async def set_session(self, refresh: bool = False, kwargs: dict[str, Any] | None = None) -> Any:
        client = await super().set_session(refresh, kwargs or {})
        events = client.meta.events
        events.register("before-parameter-build.s3.ListObjectsV2", _note_page, unique_id="roundhouse-page")
        events.register("before-parameter-build.s3.GetObject", _note_range, unique_id="roundhouse-range")
        events.register_first("needs-retry.s3.HeadBucket", _reject_redirect, unique_id="roundhouse-redirect")
        events.register("after-call.s3", verify_reply, unique_id="roundhouse")
        return client

    async def _cat_file(self, path: str, version_id: str | None = None, **options: Any) -> bytes:
        """Read an object, or its range of bytes `start` to `end`.

        Raises:
            ForeignReply: a whole object has another size than the service reported just before.
        """
        if options.get("start") is not None or options.get("end") is not None:
            return await super()._cat_file(path, version_id, **options)
        size = await self._size(path)
        if size > self.default_block_size:
            bucket, key, version = self.split_path(path)
            return await self._cat_file_concurrent(
                bucket, key, size, self.default_block_size, version_id=version_id or version
            )
        data = await super()._cat_file(path, version_id, max_concurrency=1)
        if len(data) != size:
            raise ForeignReply(f"GetObject: {len(data)} bytes, but the object has {size}")
        return data


def _note_page(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
    context[_PAGE], context[_PREFIX] = params.get("ContinuationToken"), params.get("Prefix", "")


def _note_range(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
    context[_RANGE] = params.get("Range")


def _reject_redirect(response: tuple[Any, dict[str, Any]] | None, **_: Any) -> None:
    """Reject a redirection of the request by which the client asks for a bucket's region: to follow it, the client asks
    for the region again, without end.

    Raises:
        ForeignReply: the reply redirects without a region.
    """
    if response is not None and response[0].status_code in _REDIRECTS:
        reply, _parsed = response
        if "x-amz-bucket-region" not in reply.headers:
            raise ForeignReply(_redirection("HeadBucket", reply))


def _redirection(operation: str, reply: Any) -> str:
    target = reply.headers.get("location")
    return (
        f"{operation}: HTTP {reply.status_code} redirects to {target or 'nothing'}. Name the address of the service itself "
        "(AWS_ENDPOINT_URL), or the bucket's region (AWS_DEFAULT_REGION)"
    )


def verify_reply(
    http_response: Any, parsed: dict[str, Any], model: Any, context: dict[str, Any] | None = None, **_: Any
) -> None:
    """Reject a reply that S3 did not give.

    Raises:
        ForeignReply: a success without the field that proves it, or with HTML; a refusal by another program; other bytes
            than the requested range; a page of another list, or of one without an end.
    """
    if http_response.status_code >= 300:
        _verify_refusal(http_response, parsed, model.name)
        return
    kind = http_response.headers.get("content-type", "without a content type")
    proofs = _PROOFS.get(model.name)
    is_page = http_response.status_code == 200 and kind.startswith("text/html")
    has_no_size = model.name == "HeadObject" and "ContentLength" not in parsed  # such as a proxy that compresses
    if has_no_size or (not proofs & parsed.keys() if proofs else is_page):
        raise ForeignReply(
            f"{model.name}: HTTP {http_response.status_code}, {kind}, but nothing that S3 gives: another program answers at "
            "this endpoint, such as the login page of a network or a proxy"
        )
    if model.name == "GetObject" and (byte_range := (context or {}).get(_RANGE)):
        _verify_range(http_response.status_code, parsed, byte_range)
    if model.name == "ListObjectsV2" and context is not None and _PREFIX in context:
        _verify_list(parsed, context[_PREFIX], context[_PAGE])


def _verify_refusal(reply: Any, parsed: dict[str, Any], operation: str) -> None:
    status, kind = reply.status_code, reply.headers.get("content-type", "")
    code = str(parsed.get("Error", {}).get("Code", ""))
    if code not in ("", str(status)) or _is_of_s3(reply.headers):
        return  # S3 named its reason, or answers without one, as to each HEAD
    if status in _REDIRECTS:
        raise ForeignReply(_redirection(operation, reply))
    # Services with other headers of their own answer a HEAD with a bare 404, a proxy with a page
    if kind.startswith(_PAGES) or (status == 404 and not operation.startswith("Head")):
        raise ForeignReply(
            f"{operation}: HTTP {status}, {kind or 'without a content type'}, but not an error of S3: another program answers "
            "at this endpoint, such as a proxy before a stopped service"
        )


def _is_of_s3(headers: Mapping[str, str]) -> bool:
    return "xml" in headers.get("content-type", "") or any(name.lower().startswith(_OWN_HEADERS) for name in headers)


def _verify_range(status: int, parsed: dict[str, Any], wanted: str) -> None:
    """Verify that the reply has the bytes from the range's first one to its last, or to the object's end."""
    if (bounds := re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)) is None:
        return
    first, last = int(bounds[1]), int(bounds[2])
    length = int(parsed.get("ContentLength", 0))
    described = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", str(parsed.get("ContentRange", "")))
    if described is not None:
        begin, end, total = map(int, described.groups())
        is_right = (begin, end, length) == (first, min(last, total - 1), end - begin + 1)
    else:
        is_right = status == 200 and first == 0 and length <= last + 1  # a service may send a short object whole
    if not is_right:
        raise ForeignReply(
            f"GetObject: {length} bytes ({parsed.get('ContentRange', 'without Content-Range')}) in reply to {wanted}: a proxy "
            "ignores or changes ranges"
        )


def _verify_list(parsed: dict[str, Any], prefix: str, page: str | None) -> None:
    """Verify that a page lists what was asked for, and that the list has an end."""
    following = parsed.get("NextContinuationToken")
    if page is not None and following == page:
        raise ForeignReply(f"ListObjectsV2: the page after {page!r} is itself, so that the list has no end")
    if parsed.get("IsTruncated") and not following:
        raise ForeignReply("ListObjectsV2: the page is not the last one, but the next one is not named")
    listed = [each.get("Key", "") for each in parsed.get("Contents", ())]
    listed += [each.get("Prefix", "") for each in parsed.get("CommonPrefixes", ())]
    for name in [parsed.get("Prefix", prefix), *listed]:
        if not name.startswith(prefix) and not unquote_plus(name).startswith(prefix):
            raise ForeignReply(f"ListObjectsV2: {name!r} in the list of {prefix!r}")
