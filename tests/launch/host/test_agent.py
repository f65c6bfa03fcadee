"""Agent against a controller of the test: frames and leases."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import pytest

from outlast.launch.host.agent import Agent
from outlast.launch.host.worker_family import become_subreaper
from outlast.launch.host.worker_pool import WorkerHandle, WorkerPool
from outlast.launch.run_display import DisplayRecord
from outlast.transport import messages
from outlast.transport.channel import Channel

if TYPE_CHECKING:
    from tests.launch.conftest import Stage

pytestmark = pytest.mark.process
SomeBody = TypeVar("SomeBody", bound=messages.Body)
# A worker that says Hello and then whatever it hears: the name of each body, on stdout.
SPEAKER = """
import socket
from outlast.transport import channel, messages
from outlast.config import worker_settings
settings = worker_settings()
token = bytes.fromhex(settings.token)
sock = socket.socket(fileno=settings.control_fd)
seq = 0
def say(body):
    global seq
    seq += 1
    sock.sendall(channel.encode_frame(messages.MessageEnvelope(run=settings.run, term=settings.term,
        agent="x", incarnation=99, worker="somebody else", seq=seq, body=body), token))
say(messages.WorkerHello(pid=os.getpid(), fingerprint={}, address="127.0.0.1:1"))
tell(settings.worker)
decoder = channel.FrameDecoder(token)
while data := sock.recv(65536):
    for envelope in decoder.feed(data):
        print(type(envelope.body).__name__)
        if isinstance(envelope.body, messages.Seat):
            tell(f"device-{envelope.body.local_rank}")
        if isinstance(envelope.body, messages.Close):
            say(messages.Status(generation=envelope.body.generation, n=4, step=4, state="idle"))
        if isinstance(envelope.body, messages.Stop):
            say(messages.Finished(n=9))
            sys.exit(0)
"""


class Desk:
    """The controller's end: keeps every frame, sends what the test says."""

    def __init__(self, stage: Stage, crew: WorkerPool) -> None:
        self._stage, self._crew = stage, crew
        self.frames: list[messages.MessageEnvelope] = []
        self.channel: Channel | None = None
        self.answers = True
        self.seq = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(self.listener, self._accept)
        self.plain: list[WorkerHandle] = []
        address = self.listener.getsockname()[:2]
        self.agent = Agent(crew, address, stage.token, self.plain.append)
        self.serving = asyncio.create_task(self.agent.run())

    def _accept(self) -> None:
        sock, _ = self.listener.accept()
        self.channel = Channel(sock, self._stage.token, self._heard, lambda _reason: None)

    def _heard(self, frame: messages.MessageEnvelope) -> None:
        self.frames.append(frame)
        if self.answers and isinstance(frame.body, messages.Renew | messages.AgentHello):
            self.say(messages.Renewed(lease_s=self._crew.plan.limits.lease_s))

    def say(self, body: messages.AnyBody, worker: str = "", seq: int = 0) -> None:
        assert self.channel
        self.seq += 1
        job = self._crew.run_dir.job
        incarnation = self.frames[-1].incarnation if self.frames else 1
        self.channel.send(
            messages.MessageEnvelope(
                run=job.run,
                term=job.term,
                agent="here",
                incarnation=incarnation,
                to=(worker,) if worker else (),
                seq=seq or self.seq,
                body=body,
            )
        )

    def of(self, kind: type[SomeBody]) -> list[SomeBody]:
        return [frame.body for frame in self.frames if isinstance(frame.body, kind)]

    async def until(self, kind: type[SomeBody], count: int = 1) -> SomeBody:
        await self._stage.eventually_async(
            lambda: len(self.of(kind)) >= count, f"{count} {kind.__name__}"
        )
        return self.of(kind)[count - 1]

    async def close(self) -> None:
        self.serving.cancel()
        await asyncio.wait({self.serving})
        self.loop.remove_reader(self.listener)
        self.listener.close()
        if self.channel:
            self.channel.close()


def with_desk(
    stage: Stage, text: str, act: Callable[[Desk, WorkerPool], Awaitable[None]], *flags: str
) -> None:
    become_subreaper()

    async def scene(crew: WorkerPool, _record: DisplayRecord) -> None:
        desk = Desk(stage, crew)
        try:
            await desk.until(messages.AgentHello)
            await act(desk, crew)
        finally:
            await desk.close()

    stage.play(stage.plan(stage.script(text), *flags), scene)


