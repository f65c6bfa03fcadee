"""Simulated agents in a process of their own: real frames, real sockets, no training.

Each agent has the ranks of one host. They answer as docs/protocol.md says, at once, and build the
groups of a job with sharding inside a host and replication across hosts.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple

from outlast.config import Limits
from outlast.events import Fault
from outlast.launch.host.agent_lease import renewal_period_s
from outlast.transport import messages
from outlast.transport.channel import FrameDecoder, encode_envelope, pack_frame
from outlast.transport.rank_spans import RankSpan
from outlast.transport.rendezvous_messages import HostMeetings

CONNECTING_MAX = 16
KINDS = ("parameters", "buffers", "optimizers")
LEASE_S = 60.0  # the machine is one, and slower than two thousand; they renew for the usual lease
RENEWING_SHARE = 50  # of the agents that renew in one turn
ADDRESS = b"a" * 154  # of a gloo device, as torch 2.13 publishes it
ID = b"i" * 128  # of an NCCL communicator
FAN_OUT = 32  # of the control tree
RECORD = b"r" * 2048
FACTS = {f"fact{index}": "a value of twenty bytes" for index in range(12)}


class Job(NamedTuple):
    """What the simulated job is."""

    world: int
    per_host: int
    spares: int
    mesh: str  # "gloo": replicas of a shard are a gloo group; "id": they meet by one id, as NCCL's


class Report(NamedTuple):
    """Bytes so far, when something has happened."""

    what: str
    wall_s: float
    sent_bytes: int  # by the controller
    received_bytes: int  # by the controller
    frames: int  # to the controller


class Worker:
    """One simulated process."""

    def __init__(self, name: str, seat: int) -> None:
        self.name, self.seat, self.address = name, seat, ""
        self.n = self.seq = self.generation = 0
        self.awaited = 0  # rendezvous values of the groups that it builds
        self.has_state = False
        self.got: dict[int, int] = {}  # generation -> rendezvous values
        self.joining: messages.Connect | None = None


class Node:
    """One agent."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet, self.name = fleet, name
        self.sock = socket.create_connection(fleet.address)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.decoder = FrameDecoder(fleet.token)
        self.workers: dict[str, Worker] = {}
        self.meetings = HostMeetings()
        self.seq = 0
        self.is_known = False
        self.queued: list[bytes] = []
        self.say(
            messages.AgentHello(host=name, address="", capacity=fleet.job.per_host, lease_s=LEASE_S)
        )
        self.flush()

    def say(self, body: messages.AnyBody, worker: Worker | None = None) -> None:
        if worker is None:
            self.seq += 1
            seq = self.seq
        else:
            worker.seq += 1
            seq = worker.seq
        envelope = messages.MessageEnvelope(
            run=self.fleet.run,
            term=1,
            agent=self.name,
            incarnation=1,
            worker=worker.name if worker else "",
            seq=seq,
            body=body,
        )
        self.queued.append(encode_envelope(envelope))

    def flush(self) -> None:
        """Send what is queued as one frame, as a channel does at the end of a turn of its loop."""
        if self.queued:
            frame = pack_frame(self.queued, self.fleet.token)
            self.queued.clear()
            self.fleet.received_bytes += len(frame)
            self.fleet.frames += 1
            self.sock.sendall(frame)

    def read(self) -> None:
        data = self.sock.recv(1 << 18)
        if not data:
            raise SystemExit(f"the controller has left {self.name}")
        self.fleet.sent_bytes += len(data)
        for envelope in self.decoder.feed(data):
            self._hear(envelope.to, envelope.body)
        self.flush()

    def renew(self) -> None:
        beats = {w.name: (w.n, w.n, "running", 0.5) for w in self.workers.values()}
        self.say(messages.Renew(beats=beats))
        self.flush()

    def _hear(self, names: tuple[str, ...], body: messages.AnyBody) -> None:
        match body:
            case messages.Renewed():
                self.is_known = True
            case messages.Spawn():
                worker = self.workers[body.worker] = Worker(body.worker, body.seat)
                self.say(messages.Spawned(worker=body.worker, pid=1))
                worker.address = f"10.0.0.1:{30000 + self.fleet.spawned % 30000}"
                self.fleet.spawned += 1
                hello = messages.WorkerHello(pid=1, fingerprint=FACTS, address=worker.address)
                self.say(hello, worker)
            case messages.Kill() | messages.Stop():
                pass
            case _:
                workers = [self.workers[name] for name in names if name in self.workers]
                if isinstance(body, messages.Connect):
                    for worker in workers:
                        self.meetings.connect(body.generation, worker.seat)
                for worker in workers:
                    self._act(worker, body)

    def _act(self, worker: Worker, body: messages.AnyBody) -> None:
        fleet = self.fleet
        match body:
            case messages.Seat():
                worker.seat, worker.n, worker.generation = body.seat, body.n, body.generation
                fleet.seats[body.seat] = (self, worker)
                self.say(messages.WorkerReady(generation=body.generation, n=body.n), worker)
            case messages.Close():
                fleet.begin_incident()
                state = "running" if worker.has_state else "joining"
                self.say(
                    messages.Status(
                        generation=body.generation, n=worker.n, step=worker.n, state=state
                    ),
                    worker,
                )
            case messages.Decide():
                worker.generation, worker.n = body.generation, body.n
                self.say(messages.WorkerReady(generation=body.generation, n=body.n), worker)
            case messages.Connect():
                worker.joining = body
                self._publish(worker, body.generation)
                self._join(worker)
            case messages.RendezvousValue() | messages.Met():
                worker.got[body.generation] = worker.got.get(body.generation, 0) + 1
                self._join(worker)
            case messages.Open():
                self._step(worker, body)
            case messages.AuditAgreed():
                fleet.counts("settled")

    def _publish(self, worker: Worker, generation: int) -> None:
        worker.awaited = 0
        for name, ranks in self.fleet.groups(worker.seat):
            spans = (RankSpan(ranks.start, len(ranks), ranks.step),)
            if name.startswith("id"):
                worker.awaited += worker.seat != ranks[0]
                if worker.seat == ranks[0]:
                    put = messages.Put(generation=generation, key=name, value=ID, ranks=spans)
                    self.say(put, worker)
                continue
            worker.awaited += 1
            meet = messages.Meet(
                generation=generation,
                name=name,
                ranks=spans,
                value=ADDRESS,
                parts=b"8 bytes " * len(ranks),
                address=worker.address,
            )
            self._meet(worker, meet)

    def _meet(self, worker: Worker, meet: messages.Meet) -> None:
        """Pass on what this host has for a group, or answer it, as an agent does."""
        met = self.meetings.add(worker.seat, meet)
        if isinstance(met, messages.Met):
            for one in self.workers.values():
                if one.seat in met.parts:
                    self._act(one, met)
        elif met is not None:
            self.say(met, worker)

    def _join(self, worker: Worker) -> None:
        body = worker.joining
        if body is None or worker.got.get(body.generation, 0) < worker.awaited:
            return
        worker.joining, worker.got = None, {}
        same = ("digest", 1 << 30, 0.1)
        self.say(
            messages.Joined(
                generation=body.generation,
                sent={to: same for donor, to in body.transfers if donor == worker.seat},
                received={donor: same for donor, to in body.transfers if to == worker.seat},
            ),
            worker,
        )

    def _step(self, worker: Worker, body: messages.Open) -> None:
        fleet = self.fleet
        fleet.counts("opened")
        if not worker.has_state and body.generation == 1:
            shards = b"shards of %d" % (worker.seat % fleet.job.per_host)
            self.say(
                messages.StateProtected(schema="schema", summary="a model", shards=shards), worker
            )
            self.say(messages.Recorded(seat=worker.seat, record=RECORD), worker)
        worker.has_state, worker.n = True, body.n + 1
        kinds: dict[str, bytes] = dict.fromkeys(KINDS, b"16 bytes, digest")
        self.say(
            messages.Audited(
                generation=body.generation,
                n=worker.n,
                step=worker.n,
                replica_set=b"%d" % (worker.seat % fleet.job.per_host),
                kinds=kinds,
            ),
            worker,
        )


