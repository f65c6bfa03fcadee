"""Which errors mean that a peer or a connection is gone, and nothing else.

A programming error must never look like a lost peer: it would heal for ever. So only texts that
gloo, NCCL and the rendezvous themselves write are known here.
"""

from __future__ import annotations

import re

from torch import distributed as dist

from outlast.errors import GroupError

_GLOO_TCP = re.compile(
    r"gloo/transport/tcp/[\w./]+:\d+\] (?:"
    r"Connection closed by peer"
    r"|Connection reset by peer"
    r"|Read error"
    r"|[Rr]ead timeout"
    r"|[Ww]rite timeout"
    r"|[Cc]onnect timeout"
    r"|writev .*: (?:Broken pipe|Connection reset by peer)"
    r"|recv .*: Connection reset by peer"
    r"|Socket unexpectedly closed"
    r"|Socket closed"
    r"|Timed out waiting \d+ms for (?:send|recv) operation to complete"
    r"|Application timeout caused pair closure"
    r"|.*[Tt]imed out"
    r"|.*Connection (?:refused|reset|timed out)"
    r"|.*Broken pipe)",
    re.DOTALL,
)
_GLOO_CONNECT = re.compile(
    r"Gloo connectFullMesh failed|timed out waiting for connection with sequence number"
)
_NCCL = re.compile(
    r"ncclRemoteError|ncclSystemError|ncclInternalError|NCCL communicator was aborted"
    r"|NCCL watchdog|ncclCommAbort|Watchdog caught collective operation timeout"
)
_WAIT_TIMED_OUT = "Operation timed out!"


def is_transport_error(error: BaseException) -> bool:
    """True when `error` is gloo, NCCL or the rendezvous saying that a connection broke, was
    severed, or stayed silent past its deadline. Anything unknown is False."""
    if isinstance(error, GroupError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    text = str(error)
    if isinstance(error, dist.DistBackendError) and _NCCL.search(text):
        return True
    found = _GLOO_TCP.search(text) or _GLOO_CONNECT.search(text)
    return bool(found) or text.strip() == _WAIT_TIMED_OUT
