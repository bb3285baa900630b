"""What a Job costs beside its pod's work, and many of them at a time from one process.

    KUBECONFIG=… python -m benchmarks.kubernetes_jobs --image roundhouse/gym:0.1.0   on a cluster with nodes
    KUBEBUILDER_ASSETS=… python -m benchmarks.kubernetes_jobs                        an API server and Job controller, no nodes
    KUBEBUILDER_ASSETS=… python -m benchmarks.kubernetes_shards                      a whole collect stage over 200 Jobs

One Job after the other, `--steps` times: where the seconds of a Job without work go, as this process sees them by its watches.
Then `--jobs` of one run at once, each waited for by a thread, as shards of a stage are. The program in the pods does nothing;
without nodes the test's kubelet, which is in this process too, says that it has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from roundhouse.plugins.kubernetes.job import RunJobs
from roundhouse.plugins.kubernetes.names import LABEL
from roundhouse.plugins.kubernetes.watching import Watched
from tests.plugins.kubernetes.control_plane import assets, control_plane
from tests.plugins.kubernetes.nodes import Command, Nodes, fresh_namespace
from tests.plugins.kubernetes.stand import real_stand

Object = dict[str, Any]

PARTS = {
    "to the pod (API server, Job controller)": ("created", "pod"),
    "to a node (scheduler)": ("pod", "scheduled"),
    "pod start (node)": ("scheduled", "running"),
    "the program, an interpreter that does nothing": ("running", "ended"),
    "to the caller (Job controller, watch)": ("ended", "returned"),
}


TRAINER = {"cpu": "1m", "memory": "32Mi", "shared_memory": "1Mi", "scratch": "1Mi"}


def plan_of(nodes: Nodes, number: int) -> Command:
    return nodes.plan("pass", digest=f"{number:08x}0000", trainer=TRAINER)


@dataclass
class Clock:
    """When this process saw what of a Job, by the Job's name."""

    seen: dict[str, dict[str, float]] = field(default_factory=dict)

    def pod(self, item: Object | None) -> None:
        if item is None:
            return
        moments = self.seen.setdefault(item["metadata"]["labels"]["batch.kubernetes.io/job-name"], {})
        status, now = item.get("status", {}), time.monotonic()
        moments.setdefault("pod", now)
        if item["spec"].get("nodeName"):
            moments.setdefault("scheduled", now)
        states = [container.get("state", {}) for container in status.get("containerStatuses") or []]
        if any("running" in state or "terminated" in state for state in states):
            moments.setdefault("running", now)
        if any("terminated" in state for state in states):
            moments.setdefault("ended", now)


@contextmanager
def place(image: str | None) -> Iterator[Nodes]:
    """On nodes that have the image, or before a control plane of our own."""
    if image is not None:
        with fresh_namespace(image) as nodes:
            account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "roundhouse-trainer"}}
            nodes.cluster.create(nodes.path("serviceaccounts"), account)
            yield nodes
        return
    binaries = assets()
    if binaries is None:
        raise SystemExit("Name an image that the nodes of KUBECONFIG have (--image), or set KUBEBUILDER_ASSETS.")
    with (
        tempfile.TemporaryDirectory() as scratch,
        control_plane(binaries, Path(scratch)) as plane,
        real_stand(plane) as stand,
    ):
        yield Nodes(stand.cluster, stand.namespace, "none")


def one_after_the_other(nodes: Nodes, steps: int) -> dict[str, list[float]]:
    """Seconds of each part, for each Job."""
    clock = Clock()
    parts: dict[str, list[float]] = {name: [] for name in [*PARTS, "whole"]}
    path = f"/api/v1/namespaces/{nodes.namespace}/pods"
    watched = Watched(nodes.cluster, path, f"{LABEL}run-uid={nodes.run_uid}", clock.pod)
    try:
        with RunJobs(nodes.cluster, nodes.namespace, nodes.run_uid) as jobs:
            for number in range(steps):
                plan = plan_of(nodes, number)
                began = time.monotonic()
                jobs.run(plan, lambda line: None)
                moments = clock.seen[plan.identity.job_name(1)] | {"created": began, "returned": time.monotonic()}
                for name, (start, end) in PARTS.items():
                    parts[name].append(moments[end] - moments[start])
                parts["whole"].append(moments["returned"] - began)
    finally:
        watched.stop()
    return parts


def at_once(nodes: Nodes, count: int) -> dict[str, float]:
    """Seconds, memory and calls of `count` Jobs that are waited for together."""
    process, over = psutil.Process(), threading.Event()
    before, peak, calls = process.memory_info().rss, [0], nodes.cluster.calls.total()

    def watch() -> None:
        while not over.wait(0.2):
            peak[0] = max(peak[0], process.memory_info().rss)

    threading.Thread(target=watch, daemon=True).start()
    began = time.monotonic()
    with RunJobs(nodes.cluster, nodes.namespace, nodes.run_uid) as jobs, ThreadPoolExecutor(count) as pool:
        plans = [plan_of(nodes, 1_000_000 + number) for number in range(count)]
        ended = list(pool.map(lambda plan: jobs.run(plan, lambda line: None), plans))
    over.set()
    return {
        "jobs that ended well": sum(number == 1 for number in ended),
        "seconds": time.monotonic() - began,
        "memory of the process before, MiB": before / 2**20,
        "memory of the process at most, MiB": peak[0] / 2**20,
        "calls": nodes.cluster.calls.total() - calls,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", help="with a Python, on the nodes of KUBECONFIG")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=200)
    options = parser.parse_args()
    results: list[Object] = []
    with place(options.image) as nodes:
        if options.image and options.steps:
            for name, seconds in one_after_the_other(nodes, options.steps).items():
                middle, most = statistics.median(seconds), max(seconds)
                print(f"{name:<50} {middle:6.2f} s   at most {most:.2f}")
                results.append({"case": name, "value": round(middle, 3), "unit": "s", "max": round(most, 3)})
        if options.jobs:
            for name, value in at_once(nodes, options.jobs).items():
                print(f"{options.jobs} at once: {name:<40} {value:.1f}")
                results.append({"case": f"{options.jobs} at once: {name}", "value": round(value, 1), "unit": ""})
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "nodes": bool(options.image)}
    print(json.dumps({"bench": "kubernetes-jobs", "results": results, "machine": machine}))


if __name__ == "__main__":
    main()
