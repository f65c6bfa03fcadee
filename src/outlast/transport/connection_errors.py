"""Patterns of connection errors reported by gloo, NCCL and the rendezvous.

A programming error must not match as a lost peer: it would be retried forever. The patterns match
only texts that these libraries themselves write.
"""

from __future__ import annotations

import re

_GLOO = re.compile(
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
    r"|.*Broken pipe)"
    r"|Gloo connectFullMesh failed|timed out waiting for connection with sequence number",
    re.DOTALL,
)
_NCCL = re.compile(
    r"ncclRemoteError|ncclSystemError|ncclInternalError|NCCL communicator was aborted"
    r"|NCCL watchdog|ncclCommAbort|Watchdog caught collective operation timeout"
)
_SILENT = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+: (?:Connection timed out|No route to host)")
ENDING_LINES = 5  # last lines of a log: warnings at exit may follow the exception
_STORE = re.compile(
    r"(?:^|\.|: )(?:DistNetworkError|DistStoreError): "
    r"|TCPStore.*(?:Connection reset|Broken pipe|failed to recv|wait timeout)"
)


def is_gloo_failure(text: str) -> bool:
    """Return whether gloo wrote ``text`` about a connection that broke or timed out."""
    return bool(_GLOO.search(text))


def silent_hosts(text: str) -> set[str]:
    """Return the addresses of hosts that acknowledged nothing in time, as gloo names them in
    ``text``."""
    return set(_SILENT.findall(text))


def host_of(address: str) -> str:
    """Return the host of "host:port", without brackets."""
    return address.rpartition(":")[0].strip("[]")


def is_nccl_failure(text: str) -> bool:
    """Return whether NCCL or its watchdog wrote ``text`` about a lost or aborted communicator."""
    return bool(_NCCL.search(text))


def is_connection_failure(text: str) -> bool:
    """Return whether a process ended with ``text`` because a connection to a peer broke.

    Args:
        text: The last lines of a traceback or of a log. Only the last ENDING_LINES lines count, so
            that a handled failure further up does not.
    """
    ending = "\n".join(text.strip().splitlines()[-ENDING_LINES:])
    return is_gloo_failure(ending) or is_nccl_failure(ending) or bool(_STORE.search(ending))
