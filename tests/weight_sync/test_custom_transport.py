"""A transport costs one file and one section of the configuration: this file adds one from outside, and a run refits by it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from roundhouse.config.consent import unnamed_code
from roundhouse.config.generation import CustomWeightSync
from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from roundhouse.config.section import Section
from roundhouse.errors import ConfigError, StoreError
from roundhouse.stages.checkpoint import publish, publish_starting_policy
from roundhouse.stages.refit import ensure_version, refit_iteration
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import read_manifest
from roundhouse.weight_sync.base import (
    FetchRequest,
    Published,
    RunCheckpoint,
    WeightSource,
    WeightTransport,
    load_transport,
    parse_source,
)
from roundhouse.weight_sync.replica_state import ReplicaReport
from roundhouse.weight_sync.tensor_files import digest_of
from tests.generation import tiny
from tests.generation.test_standalone import engine_process
from tests.stages.test_checkpoint import trained

TARGET = f"{__name__}:SharedDirectory"


class SharedDirectoryConfig(Section):
    """The section of its configuration."""

    directory: str


class SharedDirectorySource(WeightSource):
    name: str
    directory: str


class SharedDirectory(WeightTransport):
    """Weights are put into a directory that the engine's nodes share with the flow."""

    Config = SharedDirectoryConfig
    Source = SharedDirectorySource
    config: SharedDirectoryConfig

    def check(self, run: RunConfig) -> None:
        if run.infra.kind == "kubernetes":
            raise ValueError("generation.weight_sync shares a directory, which pods do not.")

    @contextmanager
    def publish(self, checkpoint: RunCheckpoint, replicas: Sequence[ReplicaReport]) -> Iterator[Published]:
        assert replicas == [], "it does not ask for them"
        target = Path(self.config.directory) / f"v{checkpoint.reference.policy_version}"
        with checkpoint.in_engine_format() as weights:
            shutil.copytree(weights, target)
        yield Published(
            digest_of(target),
            SharedDirectorySource(
                kind=self.kind, dtype=checkpoint.dtype, name=target.name, directory=self.config.directory
            ),
        )

    @classmethod
    def fetch(cls, source: SharedDirectorySource, request: FetchRequest) -> tuple[Path, None]:
        directory = Path(source.directory) / source.name
        if not directory.is_dir():
            raise StoreError(f"{directory} is not on this node")
        return directory, None


def by_directory(tmp_path: Path, **generation: Any) -> dict[str, Any]:
    section = {"kind": "custom", "target": TARGET, "parameters": {"directory": str(tmp_path / "shared")}}
    return {
        "run_id": "r",
        "store": str(tmp_path / "store"),
        "generation": {"backend": "transformers", "weight_sync": section, **generation},
        "infra": {"state": str(tmp_path / "state")},
    }


@pytest.mark.real
def test_a_transport_from_outside_refits_a_real_engine_with_the_proof_of_the_others(tmp_path: Path) -> None:
    with engine_process(fresh=True, PYTHONPATH=":".join(path for path in sys.path if path)) as url:
        run: Run = open_run(parse_config(by_directory(tmp_path, engine_url=url)))
        checkpoints = [publish_starting_policy(run, tiny.make_model(tmp_path / "v0", seed=1), {})]
        shutil.copytree(tmp_path / "v0", tmp_path / "v1")
        tensors = load_file(tmp_path / "v1/model.safetensors")
        save_file({name: tensor * 1.001 for name, tensor in tensors.items()}, tmp_path / "v1/model.safetensors")
        checkpoints.append(publish(run, trained(run, 1, tmp_path / "v1")))
        for checkpoint in checkpoints:
            details = read_manifest(refit_iteration(run, checkpoint.policy_version + 1, checkpoint)).details
            assert [(one["way"], one["note"]) for one in details["replicas"]] == [(TARGET, None)]
            assert details["proof"]["digest"] == digest_of(tmp_path / f"v{checkpoint.policy_version}")

        shutil.rmtree(tmp_path / "shared/v0")

        @contextmanager
        def forgotten(self: SharedDirectory, checkpoint: RunCheckpoint, replicas: Any) -> Iterator[Published]:
            source = SharedDirectorySource(
                kind=self.kind, dtype=checkpoint.dtype, name="v0", directory=self.config.directory
            )
            yield Published(digest_of(tmp_path / "v0"), source)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SharedDirectory, "publish", forgotten)
            (replica,) = ensure_version(run, checkpoints[0])
        assert (replica.ready, replica.policy_version, replica.transport) == (True, 0, "store")
        assert "is not on this node" in str(replica.transport_note)


def test_its_own_check_refuses_a_run_before_anything_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: SharedDirectory, run: RunConfig) -> None:
        raise ValueError("generation.weight_sync: not here")

    run = open_run(parse_config(by_directory(tmp_path, engine_url="http://127.0.0.1:9")))
    checkpoint = publish_starting_policy(run, tiny.make_model(tmp_path / "v0", seed=1), {})
    monkeypatch.setattr(SharedDirectory, "check", refused)
    with pytest.raises(ConfigError, match="not here"):
        ensure_version(run, checkpoint)
    assert not (tmp_path / "shared").exists()


def test_parameters_that_do_not_fit_its_section_are_refused(tmp_path: Path) -> None:
    tree = by_directory(tmp_path, engine_url="http://127.0.0.1:9")
    tree["generation"]["weight_sync"]["parameters"] = {"directroy": "x"}
    run = open_run(parse_config(tree))
    checkpoint = publish_starting_policy(run, tiny.make_model(tmp_path / "v0", seed=1), {})
    with pytest.raises(ConfigError, match="directroy"):
        ensure_version(run, checkpoint)


def test_a_file_is_refused_wherever_it_is_named(tmp_path: Path) -> None:
    """Also in the desired state that an engine is sent."""
    file = tmp_path / "transport.py"
    file.write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match="name an installed module"):
        parse_source({"kind": f"{file}:Mine"})
    section = CustomWeightSync(kind="custom", target=f"{file}:Mine")
    with pytest.raises(ConfigError, match="name an installed module"):
        load_transport(section)


def test_reading_a_configuration_executes_none_of_it_and_a_stores_needs_trust(tmp_path: Path) -> None:
    tree = by_directory(tmp_path)
    tree["generation"]["weight_sync"]["target"] = "no_such_module:Transport"
    config = parse_config(tree)
    named = {"generation.weight_sync.target": "no_such_module:Transport", "infra.state": tree["infra"]["state"]}
    assert unnamed_code(config, []) == named


def test_an_engine_takes_weight_transports_alone() -> None:
    with pytest.raises(ValueError, match="WeightTransport"):
        parse_source({"kind": "roundhouse.store.location:Location", "dtype": "float32"})
