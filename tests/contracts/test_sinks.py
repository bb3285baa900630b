"""Sinks against the real packages: each metric once, also after a resume."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.contract("sinks-0.43.0"), pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
WRITE = """
import sys
from roundhouse.config.loading import parse_config
from roundhouse.stages.report import report_iteration, sink_class
from roundhouse.store.run import open_run
from roundhouse.tracking.sinks import Sinks

sinks = ["tensorboard", "wandb", "trackio"]
for name in sinks:
    sink_class(name)
keys = {"run_id": "shown", "store": "store", "infra": {"state": "state"}}
keys["tracking"] = {"sinks": sinks, "experiment": "contract"}
run = open_run(parse_config(keys))
for number in map(int, sys.argv[1:]):
    run.begin(run.checkpoint(number), policy_version=number).commit()
    run.begin(run.stage(number, "collect"), policy_version=number).commit(metrics={"reward/mean": number / 4})
    report_iteration(run, number)
opened = Sinks(run)
opened.update()
opened.close()
"""
READ = """
import json
from pathlib import Path
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

def records(data):
    # LevelDB's log: after 7 bytes, blocks of 32 KiB with pieces of checksum (4), length (2), type (1: whole, 2 to 4: parts)
    place, whole = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""

events = EventAccumulator("state/metrics/tensorboard/shown", size_guidance={"scalars": 0})
events.Reload()
seen = {"tensorboard": [(each.step, each.value) for each in events.Scalars("reward/mean")], "wandb": []}
for file in sorted(Path("state/metrics/wandb").glob("offline-run-*/*.wandb")):
    for record in records(file.read_bytes()):
        if record.WhichOneof("record_type") == "history":
            values = {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            seen["wandb"].append((record.history.step.num, json.loads(values["reward/mean"])))
seen["wandb"].sort()
print(json.dumps(seen))
"""


def test_every_iteration_is_in_each_sink_once_after_a_resume(foreign_python: Path, tmp_path: Path) -> None:
    site = next(foreign_python.parents[1].glob("lib/python*/site-packages"))

    def child(code: str, *words: str) -> str:
        variables = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": f"{ROOT}:{site}"}
        command = [sys.executable, "-c", code, *words]
        ended = subprocess.run(
            command,
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert "cannot be opened" not in ended.stderr, ended.stderr
        return ended.stdout

    child(WRITE, "0", "1")
    child(WRITE, "2", "3")
    seen = json.loads(child(READ).splitlines()[-1])
    right = [[number, number / 4] for number in range(4)]
    assert seen == {"tensorboard": right, "wandb": right}
    [database] = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, json_extract(metrics, '$.\"reward/mean\"') FROM metrics ORDER BY step")
        assert [list(row) for row in rows] == right
