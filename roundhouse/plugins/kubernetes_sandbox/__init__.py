"""Agent-sandbox: a pod of a warm pool on Kubernetes as a sandbox."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {"sandbox.kubernetes": Plugin(f"{__name__}.sandbox:ClaimedPod", f"{__name__}.section:KubernetesSandbox")}
