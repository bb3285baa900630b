"""A whole collect stage over many Jobs of one run, driven by one process: seconds, calls of the API server, memory at most.

    KUBEBUILDER_ASSETS=… python -m benchmarks.kubernetes_shards --shards 200

An API server and its Job controller, no nodes. Another process plays the kubelet: it lets no shard begin until all Jobs run at
once, then does what their pods would, with the real worker, against an engine that answers at once. The process that is
measured has what a flow's has (Prefect is imported) and runs the real stage: specs and reports in a store, Jobs by watches,
reports checked, one manifest. There are no logs without nodes: each Job's is asked for in vain, which the calls include.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "gym"))

from rollouts import free_port, served, wait_for

from tests.plugins.kubernetes.control_plane import assets, control_plane

if TYPE_CHECKING:
    from roundhouse.config.kubernetes import KubernetesInfra
    from roundhouse.plugins.kubernetes.cluster import Cluster

Object = dict[str, Any]

TOGETHER_SECONDS = 600.0
AT_WORK = 2
"""Shards that the kubelet's process works on at once; the others wait, running."""
LIMIT_MIB = 512


def play(kubeconfig: Path, namespace: str, count: int) -> None:
    """The kubelet, until it is ended."""
    from roundhouse.collection.shard_worker import carry_out
    from tests.plugins.kubernetes.players import Kubelet
    from tests.plugins.kubernetes.stand import cluster_of

    together, at_work = threading.Barrier(count), threading.Semaphore(AT_WORK)

    def behave(pod: Object) -> None:
        kubelet.run(pod)
        together.wait(TOGETHER_SECONDS)
        arguments = pod["spec"]["containers"][0]["args"]
        with at_work:
            code = carry_out(arguments[arguments.index("--spec") + 1], lambda line: None)
        kubelet.exit(pod, code)

    kubelet = Kubelet(cluster_of(kubeconfig, patience=300), namespace)
    kubelet.behave = behave
    threading.Event().wait()


def collect(store: str, namespace: str, engine: str, shards: int, group_size: int) -> dict[str, float]:
    """The stage, in this process."""
    import roundhouse_flows._prefect.tuning  # before Prefect, as a flow does
    import roundhouse_flows.train  # noqa: F401
    from roundhouse.config.loading import parse_config
    from roundhouse.plugins.kubernetes import launcher
    from roundhouse.stages.collect import collect_iteration
    from roundhouse.store.run import open_run
    from roundhouse.store.stage import read_manifest

    tree = {
        "run_id": "shards",
        "store": store,
        "environment": {"kind": "guess_number"},
        "generation": {"engine_url": "http://roundhouse-engine:9000"},
        "rollout": {
            **{
                "prompts_per_iteration": shards,
                "group_size": group_size,
                "concurrency": shards * group_size,
                "max_tokens": 100_000,
            },
            "distribution": {"kind": "job", "shards": shards},
        },
        "infra": {"kind": "kubernetes", "namespace": namespace, "collector": {}, "store_claim": "store"},
    }
    run = open_run(parse_config(tree))
    weights = run.begin(run.stage(1, "refit"), policy_version=0).commit()
    clusters, connect = [], launcher.connect

    def connect_and_keep(infra: KubernetesInfra) -> Cluster:
        clusters.append(connect(infra))
        return clusters[-1]

    launcher.connect = connect_and_keep
    before, cpu, began = _memory("VmRSS"), time.process_time(), time.monotonic()
    reference = collect_iteration(run, 1, weights, engine)
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    manifest = read_manifest(reference)
    if reference.counts["completed"] + reference.counts["truncated"] != shards * group_size:
        raise SystemExit(f"Not all rollouts ended well: {reference.counts}")
    return {
        "shards": manifest.metrics["rollout/shards"],
        "shards lost": manifest.metrics["rollout/shards_lost"],
        "seconds": seconds,
        "CPU seconds of the process": cpu,
        "calls": manifest.metrics["rollout/kubernetes_calls"],
        "of these for logs, in vain": sum(
            count for cluster in clusters for call, count in cluster.calls.items() if call.startswith("follow")
        ),
        "memory of the process before, MiB": before,
        "memory of the process at most, MiB": _memory("VmHWM"),
    }


def _memory(field: str) -> float:
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--play", nargs=2, metavar=("KUBECONFIG", "NAMESPACE"), help="as the kubelet's process")
    options = parser.parse_args()
    if options.play:
        play(Path(options.play[0]), options.play[1], options.shards)
    if (binaries := assets()) is None:
        raise SystemExit("Set KUBEBUILDER_ASSETS to a directory with kube-apiserver and kube-controller-manager.")
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (scratch / "plane").mkdir()
        plane = stack.enter_context(control_plane(binaries, scratch / "plane"))
        kubeconfig, namespace = plane.kubeconfig(), f"rh-{uuid.uuid4().hex[:8]}"
        os.environ["KUBECONFIG"] = str(kubeconfig)
        _create_namespace(kubeconfig, namespace)
        port = free_port()
        stack.enter_context(served(str(Path(__file__).parent / "gym/instant_engine.py"), "--port", str(port)))
        wait_for(f"http://127.0.0.1:{port}/v1/models")
        arguments = ["--shards", str(options.shards), "--play", str(kubeconfig), namespace]
        kubelet = subprocess.Popen([sys.executable, "-m", "benchmarks.kubernetes_shards", *arguments])
        stack.callback(kubelet.wait)
        stack.callback(kubelet.kill)
        store = str(scratch / "store")
        figures = collect(store, namespace, f"http://127.0.0.1:{port}", options.shards, options.group_size)
    results = []
    for name, value in figures.items():
        sys.stdout.write(f"{options.shards} shards: {name:<40} {value:.1f}\n")
        results.append({"case": name, "value": round(value, 1), "unit": ""})
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    sys.stdout.write(json.dumps({"bench": "kubernetes-shards", "results": results, "machine": machine}) + "\n")
    if figures["memory of the process at most, MiB"] > LIMIT_MIB:
        raise SystemExit(f"The process took more than {LIMIT_MIB} MiB.")


def _create_namespace(kubeconfig: Path, namespace: str) -> None:
    from tests.plugins.kubernetes.stand import cluster_of

    admin = cluster_of(kubeconfig)
    admin.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    admin.close()


if __name__ == "__main__":
    main()
