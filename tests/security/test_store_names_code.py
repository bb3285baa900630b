"""What a store's run.json names is executed only where the person who starts the run has named it, or trusts the store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roundhouse.config.loading import parse_config, unnamed_code
from roundhouse.config.models import RunConfig
from roundhouse.store.run import open_run

ROUNDHOUSE = Path(sys.executable).with_name("roundhouse")


def planted(tmp_path: Path) -> RunConfig:
    """A run whose run.json names a file that leaves a mark when it is executed."""
    code = tmp_path / "evil.py"
    code.write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\nclass Code: ...\n")
    environment = {"kind": "custom", "target": f"{code}:Code"}
    return parse_config({"run_id": "r", "store": str(tmp_path / "store"), "environment": environment})


@pytest.mark.parametrize(
    "command", [["runs", "resume", "r"], ["train-offline", "r", "--run-id", "new", "--dataset", "d"]], ids=" ".join
)
def test_code_that_only_the_store_names_is_refused_with_the_remedy(tmp_path: Path, command: list[str]) -> None:
    config = planted(tmp_path)
    run = open_run(config)
    run.begin(run.checkpoint(0), policy_version=0).commit()
    ended = subprocess.run(
        [ROUNDHOUSE, *command, "--store", config.store],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "400", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    assert ended.returncode == 78, ended.stderr
    assert f"environment.target: {tmp_path}/evil.py:Code" in ended.stderr
    assert "--trust-store" in ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil.py", "store"], "nothing was executed or started"
    assert [path.name for path in (tmp_path / "store/runs").iterdir()] == ["r"]


def test_code_that_the_caller_names_is_accepted_and_only_that(tmp_path: Path) -> None:
    config = planted(tmp_path).model_copy(
        update={
            "infra": parse_config(
                {
                    "run_id": "r",
                    "infra": {"kind": "kubernetes", "store_claim": "c", "trainer": {"image": "mirror/evil:1"}},
                }
            ).infra
        }
    )
    assert unnamed_code(config, []).keys() == {"environment.target", "infra.trainer.image"}
    assert unnamed_code(config, ["environment.target=mine.py:Code"]).keys() == {"infra.trainer.image"}
    assert unnamed_code(config, ["environment={}", "infra.trainer.image=x"]) == {}


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"environment": {"kind": "worker", "worker": "agent", "train_data": "a.jsonl"}},
        {"infra": {"kind": "kubernetes", "store_claim": "c"}},
        {"environment": {"kind": "remote", "url": "http://127.0.0.1:1", "train_tasks": "a", "heldout_tasks": "a"}},
    ],
    ids=["default", "built-in worker", "our images", "remote"],
)
def test_a_configuration_of_built_in_parts_names_no_code(tree: dict[str, object]) -> None:
    assert unnamed_code(parse_config(tree | {"run_id": "r"}), []) == {}


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"environment": {"kind": "worker", "worker": "a.py:W", "train_data": "a.jsonl"}}, "environment.worker"),
        (
            {"environment": {"kind": "worker", "worker": "simple", "evaluator": "a.py:E", "train_data": "a.jsonl"}},
            "environment.evaluator",
        ),
        ({"train": {"algorithm": {"kind": "custom", "target": "a.py:A"}}}, "train.algorithm.target"),
    ],
    ids=str,
)
def test_every_key_that_names_code_counts(tree: dict[str, object], key: str) -> None:
    assert unnamed_code(parse_config(tree | {"run_id": "r"}), []).keys() == {key}


AGENT = {"kind": "agent", "url": "http://a:1", "agent": "a", "train_tasks": "a", "heldout_tasks": "a"}
REMOTE = {"kind": "remote", "url": "http://a:1"}
JUDGE = {"base_url": "http://a/v1", "model": "m"}
CRITERIA = {"polite": {"question": "Is it polite?"}}


@pytest.mark.parametrize(
    ("tree", "keys"),
    [
        ({"environment": AGENT}, []),
        (
            {"environment": AGENT | {"head_token_variable": "AWS_SECRET_ACCESS_KEY"}},
            ["environment.head_token_variable", "environment.url"],
        ),
        (
            {"environment": {"kind": "mixture", "environments": {"one": AGENT | {"head_token_file": "/etc/key"}}}},
            ["environment.environments.one.head_token_file", "environment.environments.one.url"],
        ),
        ({"environment": {"kind": "calculator", "rubric": {"judge": JUDGE, "criteria": CRITERIA}}}, []),
        (
            {
                "environment": {
                    "kind": "calculator",
                    "rubric": {"judge": JUDGE | {"api_key_variable": "KEY"}, "criteria": CRITERIA},
                }
            },
            ["environment.rubric.judge.api_key_variable", "environment.rubric.judge.base_url"],
        ),
        ({"train": {"service": REMOTE}}, ["train.service.token_variable", "train.service.url"]),
        (
            {"environment": {"kind": "custom", "target": "a.py:A", "parameters": {"api_key": {"variable": "KEY"}}}},
            ["environment.parameters.api_key.variable", "environment.target"],
        ),
    ],
    ids=["no secret", "agent", "of a mixture", "judge without key", "judge", "remote trainer", "own class"],
)
def test_a_secret_and_where_it_would_be_sent_count(tree: dict[str, object], keys: list[str]) -> None:
    config = parse_config(tree | {"run_id": "r"})
    assert sorted(unnamed_code(config, [])) == keys
    assert unnamed_code(config, [f"{key}=mine" for key in keys]) == {}
