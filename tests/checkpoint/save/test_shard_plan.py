"""Shard plan: every element is written exactly once, evenly, for all placements."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.rank_threads import Exchange, all_ranks, alone
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from outlast.checkpoint.format.tensor_boxes import Box
from outlast.checkpoint.save.agreed_plan import SavePlan, agree
from outlast.checkpoint.save.shard_plan import (
    WHOLE_BYTES,
    HeldBox,
    LocalTensor,
    TensorSpread,
    describe,
    divide_boxes,
    held_boxes,
)
from outlast.errors import CodecError, OutlastError, UsageError

CPU = torch.device("cpu")
MANY = 3 * WHOLE_BYTES  # bytes of a tensor that is large enough to be divided


def mesh_of(shape: tuple[int, ...], rank: int) -> DeviceMesh:
    ranks = torch.arange(math.prod(shape)).view(shape)
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)


def chunk(start: int, size: int, parts: int, index: int) -> tuple[int, int]:
    """The range of one of torch.chunk's parts, some of which may be missing."""
    pieces = torch.arange(start, start + size).chunk(parts)
    mine = pieces[index].tolist() if index < len(pieces) else []
    return (mine[0], len(mine)) if mine else (start + size, 0)


def held_by(
    rank: int, mesh: tuple[int, ...], placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> HeldBox:
    """What a rank holds of a tensor, its local shape as torch itself would tell it."""
    spread = TensorSpread(mesh_of(mesh, rank), placements, shape)
    size = list(shape)
    strided = [d for d, p in enumerate(placements) if isinstance(p, _StridedShard)]
    plain = [d for d, p in enumerate(placements) if isinstance(p, Shard)]
    coordinate = spread.mesh.get_coordinate()
    assert coordinate is not None
    for d in (*plain, *strided):
        dim = placements[d].dim  # pyright: ignore[reportAttributeAccessIssue]
        size[dim] = chunk(0, size[dim], mesh[d], coordinate[d])[1]
    (held,) = held_boxes({"t": LocalTensor(torch.float32, tuple(size), True, CPU, spread)})
    return held


def cover(boxes: list[Box], shape: tuple[int, ...]) -> torch.Tensor:
    """How many boxes contain each element."""
    count = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        count[box.slices] += 1
    return count


@st.composite
def spreads(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...]]:
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    either: st.SearchStrategy[Any] = st.one_of(st.just(Replicate()), dims.map(Shard))
    return mesh, tuple(draw(either) for _ in mesh), shape


@settings(max_examples=150)
@given(spreads())
def test_boxes_cover_every_element_once_a_replica(
    case: tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...]],
) -> None:
    mesh, placements, shape = case
    held = [held_by(rank, mesh, placements, shape) for rank in range(math.prod(mesh))]
    replicas = math.prod(n for n, p in zip(mesh, placements, strict=True) if p.is_replicate())
    assert (cover([item.box for item in held], shape) == replicas).all()
    for rank, item in enumerate(held):
        assert rank in item.holders
        assert len(item.holders) == replicas
        assert all(held[other].box == item.box for other in item.holders)


@pytest.mark.parametrize(("rows", "dp", "tp"), [(8, 2, 2), (9, 4, 2), (7, 2, 3), (5, 4, 1)])
def test_fsdp_over_tensor_parallel_is_cut_by_tensor_parallel_first(
    rows: int, dp: int, tp: int
) -> None:
    """Also where the rows do not divide: there, torch's own function names wrong offsets."""
    placements = (_StridedShard(0, split_factor=tp), Shard(0))
    held = [held_by(rank, (dp, tp), placements, (rows, 3)) for rank in range(dp * tp)]
    for rank, item in enumerate(held):
        start, size = chunk(*chunk(0, rows, tp, rank % tp), dp, rank // tp)
        assert (item.box.start[0], item.box.size[0]) == (start, size)
    assert (cover([item.box for item in held], (rows, 3)) == 1).all()


def test_placements_without_boxes_are_refused_by_name() -> None:
    with pytest.raises(CodecError, match=r"^t has the placement P\(sum\), which is no box"):
        held_by(0, (2,), (Partial(),), (4,))
    with pytest.raises(CodecError, match=r"^t has the placement .* whose pieces are no boxes"):
        held_by(0, (2, 2), (Shard(0), _StridedShard(0, split_factor=2)), (8,))
    wrong = LocalTensor(
        torch.float32, (3,), True, CPU, TensorSpread(mesh_of((2,), 0), (Shard(0),), (4,))
    )
    with pytest.raises(CodecError, match=r"^t is \(3,\) here where its placements .* give \(2,\)"):
        held_boxes({"t": wrong})


def test_a_mesh_without_this_rank_gives_it_nothing() -> None:
    elsewhere = DeviceMesh("cpu", [1, 2], _init_backend=False, _rank=0)
    local = LocalTensor(torch.float32, (0,), True, CPU, TensorSpread(elsewhere, (Shard(0),), (4,)))
    assert held_boxes({"t": local}) == []


class Quantised(torch.Tensor):
    """Codes in its memory, and their scale beside it."""

    scale: Any = 1


class Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError


def quantised(scale: Any) -> Quantised:
    codes = torch.zeros(4, dtype=torch.int8).as_subclass(Quantised)
    codes.scale = scale
    return codes


def freed() -> torch.Tensor:
    """Return a part of a tensor whose storage has been given back."""
    part = torch.zeros(8)[4:]
    part.untyped_storage().resize_(0)
    return part


def wrapper() -> torch.Tensor:
    """Return a tensor that has a shape, and no memory of its own."""
    return torch.Tensor._make_wrapper_subclass(Wrapper, (4,), dtype=torch.float32)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (freed(), "has no memory"),
        (wrapper(), "has no memory"),
        (quantised(0.5), r"is a Quantised, whose attributes \(scale\) are values"),
        (quantised([torch.ones(1)]), r"is a Quantised, whose attributes \(scale\)"),
        (
            quantised(SimpleNamespace(absmax=torch.ones(1))),
            r"is a Quantised, whose attributes \(scale\)",
        ),
        (torch.empty(2, device="meta"), "is on the meta device"),
        (torch.eye(2).to_sparse(), "is a sparse tensor"),
        (torch.empty(2, dtype=torch.uint8).view(torch.uint4), "is of type torch.uint4"),
        ("text", "is a str and no tensor"),
    ],
)
def test_tensors_without_plain_bytes_are_refused_by_name(tensor: Any, reason: str) -> None:
    with pytest.raises(CodecError, match=f"^model.weight {reason}.*nothing was saved"):
        describe({"model.weight": tensor})


