"""B023: a class that reads its tasks from a file, as `remote` and `agent` environments do (`BUGS_TASKS`)."""

import os
import pathlib

from roundhouse.environments.calculator import Calculator
from roundhouse.environments.task_files import read_task_rows

OWN = pathlib.Path(__file__).with_name("B023_tasks.jsonl")


class World(Calculator):
    def tasks(self, split):
        return read_task_rows(os.environ.get("BUGS_TASKS", str(OWN)), "train_tasks")
