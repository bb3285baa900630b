"""Refit: bring every replica of the engine to the weights of a checkpoint.

Invariant: when a function here returns, all replicas have said themselves that they answer with the wanted version. What is
wanted is written to Serve, so a replica that starts later comes up with it too.

A refit is not a thing to skip because it was done before: the engine may have been restarted since. Only when the
rollouts it is for are complete is there nothing to do.
"""

from __future__ import annotations

from roundhouse.config.models import RunConfig
from roundhouse.errors import StoreError
from roundhouse.generation import deployment
from roundhouse.generation.deployment import Replica, ServeEndpoint
from roundhouse.infra.services import state_directory, status
from roundhouse.progress import announce
from roundhouse.stages.policy import engine_files
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run


def serve_endpoint(config: RunConfig) -> ServeEndpoint:
    """Where the run's engine is served.

    Raises:
        InfraError: Ray is not running.
    """
    services = status(state_directory(config))
    return ServeEndpoint(services.ray_dashboard_url, services.serve_url, services.ray_token)


def engine_at(run: Run, version: int) -> str:
    """Base URL of the engine, once every replica answers with the version.

    After a refit that is a matter of one call. When a replica has died since, it waits for the one that takes its place.
    """
    serve = serve_endpoint(run.config)
    ready = [replica for replica in deployment.replicas(serve) if replica.ready and replica.policy_version == version]
    if len(ready) != run.config.generation.replicas:
        checkpoint = run.checkpoint(version).reference()
        if checkpoint is None:
            raise StoreError(f"run {run.run_id} has no checkpoint of version {version}")
        ensure_version(run, checkpoint)
    return serve.http_url


def start_engine(run: Run) -> None:
    """Ask for the engine with the policy's architecture; it loads while the starting policy is still being made."""
    announce("engine", text="starting")
    deployment.ensure_deployed(run.config.generation, str(engine_files(run)), serve_endpoint(run.config), wait=False)


def ensure_version(run: Run, checkpoint: Reference) -> list[Replica]:
    """Deploy or refit, until all replicas answer with this checkpoint."""
    generation, serve = run.config.generation, serve_endpoint(run.config)
    announce("engine", text=f"refit to version {checkpoint.policy_version}")
    return deployment.ensure_deployed(
        generation,
        str(engine_files(run)),
        serve,
        weights=checkpoint.uri,
        version=checkpoint.policy_version,
    )


def refit_iteration(run: Run, iteration: int, checkpoint: Reference) -> Reference:
    """Refit for an iteration, and record what every replica said."""
    stage = run.stage(iteration, "refit")
    done = stage.reference()
    if done is not None and run.stage(iteration, "collect").reference() is not None:
        return done
    attempt = run.begin(stage, policy_version=checkpoint.policy_version)
    replicas = ensure_version(run, checkpoint)
    if done is not None:
        return done
    return attempt.commit(
        inputs={"checkpoint": checkpoint},
        counts={"replicas": len(replicas)},
        metrics={"refit/replica_seconds_max": max(replica.refit_seconds for replica in replicas)},
        details={"replicas": [{"id": replica.replica_id, "pid": replica.pid} for replica in replicas]},
    )
