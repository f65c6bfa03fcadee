"""Process-wide modes that affect a step's results: torch's modes and environment variables.

They are carried if the script changes them after its first step. Not listed: modes that affect no
result (recursion limit, warnings, print options, anomaly detection), and the number of inter-op
threads, which cannot be changed late.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from outlast.config import ProcessEnvironment

# Attributes of torch.backends; a general precision precedes those that inherit it.
_BACKENDS = (
    "fp32_precision",
    "cuda.matmul.fp32_precision",
    "cudnn.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
    "mkldnn.rnn.fp32_precision",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "mkldnn.enabled",
    "mkldnn.deterministic",
    "opt_einsum.enabled",
    "opt_einsum.strategy",
    "quantized.engine",
)
_ATTENTION = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
_AUTOCAST = ("cpu", "cuda")
_SMALLEST_NORMAL = 2.2250738585072014e-308


class TorchModes:
    """torch's process-wide modes that affect a step's results, as a mapping."""

    def __getitem__(self, name: str) -> Any:
        """Return a mode."""
        return _MODES[name][0]()

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a mode."""
        _MODES[name][1](value)

    def snapshot(self) -> dict[str, Any]:
        """Return all modes."""
        return {name: read() for name, (read, _) in _MODES.items()}


def _read_precision() -> str | None:
    """Return the matmul precision; None if the script sets it through `torch.backends`."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to mix its two interfaces
        return None


def _set_precision(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


def _flushes_denormals() -> bool:
    """Return whether this thread flushes denormals, which torch has no query for."""
    return _SMALLEST_NORMAL / 2 == 0


def _read_backend(path: str) -> Any:
    return attrgetter(path)(torch.backends)


def _set_backend(path: str, value: Any) -> None:
    owner, _, name = path.rpartition(".")
    setattr(_read_backend(owner) if owner else torch.backends, name, value)


def _is_settable(path: str) -> bool:
    """Return whether this build of torch has the setting and accepts its present value."""
    try:
        _set_backend(path, _read_backend(path))
    except (AttributeError, RuntimeError, TypeError):
        return False
    return True


def _set_autocast_type(device: str, name: str) -> None:
    torch.set_autocast_dtype(device, getattr(torch, name))


_Mode = tuple[Callable[[], Any], Callable[[Any], object]]
_MODES: dict[str, _Mode] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (lambda: str(torch.get_default_device()), torch.set_default_device),
    "deterministic algorithms": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "matmul precision": (_read_precision, _set_precision),
    "flushing of denormals": (_flushes_denormals, torch.set_flush_denormal),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
}
_MODES |= {
    f"backends.{path}": (partial(attrgetter(path), torch.backends), partial(_set_backend, path))
    for path in _BACKENDS
    if _is_settable(path)
}
_MODES |= {
    f"backends.cuda.{name}": (
        getattr(torch.backends.cuda, f"{name}_enabled"),
        getattr(torch.backends.cuda, f"enable_{name}"),
    )
    for name in _ATTENTION
}
for _device in _AUTOCAST:
    _MODES[f"autocast on {_device}"] = (
        partial(torch.is_autocast_enabled, _device),
        partial(torch.set_autocast_enabled, _device),
    )
    _MODES[f"type of autocast on {_device}"] = (
        lambda device=_device: str(torch.get_autocast_dtype(device)).removeprefix("torch."),
        partial(_set_autocast_type, _device),
    )
TORCH_MODES = TorchModes()
ENVIRONMENT = ProcessEnvironment()
