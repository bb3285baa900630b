"""Sandboxes that run: a local one, and one in a container if Docker or Podman works; its image is this machine's busybox."""

import io
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from roundhouse.config.sandboxes import SandboxLimits
from roundhouse.environments.sandbox import SandboxUnavailable
from roundhouse.environments.sandboxes import Sandbox, new_sandbox
from tests.gym.environments.playing import IMAGE, SANDBOXES

BUSYBOX = shutil.which("busybox")


@pytest.fixture(scope="session")
def program() -> Iterator[str]:
    """The container program, after it has imported the image."""
    find_program = pytest.importorskip("roundhouse.plugins.container_sandbox.sandbox").find_program
    try:
        name = find_program(None)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    if BUSYBOX is None or b"dynamic" in subprocess.run(["ldd", BUSYBOX], capture_output=True).stdout:
        pytest.skip("the image needs a static busybox on this machine")
    imported = subprocess.run([name, "import", "-", IMAGE], input=image_of(Path(BUSYBOX)), capture_output=True)
    assert imported.returncode == 0, imported.stderr.decode()
    if (run := subprocess.run([name, "run", "--rm", IMAGE, "true"], capture_output=True)).returncode:
        pytest.skip(f"{name} runs no container here: {run.stderr.decode()}")
    yield name
    subprocess.run([name, "rmi", "--force", IMAGE], capture_output=True)


def image_of(busybox: Path) -> bytes:
    """Return a root file system with busybox and its programs, as a tar archive."""
    archive = io.BytesIO()
    programs = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(busybox.resolve(), "bin/busybox")
        for name in {*programs} - {"busybox"}:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    return archive.getvalue()


@pytest.fixture(params=SANDBOXES)
def config(request: pytest.FixtureRequest) -> SandboxLimits:
    """Return the section of a sandbox, of each kind in turn; parametrise the fixture to choose one kind."""
    if request.param == "container":
        request.getfixturevalue("program")
    return SANDBOXES[request.param]


@pytest.fixture
async def sandbox(config: SandboxLimits) -> AsyncIterator[Sandbox]:
    started = new_sandbox(config)
    await started.start()
    yield started
    await started.close()
