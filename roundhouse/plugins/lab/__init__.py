"""Examine recorded runs: run stages again, judge or branch rollouts, find causes and symptoms, simulate changes."""

from __future__ import annotations

from roundhouse.plugins import Plugin

_COMMANDS = f"{__name__}.commands"

PLUGINS = {
    "command.replay": Plugin(
        f"{_COMMANDS}.replays:replay_run",
        traits="Run recorded stages again, with or without substitutions, and compare them with the original.",
    ),
    "command.replays": Plugin(
        f"{_COMMANDS}.replays:replays_app", traits="Replays of a store's runs: what came out of them."
    ),
    "command.rescore": Plugin(
        f"{_COMMANDS}.verdicts:rescore_rollouts",
        traits="Judge stored rollouts with the environment as it is now, or as --set environment.… changes it. Nothing is "
        "generated.",
    ),
    "command.bisect": Plugin(
        f"{_COMMANDS}.bisect:bisect_run",
        traits="Find the iteration that made a metric fall, and the cause: rows, reward code, configuration, weights, "
        "engine or code.",
    ),
    "command.branch": Plugin(
        f"{_COMMANDS}.branch:branch_turn",
        traits="Continue stored rollouts from one of their turns with any policy version.",
    ),
    "command.env test": Plugin(
        f"{_COMMANDS}.verdicts:env_test",
        traits="Test whether the environment still answers and judges recorded rollouts as it did. Exits with 1 if not.",
    ),
    "command.simulate": Plugin(
        f"{_COMMANDS}.simulate:simulate",
        traits="Compare modes, bounds and replicas in virtual time; each option may be given several times.",
    ),
    "command.runs doctor": Plugin(
        f"{_COMMANDS}.doctor:runs_doctor",
        traits="Symptoms with cause and remedy; which part of an iteration binds, and what each single change would gain.",
    ),
    "operation.replay": Plugin(f"{__name__}.operations:replay"),
    "operation.rescore": Plugin(f"{__name__}.operations:rescore"),
    "operation.symptoms": Plugin(f"{_COMMANDS}.doctor:print_symptoms"),
}
