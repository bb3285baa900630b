"""Code that a store's run.json names is executed only if the user has named it or trusts the store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from roundhouse.config.consent import unnamed_code
from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from roundhouse.store.run import open_run
from tests.gym.kinds import needs
from tools.ignore_keys import sections

ROUNDHOUSE = Path(sys.executable).with_name("roundhouse")


def planted(tmp_path: Path) -> RunConfig:
    """A run with a run.json that names a file; the file leaves a mark when it is executed."""
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
        {"generation": {"backend": "transformers"}, "train": {"service": {"kind": "process", "launcher": "ray"}}},
    ],
    ids=["default", "built-in worker", "our images", "built-in names"],
)
def test_a_configuration_of_built_in_parts_names_no_code(tree: dict[str, object]) -> None:
    assert unnamed_code(parse_config(tree | {"run_id": "r"}), []) == {}


TERMINAL = {"kind": "terminal"}
BUNDLED = {"kind": "bundled", "name": "smollm2-135m-instruct"}
KUBERNETES = {"kind": "kubernetes", "store_claim": "c"}


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"environment": {"kind": "worker", "worker": "a.py:W", "train_data": "a.jsonl"}}, "environment.worker"),
        (
            {"environment": {"kind": "worker", "worker": "simple", "evaluator": "a.py:E", "train_data": "a.jsonl"}},
            "environment.evaluator",
        ),
        ({"environment": {"kind": "dataset", "data": "a.csv", "reward": "a.py:f"}}, "environment.reward"),
        ({"environment": {"kind": "dataset", "data": "a.csv", "reward": ["a.py:f"]}}, "environment.reward"),
        ({"train": {"algorithm": {"kind": "custom", "target": "a.py:A"}}}, "train.algorithm.target"),
        pytest.param(
            {"environment": TERMINAL | {"sandbox": {"kind": "custom", "target": "a.py:A"}}},
            "environment.sandbox.target",
            marks=needs("terminal"),
        ),
        ({"rollout": {"curriculum": {"kind": "custom", "target": "a.py:A"}}}, "rollout.curriculum.target"),
        ({"policy": {"kind": "pretrained", "path": "/model"}}, "policy.path"),
        ({"policy": BUNDLED | {"chat_template": "/etc/passwd"}}, "policy.chat_template"),
        ({"generation": {"engine_url": "http://a:1"}}, "generation.engine_url"),
        ({"tracking": {"uri": "http://a:1"}}, "tracking.uri"),
        ({"infra": {"ray": {"address": "a:1"}}}, "infra.ray.address"),
        ({"infra": {"state": "/home/you/evil"}}, "infra.state"),
        ({"infra": KUBERNETES | {"state": "/home/you/evil"}}, "infra.state"),
        ({"infra": KUBERNETES | {"environment": {"LD_PRELOAD": "/a.so"}}}, "infra.environment"),
    ],
    ids=str,
)
def test_every_key_that_names_code_counts(tree: dict[str, object], key: str) -> None:
    assert unnamed_code(parse_config(tree | {"run_id": "r"}), []).keys() == {key}


NO_PLACE = {
    *(
        "agent",
        "close_route",
        "cpu",
        "currency",
        "directories",
        "environments",
        "experiment",
        "instructions",
        "judges",
        "labels",
    ),
    *(
        "memory",
        "metric",
        "namespace",
        "node_selector",
        "priority_class",
        "question",
        "queue",
        "queue_priority",
        "register_as",
        "run_id",
    ),
    *(
        "runtime_class",
        "scratch",
        "service_account",
        "sets",
        "shared_memory",
        "shown",
        "system_prompt",
        "criteria",
    ),
    *("target_modules", "tool_call_parser", "weights", "cache_claim", "store_claim", "ray_service", "secret"),
    *(
        f"{kind}Environment.{key}"
        for kind in ("Command", "Mixture", "NemoGym")
        for key in ("train_tasks", "heldout_tasks")
    ),
    *("WorkerEnvironment.train_data", "WorkerEnvironment.heldout_data"),
    *(f"ReasoningGymSection.{key}" for key in ("dataset", "datasets", "options", "prompt")),
    *(f"OpenEnvSection.{key}" for key in ("action", "fields", "observation", "prompt", "reset", "url")),
    *("ReasoningGymPart.options", "TextArenaSection.game", "TextArenaSection.options"),
    *(f"GymnasiumSection.{key}" for key in ("actions", "options", "prompt")),
    *(f"SkyRLGymSection.{key}" for key in ("data", "env_config", "split", "subset")),
    *("DatasetEnvironment.data", "DatasetEnvironment.prompt", "DatasetEnvironment.split", "DatasetEnvironment.subset"),
    *(
        "Endpoint.kind",
        "Endpoint.weight_update",
        "Endpoint.model",
        "Judge.model",
        "TinkerService.base_model",
        "Toleration.key",
        "Toleration.value",
    ),
    *("GenerationConfig.weight_sync", "OfflineConfig.datasets", "ResumeConfig.path", "RunConfig.store"),
}
"""Keys with text that name no code, file or server. The person's command names the store and the checkpoint of a fork; datasets
are read like the store. Rows go to the policy; they reach a server only with its key."""


def text_keys() -> Iterator[tuple[type[BaseModel], str]]:
    """Every key of a run's configuration that can hold a free text, with its section."""

    def holds_text(annotation: Any) -> bool:
        return annotation is str or any(holds_text(each) for each in get_args(annotation))

    for section in dict.fromkeys(sections(RunConfig)):
        for key, field in section.model_fields.items():
            if holds_text(field.annotation):
                yield section, key


