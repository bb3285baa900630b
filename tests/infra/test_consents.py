"""A person is asked once about the code that a store names, and again when the code or its place is another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.config.loading import config_yaml, parse_config
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError
from roundhouse.infra.consents import record_consent, refuse_unaccepted_code, unaccepted_code


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROUNDHOUSE_STATE", raising=False)


def world(run_id: str = "r", target: str = "world.py:World", **more: Any) -> RunConfig:
    Path("world.py").touch()
    environment = {"kind": "custom", "target": target, "parameters": {"api_key": {"variable": "KEY"}}}
    return parse_config({"run_id": run_id, "store": "store", "environment": environment, **more})


def test_code_that_a_person_accepted_is_not_asked_about_again_in_any_run() -> None:
    assert unaccepted_code(world(), []).keys() == {"environment.target", "environment.parameters.api_key.variable"}
    record_consent(world())
    assert unaccepted_code(world("another"), []) == {}


def test_changed_code_another_class_and_another_secret_are_asked_about() -> None:
    record_consent(world())
    Path("world.py").write_text("import os")
    assert unaccepted_code(world(), [])
    record_consent(world())
    assert unaccepted_code(world(), []) == {}
    assert unaccepted_code(world(target="world.py:Other"), [])
    other = {"kind": "custom", "target": "world.py:World", "parameters": {"api_key": {"variable": "AWS_KEY"}}}
    assert unaccepted_code(parse_config({"run_id": "r", "environment": other}), [])


def test_an_accepted_secret_is_asked_about_with_another_server() -> None:
    def trained_at(url: str) -> RunConfig:
        return parse_config({"run_id": "r", "train": {"service": {"kind": "remote", "url": url}}})

    record_consent(trained_at("http://mine:1"))
    assert unaccepted_code(trained_at("http://mine:1"), []) == {}
    assert unaccepted_code(trained_at("http://theirs:1"), []).keys() == {
        "train.service.token_variable",
        "train.service.url",
    }


def test_a_state_directory_that_the_store_names_holds_no_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger can write consents where the run's own configuration points to."""
    planted = world(infra={"state": "planted"})
    monkeypatch.setenv("ROUNDHOUSE_STATE", "planted")
    record_consent(planted)
    monkeypatch.delenv("ROUNDHOUSE_STATE")
    assert "environment.target" in unaccepted_code(planted, [])


def test_a_consent_is_kept_beside_no_store_and_lists_its_keys() -> None:
    record_consent(world())
    [consent] = Path(".roundhouse/consents").iterdir()
    assert '"environment.target": "world.py:World"' in consent.read_text()


def test_a_person_who_starts_a_run_accepts_its_code(tmp_path: Path) -> None:
    config = world()
    Path("world.py").write_text("raise RuntimeError")
    Path("run.yaml").write_text(config_yaml(config))
    started = CliRunner().invoke(app, ["train", "run.yaml"])
    assert "RuntimeError" in str(started.exception)
    assert unaccepted_code(config, []) == {}


def test_no_consent_permits_engine_arguments_that_load_code() -> None:
    tree = {"run_id": "r", "generation": {"engine_args": {"trust_remote_code": True}}}
    recorded = parse_config(tree, recorded=True)
    record_consent(recorded)
    with pytest.raises(ConfigError, match=r"generation\.engine_args\.trust_remote_code"):
        unaccepted_code(recorded, ["generation.engine_args={}"])


def test_a_refusal_names_the_keys_and_the_ways_to_accept_them() -> None:
    with pytest.raises(ConfigError, match=r"environment.target: world.py:World(.|\n)*--trust-store(.|\n)*--set"):
        refuse_unaccepted_code(world(), ["environment.parameters.api_key.variable=KEY"])
