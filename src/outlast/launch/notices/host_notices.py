"""Notices to one host: signals, a watched file, and the cloud's metadata.

| source | begins with | ends with |
|---|---|---|
| signal | the first signal to the launcher or to a worker | never |
| file | its appearance | its removal |
| aws, gcp, azure | an answer of the metadata service | an answer without it |

Each change, and each new connection to the controller, sends all of them with the time that remains
of their deadlines. A source that cannot be asked keeps what it said, is noted once, and is asked
ever more rarely.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from outlast import quantities
from outlast.errors import ConfigError
from outlast.events import Warned
from outlast.launch.notices.cloud_metadata import CloudNotice, MetadataError, MetadataService
from outlast.launch.notices.notice_flags import NoticeFlags
from outlast.transport import messages

SYMPTOM = "node-drain"
FILE_S = 1.0  # between two looks
CLOUD_S = 5.0
PAUSE_MAX_S = 60.0  # after failures in a row
FILE_BYTES_MAX = 4096
TEXT_MAX = 500  # characters
PAST_S = 1e-3


class _Notice(NamedTuple):
    """A notice. `end_s`: its deadline, as time.monotonic has it; 0: none."""

    code: str
    detail: str
    end_s: float


class HostNotices:
    """Notices to this host, for the controller. `say` sends them, unless nothing is connected."""

    def __init__(
        self,
        flags: NoticeFlags,
        say: Callable[[messages.NodeChecked], None],
        note: Callable[[str], None],
    ) -> None:
        self._flags, self._say, self._note = flags, say, note
        self._found: dict[str, dict[str, _Notice]] = {}  # by source and code

    def take_signal(self, name: str, receiver: str) -> bool:
        """Take a signal as a notice; return False if it was one before, or is none."""
        if name not in self._flags.signals or name in self._found.get("signal", {}):
            return False
        end_s = time.monotonic() + self._flags.after_s
        self._found.setdefault("signal", {})[name] = _Notice(name, f"{name} to {receiver}", end_s)
        self.report()
        return True

    def report(self) -> None:
        """Send all notices, if there are or were some."""
        if not self._found:
            return
        found = [
            self._finding(source, one)
            for source, notices in self._found.items()
            for one in notices.values()
        ]
        self._say(messages.NodeChecked(found=tuple(found), completed=tuple(self._found)))

    async def run(self) -> None:
        """Watch the file and the cloud until cancelled."""
        async with asyncio.TaskGroup() as group:
            if self._flags.file:
                group.create_task(self._watch_file(Path(self._flags.file)))
            if self._flags.cloud:
                service = MetadataService(self._flags.cloud, self._flags.address)
                group.create_task(self._watch_cloud(service))

    async def _watch_file(self, path: Path) -> None:
        known: str | None = None
        while True:
            text = await asyncio.to_thread(_read_start, path)
            if text != known:  # its time counts from here
                known = text
                self._replace("file", () if text is None else (self._file_notice(path, text),))
            await asyncio.sleep(FILE_S)

    def _file_notice(self, path: Path, text: str) -> CloudNotice:
        first, _, rest = text.strip().partition("\n")
        within_s, reason = self._flags.after_s, rest
        if first:
            try:
                within_s = quantities.seconds_until(first.strip(), str(path))
            except ConfigError as error:
                reason = text
                self._note(f"{error}; {within_s:g} s are assumed")
        return CloudNotice("", f"{path} is there: {reason.strip() or 'no reason'}", within_s)

    async def _watch_cloud(self, service: MetadataService) -> None:
        failures, source = 0, self._flags.cloud
        while True:
            try:
                found = await service.notices()
            except MetadataError as error:
                failures += 1
                if failures == 1:
                    self._note(f"{source}: {error}; its notices are not noticed meanwhile")
            else:
                failures = 0
                self._replace(source, found)
            await asyncio.sleep(min(PAUSE_MAX_S, CLOUD_S * 2**failures))

    def _replace(self, source: str, found: tuple[CloudNotice, ...]) -> None:
        """Replace the notices of a source. A deadline that was sent stays, unless it has moved by
        more than the time between two looks, or counts from each answer anew."""
        known, fresh = self._found.get(source, {}), dict[str, _Notice]()
        for one in found:
            end_s = time.monotonic() + one.within_s if one.within_s else 0.0
            before = known.get(one.code)
            is_same = before and (one.is_relative or abs(before.end_s - end_s) < CLOUD_S)
            new = _Notice(one.code, one.detail, end_s)
            fresh[one.code] = before if before and is_same and source != "file" else new
        if fresh != known:
            self._found[source] = fresh
            self.report()

    def _finding(self, source: str, one: _Notice) -> Warned:
        text = "".join(each if each.isprintable() else " " for each in one.detail[:TEXT_MAX])
        return Warned(
            t_ns=0,
            host="",
            check=source,
            symptom=SYMPTOM,
            severity="drain",
            code=one.code[:80],
            device="",
            detail=text,
            within_s=max(PAST_S, one.end_s - time.monotonic()) if one.end_s else 0.0,
        )


def _read_start(path: Path) -> str | None:
    """Return the begin of a file; None if it does not exist. A file that cannot be read is empty:
    that it is there says enough."""
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES_MAX).decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    except OSError:
        return "" if path.exists() else None
