"""Value encoder: round trips, and detection of damage."""

from __future__ import annotations

import math
import pathlib
import random
import struct
import warnings
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint.format import codec
from outlast.checkpoint.format.value_encoder import DIGEST_BYTES, seal
from outlast.errors import CodecError, CorruptionError

DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and "q" not in str(d)}, key=str
)


def same(a: Any, b: Any) -> bool:
    """Equal in type and in each bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.shape, a.dtype) == (b.shape, b.dtype) and codec.raw(a) == codec.raw(b)
    if isinstance(a, np.ndarray | np.generic):
        return (a.shape, a.dtype) == (b.shape, b.dtype) and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        factories = getattr(a, "default_factory", None), getattr(b, "default_factory", None)
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and factories[0] is factories[1] and all(
            same(x, y) for x, y in pairs
        )  # fmt: skip
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, set | frozenset):
        return sorted(map(codec.encode, a)) == sorted(map(codec.encode, b))
    return a == b


KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
TENSORS = st.builds(
    lambda shape, seed, dtype: (
        torch.empty(shape).uniform_(-99, 99, generator=torch.Generator().manual_seed(seed))
    ).to(dtype),
    st.lists(st.integers(0, 3), max_size=3), st.integers(0, 99),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool,
                     torch.complex64]),
)  # fmt: skip
LEAVES = KEYS | TENSORS | st.complex_numbers() | st.integers(-(2**200), 2**200)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=12)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(st.integers(-(2**70), 2**70), min_size=6)
        | st.lists(st.floats(), min_size=6).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4).map(OrderedDict)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4).map(
            lambda d: defaultdict(list, d)
        )
        | st.sets(KEYS, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES)
@settings(max_examples=200)
def test_round_trip(value: Any) -> None:
    assert same(codec.decode(codec.encode(value)), value)
    schema, tensors = codec.flatten(value)
    assert same(codec.unflatten(schema, tensors), value)
    assert [(t.shape, t.dtype) for t in tensors] == [s[:2] for s in codec.layout(schema)]


@given(VALUES, st.data())
@settings(max_examples=150)
def test_damage_is_found(value: Any, data: st.DataObject) -> None:
    blob = codec.encode(value)
    bit = data.draw(st.integers(0, 8 * len(blob) - 1))
    flipped = bytearray(blob)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptionError):
        codec.decode(bytes(flipped))
    with pytest.raises(CorruptionError):
        codec.decode(blob[: data.draw(st.integers(0, len(blob) - 1))])
    with pytest.raises(CorruptionError):
        codec.decode(blob + b"\0")


def test_every_bit_of_a_small_value() -> None:
    blob = codec.encode({"step": 3, "w": torch.arange(3.0)})
    schema = codec.flatten({"step": 3, "w": torch.arange(3.0)})[0]
    for whole, read in ((blob, codec.decode), (schema, codec.layout)):
        for bit in range(8 * len(whole)):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises(CorruptionError):
                read(bytes(flipped))
        for end in range(len(whole)):
            with pytest.raises(CorruptionError):
                read(whole[:end])


@given(st.binary(max_size=60))
@settings(max_examples=300)
def test_a_forged_schema_is_refused_or_read(body: bytes) -> None:
    """With a right digest over nonsense: an answer or a typed error, never anything else."""
    try:
        codec.layout(seal(body))
    except CorruptionError:
        return


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 2), (), (0, 4)])
def test_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some dtypes are new and say so
        tensor = torch.empty(shape, dtype=dtype)
        raw = codec.raw(tensor)
        raw[:] = bytes(1 if dtype is torch.bool else (7 * i + 1) % 256 for i in range(len(raw)))
        assert same(codec.decode(codec.encode(tensor)), tensor)


@pytest.mark.parametrize(
    "value",
    [
        Counter("abca"), Counter(), defaultdict(None, a=1), defaultdict(set), float("nan"), -0.0,
        struct.unpack("<d", b"\1\0\0\0\0\0\xf8\x7f")[0], complex(math.nan, -0.0), "\ud800",
        torch.Size([2, 3]), torch.Size([]), torch.bfloat16, torch.device("cuda:1"),
        pathlib.Path("a/b"), pathlib.PurePosixPath("/x"), {True: "bool", 0: "int"}, [True] * 9,
        [1, *[2.0] * 9], [2**63] * 9, (-(2**63),) * 9, [2**32] * 9, (2**32 - 1,) * 9,
        np.float32(1.5), np.bool_(True), np.str_("abc"), np.datetime64("2026-01-02"), np.int8(-3),
        np.array(5), np.zeros((0, 3)), np.array(["a", "bcd"]), np.arange(6).reshape(2, 3).T,
        np.zeros(3, dtype=[("a", "<i4"), ("b", ">f8", (2,))]), np.float64(1) * np.nan,
        np.arange(4, dtype=">u2"), random.getstate(), np.random.get_state(legacy=False),
        np.random.default_rng(3).bit_generator.state, torch.get_rng_state(),
        torch.empty(2, 3, dtype=torch.complex64).conj().resolve_conj(), torch.zeros(0)[::2],
    ],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_kinds(value: Any) -> None:
    assert same(codec.decode(codec.encode(value)), value)


def test_random_generators_go_on() -> None:
    states = codec.decode(
        codec.encode((random.getstate(), np.random.get_state(), torch.get_rng_state()))
    )
    drawn = random.random(), np.random.rand(), torch.rand(1)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    assert (random.random(), np.random.rand(), torch.rand(1)) == drawn


def test_module_state_keeps_its_versions() -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    again = codec.decode(codec.encode(state))
    assert again._metadata == state._metadata != {}


def test_optimizer_and_scheduler() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    for state in (optimizer.state_dict(), scheduler.state_dict()):
        assert same(codec.decode(codec.encode(state)), state)


def test_strided_views_become_contiguous() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    for view in (base.t(), base[:, 1::2], base.expand(2, 3, 4), torch.view_as_complex(
            base.reshape(3, 2, 2)).conj(), base.requires_grad_()):  # fmt: skip
        again = codec.decode(codec.encode(view))
        assert torch.equal(again, view.detach())
        assert again.is_contiguous() and not again.requires_grad


def test_tensors_are_handed_over_by_reference() -> None:
    weight = torch.nn.Parameter(torch.rand(4))
    _, tensors = codec.flatten({"weight": weight})
    assert tensors[0].data_ptr() == weight.data_ptr()
    codec.raw(tensors[0])[:] = bytes(16)
    assert torch.equal(weight.detach(), torch.zeros(4))


def test_decoded_values_own_their_memory() -> None:
    blob = codec.encode({"a": np.arange(3), "t": torch.arange(3)})
    first, second = codec.decode(blob), codec.decode(blob)
    first["a"][0] = first["t"][0] = 9
    assert second["a"][0] == second["t"][0] == 0


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (
            {"scheduler": {"lr_lambdas": [lambda e: e]}},
            r"^scheduler\.lr_lambdas\[0\] is a function",
        ),
        ({"a b": [Pair(1, 2)]}, r"^\['a b'\]\[0\] is a .*Pair"),
        (torch.nn.Linear(1, 1), r"^the value is a torch\.nn\.modules\.linear\.Linear"),
        ({"x": {torch.zeros(1): 1}}, r"has a tensor as a key"),
        ([np.array([object()])], r"^\[0\] is of NumPy dtype object"),
        ([torch.zeros(2, device="meta")], r"^\[0\] is a tensor that is not plain memory"),
        ([torch.eye(2).to_sparse()], r"^\[0\] is a tensor that is not plain memory"),
        ({"d": defaultdict(lambda: 1)}, r"^d is a defaultdict of"),
        ((range(3),), r"^\[0\] is a builtins\.range"),
        ({("k", Pair(1, 2)): 0}, "Pair"),
    ],
)
def test_refused_by_place(value: Any, place: str) -> None:
    with pytest.raises(CodecError, match=place):
        codec.encode(value)


def test_cycles_and_depth() -> None:
    loop: dict[str, Any] = {"a": []}
    loop["a"].append(loop)
    with pytest.raises(CodecError, match=r"^a\[0\] contains itself"):
        codec.encode(loop)
    shared = [1]
    assert codec.decode(codec.encode([shared, shared])) == [[1], [1]]
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(CodecError, match="nested deeper"):
        codec.encode(deep)


def test_sets_do_not_depend_on_their_history() -> None:
    names = [f"name{i}" for i in range(40)]
    backwards = names[::-1]
    assert codec.encode(set(names)) == codec.encode(set(backwards))


def test_a_schema_fits_only_its_tensors() -> None:
    schema, tensors = codec.flatten([torch.zeros(2), torch.zeros(3)])
    for wrong in ([tensors[0]], [*tensors, tensors[0]], tensors[::-1],
                  [tensors[0], tensors[1].double()]):  # fmt: skip
        with pytest.raises(CorruptionError):
            codec.unflatten(schema, wrong)


def test_digest_sees_schema_and_bytes() -> None:
    told = {
        codec.encode(value)[-DIGEST_BYTES:]
        for value in ([torch.zeros(2)], [torch.zeros(1, 2)], [torch.tensor([0.0, -0.0])],
                      (torch.zeros(2),), [torch.zeros(2, dtype=torch.int32)])
    }  # fmt: skip
    assert len(told) == 5


def test_the_format_is_a_promise() -> None:
    """These bytes were written by the first version; they must be readable for ever."""
    value = {"n": 1, "w": torch.tensor([1.5]), "s": (None, True, 2.5, b"x", "é", {3})}
    assert codec.encode(value).hex() == GOLDEN
    assert same(codec.decode(bytes.fromhex(GOLDEN)), value)


GOLDEN = (
    "4f4c4231a2000000000000004f4c5331c849dab9fea83fb364030000000000000073010000000000"
    "00006e69010000000000000073010000000000000077540700000000000000666c6f617433320300"
    "00000000000063707508000000000000000100000000000000730100000000000000737406000000"
    "000000004e2b66000000000000044062010000000000000078730200000000000000c3a965010000"
    "00000000006903000000000000000000c03f374983a4e9fc4f7e87df68c31e8ae9e4"
)


def test_a_node_that_is_written_already_gives_the_same_bytes() -> None:
    value = {"a": [1, "x"], "t": torch.arange(5.0), "n": np.arange(3), "e": torch.empty(0)}
    plain = {"first": torch.ones(2), "inner": value, "last": torch.zeros(1)}
    placed = plain | {"inner": codec.encode_node(value)}
    assert codec.encode(placed) == codec.encode(plain)
    schema, tensors = codec.flatten(placed)
    assert schema == codec.flatten(plain)[0]
    assert [codec.raw(each).tobytes() for each in tensors] == [
        codec.raw(each).tobytes() for each in codec.flatten(plain)[1]
    ]
