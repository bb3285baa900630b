"""The flow's Job: the Job controller handles every exit code of `roundhouse train`."""

from __future__ import annotations

import shutil
import time
from typing import Any

import pytest
import yaml

from roundhouse.cli.options import FINAL
from tests.k8s.validation import OVERLAYS, ROOT, rendered
from tests.plugins.kubernetes.stand import Stand

Object = dict[str, Any]

SECONDS = 120.0
"""The real Job controller waits ten seconds before it replaces a pod that failed."""


def rules_of(job: Object) -> list[Object]:
    rules: list[Object] = job["spec"]["podFailurePolicy"]["rules"]
    return rules


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl: install the client of Kubernetes")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_ends_the_flow_at_the_codes_for_which_repeating_cannot_help(overlay: str) -> None:
    [job] = [
        item for item in rendered(overlay) if item["metadata"]["name"] == "roundhouse-flow" and item["kind"] == "Job"
    ]
    disrupted, final = rules_of(job)
    assert disrupted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    [container] = job["spec"]["template"]["spec"]["containers"]
    codes = {"containerName": container["name"], "operator": "In", "values": FINAL}
    assert final == {"action": "FailJob", "onExitCodes": codes}
    assert job["spec"]["backoffLimit"] > 0, "any other code is repeated"


def begin(stand: Stand, *ends: Any) -> str:
    """Create the base's Job in the stand; its pods end one after the other with these codes."""
    left = list(ends)

    def behave(pod: Object) -> None:
        stand.kubelet.run(pod)
        left.pop(0)(pod)

    stand.kubelet.behave = behave
    job = yaml.safe_load((ROOT / "k8s/components/flow-job/flow.yaml").read_text())
    job["spec"]["template"]["spec"].pop("priorityClassName")  # an object of the cluster, which the stand has not
    job["spec"] |= {"completions": 1, "completionMode": "Indexed", "activeDeadlineSeconds": 600}
    job["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/part-of"] = "roundhouse"  # the kubelet's selector
    stand.admin.create(f"/apis/batch/v1/namespaces/{stand.namespace}/jobs", job)
    return str(job["metadata"]["name"])


def end(stand: Stand, name: str) -> Object:
    """Its last condition."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        job = stand.admin.get(f"/apis/batch/v1/namespaces/{stand.namespace}/jobs/{name}")
        for condition in job.get("status", {}).get("conditions") or []:
            if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
                return dict(condition)
        time.sleep(0.05)
    raise AssertionError(f"Job {name} has not ended: {job}")


@pytest.mark.parametrize("code", FINAL)
def test_a_configuration_that_cannot_work_is_not_tried_again(stand: Stand, code: int) -> None:
    name = begin(stand, lambda pod: stand.kubelet.exit(pod, code))
    over = end(stand, name)
    assert (over["type"], over["reason"]) == ("Failed", "PodFailurePolicy")
    assert len(stand.kubelet.pods) == 1


def test_machines_that_failed_and_a_drained_node_cost_a_pod(stand: Stand) -> None:
    name = begin(
        stand,
        lambda pod: stand.kubelet.disrupt(pod, "EvictionByEvictionAPI"),
        lambda pod: stand.kubelet.exit(pod, 75),
        lambda pod: stand.kubelet.exit(pod, 0),
    )
    assert end(stand, name)["type"] == "Complete"
    assert len(stand.kubelet.pods) == 3
