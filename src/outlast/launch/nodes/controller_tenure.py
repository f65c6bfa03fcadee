"""One node's time as the controller of a run: the controller, its beat, and care of checkpoints."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import NamedTuple

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.replicas.memory_copies import KEEPER_DOORS, door_of
from outlast.checkpoint.stores import catalog
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.upkeep.durable_targets import DurableTarget
from outlast.controller.audit.audit_records import is_barred
from outlast.controller.inputs import EndRun
from outlast.errors import OutlastError, RunDirError
from outlast.launch.agent_listener import NodeListener
from outlast.launch.checkpoint_upkeep import CheckpointUpkeep
from outlast.launch.controller_shell import ControllerShell
from outlast.launch.host.keeper_pool import KeeperSite
from outlast.launch.nodes.node_facts import NodeIdentity
from outlast.launch.nodes.node_joining import LiveRun
from outlast.launch.nodes.node_meeting import RunPlace
from outlast.launch.nodes.own_directories import OwnDirectories, folders_of
from outlast.launch.nodes.running_meeting import RunningMeeting
from outlast.launch.run_directory import RunDir
from outlast.launch.run_display import DisplayRecord
from outlast.launch.run_journal import bars_of
from outlast.launch.start_point import CheckpointSearch
from outlast.launch.terms.journal_copies import JournalCopy
from outlast.launch.terms.lease_grants import LeaseGrants
from outlast.launch.terms.term_guard import TermGuard
from outlast.launch.terms.term_records import TermLedger, TermRecord
from outlast.launch.terms.term_store import TermStore
from outlast.launch.torchrun_arguments import RunPlan
from outlast.transport import messages
from outlast.transport.tls import PeerTls


class NodeSetting(NamedTuple):
    """A node of a run: its identity and address, all hosts by node rank with their failure domains,
    the run's token, the random number of which it was made, the run's terms, and durable storage.
    `journals`: copies of journals, if hosts have run directories of their own.
    """

    plan: RunPlan
    identity: NodeIdentity
    address: str
    hosts: tuple[str, ...]
    domains: tuple[str, ...]
    token: bytes
    nonce: bytes
    ledger: TermLedger
    durable: tuple[DurableTarget, ...] = ()
    tls: PeerTls | None = None
    incarnation: int = 1
    journals: TermStore | None = None

    @property
    def host(self) -> str:
        """Return the name of this host."""
        return self.identity.host

    @property
    def site(self) -> KeeperSite:
        """Return the places of keepers: on the hosts of the start."""
        nodes = tuple(zip(self.hosts, self.domains, strict=True))
        return KeeperSite(self.address, nodes[: self.plan.node.total])

    @property
    def fixed_hosts(self) -> str:
        """Return why no host can join that was not there at the start; "" if one can."""
        if self.plan.keeps_copies:
            return "copies in memory (--copies, --snapshot-every) are placed on these hosts"
        return ""

    def keepers(self, run_dir: RunDir) -> list[str]:
        """Return the addresses of all ranks' keepers, if their copies are shared."""
        folder = run_dir.path.absolute() / KEEPER_DOORS
        ranks = range(self.plan.world if self.plan.keeps_copies else 0)
        return [door_of(folder, rank) for rank in ranks]


