"""Start of a node of a run of several nodes: the meeting, the first term, and its place."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from outlast import events
from outlast.checkpoint.upkeep.durable_targets import DurableTarget
from outlast.errors import OutlastError
from outlast.launch import preflight, run_directory, start_point, torchrun_arguments
from outlast.launch.host.worker_environment import free_port
from outlast.launch.nodes import node_facts, node_joining, own_directories
from outlast.launch.nodes.controller_tenure import NodeSetting, take_term
from outlast.launch.nodes.endpoint_listener import NONCE_BYTES
from outlast.launch.nodes.node_joining import LiveRun, open_journal_copies, open_ledger
from outlast.launch.nodes.node_meeting import NodeMeeting, NodeSeat, RunPlace
from outlast.launch.nodes.own_directories import OwnDirectories
from outlast.launch.nodes.run_node import FirstTerm, NodeEnd, RunNode
from outlast.launch.run_directory import RunDir
from outlast.launch.run_display import Display, DisplayRecord
from outlast.launch.run_journal import bars_of
from outlast.launch.terms.journal_copies import fetch_journals
from outlast.launch.terms.term_store import TermStore
from outlast.launch.torchrun.group_node import GroupNode, GroupSeat
from outlast.launch.torchrun.worker_commands import is_unmodified
from outlast.launch.torchrun_arguments import RunPlan
from outlast.telemetry.event_store import EventClock, EventWriter
from outlast.transport.node_link import NodeAccepted, NodeLink, run_token

SHOW = Callable[[Path], Display]
_SHARED = OwnDirectories(None, "an unmodified script needs the one of all nodes")


class NodeEntry(NamedTuple):
    """Start of a node. `live`: watch of earlier terms of the run."""

    plan: RunPlan
    identity: node_facts.NodeIdentity
    durable: tuple[DurableTarget, ...]
    live: LiveRun


def serve(plan: RunPlan, show: SHOW) -> NodeEnd:
    """Take part in a run until it ends. Raises ConfigError, RunDirError or StorageError before
    anything is started. No process is left alive."""
    path = Path(plan.run_dir)
    with run_directory.ignore_save_signal(), contextlib.ExitStack() as cleanup:
        durable = tuple(preflight.check_node(plan))
        identity = node_facts.identify(plan)
        run_dir: RunDir | None = None
        live = LiveRun(plan, own_directories.own_directories(plan, durable).home)
        if node_facts.holds_controller(plan) and not asyncio.run(live.await_beat()):
            run_dir = run_directory.take(path, plan.script, plan.args, plan.world)
            cleanup.callback(run_dir.release)
            run_directory.place_logs(run_dir, plan.log_dir, plan.run_id)
            torchrun_arguments.store_plan(run_dir, plan)
        lock_fd = run_directory.lock_host(path, identity.host)
        cleanup.callback(run_directory.unlock, lock_fd)
        if run_dir is not None:
            run_dir.lock_fds += (lock_fd,)
            identity = identity._replace(node_rank=0)
            entry = NodeEntry(plan, identity, durable, live)
            begin = _begin_group if is_unmodified(plan.command) else _begin
            return asyncio.run(begin(entry, run_dir, show))
        take_part = _take_part_in_group if is_unmodified(plan.command) else _take_part
        return asyncio.run(take_part(NodeEntry(plan, identity, durable, live), lock_fd, show))


async def _begin(entry: NodeEntry, run_dir: RunDir, show: SHOW) -> NodeEnd:
    """Gather the nodes of a run, take its first term, and lead it."""
    plan, identity, durable, live = entry
    clock, display = EventClock(), show(run_dir.path)

    def tell(text: str) -> None:
        display.event(events.Note(t_ns=clock.now_ns(), worker="", seat=-1, text=text))

    own = own_directories.own_directories(plan, durable)
    meeting = NodeMeeting(
        identity, run_dir.path, plan.node, tell, own_directories.folders_of(durable), own
    )
    try:
        seats = await _gather(meeting, entry, tell)
        address = meeting.address
        node_facts.choose_interface(address)
        stores = [target.store for target in durable]
        notes = start_point.adopt_job(run_dir, stores)
        runs = ((seat.host, seat.hello.run) for seat in seats if seat.link)
        notes += own_directories.settle(run_dir, meeting.home, runs)
        job = run_dir.job
        ledger = open_ledger(plan, job.run, job.home)
        await take_term(ledger, run_dir, identity.host, live, plan.limits.lease_s)
        journals = await _fetch_journals(plan, run_dir)
        own_directories.publish(run_dir)
        drains = stores[1:] if job.home else stores
        checkpoint, more = start_point.begin(run_dir, drains, tell, bars_of(run_dir.path))
    except OutlastError as error:
        await meeting.refuse_all(str(error))
        display.close()
        raise
    nonce = secrets.token_bytes(NONCE_BYTES)
    hosts = tuple(seat.host for seat in seats)
    token = run_token(identity.key, nonce)
    plan = replace(plan, master_addr=address, master_port=None)
    domains = tuple(seat.hello.domain for seat in seats)
    setting = NodeSetting(
        plan,
        identity,
        address,
        hosts,
        domains,
        token,
        nonce,
        ledger,
        durable=durable,
        tls=identity.peer_tls(hosts),
        journals=journals,
    )
    writer = EventWriter(
        run_dir.room("events"), f"launcher{run_dir.job.term:06d}", clock, in_thread=True
    )
    record = DisplayRecord(writer, display)
    try:
        record.run_started(plan, run_dir, checkpoint, notes + more)
        node = RunNode(setting, run_dir, record, clock)
        return await node.lead(FirstTerm(meeting, seats), checkpoint)
    finally:
        record.close()


async def _gather(
    meeting: NodeMeeting, entry: NodeEntry, tell: Callable[[str], None]
) -> list[NodeSeat]:
    """Return all nodes in the order of their ranks, once they are there. Raises ConfigError."""
    plan, (host, port) = entry.plan, entry.identity.endpoint
    hello_s = plan.limits.hello_s
    tell(f"waiting for {plan.node.total} nodes at {host}:{port} for at most {hello_s:g} s")
    seats = await meeting.gather(hello_s)
    places = (
        f"{seat.host} in {seat.hello.domain}" if seat.hello.domain else seat.host for seat in seats
    )
    tell(f"all nodes are there: {', '.join(places)}")
    return seats


async def _begin_group(entry: NodeEntry, run_dir: RunDir, show: SHOW) -> NodeEnd:
    """Gather the nodes of a script that calls no `init()`, and decide for their ranks."""
    plan, identity, durable, _ = entry
    clock, display = EventClock(), show(run_dir.path)

    def tell(text: str) -> None:
        display.event(events.Note(t_ns=clock.now_ns(), worker="", seat=-1, text=text))

    meeting = NodeMeeting(
        identity, run_dir.path, plan.node, tell, own_directories.folders_of(durable), _SHARED
    )
    try:
        seats = await _gather(meeting, entry, tell)
    except OutlastError:
        display.close()
        raise
    job, port = run_dir.job, plan.master_port
    if port is None:  # not of a static rendezvous: torchrun's agents choose the address, too
        address = meeting.address
        plan = replace(plan, master_addr=address, master_port=free_port(address))
    nonce, name = secrets.token_bytes(NONCE_BYTES), f"launcher{job.term:06d}"
    writer = EventWriter(run_dir.room("events"), name, clock, in_thread=True)
    record = DisplayRecord(writer, display)
    try:
        record.run_started(plan, run_dir, None, [])
        token = run_token(identity.key, nonce)
        hosts = tuple(seat.host for seat in seats)
        seat = GroupSeat(plan, identity.host, meeting.address, token, hosts)
        node = GroupNode(seat, run_dir, record, clock)
        here, store_port = identity.endpoint, plan.master_port or 0
        place = RunPlace(job.run, job.term, here, plan.master_addr, store_port)

        async def accept(seats: list[NodeSeat]) -> list[tuple[str, NodeLink]]:
            links = await meeting.accept(seats, place, nonce, keep=True)
            for _, link in links:
                link.use_key(token)
            return links

        async def replace_lost(lost: Sequence[str]) -> list[tuple[str, NodeLink]]:
            names, wait_s = " and ".join(dict.fromkeys(lost)), plan.limits.hello_s
            record.note(
                f"waiting for a node in place of {names} at {plan.node.endpoint} for at most"
                f" {wait_s:g} s (--limit hello_s=SECONDS); start the same command there"
            )
            links = await accept(await meeting.gather_again(lost, wait_s))
            record.note(f"{' and '.join(host for host, _ in links)} takes part in the run")
            return links

        end = await node.lead(port, await accept(seats), replace_lost)
        record.run_ended(end)
        return NodeEnd(end, leads=True)
    except OutlastError as error:
        await meeting.refuse_all(str(error))
        raise
    finally:
        await meeting.refuse_all("the run has ended")
        record.close()


class _Joined(NamedTuple):
    """A node that was accepted: its connection with the meeting, its place, and its record."""

    link: NodeLink
    place: NodeAccepted
    run_dir: RunDir
    record: DisplayRecord
    clock: EventClock


async def _join(entry: NodeEntry, lock_fd: int, show: SHOW) -> _Joined:
    """Meet the node that leads the run."""
    plan, identity, durable, live = entry
    path, clock = Path(plan.run_dir), EventClock()
    display = show(path)

    def tell(text: str) -> None:
        """Display a note before this node's first event."""
        display.event(events.Note(t_ns=clock.now_ns(), worker="", seat=-1, text=text))

    try:
        link, place = await node_joining.join(
            identity, path, plan.limits.hello_s, tell, own_directories.folders_of(durable), live
        )
    except BaseException:  # Ctrl-C as well: the terminal is as it was
        display.close()
        raise
    run_dir = own_directories.place_of(plan, place, lock_fd)
    run_directory.place_logs(run_dir, plan.log_dir, plan.run_id)
    name = f"agent-{identity.host}-{place.term:06d}"
    writer = EventWriter(run_dir.room("events"), name, clock, in_thread=True)
    return _Joined(link, place, run_dir, DisplayRecord(writer, display), clock)


