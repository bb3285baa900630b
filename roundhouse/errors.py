"""Errors for people, and the two kinds of failure that decide about a retry.

Invariant: an exception that leaves a stage or a request is a `RoundhouseError` (its text names the fault, with the key
or value, and the remedy) or a defect of Roundhouse. For repeatable work, the kind decides whether repeating can help:
`InfraError` may pass by itself (a dead engine, a timeout), `DataError` will not (a bad task row).
"""


class RoundhouseError(Exception):
    """Something a person has to know: the message names the thing, the value and the remedy."""


class ConfigError(RoundhouseError):
    """The configuration cannot be loaded or cannot work."""


class StoreError(RoundhouseError):
    """The store differs from its manifests, or cannot be written."""


class InfraError(RoundhouseError):
    """A failure of machines, processes or networks. Repeating the same work may succeed."""


class DataError(RoundhouseError):
    """A failure caused by the input. Repeating the same work fails in the same way."""


class BudgetReached(RoundhouseError):
    """The run has used its budget; nothing failed."""


class DiskFull(StoreError, InfraError):
    """No space is left on a disk."""


class OutOfMemory(InfraError):
    """A machine or its GPU has run out of memory."""


class ProcessKilled(InfraError):
    """A process of the run was killed: by the kernel when its memory was full, or by a person."""


KILLED_FOR_MEMORY = (
    "If the kernel killed it since its memory was full, lower train.tokens_per_microbatch, set train.logits_chunk_tokens or "
    "train.activation_checkpointing, or give it more memory; a run that exists takes these with --set."
)


class ServiceUnreachable(InfraError):
    """A service that a stage needs (Ray, Prefect, a database) does not answer."""


class DeploymentFailed(RoundhouseError):
    """The policy cannot be brought up or refitted; the text has the cause."""


class TooFewLeft(RoundhouseError):
    """Too little is left of an iteration to train on (`failures.on_too_few`)."""


class TooFewRollouts(TooFewLeft, InfraError):
    """More rollouts failed than `rollout.max_failed_fraction` allows, at least one of them for infrastructure."""


class FailingRollouts(TooFewLeft, DataError):
    """More rollouts failed than `rollout.max_failed_fraction` allows, all of them by their data."""


class TooFewSequences(TooFewLeft, DataError):
    """Validation, or sampling for spread, left too few sequences or groups."""


NOT_PERMITTED = 77
"""Exit code of a run whose budget is used up: a person has to allow more (EX_NOPERM)."""
EXIT_CODES: dict[type[RoundhouseError], int] = {InfraError: 75, DataError: 65, StoreError: 74, ConfigError: 78}
"""Exit code of a process that ends with such an error, as in BSD's sysexits.h: EX_TEMPFAIL, EX_DATAERR, EX_IOERR, EX_CONFIG. An
error of two kinds gets the first."""
