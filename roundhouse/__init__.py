"""Roundhouse: reinforcement learning post-training of language models as a durable workflow."""

__version__ = "0.1.0"
