"""A run's rollouts train a policy after their way through ATIF."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundhouse.plugins.atif.writer import write
from roundhouse.stages.fork import offline_config
from roundhouse.stages.importing import import_files
from roundhouse.stages.policy import starting_policy
from roundhouse.store.run import open_run
from roundhouse.store.stage import read_manifest, read_table
from tests.stages.offline_world import collect, make_config, train_to_the_end

pytestmark = pytest.mark.usefixtures("no_resident_trainer")


@pytest.mark.real
def test_a_policy_trains_on_its_rollouts_after_their_way_through_atif(tmp_path: Path) -> None:
    base = open_run(make_config(tmp_path))
    start = starting_policy(base)
    own = collect(base, start, groups=4)
    write(own, tmp_path / "out", None)
    back = import_files(base.config.store, "back", tmp_path / "out")
    assert back.with_tokens == 16
    for table in ("rollouts", "turns"):
        assert read_table(back.reference, table) == read_table(own, table)
    run = train_to_the_end(offline_config(base.config.store, "base", "learnt", ["back"], "grpo"))
    reference = run.stage(1, "train").reference()
    assert reference is not None
    assert read_manifest(reference).metrics["train/gen_kl_error"] == pytest.approx(0, abs=1e-3)