class Fleet:
    """All agents of a job, driven by one loop."""

    def __init__(
        self, job: Job, address: tuple[str, int], run: str, token: bytes, line: Connection
    ) -> None:
        self.job, self.address, self.run, self.token = job, address, run, token
        self._line = line
        self._selector = selectors.DefaultSelector()
        self._counted: dict[str, int] = {}
        self.seats: dict[int, tuple[Node, Worker]] = {}
        self.spawned = self.sent_bytes = self.received_bytes = self.frames = 0
        hosts = -(-(job.world + job.spares) // job.per_host)
        self._nodes: list[Node] = []
        self._names = [f"host{index:05d}" for index in range(hosts)]

    def groups(self, seat: int) -> Iterator[tuple[str, range]]:
        """Yield the groups that a rank builds: its control blocks, its shards, its replicas."""
        world, per_host = self.job.world, self.job.per_host
        stride = 1
        while seat % stride == 0 and (stride == 1 or stride < world):
            first = seat - seat % (stride * FAN_OUT)
            ranks = range(first, min(world, first + stride * FAN_OUT), stride)
            yield f"control {first}-{ranks[-1]} of {len(ranks)}/0/", ranks
            stride *= FAN_OUT
        first = seat - seat % per_host
        yield f"ranks {first}-{first + per_host - 1}/0/", range(first, first + per_host)
        replicas = range(seat % per_host, world, per_host)
        yield f"{self.job.mesh} {replicas[0]}/0/", replicas

    def counts(self, what: str) -> None:
        """Count a rank to which this has happened; report the last one."""
        self._counted[what] = self._counted.get(what, 0) + 1
        if self._counted[what] == self.job.world:
            self._counted[what] = 0
            self._report(what)

    def begin_incident(self) -> None:
        """Count from 0: a generation has ended, and some ranks may not have heard of its Open."""
        self._counted.clear()

    def _report(self, what: str) -> None:
        self._line.send(
            Report(what, time.monotonic(), self.sent_bytes, self.received_bytes, self.frames)
        )

    def serve(self) -> None:
        """Connect, answer, renew; strike when told."""
        self._selector.register(self._line, selectors.EVENT_READ, None)
        hosts = len(self._names)
        period_s = renewal_period_s(Limits().lease_s, hosts) / RENEWING_SHARE
        renew_s = time.monotonic() + period_s
        turn = 0
        while True:
            self._connect()
            for key, _ in self._selector.select(0.02):
                if key.data is not None:
                    key.data.read()
                elif not self._obey():
                    return
            now_s = time.monotonic()
            if now_s >= renew_s:
                renew_s = now_s + period_s
                turn = (turn + 1) % RENEWING_SHARE
                for node in self._nodes[turn::RENEWING_SHARE]:
                    node.renew()

    def _connect(self) -> None:
        fresh = sum(1 for node in self._nodes[-CONNECTING_MAX:] if not node.is_known)
        while self._names and fresh < CONNECTING_MAX:
            node = Node(self, self._names.pop(0))
            self._nodes.append(node)
            self._selector.register(node.sock, selectors.EVENT_READ, node)
            fresh += 1

    def _obey(self) -> bool:
        """Lose the worker of a rank, or end."""
        seat = self._line.recv()
        if seat is None:
            return False
        node, worker = self.seats[seat]
        self._report("struck")
        del node.workers[worker.name]
        node.say(
            messages.WorkerLostReport(
                worker=worker.name,
                fault=Fault(kind="killed", detail="SIGKILL", signal=9),
                n=worker.n,
                step=worker.n,
                state="running",
                slots={f"before:{worker.n}": b"own state" * 100},
            )
        )
        node.flush()
        return True
