"""Recognition of error texts that report a broken connection."""

from __future__ import annotations

import pytest

from outlast.transport.connection_errors import is_connection_failure

GLOO = (
    "[/src/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:18863"
)


@pytest.mark.parametrize(
    "text",
    [
        f"[rank0]: RuntimeError: {GLOO}. This is typically caused by a remote worker crashing.",
        f"Traceback\nRuntimeError: {GLOO}\n[W1122] Warning: destroy_process_group() was not called",
        "torch.distributed.DistBackendError: NCCL error: ncclRemoteError: a remote process exited",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    ],
)
def test_broken_connections(text: str) -> None:
    assert is_connection_failure(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ValueError: bad batch",
        f"RuntimeError: {GLOO}\n\nDuring handling of the above exception, another:\n\nTraceback\n"
        "  File x\n    main()\n  File y\n    die()\nKeyError: 'moedl'",
        "requests.exceptions.ConnectionError: Connection refused",
    ],
)
def test_other_errors(text: str) -> None:
    assert not is_connection_failure(text)
