import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from roundhouse import plugins
from roundhouse.config.consent import unnamed_code
from roundhouse.config.loading import (
    apply_override,
    changes_of_identity,
    config_digest,
    config_yaml,
    differences,
    load_config,
    parse_config,
)
from roundhouse.config.models import GenerationConfig, RunConfig
from roundhouse.config.training import ProcessService
from roundhouse.config.yaml_text import in_words
from roundhouse.errors import ConfigError
from roundhouse_flows import forms
from tests import fork_server


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return file


def test_an_unknown_key_is_refused_with_the_nearest_known_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.group_sise: unknown key. Did you mean 'group_size'"):
        load_config(write(tmp_path, "run_id: a\nrollout: {group_sise: 4}"))


def test_an_unknown_key_below_a_name_of_the_users_is_told_the_known_ones(tmp_path: Path) -> None:
    """They were an empty list."""
    text = "run_id: a\nevaluation: {sets: {greedy: {temprature: 0}}}"
    with pytest.raises(
        ConfigError, match=r"evaluation\.sets\.greedy\.temprature: unknown key. Did you mean 'temperature'"
    ):
        load_config(write(tmp_path, text))
    text = "run_id: a\nenvironment: {kind: mixture, environments: {own: {kind: sort, digit: 4}}}"
    with pytest.raises(ConfigError, match=r"environments\.own\.digit: unknown key. Did you mean 'digits'"):
        load_config(write(tmp_path, text))


def test_an_unknown_key_inside_a_tagged_section_names_that_section(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment\.digit: unknown key. Did you mean 'digits'"):
        load_config(write(tmp_path, "run_id: a\nenvironment: {kind: sort, digit: 4}"))


def test_overrides_beat_the_file_and_numbers_without_a_dot_are_numbers(tmp_path: Path) -> None:
    file = write(tmp_path, "run_id: a\nseed: 1")
    config = load_config(file, ["seed=7", "train.optimizer.learning_rate=3e-5", "run_id=b"])
    assert (config.seed, config.train.optimizer.learning_rate, config.run_id) == (7, 3e-5, "b")


def test_an_override_in_quotes_is_text_whatever_it_looks_like(tmp_path: Path) -> None:
    overrides = ["run_id='1e5'", 'store="2E-3"', "environment.kind=nan"]
    tree: dict[str, Any] = {}
    for override in overrides:
        apply_override(tree, override)
    assert tree == {"run_id": "1e5", "store": "2E-3", "environment": {"kind": "nan"}}
    assert load_config(write(tmp_path, "seed: 1"), overrides[:2]).run_id == "1e5"


@pytest.mark.parametrize("override", ["seed", "=3", "seed.deeper=1", "train..threads=1", "train.=1", ".seed=1"])
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
    ("text", "value"),
    [
        ("${SIGNS}/b", "/my #1: [dir], {x}:/b"),
        ("${SIGNS}", "/my #1: [dir], {x}:"),
        ("'${SIGNS}'", "/my #1: [dir], {x}:"),
        ("|-\n      ${LINES}", "a: 1\nb"),
        ("{a: ${SIGNS}, '${SIGNS}': [${N}]}", {"a": "/my #1: [dir], {x}:", "/my #1: [dir], {x}:": [7]}),
        ("[${N}, '${N}', ${N}${N}, '\\x24{N}', \"\\x24{N}\"]", [7, "7", 77, "\\x24{N}", "${N}"]),
        ("${LIST}", [1, {"a": "x"}]),
        ("${NO_SUCH:-[1, 2]}", [1, 2]),
        ('[${NO_SUCH:-null}, ${NO_SUCH:-}x, ${NO_SUCH:-"a, b"}, ${NO_SUCH:-a: #b}]', [None, "x", "a, b", "a: #b"]),
        ("${NO_SUCH:-{}}", {}),
        ("[${NO_SUCH:-{a: 1}}, {b: ${NO_SUCH:-[{a: 1}, {}]}}]", [{"a": 1}, {"b": [{"a": 1}, {}]}]),
        ("${NO_SUCH:-x{1}y{2}}${N}", "x{1}y{2}7"),
        ("[${N:-{}}, ${N:-{a: 1}}, ${NO_SUCH:-${N}}]", [7, 7, "${N}"]),
        ("${NO_SUCH:-a{b} ${N}", "a{b 7"),
        ("[&it ${LIST}, *it]", [[1, {"a": "x"}]] * 2),
        ("${LINE}  # ${HF_TOKEN} ${NO_SUCH}", 8),
    ],
)
def test_a_variable_is_text_of_its_value_whatever_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, value: Any
) -> None:
    held = {"SIGNS": "/my #1: [dir], {x}:", "LINES": "a: 1\nb", "LIST": "[1, {a: x}]", "N": "7", "LINE": "8\n"}
    for name, one in held.items():
        monkeypatch.setenv(name, one)
    config = load_config(
        write(tmp_path, f"run_id: a\nenvironment:\n  kind: custom\n  target: a:B\n  parameters:\n    x: {text}\n")
    )
    assert config.environment.parameters == {"x": value}