class ControllerTenure:
    """The controller of the term in `run_dir.job`, which this process has created. `before`: the
    host of the controller from which it takes over, which has not answered for `silent_s`, and
    whose `successors` are this one's until it knows its agents."""

    def __init__(
        self,
        node: NodeSetting,
        run_dir: RunDir,
        record: DisplayRecord,
        checkpoint: messages.Checkpointed | None,
        before: str = "",
        silent_s: float = 0.0,
        successors: tuple[str, ...] = (),
    ) -> None:
        plan, job = node.plan, run_dir.job
        root, is_own = run_dir.checkpoints, node.journals is not None
        self._plan, self._record, self._node = plan, record, node
        drains = node.durable[1:] if is_own else node.durable
        keep = (is_own and node.durable[0].rule.keep) or plan.keep
        self._upkeep = CheckpointUpkeep(root, keep, drains, record, self._is_barred)
        self.shell = ControllerShell(
            plan,
            run_dir,
            node.token,
            record,
            checkpoint,
            CheckpointSearch(
                root,
                job.run,
                node.keepers(run_dir),
                node.token.hex(),
                [target.store for target in drains],
            ),
            self._upkeep.committed,
            NodeListener(
                node.address, node.hosts, node.domains, node.host, before, silent_s, node.tls
            ),
        )
        self._meeting = RunningMeeting(
            node.identity,
            (*([] if is_own else [run_dir.path]), *folders_of(node.durable)),
            node.address,
            self.shell.nodes,
            record.note,
            node.fixed_hosts,
            OwnDirectories(Path(job.home), "") if is_own else None,
        )
        self.deposed: asyncio.Future[TermRecord] = asyncio.get_running_loop().create_future()
        self._guard = TermGuard(
            node.ledger,
            job.term,
            self.shell.address,
            plan.limits.lease_s,
            self.deposed.set_result,
            record.note,
            self._meeting.address,
        )
        self._journal = JournalCopy(node.journals, job.term) if node.journals else None
        if self._journal:
            self._guard.before_read = self._journal.flush
        self._inherited = successors
        self._serving: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Begin the term once its first beat is in the store."""
        job, plan = self.shell.job, self._plan
        copies = (self._journal.add,) if self._journal else ()
        grants = LeaseGrants(
            self._node.host,
            job.term,
            plan.limits.lease_s,
            self._guard.confirm,
            self.shell.leased_agents,
            self._inherited,
        )
        self.shell.guard(self._guard.confirm, grants, *copies)
        place = RunPlace(
            job.run, job.term, self.shell.address, plan.master_addr, plan.master_port or 0, job.home
        )
        meeting = self._meeting.serve(place, self._node.nonce, plan.node.total, plan.limits.lease_s)
        self._serving = [asyncio.create_task(part) for part in (self._guard.run(grants), meeting)]
        self._guard.confirm(self.shell.begin)

    async def end(self, end: EndRun) -> None:
        """Send the end of the run to all agents, leave it in the store, and close everything."""
        self.shell.announce(end)
        self._stop_serving()
        cause = end.cause.detail if end.cause else ""
        try:
            await self._guard.end(end.outcome, end.exit_code, cause)
        except OutlastError as error:
            self._record.note(f"agents that are away do not learn the end of the run: {error}")
        self._meeting.remove_proofs()
        await self.close(done=end.outcome == "done")
        self._record.run_ended(end)

    async def close(self, *, done: bool = False) -> None:
        """Stop to act as controller."""
        self._stop_serving()
        self.shell.close()
        limits = self._plan.limits
        never: asyncio.Future[EndRun] = asyncio.get_running_loop().create_future()
        await self._upkeep.close(limits.save_s if done else limits.stop_s, never, done=done)

    def _stop_serving(self) -> None:
        for task in self._serving:
            task.cancel()
        self._meeting.close()

    def _is_barred(self, place: SavePoint) -> bool:
        return self.shell.is_barred(place)


def newest_checkpoint(run_dir: RunDir) -> messages.Checkpointed | None:
    """Return the newest complete checkpoint, unread: a restart verifies it. Writers may be alive.

    Raises RunDirError or StorageError.
    """
    bars = bars_of(run_dir.path)
    root = run_dir.checkpoints
    found = catalog.newest_checkpoint(
        Folder(root),
        lambda _damage: None,
        job=run_dir.job.run,
        barred=lambda place: is_barred(bars, place.n, place.directory),
    )
    if found is None:
        return None
    path = str(root.absolute() / found.place.directory)
    return messages.Checkpointed(n=found.place.n, step=found.place.step, path=path)


async def take_term(
    ledger: TermLedger, run_dir: RunDir, host: str, live: LiveRun, wait_s: float
) -> None:
    """Create the term of a start, after any older one; `wait_s`: a lease. `live`: a watch of the
    older term before.

    Raises RunDirError if the run is alive under another controller, StorageError.
    """
    newest = await asyncio.to_thread(ledger.newest, max(0, run_dir.job.term - 2))
    if newest is not None:
        before = await asyncio.to_thread(ledger.read_beat, newest.term)
        is_dead = live.has_stood_still(newest.term, before)
        end_s = asyncio.get_running_loop().time() + (0.0 if is_dead else wait_s)
        while not (before and before.outcome) and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(wait_s / 16)
            now = await asyncio.to_thread(ledger.read_beat, newest.term)
            if now != before:
                raise _in_use(run_dir, newest)
    term = max(run_dir.job.term, newest.term + 1 if newest else 0)
    record = TermRecord(term=term, run=run_dir.job.run, host=host, claim=secrets.token_hex(16))
    if not await asyncio.to_thread(ledger.claim, record):
        raise _in_use(run_dir, await asyncio.to_thread(ledger.read, term))
    run_dir.adopt(run_dir.job.run, term)


def _in_use(run_dir: RunDir, record: TermRecord | None) -> RunDirError:
    owner = f"term {record.term} on {record.host}" if record else "another controller"
    return RunDirError(
        f"run directory {run_dir.path} is in use by {owner}; nothing was started; wait for its end,"
        " stop it, or choose another --run-dir"
    )