def asked_about(section: type[BaseModel], key: str) -> bool:
    """Return whether consent is requested for a value of a configuration's forms under this key."""
    beside = {
        **{"url": "http://a:1", "base_url": "http://a:1", "train_tasks": "a", "token_variable": "A"},
        **{"api_key_variable": "A", "parameters": {"api_key": {"variable": "A"}}},
    }
    set_beside = {name: value for name, value in beside.items() if name in section.model_fields and name != key}
    for value in ("/a.py:A", ("/a.py:A",), {"a": "/a.py:A"}, {"api_key": {"variable": "A"}}):
        unset = dict.fromkeys(section.model_fields)
        made = section.model_construct(**unset | set_beside | {key: value})
        if any(name.split(".")[0] == key for name in unnamed_code(made, [])):
            return True
    return False


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_a_key_with_text_is_asked_about_or_known_to_name_no_place() -> None:
    """A new key that names a class, a file, an image or a server cannot be forgotten."""
    known = {(section, key) for section, key in text_keys() if {key, f"{section.__name__}.{key}"} & NO_PLACE}
    asked = {(section, key) for section, key in text_keys() if asked_about(section, key)}
    assert asked == {*text_keys()} - known


AGENT = {"kind": "agent", "url": "http://a:1", "agent": "a"}
ROWS = {"train_tasks": "a", "heldout_tasks": "a"}
REMOTE = {"kind": "remote", "url": "http://a:1"}
JUDGE = {"base_url": "http://a/v1", "model": "m"}
CRITERIA = {"polite": {"question": "Is it polite?"}}


@pytest.mark.parametrize(
    ("tree", "keys"),
    [
        ({"environment": ROWS | AGENT}, ["environment.heldout_tasks", "environment.train_tasks", "environment.url"]),
        (
            {"environment": {"kind": "mixture", "environments": {"one": AGENT}} | ROWS},
            ["environment.environments.one.url"],
        ),
        (
            {
                "environment": {
                    "kind": "mixture",
                    "environments": {"one": AGENT | ROWS | {"head_token_variable": "AWS_SECRET_ACCESS_KEY"}},
                }
            },
            [f"environment.environments.one.{key}" for key in ("head_token_variable", *sorted(ROWS), "url")],
        ),
        (
            {"environment": {"kind": "mixture", "environments": {"one": AGENT | {"head_token_file": "/k"}}} | ROWS},
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
        (
            {
                "environment": {
                    "kind": "custom",
                    "target": "a.py:A",
                    "parameters": {"servers": [{"pwd": {"file": "/f"}}]},
                }
            },
            ["environment.parameters.servers.0.pwd.file", "environment.target"],
        ),
    ],
    ids=[
        *("rows", "rows of a mixture", "agent", "of a mixture", "judge without key", "judge"),
        *("remote trainer", "own class", "deep in parameters"),
    ],
)
def test_a_secret_and_where_it_would_be_sent_count(tree: dict[str, object], keys: list[str]) -> None:
    config = parse_config(tree | {"run_id": "r"})
    assert sorted(unnamed_code(config, [])) == keys
    assert unnamed_code(config, [f"{key}=mine" for key in keys]) == {}
