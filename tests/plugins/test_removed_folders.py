"""The core works without any of the folders of plug-ins."""

from __future__ import annotations

import pkgutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from roundhouse import plugins
from roundhouse.cli import app
from roundhouse.config.loading import parse_config
from roundhouse.config.reference import page
from roundhouse.errors import ConfigError

FOLDERS = [module.name for module in pkgutil.iter_modules(plugins.__path__) if module.ispkg]
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


class Removed:
    """Hides a folder from the import system."""

    def __init__(self, name: str) -> None:
        self.name = f"roundhouse.plugins.{name}"

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if f"{name}.".startswith(f"{self.name}."):
            raise ModuleNotFoundError(f"{name} was removed")


@pytest.mark.parametrize("name", FOLDERS)
def test_without_a_folder_commands_and_configuration_work_and_its_kinds_are_unknown(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [package, *_] = plugins.__path__
    for folder in FOLDERS:
        if folder != name:
            (tmp_path / folder).symlink_to(Path(package) / folder)
    declared = sys.modules[f"roundhouse.plugins.{name}"].PLUGINS
    for module in [each for each in sys.modules if each.startswith(f"roundhouse.plugins.{name}")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(plugins, "__path__", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [Removed(name), *sys.meta_path])
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0
    shown = CliRunner().invoke(app, ["train", str(QUICKSTART), "--dry-run", "--set", f"store={tmp_path}/store"])
    assert shown.exit_code == 0, shown.output
    reference = page()
    for key in declared:
        role, _, kind = key.partition(".")
        assert f" {role.rpartition('_')[2]} ({kind})" not in reference
        assert kind not in plugins.names(role)
        with pytest.raises(ConfigError, match=f"unknown {role} '{kind}'"):
            plugins.factory(role, kind)
        if role == "command":
            assert CliRunner().invoke(app, [*kind.split(), "--help"]).exit_code == 2
        if role == "environment":
            with pytest.raises(ConfigError, match=f"'{kind}' is unknown"):
                parse_config({"run_id": "r", "environment": {"kind": kind}})
        if role == "weight_transport":
            with pytest.raises(ConfigError, match=f"unknown transport {kind}. Available: store, "):
                parse_config({"run_id": "r", "generation": {"weight_sync": kind}})
