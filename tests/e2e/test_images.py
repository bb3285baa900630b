"""A policy that sees learns to count the shapes of an image, by the commands of docs/models.md."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]


def write_chat_rows(file: Path) -> None:
    """Write four conversations with an image."""
    rows = []
    for count in range(1, 5):
        data = io.BytesIO()
        Image.new("RGB", (28 * count, 28), "red").save(data, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "how many shapes ?"}]
        rows.append({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": str(count)}]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_a_policy_learns_from_images(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    program, variables = Path(sys.executable).with_name("roundhouse"), {**os.environ, "OMP_NUM_THREADS": "1"}
    settings = ["iterations=12", "evaluation.every=12", f"infra.state={tmp_path / 'state'}", "tracking.enabled=false"]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    policy = [sys.executable, "examples/count_shapes/policy.py", ".roundhouse/count-shapes"]
    train = [program, "train", "examples/count_shapes/run.yaml", *arguments]
    judge = [program, "rescore", "count-shapes", "--name", "again", "--iterations", "1"]
    offline = [program, "train-offline", "count-shapes", "--run-id", "offline", "--dataset"]
    write_chat_rows(tmp_path / "demos.jsonl")
    try:
        subprocess.run(policy, check=True, cwd=tmp_path, env=variables, timeout=200)
        subprocess.run(train, check=True, cwd=tmp_path, env=variables, timeout=800)
        subprocess.run(judge, check=True, cwd=tmp_path, env=variables, timeout=200)
        subprocess.run([*offline, "again"], check=True, cwd=tmp_path, env=variables, timeout=300)
        offline[offline.index("offline")] = "demos"
        subprocess.run(
            [*offline, "demos.jsonl", "--method", "sft"], check=True, cwd=tmp_path, env=variables, timeout=300
        )
    finally:
        subprocess.run([program, "down", "--state", tmp_path / "state"], check=False, timeout=120)
    for name, requested in (("offline", 256), ("demos", 4)):
        [summary] = tmp_path.glob(f"**/runs/{name}/summary.json")
        assert json.loads(summary.read_text())["ledger"]["completed"] == requested
    [run] = tmp_path.glob("**/runs/count-shapes")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["mismatch"]["max_abs_log_prob_difference"] < 1e-4
    assert summary["evaluation"]["after"]["reward_mean"] > summary["evaluation"]["before"]["reward_mean"] + 0.15
    files = list(run.glob("iterations/*/collect/rollouts-*.parquet"))
    assert len(files) >= 12
    for file in files:
        table = pq.read_table(file, columns=["messages", "images"])
        assert all(len(images) == 1 for images in table["images"].to_pylist())
        assert not any("base64" in messages for messages in table["messages"].to_pylist())
