"""Devices, software and settings of a worker, and the author record of its checkpoints."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from outlast import __version__
from outlast.checkpoint.format.manifests import digest_of
from outlast.transport import messages

_UNASSIGNED = torch.device("cuda")  # equal to no device with a number


def hello(device: torch.device, address: str) -> messages.WorkerHello:
    """Return this process's first message. `address`: of its gloo listener."""
    return messages.WorkerHello(
        pid=os.getpid(),
        fingerprint=fingerprint(device),
        address=address,
        devices=device_count(),
    )


def fingerprint(device: torch.device) -> dict[str, str]:
    """Return values that must be equal on a joiner and the others (see docs/architecture.md).

    Of a spare without a device of its own those that open no context on one.
    """
    facts = settings_of(device)
    return facts if is_unassigned(device) else {**facts, "arithmetic": _arithmetic(device)}


def settings_of(device: torch.device) -> dict[str, str]:
    """Return the part of the fingerprint that needs no computation."""
    facts = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": str(torch.backends.mkldnn.enabled),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "tf32": _tf32(),
        "cudnn_benchmark": str(torch.backends.cudnn.benchmark),
        "hash": str(hash("outlast")),
        "device": device.type,
    }
    if device.type == "cuda":
        facts["cuda"] = str(torch.version.cuda)
        if not is_unassigned(device):
            facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def device_name() -> str:
    """Return the UUID of this process's GPU; "" without one."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return ""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _tf32() -> str:
    """Return the TF32 settings from the newer interface, since `allow_tf32` may raise."""
    backends: Any = torch.backends  # missing in its stubs
    return f"{backends.cuda.matmul.fp32_precision} {backends.cudnn.conv.fp32_precision}"


def _arithmetic(device: torch.device) -> str:
    """Return a digest of one small forward and backward with a separate generator."""
    generator = torch.Generator("cpu").manual_seed(20260)
    plain: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    weight = torch.randn(48, 48, **plain).to(device).requires_grad_()
    x = torch.randn(32, 48, **plain).to(device)
    with torch.enable_grad():
        y = torch.nn.functional.layer_norm(torch.tanh(x @ weight).exp(), (48,))
        loss = torch.nn.functional.cross_entropy(y @ weight.t(), torch.arange(32, device=device))
        (gradient,) = torch.autograd.grad(loss, weight)
    raw = torch.cat([loss.detach().reshape(1), gradient.flatten()]).cpu().numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


def device_count() -> int:
    """Return how many GPUs this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_of(index: int, *, is_spare: bool = False) -> torch.device:
    """Return this process's GPU by its local index, else the CPU.

    A spare beyond the GPUs gets one without a number: a context on another rank's GPU would take
    some 500 MB of its memory.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if is_spare and index >= torch.cuda.device_count():
        return _UNASSIGNED
    torch.cuda.set_device(index % torch.cuda.device_count())
    return torch.device("cuda", index % torch.cuda.device_count())


def is_unassigned(device: torch.device) -> bool:
    """Return whether the device is that of a spare that gets one with its seat."""
    return device == _UNASSIGNED


def author() -> dict[str, str]:
    """Return the author record of this process. `script_digest` covers the script's own file, not
    its imports; "" without a file (`python -c`)."""
    named = getattr(sys.modules["__main__"], "__file__", None)
    script = Path(named).absolute() if named else None
    try:
        digest = digest_of(script.read_bytes()) if script else ""
    except OSError:  # removed since the process started
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
