"""`roundhouse train-offline | datasets`: learn from collected datasets; list and prune them."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Annotated, Any, get_args

import typer

from roundhouse.cli.options import (
    DEFAULT_STORE,
    DryRun,
    JsonOption,
    Overrides,
    StoreOption,
    TrustStore,
    accept_code,
    out,
    out_json,
    print_table,
)

app = typer.Typer()
datasets_app = typer.Typer(no_args_is_help=True, help="Datasets that were collected outside a run's training.")
DAY = 86400.0
log = logging.getLogger(__name__)


@app.command("train-offline")
def train_offline(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Run; training starts from its checkpoint.")],
    new: Annotated[str, typer.Option("--run-id", help="Id of the new run; the same id resumes it.")],
    dataset: Annotated[
        list[str],
        typer.Option(
            help="nightly (its newest version), nightly@all, nightly@<version>, a path, or a file of chat rows "
            "(demos.jsonl); may be repeated."
        ),
    ],
    method: Annotated[
        str,
        typer.Option(
            help="grpo (truncated importance weights), rejection (the best of a group), sft (all, as of chat rows), "
            "distillation."
        ),
    ] = "grpo",
    at: Annotated[str, typer.Option(help="Checkpoint to start from: newest, promoted or a version.")] = "newest",
    teacher: Annotated[str | None, typer.Option(help="Model directory of the teacher; for distillation.")] = None,
    reward_threshold: Annotated[
        float | None, typer.Option(help="The least reward that is learnt, for rejection; 1 when left out.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data; 1 when left out.", min=1)] = None,
    overrides: Overrides = None,
    store: StoreOption = DEFAULT_STORE,
    dry_run: DryRun = False,
    trust_store: TrustStore = False,
) -> None:
    """Train a new run from collected datasets instead of fresh rollouts, or continue it."""
    from roundhouse.cli.training import train_run
    from roundhouse.errors import ConfigError
    from roundhouse.stages.fork import Method, fork_of, fork_run, offline_config
    from roundhouse.stages.offline import find_datasets
    from roundhouse.store.run import load_run

    if method not in (methods := get_args(Method)):
        raise ConfigError(f"--method {method!r} is unknown. Methods: {', '.join(methods)}.")
    passes = [] if epochs is None else [f"offline.epochs={epochs}"]
    config = offline_config(
        store,
        run_id,
        new,
        dataset,
        method,  # type: ignore[arg-type]
        at,
        teacher=teacher,
        reward_threshold=reward_threshold,
        overrides=[*passes, *(overrides or [])],
    )
    if not dry_run:
        named = [] if teacher is None else [f"train.algorithm.teacher={teacher}"]
        accept_code(config, [*named, *(overrides or [])], trust_store)
    if config.offline is not None:
        reader = None if dry_run else replace(fork_of(store, run_id, new) or load_run(store, run_id), config=config)
        find_datasets(store, config.offline.datasets, reader)
    if not dry_run:
        fork_run(config)
    train_run(config, dry_run, hints=[])


@datasets_app.command("list")
def datasets_list(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this dataset.")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """All complete versions, oldest first, with the runs that train from them."""
    facts = dataset_facts(store, name)
    if as_json:
        return out_json(facts)
    rows = [
        (
            each["dataset"],
            each["version"],
            f"{each['run_id']} {each['policy_version']}",
            each["rollouts"],
            "–" if each["reward"] is None else f"{each['reward']:.3f}",
            f"{each['age_days']:.1f} d",
            ", ".join(each["used_by"]),
        )
        for each in facts
    ]
    return print_table(("dataset", "version", "collected by", "rollouts", "reward", "age", "trained from it"), rows)


@datasets_app.command("prune")
def datasets_prune(
    name: Annotated[str, typer.Argument(help="The dataset.")],
    keep_last: Annotated[int | None, typer.Option(help="Keep so many newest versions.", min=1)] = None,
    keep_days: Annotated[float | None, typer.Option(help="Keep versions younger than this.", min=0)] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete. Without this, it is only listed.")] = False,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Delete old versions of a dataset, except the newest and versions that a run of this store trains from."""
    from roundhouse.errors import StoreError
    from roundhouse.stages.datasets import dataset_names, retain_versions

    if keep_last is None and keep_days is None:
        raise typer.BadParameter("nothing to keep is named. Set --keep-last, --keep-days or both.")
    if name not in (existing := dataset_names(store)):
        raise StoreError(f"No dataset {name!r}. Available: {', '.join(existing) or 'none'}.")
    gone = retain_versions(store, name, keep_last, keep_days, dry_run=not delete)
    for uri in gone:
        out(uri)
    out(f"{len(gone)} versions {'deleted' if delete else 'can go; delete them with --delete'}")


def dataset_facts(store: str, name: str | None = None) -> list[dict[str, Any]]:
    """Return the facts of each version for a person.

    Raises:
        StoreError: the dataset does not exist.
    """
    from roundhouse.errors import StoreError
    from roundhouse.stages.datasets import dataset_names, dataset_versions, users_of_datasets
    from roundhouse.store.stage import read_manifest

    names = dataset_names(store)
    if name is not None and name not in names:
        raise StoreError(f"No dataset {name!r}. Available: {', '.join(names) or 'none'}.")
    try:
        users = users_of_datasets(store)
    except StoreError as error:  # of one run; the versions are readable
        log.warning("the users of datasets are not known: %s", error)
        users = {}
    facts = []
    for each in names if name is None else [name]:
        for reference in dataset_versions(store, each):
            manifest = read_manifest(reference)
            facts.append(
                {
                    "dataset": each,
                    "version": reference.uri.rsplit("/", 1)[-1],
                    "uri": reference.uri,
                    "run_id": manifest.run_id,
                    "policy_version": reference.policy_version,
                    "rollouts": reference.counts.get("requested", 0),
                    "reward": manifest.metrics.get("reward/mean"),
                    "age_days": (time.time() - manifest.finished_at) / DAY,
                    "used_by": users.get(reference.uri, []),
                }
            )
    return facts
