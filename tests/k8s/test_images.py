"""The images' instructions, read without an engine: the copied files exist, the users are right, and manifests name the
images.

No image is built here. `images/install.sh` and `images/smoke.sh`, which do the work of the build, run anywhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.k8s.validation import pod_specs, written
from tools import set_images

ROOT = Path(__file__).parents[2]
TARGETS = ("gym", "flow", "trainer", "engine")

Stage = list[tuple[str, str]]


def stages() -> dict[str, tuple[str, Stage]]:
    """Each stage's parent and its instructions."""
    text = re.sub(r"\\\n", " ", "\n".join(
        line for line in (ROOT / "images/Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")
    ))  # fmt: skip
    found: dict[str, tuple[str, Stage]] = {}
    name = ""
    for line in filter(str.strip, text.splitlines()):
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            parent, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()  # type: ignore[union-attr]
            found[name] = (parent, [])
        elif name:
            found[name][1].append((word, rest.strip()))
        else:
            found.setdefault("", ("", []))[1].append((word, rest.strip()))
    return found


def lineage(target: str) -> Stage:
    """A stage's instructions after those of the stages that it is from."""
    parent, own = stages()[target]
    return [*(lineage(parent) if parent in stages() else []), *own]


def test_the_base_is_one_pinned_image() -> None:
    arguments = dict(rest.split("=", 1) for word, rest in stages()[""][1] if word == "ARG")
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", arguments["PYTHON_IMAGE"])
    assert {parent for parent, _ in stages().values()} - set(stages()) <= {"${PYTHON_IMAGE}"}


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_ends_as_the_user_that_pods_run_as_and_says_what_it_is(target: str) -> None:
    user = pytest.importorskip("roundhouse.plugins.kubernetes.stage_pod").USER
    instructions = lineage(target)
    assert [rest for word, rest in instructions if word == "USER"][-1] == f"{user}:{user}"
    assert instructions[-1][0] == "CMD"
    labels = " ".join(rest for word, rest in instructions if word == "LABEL")
    assert all(f"org.opencontainers.image.{key}=" in labels for key in ("title", "version", "revision", "source"))
    assert all(word != "ADD" for word, _ in instructions)
    assert not any("pip" in rest for word, rest in instructions if word == "RUN"), "packages come from their own stages"


def test_what_is_copied_is_there_and_let_in() -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert ignored[0] == "*", "everything is left out first"
    let_in = {line[1:] for line in ignored if line.startswith("!")}
    known = set(stages())
    for _, instructions in stages().values():
        for word, rest in instructions:
            if word != "COPY":
                continue
            if (match := re.match(r"--from=(\S+)", rest)) is not None:
                assert match[1] in known
                continue
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists()
                assert source in let_in


def test_every_role_is_installed_from_the_lock_alone() -> None:
    lines = (ROOT / "images/install.sh").read_text().splitlines()
    installs = [line for line in lines if re.match(r"\s*\$pip ", line)]
    hashed = [line for line in installs if "--no-deps --require-hashes -r" in line]
    assert len(hashed) == 2
    [looked_up] = set(installs) - set(hashed)
    assert "--dry-run" in looked_up
    for target in TARGETS:
        instructions = stages()[f"{target}-packages"][1]
        assert ("ARG", "DEVICE=cpu") in instructions, "not every builder hands it down"
        run = [rest for word, rest in instructions if word == "RUN"]
        assert run == [f'./install.sh {target} "$DEVICE" /opt/roundhouse']


@pytest.mark.parametrize("arguments", [["nobody", "cpu", "x"], ["gym", "tpu", "x"]])
def test_an_unknown_role_or_device_is_refused_with_the_known_ones(arguments: list[str]) -> None:
    done = subprocess.run(
        ["sh", str(ROOT / "images/install.sh"), *arguments], capture_output=True, text=True, timeout=10
    )
    assert done.returncode == 2
    assert "there are" in done.stderr


