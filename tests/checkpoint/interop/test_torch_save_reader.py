"""Reader of torch.save files as data, and refusal of hostile pickles."""

from __future__ import annotations

import io
import os
import pickletools
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.interop.dcp_states import bits, flat

from outlast import pickle_reader
from outlast.checkpoint.interop import torch_save_reader
from outlast.checkpoint.interop.torch_save_reader import StoredTensor, open_torch_save
from outlast.errors import CodecError, CorruptionError, OutlastError

VALUES: list[Any] = [
    None,
    True,
    -5,
    1 << 80,
    2.5,
    complex(1, -2),
    "text \u20ac",
    b"bytes\xff",
    (1, (2,)),
    [1, [2, {}]],
    {"a": 1, 2: "b", (1, "x"): None},
    {1, 2},
    frozenset({3}),
    OrderedDict(a=1, b=OrderedDict()),
    torch.Size([2, 3]),
    torch.float32,
    torch.device("cuda", 1),
    torch.nn.Linear(2, 3).state_dict(),
    torch.nn.Parameter(torch.ones(2)),
    {"t": torch.arange(6).view(2, 3).t(), "u": torch.ones(3, dtype=torch.uint16)},
    torch.arange(10.0)[3:7],
    torch.zeros(0, 3),
    torch.tensor(1, dtype=torch.float8_e5m2),
]


def saved(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


def loaded(path: Path) -> Any:
    file = os.open(path, os.O_RDONLY)
    try:
        with open_torch_save(file, 0, path.stat().st_size, str(path)) as found:
            return found.plain()
    finally:
        os.close(file)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_plain_values_round_trip(tmp_path: Path, value: Any) -> None:
    found = loaded(saved(value, tmp_path / "x"))
    assert type(found) is type(value) or isinstance(value, torch.nn.Parameter)
    one, two = ({k: bits(v) for k, v in flat(each).items()} for each in (found, value))
    assert one == two


def loop() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def laughs() -> list[Any]:
    value: list[Any] = []
    for _ in range(40):
        value = [value, value]
    return value


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(200):
        value = [value]
    return value


@pytest.mark.parametrize("make", [loop, laughs, deep])
def test_values_that_never_end_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]
) -> None:
    monkeypatch.setattr(torch_save_reader, "_VALUES_MAX", 10_000)
    with pytest.raises(CodecError, match="too deep or too large"):
        loaded(saved(make(), tmp_path / "x"))


def test_a_tensor_that_is_named_many_times_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_save_reader, "_OBJECT_BYTES_MAX", 1000)
    assert len(loaded(saved([torch.ones(25)] * 10, tmp_path / "x"))) == 10
    with pytest.raises(CodecError, match="more bytes than a value should"):
        loaded(saved([torch.ones(25)] * 11, tmp_path / "x"))


@pytest.mark.parametrize("value", ["x" * 500, b"x" * 500, 1 << 4000, {"x" * 500: 1}, {"x" * 500}])
def test_a_value_that_is_named_many_times_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    monkeypatch.setattr(torch_save_reader, "_OBJECT_BYTES_MAX", 1200)
    assert len(loaded(saved([value] * 2, tmp_path / "x"))) == 2
    with pytest.raises(CodecError, match="more bytes than a value should"):
        loaded(saved([value] * 3, tmp_path / "x"))


def forged(data: bytes, path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", data)
    return path


def test_keys_of_tuples_in_tuples_do_not_end_the_process(tmp_path: Path) -> None:
    key = b")" + b"\x85" * 100_000
    ordered = b"\x80\x02ccollections\nOrderedDict\n(](" + key + b"K\x01\x86etR."
    with pytest.raises(CorruptionError, match="a tuple is no key"):
        loaded(forged(ordered, tmp_path / "x"))


def test_sizes_that_torch_cannot_have_are_refused(tmp_path: Path) -> None:
    size = b"\x80\x02ctorch\nSize\n\x8a\x09" + bytes(8) + b"\x01\x85\x85R."
    with pytest.raises(CorruptionError, match="larger than any"):
        loaded(forged(size, tmp_path / "x"))


def test_a_pickle_of_many_opcodes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_save_reader, "_OPCODES_MAX", 1000)
    with pytest.raises(CodecError, match="too large for plain values"):
        loaded(forged(b"\x80\x04(" + b"\x8f" * 1000 + b"t.", tmp_path / "x"))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (defaultdict(int), "collections.defaultdict"),
        (os.system, "posix.system"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (torch.eye(2).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
        (Path("/"), "pathlib.PosixPath"),
    ],
    ids=str,
)
def test_objects_other_than_plain_values_are_refused_by_name(
    tmp_path: Path, value: Any, name: str
) -> None:
    with pytest.raises(CodecError, match=rf"{name}.*nothing was run"):
        loaded(saved(value, tmp_path / "x"))


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    """Each of every third byte changes nothing that counts, or is an error of ours."""
    path = saved(torch.arange(6.0).view(2, 3).t(), tmp_path / "x")
    whole, noticed = path.read_bytes(), 0
    for at in range(0, len(whole), 3):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        try:
            assert bits(loaded(path)) == bits(torch.arange(6.0).view(2, 3).t()), at
        except OutlastError:
            noticed += 1
    assert noticed > 100


