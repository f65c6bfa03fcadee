"""A simulated worker that follows docs/protocol.md and fails as planned."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from outlast.events import Fault
from outlast.testing.absent_ranks.rank_histories import mix, own_step
from outlast.testing.absent_ranks.simulated_data_rank import DataProcess
from outlast.testing.simulated_process import Ballot, WorkerKilled, WorkerMesh
from outlast.transport import messages

if TYPE_CHECKING:
    from outlast.testing.simulated_agent import SimAgent


class SimWorker(DataProcess):
    """A rank or a spare: its seat, its state, its answers."""

    def __init__(self, agent: SimAgent, name: str) -> None:
        super().__init__(agent, name)
        self.hello: messages.WorkerHello | None = None
        self.model = self.own = 0
        self.has_state = self.is_set_up = False
        self.generation = self.closed = self.opened = self.answered = self.readied = self.leaves = 0
        self.decided_n = -1
        self.owes_status = False
        self.met: set[int] = set()  # generations whose ranks have met
        self.mesh: WorkerMesh | None = None
        self.received: dict[int, tuple[str, int, float]] = {}
        self.sent: dict[int, tuple[str, int, float]] = {}
        self.ballot: Ballot | None = None
        self.begin_parts()
        self.soon(0.3, 1.2, self._say_hello)

    def leave(self) -> None:
        if self.mesh:
            self.mesh.remove(self)

    # --- frames of the controller ---

    def hear(self, body: messages.AnyBody) -> None:
        """Handle a frame of the controller."""
        match body:
            case messages.Seat():
                self._take_seat(body)
            case messages.Close():
                self._close(body.generation)
            case messages.Decide():
                self._decide(body)
            case messages.Connect():
                self._connect(body)
            case messages.Met():
                if {int(value) for value in body.values} != self.ledger.present(body.generation):
                    self.ledger.fail(f"{self.name} met {body.values}")
                self.met.add(body.generation)
                self.mesh_when_met()
            case messages.Open():
                self._open(body)
            case messages.SharedValueMake():
                self.cluster.makes(self)
                long_s = 4.0 if self.line.dice.random() < 0.1 else 0.3
                reply = messages.SharedValueMade(name="id", value=f"made by {self.name}".encode())
                self.soon(0.0, long_s, lambda: self.say(reply))
            case messages.SharedValueReply():
                if not self.is_set_up:
                    self.is_set_up = True
                    self.state = "idle"
                    self.proceed()
            case messages.AuditRequest() | messages.AuditAgreed():
                if self.hear_audit(body):
                    self.vote()
            case messages.Leave():
                self.leaves = body.generation
            case messages.SaveEvery():
                if self.seat != self.deputies.get(0, 0):
                    self.ledger.fail(f"{self.name} at rank {self.seat}, not 0, received SaveEvery")
            case messages.Stop():
                self.die(Fault(kind="exited", detail="stopped", exit_code=0 if body.ok else 3))

    def _say_hello(self) -> None:
        self.point("spawned")
        self.state = "waiting"
        self.hello = messages.WorkerHello(pid=1, fingerprint={}, address=f"{self.agent.name}:1")
        self.say(self.hello)
        self.point("hello")

    def _take_seat(self, body: messages.Seat) -> None:
        if self.seat >= 0:
            if self.readied == self.generation == body.generation:
                self.say_again("Ready")
            return
        self.ledger.seated[self.name] = body.seat
        self.seat, self.n, self.generation = body.seat, body.n, body.generation
        self.decided_n = body.n
        self.state = "setup"
        self.point("seated")
        if body.first:
            n = self.load(body.checkpoint)
            if n != body.n:
                self.ledger.fail(f"{self.name} starts at {body.n} from the checkpoint of {n}")
            self.model = self.ledger.model(n)
            self.take_first_place(body.checkpoint)
            self.work(0.02, 0.1, self.stand)
        else:
            self.take_place(body)
            self.is_set_up = True
            self.protect()
            self.work(0.2, 0.8, self.stand)

    def _close(self, generation: int) -> None:
        if self.seat < 0:
            return
        self.generation = max(self.generation, generation)
        self.closed = max(self.closed, generation)
        self.point("closed")
        self.say_again("Status") if self.answered >= generation else self._leave_generation(None)

    def _sever(self) -> None:
        """End the running attempt; a pending vote is answered now or never."""
        if self.state == "voting":
            self.token += 1
            self.busy = False
            if self.has_won(self.ballot) and self.line.dice.random() < 0.5:
                self._apply(self.generation if self.opened == self.generation else self.opened)
            else:
                self.state = "prepared"
        elif self.state == "running":
            self.token += 1
            self.busy = False

    def _leave_generation(self, fault: Fault | None) -> None:
        self._sever()
        if self.state == "applying":
            self.owes_status = True
            self.soon(0.25, 0.3, self._answer_if_won)
        else:
            self._report(fault)

    def _answer_if_won(self) -> None:
        self._report(None) if self.owes_status and self.state == "applying" else None

    def _report(self, fault: Fault | None) -> None:
        self.owes_status = False
        self.answered = generation = self.generation
        self.wait_for_word(lambda: self.generation == generation)
        n, word = self.n + (self.state == "applying"), self.word()
        self.tell(self.status_at(n, word, fault))
        self.point("reported")

    def trouble(self, fault: Fault) -> None:
        if self.answered < self.generation and self.seat >= 0 and self.state != "applying":
            self._leave_generation(fault)

    def peer_gone(self, generation: int) -> None:
        """Notice that a peer's connection was closed."""
        fault = Fault(kind="transport", detail="connection closed by peer")
        if generation == self.generation:
            self.call(partial(self.trouble, fault))

    def tear(self, fault: Fault | None = None) -> None:
        self.token += 1
        self.busy = True
        self.state = "torn"
        self._report(fault or Fault(kind="torn", detail="failed while applying"))
        raise WorkerKilled  # alive, but idle until it is killed

    def _decide(self, body: messages.Decide) -> None:
        if body.generation <= self.closed or body.generation < self.generation:
            return
        if self.readied == body.generation:
            self.say_again("Ready")
            return
        self.generation, self.decided_n, self.base = body.generation, body.n, body.copy
        self.point("decided")
        may_apply = self.state in ("prepared", "applying") and body.n == self.n + 1
        may_apply |= body.copy is not None and body.n == self.n + (self.state == "applying") - 1
        if body.n != self.n and not may_apply:
            self.ledger.fail(f"{self.name} ({self.state} at {self.n}) received Decide({body.n})")
        self.proceed()

    def proceed(self) -> None:
        """Make the next move, if nothing is under way and one is due."""
        if self.lag_s:
            self.soon(self.lag_s, self.lag_s, self.proceed)
            return
        if self.busy or self.stalled or self.seat < 0 or self.state in ("torn", "setup"):
            return
        if self.opened == self.generation > max(self.closed, self.answered):
            if self.state == "idle":
                self._attempt()
        elif self.generation > self.closed and self.readied < self.generation:
            if self.state == "prepared" and self.decided_n == self.n + 1:
                self._apply(self.generation)
            elif self.state in ("prepared", "running"):
                self.state = "idle"
                self.work(0.001, 0.02, lambda: self.point("settled"))
            elif self.decided_n == self.n:
                self.readied = self.generation
                self.tell(messages.WorkerReady(generation=self.generation, n=self.n))
                self.point("ready")
            elif self.decided_n == self.n - 1 and self.state == "idle":
                self.take_back()

    # --- connecting ---

    def _connect(self, body: messages.Connect) -> None:
        if body.generation <= self.closed or body.generation != self.generation:
            return
        if self.mesh is not None and self.mesh.generation == body.generation:
            self.say_again("Joined")
            return
        if self.readied < body.generation:
            self.ledger.fail(f"{self.name} received Connect before its Ready")
        self.sent, self.received, self.staged = {}, {}, None
        self.replies.pop("Joined", None)
        self.mesh, self.units = self.cluster.mesh(body), body.units
        self.connect_partners(body)
        self.mesh.arrive(self)
        self.point("connect")
        self.say(self.mesh.meet_of(self.seat))
        for member in tuple(self.mesh.members.values()):
            member.call(member.mesh_when_met)

    def mesh_when_met(self) -> None:
        """Connect once all members' addresses are known."""
        mesh = self.mesh
        if mesh is None or mesh.generation != self.generation or self.generation <= self.closed:
            return
        met = mesh.generation in self.met
        if "Joined" in self.replies or self.busy or not (met and mesh.lets_connect(self)):
            return
        self.point("meshed")
        self.work(0.005, 0.03, self._move_state)

    def _move_state(self) -> None:
        mesh = self.mesh
        if mesh is None or mesh.generation <= self.closed:
            return
        for donor, joiner in mesh.transfers:
            if donor == self.seat:
                self.must_be_donor_of(mesh.members[joiner])
                self.point("send")
                mesh.states[donor, joiner] = self.model
                self.sent[joiner] = (f"{mix(self.model):x}", 8, 0.1)
                receiver = mesh.members[joiner]
                receiver.soon(0.001, 0.1, receiver.receive)
        if self.seat in mesh.rebuilt:
            self.rebuild(mesh)
        self.carry()
        self.receive()
        self._joined_when_moved()

    def receive(self) -> None:
        """Receive the state from donors that have sent it."""
        mesh = self.mesh
        if mesh is None or mesh.generation <= self.closed:
            return
        for (donor, joiner), model in mesh.states.items():
            if joiner == self.seat and donor not in self.received:
                model += self.point("receive") == "corrupt"
                self.staged = model
                self.received[donor] = (f"{mix(model):x}", 8, 0.1)
        self._joined_when_moved()

    def _joined_when_moved(self) -> None:
        mesh = self.mesh
        assert mesh is not None
        due = sum(joiner == self.seat for _, joiner in mesh.transfers)
        has_all = len(self.received) >= due and mesh.is_complete() and self.has_carried()
        if not has_all or self.busy or "Joined" in self.replies:
            return
        body = messages.Joined(generation=mesh.generation, sent=self.sent, received=self.received)
        self.tell(body)
        self.point("joined")

    def _open(self, body: messages.Open) -> None:
        if body.generation <= self.closed or body.generation != self.generation:
            return
        if self.answered >= body.generation:
            self.say_again("Status")
            return
        if self.opened == body.generation:
            self.say_again("Finished")
            return
        if self.staged is not None:
            self.model, self.staged, self.has_state = self.staged, None, True
        if not self.is_set_up:
            self.has_state = True
        if not self.has_state:
            self.ledger.fail(f"{self.name} runs without having received its state")
        self.opened = body.generation
        self.partners_opened()
        self.open_data(body.step)
        if body.ask == "drain":
            self.ledger.last = min(self.ledger.last, body.n)
        self.ledger.stands(self.name, self.seat, body.n, self.model, self.own)
        if body.ask and self.n and self.is_first and self.data is not None:
            self.save()
        self.point("opened")
        if self.is_set_up:
            self.proceed()
        else:
            self.state = "setup"
            self.soon(0.05, 0.2, self._set_up)

    def _set_up(self) -> None:
        self.point("setup")
        self.soon(self.lag_s, self.lag_s, self._protect)

    def _protect(self) -> None:
        self.protect()
        self.say(messages.Recorded(seat=self.seat, record=f"record {self.seat}".encode()))
        self._ask()

    def _ask(self) -> None:
        if not self.is_set_up:
            self.say(messages.SharedValueRequest(name="id"))
            self.soon(4.0, 5.0, self._ask)  # a lost request is repeated

    # --- phases ---

    def _attempt(self) -> None:
        if self.n >= self.ledger.last >= 0:
            self.state = "finished"
            self.tell(messages.Finished(n=self.n, step=self.step))
            self.point("finished")
            return
        self.write_before()
        if self.leaves == self.generation:
            self._leave_generation(None)
            return
        self.state = "running"
        self.point("attempt")
        if self.answered >= self.generation:
            return
        if self.cluster.has_bug(self.seat, self.n + 1):
            self.trouble(Fault(kind="raised", detail="a bug", traceback="always"))
            return
        self.work(*self.begin_pace(), self.vote)

    def vote(self) -> None:
        """Vote on the phase under way, unless an answer to an audit is due."""
        mesh = self.mesh
        if mesh is None or self.state != "running" or self.opened != self.generation:
            return
        if self.waits():
            return
        self.strike_gradient()
        self.write(f"after:{self.n + 1}", own_step(self.own, self.n + 1))
        self.write(f"result:{self.n + 1}", self.n + 1)
        if self.answered >= self.generation:
            return
        self.ledger.stands(self.name, self.seat, self.n, self.model, self.own)
        self.pace.vote(self.line.now_s)
        self.state = "voting"
        self.busy = True
        self.ballot = mesh.vote(self)
        self.point("voted")

    def answer(self, token: int) -> None:
        """Deliver the result of a vote that is won, if this process still waits for it."""
        self.call(partial(self._win, token))

    def _win(self, token: int) -> None:
        if token == self.token and self.state == "voting":
            if self.agent.may_apply():
                self.busy = False
                self._apply(self.opened)
            else:  # it is killed, or the lease is renewed
                self.soon(0.05, 0.05, partial(self._win, token))

    def _apply(self, generation: int) -> None:
        self.state = "applying"
        assert self.ballot is not None
        self.ledger.applies(self.name, generation, self.n + 1, self.ballot.shares)
        self.point("answered")
        self.work(0.005, 0.03, self._applied)

    def _applied(self) -> None:
        self.point("applying")
        self.model = self.ledger.after(self.model, self.n + 1)
        self.own = own_step(self.own, self.n + 1)
        self.n += 1
        self.commit_data()
        self.ledger.completes(self.name, self.opened, self.n, self.model)
        self.completed += 1
        self.pace.complete(self.line.now_s, self.opened, self.n)
        self.state = "idle"
        self.work(0.001, 0.05, self.tail)
        self.audit()
        if self.owes_status:
            self._report(None)
        self.point("applied")
        plan = self.cluster.plan
        skips = plan.skips > 0 and self.line.dice.random() < plan.skips
        if self.is_first and self.cluster.checkpoint_due(self.n) and not skips:
            self.save()
