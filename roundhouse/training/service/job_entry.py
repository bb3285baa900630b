"""Entry of a child process that does one piece of work for its parent: it reads a spec and reports an error.

Invariant: the parent raises the process's error as the same kind, from `error.json` if the process could still write
it, else from its exit code. The module imports nothing heavy, because the waiting parent imports it too.

    0     done
    65    a data error, and 78 a configuration error: repeating does not help
    74    a store error, and 75 an error of machines or networks
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from roundhouse.errors import (
    EXIT_CODES,
    KILLED_FOR_MEMORY,
    ConfigError,
    InfraError,
    ProcessKilled,
    RoundhouseError,
    StoreError,
)
from roundhouse.store.location import Location, NotFound

SPEC, REPORT, ERROR = "spec.json", "report.json", "error.json"
ADDRESS_VARIABLE = "ROUNDHOUSE_ADDRESS"
"""Address of a program's machine for other machines, if its launcher starts programs elsewhere."""
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""`torchrun` starts its ranks by `-m` without `-P`: a module of the working directory would hide a standard one."""
RANKS_MEET_BY_FILE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""`torchrun` opens no port, which by itself it does on every interface; the ranks' own store is `parallel.join`'s."""

Spec = TypeVar("Spec", bound=BaseModel)


def torchrun(ranks: int, meeting: str) -> list[str]:
    """Return the interpreter's arguments that start the ranks of a single machine; set `RANKS_MEET_BY_FILE` in the
    environment.

    Args:
        meeting: path of a file that does not exist yet.
    """
    by_file = ["--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-conf", "store_type=file"]
    here = ["--rdzv-id", "program", "--nnodes", "1", "--nproc-per-node", str(ranks), "--local-addr", "127.0.0.1"]
    return ["-m", "torch.distributed.run", *by_file, *here]


def torchrun_of_machine(machine: int | str, machines: int, ranks: int, address: str, port: int) -> list[str]:
    """Return the interpreter's arguments that start the ranks of one of several machines.

    Args:
        machine: number of the machine; ranks are counted from those of machine 0.
        ranks: number of ranks on each machine.
        address: address of machine 0, the meeting point.
    """
    return [
        *("-m", "torch.distributed.run"),
        *("--nnodes", str(machines), "--node-rank", str(machine), "--nproc-per-node", str(ranks)),
        *("--master-addr", address, "--master-port", str(port)),
    ]


def read_spec(kind: type[Spec], path: str, what: str) -> Spec:
    """Read the spec in a file, or at a URI of the store.

    Raises:
        ConfigError: the spec is missing or malformed; `what` names its subject.
    """
    directory, _, name = path.rpartition("/")
    try:
        data = Location(directory).read(name) if "://" in path else Path(path).read_bytes()
        return kind.model_validate_json(data)
    except (OSError, NotFound, ValidationError) as error:
        raise ConfigError(f"--spec {path} is not a {what}: {error}") from error


def tell_error(place: str | None, error: RoundhouseError) -> None:
    """Write the error for the parent process into the directory at this URI, and to stderr."""
    sys.stderr.write(f"{error}\n")
    if place is None:
        return
    record = {"kind": _kind(error).__name__, "message": str(error)}
    try:
        # of several ranks the first to fail is the cause: the others lost their peer
        Location(place).create(ERROR, json.dumps(record).encode())
    except StoreError as unwritten:
        sys.stderr.write(f"{unwritten}\n")


def read_error(location: Location) -> RoundhouseError | None:
    """Return the error that a process left, in its original kind; None if it left none."""
    try:
        record = json.loads(location.read(ERROR))
    except (NotFound, ValueError):
        return None
    kinds = {kind.__name__: kind for kind in EXIT_CODES}
    return kinds.get(record.get("kind"), InfraError)(str(record.get("message")))


def kind_of(code: int) -> type[RoundhouseError]:
    """Return the kind of a process's error by its exit code."""
    return next((kind for kind, known in EXIT_CODES.items() if known == code), InfraError)


def exit_code(error: RoundhouseError) -> int:
    return EXIT_CODES[_kind(error)]


def error_of(code: int, what: str, said: str) -> RoundhouseError:
    """Return the error of a process that left none. `what` names the process; `said` is the end of its log."""
    log = f"Last output: {said}"
    if code < 0:
        memory = f" {KILLED_FOR_MEMORY}" if code == -signal.SIGKILL else ""
        return ProcessKilled(f"{what} was killed by signal {-code}.{memory} {log}")
    return kind_of(code)(f"{what} ended with exit code {code}. {log}")


def _kind(error: RoundhouseError) -> type[RoundhouseError]:
    return next((kind for kind in EXIT_CODES if isinstance(error, kind)), InfraError)
