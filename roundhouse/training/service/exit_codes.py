"""What a training step's process says by its exit code. Imports nothing heavy: whoever waits for the process reads it too."""

from __future__ import annotations

from roundhouse.errors import ConfigError, DataError, InfraError, RoundhouseError, StoreError

EXIT_CODES: dict[type[RoundhouseError], int] = {InfraError: 75, DataError: 65, StoreError: 74, ConfigError: 78}
"""As in BSD's sysexits.h: EX_TEMPFAIL, EX_DATAERR, EX_IOERR, EX_CONFIG. An error of two kinds gets the first."""
