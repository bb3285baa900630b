"""The environments of foreign packages, by the marker of a test: `pytest.mark.contract("nemo-gym-0.7.0")`."""

import importlib.util
import sys
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "contract_environments", Path(__file__).parents[2] / "tools" / "contract_environments.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
environments = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = environments
_SPEC.loader.exec_module(environments)


@pytest.fixture(autouse=True)
def foreign_python(request: pytest.FixtureRequest) -> Path:
    """Return the interpreter of the first package that the marker names. Skip the test, by name, if a package is missing."""
    marker = request.node.get_closest_marker("contract")
    assert marker is not None, "a contract test names its packages: pytest.mark.contract('<name>')"
    packages = environments.read_packages(environments.PACKAGES.read_text())
    for name in marker.args:
        if not packages[name].is_installed():
            pytest.skip(f"{name} is not installed (make contracts CONTRACTS={name}; {packages[name].log})")
    return packages[marker.args[0]].interpreter
