"""Configuration files of NexRL and NeMo RL, translated to Roundhouse's keys."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {  # NexRL first: both have the key `defaults`, which alone marks a file of NeMo RL
    f"translator.{name}": Plugin(f"roundhouse.compat.{name}.configuration:translate_configuration")
    for name in ("nexrl", "nemo_rl")
}
