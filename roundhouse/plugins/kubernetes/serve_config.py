"""The text `serveConfigV2` of a RayService, and KubeRay's report about its application. Pure.

In `serveConfigV2`, only the policy's application is ours; everything else in the text stays. The written text equals
the text that Serve receives: KubeRay parses it into Go's values and writes it again, with every number as a float64, so

    300.0 arrives as 300      1763760000123456789 arrives as 1763760000123456800
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from roundhouse.errors import ConfigError
from roundhouse.generation.deployment import last_lines
from roundhouse.generation.serve_app import APPLICATION

Object = dict[str, Any]

RUNNING = "RUNNING"
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
_EXACT = 1000
"""Nanoseconds since the epoch that are a multiple of it have 16 digits that count, which a float64 keeps."""


def exact_request(number: int) -> int:
    """The next number that KubeRay hands on unchanged."""
    return -(-number // _EXACT) * _EXACT


def as_handed_on(value: Any) -> Any:
    """A JSON value as it arrives at Serve."""
    if isinstance(value, dict):
        return {key: as_handed_on(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_handed_on(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def application_in(text: str | None) -> Object | None:
    """Return the policy's last desired application.

    Raises:
        ConfigError: the text is not a Serve configuration.
    """
    return next((each for each in _tree(text)["applications"] if each.get("name") == APPLICATION), None)


def with_application(text: str | None, application: Object | None) -> str:
    """Return the text with this application of the policy; with None, without any.

    Raises:
        ConfigError: the text is not a Serve configuration.
    """
    tree = _tree(text)
    others = [each for each in tree["applications"] if each.get("name") != APPLICATION]
    applications = [*others, *([] if application is None else [application])]
    return yaml.safe_dump(tree | {"applications": applications}, sort_keys=False)


def _tree(text: str | None) -> Object:
    try:
        tree = yaml.safe_load(text or "") or {}
        listed = tree.setdefault("applications", []) or []
        valid = all(isinstance(each, dict) for each in listed)
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise ConfigError(f"spec.serveConfigV2 of the RayService is not a Serve configuration: {error}") from error
    if not valid:
        raise ConfigError(f"spec.serveConfigV2 of the RayService has invalid applications: {str(listed)[:200]}")
    return {**tree, "applications": listed}


@dataclass(frozen=True)
class Told:
    """KubeRay's report about the policy's application."""

    generation: int
    """Generation of the RayService at KubeRay's last check."""
    status: str = "unknown"
    """Serve's own word: NOT_STARTED, DEPLOYING, RUNNING, DEPLOY_FAILED, UNHEALTHY, DELETING."""
    message: str = ""

    @property
    def is_running(self) -> bool:
        return self.status == RUNNING

    @property
    def failure(self) -> str | None:
        """Why the application cannot come up; None while it may."""
        if self.status in _FAILED or "Error" in self.message:
            return f"{self.status}: {last_lines(self.message) or 'no message'}"
        return None


def told(service: Object) -> Told:
    """Read the report from a RayService's status: of the cluster in preparation, else of the serving one."""
    status = service.get("status") or {}
    generation = int(status.get("observedGeneration") or 0)
    for part in ("pendingServiceStatus", "activeServiceStatus"):
        application = ((status.get(part) or {}).get("applicationStatuses") or {}).get(APPLICATION)
        if application is not None:
            deployments = (application.get("serveDeploymentStatuses") or {}).values()
            messages = [application.get("message"), *(each.get("message") for each in deployments)]
            return Told(generation, str(application.get("status")), "\n".join(text for text in messages if text))
    return Told(generation, "no application yet")
