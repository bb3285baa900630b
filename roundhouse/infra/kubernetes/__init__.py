"""Runs on a Kubernetes cluster.

names, train_job, shard_job    pure: from a run's configuration to manifests
job_status          pure: from a Job's and its pods' status to an outcome, in words that help
cluster             calls of the API server: bounded, counted, repeated where that is safe
watching            a run's Jobs and pods as they are now, by watch; a pod's log, line by line, across broken connections
owned_resources     a run's objects: made once, found again by their names
job_deadlines       pure: how long which state of a Job is borne
job                 one Job from its creation, or the finding of it, to its end
serve_config        pure: what is wanted of Ray Serve, as KubeRay hands it on
rayservice          the engine, where KubeRay runs it
"""
