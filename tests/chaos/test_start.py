"""What a start imports before its first useful act is most of what a restart costs."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
from prefect import Flow
from prefect.exceptions import ParameterTypeError

import roundhouse_flows._prefect.tuning  # noqa: F401 - before all else of Prefect
from roundhouse.config.loading import load_config
from roundhouse.imports import gc_paused, hide_packages
from roundhouse_flows.iteration import iteration
from roundhouse_flows.on_demand import collect, evaluate
from roundhouse_flows.train import train, train_offline
from tests.broken_extensions import write_broken_extensions

pytestmark = pytest.mark.real

_TOLD = "import sys, json; print(json.dumps([name for name in %r if name in sys.modules]))"
HEAVY = ("torch", "transformers", "mlflow", "pandas", "sklearn", "ray", "vllm", "scipy")


def imported_by(code: str) -> list[str]:
    """Heavy packages that are there after the code ran in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{_TOLD % (HEAVY,)}"], capture_output=True, text=True, timeout=300, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_the_train_flow_imports_none_of_the_heavy_libraries_before_a_stage_needs_them() -> None:
    assert imported_by("import roundhouse.cli, roundhouse_flows._prefect.tuning, roundhouse_flows.train") == []
    assert imported_by("import roundhouse_flows._prefect.tuning, roundhouse_flows.train, pandas") == ["pandas"]


MODEL = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
STARTS = {
    "trainer": "import roundhouse.training.trainer",
    "engine": """
import roundhouse.generation.standalone
from roundhouse.config.generation import GenerationConfig
from roundhouse.generation.transformers_engine import build_model
build_model(".", GenerationConfig(backend="transformers"))
""",
}
BY_NAME = """
from importlib.metadata import packages_distributions
from transformers.utils.import_utils import PACKAGE_DISTRIBUTION_MAPPING as known
assert known.get("torch") == ["torch"] and known.read is not None
assert known.get("yaml") == packages_distributions()["yaml"] and known.read is None
"""
"""What is installed is read when a package is asked for whose distribution is named otherwise."""
UNUSED = """
assert not {'sklearn', 'scipy', 'accelerate', 'pandas'} & set(sys.modules)
assert [sys.modules.get(name, 1) for name in ('torchvision', 'torchaudio', 'torchcodec')] == [None] * 3
"""


@pytest.mark.parametrize("process", STARTS)
def test_a_trainer_and_an_engine_start_without_packages_that_are_unused_or_broken(
    process: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    write_broken_extensions(tmp_path)
    there = "from transformers.utils import is_sklearn_available; assert is_sklearn_available()"
    told = imported_by("\n".join(["import sys", STARTS[process], UNUSED, there, BY_NAME, "import sklearn.metrics"]))
    assert {"transformers", "sklearn", "scipy"} <= set(told)


def test_spared_packages_are_importable_again_and_those_there_already_stay() -> None:
    import json as present

    with hide_packages("json", "wave"):
        assert sys.modules["json"] is present
        try:
            import wave
        except ImportError:
            hidden = True
        else:
            hidden = False
    assert hidden
    import wave  # noqa: F401


def test_what_a_block_has_made_is_no_longer_searched_for_garbage_and_collection_goes_on_behind_it() -> None:
    frozen = gc.get_freeze_count()
    with gc_paused():
        assert not gc.isenabled()
        made = [[number] for number in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(made)


@pytest.mark.parametrize("flow", [train, train_offline, iteration, evaluate, collect], ids=lambda flow: flow.name)
def test_a_flow_takes_a_whole_configuration_without_a_form_and_still_checks_it(flow: Flow[..., object]) -> None:
    assert flow.parameters.definitions == {}
    config = load_config("configs/quickstart.yaml", [])
    others = {"k": 1} if "k" in flow.parameters.properties else {}
    stored = json.loads(config.model_dump_json())  # as Prefect hands it back at a retry
    assert flow.validate_parameters({"config": stored, **others})["config"] == config
    with pytest.raises(ParameterTypeError, match=r"config\.iterations"):
        flow.validate_parameters({"config": {**stored, "iterations": -3}, **others})
