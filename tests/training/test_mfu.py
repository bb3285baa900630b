"""The peak that MFU is a share of is the one of this very GPU."""

from __future__ import annotations

import pytest

from roundhouse.training.memory_plan import known_device


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
    device = known_device(name)
    assert device is not None
    assert device.bf16_flops == tera * 1e12


@pytest.mark.parametrize("name", ["NVIDIA H100 something new", "NVIDIA GeForce RTX 4090", "NVIDIA L40X"])
def test_a_gpu_without_a_data_sheet_is_measured_and_not_guessed(name: str) -> None:
    assert known_device(name) is None
