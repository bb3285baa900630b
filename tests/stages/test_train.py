"""The train stage on a real, tiny policy: a fresh process that continues from the store equals a resident one."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from roundhouse.config.loading import parse_config
from roundhouse.config.training import ProcessService
from roundhouse.errors import ConfigError, DataError, InfraError, RoundhouseError, StoreError
from roundhouse.launch.resident_ranks import ResidentRanks
from roundhouse.launch.subprocesses import ChildProcess, SubprocessLauncher
from roundhouse.stages import trainer_home
from roundhouse.stages.checkpoint import publish, retain
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.refit import engine_files
from roundhouse.stages.train import train_iteration
from roundhouse.stages.train_program import step_program
from roundhouse.stages.validate import vocabulary_size
from roundhouse.store.location import Location
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, model_location, read_manifest, read_table
from roundhouse.training.service import one_shot
from roundhouse.training.service.job_entry import error_of, exit_code, read_error
from roundhouse.training.service.one_shot import StepSpec
from roundhouse.training.service.server import build_app
from roundhouse.training.trainer import Trainer
from roundhouse.trajectories.schemas import SEQUENCES
from tests.ports import free_port
from tests.training.service.serving import listening, make_service, train_server

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("no_resident_trainer")]


def make_run(store: str, tmp_path: Path, run_id: str = "r", **service: Any) -> Run:
    tree = {
        "run_id": run_id,
        "store": store,
        "policy": {"kind": "warm_start", "steps": 3, "hidden_size": 32, "intermediate_size": 64, "layers": 1},
        "rollout": {"prompts_per_iteration": 2, "group_size": 4},
        "train": {
            "minibatches": 2,
            "threads": 1,
            "device": "cpu",
            "algorithm": {"kl_coefficient": 0.05},
            "service": service or {"kind": "resident"},
        },
        "infra": {"kind": "local", "state": str(tmp_path / "state")},
        "validation": {"recompute_tolerance": None},  # the tokens are made up
    }
    return open_run(parse_config(tree))


def sequences(run: Run, iteration: int) -> Reference:
    """A validate stage with made-up tokens: eight sequences in two groups, rewards mixed."""
    draw = random.Random(iteration)
    rows = []
    for group in range(2):
        for sample in range(4):
            generated = draw.randint(3, 9)
            tokens = [draw.randrange(vocabulary_size(run)) for _ in range(5 + generated)]
            row = {
                "sequence_id": f"g{group}/{sample}/0",
                "rollout_id": f"g{group}/{sample}",
                "group_id": f"g{group}",
                "token_ids": tokens,
                "loss_mask": [0] * 5 + [1] * generated,
                "gen_logprobs": [0.0] * 5 + [-6.0] * generated,
                "policy_version": iteration - 1,
                "version_spans": [{"version": iteration - 1, "start": 5, "end": len(tokens)}],
                "reward": float(sample % 2),
                "truncated": False,
            }
            rows.append(row)
    attempt = run.begin(run.stage(iteration, "validate"), policy_version=iteration - 1)
    attempt.write_table("sequences", pa.Table.from_pylist(rows, schema=SEQUENCES))
    return attempt.commit()


def weights_digest(reference: Reference) -> str:
    [digest] = [
        entry.sha256 for entry in read_manifest(reference).model_files.named() if entry.path == "model.safetensors"
    ]
    return digest


def train_two(run: Run, tmp_path: Path, *, restart: bool) -> Reference:
    checkpoint = starting_policy(run)
    for iteration in (1, 2):
        if restart:
            trainer_home.release_trainers()
        update = train_iteration(run, iteration, sequences(run, iteration), checkpoint, tmp_path / "cache")
        checkpoint = publish(run, update)
    return checkpoint


def checkpoint_digests(reference: Reference) -> dict[str, str]:
    return {entry.path: entry.sha256 for entry in read_manifest(reference).model_files.named()}


def test_two_runs_that_share_a_process_write_the_bytes_of_each_alone(resident: Run, tmp_path: Path) -> None:
    runs = [make_run(str(tmp_path / name), tmp_path) for name in ("one", "other")]
    checkpoints = [starting_policy(run) for run in runs]
    for iteration in (1, 2):
        for index, run in enumerate(runs):
            update = train_iteration(run, iteration, sequences(run, iteration), checkpoints[index], tmp_path / "cache")
            checkpoints[index] = publish(run, update)
    alone = resident.checkpoint(2).reference()
    assert alone is not None
    assert [checkpoint_digests(each) for each in checkpoints] == [checkpoint_digests(alone)] * 2


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two iterations with the default, a trainer in this process."""
    place = tmp_path_factory.mktemp("resident")
    run = make_run(str(place / "store"), place)
    train_two(run, place, restart=False)
    trainer_home.release_trainers()
    return run


