"""TermStore in etcd 3.4 or later, over its JSON gateway: plain HTTP, no client library.

| operation | request       | body                                                     |
|-----------|---------------|----------------------------------------------------------|
| create    | /v3/kv/txn    | compare create_revision == 0, then request_put           |
| put       | /v3/kv/put    | key, value                                               |
| get       | /v3/kv/range  | key (linearizable: through the leader)                   |
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import time
from collections.abc import Sequence
from typing import Any

from outlast.errors import ConfigError, StorageError

ETCD = "etcd://"
_ADDRESS = re.compile(r"etcd://([A-Za-z0-9.\-]+:[0-9]{1,5}(?:,[A-Za-z0-9.\-]+:[0-9]{1,5})*)/(.+)")
_ANSWER_BYTES_MAX = 1 << 20
_PAUSE_S = 0.02


def parse_etcd_address(address: str) -> tuple[tuple[str, ...], str]:
    """Return the members and the prefix of etcd://HOST:PORT,.../PREFIX. Raises ConfigError."""
    if not (found := _ADDRESS.fullmatch(address)):
        raise ConfigError(
            f"{address}: give etcd://HOST:PORT/PREFIX, or several members as in"
            " etcd://a:2379,b:2379/PREFIX"
        )
    return tuple(found[1].split(",")), found[2].strip("/")


class EtcdStore:
    """TermStore under PREFIX/RUN/. The next member is asked when one does not answer."""

    def __init__(self, members: Sequence[str], prefix: str, run: str, answer_s: float) -> None:
        self._members, self._prefix = tuple(members), f"{prefix}/{run}"
        self._answer_s = answer_s
        self._first = 0  # the member that answered last

    @property
    def where(self) -> str:
        """See TermStore.where."""
        return f"{ETCD}{','.join(self._members)}/{self._prefix}"

    def create(self, name: str, value: bytes) -> bool:
        """See TermStore.create."""
        key = self._key(name)
        absent = {"key": key, "target": "CREATE", "create_revision": "0"}
        write = {"request_put": {"key": key, "value": _text(value)}}
        answer = self._ask("/v3/kv/txn", {"compare": [absent], "success": [write]})
        # An earlier attempt of this call may have written it, and its answer been lost.
        return answer.get("succeeded") is True or self.get(name) == value

    def put(self, name: str, value: bytes) -> None:
        """See TermStore.put."""
        self._ask("/v3/kv/put", {"key": self._key(name), "value": _text(value)})

    def get(self, name: str) -> bytes | None:
        """See TermStore.get."""
        answer = self._ask("/v3/kv/range", {"key": self._key(name)})
        try:
            found = answer.get("kvs") or []
            return base64.b64decode(found[0].get("value", ""), validate=True) if found else None
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise StorageError(f"{self.where}: the answer about {name} cannot be read") from error

    def _key(self, name: str) -> str:
        return _text(f"{self._prefix}/{name}".encode())

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of the first member that gives one. Raises StorageError."""
        end_s = time.monotonic() + self._answer_s
        why = "no answer"
        while (rest_s := end_s - time.monotonic()) > 0:
            member = self._members[self._first % len(self._members)]
            try:
                return _request(member, path, body, min(rest_s, self._share_s))
            except (OSError, http.client.HTTPException, ValueError) as error:
                why = f"{member}: {error or type(error).__name__}"
            self._first += 1
            # A member that refuses at once would be asked in a busy loop.
            time.sleep(min(_PAUSE_S, max(0.0, end_s - time.monotonic())))
        raise StorageError(f"{self.where}: no member of etcd answered ({why})")

    @property
    def _share_s(self) -> float:
        return max(0.05, self._answer_s / len(self._members))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _request(member: str, path: str, body: dict[str, Any], within_s: float) -> dict[str, Any]:
    """Ask one member. Raises OSError, HTTPException, or ValueError for another kind of answer."""
    link = http.client.HTTPConnection(member, timeout=within_s)
    try:
        link.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = link.getresponse()
        data = response.read(_ANSWER_BYTES_MAX)
        if response.status != http.client.OK:
            raise ValueError(f"status {response.status}: {data[:200]!r}")
        answer = json.loads(data)
        if not isinstance(answer, dict):
            raise ValueError(f"no object: {data[:200]!r}")
        return answer
    finally:
        link.close()
