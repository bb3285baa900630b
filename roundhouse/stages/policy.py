"""The starting policy: version 0 of every run, made or fetched once."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from roundhouse.activity import announce
from roundhouse.config.models import BundledPolicy, WarmStartPolicy
from roundhouse.config.training import ResidentService
from roundhouse.environments import demonstrating
from roundhouse.errors import ConfigError
from roundhouse.policy.gguf import gguf_file
from roundhouse.policy.model_directory import TEMPLATE, bundled_file, template_text
from roundhouse.stages.checkpoint import publish_starting_policy
from roundhouse.store import lease
from roundhouse.store.directories import checkpoint_cache, policy_cache, scratch_beside, take_over
from roundhouse.store.lineage import IDENTITY, adopt_checkpoints
from roundhouse.store.location import Location
from roundhouse.store.run import Run, load_run, state_of, trained_since_state
from roundhouse.store.stage import ModelFiles, Reference, model_location


def starting_policy(run: Run) -> Reference:
    """Commit the version that the run starts from, or return it: version 0, or the parent's version of a fork.

    Raises:
        ConfigError: the pretrained directory is missing, incomplete or damaged.
    """
    if run.parent is not None:
        return adopt_checkpoints(run, partial(_with_optimizer, run))
    if (reference := run.checkpoint(0).reference()) is not None:
        return reference
    policy = run.config.policy
    with scratch_beside(run.checkpoint(0).location) as scratch:
        directory = scratch
        if isinstance(policy, WarmStartPolicy):
            details = _warm_start(run, policy, directory)
        elif isinstance(policy, BundledPolicy):
            directory, details = _converted(run, bundled_file(policy.name))
        else:
            original = model_location(Location(policy.path))
            names = original.tree()
            if not names:
                raise ConfigError(f"policy.path: {original.uri} holds no files. Give a Hugging Face model directory.")
            original.download([name for name in names if "/" not in name], directory)
            details = {"source": original.uri}
            if (file := gguf_file(directory)) is not None:
                directory, converted = _converted(run, file)
                details |= converted
            else:
                from roundhouse.policy.model_directory import check_model_directory

                try:
                    check_model_directory(directory, run.config.generation.max_model_len)
                except ConfigError as error:  # names the copy
                    place = original.uri.removeprefix("file://")
                    raise ConfigError(str(error).replace(str(directory), place)) from None
        if not isinstance(policy, WarmStartPolicy) and policy.chat_template is not None:
            if directory != scratch:  # in the cache, if it does not change
                directory = Path(shutil.copytree(directory, scratch, dirs_exist_ok=True))
            (directory / TEMPLATE).write_text(template_text(policy.chat_template), encoding="utf-8")
        return publish_starting_policy(run, directory, details, move=directory == scratch)


def _with_optimizer(fork: Run, origin: Reference, location: Location, attempt: str) -> ModelFiles:
    """Copy the parent's version. If it was published without the trainer's state, make the state again with the
    parent's configuration and sequences (`checkpoint.optimizer_every`)."""
    holder, since = trained_since_state(origin)
    if not since:
        state = state_of(holder)
        return take_over(origin, location, attempt, None if state == origin else state)
    from roundhouse.stages.train import write_with_optimizer

    assert fork.parent is not None, "only a fork adopts"
    parent = load_run(origin.uri.rsplit("/runs/", 1)[0], fork.parent.run_id)
    service = fork.config.train.service
    here = {"service": ResidentService() if service.runs_whole_steps else service}
    train = parent.config.train.model_copy(update=here | {"threads": fork.config.train.threads})
    machine = {"train": train, "infra": fork.config.infra, "placement": fork.config.placement}
    parent = replace(parent, config=parent.config.model_copy(update=machine))
    return write_with_optimizer(parent, origin, location, attempt, checkpoint_cache(fork.config), for_run=fork)


def write_untrained(run: Run, directory: Path) -> None:
    """Files that an engine needs of a policy that is still to be made."""
    policy = run.config.policy
    if isinstance(policy, WarmStartPolicy):
        from roundhouse.policy.warm_start import write_engine_files

        write_engine_files(policy, demonstrating(run.config.environment), _policy_seed(run, policy), directory)
        return
    with tempfile.TemporaryDirectory() as fetched:
        if isinstance(policy, BundledPolicy):
            source = Location(str(_converted(run, bundled_file(policy.name))[0]))
        else:
            source = model_location(Location(policy.path))
            if names := [name for name in source.names() if name.endswith(".gguf")]:
                source.download(names, Path(fetched))
                file = gguf_file(Path(fetched))
                assert file is not None
                source = Location(str(_converted(run, file)[0]))
        names = [name for name in source.tree() if "/" not in name and not name.endswith(".safetensors")]
        source.download(names, directory)
    if policy.chat_template is not None:
        (directory / TEMPLATE).write_text(template_text(policy.chat_template), encoding="utf-8")


def _converted(run: Run, file: Path) -> tuple[Path, dict[str, object]]:
    from roundhouse.policy.gguf import converted

    def on_progress(text: str) -> None:
        announce("conversion", text=text)

    directory, report = converted(file, policy_cache(run.config) / "converted", on_progress, run.created_at)
    return directory, {"converted": report}


def _policy_seed(run: Run, policy: WarmStartPolicy) -> int:
    return run.config.seed if policy.seed is None else policy.seed


def _warm_start(run: Run, policy: WarmStartPolicy, directory: Path) -> dict[str, object]:
    from roundhouse.policy.warm_start import make_starting_policy

    def on_progress(step: int, steps: int, loss: float) -> None:
        announce("warm_start", step=step, steps=steps, loss=loss)

    seed = _policy_seed(run, policy)
    report = make_starting_policy(
        policy,
        demonstrating(run.config.environment),
        seed,
        directory,
        on_progress=on_progress,
        cache=policy_cache(run.config) / "warm-starts",
    )
    return {"warm_start": asdict(report)}


def delete_run(run: Run) -> None:
    """Delete a run.

    Invariant: nothing is deleted while another process drives the run. `run.json` is deleted when only the lease is
    left, so an interrupted deletion leaves a run that is listed and can be deleted again. Nothing outside the directory
    needs it: a fork owns its checkpoints, a dataset its rows. The engine's copy of its tokenizer on this machine is
    deleted, too.

    Raises:
        RunDriven: a process drives it.
    """
    lease.take(run.location)
    for name in run.location.tree():
        if name != IDENTITY and not name.startswith(f"{lease.DIRECTORY}/"):
            run.location.delete_object(name)
    run.location.delete_object(IDENTITY)
    run.location.delete_tree()
    shutil.rmtree(checkpoint_cache(run.config) / f"engine-{run.uid}", ignore_errors=True)
