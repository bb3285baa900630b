"""Forms: an empty field keeps the preset's value, a filled one is checked like any configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel, ValidationError

from roundhouse.config.algorithms import CrossEntropyConfig, GRPOConfig
from roundhouse.config.loading import flatten, load_config, parse_config
from roundhouse.errors import ConfigError, StoreError
from roundhouse.infra.consents import record_consent
from roundhouse.store.run import Run, open_run
from roundhouse_flows import deployments
from roundhouse_flows.forms import (
    ApproveForm,
    CollectForm,
    EvaluateForm,
    ForkForm,
    ReplayForm,
    TrainForm,
    TrainOfflineForm,
    preset_names,
    presets_directory,
)


@pytest.fixture(autouse=True)
def _presets_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the presets: the served flows of other tests in this directory have different ones."""
    monkeypatch.delenv("ROUNDHOUSE_PRESETS", raising=False)


FORMS = (TrainForm, TrainOfflineForm, CollectForm, EvaluateForm, ForkForm, ReplayForm)


@pytest.mark.parametrize("preset", preset_names())
def test_an_empty_form_is_the_preset(preset: str) -> None:
    assert TrainForm(preset=preset).resolve() == load_config(presets_directory() / f"{preset}.yaml")


def test_what_is_filled_in_reaches_its_key_and_overrides_come_last() -> None:
    form = TrainForm(run_id="mine", learning_rate=1e-5, group_size=3, overrides=["rollout.group_size=4", "seed=7"])
    config = form.resolve("/somewhere")
    assert (config.run_id, config.train.optimizer.learning_rate) == ("mine", 1e-5)
    assert (config.rollout.group_size, config.seed, config.infra.state) == (4, 7, "/somewhere")


def test_a_form_that_cannot_begin_leaves_no_record_of_a_run(tmp_path: Path) -> None:
    overrides = [f"store={tmp_path / 'store'}", "finish.metric=nothing", "finish.at_least=1"]
    with pytest.raises(ConfigError, match="no stage reports it"):
        deployments.train.fn(TrainForm(run_id="mine", overrides=overrides))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("field", sorted(TrainForm.KEYS.keys() - {"resume"}))
def test_every_field_of_the_training_form_changes_its_key(field: str) -> None:
    value = {"run_id": "other", "learning_rate": 0.5, "temperature": 0.25}.get(field, 5)
    config = TrainForm.model_validate({field: value}).resolve()
    found = config
    for part in TrainForm.KEYS[field].split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize("form", FORMS)
def test_each_field_has_help_and_a_place_and_no_null_in_its_schema(form: type) -> None:
    schema = form.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for name, field in schema["properties"].items():
        assert field.get("description"), name
        assert "anyOf" not in field, f"{name} would be shown as a choice of types"
    places = {name: field["position"] for name, field in schema["properties"].items()}
    assert max(places, key=places.__getitem__) == "overrides"


def test_choices_and_ranges_are_in_the_schema_that_the_page_shows() -> None:
    fields = TrainForm.model_json_schema()["properties"]
    assert fields["preset"]["enum"] == preset_names()
    assert fields["resume"]["enum"] == ["auto", "disable"]
    assert (fields["group_size"]["minimum"], fields["group_size"]["maximum"]) == (1, 1024)
    assert fields["learning_rate"]["exclusiveMinimum"] == 0
    assert fields["run_id"]["pattern"].startswith("^[a-z0-9]")


def test_what_cannot_work_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="group_size"):
        TrainForm(group_size=0)
    with pytest.raises(ConfigError, match=r"preset: 'nothing' is not one of .*discovery, "):
        TrainForm(preset="nothing").resolve()
    with pytest.raises(ConfigError, match=r"rollout\.typo: unknown key"):
        TrainForm(overrides=["rollout.typo=1"]).resolve()
    with pytest.raises(StoreError, match="No run 'none'"):
        EvaluateForm(run_id="none", store=str(tmp_path)).resolve()


@pytest.mark.parametrize(
    "form", [TrainForm, TrainOfflineForm, CollectForm, EvaluateForm, ForkForm, ReplayForm, ApproveForm]
)
def test_no_text_of_a_form_has_angle_brackets_which_the_page_takes_for_html(form: type[BaseModel]) -> None:
    texts = re.findall(r"<[A-Za-z/][^>]*>", json.dumps([each.get("description") for each in _objects(form)]))
    assert texts == []


def _objects(form: type[BaseModel]) -> list[dict[str, Any]]:
    schema = form.model_json_schema()
    return [schema, *schema["properties"].values()]


@pytest.mark.parametrize("override", ["trian.minibatches=2", "train.minibatches", "minibatches 2", "=3", " seed=2"])
def test_the_schema_refuses_an_override_of_no_section_before_there_is_a_flow_run(override: str) -> None:
    schema = TrainForm.model_json_schema()
    validator = jsonschema.Draft202012Validator(schema)
    assert [error.json_path for error in validator.iter_errors({"overrides": [override]})] == ["$.overrides[0]"]
    every = [f"{key}=1" for key in flatten(parse_config({"run_id": "r"}).model_dump(mode="json"))]
    assert len(every) > 100
    assert list(validator.iter_errors({"overrides": every})) == []


