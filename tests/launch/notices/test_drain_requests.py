"""Requests to drain, as files of a run directory."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from outlast.errors import ConfigError, RunDirError
from outlast.events import Warned
from outlast.launch.notices import drain_requests
from outlast.launch.notices.drain_requests import DrainRequest, DrainWatch
from outlast.quantities import seconds_until


def request(name: str = "1", **words: object) -> DrainRequest:
    return DrainRequest(**{"name": name, "host": "n1", **words})  # type: ignore[arg-type]


def test_a_request_is_a_finding_with_the_time_that_remains(tmp_path: Path) -> None:
    notes: list[str] = []
    watch = DrainWatch(tmp_path, notes.append)
    assert watch.look() == ()
    drain_requests.write(tmp_path, request(rank=2, worker="w1-2", within_s=60.0, reason="a\x1bb"))
    (one,) = watch.look()
    assert (one.host, one.worker, one.device, one.code) == ("n1", "w1-2", "rank 2", "1")
    assert (one.check, one.detail) == ("operator", "a b") and 59 < one.within_s <= 60
    assert watch.look()[0].within_s < one.within_s and notes == []


def test_clocks_of_hosts_that_disagree_count_after_a_takeover_alone(tmp_path: Path) -> None:
    behind, ahead = time.time() - 3600, time.time() + 3600
    first = DrainWatch(tmp_path, pytest.fail)
    assert first.look() == ()
    drain_requests.write(tmp_path, request("1", within_s=60.0, until_s=behind))
    drain_requests.write(tmp_path, request("2", within_s=60.0, until_s=ahead))
    assert all(59 < one.within_s <= 60 for one in first.look())
    one, other = DrainWatch(tmp_path, pytest.fail).look()
    assert 0 < one.within_s < 1 and 59 < other.within_s <= 60, "never more than was given"


def test_what_is_no_request_is_noted_once(tmp_path: Path) -> None:
    folder = tmp_path / drain_requests.FOLDER
    folder.mkdir()
    (folder / "a.json").write_text("{")
    (folder / "b.json").mkdir()
    (folder / ".c.json.draft").write_text("{")
    (folder / "d.json").write_bytes(
        b'{"name": "d", "host": "n1", "reason": "%s"}' % (b"x" * 70_000)
    )
    drain_requests.write(tmp_path, request("e"))
    notes: list[str] = []
    watch = DrainWatch(tmp_path, notes.append)
    assert [one.code for one in (*watch.look(), *watch.look())] == ["e", "e"]
    assert len(notes) == 3 and all("is ignored" in note for note in notes)


def test_requests_are_withdrawn_by_rank_or_host(tmp_path: Path) -> None:
    for name, words in (("1", {"rank": 2}), ("2", {}), ("3", {"host": "n2"}), ("4", {"rank": 3})):
        drain_requests.write(tmp_path, request(name, **words))
    assert [one.name for one in drain_requests.withdraw(tmp_path, "", 2)] == ["1"]
    assert [one.name for one in drain_requests.withdraw(tmp_path, "n1", -1)] == ["2"]
    assert [one.name for one in drain_requests.read(tmp_path, pytest.fail)] == ["3", "4"]


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / drain_requests.FOLDER).touch()
    with pytest.raises(RunDirError, match="nothing was requested"):
        drain_requests.write(tmp_path, request())


@pytest.mark.parametrize("is_start", [True, False])
def test_a_start_forgets_earlier_requests_and_a_takeover_does_not(
    is_start: bool, tmp_path: Path
) -> None:
    drain_requests.write(tmp_path, request())

    async def play() -> tuple[Warned, ...]:
        found: asyncio.Queue[tuple[Warned, ...]] = asyncio.Queue(maxsize=100)
        tasks = drain_requests.begin(
            tmp_path, lambda _, each: found.put_nowait(each), pytest.fail, is_start=is_start
        )
        if is_start:
            drain_requests.write(tmp_path, request("2"))
        first = await asyncio.wait_for(found.get(), 20)
        for task in tasks:
            task.cancel()
        return first

    assert [one.code for one in asyncio.run(play())] == ["2" if is_start else "1"]


def test_deadlines_as_people_write_them() -> None:
    assert seconds_until("90s", "--by") == 90
    assert 0 < seconds_until("23:59", "--by") <= 86_400
    assert seconds_until("2999-01-01T00:00:00Z", "--by") > 0
    for wrong in ("", "soon", "0s", "25:00", "2001-01-01", "2001-01-01T00:00:00Z", "-5s", "inf"):
        with pytest.raises(ConfigError, match="--by"):
            seconds_until(wrong, "--by")
