"""Kubernetes: the pods of a run, an engine under KubeRay, and the checks of `roundhouse doctor --kubernetes`.

| module | part |
| -- | -- |
| names | names and labels of a run's objects |
| stage_pod | pods of stages, as restricted as Pod Security requires |
| stage_jobs | from a run's configuration to the manifests of its Jobs |
| job_status | from the status of a Job and its pods to an outcome with a remedy; time limits of each state |
| cluster | calls of the API server: bounded, counted, repeated if that is safe |
| watching | a run's Jobs and pods by watch; a pod's log, line by line, across broken connections |
| job | one Job from its creation or discovery to its end |
| launcher | a Job for each program of a stage |
| rayservice, serve_config, ray_template | the engine under KubeRay |
| checks | rights, queue, GPUs and objects that a run needs |
"""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {
    "infrastructure.kubernetes": Plugin(f"{__name__}.rayservice:served_engine", traits=f"{__name__}.checks:cluster"),
    "launcher.kubernetes": Plugin(f"{__name__}.launcher:KubernetesLauncher"),
}
