"""The patterns of configuration keys and form fields in words, for the error that a value which does not match gets.

Invariant: every pattern of a key or field has its words here (a test goes through all schemas): an expression is no remedy.
"""

from __future__ import annotations

_IN_WORDS = {
    r"^[a-z0-9][a-z0-9._-]{0,62}$": "small letters, digits, '.', '_' and '-', beginning with a letter or digit; at most 63",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$": "letters, digits, '.', '_' and '-', beginning with a letter or digit; at most 63",
    r"^[A-Za-z0-9][A-Za-z0-9._ -]{0,99}$": (
        "letters, digits, spaces, '.', '_' and '-', beginning with a letter or digit; at most 100"
    ),
    r"^[A-Za-z0-9:/._@=-]+$": "a dataset's name, <name>@<version>, <name>@all, or a path, without spaces",
    r"^[A-Za-z0-9]+([-_][A-Za-z0-9]+)*$": "letters and digits, parted by single '-' or '_'",
    r"^[A-Za-z_][A-Za-z0-9_]{0,99}$": "the name of an environment variable: letters, digits and '_', no digit first",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "the name of an environment variable: letters, digits and '_', no digit first",
    r"^(?:[\w.]+|.+\.py):[\w.]+$": "module:Class, or path/to/file.py:Class",
    r"^\d+(\.\d+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$": "a quantity as Kubernetes has it: 500m, 2, 4Gi",
    r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$": "small letters, digits and '-', no '-' first or last; at most 63",
    r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$": "small letters, digits, '.' and '-', none of the two first or last; at most 253",
    r"^[a-z0-9]+(\+[a-z0-9]+)?://": "a database's address with its driver, such as postgresql+asyncpg://…",
    r"^https?://\S+$": "an address that begins with http:// or https://",
    r"^https?://[^/]+": "an address that begins with http:// or https://",
    r"^https?://[^/\s]+": "an address that begins with http:// or https://",
    r"^/[\w./-]+$": "a path that begins with /: letters, digits, '.', '_', '/' and '-'",
    r"^\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d)?Z$": "a moment in UTC, such as 2026-11-21T02:00:00Z",
    r"^(newest|promoted|\d+)$": "newest, promoted, or the number of a version",
}


def in_words(pattern: str) -> str:
    """What a value must look like.

    >>> in_words("^https?://[^/]+")
    'an address that begins with http:// or https://'
    """
    if pattern.startswith("^(run_id|"):  # of an override; it lists all sections
        return "key.path=value, with a key of a run's configuration"
    return _IN_WORDS.get(pattern, f"text that matches {pattern}")