def test_a_workers_life(stage: Stage) -> None:
    """Spawned, relayed both ways under its true name, its last words before its loss."""

    async def act(desk: Desk, crew: WorkerPool) -> None:
        desk.say(messages.Spawn(worker="w1-0", seat=0))
        assert (await desk.until(messages.Spawned)).pid == crew.workers["w1-0"].process.pid
        await desk.until(messages.WorkerHello)
        desk.say(messages.Close(generation=1, reason="test"), "w1-0")
        assert (await desk.until(messages.Status)).n == 4
        desk.say(messages.Stop(ok=True, reason="done"), "w1-0")
        lost = await desk.until(messages.WorkerLostReport)
        assert (lost.worker, lost.fault.kind, lost.fault.exit_code) == ("w1-0", "exited", 0)
        kinds = [type(frame.body).__name__ for frame in desk.frames if frame.body is not None]
        assert kinds.index("Finished") < kinds.index("WorkerLostReport")
        spoken = [frame for frame in desk.frames if frame.worker]
        assert {(f.worker, f.agent, f.incarnation) for f in spoken} == {("w1-0", "here", 1)}
        assert [f.seq for f in spoken] == [1, 2, 3]
        told = (crew.run_dir.path / "logs/0/w1-0/stdout.log").read_text().split()
        assert told == ["Close", "Stop"]

    with_desk(stage, SPEAKER, act)


def test_repeated_frames_are_not_passed_on(stage: Stage) -> None:
    async def act(desk: Desk, crew: WorkerPool) -> None:
        desk.say(messages.Spawn(worker="w1-0", seat=0))
        await desk.until(messages.WorkerHello)
        desk.say(messages.Close(generation=1, reason="test"), "w1-0")
        desk.say(messages.Close(generation=1, reason="again"), "w1-0", seq=desk.seq - 1)
        desk.say(messages.Stop(ok=True, reason="done"), "w1-0")
        await desk.until(messages.WorkerLostReport)
        told = (crew.run_dir.path / "logs/0/w1-0/stdout.log").read_text().split()
        assert told == ["Close", "Stop"]

    with_desk(stage, SPEAKER, act)


@pytest.mark.parametrize("stopped", [False, True])
def test_killed_on_request(stage: Stage, stopped: bool) -> None:
    async def act(desk: Desk, crew: WorkerPool) -> None:
        desk.say(messages.Spawn(worker="w1-0", seat=0))
        await desk.until(messages.WorkerHello)
        worker = crew.workers["w1-0"]
        if stopped:
            os.kill(worker.process.pid, signal.SIGSTOP)
            await stage.eventually_async(lambda: worker.process.state == "T", "it is stopped")
        desk.say(messages.Kill(worker="w1-0", reason="silent"))
        lost = await desk.until(messages.WorkerLostReport)
        assert (lost.fault.kind, lost.fault.signal) == ("requested", 9)
        assert "silent" in lost.fault.detail and not crew.workers
        desk.say(messages.Kill(worker="w1-0", reason="silent"))
        assert (
            await desk.until(messages.WorkerLostReport, 2) == lost
        )  # the first answer may have been lost

    with_desk(stage, SPEAKER, act)


def test_a_spare_waits_for_the_first_hello_and_gets_its_seats_logs(stage: Stage) -> None:
    async def act(desk: Desk, crew: WorkerPool) -> None:
        desk.say(messages.Spawn(worker="w1-1", seat=-1))
        desk.say(messages.Spawn(worker="w1-0", seat=0))
        await desk.until(messages.WorkerHello, 2)
        assert [body.worker for body in desk.of(messages.Spawned)] == ["w1-0", "w1-1"]
        desk.say(messages.Seat(generation=2, seat=0, world=1, n=3, first=False), "w1-1")
        await stage.eventually_async((crew.run_dir.path / "logs/0/w1-1").is_symlink, "the link")
        out = crew.run_dir.path / "logs/0/w1-1/stdout.log"
        await stage.eventually_async(lambda: "Seat" in out.read_text(), "it heard of its seat")

    with_desk(stage, SPEAKER, act, "--spares", "1")


def test_a_seat_is_passed_on_even_where_its_logs_cannot_be_linked(stage: Stage) -> None:
    async def act(desk: Desk, crew: WorkerPool) -> None:
        desk.say(messages.Spawn(worker="w1-0", seat=0))
        desk.say(messages.Spawn(worker="w1-2", seat=-1))
        await desk.until(messages.WorkerHello, 2)
        (crew.run_dir.path / "logs/1").write_text("in the way")
        desk.say(messages.Seat(generation=2, seat=1, world=2, n=3, first=False), "w1-2")
        out = crew.run_dir.path / "logs/spare/w1-2/stdout.log"
        await stage.eventually_async(lambda: "Seat" in out.read_text(), "it heard of its seat")
        assert "w1-2, now rank 1" in "".join(stage.notes) and crew.workers["w1-2"].seat == 1

    with_desk(stage, SPEAKER, act, "--nproc-per-node", "2", "--spares", "1")


