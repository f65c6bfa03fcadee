"""Notices of clouds, asked from a local server that speaks their protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tests.launch.notices.metadata_server import AWS, AZURE, MetadataServer, metadata_server

from outlast.launch.notices import cloud_metadata
from outlast.launch.notices.cloud_metadata import CloudNotice, MetadataError, MetadataService


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with metadata_server() as made:
        yield made


def ask(server: MetadataServer, cloud: str) -> tuple[CloudNotice, ...]:
    return asyncio.run(MetadataService(cloud, server.address).notices())


def test_aws_without_a_notice_is_asked_with_one_token(server: MetadataServer) -> None:
    service = MetadataService("aws", server.address)
    for _ in range(3):
        assert asyncio.run(service.notices()) == ()
    tokens = [one for one in server.requests if "/latest/api/token" in one]
    assert len(tokens) == 1 and len(server.requests) == 7


@pytest.mark.parametrize("clock_s", [0.0, 3600.0, -3600.0])
def test_a_spot_interruption_has_a_deadline_by_the_services_own_clock(
    clock_s: float, server: MetadataServer
) -> None:
    server.clock_s = clock_s
    server.spot(120)
    server.rebalance()
    spot, rebalance = ask(server, "aws")
    assert spot.code == "spot terminate" and 118 <= spot.within_s <= 121
    assert "AWS will terminate this spot instance" in spot.detail
    assert (rebalance.code, rebalance.within_s) == ("rebalance", 0)


def test_a_token_that_is_not_taken_any_more_is_made_anew(server: MetadataServer) -> None:
    service = MetadataService("aws", server.address)
    assert asyncio.run(service.notices()) == ()
    server.tokens.clear()
    server.spot(60)
    assert len(asyncio.run(service.notices())) == 1
    server.tokens = _Refused()
    with pytest.raises(MetadataError, match="refuses its own token"):
        asyncio.run(service.notices())


class _Refused(set[str]):
    def __contains__(self, _token: object) -> bool:
        return False


def test_google_preempts_or_stops_for_maintenance(server: MetadataServer) -> None:
    server.google()
    assert ask(server, "gcp") == ()
    server.google("TRUE")
    (one,) = ask(server, "gcp")
    assert (one.code, one.within_s) == ("preempted", cloud_metadata.PREEMPTED_S)
    server.google(maintenance="TERMINATE_ON_HOST_MAINTENANCE")
    (one,) = ask(server, "gcp")
    assert (one.code, one.within_s) == ("maintenance", cloud_metadata.MAINTENANCE_S)
    server.google(maintenance="MIGRATE_ON_HOST_MAINTENANCE")
    assert ask(server, "gcp") == (), "the machine goes on"


def test_azure_tells_of_other_machines_too(server: MetadataServer) -> None:
    server.azure()
    assert ask(server, "azure") == ()
    server.azure(
        server.azure_event("Preempt", 30, "trainer_7", "trainer_8"),
        server.azure_event("Reboot", 900, "trainer_8"),
        server.azure_event("Freeze", 900, "trainer_7"),
        {**server.azure_event("Terminate", 0, "trainer_7"), "NotBefore": ""},
    )
    preempt, terminate = ask(server, "azure")
    assert preempt.code == "Preempt id-Preempt" and 28 <= preempt.within_s <= 31
    assert "is going to be deleted" in preempt.detail
    assert 0 < terminate.within_s < 1, "it has begun"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (f"{AWS}spot/instance-action", "<html>sign in to the hotel's network</html>"),
        (f"{AWS}spot/instance-action", '{"action": "terminate"}'),
        (f"{AWS}spot/instance-action", '{"action": "terminate", "time": "soon"}'),
        (AZURE, '{"Events": [{"EventType": "Preempt"}]}'),
        (AZURE, "x" * cloud_metadata.ANSWER_BYTES_MAX),
    ],
    ids=["html", "no time", "soon", "no id", "long"],
)
def test_an_answer_that_is_none_is_an_error(path: str, text: str, server: MetadataServer) -> None:
    server.azure()
    server.answers[path] = text
    with pytest.raises(MetadataError):
        ask(server, "aws" if path.startswith(AWS) else "azure")


def test_a_time_that_nobody_can_read_is_an_error(server: MetadataServer) -> None:
    server.azure({**server.azure_event("Preempt", 30, "trainer_7"), "NotBefore": "soon"})
    with pytest.raises(MetadataError, match="cannot be read"):
        ask(server, "azure")


def test_a_service_that_fails_stands_or_is_not_there_is_an_error(
    server: MetadataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.status = 503
    with pytest.raises(MetadataError, match="status 503"):
        ask(server, "aws")
    monkeypatch.setattr(cloud_metadata, "ANSWER_S", 0.3)
    server.stands.set()
    with pytest.raises(MetadataError, match=r"no answer of 127\.0\.0\.1 within 0\.3 s"):
        ask(server, "aws")
    with pytest.raises(MetadataError, match="cannot be asked"):
        asyncio.run(MetadataService("gcp", "127.0.0.1:1").notices())
