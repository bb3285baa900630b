"""What the `roundhouse` command says by its exit code: whether the same command again can help.

Invariant: a kind of error has one number, that of a training step's process (`roundhouse.errors`), so
that one `podFailurePolicy` reads flows and steps alike. `FINAL` are those for which repeating cannot help; 1 is everything
that has no kind, and repeating it may.

    0 done   1 an error without a kind, a finding   2 a wrong command line   65 data   74 store   75 machines, networks
    77 a used up budget   78 configuration   130 Ctrl-C
"""

from __future__ import annotations

from roundhouse.errors import EXIT_CODES, ConfigError, DataError, RoundhouseError
from roundhouse.stages.budget import BudgetReached

USAGE = 2
"""As typer has it."""
NOT_PERMITTED = 77
"""A person has to allow more (EX_NOPERM)."""
FINAL = sorted([USAGE, NOT_PERMITTED, EXIT_CODES[DataError], EXIT_CODES[ConfigError]])


def exit_code(error: RoundhouseError) -> int:
    """The number of an error that has reached the command's border.

    >>> exit_code(ConfigError("no such key"))
    78
    """
    if isinstance(error, BudgetReached):
        return NOT_PERMITTED
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
