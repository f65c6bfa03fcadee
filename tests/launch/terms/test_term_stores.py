"""Stores of terms: the contract on files, objects and etcd; lost answers; damage."""

from __future__ import annotations

import http.server
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from obstore.store import MemoryStore
from tests.end_to_end.conftest import wait_for

from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.object_store import Bucket
from outlast.errors import ConfigError, StorageError
from outlast.launch.terms.etcd_store import EtcdStore
from outlast.launch.terms.term_records import TermBeat, TermLedger, TermRecord
from outlast.launch.terms.term_store import (
    CheckpointStoreTerms,
    TermStore,
    check_address,
    open_term_store,
)
from outlast.testing import TermStoreContract

ANSWER_S = 10.0
WITHIN_S = 30.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class EtcdServer:
    """One member of etcd on loopback; it can be ended and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port, self._peer_port = free_port(), free_port()
        self.start()

    def start(self) -> None:
        url, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        self._process = subprocess.Popen(
            [
                *("etcd", "--name", "m", "--data-dir", str(self._folder), "--log-level", "error"),
                *("--listen-client-urls", url, "--advertise-client-urls", url),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", f"m={peer}"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

        def answers() -> bool:
            try:
                return self.store("probe", 1.0).get("probe") is None
            except StorageError:
                return False

        wait_for(answers, "an answer of etcd", WITHIN_S)

    def end(self) -> None:
        self._process.kill()
        self._process.wait(WITHIN_S)

    def store(self, run: str, answer_s: float = ANSWER_S) -> EtcdStore:
        return EtcdStore((f"127.0.0.1:{self.port}",), "outlast", run, answer_s)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed (apt-get install etcd-server)")
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.end()


class TestFiles(TermStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> TermStore:
        return open_term_store("", tmp_path, "run", ANSWER_S)


class TestFileUrl(TermStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> TermStore:
        return open_term_store(f"file://{tmp_path}", Path("none"), "run", ANSWER_S)


class TestObjects(TermStoreContract):
    @pytest.fixture
    def store(self) -> TermStore:
        return CheckpointStoreTerms(Bucket(MemoryStore(), "memory://"), "terms-run")


@pytest.mark.process
class TestEtcd(TermStoreContract):
    @pytest.fixture
    def store(self, etcd: EtcdServer, request: pytest.FixtureRequest) -> TermStore:
        return etcd.store(request.node.name)


@pytest.mark.process
def test_etcd_that_was_away_answers_again(etcd: EtcdServer) -> None:
    assert etcd.store("away").create("term-000001", b"mine")
    etcd.end()
    with pytest.raises(StorageError, match="no member of etcd answered"):
        etcd.store("away", 0.3).get("term-000001")
    etcd.start()
    assert etcd.store("away").get("term-000001") == b"mine"


@pytest.mark.process
def test_another_member_is_asked_where_one_is_dead(etcd: EtcdServer) -> None:
    members = (f"127.0.0.1:{free_port()}", f"127.0.0.1:{etcd.port}")
    store = EtcdStore(members, "outlast", "dead", ANSWER_S)
    assert store.create("term-000001", b"mine") and store.get("term-000001") == b"mine"


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{", b'{"kvs": [{"value": "%"}]}', b'{"kvs": 7}', b"x" * (2 << 20)]
)
def test_an_answer_of_another_program_is_an_error(answer: bytes) -> None:
    class Stranger(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = EtcdStore((f"127.0.0.1:{server.server_address[1]}",), "p", "run", 0.2)
        with pytest.raises(StorageError):
            store.get("term-000001")
        server.shutdown()


@pytest.mark.parametrize(
    "address", ["etcd://", "etcd://host/prefix", "etcd://host:99", "zookeeper", "etcd://a:1;b:2/p"]
)
def test_addresses_that_cannot_be_one_are_refused(address: str) -> None:
    with pytest.raises(ConfigError):
        check_address(address)


def test_a_term_has_one_owner_and_a_last_beat(tmp_path: Path) -> None:
    ledger = TermLedger(open_term_store("", tmp_path, "run", ANSWER_S), "run")
    ours = TermRecord(term=1, run="run", host="n1", claim="a")
    assert ledger.newest(0) is None and ledger.read_beat(1) is None
    assert ledger.claim(ours)
    assert not ledger.claim(TermRecord(term=1, run="run", host="n2", claim="b"))
    assert ledger.claim(TermRecord(term=2, run="run", host="n2", claim="b"))
    assert ledger.read(1) == ours and (newest := ledger.newest(0)) and newest.host == "n2"
    end = TermBeat(count=7, address=("n2", 1), outcome="done", exit_code=0)
    ledger.beat(2, end)
    assert ledger.read_beat(2) == end


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff" * 9, b'{"term": 1}'])
def test_a_damaged_record_is_named(tmp_path: Path, data: bytes) -> None:
    store = CheckpointStoreTerms(Folder(tmp_path), "terms")
    store.put("term-000001", data)
    with pytest.raises(StorageError, match="term-000001 is damaged"):
        TermLedger(store, "run").newest(0)


def test_a_record_of_another_run_is_named(tmp_path: Path) -> None:
    store = CheckpointStoreTerms(Folder(tmp_path), "terms")
    TermLedger(store, "other").claim(TermRecord(term=1, run="other", host="n1", claim="a"))
    with pytest.raises(StorageError, match="term 1 is of run other, not run"):
        TermLedger(store, "run").read(1)
