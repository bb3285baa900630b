"""The names of `import roundhouse as rh`."""

from __future__ import annotations

import ast
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import roundhouse as rh

SOURCE = Path(rh.__file__)
ROOT = Path(__file__).parents[2]


def test_importing_the_package_imports_nothing_but_the_standard_library() -> None:
    show = "import sys; import roundhouse; print(*{name.partition('.')[0] for name in sys.modules})"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent.parent)}
    command = [sys.executable, "-S", "-c", show]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert set(done.stdout.split()) - sys.stdlib_module_names == {"roundhouse", "__main__"}
    own = subprocess.run(
        [*command[:-1], "import sys; import roundhouse; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert [name for name in own.stdout.split() if name.startswith("roundhouse")] == ["roundhouse"]


def test_each_name_is_there_and_known_to_type_checkers() -> None:
    (block,) = [node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.If)][:1]
    imports = [(node.module, alias) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    declared = {alias.asname: (module, alias.name) for module, alias in imports if alias.asname == alias.name}
    own = {ast.unparse(node) for node in block.body if isinstance(node, ast.Assign)}
    renamed = {name: place for name, place in rh._MODULES.items() if name != place[1]}
    assert declared | renamed == rh._MODULES
    assert own == {f"{name} = {source}" for name, (_, source) in renamed.items()}
    for name in rh._MODULES:
        assert getattr(rh, name) is getattr(sys.modules[rh._MODULES[name][0]], rh._MODULES[name][1])


def test_no_name_is_that_of_a_subpackage_which_would_replace_it() -> None:
    assert not {module.name for module in pkgutil.iter_modules(rh.__path__)} & {*rh._MODULES}


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'trian'.*It has: .*train"):
        rh.trian  # type: ignore[attr-defined]  # noqa: B018


def test_the_statements_of_the_page_are_those_that_the_type_checker_reads() -> None:
    page = (ROOT / "docs/python-api.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    _, _, statements = (ROOT / "tests/api/python_page.py").read_text().partition("\n\n")
    assert statements == "\n".join(blocks)
    assert "tests/api/python_page.py" in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