def test_a_flow_run_with_a_bad_override_fails_before_anything_is_started_or_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roundhouse_flows import deployments

    monkeypatch.setenv("ROUNDHOUSE_PRESETS", str(presets_directory().resolve()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(deployments, "services_of", lambda config: pytest.fail("services were started"))
    with pytest.raises(ConfigError, match=r"train\.optimzer: unknown key\. Did you mean 'optimizer'"):
        deployments.train.fn(TrainForm(overrides=["train.optimzer.learning_rate=1e-3"]))
    assert list(tmp_path.iterdir()) == []


def test_the_form_of_an_existing_run_starts_from_the_runs_own_configuration(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    open_run(parse_config({"run_id": "r", "store": store, "rollout": {"prompts_per_iteration": 9}}))
    config = CollectForm(run_id="r", store=store, group_size=2).resolve()
    assert (config.rollout.prompts_per_iteration, config.rollout.group_size) == (9, 2)


@pytest.fixture
def parent(tmp_path: Path) -> Run:
    """A run with two versions."""
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path / "store"), "train": {"minibatches": 2}}))
    for version in (0, 1):
        run.point_to(run.begin(run.checkpoint(version), policy_version=version).commit())
    return run


def test_the_offline_form_makes_a_fork_that_corrects_for_the_policy_that_sampled(parent: Run) -> None:
    form = TrainOfflineForm(
        run_id="r",
        store=parent.config.store,
        new_run_id="o",
        datasets=["nightly@all"],
        epochs=3,
        groups=5,
        max_age=7,
        on_stale="warn",
        overrides=["offline.precheck_rollouts=9"],
    )
    config = form.resolve()
    assert config.offline is not None
    assert (config.offline.epochs, config.offline.groups, config.offline.max_age) == (3, 5, 7)
    assert (config.offline.on_stale, config.offline.precheck_rollouts) == ("warn", 9)
    assert config.resume.path == parent.checkpoint(1).location.uri
    assert config.train.minibatches == 2, "as the run has it"
    assert isinstance(config.train.algorithm, GRPOConfig)
    assert (config.train.algorithm.mismatch_correction, config.train.algorithm.bounds) == ("tis", (0, 2))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": "distillation"}, "teacher"),
        ({"method": "grpo", "teacher": "somewhere"}, "teacher"),
        ({"method": "grpo", "reward_threshold": 0.5}, "reward_threshold"),
        ({"at": "promoted"}, "no promoted checkpoint"),
        ({"at": "7"}, "no checkpoint of version 7"),
        ({"overrides": ["train.algorithm.mismatch_correction=none"]}, "mismatch_correction is none"),
    ],
)
def test_what_an_offline_run_cannot_do_is_refused(parent: Run, given: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, StoreError), match=said):
        TrainOfflineForm(run_id="r", store=parent.config.store, new_run_id="o", **given).resolve()


def test_rejection_learns_the_best_that_reach_a_threshold(parent: Run) -> None:
    form = TrainOfflineForm(
        run_id="r", store=parent.config.store, new_run_id="o", method="rejection", reward_threshold=0.5
    )
    algorithm = form.resolve().train.algorithm
    assert isinstance(algorithm, CrossEntropyConfig)
    assert (algorithm.select, algorithm.reward_threshold) == ("best_of_group", 0.5)


def test_a_collection_names_one_checkpoint() -> None:
    with pytest.raises(ValidationError, match="name one of them"):
        CollectForm(run_id="r", version=3, checkpoint="promoted")


def test_a_form_or_schedule_of_a_stored_run_executes_only_accepted_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDHOUSE_STATE", str(tmp_path))
    (tmp_path / "world.py").touch()
    target = f"{tmp_path}/world.py:World"
    environment = {"kind": "custom", "target": target}
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path / "store"), "environment": environment}))
    form = CollectForm(run_id="r", store=str(tmp_path / "store"))
    with pytest.raises(ConfigError, match=f"environment.target: {target}"):
        form.accepted()
    with pytest.raises(ConfigError, match=f"environment.target: {target}"):
        ReplayForm(run_id="r", store=form.store, first=1).replay()
    assert form.model_copy(update={"overrides": [f"environment.target={target}"]}).accepted().run_id == "r"
    record_consent(run.config)
    assert form.accepted().run_id == "r"


def test_a_form_accepts_what_a_preset_of_its_deployment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod of a flow run has no consents from earlier runs."""
    monkeypatch.setenv("ROUNDHOUSE_STATE", str(tmp_path))
    monkeypatch.setenv("ROUNDHOUSE_PRESETS", str(tmp_path))
    infra = "infra: {kind: kubernetes, store_claim: c, state: /scratch/state, environment: {AWS_REGION: a}}\n"
    (tmp_path / "production.yaml").write_text(f"run_id: edit-me\n{infra}")
    (tmp_path / "broken.yaml").write_text("run_id: edit-me\nseed: ${NOT_SET_ANYWHERE}\n")
    store = str(tmp_path / "store")
    config = load_config(tmp_path / "production.yaml", ["run_id=r", f"store={store}"])
    open_run(config)
    assert CollectForm(run_id="r", store=store).accepted().run_id == "r"
    open_run(parse_config(config.model_dump(mode="json") | {"run_id": "s", "tracking": {"uri": "http://theirs"}}))
    with pytest.raises(ConfigError, match=r"tracking\.uri: http://theirs") as refused:
        CollectForm(run_id="s", store=store).accepted()
    assert "infra.environment" not in str(refused.value)
