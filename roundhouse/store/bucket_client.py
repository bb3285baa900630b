"""The S3 client of the store, which verifies that S3 answers.

Invariant: a reply counts only with the field that every S3 service gives for its operation, such as the ETag of a written
object. The login page of a network answers each request with 200 and HTML, so a status alone proves nothing.
"""

from __future__ import annotations

from typing import Any

from s3fs import S3FileSystem

from roundhouse.store.bucket import ForeignReply

_PAGE = "roundhouse_page"
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
        events.register("after-call.s3", verify_reply, unique_id="roundhouse")
        return client


def _note_page(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
    context[_PAGE] = params.get("ContinuationToken")


def verify_reply(
    http_response: Any, parsed: dict[str, Any], model: Any, context: dict[str, Any] | None = None, **_: Any
) -> None:
    """Reject a reply that S3 did not give.

    Raises:
        ForeignReply: a success without the field that proves it, or with HTML; a page of a list whose next page is itself.
    """
    if http_response.status_code >= 300:
        return
    kind = http_response.headers.get("content-type", "without a content type")
    proofs = _PROOFS.get(model.name)
    is_page = http_response.status_code == 200 and kind.startswith("text/html")
    if not proofs & parsed.keys() if proofs else is_page:
        raise ForeignReply(
            f"{model.name}: HTTP {http_response.status_code}, {kind}, but nothing that S3 gives: another program answers at "
            "this endpoint, such as the login page of a network or a proxy"
        )
    page = (context or {}).get(_PAGE)
    if page is not None and parsed.get("NextContinuationToken") == page:
        raise ForeignReply(f"{model.name}: the page after {page!r} is itself, so that the list has no end")
