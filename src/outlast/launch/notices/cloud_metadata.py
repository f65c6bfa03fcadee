"""Notices of clouds, by the metadata service of this machine.

| cloud | is asked for | deadline |
|---|---|---|
| aws | spot/instance-action; events/recommendations/rebalance, by IMDSv2 | `time`; none |
| gcp | preempted; maintenance-event | PREEMPTED_S; MAINTENANCE_S |
| azure | scheduled events of this machine that stop it | `NotBefore` |

A time is compared with the service's own clock (its `Date`), not with that of this host.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple, cast

import msgspec

from outlast.errors import OutlastError

ADDRESS = "169.254.169.254"  # of all three
ANSWER_S = 2.0
ANSWER_BYTES_MAX = 256 << 10
TOKEN_S = 21600
PREEMPTED_S = 30.0  # between the notice and the end of a spot machine
MAINTENANCE_S = 60.0  # the least that is documented for machines that are stopped
PAST_S = 1e-3
STOPS = ("Reboot", "Redeploy", "Preempt", "Terminate")  # a Freeze of Azure passes in seconds


class MetadataError(OutlastError):
    """The metadata service gave no answer in time, or none that can be read."""


class CloudNotice(NamedTuple):
    """Announced end of this machine. `within_s`: until then; 0: unknown. `is_relative`: counted
    from the first answer."""

    code: str
    detail: str
    within_s: float = 0.0
    is_relative: bool = False


class MetadataAnswer(NamedTuple):
    """MetadataAnswer of the service. `clock`: its time."""

    status: int
    text: str
    clock: datetime


class MetadataService:
    """One cloud's metadata service. `address`: HOST[:PORT], of the cloud itself if empty."""

    def __init__(self, cloud: str, address: str = "") -> None:
        self._notices = CLOUDS[cloud]
        self._host, _, port = (address or ADDRESS).partition(":")
        self._port = int(port or 80)
        self.token = ""
        self.name = ""  # of this machine, as Azure has it

    async def notices(self) -> tuple[CloudNotice, ...]:
        """Return what is announced now. Raises MetadataError."""
        try:
            return await self._notices(self)
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError, KeyError) as error:
            raise MetadataError(f"the metadata service's answer cannot be read: {error}") from error

    async def ask(
        self, path: str, headers: Mapping[str, str], method: str = "GET"
    ) -> MetadataAnswer:
        """Return an answer with any status but those of failures. Raises MetadataError."""
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self._exchange(path, headers, method)
        except TimeoutError:
            raise MetadataError(f"no answer of {self._host} within {ANSWER_S:g} s") from None
        except (OSError, HTTPException) as error:
            raise MetadataError(f"{self._host} cannot be asked: {error}") from error
        if answer.status not in (200, 401, 404):
            raise MetadataError(f"{self._host} answers {path} with status {answer.status}")
        return answer

    async def _exchange(self, path: str, headers: Mapping[str, str], method: str) -> MetadataAnswer:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}", "Connection: close"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            lines += ["Content-Length: 0"] if method == "PUT" else []
            writer.write("\r\n".join([*lines, "", ""]).encode())
            await writer.drain()
            data = bytearray()
            while chunk := await reader.read(1 << 16):
                data += chunk
                if len(data) > ANSWER_BYTES_MAX:
                    raise HTTPException(f"more than {ANSWER_BYTES_MAX:,} bytes")
        finally:
            writer.close()
        response = HTTPResponse(cast("Any", _ReceivedBytes(bytes(data))), method=method)
        response.begin()
        date = response.headers.get("Date", "")
        clock = parsedate_to_datetime(date) if date else datetime.now(UTC)
        return MetadataAnswer(response.status, response.read().decode("utf-8", "replace"), clock)


