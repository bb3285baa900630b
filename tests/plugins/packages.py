"""Packages of other people for tests: a folder on the search path with the metadata of an installed distribution."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

MAZE = '''
from typing import Literal

from roundhouse.config.environments import SplitEnvironment
from roundhouse.environments.base import Environment, Verdict, final_text, task_row
from roundhouse.errors import ConfigError
from roundhouse.plugins import Plugin


class MazeSection(SplitEnvironment):
    """Leave a maze."""

    kind: Literal["maze"]
    width: int = 3
    """Cells of a side."""


class Maze(Environment):
    name = "maze"

    def __init__(self, width, heldout_fraction):
        self.width = width

    def tasks(self, split):
        names = {"train": ("a", "b"), "heldout": ("c",)}[split]
        return [task_row(f"Leave maze {name} of width {self.width}.", task_id=name) for name in names]

    def verify(self, session, row, response):
        return float("north" in final_text(response))

    def demonstrations(self, split, count, good_fraction, seed):
        prompts = [row["responses_create_params"]["input"][0] for row in self.tasks(split)]
        return [[prompts[index % len(prompts)], {"role": "assistant", "content": "north"}] for index in range(count)]


def check(section):
    if section.width > 9:
        raise ConfigError(f"environment.width is {section.width}: mazes end at 9. Lower it.")


class LogSink:
    def __init__(self, run):
        self.lines = []

    def log_iteration(self, iteration, metrics):
        self.lines.append(iteration)


MAZE = Plugin(Maze, MazeSection, check)
LOG = Plugin(LogSink)
'''
"""An environment and a sink, each one class."""


def install(
    site: Path, package: str, entry_points: Mapping[str, str], modules: Mapping[str, str], version: str = "1.0"
) -> None:
    """Write a distribution as `pip install` leaves it: modules, and the metadata with its entry points."""
    info = site / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    lines = "".join(f"{name} = {target}\n" for name, target in entry_points.items())
    (info / "entry_points.txt").write_text(f"[roundhouse.plugins]\n{lines}")
    for name, source in modules.items():
        (site / f"{name}.py").write_text(textwrap.dedent(source))
