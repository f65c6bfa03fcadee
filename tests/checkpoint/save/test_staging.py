"""Staging: positions of pieces in a shard, and exact copies."""

from __future__ import annotations

import pytest
import torch

from outlast.checkpoint.format.manifests import CHUNK_BYTES, Tensor
from outlast.checkpoint.format.tensor_boxes import Box
from outlast.checkpoint.save.shard_plan import WHOLE_BYTES, HeldBox, ShardShare, describe
from outlast.checkpoint.save.staging import ArenaLayout, StagingCopies, lay_blobs, lay_out


def held(name: str, tensor: torch.Tensor, ranks: tuple[int, ...] = (0,)) -> HeldBox:
    shape = tuple(tensor.shape)
    return HeldBox(name, tensor.dtype, shape, Box.whole(shape), ranks)


def laid(shares: list[ShardShare]) -> ArenaLayout:
    return lay_out(
        {share.held_box.name: Tensor("any", share.held_box.shape) for share in shares}, shares
    )


def staged(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """The bytes of a shard that holds these elements of a tensor and nothing else."""
    table, sources = describe({"t": tensor})
    layout = laid([ShardShare(held("t", tensor), first, last)])
    memory = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    StagingCopies(memory, layout, table).run(sources, waiting=True)
    return memory[: (last - first) * tensor.itemsize]


def test_pieces_lie_at_multiples_of_their_elements_and_large_ones_at_blocks() -> None:
    tensors = {
        "flags": torch.ones(3, dtype=torch.bool),
        "large": torch.ones(WHOLE_BYTES // 4),
        "phase": torch.ones(2, dtype=torch.complex128),
    }
    shares = [ShardShare(held(name, each), 0, each.numel()) for name, each in tensors.items()]
    layout = laid(shares)
    assert [(piece.name, piece.at) for piece in layout.pieces] == [
        ("flags", 0),
        ("large", 4096),
        ("phase", 4096 + WHOLE_BYTES),
    ]
    assert layout.size_bytes == 2 * 4096 + WHOLE_BYTES


def test_a_range_within_rows_is_several_boxes_one_after_the_other() -> None:
    share = ShardShare(held("t", torch.zeros(4, 5, dtype=torch.int16)), 3, 17)
    assert [(piece.start, piece.size, piece.at) for piece in laid([share]).pieces] == [
        ((0, 3), (1, 2), 0),
        ((1, 0), (2, 5), 4),
        ((3, 0), (1, 2), 24),
    ]


def test_boxes_have_coordinates_of_the_global_tensor() -> None:
    part = HeldBox("t", torch.float32, (10, 4), Box((6, 2), (3, 2)), (0,))
    (piece,) = laid([ShardShare(part, 2, 6)]).pieces
    assert (piece.start, piece.size) == ((7, 2), (2, 2))


def test_tensors_are_listed_by_their_writers_and_empty_ones_by_all() -> None:
    known = {"a": Tensor("float32", (2,)), "b": Tensor("float32", (2,)), "e": Tensor("bool", (0,))}
    layout = lay_out(known, [ShardShare(held("a", torch.ones(2)), 0, 2)])
    assert list(layout.tensors) == ["a", "e"]


@pytest.mark.parametrize(
    ("chunks", "region", "behind"),
    [(0.01, 0, 0.01), (0.8, 0, 0.8), (0.9, 1, 1), (1, 1, 1), (1.5, 1, 1.5), (2.9, 3, 3)],
)
def test_a_frozen_region_is_whole_chunks_with_little_padding(
    chunks: float, region: int, behind: float
) -> None:
    """Where too much of it would be padding, a rest lies behind it, or all where it always did."""
    shape = (int(chunks * CHUNK_BYTES) // 4096 * 1024,)
    sizes = {"a": (1024,), "b": shape, "c": (1024,)}
    shares = [
        ShardShare(HeldBox(name, torch.float32, size, Box.whole(size), (0,)), 0, size[0])
        for name, size in sizes.items()
    ]
    layout = lay_out({}, shares, {"b"})
    assert layout.frozen_bytes == region * CHUNK_BYTES
    at = {piece.name: piece.at for piece in layout.pieces}
    if region:
        first = max(shape[0] * 4, layout.frozen_bytes)
        assert at == {"b": 0, "a": first, "c": first + 4096}
        assert abs(first - behind * CHUNK_BYTES) < 4096
    else:
        assert layout == lay_out({}, shares)
    assert [each.at for each in layout.laid] == [piece.at for piece in layout.pieces]


def test_blobs_begin_at_blocks() -> None:
    blobs, end = lay_blobs(8192, {"own": 5000, "shared": 0, "more": 1})
    assert [(blob.name, blob.at, blob.size_bytes) for blob in blobs] == [
        ("own", 8192, 5000),
        ("shared", 16384, 0),
        ("more", 16384, 1),
    ]
    assert end == 20480


NUMBERS = torch.arange(120, dtype=torch.float32)
COMPLEX = torch.randn(6, 20, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "tensor",
    [
        NUMBERS.view(6, 20),
        NUMBERS.view(6, 20).t(),
        NUMBERS.view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        NUMBERS.view(12, 10)[::2, 1:7],
        torch.tensor(5.0).expand(3, 40),
        COMPLEX,
        COMPLEX.conj(),
        COMPLEX.conj().imag,
        torch.nn.Parameter(NUMBERS.view(6, 20).clone()),
    ],
    ids=[
        "rows",
        "transposed",
        "channels last",
        "strided",
        "expanded",
        "complex",
        "conjugate",
        "negative",
        "parameter",
    ],
)
def test_copies_bring_elements_in_order(tensor: torch.Tensor, threads: int) -> None:
    """Any strides, lazy conjugates and signs, with one thread and with several."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        for first, last in ((0, flat.numel()), (7, flat.numel() - 3), (1, 2)):
            expected = flat[first:last].view(torch.uint8)
            assert torch.equal(staged(tensor, first, last), expected)
    finally:
        torch.set_num_threads(before)


def test_copies_take_the_tensors_they_are_given() -> None:
    """Not the ones that they were made with."""
    table, _ = describe({"t": torch.zeros(4)})
    layout = laid([ShardShare(held("t", torch.zeros(4)), 0, 4)])
    memory = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    copies = StagingCopies(memory, layout, table)
    for value in (1.0, 2.0):
        copies.run({"t": torch.full((4,), value)}, waiting=True)
        assert memory[:16].view(torch.float32).tolist() == [value] * 4