class _ReceivedBytes:
    """A whole answer, as HTTPResponse reads it from a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        """Return the answer as a file."""
        return io.BytesIO(self._data)


def _until(at: datetime, clock: datetime) -> float:
    """Return the seconds until a time, above zero: a deadline that is over stays one."""
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    clock = clock if clock.tzinfo else clock.replace(tzinfo=UTC)
    return max(PAST_S, (at - clock).total_seconds())


class _SpotAction(msgspec.Struct):
    action: str
    time: datetime


async def _aws(service: MetadataService) -> tuple[CloudNotice, ...]:
    found: list[CloudNotice] = []
    action = await _aws_answer(service, "spot/instance-action")
    if action.status == 200:
        known = msgspec.json.decode(action.text, type=_SpotAction)
        within_s = _until(known.time, action.clock)
        text = f"AWS will {known.action} this spot instance at {known.time.isoformat()}"
        found.append(CloudNotice(f"spot {known.action}", text, within_s))
    rebalance = await _aws_answer(service, "events/recommendations/rebalance")
    if rebalance.status == 200:
        found.append(CloudNotice("rebalance", "AWS recommends to leave this spot instance"))
    return tuple(found)


async def _aws_answer(service: MetadataService, path: str) -> MetadataAnswer:
    """Ask with a token, which is made anew when the service does not take it any more."""
    for _ in range(2):
        if not service.token:
            header = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            answer = await service.ask("/latest/api/token", header, "PUT")
            if answer.status != 200 or not answer.text.strip().isprintable():
                raise MetadataError("the metadata service gives no token")
            service.token = answer.text.strip()
        header = {"X-aws-ec2-metadata-token": service.token}
        answer = await service.ask(f"/latest/meta-data/{path}", header)
        if answer.status != 401:
            return answer
        service.token = ""
    raise MetadataError("the metadata service refuses its own token")


async def _gcp(service: MetadataService) -> tuple[CloudNotice, ...]:
    found: list[CloudNotice] = []
    header = {"Metadata-Flavor": "Google"}
    path = "/computeMetadata/v1/instance"
    preempted = await service.ask(f"{path}/preempted", header)
    if preempted.status == 200 and preempted.text.strip() == "TRUE":
        text = "Google Cloud preempts this machine"
        found.append(CloudNotice("preempted", text, PREEMPTED_S, is_relative=True))
    event = await service.ask(f"{path}/maintenance-event", header)
    if event.status == 200 and event.text.strip() == "TERMINATE_ON_HOST_MAINTENANCE":
        text = "Google Cloud stops this machine for maintenance of its host"
        found.append(CloudNotice("maintenance", text, MAINTENANCE_S, is_relative=True))
    return tuple(found)


class _AzureEvent(msgspec.Struct, rename="pascal"):
    event_id: str
    event_type: str
    resources: list[str] = []
    event_status: str = ""
    not_before: str = ""
    description: str = ""


class _AzureEvents(msgspec.Struct, rename="pascal"):
    events: list[_AzureEvent] = []


async def _azure(service: MetadataService) -> tuple[CloudNotice, ...]:
    """Return the events that concern this machine; those of its neighbours are in the same list."""
    header = {"Metadata": "true"}
    if not service.name:
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        answer = await service.ask(path, header)
        if answer.status != 200 or not answer.text.strip():
            raise MetadataError("the metadata service does not know this machine's name")
        service.name = answer.text.strip()
    answer = await service.ask("/metadata/scheduledevents?api-version=2020-07-01", header)
    if answer.status != 200:
        raise MetadataError(f"scheduled events: status {answer.status}")
    found: list[CloudNotice] = []
    for event in msgspec.json.decode(answer.text, type=_AzureEvents).events:
        if event.event_type not in STOPS or service.name not in event.resources:
            continue
        within_s = PAST_S  # it has begun
        if event.not_before:
            within_s = _until(parsedate_to_datetime(event.not_before), answer.clock)
        text = f"Azure will {event.event_type} this machine: {event.description or 'no reason'}"
        found.append(CloudNotice(f"{event.event_type} {event.event_id}", text, within_s))
    return tuple(found)


CLOUDS: dict[str, Callable[[MetadataService], Awaitable[tuple[CloudNotice, ...]]]] = {
    "aws": _aws,
    "gcp": _gcp,
    "azure": _azure,
}
