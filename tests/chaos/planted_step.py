"""A training step's process with kills planted (`tests.chaos.planted`): `python -m tests.chaos.planted_step --spec …`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from roundhouse.training.service.one_shot import main
from tests.chaos.planted import Striker, plant_store
from tests.chaos.strikes import PLAN_VARIABLE, Plan

if __name__ == "__main__":
    plant_store(Striker(Plan.load(Path(os.environ[PLAN_VARIABLE])), "trainer"))
    sys.exit(main())
