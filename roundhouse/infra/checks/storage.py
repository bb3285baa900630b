"""Can state and store be written, and does the store keep what it promises?

Invariant: a probe leaves nothing behind, and ends within its time limit even where a bucket's host does not answer.
"""

from __future__ import annotations

import os
import tempfile
import threading
import uuid
from contextlib import suppress
from pathlib import Path

from roundhouse.errors import RoundhouseError
from roundhouse.infra.checks.finding import Finding, fail, ok
from roundhouse.infra.checks.machine import nearest_existing
from roundhouse.store.location import AlreadyExists, Location

STORE_SECONDS = 15.0


def state(directory: Path) -> list[Finding]:
    try:
        with tempfile.TemporaryFile(dir=nearest_existing(directory)):
            pass
    except OSError as error:
        remedy = "Make it writable, or set infra.state to a directory of yours."
        return [fail("state", f"{directory} cannot be written: {error.strerror} ({error.filename})", remedy)]
    return [ok("state", f"{directory} can be written")]


def store(uri: str, time_limit: float = STORE_SECONDS) -> list[Finding]:
    """Write, read, conditional create and delete of one small object."""
    outcome: list[Finding] = []

    def work() -> None:
        try:
            outcome.append(_probe(uri))
        except Exception as error:  # noqa: BLE001 - whatever a storage library raises is the finding
            outcome.append(fail("store", f"{uri}: {type(error).__name__}: {error}", _remedy(uri)))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(time_limit)
    return outcome[:] or [fail("store", f"{uri} did not answer within {time_limit:.0f} s", _remedy(uri))]


def _probe(uri: str) -> Finding:
    try:
        location = Location(uri)
        if location.is_local:
            # A store that is not there yet is not made by looking at it.
            location = Location(str(nearest_existing(location.local_path)))
        name, data = f"doctor-{uuid.uuid4().hex}", b"probe"
        try:
            location.create(name, data)
            if location.read(name) != data:
                return fail("store", f"{uri} gives back other bytes than were written", _remedy(uri))
            if not _refuses_second_writer(location, name):
                detail = f"{uri} lets a second writer replace an object that must be created once"
                return fail("store", detail, "Use storage with conditional writes (If-None-Match), as S3 has them.")
        finally:
            with suppress(RoundhouseError):
                location.delete(name)
    except (RoundhouseError, NotADirectoryError) as error:
        return fail("store", f"{uri}: {error}", _remedy(uri))
    return ok("store", f"{uri}: write, read, conditional create and delete work")


def _refuses_second_writer(location: Location, name: str) -> bool:
    try:
        location.create(name, b"second")
    except AlreadyExists:
        return True
    return False


def _remedy(uri: str) -> str:
    if uri.startswith("s3://"):
        endpoint = os.environ.get("AWS_ENDPOINT_URL", "the default one")
        return f"Check bucket, credentials (AWS_ACCESS_KEY_ID, …), region and endpoint (AWS_ENDPOINT_URL: {endpoint})."
    return "Make the directory writable, or set `store` to another one."
