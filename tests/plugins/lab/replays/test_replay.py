"""Recorded stages run again: equal without substitutions, otherwise a comparison that names the dependents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

import roundhouse as rh
from roundhouse.errors import ConfigError, StoreError
from roundhouse.plugins.lab.replays import stages as replaying
from roundhouse.plugins.lab.replays.comparison import Comparison, DriftGate
from roundhouse.plugins.lab.replays.stages import read_comparison, replay, substituted_config
from roundhouse.stages.datasets import retain_versions
from roundhouse.stages.trainer_home import release_trainers
from roundhouse.store.location import Location
from roundhouse.store.run import Run
from roundhouse.store.stage import Stage, model_location, read_manifest, read_table
from roundhouse.store.verification import find_garbage, verify
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.trainer import Trainer
from tests.plugins.lab.replays.trained import trained_run

LEARNING_RATE = "train.optimizer.learning_rate=0.006"


@pytest.fixture(autouse=True)
def no_resident_trainer() -> Iterator[None]:
    release_trainers()
    yield
    release_trainers()


def weights(root: Location, version: int) -> str:
    manifest = json.loads((root / f"checkpoints/{version:06d}").read("manifest.json"))
    [digest] = [entry["sha256"] for entry in manifest["files"] if entry["path"].endswith("model.safetensors")]
    return digest


def outcomes(found: Comparison) -> dict[tuple[int, str], str]:
    return {(stage.iteration, stage.stage): stage.outcome for stage in found.stages}


def test_with_nothing_substituted_every_stage_and_every_version_is_equal(run: Run) -> None:
    found = replay(run.config.store, run.run_id, range(1, 4))
    assert outcomes(found) == {(k, stage): "equal" for k in (1, 2, 3) for stage in ("validate", "train")}
    assert found.first is None
    for version in (1, 2, 3):
        assert weights(Location(found.uri), version) == weights(run.location, version)
    for k in (1, 2, 3):  # the whole version, optimizer and random state included
        made = Location(found.uri) / f"iterations/{k:06d}/train"
        theirs, ours = (
            {
                Path(f["path"]).name: f["sha256"]
                for f in json.loads(place.read("manifest.json"))["details"]["checkpoint_files"]
            }
            for place in (run.stage(k, "train").location, made)
        )
        assert ours == theirs


def test_a_run_resumes_with_less_memory_and_its_replay_takes_the_recorded_settings(tmp_path: Path) -> None:
    less = {"tokens_per_microbatch": 24, "logits_chunk_tokens": 8, "activation_checkpointing": True}
    trained_run(tmp_path, 1)
    train = trained_run(tmp_path, 1).config.train.model_dump(mode="json")
    run = trained_run(tmp_path, 2, train=train | less)
    settings = [read_manifest(run.stage(k, "train").reference()).details["memory_settings"] for k in (1, 2)]
    assert [each["tokens_per_microbatch"] for each in settings] == [train["tokens_per_microbatch"], 24]
    assert settings[1] == {**less, "reduce_gradients": "update"}
    comparison = replay(run.config.store, run.run_id, range(1, 3), stages=["train"])
    assert outcomes(comparison) == {(1, "train"): "equal", (2, "train"): "equal"}


def test_a_replay_releases_the_engine_if_it_samples_and_reaches_for_none_otherwise(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[str] = []
    monkeypatch.setattr(replaying, "release_engine", lambda each: released.append(each.location.uri.rpartition("/")[2]))
    replay(run.config.store, run.run_id, [2], ["validate"], name="without")
    assert released == []

    def without_an_engine(*_: object) -> None:
        raise StoreError("as an engine that is away")

    monkeypatch.setattr(replaying, "_run_chain", without_an_engine)
    with pytest.raises(StoreError, match="an engine that is away"):
        replay(run.config.store, run.run_id, [2], ["collect", "validate"], name="sampled")
    assert released == ["sampled"]


def test_a_single_iteration_from_the_middle_is_equal(run: Run) -> None:
    found = replay(run.config.store, run.run_id, [2], ["train"])
    assert outcomes(found) == {(2, "train"): "equal"}


def test_one_key_changes_what_depends_on_it_and_the_comparison_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDHOUSE_STATE", run.config.infra.state)
    key, _, value = LEARNING_RATE.partition("=")
    found = rh.replay(run.run_id, range(2, 4), store=run.config.store, **{key: float(value)})
    assert outcomes(found) == {
        (2, "validate"): "equal",
        (2, "train"): "differs",
        (3, "validate"): "equal",
        (3, "train"): "differs",
    }
    assert found.first is not None
    assert found.first.because == ["configuration: train.optimizer.learning_rate 0.003 -> 0.006"]
    assert found.first.weights == ["model.safetensors"]
    assert found.first.metrics["train/lr"] == (0.003, 0.006)
    assert "input base: iteration 2, train differs" in found.stages[-1].because
    assert read_comparison(run.config.store, found.uri.rsplit("/", 1)[-1])["first"]["iteration"] == 2


def test_a_key_of_validation_leaves_out_what_it_leaves_out(run: Run) -> None:
    found = replay(
        run.config.store, run.run_id, [1], overrides=["failures.min_groups=1", "validation.check_text=false"]
    )
    assert found.equal
    assert set(found.changed) <= {"failures.min_groups", "validation.check_text"}


def test_another_iterations_rollouts_are_named_as_the_cause(run: Run) -> None:
    found = replay(run.config.store, run.run_id, [2], inputs={"rollouts": "iteration:1"})
    assert found.first is not None
    assert found.first.stage == "validate"
    [because] = found.first.because
    assert because.startswith("input rollouts: iteration:1 was substituted for ")
    assert found.first.rows["sequences"]["changed"] == 16
    assert found.stages[-1].because == ["input sequences: iteration 2, validate differs"]


def test_retention_keeps_the_rescored_versions_that_a_replay_reads(run: Run) -> None:
    store, name = run.config.store, "pruned"
    for k in (1, 2, 3):
        recorded = run.stage(k, "collect").reference()
        assert recorded is not None
        place = Location(store) / f"datasets/{name}/{run.run_id}-i{k:06d}"
        attempt = Stage(place, kind="collect", run_id=run.run_id, iteration=k).begin(read_manifest(recorded).provenance)
        for dataset in ("rollouts", "turns"):
            attempt.write_table(dataset, read_table(recorded, dataset))
        attempt.commit(inputs={"rollouts": recorded}, counts=recorded.counts)
    replay(store, run.run_id, [1], ["validate"], inputs={"rollouts": name}, name="reads-pruned")
    gone = retain_versions(store, name, keep_last=1)
    assert [uri.rsplit("-", 1)[-1] for uri in gone] == ["i000002"], (
        "version 1 is read by a replay, version 3 is the newest"
    )
    assert replay(store, run.run_id, [1], ["validate"], inputs={"rollouts": name}, name="reads-pruned").stages


def test_another_base_is_named_as_the_cause(run: Run) -> None:
    found = replay(run.config.store, run.run_id, [3], ["train"], inputs={"base": "1"})
    assert found.first is not None
    assert found.first.because[0].startswith("input base: 1 was substituted for ")


def test_the_original_is_not_touched_and_the_store_is_sound(run: Run) -> None:
    before = {name: run.location.size(name) for name in run.location.tree()}
    replay(run.config.store, run.run_id, [1], overrides=["train.minibatches=1"], name="kept")
    assert {name: run.location.size(name) for name in run.location.tree()} == before
    found = verify(run.config.store)
    assert found.problems == []
    assert [each for each in find_garbage(run.config.store) if "replays/" in each.name] == []


def test_it_resumes_after_a_kill_where_it_was(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replay(run.config.store, run.run_id, range(1, 3), overrides=[LEARNING_RATE], name="whole")
    trained: list[int] = []
    train = replaying.train_iteration

    def killed(*arguments: object) -> object:
        if trained:
            raise KeyboardInterrupt
        trained.append(arguments[1])  # type: ignore[arg-type]
        return train(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(replaying, "train_iteration", killed)
    with pytest.raises(KeyboardInterrupt):
        replay(run.config.store, run.run_id, range(1, 3), overrides=[LEARNING_RATE], name="killed")
    with pytest.raises(StoreError, match="was interrupted"):
        read_comparison(run.config.store, "killed")
    begun = read_manifest_of(run, "killed", 1)
    monkeypatch.undo()
    release_trainers()
    again = replay(run.config.store, run.run_id, range(1, 3), overrides=[LEARNING_RATE], name="killed")
    assert read_manifest_of(run, "killed", 1) == begun, "what was complete was not done again"
    assert [weights(Location(again.uri), k) for k in (1, 2)] == [weights(Location(whole.uri), k) for k in (1, 2)]


def read_manifest_of(run: Run, name: str, k: int) -> bytes:
    return (Location(run.config.store) / f"replays/{name}/iterations/{k:06d}/train").read("manifest.json")


def test_the_gate_stops_at_the_iteration_whose_data_is_not_the_policys_own(run: Run) -> None:
    gate = DriftGate(max_kl=0.01)
    same = replay(run.config.store, run.run_id, [2], name="gated-same", gate=gate)
    assert same.stopped is None
    assert same.stages[-1].drift is not None
    assert same.stages[-1].drift["kl"] < 1e-6
    far = replay(
        run.config.store,
        run.run_id,
        range(1, 4),
        overrides=["train.optimizer.learning_rate=0.1"],
        name="far",
        gate=gate,
    )
    assert far.stopped is not None
    assert far.stopped["iteration"] == 2
    assert any("max_kl=0.01" in reason for reason in far.stopped["reasons"])
    assert outcomes(far) == {
        (1, "validate"): "equal",
        (1, "train"): "differs",
        (2, "validate"): "equal",
        (2, "train"): "differs",
    }
    assert not (Location(far.uri) / "checkpoints/000002").exists("manifest.json")


def test_what_cannot_be_replayed_is_refused_with_its_reason(run: Run) -> None:
    store, run_id = run.config.store, run.run_id
    with pytest.raises(StoreError, match=r"no complete stage train of iteration 4; recorded: 1, 2, 3"):
        replay(store, run_id, range(3, 5), ["train"])
    with pytest.raises(ConfigError, match="not consecutive"):
        replay(store, run_id, [1, 3])
    with pytest.raises(ConfigError, match="can run again"):
        replay(store, run_id, [1], ["refit"])
    with pytest.raises(ConfigError, match="rollouts can be substituted with --stage validate"):
        replay(store, run_id, [1], ["train"], inputs={"rollouts": "iteration:2"})
    with pytest.raises(ConfigError, match="another policy"):
        replay(store, run_id, [1], overrides=["policy.layers=2"])
    with pytest.raises(ConfigError, match="name it with --name"):
        replay(store, run_id, [1], overrides=["run_id=other"])
    with pytest.raises(ConfigError, match="one stage of one iteration"):
        replay(store, run_id, range(1, 3), ["collect"])
    replay(store, run_id, [1], ["validate"], name="taken")
    with pytest.raises(StoreError, match=r"is another replay: iterations differ"):
        replay(store, run_id, [2], ["validate"], name="taken")
    with pytest.raises(StoreError, match="was not re-scored into 'nothing'"):
        replay(store, run_id, [1], inputs={"rollouts": "nothing"})


def test_another_key_gives_the_weights_of_a_plain_offline_loop(run: Run, tmp_path: Path) -> None:
    """Load the checkpoint, step over the recorded sequences, save: nothing of stages or stores."""
    found = replay(
        run.config.store, run.run_id, range(2, 4), ["train"], overrides=[LEARNING_RATE], name="counterfactual"
    )
    config = substituted_config(run.config, [LEARNING_RATE])
    base = run.checkpoint(1).reference()
    assert base is not None
    directory = model_location(Location(base.uri)).local_path
    trainer = Trainer.load(directory, config.train, trainer_state=directory / "trainer", seed=config.seed)
    for k in (2, 3):
        sequences = run.stage(k, "validate").reference()
        assert sequences is not None
        trainer.step(TrainingSequences.from_table(read_table(sequences, "sequences")), k)
    trainer.save(tmp_path)
    trainer.close()
    plain = load_file(tmp_path / "model.safetensors")
    version = model_location(Location(found.uri) / "checkpoints/000003").local_path
    replayed = load_file(version / "model.safetensors")
    assert plain.keys() == replayed.keys()
    assert max(float((plain[name] - replayed[name]).abs().max()) for name in plain) < 1e-6
