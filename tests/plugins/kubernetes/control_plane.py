"""A real control plane for tests: etcd, kube-apiserver and, where it is there, kube-controller-manager, on loopback.

`KUBEBUILDER_ASSETS` names the directory of the binaries, as for controller-runtime's envtest. Nothing here runs containers.
"""

from __future__ import annotations

import base64
import os
import shutil
import ssl
import subprocess
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.ports import free_ports, listens
from tests.waiting import until

TOKENS = {"admin": "admin-of-the-test", "flow": "flow-of-the-test"}


@dataclass
class ControlPlane:
    """A running one."""

    url: str
    directory: Path
    has_controllers: bool
    commands: dict[str, list[str]]
    processes: dict[str, subprocess.Popen[bytes]]

    def kubeconfig(self, url: str | None = None) -> Path:
        """A kubeconfig of its administrator, for the API server itself or a proxy before it."""
        server = url or self.url
        cluster = {"server": server}
        if server.startswith("https"):
            cluster["certificate-authority-data"] = base64.b64encode((self.directory / "tls.crt").read_bytes()).decode()
        tree = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": TOKENS["admin"]}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        file = self.directory / f"kubeconfig-{abs(hash(server))}"
        # renamed into place: kube-controller-manager once read it while a test wrote it again, and ended
        aside = file.with_suffix(f".{uuid.uuid4().hex}")
        aside.write_text(yaml.safe_dump(tree))
        aside.rename(file)
        return file

    def tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.directory / "tls.crt"))

    def stop(self, name: str) -> None:
        """Kill it as by a crash: an API server that is asked to end waits for its watches."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def start(self, name: str) -> None:
        log = (self.directory / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(self.commands[name], stdout=log, stderr=log)

    def wait_until_ready(self) -> None:
        told: dict[str, Any] = {"process": self.processes["kube-apiserver"], "evidence": lambda: _logs(self.directory)}
        until(lambda: "ok" in self._get("/readyz"), "kube-apiserver", **told)
        # what the first writes need
        until(lambda: "default" in self._get("/api/v1/namespaces/default"), "namespace default", **told)

    def _get(self, path: str) -> str:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {TOKENS['admin']}"})
        try:
            with urllib.request.urlopen(request, timeout=5, context=self.tls()) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""


@contextmanager
def control_plane(assets: Path, directory: Path) -> Iterator[ControlPlane]:
    """Start it from the binaries in `assets`, and end it."""
    _certificates(directory)
    etcd, peer, port, secure = free_ports(4)
    url = f"https://127.0.0.1:{port}"
    (directory / "tokens.csv").write_text(
        f'{TOKENS["admin"]},admin,admin,"system:masters"\n{TOKENS["flow"]},flow,flow,"flows"\n'
    )
    plane = ControlPlane(url, directory, (assets / "kube-controller-manager").exists(), {}, {})
    plane.commands["etcd"] = [
        _binary(assets, "etcd"),
        f"--data-dir={directory / 'etcd'}",
        f"--listen-client-urls=http://127.0.0.1:{etcd}",
        f"--advertise-client-urls=http://127.0.0.1:{etcd}",
        f"--listen-peer-urls=http://127.0.0.1:{peer}",
        f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
        f"--initial-cluster=default=http://127.0.0.1:{peer}",
    ]
    plane.commands["kube-apiserver"] = [
        str(assets / "kube-apiserver"),
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={port}",
        f"--etcd-servers=http://127.0.0.1:{etcd}",
        "--service-cluster-ip-range=10.212.0.0/24",
        "--authorization-mode=RBAC",
        f"--token-auth-file={directory / 'tokens.csv'}",
        f"--tls-cert-file={directory / 'tls.crt'}",
        f"--tls-private-key-file={directory / 'tls.key'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={directory / 'tls.key'}",
        f"--service-account-signing-key-file={directory / 'tls.key'}",
        "--disable-admission-plugins=ServiceAccount",
        "--endpoint-reconciler-type=none",
    ]
    try:
        plane.start("etcd")
        until(lambda: listens(etcd), "etcd", process=plane.processes["etcd"], evidence=lambda: _logs(directory))
        plane.start("kube-apiserver")
        plane.wait_until_ready()
        if plane.has_controllers:
            plane.commands["kube-controller-manager"] = [
                str(assets / "kube-controller-manager"),
                f"--kubeconfig={plane.kubeconfig()}",
                f"--authentication-kubeconfig={plane.kubeconfig()}",
                f"--authorization-kubeconfig={plane.kubeconfig()}",
                "--bind-address=127.0.0.1",
                f"--secure-port={secure}",
                "--leader-elect=false",
                f"--service-account-private-key-file={directory / 'tls.key'}",
                "--controllers=job-controller,garbage-collector-controller,namespace-controller,ttl-after-finished-controller,"
                "serviceaccount-controller,resourcequota-controller",
            ]
            plane.start("kube-controller-manager")
        yield plane
    finally:
        for name in reversed(list(plane.processes)):
            plane.stop(name)


def _certificates(directory: Path) -> None:
    """One self-signed certificate for the server, which also signs service account tokens."""
    command = [
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
        *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", "tls.key", "-out", "tls.crt"),
    ]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)


def _binary(assets: Path, name: str) -> str:
    beside = assets / name
    return str(beside) if beside.exists() else shutil.which(name) or name


def _logs(directory: Path) -> str:
    return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in directory.glob("*.log"))


def assets() -> Path | None:
    """Return the directory of the binaries."""
    named = os.environ.get("KUBEBUILDER_ASSETS")
    return Path(named) if named and (Path(named) / "kube-apiserver").exists() else None
