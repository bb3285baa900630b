"""The smallest program: `python -m tests.launch.program --spec <URI of spec.json>` follows its spec."""

from __future__ import annotations

import argparse
import os
import sys
import time

from pydantic import BaseModel

from roundhouse.errors import DataError
from roundhouse.store.location import Location
from roundhouse.training.service.job_entry import REPORT, exit_code, read_spec, tell_error


class Does(BaseModel):
    place: str = ""
    does: str = "report"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", required=True)
    spec = read_spec(Does, parser.parse_args().spec, "program")
    print(f"rank {os.environ.get('RANK', '0')} of {os.environ.get('WORLD_SIZE', '1')}", flush=True)
    if spec.does == "wait":
        time.sleep(600)
    if spec.does == "refuse":
        tell_error(spec.place, DataError("the data is bad"))
        return exit_code(DataError("the data is bad"))
    Location(spec.place).write(REPORT, b"{}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
