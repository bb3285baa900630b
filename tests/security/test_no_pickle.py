"""No pickle: our code neither writes nor reads any, and no data from a store runs code."""

from __future__ import annotations

import ast
import io
import pickletools
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roundhouse.config.loading import parse_config
from roundhouse.policy.model_directory import check_model_directory
from roundhouse.store.run import open_run
from roundhouse.store.stage import read_table

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for part in ("roundhouse", "flows", "tasks") for path in (ROOT / part).rglob("*.py"))

MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
CALLS = {
    "torch.load": "weights_only",
    "torch.save": None,
    "np.save": None,
    "np.load": "allow_pickle",
    "numpy.load": "allow_pickle",
    "pd.read_pickle": None,
    "yaml.load": None,
    "yaml.unsafe_load": None,
    "yaml.full_load": None,
    **{
        f"Auto{kind}.{load}": "trust_remote_code"
        for kind in ("Config", "Tokenizer", "Processor", "Model", "ModelForCausalLM")
        for load in ("from_pretrained", "from_config")
    },
}
"""What may run or write foreign code, and the argument that settles it (True for weights_only, else False)."""


def faults(source: str) -> list[str]:
    """Uses of pickle in a source."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in CALLS:
            settled = {word.arg: ast.unparse(word.value) for word in node.keywords}
            wanted = CALLS[name]
            safe = {"allow_pickle": "False", "weights_only": "True", "trust_remote_code": "False"}
            if wanted is None or settled.get(wanted) != safe[wanted]:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_dangerous_deserialization"):
            found += [ast.unparse(node)] if ast.unparse(node.value) != "False" else []
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append(ast.unparse(node))
    return found


def test_nothing_of_ours_uses_pickle() -> None:
    assert len(SOURCES) > 150
    assert {str(path): found for path in SOURCES if (found := faults(path.read_text()))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "import os, marshal",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "np.load(x, allow_pickle=True)",
        "yaml.load(x)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "AutoTokenizer.from_pretrained(x)",
        "AutoModelForCausalLM.from_config(x)",
        "def f():\n  from cloudpickle import loads",
    ],
)
def test_the_search_finds(source: str) -> None:
    assert faults(source)


def test_the_search_leaves_what_is_safe() -> None:
    assert faults("torch.load(x, weights_only=True)\nnp.load(x, allow_pickle=False)\nyaml.safe_load(x)") == []


def pickles(directory: Path) -> list[str]:
    """Files below that are pickles, or archives as torch writes them."""
    found = []
    for file in (path for path in directory.rglob("*") if path.is_file()):
        data = file.read_bytes()
        if data[:4] == b"PK\x03\x04" and b"data.pkl" in data:
            found.append(str(file))
        elif data[:1] == b"\x80" and data[1:2] in b"\x02\x03\x04\x05":
            try:
                list(pickletools.genops(data))
                found.append(str(file))
            except Exception:  # noqa: BLE001 (any failure of the parser means: no pickle)
                continue
    return found


def test_the_search_for_files_finds_a_pickle_and_what_torch_saves(tmp_path: Path) -> None:
    import pickle

    import torch

    (tmp_path / "a.bin").write_bytes(pickle.dumps({"a": 1}))
    torch.save({"a": torch.zeros(2)}, tmp_path / "b.pt")
    (tmp_path / "c.json").write_text("{}")
    assert sorted(Path(path).name for path in pickles(tmp_path)) == ["a.bin", "b.pt"]


def test_a_parquet_file_cannot_bring_code(tmp_path: Path) -> None:
    """Old pyarrow unpickled extension types of this name; a store's file must not."""
    ran = tmp_path / "ran"
    field = pa.field(
        "id",
        pa.int64(),
        metadata={
            "ARROW:extension:name": "arrow.py_extension_type",
            "ARROW:extension:metadata": f"cos\nsystem\n(S'touch {ran}'\ntR.",
        },
    )
    sink = io.BytesIO()
    pq.write_table(pa.table({"id": [1]}, schema=pa.schema([field])), sink)
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path / "store")}))
    attempt = run.begin(run.stage(1, "collect"), policy_version=0)
    attempt.write_bytes("rollouts-a0001-00000.parquet", sink.getvalue(), 1)
    assert read_table(attempt.commit(), "rollouts").num_rows == 1
    assert not ran.exists()


def test_a_model_directory_with_pickled_weights_is_refused(tmp_path: Path) -> None:
    from roundhouse.errors import ConfigError

    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(ConfigError, match="safetensors"):
        check_model_directory(tmp_path)
