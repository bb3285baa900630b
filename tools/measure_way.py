"""Modules on one prompt's way: those whose functions run from a task's row to the gradient, in the stages and below.

One iteration of a tiny policy in this one process: the engine's server, the collection, the validation and the training step.
Counted is a module of which a function is called while a stage runs; the import of a module does not count.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

SETTINGS: dict[str, Any] = {
    "run_id": "way",
    "policy": {"kind": "warm_start", "steps": 3, "hidden_size": 32, "intermediate_size": 64, "layers": 1},
    "environment": {"kind": "calculator"},
    "train": {"threads": 1, "device": "cpu"},
}


class Entered:
    """Modules whose functions were called while it was on."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.on = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if (
            self.on and event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED
        ):  # neither a module nor a class body
            name = frame.f_globals.get("__name__", "")
            if name.startswith("roundhouse."):
                self.modules.add(name)


@contextmanager
def engine() -> Iterator[str]:
    """URL of an engine that a thread of this process serves."""
    import uvicorn

    from roundhouse.generation.standalone import StandaloneEngine

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(StandaloneEngine(), log_level="warning", lifespan="off"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(30)


def main() -> set[str]:
    """Modules that one iteration enters."""
    import roundhouse.training.trainer  # noqa: F401 - the train stage imports it when it runs, which is not to count
    from roundhouse.config.loading import parse_config
    from roundhouse.stages.collect import collect_iteration
    from roundhouse.stages.policy import starting_policy
    from roundhouse.stages.refit import engine_at, refit_iteration
    from roundhouse.stages.train import train_iteration
    from roundhouse.stages.validate import validate_iteration, vocabulary_size
    from roundhouse.store.directories import checkpoint_cache
    from roundhouse.store.run import open_run

    entered = Entered()
    threading.setprofile(entered)
    sys.setprofile(entered)
    with tempfile.TemporaryDirectory() as directory, engine() as url:
        generation = {
            "engine_url": url,
            "backend": "transformers",
            "max_model_len": 512,
            "sampling": {"max_new_tokens": 8},
        }
        tree = SETTINGS | {"store": str(Path(directory) / "store"), "generation": generation}
        run = open_run(parse_config(tree))
        policy = starting_policy(run)
        weights = refit_iteration(run, 1, policy)
        entered.on = True
        rollouts = collect_iteration(run, 1, weights, engine_at(run, weights.policy_version))
        sequences = validate_iteration(run, 1, rollouts, vocabulary_size(run))
        train_iteration(run, 1, sequences, policy, checkpoint_cache(run.config))
        entered.on = False
    return entered.modules


if __name__ == "__main__":
    found = sorted(main())
    print("\n".join(found))
    print(f"{len(found)} modules in {len({name.split('.')[1] for name in found})} packages")