@pytest.mark.parametrize("damage", ["", "os.pwrite(settings.page_fd, b'\\x7f' * 56, 0)"])
def test_no_death_stays_untold(stage: Stage, damage: str) -> None:
    """By a signal without a name, or with a page that nobody can read any more."""

    async def act(desk: Desk, crew: WorkerPool) -> None:
        desk.say(messages.Spawn(worker="w1-0", seat=0))
        await desk.until(messages.WorkerHello)
        desk.say(messages.Stop(ok=True, reason="now"), "w1-0")
        lost = await desk.until(messages.WorkerLostReport)
        assert (lost.worker, lost.fault.signal) == ("w1-0", signal.SIGRTMIN + 1)
        assert (lost.n, lost.state) == ((-1, "") if damage else (0, "starting"))
        assert bool(damage) == ("its loss is reported without it" in "".join(stage.notes))

    end = f"{damage or 'pass'}; os.kill(os.getpid(), signal.SIGRTMIN + 1)"
    text = SPEAKER.replace("sys.exit(0)", end)
    with_desk(stage, text, act)


def test_what_breaks_a_burial_breaks_the_agent(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the controller would wait for ever for a loss that nobody reports."""

    async def act(desk: Desk, crew: WorkerPool) -> None:
        desk.say(messages.Spawn(worker="w1-0", seat=0))
        await desk.until(messages.WorkerHello)

        async def fail(_worker: WorkerHandle) -> None:
            raise RuntimeError("a mistake of ours")

        with monkeypatch.context() as patch:
            patch.setattr(crew, "reap", fail)
            os.kill(crew.workers["w1-0"].process.pid, signal.SIGKILL)
            done, _ = await asyncio.wait({desk.serving}, timeout=10)
        assert done and "a mistake of ours" in repr(desk.serving.exception())

    with_desk(stage, SPEAKER, act)


def test_a_lease_that_cannot_be_renewed_kills_the_workers_in_time(stage: Stage) -> None:
    lease_s = 5.0  # what is left of it at the kill is room for a loaded machine

    async def act(desk: Desk, crew: WorkerPool) -> None:
        desk.say(messages.Spawn(worker="w1-0", seat=0))
        await desk.until(messages.WorkerHello)
        pid = crew.workers["w1-0"].process.pid
        desk.answers = False
        silent_s = desk.loop.time()
        await stage.eventually_async(lambda: not stage.alive(pid), "the worker is dead")
        assert desk.loop.time() - silent_s < lease_s
        await stage.eventually_async(lambda: desk.frames[-1].incarnation == 2, "it starts anew")
        assert desk.of(messages.AgentHello)[-1].workers == ()

    with_desk(stage, SPEAKER, act, "--limit", f"lease_s={lease_s}")


def test_a_renewed_lease_lasts(stage: Stage) -> None:
    async def act(desk: Desk, crew: WorkerPool) -> None:
        desk.say(messages.Spawn(worker="w1-0", seat=0))
        await desk.until(messages.WorkerHello)
        await desk.until(messages.Renew, 12)  # several leases' worth
        assert list(crew.workers) == ["w1-0"]
        assert desk.of(messages.Renew)[-1].beats["w1-0"][2] == "starting"

    with_desk(stage, SPEAKER, act, "--limit", "lease_s=0.6")


def test_a_broken_connection_is_made_again_and_losses_are_said_again(stage: Stage) -> None:
    async def act(desk: Desk, crew: WorkerPool) -> None:
        for seat in (0, 1):
            desk.say(messages.Spawn(worker=f"w1-{seat}", seat=seat))
        await desk.until(messages.WorkerHello, 2)
        assert desk.channel
        desk.channel.close()
        os.kill(crew.workers["w1-0"].process.pid, signal.SIGKILL)
        hello = await desk.until(messages.AgentHello, 2)
        lost = await desk.until(messages.WorkerLostReport)
        assert lost.worker == "w1-0" and "w1-1" in hello.workers
        desk.say(messages.Stop(ok=True, reason="done"), "w1-1")
        await desk.until(messages.Finished)

    with_desk(stage, SPEAKER, act, "--nproc-per-node", "2")


def test_somebody_who_cannot_be_started_is_lost(stage: Stage) -> None:
    async def act(desk: Desk, crew: WorkerPool) -> None:
        (crew.run_dir.path / "logs" / "0").write_text("in the way")
        desk.say(messages.Spawn(worker="w1-0", seat=0))
        lost = await desk.until(messages.WorkerLostReport)
        assert "could not be started" in lost.fault.detail and not crew.workers

    with_desk(stage, SPEAKER, act)


def test_a_script_without_hello_is_handed_over(stage: Stage) -> None:
    async def act(desk: Desk, crew: WorkerPool) -> None:
        desk.say(messages.Spawn(worker="w1-0", seat=0))
        await stage.eventually_async(lambda: desk.plain, "the agent steps back")
        assert [worker.name for worker in desk.plain] == ["w1-0"] and not desk.of(
            messages.WorkerLostReport
        )

    with_desk(stage, "sys.exit(3)", act)


def test_a_spare_is_told_its_device_with_its_seat(stage: Stage) -> None:
    async def act(desk: Desk, crew: WorkerPool) -> None:
        desk.say(messages.Spawn(worker="w1-0", seat=0))
        await desk.until(messages.WorkerHello)
        desk.say(messages.Spawn(worker="w1-1", seat=-1))
        await desk.until(messages.WorkerHello, 2)
        assert crew.workers["w1-1"].local_rank == 1
        desk.say(messages.Kill(worker="w1-0", reason="it is over"))
        await desk.until(messages.WorkerLostReport)
        desk.say(messages.Seat(generation=2, seat=0, world=1, n=3, first=False), "w1-1")
        await stage.eventually_async(lambda: stage.pid_in("device-0"), "told")
        assert crew.workers["w1-1"].local_rank == 0
        desk.say(messages.Stop(ok=True, reason="done"), "w1-1")
        await desk.until(messages.Finished)

    with_desk(stage, SPEAKER, act, "--spares", "1")


EARLY = """
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
wait_for(lambda: os.path.exists(ROOT + "/go"))
"""


def test_who_is_killed_before_any_hello_of_a_script_that_names_us_is_lost(stage: Stage) -> None:
    async def act(desk: Desk, crew: WorkerPool) -> None:
        desk.say(messages.Spawn(worker="w1-0", seat=0))
        desk.say(messages.Spawn(worker="w1-1", seat=1))
        await desk.until(messages.Spawned, 2)
        await stage.eventually_async(lambda: crew.workers["w1-0"].process.killed_by, "killed")
        (stage.root / "go").touch()
        await desk.until(messages.WorkerHello)
        lost = await desk.until(messages.WorkerLostReport)
        assert (lost.worker, lost.fault.kind, lost.fault.signal) == ("w1-0", "killed", 9)
        assert not desk.plain
        desk.say(messages.Stop(ok=True, reason="done"), "w1-1")
        await desk.until(messages.Finished)

    with_desk(stage, EARLY + SPEAKER, act, "--nproc-per-node", "2")


@pytest.mark.parametrize(("names", "handed_over"), [("", 1), ("# outlast", 2)])
def test_who_is_killed_before_any_hello_of_another_script_is_handed_over(
    names: str, handed_over: int, stage: Stage
) -> None:
    """At once where nothing in it names us; else when another one ends without a Hello."""

    async def act(desk: Desk, crew: WorkerPool) -> None:
        desk.say(messages.Spawn(worker="w1-0", seat=0))
        desk.say(messages.Spawn(worker="w1-1", seat=1))
        await desk.until(messages.Spawned, 2)
        await stage.eventually_async(lambda: crew.workers["w1-0"].process.killed_by, "killed")
        if handed_over > 1:
            (stage.root / "go").touch()
        await stage.eventually_async(lambda: len(desk.plain) >= handed_over, "handed over")
        assert desk.plain[0].name == "w1-0" and not desk.of(messages.WorkerLostReport)

    with_desk(stage, EARLY + names, act, "--nproc-per-node", "2")


def test_a_worker_with_a_wrong_token_is_not_heard(stage: Stage) -> None:
    async def act(desk: Desk, crew: WorkerPool) -> None:
        desk.say(messages.Spawn(worker="w1-0", seat=0))
        await stage.eventually_async(lambda: stage.pid_in("w1-0"), "it has spoken")
        await desk.until(messages.Renew, len(desk.of(messages.Renew)) + 2)
        assert not desk.of(messages.WorkerHello)

    text = SPEAKER.replace("token = bytes.fromhex(settings.token)", "token = b'forged'")
    with_desk(stage, text, act, "--limit", "lease_s=0.6")