@pytest.fixture(scope="module")
def resident_digests(resident: Run) -> dict[str, str]:
    """Output of that trainer."""
    checkpoint = resident.checkpoint(2).reference()
    assert checkpoint is not None
    return checkpoint_digests(checkpoint)


def test_a_restart_between_iterations_changes_nothing(store_uri: str, tmp_path: Path) -> None:
    resident = train_two(make_run(f"{store_uri}/a", tmp_path), tmp_path, restart=False)
    restarted = train_two(make_run(f"{store_uri}/b", tmp_path), tmp_path, restart=True)
    start = make_run(f"{store_uri}/a", tmp_path).checkpoint(0).reference()
    assert weights_digest(resident) == weights_digest(restarted) != weights_digest(start)
    trainer_files = [
        entry for entry in read_manifest(resident).model_files.named() if entry.path.startswith("trainer/")
    ]
    assert trainer_files == [
        entry for entry in read_manifest(restarted).model_files.named() if entry.path.startswith("trainer/")
    ]


def _renewing(tmp_path: Path, reference_every: int) -> Run:
    plain = make_run(str(tmp_path / "store"), tmp_path)
    algorithm = plain.config.train.algorithm.model_copy(update={"reference_every": reference_every})
    train = plain.config.train.model_copy(update={"minibatches": 1, "algorithm": algorithm})
    checkpoint_config = plain.config.checkpoint.model_copy(update={"keep_last": 1})
    return dataclasses.replace(
        plain, config=plain.config.model_copy(update={"train": train, "checkpoint": checkpoint_config})
    )


@pytest.mark.parametrize("restart", [False, True])
def test_the_reference_is_renewed_every_so_many_iterations_and_kept(tmp_path: Path, restart: bool) -> None:
    """With one update an iteration, the KL to a reference that is the policy itself is 0."""
    run = _renewing(tmp_path, reference_every=2)
    checkpoint, penalties = starting_policy(run), []
    for iteration in range(1, 6):
        if restart:
            trainer_home.release_trainers()
        update = train_iteration(run, iteration, sequences(run, iteration), checkpoint, tmp_path / "cache")
        penalties.append(read_manifest(update).metrics["train/kl_penalty"])
        checkpoint = publish(run, update)
        retain(run, iteration)
    assert [abs(penalty) < 1e-7 for penalty in penalties] == [True, False, True, False, True], penalties
    assert [version for version in run.checkpoint_versions() if run.checkpoint(version).reference()] == [0, 4, 5]


def test_a_trainer_whose_reference_cannot_be_renewed_is_closed(tmp_path: Path) -> None:
    run = _renewing(tmp_path, reference_every=1)
    start = starting_policy(run)
    base = publish(run, train_iteration(run, 1, sequences(run, 1), start, tmp_path / "cache"))
    trainer = trainer_home.trainer_home(run).trainer
    assert trainer is not None
    batch = sequences(run, 2)
    [weights] = [each for each in read_manifest(base).files if each.path.endswith("model.safetensors")]
    (Location(base.uri).local_path / weights.path).write_bytes(b"damaged")
    with pytest.raises(StoreError, match="damaged"):
        train_iteration(run, 2, batch, base, tmp_path / "cache")
    with pytest.raises(DataError, match="No policy was loaded"):
        trainer.learner.service.facts()


def test_a_reference_that_there_is_not_cannot_be_renewed() -> None:
    with pytest.raises(ConfigError, match=r"reference_every is 2, but the run has no reference"):
        parse_config({"run_id": "r", "train": {"algorithm": {"reference_every": 2}}})
    both = {"train": {"algorithm": {"reference_every": 2, "kl_coefficient": 0.1}}, "checkpoint": {"optimizer_every": 3}}
    with pytest.raises(ConfigError, match=r"reference_every is 2, but checkpoint\.optimizer_every is 3"):
        parse_config({"run_id": "r"} | both)


@pytest.mark.long
def test_ranks_stay_between_iterations_and_a_lost_one_costs_its_step_alone(tmp_path: Path) -> None:
    """Two ranks that stay for two iterations write the same bytes as ranks of which one is killed in between."""
    ranks: dict[str, Any] = {"kind": "resident", "processes": 2}
    expected = checkpoint_digests(
        train_two(make_run(str(tmp_path / "kept"), tmp_path, **ranks), tmp_path, restart=False)
    )
    run = make_run(str(tmp_path / "lost"), tmp_path, **ranks)
    start = starting_policy(run)
    update = train_iteration(run, 1, sequences(run, 1), start, tmp_path / "cache")
    base, batch = publish(run, update), sequences(run, 2)
    trainer = trainer_home.trainer_home(run).trainer
    assert trainer is not None
    service = trainer.learner.service
    assert isinstance(service, ResidentRanks)
    os.kill(service.ranks.pids[1], signal.SIGKILL)
    with pytest.raises(InfraError, match=r"rank 1 of 2 was killed by signal 9"):
        train_iteration(run, 2, batch, base, tmp_path / "cache")
    assert run.stage(2, "train").reference() is None
    assert run.checkpoint(2).reference() is None
    again = publish(run, train_iteration(run, 2, batch, base, tmp_path / "cache"))
    assert checkpoint_digests(again) == expected