def test_a_builder_whose_client_is_here_and_does_not_work_is_passed_over(tmp_path: Path) -> None:
    """Docker's client without a daemon, as on many clusters' jump hosts; buildah works."""
    called = tmp_path / "called"
    for name, code in (("docker", 1), ("podman", 1), ("buildah", 0)):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $1" >>{called}\nexit {code}\n')
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / "images/build.sh", "cpu", "gym"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls = called.read_text().splitlines()
    assert calls[:4] == ["docker info", "podman info", "buildah info", "buildah info"]
    assert "buildah build" in calls
    (tmp_path / "buildah").write_text("#!/bin/sh\nexit 1\n")
    done = subprocess.run([ROOT / "images/build.sh", "cpu", "gym"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "none of docker, podman and buildah works here" in done.stderr


@pytest.mark.real
def test_the_gym_image_starts_here_too() -> None:
    """The smoke command, on this machine's environment."""
    smoke = ["sh", str(ROOT / "images/smoke.sh"), "gym", sys.executable]
    done = subprocess.run(smoke, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout == "gym: ok\n", done.stderr


def test_manifests_name_images_that_are_built() -> None:
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]  # type: ignore[index]
    built = {f"roundhouse/{role}:{version}" for role in ("gym", "flow")}
    built |= {f"roundhouse/{role}:{version}-{device}" for role in ("trainer", "engine") for device in ("cpu", "cuda")}
    named = {
        container["image"]
        for _, item in written()
        for _, spec in pod_specs(item)
        for container in spec["containers"]
        if "image" in container
    }
    assert {image for image in named if image.startswith("roundhouse/")} <= built
    images = yaml.safe_load((ROOT / "k8s/images.yaml").read_text())
    others = {images[key] for key in ("prefect", "prefect-worker", "mlflow", "postgres")}
    assert named - built == others, "upstream's own, of the versions that `test_services.py` compares with the lock"


def test_each_image_is_named_in_one_file_that_writes_all_other_places() -> None:
    images = yaml.safe_load((ROOT / "k8s/images.yaml").read_text())
    for path in set_images.files(ROOT):
        text = path.read_text()
        assert set_images.with_images(text, images) == text, f"{path}: python -m tools.set_images"
        if path.parent.name == "charts":
            continue  # the upstream charts have names and tags of their own
        for line in text.splitlines():
            named = re.search(
                r"(?:^|[\s{,])image: +([^\s#{}]+)|\b(?:roundhouse|prefecthq)/[a-z]+:[\w.-]+",
                re.split(r"(?:^|\s)#", line)[0],
            )
            if named and not named[0].endswith('"'):  # a template's variable
                assert set_images.MARKED.match(line), f"{path}: {line.strip()} is not of k8s/images.yaml"
    assert {key for path in set_images.files(ROOT) for key, _ in set_images.marked(path.read_text())} == set(images)


def test_another_registry_reaches_config_maps_presets_the_base_job_template_and_prefect_yaml(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    shutil.copy(ROOT / "prefect.yaml", tmp_path)
    command = [sys.executable, "-m", "tools.set_images", "--root", str(tmp_path)]
    subprocess.run([*command, "--registry", "registry.example.org/team", "--version", "0.2.0"], check=True, cwd=ROOT)
    ours = "registry.example.org/team/roundhouse"
    run = yaml.safe_load((tmp_path / "k8s/overlays/gpu/run.yaml").read_text())["data"]["run.yaml"]
    assert yaml.safe_load(run)["infra"]["trainer"]["image"] == f"{ours}/trainer:0.2.0-cuda"
    preset = yaml.safe_load((tmp_path / "k8s/components/work-pool/presets/production.yaml").read_text())
    assert preset["infra"]["trainer"]["image"] == f"{ours}/trainer:0.2.0-cuda"
    template = yaml.safe_load((tmp_path / "k8s/components/work-pool/base-job-template.yaml").read_text())
    assert template["variables"]["properties"]["image"]["default"] == f"{ours}/flow:0.2.0"
    deployments = yaml.safe_load((tmp_path / "prefect.yaml").read_text())
    assert deployments["definitions"]["work_pool"]["job_variables"]["image"] == f"{ours}/flow:0.2.0"
    left = [
        path for path in (tmp_path / "k8s").rglob("*.yaml") if re.search(r"[ :]roundhouse/[a-z]+:", path.read_text())
    ]
    assert left == []
    assert subprocess.run([*command, "--check"], cwd=ROOT).returncode == 0, "twice is once"
    subprocess.run([*command, "--registry", "other.example.org"], check=True, cwd=ROOT)
    images = yaml.safe_load((tmp_path / "k8s/images.yaml").read_text())
    assert images["engine-cpu"] == "other.example.org/roundhouse/engine:0.2.0-cpu"
    assert images["postgres"].startswith("postgres:"), "not ours"
