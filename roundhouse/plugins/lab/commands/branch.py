"""`roundhouse branch`: continue stored rollouts from one of their turns."""

from __future__ import annotations

from typing import Annotated

import typer

from roundhouse.cli.options import (
    DEFAULT_STORE,
    JsonOption,
    StoreOption,
    TrustStore,
    accept_code,
    figure,
    out,
    out_json,
    store_name,
)


def branch_turn(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run that collected the rollouts.")],
    rollout: Annotated[list[str], typer.Option(help="Id of a stored rollout, such as train/7/0; may be repeated.")],
    iteration: Annotated[int, typer.Option(help="The iteration that collected them.", min=0)],
    turn: Annotated[int, typer.Option(help="First turn to sample again; 0 is the first reply.", min=0)],
    name: Annotated[str, typer.Option(help="Dataset that gets the branches.", callback=store_name)],
    version: Annotated[
        str, typer.Option(help="Policy version that continues: newest, promoted or a number.")
    ] = "newest",
    samples: Annotated[int, typer.Option(help="Branches of each rollout.", min=1)] = 4,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
    trust_store: TrustStore = False,
) -> None:
    """Continue stored rollouts from one of their turns with any policy version.

    The environment is replayed up to that turn, and each of its answers compared with the recorded one. Branches are a
    dataset to train from; only the new turns are generated and trained on.
    """
    from roundhouse.infra.services import services_of
    from roundhouse.plugins.lab.replays.branches import branch, stored_rollouts
    from roundhouse.stages.refit import engine_at, engine_released_after_use
    from roundhouse.store.run import load_run, no_such_version, version_named

    run = load_run(store, run_id)
    accept_code(run.config, None, trust_store)
    number = version_named(run, version)
    if (checkpoint := run.checkpoint(number).reference()) is None:
        raise no_such_version(run, number)
    stored_rollouts(run, iteration, rollout)
    with services_of(run.config), engine_released_after_use(run):
        outcome = branch(run, iteration, rollout, turn, name, engine_at(run, number), checkpoint, samples)
    if as_json:
        facts = {"rewards": outcome.rewards, "before": outcome.before, "reasons": outcome.reasons}
        return out_json({"version": outcome.version.uri, "generated_tokens": outcome.generated_tokens} | facts)
    for rollout_id, rewards in outcome.rewards.items():
        mean = sum(rewards) / len(rewards) if rewards else None
        out(
            f"{rollout_id}: {figure(outcome.before[rollout_id])} → {figure(mean)} over {len(rewards)} branches from turn {turn}"
        )
    for reason, count in outcome.reasons.items():
        out(f"failed: {count} {reason}")
    return out(f"{outcome.generated_tokens} tokens generated; {outcome.version.uri}")