@pytest.mark.long
def test_after_a_lack_of_memory_the_retry_trains_in_another_process(
    resident_digests: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(str(tmp_path / "short"), tmp_path)
    start = starting_policy(run)
    step, processes = Trainer.step, []

    def short_of_memory(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Trainer, "step", short_of_memory)
    with pytest.raises(MemoryError):
        train_iteration(run, 1, sequences(run, 1), start, tmp_path / "cache")

    def observed(trainer: Trainer, *arguments: Any) -> Any:
        processes.append(type(trainer.learner.service).__name__)
        return step(trainer, *arguments)

    monkeypatch.setattr(Trainer, "step", observed)
    assert checkpoint_digests(train_two(run, tmp_path, restart=False)) == resident_digests
    assert processes == ["ResidentRanks", "ResidentRanks"]


def test_a_step_records_its_columns_and_is_not_done_twice(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "store"), tmp_path)
    checkpoint = starting_policy(run)
    batch = sequences(run, 1)
    update = train_iteration(run, 1, batch, checkpoint, tmp_path / "cache")
    assert train_iteration(run, 1, batch, checkpoint, tmp_path / "cache") == update
    columns = read_table(update, "columns")
    assert columns.num_rows == 8
    assert "advantage" in columns.column_names
    metrics = read_manifest(update).metrics
    assert metrics["train/num_updates"] == 2
    assert metrics["time/compute"] > 0


def test_the_engine_starts_with_the_tokenizer_that_the_policy_will_have(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "store"), tmp_path)
    before = engine_files(run)
    assert run.checkpoint(0).reference() is None
    names = {path.name for path in before.iterdir()}
    assert {"config.json", "tokenizer.json"} <= names
    assert not any(name.endswith(".safetensors") for name in names)
    starting_policy(run)
    assert engine_files(run) == before, "the same directory, checked against the committed policy"


@pytest.mark.parametrize("launcher", ["subprocess", pytest.param("ray", marks=pytest.mark.long)])
def test_a_process_a_step_writes_what_a_resident_trainer_writes(
    request: pytest.FixtureRequest, resident_digests: dict[str, str], tmp_path: Path, launcher: str
) -> None:
    if launcher == "ray":
        request.getfixturevalue("ray_cluster")
    run = make_run(str(tmp_path / "process"), tmp_path, kind="process", launcher=launcher)
    assert checkpoint_digests(train_two(run, tmp_path, restart=False)) == resident_digests
    update = run.stage(2, "train").reference()
    assert update is not None
    assert read_table(update, "columns").num_rows == 8
    manifest = read_manifest(update)
    assert manifest.metrics["train/num_updates"] == 2
    if launcher == "subprocess":
        assert manifest.resources["cpu_seconds"] > 1, "with those of the process, which has imported torch"


def test_a_remote_server_writes_what_a_resident_trainer_writes_and_serves_one_session_throughout(
    resident: Run, resident_digests: dict[str, str], tmp_path: Path
) -> None:
    start = model_location(resident.checkpoint(0).location).local_path
    service = make_service(start, tmp_path / "server")
    with listening(build_app(service)) as url:
        run = make_run(str(tmp_path / "remote"), tmp_path, kind="remote", url=url)
        assert checkpoint_digests(train_two(run, tmp_path, restart=False)) == resident_digests
        assert service.lease.opened == 1
        trainer_home.release_trainers()


def test_a_run_may_go_on_with_another_service(resident_digests: dict[str, str], tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "moved"), tmp_path)
    checkpoint = starting_policy(run)
    checkpoint = publish(run, train_iteration(run, 1, sequences(run, 1), checkpoint, tmp_path / "cache"))
    with train_server(model_location(run.checkpoint(0).location).local_path, tmp_path / "server") as url:
        run = make_run(str(tmp_path / "moved"), tmp_path, kind="remote", url=url)
        update = train_iteration(run, 2, sequences(run, 2), checkpoint, tmp_path / "cache")
        assert checkpoint_digests(publish(run, update)) == resident_digests
        trainer_home.release_trainers()


