"""Terms of a run in an etcd on the switch, which no fault of a host stops."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.hosts import Hosts

from outlast.launch.terms.etcd_store import EtcdStore
from outlast.launch.terms.term_records import TermLedger, TermRecord

PREFIX = "outlast"
_PORT = 2379
_ANSWER_S = 10.0
_CLONE_NEWNET = 0x40000000


class SwitchTerms:
    """Reader of the terms of a run, which asks from the switch's network."""

    def __init__(self, hosts: Hosts, server: subprocess.Popen[bytes]) -> None:
        self.server = server
        self._member = f"{hosts.switch_address}:{_PORT}"
        self._thread = ThreadPoolExecutor(1, initializer=_enter, initargs=(hosts.switch,))
        self._ledger: TermLedger
        self.flag = f"--term-store=etcd://{self._member}/{PREFIX}"

    def open(self, run: str) -> None:
        """Begin to read the terms of this run."""
        self._ledger = TermLedger(EtcdStore((self._member,), PREFIX, run, _ANSWER_S), run)

    def newest(self, floor: int) -> TermRecord | None:
        """See TermLedger.newest."""
        return self._thread.submit(self._ledger.newest, floor).result()

    def read(self, term: int) -> TermRecord | None:
        """See TermLedger.read."""
        return self._thread.submit(self._ledger.read, term).result()


@contextmanager
def etcd_on_the_switch(hosts: Hosts, folder: Path) -> Iterator[SwitchTerms]:
    """Run etcd on the switch, inside a `with` block."""
    url = f"http://{hosts.switch_address}:{_PORT}"
    words = ("etcd", "--data-dir", str(folder / "etcd"), "--log-level", "error")
    urls = ("--listen-client-urls", url, "--advertise-client-urls", url)
    peers = ("--listen-peer-urls", "http://127.0.0.1:2380")
    server = subprocess.Popen(hosts.on_switch(*words, *urls, *peers))
    try:
        yield SwitchTerms(hosts, server)
    finally:
        server.kill()
        server.wait()


def _enter(network: str) -> None:
    """Move this thread into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", network).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
