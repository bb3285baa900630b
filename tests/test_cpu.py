"""Threads by model size, bfloat16 by the processor's flags, patience by the load."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from roundhouse import cpu
from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError
from roundhouse.stages import preflight


@pytest.mark.parametrize(
    ("parameters", "asked", "processes", "threads"),
    [(130_000, 0, 1, 1), (135_000_000, 0, 1, 8), (135_000_000, 0, 4, 2), (135_000_000, 0, 16, 1), (130_000, 3, 1, 3)],
)
def test_a_large_model_takes_all_cores_and_a_small_one_a_thread(
    monkeypatch: pytest.MonkeyPatch, parameters: int, asked: int, processes: int, threads: int
) -> None:
    monkeypatch.setattr(cpu, "available_cores", lambda: 8)
    assert cpu.threads_for(parameters, asked, processes=processes) == threads


def test_the_size_is_read_from_the_configuration_of_the_model(tmp_path: Path) -> None:
    shape = {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49152}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shape))
    assert 1.2e8 < cpu.parameters_of(file) < 1.5e8
    file.write_text(json.dumps({"text_config": shape}))
    assert 1.2e8 < cpu.parameters_of(file) < 1.5e8
    file.write_text("{}")
    assert cpu.parameters_of(file) == 0


@pytest.mark.parametrize(
    ("line", "computes"),
    [("flags : fpu avx2 avx512f", False), ("flags : avx512f avx512_bf16", True), ("Features : asimd bf16", True)],
)
def test_bfloat16_is_read_from_the_flags(tmp_path: Path, line: str, computes: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{line}\n")
    assert cpu.computes_bfloat16(tmp_path / "cpuinfo") is computes


@pytest.mark.parametrize(
    "keys", [{"generation": {"dtype": "bfloat16"}}, {"train": {"dtype": "bfloat16", "device": "cpu"}}]
)
def test_bfloat16_without_its_instructions_is_refused_before_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, keys: dict
) -> None:
    config = parse_config({"run_id": "r", "store": str(tmp_path)} | keys)
    monkeypatch.setattr(preflight, "computes_bfloat16", lambda: False)
    with pytest.raises(ConfigError, match=rf"{next(iter(keys))}.dtype is bfloat16.*to float32"):
        preflight.refuse_unready(config)
    monkeypatch.setattr(preflight, "computes_bfloat16", lambda: True)
    preflight.refuse_unready(config)


@pytest.mark.parametrize(("load", "factor"), [(0.5, 1.0), (8.0, 4.0), (100.0, 6.0)])
def test_a_busy_machine_gets_more_time(monkeypatch: pytest.MonkeyPatch, load: float, factor: float) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(cpu, "available_cores", lambda: 2)
    assert cpu.slowness() == factor


def _compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_what_helpers_of_a_stage_beside_others_compute_is_its_own_and_not_the_processes() -> None:
    def work_for(other: int, depth: int) -> None:
        with cpu.attribute_to_stage_of(other):
            _compute(0.1)
            if depth:
                helper = threading.Thread(target=work_for, args=(threading.get_ident(), depth - 1))
                helper.start()
                helper.join()

    def stage() -> None:
        with cpu.attribute_to_this_stage():
            seconds = cpu.clock()
            began = seconds()
            work_for(0, 0)  # of no stage: as if it had been called
            helper = threading.Thread(target=work_for, args=(threading.get_ident(), 1))
            helper.start()
            helper.join()
            used.append(seconds() - began)

    used: list[float] = []
    before = cpu.process_seconds()
    thread = threading.Thread(target=stage)
    thread.start()
    thread.join()
    assert 0.3 <= used[0] < 0.5
    assert cpu.process_seconds() - before < 0.1
    work_for(threading.get_ident(), 1)
    assert cpu.process_seconds() - before >= 0.2, "without a stage of its own"
