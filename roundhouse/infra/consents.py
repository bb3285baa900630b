"""Consents of a person to code, files, servers and secrets, kept outside of every store.

    .roundhouse/consents/<digest>    the accepted keys of one section, as JSON; delete the file to withdraw the consent

Invariant: the person chooses the state directory (ROUNDHOUSE_STATE, else .roundhouse in the working directory). A run's
configuration, which a stranger may have written, does not name it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from roundhouse.config.consent import SectionKeys, keys_to_accept, unnamed_code
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError

log = logging.getLogger(__name__)

STATE_VARIABLE = "ROUNDHOUSE_STATE"
"""Directory of local state: that of the services which serve the deployments."""
DIRECTORY = "consents"


def record_consent(config: RunConfig, place: str = "", state: Path | None = None) -> None:
    """Record that the person who starts this configuration accepts the code, servers and secrets that it names.

    Args:
        place: record only the section with this key and the sections inside it; empty for all.
        state: state directory of the services that run it, if it is not this process's own.
    """
    directory = _directory() if state is None else state / DIRECTORY
    for keys in keys_to_accept(config, place):
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            (directory / keys.digest).write_text(json.dumps(keys.dotted(), indent=1) + "\n")
        except OSError as error:
            log.warning("%s: the consent to this run's code is not recorded, so that its resume asks for it", error)
            return


def unaccepted_code(
    config: RunConfig, overrides: Iterable[str], place: str = "", own: Iterable[RunConfig] = ()
) -> dict[str, str]:
    """Return the keys, with their values, that were not accepted: by an override (`key=value`), or by a person on this
    machine.

    Args:
        place: check only the section with this key and the sections inside it; empty for all.
        own: configurations of this machine, such as presets; an equal section is accepted.

    Raises:
        ConfigError: an engine argument loads code, which no consent permits.
    """
    try:
        config.generation.refuse_arguments()
    except ValueError as error:
        raise ConfigError(f"The store's configuration of run {config.run_id!r}: generation.{error}") from None
    named = [*overrides]
    if Path(config.infra.state).resolve() == _directory().parent.resolve():
        named.append("infra.state=")  # the person chose it
    if not (keys := unnamed_code(config, named, _is_accepted, place)):
        return keys
    known = {section.digest for each in own for section in keys_to_accept(each)}
    return unnamed_code(config, named, lambda section: _is_accepted(section) or section.digest in known, place)


def refuse_unaccepted_code(
    config: RunConfig, overrides: Iterable[str], place: str = "", own: Iterable[RunConfig] = ()
) -> None:
    """Refuse to run code, read files or send secrets that only the store names; arguments as of `unaccepted_code`.

    Raises:
        ConfigError: names the unaccepted keys, and how to accept them.
    """
    if keys := unaccepted_code(config, overrides, place, own):
        lines = "\n".join(f"  {key}: {value}" for key, value in keys.items())
        named = " ".join(f"--set '{key}={value}'" for key, value in keys.items())
        raise ConfigError(
            f"The store's configuration of run {config.run_id!r} names code, files, servers or secrets of this machine that "
            f"were not accepted here:\n{lines}\n"
            "A person who can write to the store can have set them. To accept them, start the run in a terminal and answer "
            f"yes, add --trust-store, or name them yourself (in a form: under overrides): {named}"
        )


def _directory() -> Path:
    return Path(os.environ.get(STATE_VARIABLE) or ".roundhouse") / DIRECTORY


def _is_accepted(keys: SectionKeys) -> bool:
    """Return whether this user recorded a consent; a file of another user counts for nothing."""
    try:
        return (_directory() / keys.digest).stat().st_uid == os.geteuid()
    except OSError:
        return False
