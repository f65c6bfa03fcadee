"""Flight recorder dump files: both formats, hostile files, and odd names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fleet.flight_recorder.recorded_jobs import Raw, dump, entry, pickled

from outlast.errors import CodecError, CorruptionError, OutlastError
from outlast.fleet.flight_recorder.recorder_dumps import decode_dump, identify_dump

ONE = dump(entry(), entry(seq=2, record=1), groups={"0": (0, 1)})
PLAIN = msgspec.to_builtins(ONE)
FIRST = PLAIN["entries"][0]
_RECORDED = """
import json, os, sys
os.environ["TORCH_FR_BUFFER_SIZE"] = "4"
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
for _ in range(6):
    dist.all_reduce(torch.ones(3))
while not json.loads(_dump_fr_trace_json())["entries"][-1]["retired"]:
    os.sched_yield()  # gloo's thread notes the end after the call has returned
open(sys.argv[1] + "/rank_0.json", "wb").write(_dump_fr_trace_json())
open(sys.argv[1] + "/trace_0", "wb").write(_dump_fr_trace(includeStackTraces=False))
dist.destroy_process_group()
"""


@pytest.mark.process
def test_dumps_of_this_torch_read_equal_in_both_formats(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _RECORDED, str(tmp_path)], check=True, timeout=60)
    for name in ("rank_0.json", "trace_0"):
        read = decode_dump((tmp_path / name).read_bytes(), name)
        assert [one.collective_seq_id for one in read.entries] == [3, 4, 5, 6]
        last = read.entries[-1]
        assert (last.profiling_name, last.input_sizes, last.input_dtypes) == (
            "gloo:all_reduce", ((3,),), ("Float",),
        )  # fmt: skip
        assert (last.state, last.retired, last.record_id) == ("scheduled", True, 5)


def test_a_pickle_is_read_as_its_json_is() -> None:
    assert decode_dump(pickled(PLAIN), "p") == decode_dump(msgspec.json.encode(ONE), "j")


def _with(opcodes: bytes) -> bytes:
    return pickled({**PLAIN, "more": Raw(opcodes)})


def _sharing(times: int, deep: int) -> bytes:
    """A list of as many times the same list of as many times the same list of..."""
    layers = (b"](" + b"h%c" % at * times + b"eq%c" % (at + 1) for at in range(deep))
    return b"]q\x00" + b"".join(b"0" + layer for layer in layers)


_NUMBERS = b"".join(b"\x8a\x0a" + (at * (2**61 - 1)).to_bytes(10, "little") + b"N" for at in (1, 2))
HOSTILE: dict[str, tuple[bytes, str]] = {
    "a call": (_with(b"cos\nsystem\n(X\x09\0\0\0touch rantR"), "os.system"),
    "a call by its names": (_with(b"\x8c\x08builtins\x8c\x04eval\x93X\x01\0\0\x001\x85R"), "eval"),
    "a class": (_with(b"cpathlib\nPath\n)\x81"), "pathlib.Path"),
    "an instance": (_with(b"(ios\nsystem\n"), "INST"),
    "an extension": (_with(b"\x82\x01"), "EXT1"),
    "a persistent id": (_with(b"Pelsewhere\n"), "PERSID"),
    "a persistent value": (_with(b"K\x01Q"), "outside"),
    "a state": (_with(b"]}b"), "sets the state"),
    "shared without end": (_with(_sharing(200, 12)), "refers to itself"),
    "within itself": (_with(b"]q\x00(h\x00h\x00e"), "refers to itself"),
    "too deep": (_with(b"](" * 200 + b"e" * 200), "refers to itself"),
    "another thing": (pickled([1, 2, 3]), "no flight-recorder dump"),
    "another version": (pickled({**PLAIN, "version": "1.5"}), "version 1.5"),
    "a number without bound": (
        pickled({**PLAIN, "entries": [{**FIRST, "record_id": 1 << 99}]}), "no flight-recorder",
    ),
    "keys of one hash": (_with(b"}(" + _NUMBERS + b"u"), "a int is no key"),
    "items of one hash": (_with(b"\x8f(" + _NUMBERS + b"\x90"), "a int is no key"),
    "a key of a million": (_with(b"}(K\x01K\x01tNs"), "a tuple is no key"),
    "a tensor of many sizes": (
        pickled({**PLAIN, "entries": [{**FIRST, "input_sizes": [[1 << 62] * 65]}]}), "length <= 64",
    ),
    "a long name": (
        pickled({**PLAIN, "entries": [{**FIRST, "profiling_name": "a" * 257}]}), "length <= 256",
    ),
    "other bytes": (b"MZ" + bytes(100), "neither JSON nor a pickle"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data, said = HOSTILE[name]
    with pytest.raises((CodecError, CorruptionError), match=said):
        decode_dump(data, "rank_0")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [pickled(PLAIN), msgspec.json.encode(ONE)])
@given(st.data())
def test_a_truncated_dump_is_an_error(data: bytes, at: st.DataObject) -> None:
    cut = at.draw(st.integers(0, len(data) - 1))
    with pytest.raises((CorruptionError, CodecError), match="rank_7"):
        decode_dump(data[:cut], "rank_7")


@given(
    st.one_of(st.binary(max_size=200), st.binary(max_size=60).map(lambda tail: b"\x80\x02" + tail))
)
@example(b"\x80\x02]q\x00h\x00a.")
@example(b"\x80\x02X\x03\0\0\0\xed\xa0\x80.")
@example(b'{"entries":' + b"[" * 5000)
def test_arbitrary_bytes_raise_a_typed_error(data: bytes) -> None:
    with pytest.raises(OutlastError):
        decode_dump(data, "x")


@pytest.mark.parametrize(
    ("name", "rank", "host"),
    [
        ("nccl_trace_rank_3", 3, ""),
        ("rank_3@node17.site.json", 3, "node17.site"),
        ("comm_lib_trace_rank_12", 12, ""),
        ("trace_0.json", 0, ""),
        ("RANK-007.pickle", 7, ""),
        ("17", 17, ""),
        ("dump", None, ""),
        ("rank_99999999.json", None, ""),
        ("rank_123456789012345678901234567890.json", None, ""),
    ],
)
def test_file_names_give_rank_and_host(name: str, rank: int | None, host: str) -> None:
    assert identify_dump(Path("/a") / name)[1:] == (rank, host)


def test_equal_fields_of_records_are_shared_in_memory() -> None:
    """Else the dumps of thousands of ranks would need more memory than a node has."""
    data = msgspec.json.encode(dump(*(entry(seq=at + 1, record=at) for at in range(3))))
    known: dict[object, object] = {}
    first, second = (decode_dump(data, "x", known) for _ in range(2))
    assert first == second
    for name in ("profiling_name", "process_group", "input_sizes", "output_dtypes"):
        assert len({id(getattr(one, name)) for one in (*first.entries, *second.entries)}) == 1