def test_a_server_lost_between_iterations_fails_the_stage_and_the_next_attempt_goes_on_from_the_checkpoint(
    resident: Run, resident_digests: dict[str, str], tmp_path: Path
) -> None:
    start = model_location(resident.checkpoint(0).location).local_path
    port = free_port()
    run = make_run(str(tmp_path / "remote"), tmp_path, kind="remote", url=f"http://127.0.0.1:{port}", retry_seconds=2)
    checkpoint = starting_policy(run)
    with train_server(start, tmp_path / "first", port=port):
        update = train_iteration(run, 1, sequences(run, 1), checkpoint, tmp_path / "cache")
    checkpoint, batch = publish(run, update), sequences(run, 2)
    with train_server(start, tmp_path / "second", port=port):
        with pytest.raises(InfraError, match="restarted"):
            train_iteration(run, 2, batch, checkpoint, tmp_path / "cache")
        update = train_iteration(run, 2, batch, checkpoint, tmp_path / "cache")
    assert checkpoint_digests(publish(run, update)) == resident_digests


def spec_of(run: Run, tmp_path: Path) -> StepSpec:
    return StepSpec(
        iteration=1,
        seed=0,
        temperature=1.0,
        train=run.config.train,
        base=starting_policy(run),
        sequences=sequences(run, 1),
        reference=starting_policy(run),
        checkpoint=run.checkpoint(1).location.uri,
        attempt="0001",
        report="",
        cache=str(tmp_path / "cache"),
    )


def test_the_errors_of_a_step_are_told_by_exit_code_and_error_file(tmp_path: Path) -> None:
    """Their kind decides whether the stage is tried again."""
    run = make_run(str(tmp_path / "store"), tmp_path)
    spec = spec_of(run, tmp_path)
    lost = {"sequences": spec.sequences.model_copy(update={"digest": "0" * 64})}
    gone = {"base": spec.base.model_copy(update={"uri": str(tmp_path / "nowhere")})}
    cold = {"temperature": 0.0}
    for change, code, kind, message in (
        (lost, 74, StoreError, "has digest"),
        (gone, 74, StoreError, "has no manifest"),
        (cold, 78, ConfigError, "temperature is 0.0"),
    ):
        report = Location((tmp_path / f"report-{code}-{next(iter(change))}").as_uri())
        changed = spec.model_copy(update={"report": report.uri, **change})
        (tmp_path / "spec.json").write_text(changed.model_dump_json())
        assert one_shot.main(["--spec", str(tmp_path / "spec.json")]) == code
        error = read_error(report)
        assert type(error) is kind
        assert message in str(error)
    with pytest.raises(InfraError, match="no complete report"):
        one_shot.read_result(report)
    assert one_shot.main(["--spec", str(tmp_path / "nowhere.json")]) == 78


def test_a_step_beyond_its_time_is_ended(tmp_path: Path) -> None:
    spec = spec_of(make_run(str(tmp_path / "store"), tmp_path), tmp_path)
    program = step_program(spec, ProcessService(timeout_seconds=0.2), Location((tmp_path / "place").as_uri()))
    with (
        SubprocessLauncher(None) as launcher,
        pytest.raises(InfraError, match=r"longer than train.service.timeout_seconds"),
    ):
        launcher.run(program, print, threading.Event())


def test_a_step_that_was_killed_is_an_infrastructure_error(tmp_path: Path) -> None:
    script = "import os, signal; print('reading'); os.kill(os.getpid(), signal.SIGKILL)"
    process = ChildProcess("The training step", ["-uc", script], tmp_path / "log", 60, "train.service.timeout_seconds")
    code = process.run("train")
    assert code == -9
    error = process.error_of(code)
    assert isinstance(error, InfraError)
    assert "killed by signal 9" in str(error)
    assert "reading" in str(error)


@pytest.mark.parametrize(
    ("error", "code"), [(DataError("x"), 65), (StoreError("x"), 74), (InfraError("x"), 75), (ConfigError("x"), 78)]
)
def test_exit_codes_tell_whether_repeating_can_help(error: RoundhouseError, code: int) -> None:
    assert exit_code(error) == code
    assert type(error_of(code, "The step", "")) is type(error)


def test_no_trainer_is_kept_behind_a_flow_that_fails(tmp_path: Path) -> None:
    run, other = (make_run(str(tmp_path / name), tmp_path) for name in ("run", "other"))
    trainer, of_other = mock.Mock(), mock.Mock()
    for each, kept in ((run, trainer), (other, of_other)):
        trainer_home.trainer_home(each).keep((1,), kept)
    with pytest.raises(InfraError, match="the stage failed"), trainer_home.trainer_released_at_end(run):
        raise InfraError("the stage failed")
    trainer.close.assert_called_once()
    assert trainer_home.trainer_home(run).trainer is None
    assert trainer_home.trainer_home(other).trainer is of_other, "another run of this process keeps its trainer"
    trainer_home.release_trainers()
    of_other.close.assert_called_once()
