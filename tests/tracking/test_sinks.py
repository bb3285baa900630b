"""Sinks of metrics that come with Roundhouse."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roundhouse import plugins
from roundhouse.errors import ConfigError
from roundhouse.stages.report import sink_class
from roundhouse.tracking.sinks import RememberingSink


class Kept(RememberingSink):
    package = "pytest"

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.written: list[int] = []

    def write(self, iteration: int, metrics: Any) -> None:
        if metrics.get("fails"):
            raise OSError("no such host")
        self.written.append(iteration)


def opened(directory: Path, uid: str) -> Kept:
    config = SimpleNamespace(infra=SimpleNamespace(state=str(directory)))
    return Kept(SimpleNamespace(uid=uid, first_version=0, config=config))


def test_a_resumed_run_writes_to_a_sink_what_it_lacks_alone(tmp_path: Path) -> None:
    first = opened(tmp_path, "a")
    for iteration in (0, 1):
        first.log_iteration(iteration, {})
    with pytest.raises(OSError, match="no such host"):
        first.log_iteration(2, {"fails": 1.0})
    resumed, other = opened(tmp_path, "a"), opened(tmp_path, "another run of this id")
    for iteration in range(4):
        resumed.log_iteration(iteration, {})
        other.log_iteration(iteration, {})
    assert (first.written, resumed.written, other.written) == ([0, 1], [2, 3], [0, 1, 2, 3])


@pytest.mark.parametrize("name", [name for name in plugins.names("sink") if plugins.find("sink", name).extra])
def test_a_sink_without_its_package_is_refused_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sink: Any = plugins.factory("sink", name)
    monkeypatch.setattr(sink, "package", "nowhere_installed")
    with pytest.raises(ConfigError, match=rf"'{name}', which needs the package .*pip install 'roundhouse\[{name}\]'"):
        sink_class(name)
