"""Results of phases that were lost with their worker, as its successor's script sees them.

Numbers are NaN, which can be stored, printed and counted with. Whatever would decide by them calls
`use`, which does not return: the job rolls back, since a comparison with NaN is false, silently.
What C code computes from a `LostNumber` (`math.exp`, NumPy) is NaN without this guard.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import torch
from torch.optim import Optimizer

from outlast.checkpoint.format.value_encoder import write_as
from outlast.worker.state.tensor_digests import local_shard

# Operations that need the value itself.
_USES = (  # noqa: SIM905 - a list literal would take a line a name
    "bool eq ne lt le gt ge hash len iter next contains getitem call int float complex index "
    "add radd sub rsub mul rmul truediv rtruediv floordiv mod and rand or ror xor invert neg "
    "fspath enter"
).split()


_NUMBER_USES = (  # noqa: SIM905 - as above
    "bool eq ne lt le gt ge int float trunc floor ceil divmod rdivmod reduce_ex"
).split()
_SUMS = (  # noqa: SIM905 - as above
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos abs"
).split()
_TENSOR_USES = frozenset(
    (  # noqa: SIM905 - as above
        "eq ne lt le gt ge equal allclose isclose isnan isfinite isinf bool int long short byte"
        " is_nonzero index numpy array dlpack tolist contains any all argmax argmin"
        " argsort sort topk kthvalue unique nonzero count_nonzero where nan_to_num sign signbit"
        " logical_and logical_or logical_not logical_xor bucketize searchsorted histc multinomial"
        " bernoulli reduce_ex"
    ).split()
)


class LostResult:
    """Placeholder of a lost result that is not a floating-point number: a flag, a name, an object.

    It can be stored, passed on and printed. Any other operation calls `use`, which does not return.
    """

    def __init__(self, use: Callable[[], NoReturn]) -> None:
        self._use = use

    def __repr__(self) -> str:
        return "<lost with its worker>"

    def __format__(self, _: str) -> str:
        return repr(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a Python protocol that it does not implement
            raise AttributeError(name)
        self._use()


class LostNumber(float):
    """NaN in place of a lost floating-point number. A comparison, a conversion and a pickle call
    `use`; arithmetic gives a `LostNumber`, or with a tensor a `LostTensor`."""

    _use: Callable[..., NoReturn]

    def __new__(cls, use: Callable[[], NoReturn]) -> LostNumber:
        number = super().__new__(cls, math.nan)
        number._use = use
        return number

    __hash__ = float.__hash__

    def __round__(self, digits: SupportsIndex | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if digits is None:
            self._use()
        return self

    def __copy__(self) -> LostNumber:
        return self

    def __deepcopy__(self, _memo: object) -> LostNumber:
        return self


class LostTensor(torch.Tensor):
    """NaN in place of a lost tensor, and what is computed from it. A comparison, a conversion to a
    number or an array, and a pickle call `use`; `item` gives a `LostNumber`."""

    uses: tuple[Callable[[], NoReturn], ...] = ()  # of the newest one: results have no attributes

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.strip("_")
        if name in _TENSOR_USES or func is torch.Tensor.__float__:  # but not `float`, of a type
            LostTensor.uses[0]()
        if name == "item":
            return LostNumber(LostTensor.uses[0])
        return super().__torch_function__(func, types, args, kwargs or {})

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(torch.Tensor), spec)

    def __deepcopy__(self, _memo: object) -> torch.Tensor:
        return self.detach().clone()


def _used(self: Any, *_: Any) -> None:
    self._use()


def _counted(self: LostNumber, other: Any = 0.0, *_: Any) -> Any:
    if isinstance(other, torch.Tensor):
        return placeholder(other + math.nan, self._use)
    return LostNumber(self._use) if isinstance(other, (int, float)) else NotImplemented


for _name in _USES:
    setattr(LostResult, f"__{_name}__", _used)
for _name in _NUMBER_USES:
    setattr(LostNumber, f"__{_name}__", _used)
for _name in _SUMS:
    setattr(LostNumber, f"__{_name}__", _counted)
write_as(LostNumber, lambda _: math.nan)
write_as(LostTensor, lambda tensor: tensor.as_subclass(torch.Tensor))


def placeholder(value: Any, use: Callable[[], NoReturn]) -> Any:
    """Return the placeholder of a lost result. `value` is the result of a dry run, whose types and
    shapes it has; `use` is called when the script uses a part that NaN cannot represent."""
    if value is None:
        return None
    if isinstance(value, (float, np.floating)):
        return LostNumber(use)
    if isinstance(value, (complex, np.complexfloating)):
        return complex(math.nan, math.nan)
    if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
        LostTensor.uses = (use,)
        return torch.full_like(value, math.nan).as_subclass(LostTensor)
    if isinstance(value, np.ndarray) and value.dtype.kind in "fc":
        return np.full_like(value, math.nan)
    if isinstance(value, dict):
        return {key: placeholder(item, use) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named: Any = type(value)
        return named(*(placeholder(item, use) for item in value))
    if type(value) is list:
        return [placeholder(item, use) for item in value]
    if type(value) is tuple:
        return tuple(placeholder(item, use) for item in value)
    return LostResult(use)


def is_evidence(value: Any) -> bool:
    """Return whether equality on several ranks implies equality on all: `value` contains a
    floating-point number. Flags and counts that differ by rank are often equal by chance."""
    if isinstance(value, dict):
        return any(map(is_evidence, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(is_evidence, value))
    if isinstance(value, torch.Tensor):
        return value.numel() > 0 and (value.is_floating_point() or value.is_complex())
    if isinstance(value, np.ndarray):
        return value.size > 0 and value.dtype.kind in "fc"
    return isinstance(value, (float, complex, np.inexact))


def is_lost(value: Any) -> bool:
    """Return whether a value is, or may have been computed from, a lost number."""
    return isinstance(value, LostTensor) or (isinstance(value, float) and math.isnan(value))


def has_nan_gradients(optimizer: Optimizer) -> bool:
    """Return whether a gradient of this rank's parameters, or of its shards of them, has a NaN."""
    found = [
        torch.isnan(local_shard(parameter.grad)).any()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    return any(bool(one) for one in found)