def test_a_directory_keeps_its_whole_name_and_an_error_shows_variables_as_they_are_written(tmp_path: Path) -> None:
    (folder := tmp_path / "my #1 dir").mkdir()
    assert load_config(write(folder, "run_id: a\nstore: ${CONFIG_DIR}/store")).store == f"{folder}/store"
    with pytest.raises(ConfigError, match=r"(?s)line 2.*\$\{CONFIG_DIR\}: \[x"):
        load_config(write(folder, "run_id: a\n${CONFIG_DIR}: [x y"))


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"rollout": {"group_size": 1}}, "rollout.group_size"),
        ({"validation": {"min_group_size": 9}}, "validation.min_group_size"),
        ({"generation": {"sampling": {"max_new_tokens": 512}}}, "max_new_tokens"),
        ({"generation": {"sampling": {"temperature": 0}}}, "temperature"),
        ({"generation": {"sampling": {"top_p": 0.9}}}, "top_p"),
        ({"generation": {"backend": "transformers", "tool_call_parser": "llama3_json"}}, "tool_call_parser"),
        ({"train": {"minibatches": 500}}, "train.minibatches"),
        (
            {
                "rollout": {"system_prompt": "Be brief."},
                "environment": {"kind": "command", "command": ["run"], "train_tasks": "a.jsonl"},
            },
            "rollout.system_prompt is set, but environment.kind is command",
        ),
        (
            {
                "rollout": {"cut_replies": "return"},
                "environment": {"kind": "command", "command": ["run"], "train_tasks": "a.jsonl"},
            },
            "rollout.cut_replies is return, but environment.kind is command",
        ),
        ({"seed": "many"}, "seed"),
        ({"rollout": {"timeout_seconds": 1e300}}, "rollout: timeout_seconds is 1e.300: the limit"),
        ({"failures": {"stall_seconds": 10**10}}, "failures: stall_seconds is 1e.10: the limit"),
    ],
)
def test_impossible_values_and_combinations_are_refused_by_name(tree: dict, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        parse_config({"run_id": "a", **tree})


def test_a_missing_file_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"No configuration file nowhere\.yaml"):
        load_config("nowhere.yaml")


def test_a_directory_is_refused_with_the_configurations_in_it(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    with pytest.raises(ConfigError, match=rf"Available: {re.escape(str(tmp_path))}/run\.yaml"):
        load_config(tmp_path)


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
            "environment.kind: 'calculater' is unknown. Did you mean 'calculator'? Available: calc",
        ),
        (
            {"run_id": "a", "train": {"algorithm": {"kind": "grpoo"}}},
            "train.algorithm.kind: 'grpoo' is unknown. Did you mean 'grpo'?",
        ),
        (
            {"run_id": "a", "policy": {"kind": "?"}},
            "policy.kind: '?' is unknown. Available: pretrained, bundled, warm_start.",
        ),
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


# What a file may not be -----------------------------------------------------------------------------------------------

BOMB = "parameters:\n  a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"  a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 9)
)


def test_a_key_that_is_given_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    text = "run_id: a\ntrain: {minibatches: 4, optimizer: {learning_rate: 1.0e-5}}\nseed: 1\ntrain: {minibatches: 2}\n"
    with pytest.raises(ConfigError, match=r"the key 'train' is given twice, in line 2 and in line 4"):
        load_config(write(tmp_path, text))
    with pytest.raises(ConfigError, match=r"'seed' is given twice"):
        load_config(write(tmp_path, "run_id: a\nenvironment: {parameters: [{seed: 1, x: 2, seed: 1}]}"))


