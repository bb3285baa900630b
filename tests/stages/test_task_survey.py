"""Inputs of a run besides its configuration: task rows and user code are recorded, and unusual rows are reported."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.code_digest import digest_of_target
from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError
from roundhouse.stages import evaluate
from roundhouse.stages.report import summarize
from roundhouse.stages.task_survey import code_digests, input_digests, task_warnings
from roundhouse.store.run import Run, load_run, open_run
from roundhouse.store.run_inputs import RECORD, accepted_changes
from roundhouse.store.stage import read_manifest
from roundhouse.trajectories.records import Rollout, Status

WORLD = """
from roundhouse.environments.base import Environment, Verdict
from roundhouse.environments.task_files import read_task_rows
from helper import REWARD

class World(Environment):
    name = "world"

    def __init__(self, train, heldout):
        self.files = {"train": train, "heldout": heldout}

    def tasks(self, split):
        return read_task_rows(self.files[split], split)

    async def verify(self, session, row, response):
        return Verdict(REWARD)
"""


def rows(*questions: str, **fields: Any) -> str:
    tasks = [{"responses_create_params": {"input": question}, **fields} for question in questions]
    return "".join(json.dumps(task) + "\n" for task in tasks)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A class in a file that imports another one, and a task file for each split."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "helper.py").write_text("REWARD = 1.0\n")
    (tmp_path / "world.py").write_text(WORLD)
    (tmp_path / "train.jsonl").write_text(rows("1+1?", "2+2?"))
    (tmp_path / "heldout.jsonl").write_text(rows("3+3?"))
    return tmp_path


def config(world: Path, **keys: Any) -> RunConfig:
    parameters = {split: str(world / f"{split}.jsonl") for split in ("train", "heldout")}
    environment = {"kind": "custom", "target": f"{world}/world.py:World", "parameters": parameters}
    return parse_config({"run_id": "r", "store": str(world / "store"), "environment": environment, **keys})


def remote(world: Path, **keys: Any) -> RunConfig:
    files = {f"{split}_tasks": str(world / f"{split}.jsonl") for split in ("train", "heldout")}
    return config(world, environment={"kind": "remote", "url": "http://127.0.0.1:1", **files}, **keys)


def begin_collection(run: Run) -> None:
    """Let the run have rollouts of its inputs."""
    run.begin(run.stage(1, "collect"), policy_version=0)


CHANGES = {
    "a_row_in_front": (
        "train.jsonl",
        rows("0+0?", "1+1?", "2+2?"),
        r"training tasks: 2 rows, sha256 .* -> 3 rows, sha256",
    ),
    "another_answer": ("train.jsonl", rows("1+1?", "2+2?", answer=5), "training tasks: 2 rows, .* -> 2 rows, "),
    "another_order": ("train.jsonl", rows("2+2?", "1+1?"), "training tasks: "),
    "held_out_rows": ("heldout.jsonl", rows("3+3?", "4+4?"), "held-out tasks: 1 rows, .* -> 2 rows, "),
    "the_class": ("world.py", WORLD + "# changed\n", r"environment.target: sha256 \w+ -> sha256 "),
    "a_module_of_the_class": ("helper.py", "REWARD = 0.0\n", r"environment.target: sha256 \w+ -> sha256 "),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_input_is_refused_by_name_until_it_is_accepted(world: Path, change: str) -> None:
    open_run(config(world), inputs=input_digests(config(world)))
    run = open_run(config(world), inputs=input_digests(config(world)))
    begin_collection(run)
    before = run.inputs
    file, text, words = CHANGES[change]
    (world / file).write_text(text)
    with pytest.raises(ConfigError, match=f"(?s){words}.*--set resume.changed_inputs=accept"):
        open_run(config(world), first_start=True, inputs=input_digests(config(world)))
    accepting = config(world, resume={"changed_inputs": "accept"})
    changed = open_run(accepting, first_start=True, inputs=input_digests(accepting))
    assert changed.inputs != before
    [accepted] = accepted_changes(changed.location)
    assert len(accepted["changed"]) == 1
    open_run(config(world), inputs=input_digests(config(world)))


def test_a_bug_is_mended_without_a_flag_before_the_first_rollout(world: Path) -> None:
    open_run(config(world), inputs=input_digests(config(world)))
    (world / "world.py").write_text(WORLD + "# mended\n")
    mended = open_run(config(world), inputs=input_digests(config(world)))
    assert mended.inputs == input_digests(config(world))


def test_rows_of_a_server_are_compared_as_those_of_a_class(world: Path) -> None:
    begin_collection(open_run(remote(world), inputs=input_digests(remote(world))))
    (world / "train.jsonl").write_text("\n" + rows("1+1?", "2+2?"))
    with pytest.raises(ConfigError, match="environment: training tasks: "):  # line-1 is line-2 now
        open_run(remote(world), inputs=input_digests(remote(world)))


def test_every_stage_is_recorded_with_the_inputs_that_it_read(world: Path) -> None:
    def stage_of(iteration: int, **keys: Any) -> str | None:
        given = config(world, **keys)
        run = open_run(given, inputs=input_digests(given))
        attempt = load_run(given.store, run.run_id).begin(run.stage(iteration, "collect"), policy_version=0)
        return read_manifest(attempt.commit()).provenance.inputs

    before = stage_of(1)
    (world / "train.jsonl").write_text(rows("5+5?"))
    after = stage_of(2, resume={"changed_inputs": "accept"})
    assert None not in (before, after)
    assert before != after


def test_a_run_of_an_older_version_is_continued_and_gets_a_record(world: Path) -> None:
    run = open_run(config(world))
    assert run.inputs is None
    begin_collection(run)
    assert open_run(config(world), inputs=input_digests(config(world))).inputs is not None
    assert run.location.exists(RECORD)
    (world / "train.jsonl").write_text(rows("5+5?"))
    with pytest.raises(ConfigError, match="training tasks"):
        open_run(config(world), inputs=input_digests(config(world)))


def test_a_start_refuses_changed_inputs_before_anything_runs(world: Path) -> None:
    given = config(world)
    begin_collection(open_run(given, inputs=input_digests(given)))
    (world / "train.jsonl").write_text(rows("5+5?"))
    error = CliRunner().invoke(app, ["runs", "resume", "r", "--store", given.store, "--trust-store"]).exception
    assert isinstance(error, ConfigError)
    assert "environment: training tasks: 2 rows" in str(error)


def test_code_is_known_by_its_files_or_by_its_package(world: Path) -> None:
    assert digest_of_target("numpy:array", "key") == f"numpy {__import__('numpy').__version__}"
    assert digest_of_target("roundhouse.environments.calculator:Calculator", "key") is None
    assert digest_of_target("helper:REWARD", "key") == digest_of_target(f"{world}/helper.py:REWARD", "key")
    (world / "grade.py").write_text("def right(): ...\n")
    keys = {"rollout": {"curriculum": {"kind": "custom", "target": f"{world}/grade.py:Mine"}}}
    environment = {
        "kind": "command",
        "command": ["python", str(world / "helper.py")],
        "train_tasks": "t.jsonl",
        "verifier": f"{world}/grade.py:right",
    }
    named = code_digests(config(world, environment=environment, **keys))
    assert set(named) == {"environment.command", "environment.verifier", "rollout.curriculum.target"}
    built_in = parse_config({"run_id": "r", "store": str(world / "store")})
    assert input_digests(built_in) == {}


def test_a_package_of_sources_is_known_by_the_modules_that_are_imported(world: Path) -> None:
    package = world / "mypackage"
    for file, text in {
        "__init__.py": "", "env.py": "from . import tools\nfrom mypackage.deep.rules import rule\n", "tools.py": "",
        "deep/__init__.py": "", "deep/rules.py": "from ..shared import x\n", "shared.py": "x = 1\n", "other.py": "",
    }.items():  # fmt: skip
        (package / file).parent.mkdir(exist_ok=True, parents=True)
        (package / file).write_text(text)
    seen = {digest_of_target("mypackage.env:World", "key")}
    for file in ("env.py", "tools.py", "deep/rules.py", "shared.py", "deep/__init__.py"):
        (package / file).write_text((package / file).read_text() + "# changed\n")
        seen.add(digest_of_target("mypackage.env:World", "key"))
    assert len(seen) == 6
    (package / "other.py").write_text("# changed\n")
    assert digest_of_target("mypackage.env:World", "key") in seen


def test_held_out_tasks_that_are_training_tasks_are_counted(world: Path) -> None:
    assert task_warnings(config(world)) == []
    (world / "heldout.jsonl").write_text(rows("3+3?", "2+2?", split="heldout"))
    [warning] = task_warnings(config(world))
    assert warning.startswith("1 of 2 held-out tasks are training tasks, too (line-2)")
    (world / "train.jsonl").write_text(rows("What?", task_id="t1") + rows("9+9?", task_id="t2"))
    (world / "heldout.jsonl").write_text(rows("9 and 9?", task_id="t2"))
    [warning] = task_warnings(remote(world))
    assert "1 of 1 held-out tasks are training tasks, too (t2)" in warning


def test_tasks_that_differ_only_in_their_answer_are_not_the_same(world: Path) -> None:
    (world / "train.jsonl").write_text("".join(rows("Guess.", hidden=number) for number in range(6)))
    (world / "heldout.jsonl").write_text("".join(rows("Guess.", hidden=number) for number in range(5, 9)))
    [warning] = task_warnings(config(world))
    assert warning.startswith("1 of 4 held-out tasks are training tasks, too (line-1)")


def test_repeated_ids_of_a_class_are_counted(world: Path) -> None:
    repeating = WORLD.replace("return read", 'return [row | {"task_id": split} for row in read').replace(
        "split)\n\n    a", "split)]\n\n    a"
    )
    (world / "repeating.py").write_text(repeating)
    environment = config(world).environment.model_dump() | {"target": f"{world}/repeating.py:World"}
    [warning] = task_warnings(config(world, environment=environment))
    assert warning.startswith("2 of 2 training tasks share 1 ids (train)")


def test_rows_for_which_the_system_prompt_has_no_effect_are_counted(world: Path) -> None:
    own = [{"role": "system", "content": "Own."}, {"role": "user", "content": "1+1?"}]
    (world / "train.jsonl").write_text(rows("2+2?") + json.dumps({"responses_create_params": {"input": own}}) + "\n")
    assert task_warnings(config(world)) == []
    [warning] = task_warnings(config(world, rollout={"system_prompt": "Be brief."}))
    assert warning.startswith("rollout.system_prompt has no effect on 1 of 3 task rows")


def test_a_dry_run_prints_the_warnings(tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text(
        "from roundhouse.environments.calculator import Calculator\n\nclass World(Calculator):\n"
        "    def tasks(self, split):\n        return list(super().tasks('train'))[:4]\n"
    )
    environment = {"kind": "custom", "target": f"{tmp_path}/same.py:World"}
    keys = {"run_id": "r", "store": str(tmp_path / "store"), "environment": environment}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(keys))
    done = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml"), "--dry-run"])
    assert "4 of 4 held-out tasks are training tasks" in " ".join(done.output.split())


def test_a_summary_knows_whether_evaluated_tasks_were_trained_on(world: Path) -> None:
    run = open_run(config(world))
    for version, shared in ((0, 0.0), (1, 0.0)):
        attempt = run.begin(run.stage(version, "evaluate"), policy_version=version)
        attempt.commit(metrics={"evaluation/reward/mean": 0.5, "evaluation/tasks_in_training": shared})
        run.begin(run.checkpoint(version), policy_version=version).commit()
    assert summarize(run)["evaluation"]["never_trained_on"]
    open_run(config(world), inputs=input_digests(config(world)))
    (world / "train.jsonl").write_text(rows("3+3?"))
    accepting = config(world, resume={"changed_inputs": "accept"})
    open_run(accepting, inputs=input_digests(accepting))
    assert not summarize(run)["evaluation"]["never_trained_on"], "the tasks before the change may have been any"


@pytest.mark.parametrize(("heldout", "shared"), [("3+3?", 0.0), ("1+1?", 1.0)])
def test_an_evaluation_counts_its_tasks_that_are_training_tasks(
    world: Path, monkeypatch: pytest.MonkeyPatch, heldout: str, shared: float
) -> None:
    def collect(specs: Any, *_: Any, **__: Any) -> Any:
        played = [Rollout(spec.group_id, spec.sample, {}, "e", Status.COMPLETED, reward=0.6) for spec in specs]
        return mock.Mock(rollouts=played)

    collection = mock.Mock()
    collection.collect.side_effect = collect
    monkeypatch.setattr(evaluate, "open_collector", lambda *_: collection)
    (world / "heldout.jsonl").write_text(rows(heldout, split="heldout"))
    evaluate.evaluate_version(open_run(config(world)), 0, "http://engine")
    assert collection.commit.call_args.kwargs["metrics"]["evaluation/tasks_in_training"] == shared
