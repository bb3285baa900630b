"""Runs of one cluster and namespace, even of one name, do not see each other."""

from __future__ import annotations

import re
from urllib.parse import unquote

import pytest

from roundhouse.errors import DataError
from tests.plugins.kubernetes.stand import Stand

ONE, OTHER = "0123456789ab", "ba9876543210"


def test_two_runs_of_one_name_have_their_own_jobs_objects_and_watches(stand: Stand) -> None:
    """The same work, the same digest: only the run's uid differs, as when a run was deleted and begun again."""

    def behave(pod: dict) -> None:
        stand.kubelet.run(pod)
        stand.kubelet.exit(pod, 65 if pod["metadata"]["labels"]["roundhouse/run-uid"] == ONE else 0)

    stand.kubelet.behave = behave
    failing, other = stand.begin(stand.plan(ONE)), stand.begin(stand.plan(OTHER))
    assert other.result() == 1
    with pytest.raises(DataError):
        failing.result()

    jobs = {job["metadata"]["labels"]["roundhouse/run-uid"]: job for job in stand.found("jobs")}
    assert set(jobs) == {ONE, OTHER}
    assert len({job["metadata"]["name"] for job in jobs.values()}) == 2
    owners = {uid: job["metadata"]["ownerReferences"][0]["uid"] for uid, job in jobs.items()}
    assert owners[ONE] != owners[OTHER]
    watched = [unquote(path) for method, path in stand.faults.seen if method == "GET" and "/pods?" in path]
    uids = [found for path in watched for found in re.findall(r"run-uid=(\w+)", path)]
    assert set(uids) == {ONE, OTHER}
    assert all("labelSelector=" in path for path in watched), "no look at what is not the run's"


def test_ending_one_run_leaves_the_other(stand: Stand) -> None:
    stand.run(stand.plan(ONE))
    stand.run(stand.plan(OTHER))
    [config] = [item for item in stand.found("configmaps") if item["metadata"]["labels"]["roundhouse/run-uid"] == ONE]
    path = f"/api/v1/namespaces/{stand.namespace}/configmaps/{config['metadata']['name']}"
    stand.admin.delete(path)
    left = [item for item in stand.found("configmaps") if not item["metadata"].get("deletionTimestamp")]
    assert [item["metadata"]["labels"]["roundhouse/run-uid"] for item in left] == [OTHER]
    assert any(job["metadata"]["labels"]["roundhouse/run-uid"] == OTHER for job in stand.found("jobs"))