def test_a_merge_key_may_be_overridden(tmp_path: Path) -> None:
    text = "run_id: a\nrollout: {retry: {<<: {attempts: 2, factor: 3.0}, attempts: 5}}"
    retry = load_config(write(tmp_path, text)).rollout.retry
    assert (retry.attempts, retry.factor) == (5, 3.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: " + "[" * 20_000, "line 1 is nested more than 100 levels"),
        ("a: &x\n  b: *x", r"alias \*x in line 2 is inside of its own anchor"),
        (BOMB, "more than 100000 values"),
        ("a: 2026-02-31", "a value cannot be read"),
        ("a: " + "9" * 6000, "a value cannot be read"),
        ("a: [", "line 1"),
    ],
    ids=["deep", "self-referring", "alias bomb", "no date", "no number", "not YAML"],
)
def test_a_text_that_cannot_be_read_within_bounds_is_refused_with_its_line(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)run\.yaml is not valid YAML: .*{said}"):
        load_config(write(tmp_path, text))
    with pytest.raises(ConfigError, match="Override 'seed="):
        load_config(write(tmp_path, "run_id: a"), ["seed=[1, *x]"])


def test_a_file_that_is_not_utf_8_ends_the_command_with_the_code_of_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "latin.yaml"
    file.write_bytes("run_id: a  # Größe".encode("latin-1"))
    command = [sys.executable, "-c", "from roundhouse.cli import main; main()", "train", str(file), "--dry-run"]
    ended = fork_server.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "200"})
    assert ended.returncode == 78, ended.stderr
    assert "latin.yaml is not UTF-8 text: byte 0xf6 at offset 15" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"train": {"optimizer": {"learning_rate": float("inf")}}}, r"train\.optimizer\.learning_rate"),
        ({"rollout": {"timeout_seconds": float("inf")}}, r"rollout\.timeout_seconds"),
        ({"train": {"algorithm": {"kind": "gdpo", "weights": {"a": 1, "b": float("nan")}}}}, r"weights\.b"),
        ({"generation": {"engine_args": {"cpu_offload_gb": float("inf")}}}, r"engine_args: cpu_offload_gb is inf"),
    ],
)
def test_infinities_and_nan_are_refused_by_key(tree: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        parse_config({"run_id": "a", **tree})


@pytest.mark.parametrize("store", ["http://host/x", "gs://bucket", "s3:/bucket", "", " "])
def test_a_store_that_no_run_can_write_to_is_refused_at_load(store: str) -> None:
    with pytest.raises(ConfigError, match="store is"):
        parse_config({"run_id": "a", "store": store})


# The engine's arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"trust_remote_code": True}, "loads code"),
        ({"worker_cls": "mine.Worker"}, "loads code"),
        ({"scheduler_cls": "mine.Scheduler"}, "loads code"),
        ({"reasoning_parser_plugin": "/x.py"}, "loads code"),
        ({"logits_processors": ["mine:P"]}, "loads code"),
        ({"kv_transfer_config": {"kv_connector_module_path": "mine"}}, "loads code"),
        ({"distributed_executor_backend": "mine.Executor"}, "mine.Executor names code"),
        ({"compilation_config": {"backend": "mine.compile"}}, "mine.compile names code"),
        ({"load_format": "pt"}, "pickled ones are never loaded"),
        ({"worker_extension_cls": "mine.Extension"}, "generation.weight_sync"),
        ({"model": "other"}, "policy"),
        ({"logprobs_mode": "raw_logits"}, "log-probabilities"),
        ({"max_model_len": 4096}, "generation.max_model_len"),
    ],
)
def test_arguments_that_load_code_or_replace_ours_are_refused_with_the_reason(arguments: dict, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"generation: engine_args\.{next(iter(arguments))}: .*{why}"):
        parse_config({"run_id": "a", "generation": {"engine_args": arguments}})


def test_other_arguments_reach_vllm() -> None:
    arguments = {
        "tensor_parallel_size": 2,
        "max_num_seqs": 8,
        "distributed_executor_backend": "mp",
        "quantization": "fp8",
    }
    assert parse_config({"run_id": "a", "generation": {"engine_args": arguments}}).generation.engine_args == arguments


