"""A PostgreSQL for tests, where one is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.waiting import until

Object = dict[str, Any]


def postgres_binaries() -> Path | None:
    found = shutil.which("initdb")
    places = [Path(found).resolve().parent] if found else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((place for place in places if (place / "postgres").exists() and (place / "psql").exists()), None)


@contextmanager
def database(directory: Path, passwords: dict[str, str], script: Path) -> Iterator[int]:
    """A PostgreSQL on which a shell script was run with these variables (POSTGRES_PASSWORD among them); its port."""
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("needs PostgreSQL: apt-get install postgresql")
    user: Object = {}
    if os.getuid() == 0:  # which PostgreSQL refuses to run as
        user = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        shutil.chown(directory, "nobody")
    port, data = free_port(), directory / "data"
    environment = os.environ | passwords | {"PATH": f"{binaries}:{os.environ['PATH']}", "HOME": str(directory)}
    run: Object = {"env": environment, "check": True, "cwd": directory, **user}
    (directory / "password").write_text(passwords["POSTGRES_PASSWORD"])
    initdb = [
        binaries / "initdb",
        "-D",
        data,
        "-U",
        "postgres",
        "--auth=scram-sha-256",
        f"--pwfile={directory / 'password'}",
    ]
    subprocess.run(initdb, stdout=subprocess.DEVNULL, **run)
    server = subprocess.Popen(
        [binaries / "postgres", "-D", data, "-k", directory, "-h", "127.0.0.1", "-p", str(port)],
        **{key: value for key, value in run.items() if key != "check"},
        stderr=subprocess.DEVNULL,
    )
    try:
        environment |= {"PGHOST": "127.0.0.1", "PGPORT": str(port), "PGPASSWORD": passwords["POSTGRES_PASSWORD"]}
        until(lambda: subprocess.run([binaries / "pg_isready", "-q"], env=environment).returncode == 0, "PostgreSQL")
        subprocess.run(["sh", script], stdout=subprocess.DEVNULL, **{**run, "env": environment})
        yield port
    finally:
        server.send_signal(2)  # a fast stop, as the manifest's preStop
        server.wait(60)


def tables(port: int, database: str, user: str, password: str) -> set[str]:
    done = subprocess.run(
        ["psql", "-h", "127.0.0.1", "-p", str(port), "-U", user, "-At", "-c", "select tablename from pg_tables", database],
        env=os.environ | {"PGPASSWORD": password, "PATH": f"{postgres_binaries()}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(done.stdout.split())
