"""The meeting of a run that has begun, over loopback: who comes in, and who is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.launch.nodes.test_node_meeting import KEY, PLACE, free_port, in_a_loop, join

from outlast.controller.member_tables import AgentRecord, NodePlacement
from outlast.errors import ConfigError, OutlastError
from outlast.launch.controller_shell import RunningNodes
from outlast.launch.nodes.node_facts import NodeIdentity
from outlast.launch.nodes.node_joining import LiveRun, open_ledger
from outlast.launch.nodes.own_directories import PROOF
from outlast.launch.nodes.running_meeting import RunningMeeting
from outlast.launch.terms.run_identity import RunningJob
from outlast.launch.terms.term_records import TermBeat, TermLedger, TermRecord
from outlast.launch.torchrun_arguments import RunPlan, parse
from outlast.transport.node_link import NodeAccepted

LEASE_S = 1.0


def agent(name: str, **changes: Any) -> AgentRecord:
    record = AgentRecord(
        name=name, incarnation=1, host=name, capacity=1, lease_ns=10**9, renewed_ns=0
    )
    return msgspec.structs.replace(record, **changes)


class Run:
    """A run of the nodes a, b and c that has begun: its meeting, and its first term's beat."""

    def __init__(self, folder: Path, fixed_hosts: str = "") -> None:
        self.folder = folder
        (folder / PROOF).write_text("proof")
        (folder / "script.py").write_text("")
        self.durable = durable = folder / "durable"
        durable.mkdir()
        job = RunningJob(
            version=1, run="run1", script="script.py", args=(), world=2, created_ns=0, term=1
        )
        (folder / "run.json").write_bytes(msgspec.json.encode(job))
        self.endpoint = ("127.0.0.1", free_port())  # nobody answers there
        self.agents: dict[str, AgentRecord] | None = {name: agent(name) for name in "abc"}
        self.notes: list[str] = []
        self.meeting = RunningMeeting(
            self.identity("a"),
            (folder, durable),
            "127.0.0.1",
            self.nodes,
            self.notes.append,
            fixed_hosts,
        )
        self.ledger: TermLedger = open_ledger(self.plan(), "run1")
        assert self.ledger.claim(TermRecord(term=1, run="run1", host="a", claim="x"))
        self.count = 0

    def nodes(self) -> RunningNodes:
        placement = NodePlacement(agents=("a", "b", "c"), ranks_per_node=1, domains=("r1", "", ""))
        return RunningNodes(placement, self.agents)

    def plan(self) -> RunPlan:
        words = ("--nnodes=2:3", f"--rdzv-endpoint=127.0.0.1:{self.endpoint[1]}")
        limits = ("--limit", f"lease_s={LEASE_S:g}")
        flags = ("--nproc-per-node=1", f"--run-dir={self.folder}", *limits)
        return parse([*words, *flags, str(self.folder / "script.py")])

    def identity(self, host: str, **facts: str) -> NodeIdentity:
        own = {"script": "script.py", **facts}
        return NodeIdentity(host, -1, self.endpoint, KEY, own, domain="r9")

    async def beat(self) -> None:
        """Write beats until cancelled."""
        while True:
            self.count += 1
            beat = TermBeat(count=self.count, address=("", 0), meeting=self.meeting.address)
            self.ledger.beat(1, beat)
            await asyncio.sleep(LEASE_S / 8)

    async def join(self, host: str, **facts: str) -> NodeAccepted:
        live = LiveRun(self.plan())
        _, place = await join(
            self.identity(host, **facts), self.folder, 20, self.notes.append, (self.durable,), live
        )
        return place

    async def during(self, act: Coroutine[Any, Any, NodeAccepted]) -> NodeAccepted:
        """Run the meeting and its beat beside a node that joins."""
        serving = asyncio.create_task(self.meeting.serve(PLACE, b"nonce", 3, LEASE_S))
        beating = asyncio.create_task(self.beat())
        try:
            return await act
        finally:
            serving.cancel()
            beating.cancel()
            await asyncio.wait({serving, beating})
            self.meeting.close()


