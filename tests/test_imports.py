"""Classes named in a configuration."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from roundhouse import imports
from roundhouse.environments.base import Environment
from roundhouse.errors import ConfigError
from roundhouse.generation import vllm_engine
from roundhouse.imports import load_class
from roundhouse.infra.checks import machine
from roundhouse.pretrained import load_pretrained
from tests.broken_extensions import SOURCES, write_broken_extensions


def test_a_stored_configuration_names_a_class_by_its_old_module() -> None:
    found = load_class("roundhouse.gym.environments.calculator:Calculator", Environment, "environment.target")
    assert found.__module__ == "roundhouse.environments.calculator"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("roundhouse.gym.environment", "roundhouse.environments.base"),
        ("roundhouse.replays", "roundhouse.plugins.lab.replays"),
        ("roundhouse.config.simulation", "roundhouse.plugins.lab.simulation.scenario"),
    ],
)
def test_a_file_that_imports_an_old_module_is_refused_with_the_new_names(tmp_path: Path, old: str, new: str) -> None:
    file = tmp_path / "weather.py"
    file.write_text(f"from {old}.base import Environment\n")
    with pytest.raises(ConfigError, match=re.escape(f"{old} is {new}")):
        load_class(f"{file}:Weather", Environment, "environment.target")


VERSIONS = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.1", "torchcodec": "0.17.0"}


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Errors of broken extensions of torch in this process, which are hidden during the test."""
    write_broken_extensions(tmp_path / "packages")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    for name in SOURCES:
        monkeypatch.setitem(sys.modules, name, None)  # restores the present state afterwards
        del sys.modules[name]
    find = imports.broken_torch_extensions.__wrapped__
    errors = find()
    monkeypatch.setattr(imports.metadata, "version", VERSIONS.__getitem__)
    for module in (machine, vllm_engine):
        monkeypatch.setattr(module, "broken_torch_extensions", lambda: errors)
    return errors


def test_extensions_that_do_not_fit_torch_are_hidden_with_all_their_modules(broken: dict[str, str]) -> None:
    assert broken.keys() == SOURCES.keys()
    assert broken["torchvision"] == "RuntimeError: operator torchvision::nms does not exist"
    assert [importlib.util.find_spec(name) for name in broken] == [None] * 3
    with pytest.raises(ImportError):
        import torchvision.extension  # noqa: F401


def test_torchcodec_without_ffmpeg_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchcodec.py").write_text("raise RuntimeError('Could not load libtorchcodec')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(imports, "TORCH_EXTENSIONS", ("torchcodec",))
    assert imports.broken_torch_extensions.__wrapped__() == {}


def test_doctor_names_extensions_that_do_not_fit_torch(broken: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed = dict(VERSIONS)
    monkeypatch.setattr(machine, "installed", lambda: installed)
    (finding,) = machine.torch_extensions()
    assert finding.status == "warn"
    assert "torchvision 0.28.0 (RuntimeError: operator torchvision::nms does not exist)" in finding.detail
    assert "pip uninstall torchvision torchaudio torchcodec" in finding.remedy
    assert finding.remedy.endswith(
        "torchvision==0.28.0 torchaudio==2.11.1 torchcodec==0.17.0 --index-url https://download.pytorch.org/whl/cpu"
    )
    monkeypatch.setattr(machine, "broken_torch_extensions", dict)
    assert [each.status for each in machine.torch_extensions()] == ["ok"]
    for name in SOURCES:
        del installed[name]
    assert machine.torch_extensions() == []


def test_broken_extensions_are_hidden_from_the_processes_of_vllm_and_refused_for_a_composite_model(
    broken: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.of_the_user = 1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    vllm_engine.refuse_broken_extensions(str(tmp_path))
    child = "import sys; print(sys.of_the_user, [name for name, module in sys.modules.items() if module is None])"
    seen = subprocess.run([sys.executable, "-P", "-c", child], capture_output=True, text=True, check=True).stdout
    assert seen.strip() == f"1 {list(broken)}"
    (tmp_path / "config.json").write_text('{"text_config": {}}')
    with pytest.raises(ConfigError, match=r"torchvision: RuntimeError: operator.*pip uninstall torchvision"):
        vllm_engine.refuse_broken_extensions(str(tmp_path))


LOADER = """
def from_pretrained(*_, **__):
    try:
        import soundpack
    except OSError as error:
        raise ModuleNotFoundError("Could not import module 'LlamaConfig'.") from error
"""


def test_a_failed_import_of_transformers_names_the_file_that_caused_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "soundpack.py").write_text("raise OSError('libsound.so is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    auto = ModuleType("auto")
    exec(compile(LOADER, "/site-packages/transformers/auto.py", "exec"), vars(auto))
    with pytest.raises(ConfigError, match=r"OSError: libsound\.so is missing, raised in .*/soundpack\.py\."):
        load_pretrained(auto, tmp_path)
