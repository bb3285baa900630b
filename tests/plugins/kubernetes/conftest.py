"""Each test of Jobs runs before the fake API server, and before a real one with the real Job controller where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.kubernetes.control_plane import ControlPlane, assets, control_plane
from tests.plugins.kubernetes.stand import Stand, fake_stand, real_stand


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A real control plane."""
    found = assets()
    if found is None:
        pytest.skip("needs a real API server: set KUBEBUILDER_ASSETS to a directory with etcd and kube-apiserver")
    with control_plane(found, tmp_path_factory.mktemp("control-plane")) as running:
        yield running


@pytest.fixture(params=["fake", "real"])
def stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    if request.param == "fake":
        with fake_stand(tmp_path) as ready:
            yield ready
        return
    plane: ControlPlane = request.getfixturevalue("plane")
    if not plane.has_controllers:
        pytest.skip("needs the Job controller: put kube-controller-manager into KUBEBUILDER_ASSETS")
    with real_stand(plane) as ready:
        yield ready


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Stand]:
    """The fake API server, for tests that need a log or another feature of a real node."""
    with fake_stand(tmp_path) as ready:
        yield ready
