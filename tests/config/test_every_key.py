"""No key of a run's configuration does nothing: each is read by what carries the run out.

Two nets. The coarse one looks for a read of the key's name outside `roundhouse.config`, so that a key nobody reads is found
when its name is its own. The fine one is a table, shown_by.txt: of each key a test that fails when the key is ignored.
"""

from __future__ import annotations

import ast
import functools
import typing
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from roundhouse.config.environments import (
    AgentEnvironment,
    BugFixEnvironment,
    CodeEnvironment,
    CommandEnvironment,
    CustomEnvironment,
    EnvironmentConfig,
    EnvironmentSection,
    FrozenLakeEnvironment,
    GuessNumberEnvironment,
    MixtureEnvironment,
    NemoGymEnvironment,
    RemoteEnvironment,
    TerminalEnvironment,
    WorkerEnvironment,
)
from roundhouse.config.kubernetes import Toleration, TrainerPods
from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from roundhouse.config.section import RECORDED
from roundhouse.environments import load_any
from roundhouse.infra.kubernetes.stage_pod import pod
from roundhouse.stages.cost import budget_of, over_budget, totals_after
from roundhouse.store.run import open_run
from tools.ignore_keys import READERS, all_keys, sections, table

ROOT = Path(__file__).parents[2]
OPEN = 0
SHOWN_BY = {
    "Budget": "tests/config/test_every_key.py",
    "FailuresConfig.stall_seconds": "tests/health/test_policy.py",
    "GenerationConfig.inflight_requests": "tests/weight_sync/test_publish.py",
    "MegatronCoreGeneration.buffer_guaranteed_fraction": "tests/generation/test_trainer_engine.py",
    "MegatronCoreGeneration.num_cuda_graphs": "tests/generation/test_trainer_engine.py",
    "OfflineConfig.min_ess_fraction": "tests/stages/test_offline.py",
    "OfflineConfig.min_rollout_ess_fraction": "tests/stages/test_offline.py",
    "PlacementConfig": "tests/config/test_colocation.py",
    "RunConfig.placement": "tests/config/test_colocation.py",
    "DistillationConfig.teacher": "tests/training/test_trainer_algorithms.py",
    "ProcessService.context_parallel": "tests/training/test_ranks.py",
    "ProcessService.data_parallel_replicate": "tests/training/test_ranks.py",
    "ProcessService.expert_parallel": "tests/training/test_expert_ranks.py",
    "ProcessService.tensor_parallel": "tests/training/test_ranks.py",
    "RayService.context_parallel": "tests/training/test_ranks.py",
    "RayService.data_parallel_replicate": "tests/training/test_ranks.py",
    "RayService.expert_parallel": "tests/training/test_expert_ranks.py",
    "RayService.tensor_parallel": "tests/training/test_ranks.py",
    "ResidentService.context_parallel": "tests/training/test_ranks.py",
    "ResidentService.data_parallel_replicate": "tests/training/test_ranks.py",
    "ResidentService.expert_parallel": "tests/training/test_expert_ranks.py",
    "ResidentService.tensor_parallel": "tests/training/test_ranks.py",
    "Toleration.effect": "tests/config/test_every_key.py",
}
"""Keys that are handed over whole or read inside of `roundhouse.config`, and the tests that set them."""


SECTIONS = sorted(set(sections(RunConfig)), key=lambda section: section.__name__)
ELSEWHERE = (
    AgentEnvironment,
    CommandEnvironment,
    CustomEnvironment,
    MixtureEnvironment,
    NemoGymEnvironment,
    RemoteEnvironment,
    WorkerEnvironment,
)
BUILT_IN = [
    section
    for section in dict.fromkeys(sections(EnvironmentConfig))
    if issubclass(section, EnvironmentSection) and section not in ELSEWHERE
]


