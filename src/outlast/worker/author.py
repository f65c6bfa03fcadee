"""Who writes a checkpoint: the script, and all that changes the bits of a result."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import torch

from outlast import __version__
from outlast.checkpoint.record import digest_of
from outlast.worker.fingerprint import settings_of


def author() -> dict[str, str]:
    """Names and values, as they are in this process now. `script_digest` is of the script's own
    file, not of what it imports; "" where there is none (`python -c`)."""
    named = getattr(sys.modules["__main__"], "__file__", None)
    script = Path(named).absolute() if named else None
    try:
        digest = digest_of(script.read_bytes()) if script else ""
    except OSError:  # removed since it was started
        digest = ""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    return {
        "outlast": __version__,
        "host": socket.gethostname(),
        "script": str(script) if script else "",
        "script_digest": digest,
        **settings_of(device),
    }