async def _take_part_in_group(entry: NodeEntry, lock_fd: int, show: SHOW) -> NodeEnd:
    """Start and end ranks of a script that calls no `init()`, for the node that decides."""
    plan, identity = entry.plan, entry.identity
    link, place, run_dir, record, clock = await _join(entry, lock_fd, show)
    token = run_token(identity.key, place.run_nonce)
    link.use_key(token)
    if plan.master_port is None:
        plan = replace(plan, master_addr=place.master_addr, master_port=place.master_port)
    try:
        seat = GroupSeat(plan, identity.host, link.address, token, place.hosts)
        node = GroupNode(seat, run_dir, record, clock)
        return NodeEnd(await node.follow(place.hosts[0], link), leads=False)
    finally:
        record.close()


async def _fetch_journals(plan: RunPlan, run_dir: RunDir) -> TermStore | None:
    """Return the store of journals' copies, after those of earlier terms were read into the run
    directory; None if all nodes share the run directory. Raises StorageError, RunDirError."""
    job = run_dir.job
    if not job.home:
        return None
    journals = open_journal_copies(plan, job.run, job.home)
    await asyncio.to_thread(fetch_journals, journals, job.term, run_dir.room("journal"))
    return journals


async def _take_part(entry: NodeEntry, lock_fd: int, show: SHOW) -> NodeEnd:
    """Take part in a run that another node leads, from its start or later."""
    plan, identity, durable, _ = entry
    link, place, run_dir, record, clock = await _join(entry, lock_fd, show)
    await link.close()
    node_facts.choose_interface(link.address)
    plan = replace(plan, master_addr=place.master_addr, master_port=place.master_port)
    token = run_token(identity.key, place.run_nonce)
    ledger = open_ledger(plan, place.run, place.home)
    setting = NodeSetting(
        plan,
        identity,
        link.address,
        place.hosts,
        place.domains,
        token,
        place.run_nonce,
        ledger,
        durable=durable,
        tls=identity.peer_tls(place.hosts),
        incarnation=place.incarnation,
        journals=open_journal_copies(plan, place.run, place.home) if place.home else None,
    )
    try:
        return await RunNode(setting, run_dir, record, clock).follow(place.address)
    finally:
        record.close()
