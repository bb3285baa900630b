"""Runs on a Kubernetes cluster.

names               pure: names and labels of a run's objects stage_pod           pure: pods of stages, as restricted as
Pod Security requires stage_jobs          pure: from a run's configuration to the manifests of its Jobs job_status
from a Job's and its pods' status to an outcome with a remedy; time limits of each state cluster             calls of
the API server: bounded, counted, repeated if that is safe watching            a run's Jobs and pods by watch; a pod's
log, line by line, across broken connections job                 one Job from its creation or discovery to its end
rayservice          the engine under KubeRay
"""
