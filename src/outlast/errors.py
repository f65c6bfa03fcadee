"""Hierarchy of typed errors, and their exit codes.

A message names the event, the place (rank, host, step, file), what was kept, and what to do.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_USER_ERROR = 1
EXIT_USAGE = 2
EXIT_GAVE_UP = 3
EXIT_INTERRUPTED = 4


class OutlastError(Exception):
    """Base of everything that Outlast raises on purpose."""


class UsageError(OutlastError):
    """The API or the command line was used in a way that cannot work."""


class ConfigError(UsageError):
    """A setting is missing, malformed, or contradicts another."""


class ProtectError(UsageError):
    """`protect` was given an object that it cannot restore or transfer."""


class PhaseError(UsageError):
    """The contract of a phase was broken (see docs/architecture.md, "One commit point")."""


class UnsupportedError(UsageError):
    """A torch feature that stable groups do not support; refused at first use."""


class GroupProofError(UnsupportedError):
    """Process groups on the installed torch failed their proof; no step was run."""


class CodecError(UsageError):
    """A value cannot be written without pickle."""


class MismatchError(UsageError):
    """A checkpoint does not fit the objects that it is to be loaded into.

    All differences are listed, and nothing was changed. An older checkpoint would not fit either.
    """


class CorruptionError(OutlastError):
    """Stored or received bytes are damaged; none of them was used."""


class StorageError(OutlastError):
    """A file could not be written or read: a full disk, missing rights, a lost file system."""


class StalledError(StorageError):
    """A file system did not answer in time.

    Its contents are unknown, so nothing there may be skipped.
    """


class InUseError(StorageError):
    """A checkpoint was not deleted, because a process reads it."""


class RefusedError(StorageError):
    """A store refused the request: no such bucket, no credentials, or no rights.

    A retry does not help.
    """


class WireError(OutlastError):
    """A frame is malformed, too large, unauthenticated, or of another version."""


class RunDirError(OutlastError):
    """The run directory is in use, belongs to another job, or cannot be written."""


class LakeError(OutlastError):
    """A lake of records is empty, in use, of a newer version, or damaged; or is no lake.

    Its contents are unchanged.
    """


class SourceError(OutlastError):
    """A log has no known format, is unreadable, or changed while it was read.

    None of it was used.
    """


class GroupError(OutlastError):
    """An inner process group could not be built or used (a lost peer, an expired deadline)."""


class InvariantError(OutlastError):
    """The controller's state contradicts itself: a defect of Outlast, found by its tests."""


class GaveUpError(OutlastError):
    """Every rung of the ladder was tried; the message is the one root cause."""


class StepRefused(BaseException):
    """The generation closed while a phase ran: unwinds the phase to `Session.run`, which redoes it.

    Control flow and not an error: `except Exception` in a training script must not catch it.
    """