def test_an_argument_that_the_transformers_backend_would_not_use_is_refused() -> None:
    with pytest.raises(ValueError, match="knows only max_num_seqs"):
        GenerationConfig(backend="transformers", engine_args={"enforce_eager": True})


def test_no_transport_is_imported_for_a_stored_run_or_for_a_trainer_that_generates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`runs list` took four times as long with one such run, since it imported torch."""
    imported: list[str] = []

    def load(role: plugins.Role, name: str) -> Any:
        imported.append(name)
        return factory(role, name)

    factory = plugins.factory
    monkeypatch.setattr(plugins, "factory", load)
    service = {"train": {"service": {"kind": "resident"}}}
    parse_config({"run_id": "r", "generation": {"backend": "trainer"}} | service)
    parse_config({"run_id": "r", "generation": {"weight_sync": "store"}}, recorded=True)
    assert imported == []
    parse_config({"run_id": "r", "generation": {"weight_sync": "store"}})
    assert imported == ["store"]


def test_a_run_that_a_store_holds_stays_readable() -> None:
    recorded = {
        "generation": {"engine_args": {"load_format": "pt"}},
        "tracking": {"uri": "https://h/?sig=recorded-once"},
    }
    assert parse_config({"run_id": "a", **recorded}, recorded=True).generation.engine_args == {"load_format": "pt"}
    with pytest.raises(ConfigError):
        parse_config({"run_id": "a", **recorded})


# GPUs that nothing would use ------------------------------------------------------------------------------------------


def test_gpus_that_no_trainer_would_use_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"service\.gpus is 8, but train\.service\.processes is 1.*processes to 8"):
        parse_config({"run_id": "a", "train": {"service": {"kind": "ray", "gpus": 8}}})
    on_kubernetes = {
        "run_id": "a",
        "store": "s3://bucket/x",
        "infra": {"kind": "kubernetes", "trainer": {"gpus": 8}},
        "train": {"service": {"kind": "process", "processes": 2}},
    }
    with pytest.raises(ConfigError, match=r"infra\.trainer\.gpus is 8, but train\.service\.processes is 2"):
        parse_config(on_kubernetes)
    assert parse_config(on_kubernetes, recorded=True).train.service == ProcessService(processes=2)


@pytest.mark.parametrize("kind", ["resident", "process"])
def test_a_layout_that_cannot_work_is_refused(kind: str) -> None:
    train = {"service": {"kind": kind, "processes": 4, "context_parallel": 3}}
    with pytest.raises(
        ConfigError,
        match=r"context_parallel is 3, which does not divide train\.service\.processes 4\. Set processes to 3",
    ):
        parse_config({"run_id": "a", "train": train})
    padded = {"service": {"kind": kind, "processes": 4, "context_parallel": 2}, "packing": False}
    with pytest.raises(ConfigError, match=r"context_parallel is 2, but train\.packing is false"):
        parse_config({"run_id": "a", "train": padded})
    both = {"service": {"kind": kind, "processes": 4, "context_parallel": 2, "tensor_parallel": 4}}
    with pytest.raises(
        ConfigError,
        match=r"context_parallel is 2 x train\.service\.tensor_parallel 4, which does not divide .* Set processes to 8",
    ):
        parse_config({"run_id": "a", "train": both})
    unsharded = {"service": {"kind": kind, "processes": 2, "tensor_parallel": 2}}
    with pytest.raises(
        ConfigError, match=r"tensor_parallel is 2, as many as train\.service\.processes: .* processes to 4 or more"
    ):
        parse_config({"run_id": "a", "train": unsharded})
    adapter = {"service": {"kind": kind, "processes": 4, "tensor_parallel": 2}, "lora": {}}
    with pytest.raises(ConfigError, match=r"tensor_parallel is 2, but train\.lora is set"):
        parse_config({"run_id": "a", "train": adapter})
    replicas = {"service": {"kind": kind, "processes": 4, "context_parallel": 2, "data_parallel_replicate": 4}}
    with pytest.raises(
        ConfigError, match=r"replicate is 4 x context_parallel 2, which does not divide .* 4\. Set processes to 8"
    ):
        parse_config({"run_id": "a", "train": replicas})
    split = {"service": {"kind": kind, "processes": 8, "tensor_parallel": 2, "data_parallel_replicate": 2}}
    with pytest.raises(
        ConfigError, match=r"data_parallel_replicate is 2, but tensor_parallel is 2: .* one of them to 1"
    ):
        parse_config({"run_id": "a", "train": split})
    blocks = {"service": {"kind": kind, "processes": 4, "tensor_parallel": 2}, "optimizer": {"moments": "8-bit"}}
    with pytest.raises(ConfigError, match=r"moments is 8-bit, but train\.service\.tensor_parallel is 2: .* to float32"):
        parse_config({"run_id": "a", "train": blocks})
    third = {"service": {"kind": kind, "processes": 4, "expert_parallel": 3}}
    with pytest.raises(ConfigError, match=r"expert_parallel is 3, which does not divide .* 4\. Set processes to 3"):
        parse_config({"run_id": "a", "train": third})
    for other in ("tensor_parallel", "data_parallel_replicate"):
        apart = {"service": {"kind": kind, "processes": 4, "expert_parallel": 2, other: 2}}
        with pytest.raises(ConfigError, match=rf"expert_parallel is 2, but {other} is 2: .* Set one of them to 1"):
            parse_config({"run_id": "a", "train": apart})
    for each in (train, padded, both, unsharded, adapter, replicas, split, blocks, third, apart):
        parse_config({"run_id": "a", "train": each}, recorded=True)
    service = {"kind": kind, "processes": 4, "context_parallel": 2, "tensor_parallel": 2}
    found = parse_config({"run_id": "a", "train": {"service": service}}).train.parallelism
    assert found == {"context_parallel": 2, "tensor_parallel": 2, "data_parallel_replicate": 1, "expert_parallel": 1}


@pytest.mark.parametrize("service", [{"kind": "process"}, {"kind": "resident", "launcher": "kubernetes"}])
def test_a_replica_of_the_trainer_may_be_a_pod(service: dict[str, Any]) -> None:
    service |= {"processes": 8, "data_parallel_replicate": 3}
    pods = {"kind": "kubernetes", "trainer": {"gpus": 8, "pods": 3}}
    tree = {"run_id": "a", "store": "s3://b/p", "infra": pods, "train": {"service": service}}
    assert parse_config(tree).train.parallelism["data_parallel_replicate"] == 3
    with pytest.raises(ConfigError, match=r"does not divide infra.trainer.pods 2 x train.service.processes 8"):
        parse_config(tree | {"infra": pods | {"trainer": {"gpus": 8, "pods": 2}}})


def test_matrices_may_be_split_inside_of_machines_that_shard_over_each_other() -> None:
    service = {"kind": "resident", "launcher": "ray", "processes": 8, "tensor_parallel": 8}
    tree = {"run_id": "a", "store": "s3://b/p", "train": {"service": service}}
    assert parse_config(tree | {"infra": {"ray": {"trainer": {"nodes": 2}}}}).train.parallelism["tensor_parallel"] == 8
    with pytest.raises(ConfigError, match=r"tensor_parallel is 8, as many as train\.service\.processes: .* 16 or more"):
        parse_config(tree)
    straddling = {"train": {"service": service | {"processes": 6, "tensor_parallel": 4}}}
    with pytest.raises(ConfigError, match=r"tensor_parallel is 4, which does not divide train\.service\.processes 6"):
        parse_config(tree | straddling | {"infra": {"ray": {"trainer": {"nodes": 2}}}})
    uneven = {"train": {"service": service | {"tensor_parallel": 1, "context_parallel": 3}}}
    with pytest.raises(ConfigError, match=r"context_parallel is 3, which does not divide .* 8 on each of 2 machines"):
        parse_config(tree | uneven | {"infra": {"ray": {"trainer": {"nodes": 2}}}})


@pytest.mark.parametrize(
    ("infra", "said"),
    [
        ({"ray": {"trainer": {"nodes": 2}}}, r"infra\.ray\.trainer\.nodes is 2, but .*kind is resident.* to ray"),
        (
            {"kind": "kubernetes", "trainer": {"pods": 2}},
            r"infra\.trainer\.pods is 2, but .*kind is resident.*to kubernetes",
        ),
    ],
)
def test_machines_that_nothing_is_started_on_are_refused(infra: dict[str, Any], said: str) -> None:
    tree = {"run_id": "a", "store": "s3://b/p", "infra": infra}
    with pytest.raises(ConfigError, match=said):
        parse_config(tree)
    parse_config(tree, recorded=True)


def test_a_replica_of_the_trainer_may_be_a_ray_node() -> None:
    service = {"kind": "resident", "launcher": "ray", "processes": 8, "data_parallel_replicate": 3}
    tree = {
        "run_id": "a",
        "store": "s3://b/p",
        "infra": {"ray": {"trainer": {"nodes": 3}}},
        "train": {"service": service},
    }
    assert parse_config(tree).train.parallelism["data_parallel_replicate"] == 3
    with pytest.raises(ConfigError, match=r"does not divide infra.ray.trainer.nodes 2 x train.service.processes 8"):
        parse_config(tree | {"infra": {"ray": {"trainer": {"nodes": 2}}}})


@pytest.mark.parametrize(
    ("changed", "other"),
    [
        ({"iterations": 9, "train": {"threads": 1}, "rollout": {"distribution": {"kind": "process"}}}, []),
        ({"infra": {"state": "elsewhere"}, "evaluation": {"approval": {"required": True}}}, []),
        ({"iterations": 9, "train": {"minibatches": 2, "threads": 1}}, ["train.minibatches"]),
        ({"evaluation": {"every": 1, "tasks": 3}}, ["evaluation.tasks"]),
        ({"train": {"tokens_per_microbatch": 512, "logits_chunk_tokens": 64, "activation_checkpointing": True}}, []),
        ({"train": {"reduce_gradients": "microbatch", "packing": False}}, ["train.packing"]),
    ],
)
def test_only_keys_that_are_not_marked_operational_make_another_run(changed: dict, other: list[str]) -> None:
    found = changes_of_identity(parse_config({"run_id": "a"}), parse_config({"run_id": "a", **changed}))
    assert list(found) == other


def test_the_tool_is_learnt_by_reward_from_the_version_that_its_demonstrations_make() -> None:
    root = Path(__file__).parents[2]
    shown, rewarded = (load_config(root / f"configs/tool/{name}.yaml") for name in ("demonstrations", "reward"))
    rows = re.search(r"demonstrations calculator -o (\S+) --count (\d+)", (root / "Makefile").read_text())
    assert rows is not None
    assert shown.offline is not None
    assert shown.offline.datasets == (rows[1],)
    version = -(-int(rows[2]) // (shown.offline.groups or 1))
    assert rewarded.policy.path.endswith(f"{shown.store}/runs/{shown.run_id}/checkpoints/{version:06d}")
    optimizer = shown.train.optimizer
    assert optimizer.warmup_steps + (optimizer.decay_steps or 0) == version * shown.train.minibatches


def test_a_store_names_no_loss_and_no_launcher_unasked() -> None:
    train = {"algorithm": {"policy_loss": "a:loss"}, "service": {"kind": "process", "launcher": "b:Launcher"}}
    config = parse_config(
        {"run_id": "r", "train": train, "rollout": {"distribution": {"kind": "process", "launcher": "c:Mine"}}}
    )
    named = {
        "train.algorithm.policy_loss": "a:loss",
        "train.service.launcher": "b:Launcher",
        "rollout.distribution.launcher": "c:Mine",
    }
    assert unnamed_code(config, []) == named
    assert unnamed_code(config, [f"{key}={value}" for key, value in named.items()]) == {}
    plain = {"algorithm": {"policy_loss": "cispo"}, "service": {"kind": "process", "launcher": "subprocess"}}
    assert unnamed_code(parse_config({"run_id": "r", "train": plain}), []) == {}


def test_a_key_that_is_missing_is_named_with_the_ways_to_set_it() -> None:
    with pytest.raises(ConfigError, match=r"run_id: not set, and without a default\. .*--set run_id=VALUE"):
        parse_config({})
    with pytest.raises(ConfigError, match=r"environment\.url: not set.*--set environment\.url=VALUE"):
        parse_config({"run_id": "r", "environment": {"kind": "remote"}})
