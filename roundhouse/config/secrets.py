"""Secrets: their sources, their absence from configurations, and their masking.

Invariants: a run's configuration, which is written to run.json, shown by Prefect and MLflow, and printed, holds only
the name of an environment variable or of a file with the secret (`refuse_secrets`). Masking never changes the shape of
a tree. It replaces any value under a key that names keys, tokens, passwords, secrets or credentials, the user part of a
URL, and well-known kinds of credentials. Counts and switches (`max_output_tokens: 64`, `return_token_id_information:
true`) stay.

    environment: {kind: custom, target: "judge:Judge", parameters: {api_key: {variable: JUDGE_KEY}}}
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, Field, ValidationInfo

from roundhouse.config.section import Consent, is_recorded
from roundhouse.errors import ConfigError

MASK = "****"

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$"), Consent("secret")]
"""Name of an environment variable that holds a secret, never the secret itself."""

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# fmt: off
_SECRET_WORDS = frozenset((
    "key", "keys", "apikey", "token", "tokens", "secret", "secrets", "password", "passwd", "passphrase", "credential",
    "credentials", "creds", "authorization", "auth", "bearer", "cookie", "pwd", "sas",
))
_PLAIN_WORDS = frozenset(("key", "keys", "tokens"))
"""Words that mean a secret only after one of the next words: `api_key`, not `sort_key`; `max_tokens` is a count."""
_OWNERS = frozenset(("api", "access", "auth", "secret", "private", "service", "account", "subscription", "signing"))
# fmt: on
_SCHEMES = frozenset(("none", "basic", "bearer", "digest", "oauth2", "token"))
"""The way of authentication, not the credential: `auth: bearer`."""
_NAME, _PLACEHOLDERS = re.compile(r"[A-Za-z_][\w .-]*"), "${<%="
_SIGNATURES = frozenset(("sig", "signature", "x-amz-signature", "x-goog-signature"))
"""Parameters of a URL's query: such a URL by itself permits the signed action."""
_TEXT_TOKENS = frozenset(("bos", "cls", "end", "eos", "image", "mask", "pad", "sep", "special", "start", "stop", "unk"))
"""Before `token`, which is then one of a vocabulary."""
_USER = re.compile(r"\b(\w+)://([^/@\s]+)@")
_URL_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_CREDENTIAL = re.compile(
    r"\b(A[KS]IA[0-9A-Z]{16}|sk-[A-Za-z0-9_-]{20,}|hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{22,}"
    r"|glpat-[\w-]{16,}|xox[abprs]-[A-Za-z0-9-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|(?i:\bbearer) [A-Za-z0-9._~+/-]{16,}"
    r"|\bhooks\.slack\.com/(services|workflows|triggers)/[\w/]+"
)


def read_secret(variable: str, file: str | None = None) -> str | None:
    """The secret from a file, else the environment variable, else the file that `<variable>_FILE` names; None without any.

    Raises:
        ConfigError: a file cannot be read or is empty.
    """
    if file is None:
        if value := os.environ.get(variable):
            return value
        if not (file := os.environ.get(f"{variable}_FILE")):
            return None
    try:
        secret = Path(file).read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"The secret file {file} cannot be read: {error}") from error
    if not secret:
        raise ConfigError(f"The secret file {file} is empty.")
    return secret


def is_secret_name(name: str) -> bool:
    """Return whether a key names a secret: `api_key`, `DB_PASSWORD`, `hfToken`; not `token_file`, `sort_key`."""
    words = _words(name)
    before, last = words[-2:-1], words[-1:]
    if not last or last[0] not in _SECRET_WORDS or (last == ["token"] and not _TEXT_TOKENS.isdisjoint(before)):
        return False
    return last[0] not in _PLAIN_WORDS or not _OWNERS.isdisjoint(before)


def refuse_secrets(tree: Any, *, by_name: bool) -> None:
    """Refuse a tree of configuration that holds a secret.

    Args:
        by_name: also refuse a value whose key names a secret; for keys chosen by users. Our keys never hold one, and
            some name its place (`infra.secret`, a Kubernetes Secret).

    Raises:
        ValueError: names the key and the remedy, and not the value.
    """
    for key, why in _secrets_in(tree, "", by_name):
        raise ValueError(
            f"{key} holds {why}, and the configuration is written to the store, to Prefect and to MLflow. Put the secret into "
            "an environment variable or a file, and name that: {variable: NAME} or {file: PATH} under environment.parameters, "
            "the key that ends in _variable or _file elsewhere."
        )


def _recordable(tree: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    if is_recorded(info):
        return tree
    refuse_secrets(tree, by_name=True)
    for key, value in _leaves(tree, ""):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} is {value}, which JSON cannot record. Give a finite number, or null for no limit.")
    return tree


Parameters = Annotated[dict[str, Any], AfterValidator(_recordable), Consent("parameters")]
"""Free-form values that can be recorded: without secrets, infinities and NaN."""


