"""Answers of collectives in a closed generation: defined bytes, right shapes, small counts.

Used in dry steps, and inside backward once a generation is closed. Outputs contain this rank's own
contribution where it has one (in every slot of a gather), and zeros for other ranks' data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Tensors = list[torch.Tensor]
COUNT_MAX = 1 << 20  # bound of substituted integers, which the script may use as sizes
_COUNTS = (torch.int64, torch.int32, torch.uint64, torch.uint32)
_NONE = b"N."  # pickle of None, the shortest pickle
_OBJECT_FUNCTIONS = {"broadcast_object_list", "scatter_object_list", "recv_object_list"}


class RankPlace(NamedTuple):
    """Rank and size of this process in the group."""

    rank: int
    size: int


def answer(op: str, place: RankPlace, args: Sequence[Any]) -> Tensors:
    """Fill and return the outputs of `op`; `args` are those of ProcessGroup's method."""
    with torch.no_grad():
        return _ANSWERS[op](place, *args)


def outputs_of(op: str, args: Sequence[Any]) -> Tensors:
    """Return the tensors that `op` writes (for a send: the tensors that it reads)."""
    return [] if op == "barrier" else _flat(args[0])


def any_source(place: RankPlace) -> int:
    """Return a rank that an any-source receive may report as its source."""
    return (place.rank + 1) % place.size


def _flat(value: Any) -> Tensors:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _flat(part)]


def root_of(options: Any) -> int:
    """Return the root in the options of a broadcast or a reduce."""
    return int(getattr(options, "rootRank", options))


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source`; if sizes differ (uneven parts), copy what fits and zero the remainder."""
    if target.numel() == source.numel():
        target.copy_(source.reshape(target.shape))
        return
    target.zero_()
    count = min(target.numel(), source.numel())
    if count:
        target.view(-1)[:count].copy_(source.reshape(-1)[:count])


def _unknown(target: torch.Tensor) -> None:
    """Fill data that only another rank has with zeros. torch's object collectives read a size and
    then a pickle; they get the pickle of None and its size."""
    target.zero_()
    if not _for_objects():
        return
    if target.dtype == torch.uint8:
        pattern = torch.frombuffer(bytearray(_NONE), dtype=torch.uint8)
        flat = target.view(-1)
        flat.copy_(pattern.repeat(-(-flat.numel() // 2))[: flat.numel()])
    elif target.dtype == torch.int64:
        target.fill_(len(_NONE))


def _for_objects() -> bool:
    frame = sys._getframe(2)  # noqa: SLF001 - dry answers only, not during steps
    for _ in range(12):
        if frame is None:
            return False
        if frame.f_code.co_name in _OBJECT_FUNCTIONS:
            return frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d"
        frame = frame.f_back
    return False


def _own(_: RankPlace, tensors: Any, *__: Any) -> Tensors:
    return _flat(tensors)


def _broadcast(place: RankPlace, tensors: Any, options: Any, *_: Any) -> Tensors:
    outputs = _flat(tensors)
    if root_of(options) != place.rank:
        for tensor in outputs:
            if _for_objects():
                _unknown(tensor)
            elif tensor.dtype in _COUNTS:
                signed = tensor.dtype in (torch.int64, torch.int32)
                tensor.clamp_(-COUNT_MAX if signed else 0, COUNT_MAX)
    return outputs


def _allgather(_: RankPlace, outputs: Any, inputs: Any, *__: Any) -> Tensors:
    sources = _flat(inputs)
    lists = [outputs] if isinstance(outputs[0], torch.Tensor) else outputs
    for slots, source in zip(lists, sources, strict=True):
        for slot in slots:
            _fill(slot, source)
    return _flat(outputs)


def _allgather_coalesced(_: RankPlace, outputs: Any, inputs: Any, *__: Any) -> Tensors:
    for of_rank in outputs:  # here the outer list is over ranks
        for slot, source in zip(of_rank, inputs, strict=True):
            _fill(slot, source)
    return _flat(outputs)


def _all_gather_single(place: RankPlace, output: Any, inputs: Any, *_: Any) -> Tensors:
    for target, source in zip(_flat(output), _flat(inputs), strict=True):
        _fill(target, source.reshape(-1).repeat(place.size))
    return _flat(output)


def _reduce_scatter(place: RankPlace, outputs: Any, inputs: Any, *_: Any) -> Tensors:
    lists = [inputs] if isinstance(inputs[0], torch.Tensor) else inputs
    for target, parts in zip(_flat(outputs), lists, strict=True):
        _fill(target, parts[place.rank])
    return _flat(outputs)


def _reduce_scatter_single(place: RankPlace, output: Any, inputs: Any, *_: Any) -> Tensors:
    for target, source in zip(_flat(output), _flat(inputs), strict=True):
        count = target.numel()
        _fill(target, source.reshape(-1)[place.rank * count : (place.rank + 1) * count])
    return _flat(output)


def _gather(place: RankPlace, outputs: Any, inputs: Any, options: Any, *_: Any) -> Tensors:
    if root_of(options) != place.rank or not outputs:
        return []
    return _allgather(place, outputs, inputs)


def _gather_single(place: RankPlace, output: Any, inputs: Any, options: Any, *_: Any) -> Tensors:
    return _all_gather_single(place, output, inputs) if root_of(options) == place.rank else []


def _scatter(place: RankPlace, outputs: Any, inputs: Any, options: Any, *_: Any) -> Tensors:
    if root_of(options) == place.rank and inputs:
        return _reduce_scatter(place, outputs, inputs)
    for target in _flat(outputs):
        _unknown(target)
    return _flat(outputs)


def _alltoall(place: RankPlace, outputs: Any, inputs: Any, *_: Any) -> Tensors:
    own = inputs[place.rank]
    for slot, (target, source) in enumerate(zip(outputs, inputs, strict=True)):
        if target.numel() == source.numel() or slot == place.rank:
            _fill(target, source)
        else:
            _fill(target, own)
    return _flat(outputs)


def _alltoall_single(_: RankPlace, output: Any, inputs: Any, *__: Any) -> Tensors:
    _fill(output, inputs)
    return [output]


def _nothing(_: RankPlace, *__: Any) -> Tensors:
    return []


def _receive(_: RankPlace, tensors: Any, *__: Any) -> Tensors:
    outputs = _flat(tensors)
    for target in outputs:
        _unknown(target)
    return outputs


_ANSWERS: dict[str, Callable[..., Tensors]] = {
    "allreduce": _own,
    "allreduce_coalesced": _own,
    "broadcast": _broadcast,
    "reduce": _own,
    "allgather": _allgather,
    "allgather_coalesced": _allgather_coalesced,
    "all_gather_single": _all_gather_single,
    "all_gather_single_coalesced": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter_single_coalesced": _reduce_scatter_single,
    "gather": _gather,
    "gather_single": _gather_single,
    "scatter": _scatter,
    "alltoall": _alltoall,
    "all_to_all_single": _alltoall_single,
    "barrier": _nothing,
    "send": _nothing,
    "recv": _receive,
    "recv_anysource": _receive,
}
OPS = frozenset(_ANSWERS)
