"""Train from Python: the command line's training in a child process.

Invariant: the caller's process stays as it is. A notebook keeps its event loop, signal handlers, environment variables and
memory, and several runs may train at once. The child ends with the caller, and an interrupt ends it as Ctrl-C ends
`roundhouse train`: the same call resumes.

    caller ── resolved configuration (a file) ──> python -m roundhouse.cli.from_python
           <── events, one JSON object a line ──  (a pipe)
           <── plain lines ─────────────────────  (unless the caller's stdout is a terminal, which the child gets itself)
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import IO, TYPE_CHECKING, Any

from roundhouse.api.progress import progress_display
from roundhouse.api.runs import RunHandle
from roundhouse.api.values import override_texts
from roundhouse.config.loading import load_config, load_tree
from roundhouse.config.models import RunConfig
from roundhouse.errors import EXIT_CODES, NOT_PERMITTED, BudgetReached, ConfigError, RoundhouseError
from roundhouse.store.run import load_run

if TYPE_CHECKING:
    from collections.abc import Iterator

ERRORS = {code: kind for kind, code in EXIT_CODES.items()} | {NOT_PERMITTED: BudgetReached}


def train(
    config: str | os.PathLike[str] | Mapping[str, Any] | RunConfig | RunHandle,
    iterations: Any = None,  # not int: a type checker gives the values of **{"a.b": 0.5} to each parameter that is left
    **overrides: Any,
) -> RunHandle:
    """Train a run to its end, or continue it, and show its progress.

    Args:
        config: a configuration file, the same as a mapping, a `RunConfig`, or a run of the store to continue.
        iterations: number of the whole run; those of the configuration without it.
        overrides: other keys, such as `run_id="mine"` or `**{"train.optimizer.learning_rate": 1e-4}`.

    Returns:
        The run, finished.

    Raises:
        ConfigError: the configuration cannot work.
        RoundhouseError: as the command line reports it; the same call resumes after the last complete stage.
        KeyboardInterrupt: the run was interrupted; the same call resumes.
    """
    texts = override_texts(({} if iterations is None else {"iterations": iterations}) | overrides)
    resolved = _resolved(config, texts)
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(resolved.model_dump(mode="json"), file)
        file.flush()
        _run_child(file.name, resolved)
    return RunHandle(load_run(resolved.store, resolved.run_id), resolved.store)


def _resolved(
    config: str | os.PathLike[str] | Mapping[str, Any] | RunConfig | RunHandle, texts: list[str]
) -> RunConfig:
    if isinstance(config, RunHandle):
        from roundhouse.infra.consents import refuse_unaccepted_code

        tree = config.config.model_dump(mode="json") | {"store": config.store, "resume": {"mode": "auto"}}
        resolved = load_tree(tree, texts, f"run {config.run_id}")
        refuse_unaccepted_code(resolved, texts)
        return resolved
    if isinstance(config, RunConfig):
        return load_tree(config.model_dump(mode="json"), texts, "the configuration")
    if isinstance(config, Mapping):
        return load_tree(deepcopy(dict(config)), texts, "the configuration")
    if isinstance(config, str | os.PathLike):
        return load_config(os.fspath(config), texts)
    raise ConfigError(
        f"config is {config!r}, a {type(config).__name__}. Give the path of a YAML file, a mapping, a RunConfig or a run."
    )


def _run_child(file: str, config: RunConfig) -> None:
    """Train in a child and raise its error."""
    reading, writing = os.pipe()
    python = [sys.executable, "-P"]
    command = [*python, "-m", "roundhouse.cli.from_python", file, str(writing)]
    output = None if _is_terminal(sys.stdout) else subprocess.PIPE
    child = subprocess.Popen(
        [*python, "-m", "roundhouse.die_with_parent", str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        pass_fds=[writing],
        start_new_session=True,  # Ctrl-C reaches the caller alone, which then ends the child once
    )
    os.close(writing)
    errors: list[str] = []
    with open(reading, "rb") as events, _ended(child), progress_display(config) as show:

        def take(line: bytes) -> None:
            event = json.loads(line)
            if event["event"] == "error":
                errors.append(event["message"])
            else:
                show(event["event"], event["facts"])

        takers: dict[IO[bytes], Callable[[bytes], None]] = {events: take}
        if child.stdout is not None:
            takers[child.stdout] = _relay
        _read_lines(takers)
        code = child.wait()
    if code:
        kind = ERRORS.get(code, RoundhouseError)
        raise kind(
            errors[-1]
            if errors
            else f"The training process ended with exit code {code}; its last lines give the reason."
        )


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty()) and stream.fileno() == 1
    except (AttributeError, OSError, ValueError):
        return False


def _relay(line: bytes) -> None:
    sys.stdout.write(line.decode(errors="replace"))
    sys.stdout.flush()


def _read_lines(takers: Mapping[IO[bytes], Callable[[bytes], None]]) -> None:
    """Give each line of several pipes to its function, until all pipes have ended."""
    rests = dict.fromkeys(takers, b"")
    with selectors.DefaultSelector() as selector:
        for taker in takers:
            selector.register(taker, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                source: Any = key.fileobj
                chunk = os.read(key.fd, 65536)
                *lines, rests[source] = (rests[source] + chunk).split(b"\n")
                if not chunk:
                    selector.unregister(source)
                    lines += [rests[source]] if rests[source] else []
                for line in lines:
                    takers[source](line + b"\n")


@contextmanager
def _ended(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the child with the block: after an error as Ctrl-C does, and by force if the caller is interrupted once more."""
    try:
        yield
    except BaseException:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
        try:
            _relay(child.communicate()[0] or b"")  # not `wait`: a full pipe would keep the child from ending
        except KeyboardInterrupt:
            child.kill()
            child.wait()
            raise
        raise
    finally:
        if child.stdout is not None:
            child.stdout.close()
