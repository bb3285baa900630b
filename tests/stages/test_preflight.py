"""Errors that can be known early are reported at once: no service is started, and the store has no record of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.config.loading import load_config
from roundhouse.environments.base import task_row
from roundhouse.errors import ConfigError, RoundhouseError, StoreError
from roundhouse.stages.datasets import TaskDraw, dataset_stage
from roundhouse.store.run import run_ids
from roundhouse_flows.iteration import is_evaluated
from tests.generation.tiny import CHAT_TEMPLATE, make_model
from tests.sql.stores import write_run


def config(directory: Path, **keys: Any) -> str:
    """A configuration of run `r`."""
    keys = {"run_id": "r", "store": str(directory / "store"), "infra": {"state": str(directory / "state")}} | keys
    (directory / "run.yaml").write_text(yaml.safe_dump(keys))
    return str(directory / "run.yaml")


def refused(*command: str) -> RoundhouseError:
    """The error that the command ends with."""
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, RoundhouseError), error
    return error


def empty_model(directory: Path) -> dict[str, Any]:
    (directory / "model").mkdir()
    return {"policy": {"kind": "pretrained", "path": str(directory / "model")}}


def model_of_the_hub(_: Path) -> dict[str, Any]:
    return {"policy": {"kind": "pretrained", "path": "Qwen/Qwen3-0.6B"}}


def missing_target(directory: Path) -> dict[str, Any]:
    return {"environment": {"kind": "custom", "target": str(directory / "mine.py:Mine")}}


def class_without_demonstrations(directory: Path) -> dict[str, Any]:
    (directory / "mine.py").write_text(
        "from roundhouse.environments.base import Environment\nclass Mine(Environment):\n    name = 'mine'\n"
        "    def tasks(self, split): return [{'task_id': split}]\n    async def seed_session(self, row): return {}\n"
        "    def verify(self, session, row, response): return 0.0\n"
    )
    return {"environment": {"kind": "custom", "target": str(directory / "mine.py:Mine")}}


def file_for_a_store(directory: Path) -> dict[str, Any]:
    (directory / "file").touch()
    return {"store": str(directory / "file" / "store")}


def missing_worker_data(directory: Path) -> dict[str, Any]:
    return {"environment": {"kind": "worker", "worker": "mock", "train_data": str(directory / "none.jsonl")}}


def no_heldout_rows(directory: Path) -> dict[str, Any]:
    (directory / "rows.jsonl").write_text('{"prompt": "p"}\n')
    return {"environment": {"kind": "worker", "worker": "mock", "train_data": str(directory / "rows.jsonl")}}


def no_heldout_share(_: Path) -> dict[str, Any]:
    return {
        "environment": {"kind": "sort", "heldout_fraction": 0},
        "evaluation": {"every": 0, "before_training": False},
    }


def rows_of_two_agents(directory: Path) -> dict[str, Any]:
    named = [{"task_id": name, "agent_ref": {"name": name}, "responses_create_params": {"input": "x"}} for name in "ab"]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
    environment = {"kind": "agent", "url": "http://h:1", "train_tasks": str(directory / "rows.jsonl")}
    return {"environment": environment, "policy": {"kind": "pretrained", "path": "nowhere"}}


def heads_that_the_ranks_cannot_divide(_: Path) -> dict[str, Any]:
    return {"train": {"service": {"kind": "resident", "processes": 4, "context_parallel": 4}}}


def missing_engine(directory: Path) -> dict[str, Any]:
    return {"generation": {"backend": str(directory / "mine.py:Mine")}}


def engine_of_one_method(directory: Path) -> dict[str, Any]:
    (directory / "mine.py").write_text(
        "from roundhouse.generation.interface import GenerationInterface\nclass Mine(GenerationInterface):\n"
        "    def generate(self, data, greedy): ...\n"
    )
    return {"generation": {"backend": str(directory / "mine.py:Mine")}}


def missing_transport(_: Path) -> dict[str, Any]:
    return {"generation": {"weight_sync": {"kind": "custom", "target": "nowhere:Transport"}}}


def missing_launcher(directory: Path) -> dict[str, Any]:
    launcher = str(directory / "mine.py:Mine")
    return {"train": {"service": {"kind": "resident", "processes": 2, "launcher": launcher}}}


def missing_algorithm(directory: Path) -> dict[str, Any]:
    return {"train": {"algorithm": {"kind": "custom", "target": str(directory / "mine.py:Mine")}}}


def missing_loss(directory: Path) -> dict[str, Any]:
    (directory / "mine.py").write_text("def others(tokens, ratio, settings): return -tokens.advantages * ratio\n")
    return {"train": {"algorithm": {"kind": "rloo", "policy_loss": str(directory / "mine.py:loss")}}}


def heads_that_cannot_be_split(_: Path) -> dict[str, Any]:
    return {"train": {"service": {"kind": "resident", "processes": 4, "tensor_parallel": 2}}}


def experts_of_a_dense_model(_: Path) -> dict[str, Any]:
    return {"train": {"service": {"kind": "resident", "processes": 2, "expert_parallel": 2}}}


def model_with_calls_of_mistral(directory: Path) -> dict[str, Any]:
    make_model(directory / "model", seed=0)
    settings = directory / "model" / "tokenizer_config.json"
    template = CHAT_TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]")
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    policy = {"kind": "pretrained", "path": str(directory / "model")}
    return {"policy": policy, "generation": {"backend": "transformers"}}


def unknown_dataset(directory: Path) -> dict[str, Any]:
    return {"offline": {"datasets": ["nightly"]}, "train": {"algorithm": {"kind": "cross_entropy"}}}


@pytest.mark.parametrize("dry_run", [False, True], ids=["start", "dry run"])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (empty_model, "policy.path is {directory}/model: config.json is missing."),
        (model_of_the_hub, "`hf download Qwen/Qwen3-0.6B --local-dir DIRECTORY` and name"),
        (missing_target, "environment.target: no file {directory}/mine.py"),
        (class_without_demonstrations, "the environment mine has no demonstrations"),
        (rows_of_two_agents, "'b' is for the agent 'b' (agent_ref.name), but 'a' plays all rows"),
        (missing_algorithm, "train.algorithm.target: no file {directory}/mine.py"),
        (missing_engine, "generation.backend: no file {directory}/mine.py"),
        (engine_of_one_method, "which does not define finish_generation, prepare_for_generation"),
        (model_with_calls_of_mistral, "calls that vLLM's parser mistral reads, but generation.backend is transformers"),
        (missing_transport, "generation.weight_sync"),
        (missing_launcher, "train.service.launcher: no file {directory}/mine.py"),
        (missing_loss, "mine.py has no function loss. Available: others."),
        (unknown_dataset, "nightly"),
        (file_for_a_store, "store is {directory}/file/store, but {directory}/file is not a directory"),
        (missing_worker_data, "environment.train_data is '{directory}/none.jsonl', which cannot be read"),
        (no_heldout_rows, "no held-out task to evaluate. Set environment.heldout_data"),
        (
            heads_that_the_ranks_cannot_divide,
            "train.service.context_parallel is 4, but the policy's attention has 2 heads",
        ),
        (
            heads_that_cannot_be_split,
            "train.service.tensor_parallel is 2, which does not divide the policy's 1 heads of keys",
        ),
        (
            experts_of_a_dense_model,
            "expert_parallel is 2, but Qwen3ForCausalLM has no matrix to split over ranks; only",
        ),
        (no_heldout_share, "Set environment.heldout_fraction, or train without evaluation"),
    ],
    ids=lambda fault: getattr(fault, "__name__", ""),
)
def test_a_run_that_cannot_begin_is_refused_before_anything_is_started(
    fault: Any, said: str, dry_run: bool, tmp_path: Path
) -> None:
    """Each of these once started Ray first, and left a run in the store."""
    path = config(tmp_path, **fault(tmp_path))
    before = set(tmp_path.iterdir())
    error = refused("train", path, *(["--dry-run"] if dry_run else []))
    assert isinstance(error, StoreError if fault is unknown_dataset else ConfigError)
    assert said.format(directory=tmp_path) in str(error)
    assert set(tmp_path.iterdir()) - {tmp_path / "__pycache__"} == before


def test_a_dry_run_reports_the_parser_and_the_packing_that_the_model_chooses(tmp_path: Path) -> None:
    make_model(tmp_path / "model", seed=0)
    path = config(tmp_path, policy={"kind": "pretrained", "path": str(tmp_path / "model")})
    shown = CliRunner().invoke(app, ["train", path, "--dry-run"])
    assert "# generation.tool_call_parser is hermes, chosen by the chat template" in shown.stdout, shown.exception
    assert "# train.packing is true, chosen by the model" in shown.stdout
    directory = tmp_path / "model"
    lfm = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "hidden_size": 64}
    (directory / "config.json").write_text(
        json.dumps({**lfm, "num_attention_heads": 2, "max_position_embeddings": 1024})
    )
    shown = CliRunner().invoke(app, ["train", path, "--dry-run", "--set", "train.check_memory=false"])
    assert "# train.packing is false, chosen by the model: Lfm2ForCausalLM has layers of kind conv" in shown.stdout


@pytest.mark.parametrize("command", [["evaluate"], ["collect", "--name", "nightly"]], ids=["evaluate", "collect"])
def test_a_checkpoint_that_is_not_there_is_refused_before_anything_is_started(
    command: list[str], tmp_path: Path
) -> None:
    """These waited for the engine first."""
    run = write_run(str(tmp_path / "store"), iterations=2)
    path = config(tmp_path, rollout={"prompts_per_iteration": 3, "group_size": 4})
    error = refused(*command, path, "--version", "99")
    assert isinstance(error, StoreError)
    assert "Run 'r' has no checkpoint of version 99. It has: 0, 1, 2" in str(error)
    error = refused(*command, path, "--set", "run_id=nosuch")
    assert isinstance(error, StoreError)
    assert "No run 'nosuch'" in str(error)
    assert "Runs there: r." in str(error)
    assert run_ids(run.config.store) == ["r"]
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("dry_run", [False, True], ids=["start", "dry run"])
def test_offline_training_from_an_unknown_dataset_leaves_no_run(dry_run: bool, tmp_path: Path) -> None:
    run = write_run(str(tmp_path / "store"), iterations=1)
    error = refused(
        *("train-offline", "r", "--run-id", "learnt", "--dataset", "nightly", "--store", run.config.store),
        *(["--dry-run"] if dry_run else []),
    )
    assert "nightly" in str(error)
    assert run_ids(run.config.store) == ["r"]


def test_a_run_without_evaluation_needs_no_heldout_task(tmp_path: Path) -> None:
    path = config(tmp_path, **no_heldout_share(tmp_path))
    done = CliRunner().invoke(app, ["train", path, "--dry-run", "--set", "evaluation.every=null"])
    assert done.exit_code == 0, done.exception
    without = load_config(path, ["evaluation.every=null"])
    assert not any(is_evaluated(without, k) for k in range(1, without.iterations + 1))
    assert is_evaluated(load_config(path), without.iterations)


QUESTIONS = ["1+1", "12*3+4", "+".join(map(str, range(300)))]


def policy_and_questions(directory: Path) -> dict[str, Any]:
    rows = [task_row(question, task_id=f"t{number}") for number, question in enumerate(QUESTIONS)]
    (directory / "rows.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    return {
        "policy": {"kind": "pretrained", "path": str(make_model(directory / "policy", seed=1))},
        "environment": {"kind": "remote", "url": "http://127.0.0.1:9", "train_tasks": str(directory / "rows.jsonl")},
        "evaluation": {"every": None, "before_training": False},
        "rollout": {"prompts_per_iteration": 2},
    }


def dataset_at(directory: Path) -> str:
    """A dataset's version that was sampled at temperature 0.5."""
    run = write_run(str(directory / "store"), "collected", iterations=1)
    stage = dataset_stage(run, "nightly", TaskDraw(1).label(0), TaskDraw(1))
    attempt = run.begin(stage, policy_version=0)
    attempt.commit(counts={}, details={"sampling": {"temperature": 0.5}})
    return "nightly"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rollout": {"max_prompt_tokens": 1}}, r"the shortest prompt of 3 training tasks has \d+ tokens. Raise it."),
        (
            {"rollout": {"max_prompt_tokens": 200, "drop_last": True, "prompts_per_iteration": 3}},
            "rollout.drop_last omits incomplete iterations, and 2 training tasks are fewer than 3",
        ),
        (
            {"rollout": {"prompts_per_iteration": 4, "curriculum": {"kind": "success_band"}}},
            "of 3 training tasks 3 have a weight above 0, fewer than the 4",
        ),
        (
            {
                "rollout": {"max_prompt_tokens": 1000, "system_prompt": "Take great care. " * 20},
                "generation": {"max_model_len": 64, "sampling": {"max_new_tokens": 4}},
            },
            "generation.max_model_len is 64, and the prompt of the first training task",
        ),
        (
            {"finish": {"metric": "reward_best", "at_least": 1}},
            "finish.metric is 'reward_best', but no stage reports it",
        ),
        (
            {"train": {"algorithm": {"kind": "distillation", "teacher": "nowhere"}}},
            "train.algorithm.teacher: .*nowhere has no config.json",
        ),
        (
            {"evaluation": {"every": 1, "sets": {"easy": {"environment": {"kind": "sort", "heldout_fraction": 0}}}}},
            "evaluation.sets.easy: environment.kind is sort and has no held-out task to evaluate",
        ),
    ],
    ids=["all too long", "no complete iteration", "curriculum", "context", "metric", "teacher", "evaluation set"],
)
def test_what_configuration_and_tasks_show_is_refused_before_the_store_has_a_record(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Each of these once wrote run.json first."""
    tree = policy_and_questions(tmp_path)
    if "evaluation" in keys:
        tree["environment"]["heldout_tasks"] = tree["environment"]["train_tasks"]
    path = config(tmp_path, **{key: tree.get(key, {}) | keys.get(key, {}) for key in tree | keys})
    before = set(tmp_path.iterdir())
    error = refused("train", path, "--dry-run")
    assert isinstance(error, ConfigError)
    assert re.search(message, str(error)), error
    assert set(tmp_path.iterdir()) == before


def test_a_prompt_with_an_image_is_refused_before_a_run(tmp_path: Path) -> None:
    path = config(tmp_path, **policy_and_questions(tmp_path))
    row = task_row("What is it?", task_id="seen")
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    row["responses_create_params"]["input"][0]["content"] = [{"type": "input_text", "text": "What is it?"}, image]
    (tmp_path / "rows.jsonl").write_bytes(orjson.dumps(row))
    error = refused("train", path, "--dry-run")
    assert isinstance(error, ConfigError)
    assert "first training task (seen) has an image, and generation.images is false" in str(error)


def test_a_model_that_cannot_see_is_refused_before_a_run(tmp_path: Path) -> None:
    keys = policy_and_questions(tmp_path) | {"generation": {"images": True}, "train": {"packing": False}}
    error = refused("train", config(tmp_path, **keys), "--dry-run")
    assert "images are not supported with models of type 'qwen3'. Supported: qwen2_5_vl, qwen3_vl" in str(error)


def test_linear_attention_in_float32_on_cpus_is_refused_before_a_run(tmp_path: Path) -> None:
    keys = policy_and_questions(tmp_path)
    shape = tmp_path / "policy" / "config.json"
    shape.write_text(json.dumps(json.loads(shape.read_text()) | {"linear_num_key_heads": 2}))
    error = refused("train", config(tmp_path, **keys), "--dry-run")
    assert "generation.dtype is float32, but vLLM computes the linear attention of" in str(error)


def test_prompts_of_a_model_without_a_fast_tokenizer_cannot_be_limited(tmp_path: Path) -> None:
    path = config(tmp_path, **policy_and_questions(tmp_path))
    (tmp_path / "policy/tokenizer.json").rename(tmp_path / "policy/tokenizer.model")
    error = refused("train", path, "--set", "rollout.max_prompt_tokens=200", "--dry-run")
    assert "rollout.max_prompt_tokens is 200" in str(error)
    assert "has no tokenizer.json to count with" in str(error)


def test_training_tasks_that_are_left_out_are_counted_before_a_run(tmp_path: Path) -> None:
    path = config(tmp_path, **policy_and_questions(tmp_path))
    done = CliRunner().invoke(app, ["train", path, "--dry-run", "--set", "rollout.max_prompt_tokens=200"])
    assert done.exit_code == 0, done.exception
    assert "1 of 3 training tasks have prompts of more than 200 tokens" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (dataset_at, r"nightly@.* was sampled at temperature 0\.5, and generation\.sampling\.temperature is 1"),
        (
            lambda directory: str(directory / "rows.jsonl"),
            r"train\.algorithm\.kl_coefficient is 0\.1, but dataset .*rows\.jsonl was written",
        ),
    ],
    ids=["temperature", "written"],
)
def test_offline_data_of_another_sampling_is_refused_before_the_store_has_a_record(
    dataset: Any, message: str, tmp_path: Path
) -> None:
    chat = {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(chat) + "\n")
    algorithm = {"kind": "cross_entropy", "kl_coefficient": 0.1, "kl_importance_weighting": True}
    path = config(tmp_path, offline={"datasets": [dataset(tmp_path)]}, train={"algorithm": algorithm})
    assert re.search(message, str(refused("train", path, "--dry-run")))
    assert "r" not in run_ids(str(tmp_path / "store"))