def resolved(tree: Any) -> Any:
    """Return free-form parameters with their secrets: {"variable": NAME} and {"file": PATH} under a secret's name are
    replaced.

    Raises:
        ConfigError: the variable or file does not exist.
    """
    if isinstance(tree, list):
        return [resolved(child) for child in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        name: _secret_at(child, str(name)) if is_secret_name(str(name)) and _is_place(child) else resolved(child)
        for name, child in tree.items()
    }


def secret_places(tree: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of each secret that `resolved` reads: ("api_key.variable", "JUDGE_KEY")."""
    if isinstance(tree, list):
        for index, child in enumerate(tree):
            yield from secret_places(child, f"{place}{index}.")
    elif isinstance(tree, dict):
        for name, child in tree.items():
            if is_secret_name(str(name)) and _is_place(child):
                yield from ((f"{place}{name}.{kind}", value) for kind, value in child.items())
            else:
                yield from secret_places(child, f"{place}{name}.")


def _secret_at(place: dict[str, str], name: str) -> str:
    secret = read_secret(place.get("variable", ""), place.get("file"))
    if secret is None:
        raise ConfigError(f"environment.parameters: {name} is in {place['variable']}, which is not set. Set it.")
    return secret


def _is_place(node: Any) -> bool:
    return isinstance(node, dict) and len(node) == 1 and isinstance(node.get("variable", node.get("file")), str)


def _leaves(node: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of every leaf of a tree."""
    if isinstance(node, dict):
        for name, child in node.items():
            yield from _leaves(child, f"{place}.{name}" if place else str(name))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _leaves(child, f"{place}[{index}]")
    else:
        yield place, node


def _secrets_in(node: Any, place: str, by_name: bool) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        for name, child in node.items():
            below = f"{place}.{name}" if place else str(name)
            section = isinstance(child, dict) and str(name).lower() == "auth"  # `auth: {kind: basic, password: …}`
            if by_name and is_secret_name(str(name)) and not section and not _is_place(child) and _is_told(child):
                yield below, "a secret, by its name"
            else:
                yield from _secrets_in(child, below, by_name)
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _secrets_in(child, f"{place}[{index}]", by_name)
    elif isinstance(node, str) and (why := _secret_in_text(node)) is not None:
        yield place, why


def _is_told(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in _SCHEMES:
        return False
    return not isinstance(value, bool) and value not in (None, "", "???", [], {})


def _secret_in_text(text: str) -> str | None:
    if any(scheme in ("http", "https", "s3") or ":" in user for scheme, user in _USER.findall(text)):
        return "a user and password in a URL"
    if _CREDENTIAL.search(text):
        return "a likely credential"
    if "://" in text and any(
        value and (is_secret_name(name) or name.lower() in _SIGNATURES) for name, value in _query(text)
    ):
        return "a secret in the query or fragment of a URL"
    if any(is_secret_name(name) and _is_told(value) for name, value in _assignments(text)):
        return "NAME=value with the name of a secret"
    return None


def _query(url: str) -> list[tuple[str, str]]:
    try:
        parts = urlsplit(url)
        return parse_qsl(parts.query) + parse_qsl(parts.fragment)
    except ValueError:
        return []


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    """`NAME=value` at the beginning of each line, as a shell or a .env file has them, and of each part of a connection string.

    Not in the middle of other text: prompts and code speak of `pad_token=0`.
    """
    for line in text.splitlines():
        parts = line.split(";") if ";" in line else line.removeprefix("export ").split()
        for part in parts:
            name, equals, value = (each.strip(" \t'\"") for each in part.partition("="))
            if equals and _NAME.fullmatch(name) and value and value[0] not in _PLACEHOLDERS:
                yield name, value
            elif not equals and ";" not in line:
                break  # a command or a sentence follows


def masked(node: Any, key: str = "") -> Any:
    """A copy of a tree of plain containers with its secrets replaced. All of a mapping `secrets` or `api_keys` is secret."""
    if isinstance(node, dict):
        whole = _words(key)[-1:] and _words(key)[-1] in _SECRET_WORDS
        return {name: masked(child, key if whole else str(name)) for name, child in node.items()}
    if isinstance(node, list):
        return [masked(child, key) for child in node]
    if _is_masked(_words(key), node):
        return MASK
    return masked_text(node) if isinstance(node, str) else node


def masked_text(text: str) -> str:
    """A text without user parts of URLs and credentials of well-known kinds."""
    return _CREDENTIAL.sub(MASK, _URL_USER.sub(MASK, text))


def _words(key: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(key)]


def _is_masked(words: list[str], value: Any) -> bool:
    if not words or isinstance(value, bool) or value in (None, "", "???"):
        return False
    if isinstance(value, str):
        return not _SECRET_WORDS.isdisjoint(words)
    return words[-1] in _SECRET_WORDS and words[-1] != "tokens"