def names_read() -> set[str]:
    """Attributes that the code outside of `roundhouse.config` reads."""
    files = [file for folder in ("roundhouse", "flows", "tasks") for file in (ROOT / folder).rglob("*.py")]
    return {
        node.attr
        for file in files
        if (ROOT / "roundhouse/config") not in file.parents
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def test_every_key_is_read_by_what_carries_the_run_out() -> None:
    read = names_read()
    unread = {
        f"{section.__name__}.{key}"
        for section in SECTIONS
        if section not in BUILT_IN
        for key in section.model_fields
        if key not in read and section.__name__ not in SHOWN_BY
    }
    assert unread <= SHOWN_BY.keys(), "Nobody reads these: delete them, or refuse them with the remedy."


@pytest.mark.parametrize("shown", sorted(SHOWN_BY.items()), ids=lambda shown: shown[0])
def test_what_is_handed_over_whole_is_set_by_a_test(shown: tuple[str, str]) -> None:
    section, _, key = shown[0].partition(".")
    [fields] = [each.model_fields for each in SECTIONS if each.__name__ == section]
    text = (ROOT / shown[1]).read_text()
    assert [name for name in ([key] if key else fields) if name not in text] == []


def test_every_key_stands_in_the_table_of_what_shows_it() -> None:
    """`python -m tools.ignore_keys` proves the lines. An `open` key has the net above alone; there are not to be more."""
    lines = table()
    assert [line.key for line in lines] == list(all_keys()), (
        "a new key needs a line in shown_by.txt (tools/ignore_keys.py)"
    )
    assert {line.readers for line in lines} <= {*READERS, "default", "open"}
    assert sum(line.readers == "open" for line in lines) <= OPEN
    texts = {file: (ROOT / file).read_text() for line in lines for file in [line.test.split("::")[0]] if file}
    for line in lines:
        if line.test:
            file, test = line.test.split("::", 1)
            assert f"def {test.split('[')[0]}(" in texts[file], f"{line.key}: {line.test} is not there"


def test_every_limit_of_a_budget_is_held(tmp_path: Path) -> None:
    metrics = ("time/iteration", "cost/gpu_seconds", "cost/cpu_seconds", "cost/generated_tokens", "cost/total")
    used = totals_after({}, dict.fromkeys(metrics, 1e9))
    for limit in ("wall_hours", "gpu_hours", "cpu_hours", "generated_tokens", "money"):
        run = open_run(
            parse_config({"run_id": limit.replace("_", "-"), "store": str(tmp_path), "cost": {"budget": {limit: 1.0}}})
        )
        [line] = over_budget(budget_of(run), used)
        assert f"cost.budget.{limit}=1 are used" in line


def test_every_part_of_a_toleration_reaches_the_pod() -> None:
    taint = {"key": "gpu", "operator": "Equal", "value": "h100", "effect": "NoSchedule"}
    settings = TrainerPods.model_validate({"tolerations": [taint]})
    assert pod(settings, {}, "account")["tolerations"] == [taint]


def test_a_toleration_is_one_that_kubernetes_takes() -> None:
    def operator(**given: Any) -> str:
        return Toleration.model_validate(given).operator

    assert operator(key="gpu", value="h100") == operator(key="gpu", value="") == "Equal"
    assert operator(key="gpu") == operator() == operator(key="gpu", value=None) == "Exists"
    recorded = {"key": "gpu", "operator": "Exists", "value": "h100", "effect": None}
    assert Toleration.model_validate(recorded, context=RECORDED).model_dump() == recorded
    with pytest.raises(ValueError, match="operator is Exists and value 'h100': set operator to Equal"):
        operator(**recorded)
    with pytest.raises(ValueError, match="operator is Equal and value 'h100', without a key"):
        operator(value="h100")


# Built-in environments get their section's keys as arguments --------------------------------------------------------------

FEW: dict[str, Any] = {"problems": 40}
OTHER: dict[str, Any] = {
    "heldout_fraction": 0.5, "digits": 5, "upper": 15, "guesses": 5, "games": 3, "problems": 60, "operators": 4, "hops": 5,
    "entries": 20, "numbers": 4, "largest": 20, "blanks": 8, "most": 30, "worlds": 3, "changes": 0.9, "steps": 5,
    "constraints": 5, "size": 5, "holes": 2, "files": 5, "functions": 3, "families": ("capitals", "sentences"),
    "max_tokens": 20, "orders": 2,
}  # fmt: skip
NOT_IN_TASKS = {
    (CodeEnvironment, "concurrency"),
    (FrozenLakeEnvironment, "steps"),
    (GuessNumberEnvironment, "guesses"),
    (TerminalEnvironment, "sandbox"),
    (BugFixEnvironment, "sandbox"),
}
"""How many processes run answers, when an episode ends, and where commands run."""


def made_small(section: type[BaseModel], **keys: Any) -> Any:
    """The environment of a section, with few problems."""
    [kind] = typing.get_args(section.model_fields["kind"].annotation)
    few = {key: value for key, value in FEW.items() if key in section.model_fields}
    return made(kind, **few | keys)


@functools.cache
def tasks(section: type[BaseModel], **keys: Any) -> list[list[Any]]:
    """Both splits of the environment."""
    environment = made_small(section, **keys)
    return [list(environment.tasks(split)) for split in ("train", "heldout")]


@pytest.mark.parametrize("section", BUILT_IN, ids=lambda section: section.__name__)
def test_a_built_in_environment_is_made_by_its_kind(section: type[BaseModel]) -> None:
    assert type(made_small(section)).__name__ + "Environment" == section.__name__


@pytest.mark.parametrize(
    ("section", "key"),
    [
        (section, key)
        for section in BUILT_IN
        for key in section.model_fields
        if key not in ("kind", "rubric", "audit") and (section, key) not in NOT_IN_TASKS
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_every_key_of_a_built_in_environment_changes_its_tasks(section: type[BaseModel], key: str) -> None:
    assert tasks(section) != tasks(section, **{key: OTHER[key]})


def made(kind: str, **keys: Any) -> Any:
    return load_any(parse_config({"run_id": "r", "environment": {"kind": kind, **keys}}).environment)


async def test_an_episode_ends_after_as_many_guesses_and_steps_as_are_allowed() -> None:
    game = made("guess_number", upper=7, guesses=1)
    row = next(row for row in game.tasks("train") if row["hidden"] != 1)
    session = await game.seed_session(row)
    answers = [await game.tools()["guess"].call(session, number=1) for _ in range(2)]
    assert answers[1] == "no guesses left"

    lake = made("frozen_lake", problems=40, steps=4)
    state, _ = await lake.reset(lake.tasks("train")[0])
    said = {"output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "jump"}]}]}
    assert [(await lake.step(state, said)).truncated for _ in range(4)] == [False, False, False, True]


def test_no_more_processes_run_answers_at_once_than_are_allowed() -> None:
    assert made("code", problems=40, concurrency=1)._sandbox._threads._max_workers == 1
