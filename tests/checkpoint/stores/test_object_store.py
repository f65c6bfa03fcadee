"""Object store: the contract of stores on a real server, and failures of buckets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from obstore.store import MemoryStore
from tests.checkpoint.bucket_server import BUCKET, BucketServer

from outlast.checkpoint.format.manifests import COMMIT, SavePoint
from outlast.checkpoint.stores.catalog import checkpoint_places
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.object_store import Bucket, open_store
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.errors import ConfigError, CorruptionError, StorageError
from outlast.testing.extension_contracts import OTHER, PLACE, StoreContract

pytestmark = pytest.mark.process
MIB = 1 << 20


@pytest.fixture
def bucket(server: BucketServer, address: str) -> Store:
    """An empty store: a prefix of its own."""
    return open_store(f"{address}/runs")


class TestBucketInMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return Bucket(MemoryStore(), "memory://")


class TestBucketOnServer(StoreContract):
    @pytest.fixture
    def store(self, bucket: Store) -> Store:
        return bucket


def large() -> Iterator[memoryview]:
    """40 MiB in one buffer, in parts of 8 MiB that differ."""
    buffer = bytearray(8 * MIB)
    for k in range(5):
        buffer[:] = bytes([65 + k]) * len(buffer)
        yield memoryview(buffer)


def test_large_objects_travel_in_parts(server: BucketServer, bucket: Store) -> None:
    before = len(server.requests("PUT", "partNumber="))
    bucket.put(PLACE, "shard-00000", large(), 40 * MIB)
    assert len(server.requests("PUT", "partNumber=")) - before == 3
    into = bytearray(20 * MIB)
    bucket.read(PLACE, "shard-00000", 12 * MIB, memoryview(into))
    assert into == b"B" * 4 * MIB + b"C" * 8 * MIB + b"D" * 8 * MIB


def test_a_large_object_that_is_broken_off_is_nowhere(server: BucketServer, bucket: Store) -> None:
    def parts() -> Iterator[memoryview]:
        yield from large()
        raise CorruptionError("the source is damaged")

    with pytest.raises(CorruptionError, match="the source is damaged"):
        bucket.put(PLACE, "shard-00000", parts(), 48 * MIB)
    with pytest.raises(StorageError, match="bytes were given"):
        bucket.put(OTHER, "shard-00000", large(), 48 * MIB)
    assert bucket.files(PLACE) == bucket.files(OTHER) == {}
    aborted = server.requests("DELETE", "uploadId=")  # a part that was under way may still land
    assert [(f"{PLACE}/" in path, status) for path, status in aborted] == [
        (True, 204),
        (False, 204),
    ]


@pytest.mark.parametrize("asked", [None, "true", "false"])
def test_the_commit_record_goes_first(
    server: BucketServer, address: str, monkeypatch: pytest.MonkeyPatch, asked: str | None
) -> None:
    """This server refuses to delete several at once, as many do: nobody has to know, or to say."""
    if asked:
        monkeypatch.setenv("AWS_DISABLE_BULK_DELETE", asked)
    bucket, refused = open_store(f"{address}/runs"), len(server.requests("POST", "delete"))
    for name in ("shard-00000", "shard-00001"):
        bucket.put(PLACE, name, [b"x"], 1)
    bucket.create(PLACE, COMMIT, b"x")
    before = len(server.requests("DELETE"))
    bucket.remove(PLACE)
    gone = [path.rsplit("/", 1)[-1] for path, _ in server.requests("DELETE")[before:]]
    assert gone[0] == COMMIT
    assert sorted(gone[1:]) == ["shard-00000", "shard-00001"]
    assert bucket.files(PLACE) == {} and bucket.directories() == []
    assert server.requests("POST", "delete")[refused:] == []


def test_all_checkpoints_of_a_bucket_are_found_in_one_listing(
    server: BucketServer, bucket: Store
) -> None:
    found = [SavePoint(step, step, "a1") for step in range(9, 0, -1)]
    for place in found:
        bucket.put(place.directory, "shard-00000", [b"x"], 1)
        if place.step != 5:
            bucket.create(place.directory, COMMIT, b"x")
    bucket.point(found[0].directory)

    def requests() -> int:
        before = len(server.requests("GET"))
        assert checkpoint_places(bucket) == [place for place in found if place.step != 5]
        return len(server.requests("GET")) - before

    assert requests() == 2
    # Nobody knows how much there is of what is not ours: it is not listed.
    bucket.put("data", COMMIT, [b"x"], 1)
    assert requests() == 1 + len(found)


def _refusal(address: str) -> str:
    with pytest.raises(StorageError) as error:
        open_store(address, request_s=5, retries=1, retry_s=5)
    assert address in str(error.value)
    return str(error.value)


def test_a_bucket_that_does_not_exist(server: BucketServer) -> None:
    assert "no such bucket" in _refusal("s3://elsewhere/runs")
    assert [path.name for path in server.root.iterdir() if "elsewhere" in path.name] == []


def test_missing_credentials(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")  # no cloud answers here
    said = _refusal(f"s3://{BUCKET}/runs")
    assert "no credentials" in said
    assert "AWS_ACCESS_KEY_ID" in said


def test_a_dead_endpoint(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "cannot be reached" in _refusal(f"s3://{BUCKET}/runs")


def test_a_server_that_hangs_meets_the_deadline(server: BucketServer, address: str) -> None:
    bucket = open_store(address, request_s=0.5, retries=1, retry_s=1)
    os.kill(server.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, server.process.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        with pytest.raises(StorageError, match=f"{PLACE}/{COMMIT}"):
            bucket.put(PLACE, COMMIT, [b"x"], 1)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


def test_a_missing_azure_account_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://container/runs")


@pytest.mark.parametrize("address", ["ftp://host/runs", "memory://", "file://runs"])
def test_addresses_of_no_known_kind(address: str) -> None:
    with pytest.raises(ConfigError, match=address):
        open_store(address)


def test_paths_are_folders(tmp_path: Path) -> None:
    for address in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        store = open_store(address)
        assert isinstance(store, Folder)
        assert store.root == tmp_path


def test_without_the_extra_it_is_named() -> None:
    code = """
import sys
sys.modules["obstore"] = None
from outlast.checkpoint.stores.object_store import open_store
from outlast.errors import ConfigError
try:
    open_store("s3://bucket/runs")
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "pip install 'outlast[objects]'" in done.stdout


def test_nothing_heavy_is_imported_for_a_folder() -> None:
    code = """
import sys
import outlast.checkpoint.upkeep.drain_to_target
from outlast.checkpoint.stores.object_store import open_store
open_store("runs")
print(sorted({"torch", "numpy", "obstore"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("address", ["s3//bucket/run", "s3:/bucket", "gs:bucket", "file:/data"])
def test_a_mistyped_url_is_no_directory(address: str) -> None:
    with pytest.raises(ConfigError, match="is no URL"):
        open_store(address)
