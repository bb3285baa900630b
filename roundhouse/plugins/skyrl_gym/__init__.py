"""skyrl-gym: environments for language models of the SkyRL project, on the rows of its data sets."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {
    "environment.skyrl_gym": Plugin(
        f"{__name__}.environment:SkyRLGym", f"{__name__}.section:SkyRLGymSection", extra="skyrl-gym"
    )
}
