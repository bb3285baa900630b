"""Worker of one shard: `python -m roundhouse.collection.shard_worker --spec <URI of spec.json>`.

Invariant: it depends only on its spec, the engine and environment named there, and its environment variables, which
hold secrets. Finished rollouts are stored even if it is killed; on SIGTERM it also stores a report. The report is
written last. The exit codes are those of `roundhouse.training.service.job_entry`.

While rollouts finish, it prints one line per second: `s0001of0004: 12 of 40 rollouts`.
"""

from __future__ import annotations

import argparse
import logging
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from roundhouse.imports import gc_paused

with gc_paused():
    from roundhouse.activity import ACTIVITY
    from roundhouse.activity import logger as announcements
    from roundhouse.collection.collector import Parts
    from roundhouse.collection.in_process_runner import Collector
    from roundhouse.collection.shards import ShardReport, ShardSpec
    from roundhouse.errors import EXIT_CODES, InfraError, RoundhouseError
    from roundhouse.health.policy import typed
    from roundhouse.store.location import Location
    from roundhouse.store.stage import Stage
    from roundhouse.training.service.job_entry import REPORT, exit_code, read_spec, tell_error
    from roundhouse.trajectories.records import Ledger

TELL_SECONDS = 1.0

Say = Callable[[str], None]


def carry_out(path: str, say: Say) -> int:
    """Collect the shard of the spec at `path` and return the exit code. `say` receives the progress lines."""
    place: str | None = None
    try:
        spec = read_spec(ShardSpec, path, "shard of a collection")
        place = spec.place
        report = collect_shard(spec, say)
        Location(place).write(REPORT, report.model_dump_json().encode())
    except Exception as error:  # ends the process
        known = typed(error)
        if not isinstance(known, RoundhouseError):
            raise
        tell_error(place, known)
        return exit_code(known)
    return 0


def collect_shard(spec: ShardSpec, say: Say) -> ShardReport:
    """Collect the missing rollouts of a shard."""
    shard, version = spec.shard(), spec.provenance.policy_version
    stage = Stage(Location(spec.stage), kind=spec.kind, run_id=spec.config.run_id, iteration=spec.iteration)
    parts = Parts(stage.join(spec.provenance, spec.attempt, shard.label), version, spec.oldest_version, shard)
    finished = 0

    def on_progress(count: int, _: int) -> None:
        nonlocal finished
        finished = count

    with _telling(lambda: say(f"{shard.label}: {finished} of {len(shard.specs)} rollouts")):
        began_on = version if spec.began_on is None else spec.began_on
        collected = Collector(spec.config, parts, began_on).collect(
            shard.specs, spec.sampling, spec.engine_url, on_progress, on_policy=spec.on_policy
        )
    # CPU of this process since its start, and of awaited children such as sandboxes
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return ShardReport(
        attempt=spec.attempt,
        files=parts.settle(collected.rollouts),
        ledger=Ledger.from_rollouts(collected.rollouts, requested=len(shard.specs)),
        resumptions=parts.journal.resumptions.details(),
        seconds=collected.window_seconds,
        cpu_seconds=round(sum(usage.ru_utime + usage.ru_stime for usage in used), 3),
        max_rss_mib=round(_max_rss_mib(), 1),
    )


@contextmanager
def _telling(tell: Callable[[], None]) -> Iterator[None]:
    """Report progress every second during the block if it changed, and at the end."""
    ended = threading.Event()
    with ACTIVITY.track("collect", "shard") as token:

        def look() -> None:
            while not ended.wait(TELL_SECONDS):
                if ACTIVITY.silent_seconds(token) < TELL_SECONDS:
                    tell()

        thread = threading.Thread(target=look, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(TELL_SECONDS)
            tell()


def _max_rss_mib() -> float:
    """Return this process's peak memory. Linux passes `ru_maxrss` to a child, which would count the parent's memory."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def _end(*_: object) -> None:
    """asyncio ends its work in good order at the first SIGINT, and at once at the second. A parent that dies with several
    threads sends SIGTERM several times."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")  # in one piece, whatever else is written
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m roundhouse.collection.shard_worker")
    parser.add_argument("--spec", required=True, help="JSON file or its URI in the store; see ShardSpec")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    announcements.propagate = False  # one a rollout: the caller gets the lines of `_telling` instead
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may have turned that off
    signal.signal(signal.SIGTERM, _end)
    try:
        return carry_out(options.spec, _say)
    except KeyboardInterrupt:
        sys.stderr.write("The shard was stopped. Its finished rollouts are in the store.\n")
        return EXIT_CODES[InfraError]


if __name__ == "__main__":
    sys.exit(main())
