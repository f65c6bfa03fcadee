"""Start of a node of a run of several nodes: the meeting, the first term, and its place."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from outlast import events
from outlast.checkpoint.upkeep.durable_targets import DurableTarget
from outlast.errors import OutlastError
from outlast.launch import preflight, run_directory, start_point, torchrun_arguments
from outlast.launch.nodes import node_facts, node_joining, own_directories
from outlast.launch.nodes.controller_tenure import NodeSetting, take_term
from outlast.launch.nodes.endpoint_listener import NONCE_BYTES
from outlast.launch.nodes.node_joining import LiveRun, open_journal_copies, open_ledger
from outlast.launch.nodes.node_meeting import NodeMeeting
from outlast.launch.nodes.run_node import FirstTerm, NodeEnd, RunNode
from outlast.launch.run_directory import RunDir
from outlast.launch.run_display import Display, DisplayRecord
from outlast.launch.run_journal import bars_of
from outlast.launch.terms.journal_copies import fetch_journals
from outlast.launch.terms.term_store import TermStore
from outlast.launch.torchrun_arguments import RunPlan
from outlast.telemetry.event_store import EventClock, EventWriter
from outlast.transport.node_link import run_token

SHOW = Callable[[Path], Display]


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
            return asyncio.run(_begin(entry, run_dir, show))
        return asyncio.run(_take_part(NodeEntry(plan, identity, durable, live), lock_fd, show))


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
    tell(
        f"waiting for {plan.node.total} nodes at {identity.endpoint[0]}:{identity.endpoint[1]}"
        f" for at most {plan.limits.hello_s:g} s"
    )
    try:
        seats = await meeting.gather(plan.limits.hello_s)
        address = meeting.address
        node_facts.choose_interface(address)
        places = (
            f"{seat.host} in {seat.hello.domain}" if seat.hello.domain else seat.host
            for seat in seats
        )
        tell(f"all nodes are there: {', '.join(places)}")
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
    plan = replace(plan, master_addr=address)
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
    plan, identity, durable, live = entry
    path, clock = Path(plan.run_dir), EventClock()
    display = show(path)

    def tell(text: str) -> None:
        """Display a note before this node's first event."""
        display.event(events.Note(t_ns=clock.now_ns(), worker="", seat=-1, text=text))

    try:
        address, place = await node_joining.join(
            identity, path, plan.limits.hello_s, tell, own_directories.folders_of(durable), live
        )
    except BaseException:
        display.close()
        raise
    run_dir = own_directories.place_of(plan, place, lock_fd)
    run_directory.place_logs(run_dir, plan.log_dir, plan.run_id)
    name = f"agent-{identity.host}-{place.term:06d}"
    record = DisplayRecord(
        EventWriter(run_dir.room("events"), name, clock, in_thread=True), display
    )
    node_facts.choose_interface(address)
    plan = replace(plan, master_addr=place.master_addr, master_port=place.master_port)
    token = run_token(identity.key, place.run_nonce)
    ledger = open_ledger(plan, place.run, place.home)
    setting = NodeSetting(
        plan,
        identity,
        address,
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
