"""Names and labels of a run's objects on a cluster.

Invariant: a name is a function of the run, the iteration, the stage and the stage's work, so a retried stage finds its
own. Two runs never share a name, because each contains the run's uid.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

LABEL = "roundhouse/"
"""Prefix of our own labels."""
JOB_NAME_LENGTH = 58
"""A pod's host name is the Job's name, a dash and its index, and may have 63 characters."""


@dataclass(frozen=True)
class StageIdentity:
    """The piece of work that a Job does."""

    run_id: str
    run_uid: str
    iteration: int
    stage: str
    digest: str
    """Digest of all the stage's dependencies: another digest is another Job."""
    shard: str = ""
    """Its part of the stage, if several Jobs share it."""
    extra: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The run's own labels (`tracking.labels`), which select nothing."""

    def job_name(self, number: int) -> str:
        """Name of the Job for a try.

        >>> StageIdentity("My_run", "0123456789ab", 12, "train", "89abcdef0123", ).job_name(2)
        'my-run-012345-i12-train-89abcdef-2'
        """
        part = f"{self.stage}-{self.shard}" if self.shard else self.stage
        rest = f"-{self.run_uid[:6]}-i{self.iteration}-{part}-{self.digest[:8]}-{number}"
        return dns_label(self.run_id, JOB_NAME_LENGTH - len(rest)) + rest

    def labels(self) -> dict[str, str]:
        """By which a person and our own watches find it."""
        return run_labels(self.run_id, self.run_uid) | {
            f"{LABEL}{name}": str(value) for name, value in self._part().items()
        }

    def annotations(self) -> dict[str, str]:
        """Distinguishes a Job of this work from another one of its name."""
        return {f"{LABEL}digest": self.digest}

    def about(self) -> dict[str, str | int]:
        """For the lines of its logs."""
        return {"run": self.run_id, **self._part()}

    def _part(self) -> dict[str, str | int]:
        shard = {"shard": self.shard} if self.shard else {}
        return {"iteration": self.iteration, "stage": self.stage, **shard}


def run_labels(run_id: str, run_uid: str) -> dict[str, str]:
    """Labels of everything that belongs to a run."""
    return {
        "app.kubernetes.io/part-of": "roundhouse",
        "app.kubernetes.io/managed-by": "roundhouse",
        f"{LABEL}run": label_value(run_id),
        f"{LABEL}run-uid": run_uid,
    }


def component_labels(component: str) -> dict[str, str]:
    """Labels by which network policies and PodMonitors of `k8s/` select the pods of a component."""
    return {"app.kubernetes.io/name": f"roundhouse-{component}", "app.kubernetes.io/component": component}


def run_object_name(run_id: str, run_uid: str) -> str:
    """Name of the run's ConfigMap, which owns the rest, and of its headless Service."""
    return f"rh-{dns_label(run_id, 40)}-{run_uid[:6]}"


def engine_name(run_id: str, run_uid: str) -> str:
    """Name of the run's own RayService; KubeRay makes longer ones of it and takes at most 47 characters."""
    return f"rh-{dns_label(run_id, 24)}-{run_uid[:6]}-engine"


def server_label(name: str) -> str:
    """A gym server's name as a part of a DNS label of at most 20 characters, unlike that of any other name."""
    return f"{dns_label(name, 13)}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def gym_object_name(run_id: str, run_uid: str, digest: str, server: str) -> str:
    """Name of a server's Service, at most 60 characters; `server` is a `server_label`."""
    return f"gym-{dns_label(run_id, 20)}-{run_uid[:6]}-{digest[:6]}-{server}"


def dns_label(text: str, length: int) -> str:
    """The text as a part of a DNS label: lower case, digits, single dashes, a letter or digit at both ends."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[: max(length, 1)].strip("-") or "r"


def label_value(text: str) -> str:
    """The text as a label's value: up to 63 of letters, digits, dashes, dots and underscores, no mark at an end."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip("._-")
