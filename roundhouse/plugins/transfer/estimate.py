"""Estimate of the time of a transfer."""

from __future__ import annotations

_SENDER, _LINK, _TENSOR = 25e9, 45e9, 13e-6
"""NCCL over links of 400 Gb/s a GPU: bytes a second of one sender, bytes a second that a receiver takes of all, seconds
a tensor. Fitted to three published refits of Miles (GLM-4.7-Flash and Qwen3-30B-A3B by one sender, GLM-4.5-Air by
four)."""


def broadcast_seconds(size: float, tensors: int, senders: int = 1) -> float:
    """Estimate the seconds of a broadcast of a model to GPUs over links of 400 Gb/s, in which every receiver takes all
    of it.

    Within 10 % of six refits that Miles published, of up to eight nodes a side; two over 16 and 32 nodes took 1.7 and
    2.2 times as long (docs/gpu.md).

    Args:
        size: bytes.
        senders: number of senders, each with a part.
    """
    return size / min(senders * _SENDER, _LINK) + _TENSOR * tensors
