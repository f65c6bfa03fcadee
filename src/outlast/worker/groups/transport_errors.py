"""Recognition of transport errors: a peer or a connection is gone, and nothing else."""

from __future__ import annotations

from torch import distributed as dist

from outlast.errors import GroupError, StepRefused
from outlast.transport.connection_errors import is_gloo_failure, is_nccl_failure

_WAIT_TIMED_OUT = "Operation timed out!"


def is_caused_by_transport(error: BaseException) -> bool:
    """Return whether the error is, or came of, a transport error or a refused collective."""
    visited: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        if isinstance(cause, StepRefused) or is_transport_error(cause):
            return True
        visited.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return False


def is_transport_error(error: BaseException) -> bool:
    """Return whether gloo, NCCL or the rendezvous reports a broken or timed-out connection.

    Anything unknown is False: a programming error that looked like a lost peer would be retried
    for ever.
    """
    if isinstance(error, GroupError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    text = str(error)
    if isinstance(error, dist.DistBackendError) and is_nccl_failure(text):
        return True
    return is_gloo_failure(text) or text.strip() == _WAIT_TIMED_OUT
