"""The peak that MFU is a share of is the one of this very GPU."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

MFU = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/mfu.py"))


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA A10G", 70),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
    ],
)
def test_a_gpu_is_known_by_its_whole_name(name: str, tera: int) -> None:
    assert MFU["known_peak"](name) == tera * 1e12


@pytest.mark.parametrize("name", ["NVIDIA H100 something new", "NVIDIA GeForce RTX 4090", "NVIDIA L40X"])
def test_a_gpu_without_a_data_sheet_is_measured_and_not_guessed(name: str) -> None:
    assert MFU["known_peak"](name) is None