@settings(max_examples=60)
@given(
    st.integers(1, 7),
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 300), max_size=2).map(tuple),
            st.sampled_from([torch.bool, torch.bfloat16, torch.float32, torch.complex128]),
        ),
        max_size=6,
    ),
)
def test_holders_divide_boxes_evenly(
    holders: int, tensors: list[tuple[tuple[int, ...], torch.dtype]]
) -> None:
    everyone = tuple(range(holders))
    held = [
        HeldBox(str(number), dtype, shape, Box.whole(shape), everyone)
        for number, (shape, dtype) in enumerate(tensors)
    ]
    shares = [divide_boxes(held, rank) for rank in everyone]
    for item in held:
        ranges = sorted(
            (share.first, share.last) for mine in shares for share in mine if share.held_box is item
        )
        cuts = [0, *(last for _, last in ranges)]
        assert cuts[-1] == item.box.elements
        assert ranges == [*pairwise(cuts)]
        assert item.size_bytes >= WHOLE_BYTES or len(ranges) <= 1
    sizes = [sum(share.size_bytes for share in mine) for mine in shares]
    mean = sum(item.size_bytes for item in held) / holders
    assert all(abs(size - mean) <= WHOLE_BYTES for size in sizes)


def test_small_tensors_are_the_first_holders() -> None:
    held = [
        HeldBox(name, torch.float32, (n,), Box((0,), (n,)), (2, 5)) for name, n in SIZES.items()
    ]
    assert [share.held_box.name for share in divide_boxes(held, 2)] == ["mean", "steps", "a"]
    assert [share.held_box.name for share in divide_boxes(held, 5)] == ["a", "b"]


SIZES = {"a": 100_000, "b": 90_000, "mean": 64, "steps": 1}


def plans(
    world: int,
    tensors: Mapping[int, Mapping[str, torch.Tensor]],
    rank_specific: tuple[str, ...] = (),
) -> list[SavePlan | OutlastError]:
    """What each of `world` ranks, which hold these tensors, agrees on with the others."""

    def one(rank: int, exchange: Exchange) -> SavePlan:
        table, sources = describe(tensors[rank])
        return agree(
            held_boxes(table),
            sources,
            rank=rank,
            world=world,
            exchange=exchange,
            rank_specific=rank_specific,
        )

    return all_ranks(world, one)


def written(plan: SavePlan | OutlastError) -> dict[str, int]:
    assert isinstance(plan, SavePlan), plan
    return {share.held_box.name: share.size_bytes for share in plan.shares}


