from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from roundhouse.config import forms
from roundhouse.config.loading import config_digest, config_yaml, differences, load_config, parse_config
from roundhouse.config.models import RunConfig
from roundhouse.config.patterns import in_words
from roundhouse.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return file


def test_an_unknown_key_is_refused_with_the_nearest_known_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.group_sise: unknown key. Did you mean 'group_size'"):
        load_config(write(tmp_path, "run_id: a\nrollout: {group_sise: 4}"))


def test_an_unknown_key_inside_a_tagged_section_names_that_section(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment\.digit: unknown key. Did you mean 'digits'"):
        load_config(write(tmp_path, "run_id: a\nenvironment: {kind: sort, digit: 4}"))


def test_overrides_beat_the_file_and_numbers_without_a_dot_are_numbers(tmp_path: Path) -> None:
    file = write(tmp_path, "run_id: a\nseed: 1")
    config = load_config(file, ["seed=7", "train.optimizer.learning_rate=3e-5", "run_id=b"])
    assert (config.seed, config.train.optimizer.learning_rate, config.run_id) == (7, 3e-5, "b")


@pytest.mark.parametrize("override", ["seed", "=3", "seed.deeper=1"])
def test_a_malformed_override_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="Override"):
        load_config(write(tmp_path, "run_id: a\nseed: 1"), [override])


def test_variables_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUCKET", "s3://mine")
    config = load_config(write(tmp_path, "run_id: a\nstore: ${BUCKET}/x\nseed: ${NO_SUCH_SEED:-5}"))
    assert (config.store, config.seed) == ("s3://mine/x", 5)
    with pytest.raises(ConfigError, match="NO_SUCH_NAME"):
        load_config(write(tmp_path, "run_id: ${NO_SUCH_NAME}"))


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"rollout": {"group_size": 1}}, "rollout.group_size"),
        ({"validation": {"min_group_size": 9}}, "validation.min_group_size"),
        ({"generation": {"sampling": {"max_new_tokens": 512}}}, "max_new_tokens"),
        ({"generation": {"sampling": {"temperature": 0}}}, "temperature"),
        ({"generation": {"sampling": {"top_p": 0.9}}}, "top_p"),
        ({"train": {"updates": 500}}, "train.updates"),
        ({"seed": "many"}, "seed"),
    ],
)
def test_impossible_values_and_combinations_are_refused_by_name(tree: dict, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        parse_config({"run_id": "a", **tree})


def test_a_missing_file_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"No configuration file nowhere\.yaml"):
        load_config("nowhere.yaml")


def test_the_resolved_configuration_reads_back_to_the_same_digest(tmp_path: Path) -> None:
    config = parse_config({"run_id": "a", "environment": {"kind": "sort"}})
    again = load_config(write(tmp_path, config_yaml(config)))
    assert config_digest(again) == config_digest(config)


def test_differences_name_the_keys_that_changed() -> None:
    old = parse_config({"run_id": "a"})
    new = parse_config({"run_id": "a", "seed": 3, "environment": {"kind": "sort"}})
    changed = differences(old, new)
    assert changed["seed"] == (0, 3)
    assert changed["environment.kind"] == ("calculator", "sort")


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"run_id": "my run"}, "run_id: must be small letters, digits, '.', '_' and '-', beginning"),
        (
            {"run_id": "a", "environment": {"kind": "calculater"}},
            "environment.kind: 'calculater' is none. Did you mean 'calculator'? There are: calc",
        ),
        (
            {"run_id": "a", "train": {"algorithm": {"kind": "grpoo"}}},
            "train.algorithm.kind: 'grpoo' is none. Did you mean 'grpo'?",
        ),
        ({"run_id": "a", "policy": {"kind": "?"}}, "policy.kind: '?' is none. There are: pretrained, warm_start."),
    ],
)
def test_a_pattern_or_a_kind_is_explained_in_words(tree: dict, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree)
    assert said in str(caught.value)


def test_every_pattern_of_a_key_or_of_a_form_has_its_words() -> None:
    schemas = [
        model.model_json_schema()
        for model in (RunConfig, *vars(forms).values())
        if isinstance(model, type) and issubclass(model, BaseModel) and model is not BaseModel
    ]
    found = {pattern for schema in schemas for pattern in patterns_in(schema)}
    assert len(found) > 8
    assert {pattern for pattern in found if in_words(pattern).startswith("text that matches")} == set()


def patterns_in(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(pattern := schema.get("pattern"), str):
            yield pattern
        for value in schema.values():
            yield from patterns_in(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from patterns_in(value)
