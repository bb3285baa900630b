"""A node's cache: entries are made once, complete or absent, never removed during use, and bounded."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from roundhouse.weight_sync.cache import NodeCache, private_directory
from tests.waiting import until


def slowly(directory: str, seconds: float, key: str = "k") -> None:
    def fill(partial: Path) -> None:
        (partial / f"by-{os.getpid()}").write_bytes(b"x" * 1000)
        time.sleep(seconds)

    entry = NodeCache(Path(directory), 10**9).entry(key, fill)
    assert len(list(entry.path.iterdir())) == 1
    entry.release()


def size(count: int):
    return lambda partial: (partial / "file").write_bytes(b"x" * count) and None


@pytest.mark.real
def test_of_several_processes_one_makes_an_entry_and_the_others_take_it(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    makers = [spawn.Process(target=slowly, args=(str(tmp_path), 0.3)) for _ in range(4)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(60)
    assert [maker.exitcode for maker in makers] == [0] * 4
    assert len(list((tmp_path / "k").iterdir())) == 1


@pytest.mark.real
def test_what_a_killed_process_left_is_made_anew_and_cleared_away(tmp_path: Path) -> None:
    maker = multiprocessing.get_context("spawn").Process(target=slowly, args=(str(tmp_path), 60))
    maker.start()
    until(lambda: list(tmp_path.glob(".k.partial-*/by-*")), "a download that has begun")
    assert maker.pid is not None
    os.kill(maker.pid, signal.SIGKILL)
    maker.join(30)
    assert not (tmp_path / "k").exists()
    slowly(str(tmp_path), 0)
    assert [path.name for path in (tmp_path / "k").iterdir()] == [f"by-{os.getpid()}"]
    assert list(tmp_path.glob(".k.partial-*")) == []


@pytest.mark.real
def test_room_that_dead_processes_took_is_free_before_another_entry_is_made(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    lives = (("dead", 60), ("alive", 4))
    makers = {key: spawn.Process(target=slowly, args=(str(tmp_path), seconds, key)) for key, seconds in lives}
    for key, maker in makers.items():
        maker.start()
        while not list(tmp_path.glob(f".{key}.partial-*/by-*")):
            assert maker.is_alive()
            time.sleep(0.01)
    makers["dead"].kill()
    makers["dead"].join(30)
    seen: list[str] = []
    NodeCache(tmp_path, 10**9).entry("k", lambda partial: seen.extend(sorted(os.listdir(tmp_path)))).release()
    assert [name.partition("partial")[0] for name in seen] == [".alive.lock", ".alive.", ".k.lock", ".k."]
    makers["alive"].join(30)
    assert makers["alive"].exitcode == 0
    assert (tmp_path / "alive").is_dir()


@pytest.mark.parametrize("wait_seconds", [600.0, -1.0])
def test_what_another_machine_makes_is_cleared_away_only_when_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_seconds: float
) -> None:
    """Its lock is its own kernel's, and free here."""
    monkeypatch.setattr("roundhouse.weight_sync.cache.WAIT_SECONDS", wait_seconds)
    theirs = tmp_path / ".theirs.partial-another-boot-0"
    theirs.mkdir()
    (theirs / "file").write_bytes(b"x")
    locks = [tmp_path / f".{key}.lock" for key in ("theirs", "begun")]
    for lock in locks:
        lock.touch()
    for path in (theirs / "file", theirs, *locks):
        os.utime(path, (0, 0))  # a copy's times are the original's
    NodeCache(tmp_path, 0).evict()
    assert [path.exists() for path in (theirs, *locks)] == [wait_seconds > 0] * 3


def test_two_machines_that_make_one_entry_do_not_disturb_each_other(tmp_path: Path) -> None:
    theirs, final = tmp_path / ".k.partial-another-boot-0", tmp_path / "k"

    def fill(partial: Path) -> None:
        (partial / "file").write_bytes(b"ours")
        (theirs / "file").write_bytes(b"theirs")
        theirs.rename(final)  # they are the quicker ones

    theirs.mkdir()
    entry = NodeCache(tmp_path, 10**9).entry("k", fill)
    assert (entry.path / "file").read_bytes() == b"theirs"
    entry.release()


def test_an_entry_whose_making_failed_is_not_there(tmp_path: Path) -> None:
    def fails(partial: Path) -> None:
        (partial / "half").write_bytes(b"x")
        raise OSError("cut")

    cache = NodeCache(tmp_path, 10**9)
    with pytest.raises(OSError, match="cut"):
        cache.entry("k", fails)
    assert cache.held("k") is None
    assert list(tmp_path.glob("*k*")) == [tmp_path / ".k.lock"] or list(tmp_path.glob("k")) == []


def test_beyond_the_bound_the_longest_unused_goes_and_what_is_held_stays(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, 2500)
    first = cache.entry("first", size(1000))
    for place, name in enumerate(["second", "third", "fourth"]):
        cache.entry(name, size(1000)).release()
        os.utime(tmp_path / name, (place, place)) if name != "fourth" else None
    kept = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert "first" in kept
    assert "fourth" in kept
    assert "second" not in kept
    first.release()
    NodeCache(tmp_path, 0).evict()
    assert [path for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []


def test_an_entry_that_is_bigger_than_the_bound_is_handed_out_all_the_same(tmp_path: Path) -> None:
    entry = NodeCache(tmp_path, 10).entry("k", size(1000))
    assert (entry.path / "file").stat().st_size == 1000


def test_the_directory_is_this_users_alone(tmp_path: Path) -> None:
    directory = private_directory(tmp_path, "w")
    assert directory.stat().st_mode & 0o777 == 0o700