def test_equal_tables_are_replicas_and_others_are_not() -> None:
    first, second = {"stage0.w": torch.ones(MANY // 4)}, {"stage1.w": torch.ones(MANY // 4)}
    found = plans(4, {0: first, 1: first, 2: second, 3: second})
    assert [written(plan) for plan in found] == [
        {"stage0.w": MANY // 2 // 4096 * 4096},
        {"stage0.w": MANY - MANY // 2 // 4096 * 4096},
        {"stage1.w": MANY // 2 // 4096 * 4096},
        {"stage1.w": MANY - MANY // 2 // 4096 * 4096},
    ]
    assert len({plan.digest for plan in found if isinstance(plan, SavePlan)}) == 1


def test_a_plan_depends_on_the_tensors_of_all_ranks() -> None:
    shared = {"w": torch.ones(3)}
    before = plans(2, {0: shared, 1: {**shared, "x": torch.ones(1)}})[0]
    after = plans(2, {0: shared, 1: {**shared, "y": torch.ones(1)}})[0]
    assert isinstance(before, SavePlan) and isinstance(after, SavePlan)
    assert before.digest != after.digest


def test_replicas_with_different_values_are_refused() -> None:
    ranks = {rank: {"w": torch.full((MANY // 4,), float(rank // 2))} for rank in range(3)}
    for refusal in plans(3, ranks):
        assert isinstance(refusal, UsageError)
        assert "ranks 0, 1, 2 are replicas" in str(refusal)
        assert "do not hold the same: w;" in str(refusal)


def test_small_buffers_may_differ_and_nothing_else_may() -> None:
    values = [torch.full((8,), float(rank)) for rank in range(2)]
    buffers = {rank: {"bn.running_mean": value} for rank, value in enumerate(values)}
    found = plans(2, buffers, rank_specific=("bn.running_mean",))
    assert [written(plan) for plan in found] == [{"bn.running_mean": 32}, {}]
    for refusal in plans(2, buffers):
        assert "do not hold the same: bn.running_mean;" in str(refusal)
    models = {rank: {"w": torch.nn.Parameter(value)} for rank, value in enumerate(values)}
    for refusal in plans(2, models):
        assert isinstance(refusal, UsageError)
        assert "do not hold the same: w;" in str(refusal)


def test_all_holders_of_a_box_must_list_each_other() -> None:
    placements = (Replicate(),)

    def one(rank: int, exchange: Exchange) -> SavePlan:
        local = LocalTensor(
            torch.float32, (4,), True, CPU, TensorSpread(mesh_of((2,), rank), placements, (4,))
        )
        table = {"both": local, **({"mine": local} if rank == 0 else {})}
        sources = dict.fromkeys(table, torch.ones(4))
        return agree(held_boxes(table), sources, rank=rank, world=2, exchange=exchange)

    for refusal in all_ranks(2, one):
        assert isinstance(refusal, UsageError)
        assert "do not hold the same: mine;" in str(refusal)


def test_a_mesh_of_other_ranks_than_those_that_save_is_refused() -> None:
    spread = TensorSpread(
        DeviceMesh("cpu", [2, 3], _init_backend=False, _rank=2), (Replicate(),), (4,)
    )
    held = held_boxes({"t": LocalTensor(torch.float32, (4,), True, CPU, spread)})
    with pytest.raises(
        UsageError, match=r"^rank 0: t lies on rank 3 of its mesh, where rank 0 of 1 saves it"
    ):
        agree(held, {"t": torch.ones(4)}, rank=0, world=1, exchange=alone)


def test_an_exchange_that_mixes_ranks_up_is_noticed() -> None:
    table, sources = describe({"w": torch.ones(3)})
    with pytest.raises(UsageError, match="exchange gave rank 1"):
        agree(
            held_boxes(table), sources, rank=1, world=2, exchange=lambda m: [m, alone(b"\x90")[0]]
        )


def _changed(how: str, tensor: torch.Tensor) -> Any:
    """The same object where that is possible."""
    match how:
        case "other memory":
            tensor.data = torch.ones(4, 6)
        case "dtype":
            tensor.data = tensor.data.to(torch.bfloat16)
        case "shape":
            tensor.data = torch.zeros(24)
        case "strides":
            tensor.data = torch.zeros(6, 4).t()
        case "negative bit":
            tensor.data = torch.ops.aten._neg_view(tensor.data)
        case "freed":
            tensor.untyped_storage().resize_(0)
        case "device":
            tensor = torch.empty(4, 6, device="meta")
        case "layout":
            tensor = torch.zeros(4, 6).to_sparse()
        case "type":
            return tensor.tolist()
    return tensor


@pytest.mark.parametrize("how", ["other memory", "dtype", "shape", "strides", "negative bit",
                                 "freed", "device", "layout", "type"])  # fmt: skip
def test_a_table_that_is_known_hides_no_change(how: str) -> None:
    tensors = {"a": nn.Parameter(torch.zeros(4, 6)), "b": torch.zeros(3)}
    known = describe(tensors).table
    assert describe(tensors, known).table["a"] is known["a"]
    changed = tensors | {"a": _changed(how, tensors["a"])}
    try:
        expected = describe(changed)
    except CodecError as error:
        with pytest.raises(CodecError, match=re.escape(str(error))):
            describe(changed, known)
        return
    found = describe(changed, known)
    assert found.table == expected.table
    assert found.sources["a"] is changed["a"]
    assert (found.table == known) == (how == "other memory")
