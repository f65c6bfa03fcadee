"""Damaged files of a lake: named to every reader and writer, whatever the damage."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import polars as pl
import pytest
from tests.fleet.test_lake import DAY, HOUR, files, finding, job, outage, put

from outlast.cli.main import main
from outlast.errors import EXIT_USER_ERROR, LakeError
from outlast.fleet.lake import MANIFEST, Lake


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _zeroed(data: bytes) -> bytes:
    return data[:4] + bytes(len(data) - 8) + data[-4:]


def _flipped(data: bytes) -> bytes:
    at = data.index(b"n1")  # the name of a node becomes another one, which still decodes
    return data[:at] + b"n2" + data[at + 2 :]


def _foreign(_data: bytes) -> bytes:
    buffer = io.BytesIO()
    pl.DataFrame({"t_ns": [DAY], "node": ["n7"]}).write_parquet(buffer)
    return buffer.getvalue()


def _empty(_data: bytes) -> bytes:
    return b""


DAMAGE = (_empty, _cut, _zeroed, _foreign, _flipped)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_to_readers_and_writers(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    put(tmp_path, finding(0), job(ended=HOUR, state="RUNNING"))
    for file in tmp_path.rglob("*.parquet"):
        whole = file.read_bytes()
        if damage is _flipped and b"n1" not in whole:
            continue
        file.write_bytes(damage(whole))
        before = files(tmp_path)
        with pytest.raises(LakeError, match=rf"{file.name} is damaged.*restore it"):
            Lake.open(tmp_path)
        with pytest.raises(LakeError, match=rf"{file.name} is damaged.*restore it"):
            put(tmp_path, outage(0, None))
        assert files(tmp_path) == before
        file.write_bytes(whole)
    put(tmp_path, outage(0, None))


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    put(tmp_path, finding(0))
    (file,) = tmp_path.rglob("*.parquet")
    file.unlink()
    for make in (file.mkdir, lambda: os.mkfifo(file)):
        make()
        with pytest.raises(LakeError, match=rf"{file.name} is no file"):
            Lake.open(tmp_path)
        file.rmdir() if file.is_dir() else file.unlink()
    file.symlink_to(tmp_path / "nowhere")
    with pytest.raises(LakeError, match=rf"{file.name} is missing"):
        Lake.open(tmp_path)


@pytest.mark.parametrize("damage", DAMAGE[:4])
def test_a_file_without_a_digest_is_read_whole(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    put(tmp_path, finding(0), finding(1))
    manifest = msgspec.json.decode((tmp_path / MANIFEST).read_bytes())
    for part in manifest["parts"]:
        del part["digest"]
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    assert Lake.open(tmp_path).tables().findings.collect().height == 2
    (file,) = tmp_path.rglob("*.parquet")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(LakeError, match=rf"{file.name} is damaged"):
        Lake.open(tmp_path)


@pytest.mark.parametrize("command", [["report", "--json"], ["fit"], ["lemons"]])
def test_commands_name_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    put(tmp_path, finding(0), job(ended=HOUR))
    file = next(tmp_path.glob("jobs/*/*.parquet"))
    file.write_bytes(_zeroed(file.read_bytes()))
    assert main(["fleet", *command, str(tmp_path)]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert f"{file} is damaged" in error and "Traceback" not in error