@in_a_loop
async def test_a_lost_host_comes_back_as_the_next_incarnation(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.agents
    run.agents["b"] = agent("b", connected=False, incarnation=4)
    place = await run.during(run.join("b"))
    assert (place.incarnation, place.hosts, place.run_nonce) == (5, ("a", "b", "c"), b"nonce")
    assert "b comes back into the run" in run.notes


@in_a_loop
async def test_durable_storage_of_its_own_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.agents
    run.agents["b"] = agent("b", connected=False)
    (tmp_path / "own").mkdir()
    run.durable = tmp_path / "own"
    with pytest.raises(OutlastError, match=r"--durable .* is not the directory of the"):
        await run.during(run.join("b"))


@in_a_loop
async def test_a_fresh_host_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.agents
    run.agents["b"] = agent("b", connected=False, lapsed=True)
    place = await run.during(run.join("d"))
    assert (place.hosts, place.domains) == (("a", "b", "c", "d"), ("r1", "", "", "r9"))
    assert place.incarnation == 1


@in_a_loop
async def test_a_run_with_fixed_hosts_takes_these_only(tmp_path: Path) -> None:
    run = Run(tmp_path, fixed_hosts="their copies are placed")
    assert run.agents
    run.agents["b"] = agent("b", connected=False, lapsed=True)
    with pytest.raises(ConfigError, match="was started on a, b, c: their copies are placed"):
        await run.during(run.join("d"))


@in_a_loop
async def test_of_two_fresh_hosts_one_takes_one_place(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.agents
    run.agents["b"] = agent("b", connected=False, lapsed=True)

    async def both() -> NodeAccepted:
        found = await asyncio.gather(run.join("d"), run.join("e"), return_exceptions=True)
        errors = [one for one in found if isinstance(one, ConfigError)]
        assert len(errors) == 1 and "the run has all its nodes: a, c, " in str(errors[0])
        return next(one for one in found if isinstance(one, NodeAccepted))

    await run.during(both())


@pytest.mark.parametrize(
    ("who", "says"),
    [
        ({"host": "b"}, "an agent of host b takes part in it already"),
        ({"host": "d"}, "the run has all its nodes: a, b, c"),
        ({"host": "b", "script": "other.py"}, "its script is other.py, and that of the"),
    ],
)
@in_a_loop
async def test_a_node_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, who: dict[str, str], says: str
) -> None:
    run = Run(tmp_path)
    with pytest.raises(OutlastError) as caught:
        await run.during(run.join(**who))
    assert says in str(caught.value) and "nothing was started" in str(caught.value)


@in_a_loop
async def test_nodes_wait_while_a_later_term_awaits_the_others(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.agents = None
    loop = asyncio.get_running_loop()
    loop.call_later(LEASE_S / 2, setattr, run, "agents", {"a": agent("a")})
    assert (await run.during(run.join("b"))).incarnation == 1


@in_a_loop
async def test_a_beat_that_stands_still_is_of_no_live_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.ledger.beat(1, TermBeat(count=7, address=("", 0), meeting=run.meeting.address))
    live = LiveRun(run.plan())
    assert not await live.await_beat()
    beat = run.ledger.read_beat(1)
    assert live.has_stood_still(1, beat) and not live.has_stood_still(2, beat)
    run.meeting.close()


@in_a_loop
async def test_a_run_that_has_ended_is_not_watched(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.ledger.beat(1, TermBeat(count=7, address=("", 0), outcome="done"))
    live = LiveRun(run.plan())
    async with asyncio.timeout(LEASE_S / 2):
        assert not await live.await_beat()
    run.meeting.close()


@in_a_loop
async def test_a_beat_that_changes_is_of_a_live_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.ledger.beat(1, TermBeat(count=7, address=("", 0), meeting=run.meeting.address))
    beating = asyncio.create_task(run.beat())
    assert await LiveRun(run.plan()).await_beat()
    beating.cancel()
    run.meeting.close()
