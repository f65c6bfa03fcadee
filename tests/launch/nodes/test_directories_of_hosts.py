"""Run directories of nodes at the meeting: one that all share, one of each host, or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.launch.nodes.test_node_meeting import KEY, PLACE, free_port, in_a_loop, join

from outlast.errors import OutlastError, RunDirError
from outlast.launch import run_directory
from outlast.launch.nodes import own_directories
from outlast.launch.nodes.node_facts import NodeIdentity
from outlast.launch.nodes.node_flags import NodeFlags
from outlast.launch.nodes.node_meeting import NodeMeeting
from outlast.launch.nodes.own_directories import OwnDirectories
from outlast.launch.run_directory import RunDir
from outlast.launch.terms.run_identity import checkpoints_of
from outlast.transport.node_link import NodeAccepted


class Hosts:
    """A meeting of hosts: a, with the controller, and others."""

    def __init__(self, folder: Path, nodes: int = 2, why_not: str = "") -> None:
        self.folder, self.far = folder, folder / "far"
        self.far.mkdir()
        self.endpoint = ("127.0.0.1", free_port())
        self.notes: list[str] = []
        self.meeting = NodeMeeting(
            self.identity("a"),
            self.directory("a"),
            NodeFlags(nodes=nodes),
            self.notes.append,
            [self.far],
            OwnDirectories(self.far, why_not),
        )

    def identity(self, host: str) -> NodeIdentity:
        return NodeIdentity(host, 0 if host == "a" else -1, self.endpoint, KEY, {})

    def directory(self, name: str, *hosts: str) -> Path:
        """Return a run directory that these hosts use."""
        path = self.folder / name
        for host in (name, *hosts):
            (path / "hosts" / host).mkdir(parents=True, exist_ok=True)
        return path

    async def join(self, host: str, directory: Path, far: Path | None = None) -> NodeAccepted:
        folders = (far or self.far,)
        _, place = await join(self.identity(host), directory, 10, self.notes.append, folders)
        return place

    async def meet(self, *joins: Coroutine[Any, Any, NodeAccepted]) -> list[NodeAccepted]:
        joining = [asyncio.create_task(each) for each in joins]
        seats = await self.meeting.gather(10)
        home = str(self.meeting.home or "")
        await self.meeting.accept(seats, PLACE._replace(home=home), b"nonce")
        return [await each for each in joining]


@in_a_loop
async def test_nodes_that_share_the_directory_have_no_other_home(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    (place,) = await hosts.meet(hosts.join("b", hosts.directory("a")))
    assert place.home == ""


@in_a_loop
async def test_hosts_with_their_own_directories_learn_the_shared_one(tmp_path: Path) -> None:
    """Also a host whose directory has the proof of a meeting that it held before."""
    hosts = Hosts(tmp_path, 3)
    (hosts.directory("c") / own_directories.PROOF).write_text("of another meeting")
    places = await hosts.meet(*(hosts.join(name, hosts.directory(name)) for name in ("b", "c")))
    assert [place.home for place in places] == [str(hosts.far)] * 2


@pytest.mark.parametrize(
    ("why_not", "directory", "far", "words"),
    [
        ("needed for --copies", "b", "far", "but one of this host alone: needed for --copies"),
        ("", "b", "elsewhere", "its --durable .*/far is not the directory of the"),
        ("", "a", "elsewhere", "its --durable .*/far is not the directory of the"),
    ],
)
@in_a_loop
async def test_what_does_not_fit_is_refused(
    tmp_path: Path, why_not: str, directory: str, far: str, words: str
) -> None:
    hosts = Hosts(tmp_path, why_not=why_not)
    (tmp_path / far).mkdir(exist_ok=True)
    gathering = asyncio.create_task(hosts.meeting.gather(10))
    with pytest.raises(OutlastError, match=words):
        await hosts.join("b", hosts.directory(directory), tmp_path / far)
    gathering.cancel()
    await hosts.meeting.refuse_all("over")


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("a", "c", "let all nodes share one, or none"),
        ("b", "b", "is not the one of the controller's node, but that of [bc] as well"),
    ],
)
@in_a_loop
async def test_directories_of_two_kinds_are_refused(
    tmp_path: Path, first: str, second: str, words: str
) -> None:
    """Of the two that do not fit, the one that comes later."""
    hosts = Hosts(tmp_path, 3)
    gathering = asyncio.create_task(hosts.meeting.gather(10))
    joining = {
        asyncio.create_task(hosts.join("b", hosts.directory(first, "b"))),
        asyncio.create_task(hosts.join("c", hosts.directory(second, "c"))),
    }
    refused, waiting = await asyncio.wait(joining, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(RunDirError, match=words):
        refused.pop().result()
    gathering.cancel()
    await hosts.meeting.refuse_all("over")
    with pytest.raises(OutlastError, match="over"):
        await waiting.pop()


def taken(folder: Path) -> RunDir:
    return run_directory.take(folder, "s", (), 1)


def test_the_kind_of_a_directory_stays(tmp_path: Path) -> None:
    far, path = tmp_path / "far", tmp_path / "run"
    first = taken(path)
    notes = own_directories.settle(first, far, [("b", ""), ("c", first.job.run)])
    assert str(far) in notes[0]
    assert first.checkpoints == checkpoints_of(path) == far
    first.release()
    second = taken(path)
    assert (second.job.run, second.job.home, second.job.term) == (first.job.run, str(far), 2)
    with pytest.raises(RunDirError, match="all nodes share this one"):
        own_directories.settle(second, None, [])
    with pytest.raises(RunDirError, match=r"each host has its own.*choose another --run-dir"):
        own_directories.settle(second, tmp_path / "elsewhere", [])
    with pytest.raises(RunDirError, match="the run directory of b is of run other, and this"):
        own_directories.settle(second, far, [("b", "other")])
    second.release()


def test_a_shared_directory_does_not_become_one_of_a_host(tmp_path: Path) -> None:
    run_dir = taken(tmp_path / "run")
    (run_dir.room("journal") / "term000001.000000.seg").write_bytes(b"x")
    with pytest.raises(RunDirError, match="is of a run with its checkpoints in"):
        own_directories.settle(run_dir, tmp_path / "far", [])
    run_dir.release()


def test_a_fresh_host_learns_the_run_from_the_shared_directory(tmp_path: Path) -> None:
    far = tmp_path / "far"
    far.mkdir()
    assert own_directories.known_job(tmp_path / "none", far) is None
    leader = taken(tmp_path / "leader")
    own_directories.settle(leader, far, [])
    own_directories.publish(leader)
    for name in ("none", "fruitless"):  # the second has been started, and nobody came
        if name == "fruitless":
            taken(tmp_path / name).release()
        job = own_directories.known_job(tmp_path / name, far)
        assert job is not None and (job.run, job.home) == (leader.job.run, str(far))
        assert own_directories.look_at("h", tmp_path / name, [far]).run == ""
    leader.release()
