"""A fixture of the tests of stages, which one of these is too."""

from __future__ import annotations

from tests.stages.conftest import no_resident_trainer

__all__ = ["no_resident_trainer"]
