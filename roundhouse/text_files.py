"""Text files that people and programs hand over: their encoding, their lines, and JSON values on the lines.

Invariant: a text is either read exactly or refused with its place. Bytes are not replaced, and numbers are not rounded.

    EF BB BF … (UTF-8 with a byte-order mark)     the mark is skipped
    FF FE … (UTF-16), 4D FC … (Latin-1)           refused, with the encoding or the byte
    a 123456789012345678901                       refused: parsers of JSON round integers beyond 64 bits to a float
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from roundhouse.errors import DataError
from roundhouse.strict_json import DuplicateKey, read_json

_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_LONG_NUMBER = re.compile(rb"(?<![.\d])\d{19}")
"""Digits that may be an integer beyond 64 bits, also within a text. Log-probabilities have as many after their point."""
_LEAST, _GREATEST = -(2**63), 2**64 - 1


def decode_text(data: bytes, place: str) -> str:
    """Return the text of a UTF-8 file, without its byte-order mark.

    Args:
        place: names the file in the error.

    Raises:
        DataError: the data is not UTF-8; names the encoding, or the first wrong byte with its line and offset.
    """
    data = _without_mark(data, place)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _not_utf8(place, error, f" (line {line})") from None


def numbered_lines(chunks: Iterable[bytes], place: str) -> Iterator[tuple[int, bytes]]:
    """Yield line numbers (from 1) and raw lines that are not empty. Lines end in LF, CR LF or CR.

    Args:
        chunks: the file's bytes, cut at line ends.

    Raises:
        DataError: the file begins with the byte-order mark of another encoding than UTF-8.
    """
    number = 0
    for index, chunk in enumerate(chunks):
        for line in (_without_mark(chunk, place) if index == 0 else chunk).splitlines(keepends=True):
            number += 1
            if line.strip():
                yield number, line


def parse_json(line: bytes, place: str) -> Any:
    """Return the JSON value of a line.

    Args:
        place: names file and line in the error.

    Raises:
        DataError: the line is not JSON, not UTF-8, gives a key twice, or has an integer beyond 64 bits.
    """
    try:
        value = read_json(line)
    except DuplicateKey as error:
        raise DataError(f"{place}: {error}. Correct or remove the line.") from error
    except orjson.JSONDecodeError as error:
        try:
            line.decode()
        except UnicodeDecodeError as wrong:
            raise _not_utf8(place, wrong) from None
        hint = " It has zero bytes, as UTF-16 text has: save it as UTF-8." if b"\0" in line else ""
        raise DataError(f"{place} is not JSON: {error}.{hint} Correct or remove the line.") from error
    if _LONG_NUMBER.search(line):
        _refuse_rounded(line, place)
    return value


def _refuse_rounded(line: bytes, place: str) -> None:
    def checked(digits: str) -> int:
        if len(digits) > 20 or not _LEAST <= int(digits) <= _GREATEST:
            raise DataError(
                f"{place}: the integer {digits:.60} has more than 64 bits and would be rounded. Write it as a text, in quotes."
            )
        return int(digits)

    json.loads(line, parse_int=checked)


def _not_utf8(place: str, error: UnicodeDecodeError, line: str = "") -> DataError:
    byte = error.object[error.start]
    return DataError(f"{place} is not UTF-8 text: byte {byte:#04x} at offset {error.start}{line}. Save it as UTF-8.")


def _without_mark(data: bytes, place: str) -> bytes:
    for mark, encoding in _MARKS.items():
        if data.startswith(mark):
            raise DataError(f"{place} is {encoding} text, by its first bytes. Save it as UTF-8.")
    return data.removeprefix(codecs.BOM_UTF8)


def iter_lines(uri: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yield line numbers (from 1) and raw lines that are not empty.

    Raises:
        DataError: the file cannot be read, or its first bytes are those of another encoding than UTF-8.
    """
    import fsspec  # 40 ms

    try:
        with fsspec.open(str(uri), "rb") as file:
            yield from numbered_lines(file, str(uri))
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{uri} cannot be read: {error}. Check the path.") from error
