"""Collect while training (`asynchrony.staleness` above 0): the generation loop next to the iterations, both durable.

    train ──┬── generation from 3      refit to version 2 ── collect 3 ── collect 4 ── refit to version 3 ── collect 5 …
            └── iteration 3 ── iteration 4 …                 each: (waits for its collect) validate, train, checkpoint, …

The controller (`roundhouse.collection`) decides which rollouts may start and which groups a step trains on.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from prefect import flow
from prefect.exceptions import Pause
from prefect.futures import PrefectFuture

from roundhouse.collection.asynchronous.overlap import BeginCollect, Overlap
from roundhouse.collection.runner import END_SECONDS
from roundhouse.errors import InfraError, StoreError
from roundhouse.stages.collect import training_tasks
from roundhouse.stages.refit import engine_service
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference
from roundhouse_flows._prefect.orphans import end_generation_loops
from roundhouse_flows._prefect.reruns import pin_subflow_index
from roundhouse_flows._prefect.tuning import OpaqueConfig, forget_results, tagged, untagged_tasks
from roundhouse_tasks.stages import collect_chosen, generate_rollouts, prefetch_rollouts, transfer, validate

_JOIN_SECONDS = 4 * END_SECONDS
"""For the generation loop to end, its stages and Prefect's own work included."""


@flow(name="generation", flow_run_name="{config.run_id} generation from {first:04d}", persist_result=False)
def generation(config: OpaqueConfig, first: int) -> None:
    """Refit and collect, ahead of training by as much as `asynchrony.staleness` allows."""
    overlap, run = _overlap.get(), open_run(config)
    collecting: dict[int, PrefectFuture[Any]] = {}
    error: BaseException | None = None
    with untagged_tasks():
        try:
            for order in overlap.orders():
                if isinstance(order, BeginCollect):
                    roll_out = generate_rollouts if overlap.chooses else prefetch_rollouts
                    collecting[order.iteration] = roll_out.submit(run, order.iteration, overlap.runner)
                elif order is not None:
                    weights = run.checkpoint(order.version).reference()
                    if weights is None:
                        raise StoreError(f"run {run.run_id} has no checkpoint of version {order.version}")
                    transfer(run, weights)
                    overlap.transferred(order.version)
                for ended in [k for k, future in collecting.items() if future.state.is_final()]:
                    try:
                        collecting.pop(ended).result()
                    except Exception as failed:  # noqa: BLE001 - raised where the iteration is to be trained
                        if not overlap.runner.ended.is_set():  # otherwise it was cancelled, and the loop has the reason
                            overlap.failed(ended, failed)
                    forget_results()
            if overlap.failure is not None:
                raise overlap.failure
        except BaseException as raised:
            error = raised
            raise
        finally:
            overlap.end(error)
            for future in collecting.values():
                future.wait(END_SECONDS)


class GenerationLoop:
    """The generation loop of a run, from which the iterations get their rollouts (`roundhouse_flows.iteration.Source`): a
    thread with the flow `generation`, started again on demand after it failed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._overlap: Overlap | None = None
        self._thread: threading.Thread | None = None

    def at_work(self) -> Overlap:
        """The two loops; the generation loop is started, or started again, first."""
        if self._overlap is not None and self._overlap.given_up:
            self.end()
        if self._overlap is None or (self._overlap.ended and not self._overlap.finished):
            end_generation_loops(self._run.run_id)
            self._overlap = Overlap(self._run, engine_service(self._run).url, training_tasks(self._run))
            token = _overlap.set(self._overlap)
            context = contextvars.copy_context()
            _overlap.reset(token)
            self._thread = threading.Thread(target=context.run, args=(self._generate,), name="generation", daemon=True)
            self._thread.start()
        return self._overlap

    @contextmanager
    def sequences(self, run: Run, k: int, base: Reference) -> Iterator[Reference]:
        overlap = self.at_work()
        collected = overlap.collected(k)
        with overlap.training(k) as batch:
            rollouts = collected or collect_chosen(run, k, overlap.runner, batch)
            yield validate(run, k, rollouts)
        if k == run.config.iterations:
            self.end()  # the engine is evaluate's alone

    def evaluation(self, k: int) -> AbstractContextManager[None]:
        assert self._overlap is not None, "version k was trained on its rollouts"
        return self._overlap.validating(k)

    def end(self) -> None:
        """End the generation loop and wait for it.

        Raises:
            InfraError: it does not end.
        """
        if self._overlap is None or self._thread is None:
            return
        self._overlap.stop()
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            raise InfraError(f"The generation loop has not ended within {_JOIN_SECONDS:g} s; see its flow run.")

    def _generate(self) -> None:
        run, overlap = self._run, _overlap.get()
        try:
            pin_subflow_index(generation, overlap.number)
            tagged(generation, f"run:{run.run_id}")(run.config, overlap.first)
        except BaseException as error:  # noqa: BLE001 - the training loop raises it, where it waits
            if not overlap.ended:
                overlap.end(error)
            if isinstance(error, Pause):  # Prefect leaves a sub-flow that is paused with its parent as it is
                end_generation_loops(run.run_id)


@contextmanager
def generation_loop(run: Run) -> Iterator[GenerationLoop]:
    """The generation loop next to the block's iterations; it ends with the block, however that ends."""
    loop = GenerationLoop(run)
    try:
        yield loop
    finally:
        loop.end()


_overlap: contextvars.ContextVar[Overlap] = contextvars.ContextVar("overlap")
