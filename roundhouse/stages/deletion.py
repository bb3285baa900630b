"""Delete a run.

Invariant: nothing is deleted while another process drives the run. `run.json` goes last, so that a deletion that was
interrupted leaves a run that is listed, and can be deleted again. Nothing outside of the run's directory needs it: a fork owns
its checkpoints, a dataset its rows. What points to it is the engine's copy of its tokenizer on this machine, which goes too.
"""

from __future__ import annotations

import shutil

from roundhouse.stages.policy import checkpoint_cache
from roundhouse.store import lease
from roundhouse.store.identity import IDENTITY
from roundhouse.store.run import Run


def delete_run(run: Run) -> None:
    """Delete everything of the run.

    Raises:
        RunDriven: a process drives it.
    """
    lease.take(run.location)
    for name in run.location.tree():
        if name != IDENTITY and not name.startswith(f"{lease.DIRECTORY}/"):
            run.location.delete_object(name)
    run.location.delete_tree()
    shutil.rmtree(checkpoint_cache(run.config) / f"engine-{run.uid}", ignore_errors=True)