@pytest.mark.parametrize("at", [0, 4, 99_999])
def test_a_part_of_a_storage_is_checked_with_all_of_it(tmp_path: Path, at: int) -> None:
    path = saved(torch.arange(100_000.0)[3:7], tmp_path / "x")
    assert bits(loaded(path)) == bits(torch.arange(3.0, 7.0))
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(100_000.0).numpy().tobytes()) + 4 * at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="CRC"):
        loaded(path)


def test_a_tensor_that_reaches_out_of_its_storage_is_refused(tmp_path: Path) -> None:
    path = saved(torch.arange(6.0), tmp_path / "x")
    file = os.open(path, os.O_RDONLY)
    with open_torch_save(file, 0, path.stat().st_size, "x") as found:
        stored: StoredTensor = found.value
        for wrong in (
            stored._replace(offset=1),
            stored._replace(offset=-1),
            stored._replace(shape=(7,)),
            stored._replace(shape=(3,), stride=(3,)),
            stored._replace(shape=(-6,)),
            stored._replace(shape=(1 << 40,), stride=(0,)),
        ):
            with pytest.raises(CorruptionError, match="outside of its storage"):
                list(found.parts(wrong))
    os.close(file)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02.",
        b"\x80\x02N",
        b"\x80\x02h\x05.",
        b"\x80\x02u.",
        b"\x80\x02]}a\x85\x85R.",
        b"\x80\x02](]u.",
        b"\x80\x02}(]Nu.",
        b"\x80\x02}(K\x01\x85\x85Nu.",
        b"\x80\x04\x8c\x01a\x93.",
        b"\x80\x04" + 2 * (b")" + b"\x85" * 2000) + b"\x93.",
        b"\x80\x02\x8a\xff.",
        b"\x80\x02X\xff\xff\xff\xffabc.",
        b"garbage",
    ],
    ids=lambda data: repr(data[:20]),
)
def test_data_without_a_complete_pickle_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError, match=r"where: no complete pickle"):
        pickle_reader.read_pickle(data, {}, "where")


def test_old_and_odd_opcodes_are_refused_by_name() -> None:
    """Such as those of protocol 0 that make objects in other ways."""
    for data, opcode in ((b"(ios\nsystem\n.", "INST"), (b"c__main__\nx\n(o.", "__main__.x")):
        with pytest.raises(CodecError, match=opcode):
            pickle_reader.read_pickle(data, {}, "where")
    used = {"PROTO", "FRAME", "STOP", "INST", "OBJ", "EXT1", "EXT2", "EXT4", "NEWOBJ_EX", "PERSID"}
    known = (
        pickle_reader._LITERALS | pickle_reader._CONSTANTS.keys() | pickle_reader._OPERATIONS.keys()
    )
    assert {opcode.name for opcode in pickletools.opcodes} >= known
    assert not known & {name for name in used if name not in {"PROTO", "FRAME", "STOP"}}


def test_a_big_endian_or_compressed_file_is_refused(tmp_path: Path) -> None:
    torch.save(torch.ones(2), buffer := io.BytesIO())
    for change, said in (("byteorder", "big-endian"), ("compressed", "compressed")):
        path = tmp_path / change
        with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w") as new:
            for name in old.namelist():
                data = old.read(name)
                if change == "byteorder":
                    new.writestr(name, b"big" if name.endswith("byteorder") else data)
                else:
                    new.writestr(name, data, zipfile.ZIP_DEFLATED)
        with pytest.raises(CodecError, match=said):
            loaded(path)
