"""One small tree of typed errors, and the exit codes that they end in.

A message says what happened, where (rank, host, step, file), what was kept, and what to do.
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
    """`protect` was given something that it cannot put back or move."""


class PhaseError(UsageError):
    """The contract of a phase was broken (see docs/architecture.md, "One commit point")."""


class UnsupportedError(UsageError):
    """A torch feature that stable groups cannot carry; named, and refused at first use."""


class CodecError(UsageError):
    """A value cannot be written without pickle."""


class MismatchError(UsageError):
    """A checkpoint does not hold what it is to be loaded into; all differences are listed, and
    nothing was touched. An older checkpoint would not fit either."""


class CorruptionError(OutlastError):
    """Stored or received bytes are damaged; nothing was taken over from them."""


class StorageError(OutlastError):
    """A file could not be written or read: a full disk, missing rights, a lost file system."""


class StalledError(StorageError):
    """A file system did not answer in time. What lies there is not known, and nothing of it may be
    passed over for that."""


class InUseError(StorageError):
    """A checkpoint was not deleted, because somebody reads it."""


class RefusedError(StorageError):
    """A store answered, and will not have us: there is no such bucket, there are no credentials, or
    no rights. To try again does not help."""


class WireError(OutlastError):
    """A frame is malformed, too large, unauthenticated, or of another version."""


class RunDirError(OutlastError):
    """The run directory is in use, belongs to another job, or cannot be written."""


class LakeError(OutlastError):
    """A lake of records holds nothing, is in use, of a newer version, or damaged; or a directory is
    none. What it held is as it was."""


class SourceError(OutlastError):
    """A log is of no known format, nothing in it can be read, or it changed while it was read.
    Nothing of it was taken over."""


class GroupError(OutlastError):
    """An inner process group could not be built or used (a peer is gone, a deadline passed)."""


class GaveUpError(OutlastError):
    """Every rung of the ladder was tried; the message is the one root cause."""


class StepRefused(BaseException):
    """The generation closed while a phase ran: unwinds the phase to `Session.run`, which redoes it.

    Control flow and not an error: `except Exception` in a training script must not catch it.
    """
