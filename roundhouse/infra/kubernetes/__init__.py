"""Runs on a Kubernetes cluster.

names               pure: names and labels of a run's objects
stage_pod           pure: pods of stages, as restricted as Pod Security asks
stage_jobs          pure: from a run's configuration to the manifests of its Jobs
job_status          from a Job's and its pods' status to an outcome, in words that help; how long each state may last
cluster             calls of the API server: bounded, counted, repeated where that is safe
watching            a run's Jobs and pods as they are now, by watch; a pod's log, line by line, across broken connections
job                 one Job from its creation, or the finding of it, to its end
rayservice          the engine, where KubeRay runs it
"""
