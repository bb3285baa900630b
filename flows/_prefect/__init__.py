"""Workarounds for Prefect, one module per behaviour, each with the upstream reference if one exists.

| module | works around | upstream |
| --- | --- | --- |
| `tuning` | two seconds after each 503; imports, schemas and heartbeats that nothing here uses | #16304, #10188 |
| `server` | SQLite's write lock stops the server's event loop; its page repeats no request | #16304, #10188 |
| `reruns` | a parent that runs again gets the result of another sub-flow, by call order | #22259, #18601 |
| `orphans` | a flow run stays Running after its process is gone | #16746 |
| `suspension` | a suspension ends after 300 s, and a flow run may not hear of it | none known |
| `signals` | a SIGTERM that is raised in a finalizer is dropped | #14219 |
| `delivery` | a process that ends waits for a server that has ended | #14854 |

References are issues and pull requests of PrefectHQ/prefect. tests/flows/test_prefect_workarounds.py fails if a
workaround is not needed any more, and if the installed Prefect is not `CHECKED_WITH`: then check each row again.
"""

from __future__ import annotations

import warnings
from importlib.metadata import version

CHECKED_WITH = "3.7.7"
"""Version of Prefect with which these modules were last checked; they use undocumented parts of it."""

if (installed := version("prefect")) != CHECKED_WITH:
    warnings.warn(
        f"Prefect {installed} is installed, and flows/_prefect was checked with {CHECKED_WITH}: install that one, or expect "
        "that runs resume, pause or end in another way.",
        RuntimeWarning,
        stacklevel=2,
    )
