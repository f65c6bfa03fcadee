"""What must be equal between workers for the same bits: software, settings, and arithmetic."""

from __future__ import annotations

import hashlib
import platform

import torch


def fingerprint(device: torch.device) -> dict[str, str]:
    """Names and values that a joiner must share with the others (see docs/architecture.md)."""
    facts = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": str(torch.backends.mkldnn.enabled),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "tf32": str(torch.backends.cuda.matmul.allow_tf32),
        "cudnn_benchmark": str(torch.backends.cudnn.benchmark),
        "hash": str(hash("outlast")),
        "device": device.type,
        "arithmetic": _arithmetic(device),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = str(torch.version.cuda)
    return facts


def _arithmetic(device: torch.device) -> str:
    """Digest of one small forward and backward, with a generator of its own."""
    generator = torch.Generator().manual_seed(20260)
    weight = torch.randn(48, 48, generator=generator).to(device).requires_grad_()
    x = torch.randn(32, 48, generator=generator).to(device)
    with torch.enable_grad():
        y = torch.nn.functional.layer_norm(torch.tanh(x @ weight).exp(), (48,))
        loss = torch.nn.functional.cross_entropy(y @ weight.t(), torch.arange(32, device=device))
        (gradient,) = torch.autograd.grad(loss, weight)
    raw = torch.cat([loss.detach().reshape(1), gradient.flatten()]).cpu().numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]
