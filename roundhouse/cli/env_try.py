"""`roundhouse env try`: a few rollouts of an environment without services."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundhouse.cli.options import JsonOption, Overrides, out, out_json

if TYPE_CHECKING:
    from roundhouse.config.models import RunConfig
    from roundhouse.trajectories.records import Rollout

app = typer.Typer(no_args_is_help=True, help="Environments, tried and tested.")

FAILED = 1
"""Exit code if a rollout failed."""


@app.command("try")
def env_try(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="file.py:Class, a built-in kind, or a configuration file (YAML).")
    ],
    reply: Annotated[
        list[str] | None,
        typer.Option(help="Reply of a turn: a text, or tool({…}); may be repeated. Left out: random replies."),
    ] = None,
    overrides: Overrides = None,
    rollouts: Annotated[int, typer.Option(help="How many rollouts are played.", min=1)] = 3,
    as_json: JsonOption = False,
) -> None:
    """Play rollouts with scripted or random replies: conversation, reward, and errors with their line of code.

    No service, engine or model is needed. Exits with 1 if a rollout failed.
    """
    import asyncio

    from roundhouse.rollout.trial import play_trial

    played = asyncio.run(play_trial(_config_of(target, overrides or []), reply or [], rollouts))
    if as_json:
        out_json([_as_json(rollout) for rollout in played])
    else:
        for rollout in played:
            _show(rollout)
    if not played or any(rollout.failure_code for rollout in played):
        raise typer.Exit(FAILED)


def _config_of(target: str, overrides: list[str]) -> RunConfig:
    """Return a configuration with the environment that is meant."""
    from roundhouse.config.loading import load_config, load_tree

    if target.endswith((".yaml", ".yml")):
        return load_config(Path(target), overrides)
    environment = {"kind": "custom", "target": target} if ":" in target else {"kind": target}
    return load_tree({"run_id": "try", "environment": environment}, overrides, target)


def _as_json(rollout: Rollout) -> dict[str, Any]:
    return {
        "task_id": str(rollout.task.get("task_id", "")),
        "status": rollout.status.value,
        "reward": rollout.reward,
        "reward_components": rollout.reward_components,
        "metrics": rollout.metrics,
        "failure_code": rollout.failure_code,
        "failure_detail": rollout.failure_detail,
        "items": rollout.items,
    }


def _show(rollout: Rollout) -> None:
    from roundhouse.trajectories.records import conversation_lines

    out(f"task {rollout.task.get('task_id', '')}")
    for line in conversation_lines(rollout.items):
        out(f"  {line}")
    if rollout.failure_code:
        out(f"  failed: {rollout.failure_code}: {rollout.failure_detail}\n")
        return
    parts = ", ".join(f"{name} {value:g}" for name, value in rollout.reward_components.items())
    reward = "none" if rollout.reward is None else f"{rollout.reward:g}"
    out(f"  {rollout.status.value}, reward {reward}{f' ({parts})' if parts else ''}\n")
