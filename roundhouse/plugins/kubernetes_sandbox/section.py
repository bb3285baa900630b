"""The section of a pod of a warm pool as a sandbox."""

from __future__ import annotations

from typing import Literal

from roundhouse.config.kubernetes import DnsLabel
from roundhouse.config.sandboxes import SandboxSection
from roundhouse.config.section import Code, PositiveFloat


class KubernetesSandbox(SandboxSection):
    """A pod of a warm pool, claimed by the resources of kubernetes-sigs/agent-sandbox."""

    kind: Literal["kubernetes"]
    warm_pool: Code[DnsLabel]
    """Name of the SandboxWarmPool. Its SandboxTemplate defines its pods and their permissions."""
    namespace: DnsLabel = "roundhouse"
    """Namespace of the pool."""
    context: Code[str | None] = None
    """Context of the kubeconfig. Unset: the pod's service account, else the current context."""
    runtime_class: str | None = None
    """RuntimeClass that its pods must have, such as `gvisor` or `kata`: others are refused. Unset: any."""
    start_seconds: PositiveFloat = 120
    """Time limit until a claimed pod is ready."""
