"""Synthetic run directories: generated events on a virtual clock, without a run."""

from __future__ import annotations

from pathlib import Path

from outlast import events
from outlast.telemetry.event_store import DIRECTORY, EventWriter

T0_NS = 1_760_000_000_000_000_000
_MS = 1_000_000


class SyntheticRun:
    """Writes the events of one run. Methods advance the clock (`t_ns`); durations are in ms."""

    def __init__(
        self, run_dir: Path, *, world: int = 4, spares: int = 1, host: str = "node-1"
    ) -> None:
        self.run_dir = run_dir
        self.host = host
        self.world = world
        self.spares = spares
        self.t_ns = T0_NS
        self.term = 0
        self.n = 0
        self.step = 0
        self.generation = 0
        self.incident = 0
        self.seats: list[str] = []
        self.warm: list[str] = []
        self._count = 0
        self._writers: dict[str, EventWriter] = {}

    def write(self, writer: str, event: events.AnyEvent) -> None:
        """Write an event to the file of `writer`."""
        if writer not in self._writers:
            self._writers[writer] = EventWriter(self.run_dir / DIRECTORY, writer)
        self._writers[writer].emit(event)

    def say(self, event: events.AnyEvent) -> None:
        """Write an event of the launcher."""
        self.write(f"launcher-{self.term}", event)

    def wait(self, ms: float) -> int:
        """Advance the clock; return the new time in ns."""
        self.t_ns += round(ms * _MS)
        return self.t_ns

    def close(self) -> None:
        """Close the files. Without `end` before it, the launcher died."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def start(
        self, *, resumed_n: int = -1, resumed_step: int = -1, ms: float = 500
    ) -> SyntheticRun:
        """Start a launcher; the first generation of its term opens."""
        self.term += 1
        self.generation += 1
        self._count = 0
        if resumed_n >= 0:
            self.n, self.step = resumed_n, resumed_step
        self.say(
            events.RunStarted(
                t_ns=self.t_ns,
                run="story",
                term=self.term,
                world=self.world,
                spares=self.spares,
                script="train.py",
                args=("--steps", "100"),
                resumed_n=resumed_n,
                resumed_step=resumed_step,
            )
        )
        self.seats = [self.spawn(seat) for seat in range(self.world)]
        self.warm = [self.spawn(-1) for _ in range(self.spares)]
        self.wait(ms)
        for worker in (*self.seats, *self.warm):
            self.say(events.WorkerWarm(t_ns=self.t_ns, worker=worker))
        for seat, worker in enumerate(self.seats):
            self._seated(worker, seat)
        self.say(
            events.GenerationOpened(
                t_ns=self.t_ns, incident=0, generation=self.generation, n=self.n
            )
        )
        return self

    def spawn(self, seat: int) -> str:
        """Start a worker for a seat (-1: a spare); return its name."""
        worker = f"w{self.term}-{self._count}"
        self._count += 1
        self.say(
            events.WorkerSpawned(
                t_ns=self.t_ns, worker=worker, seat=seat, pid=1000 + self._count, host=self.host
            )
        )
        return worker

    def phase(self, kind: str = "step", *, ms: float = 100, loss: float = 0.0) -> SyntheticRun:
        """Commit one phase on every seat."""
        begin_ns = self.t_ns
        self.n += 1
        self.step += kind == "step"
        self.wait(ms)
        for seat, worker in enumerate(self.seats):
            self.done(seat, kind=kind, begin_ns=begin_ns)
            if kind == "step":
                self._report(worker, seat, loss or 4.0 / (1 + 0.1 * self.step))
        return self

    def done(
        self,
        seat: int,
        *,
        n: int = -1,
        step: int = -1,
        kind: str = "step",
        begin_ns: int = 0,
        t_ns: int = 0,
    ) -> None:
        """Commit a phase on one seat: the newest one, unless `n` and `step` differ."""
        t_ns = t_ns or self.t_ns
        self.write(
            self.seats[seat],
            events.PhaseDone(
                t_ns=t_ns,
                worker=self.seats[seat],
                seat=seat,
                generation=self.generation,
                n=self.n if n < 0 else n,
                step=self.step if step < 0 else step,
                kind=kind,
                t_begin_ns=begin_ns or t_ns,
                t_vote_ns=t_ns,
            ),
        )

    def _report(self, worker: str, seat: int, loss: float) -> None:
        self.write(
            worker,
            events.Metrics(
                t_ns=self.t_ns, worker=worker, seat=seat, step=self.step, values={"loss": loss}
            ),
        )

    def steps(self, count: int, *, ms: float = 100, script_ms: float = 2) -> SyntheticRun:
        """Commit `count` steps."""
        for _ in range(count):
            self.wait(script_ms)
            self.phase(ms=ms)
        return self

    def broken(
        self, seat: int, fault: events.Fault, *, how: str = "pidfd", ms: float = 20
    ) -> SyntheticRun:
        """Break an attempt after `ms`: `fault` hits `seat` and is noticed."""
        begin_ns = self.t_ns
        broke_ns = self.wait(ms)
        self.wait(1)
        self.incident += 1
        self.notice(fault, how=how)
        self.closed()
        if fault.kind in ("killed", "exited", "hung", "stopped"):
            self._lost(seat, fault)
        for other, worker in enumerate(self.seats):
            if other != seat or fault.kind in ("raised", "transport"):
                self._answer(other, worker, begin_ns, refused_ns=broke_ns + 5 * _MS)
        return self

    def notice(self, fault: events.Fault, *, how: str = "pidfd") -> None:
        """Write that a fault was noticed."""
        self.say(
            events.Noticed(
                t_ns=self.t_ns,
                incident=self.incident,
                generation=self.generation,
                how=how,
                fault=fault,
            )
        )

    def closed(self) -> None:
        """Close the generation."""
        self.say(
            events.GenerationClosed(
                t_ns=self.t_ns, incident=self.incident, generation=self.generation
            )
        )

    def _lost(self, seat: int, fault: events.Fault) -> None:
        self.say(events.WorkerLost(t_ns=self.t_ns, worker=self.seats[seat], seat=seat, fault=fault))

    def _answer(self, seat: int, worker: str, begin_ns: int, refused_ns: int) -> None:
        self.wait(3)
        self.write(
            worker,
            events.AttemptRefused(
                t_ns=refused_ns,
                worker=worker,
                seat=seat,
                generation=self.generation,
                n=self.n + 1,
                step=self.step + 1,
                kind="step",
                t_begin_ns=begin_ns,
                reason="generation closed",
            ),
        )
        self.say(
            events.Reported(
                t_ns=self.t_ns,
                incident=self.incident,
                generation=self.generation,
                worker=worker,
                seat=seat,
                n=self.n,
                state="idle",
            )
        )

    def decide(
        self,
        seats: tuple[int, ...] = (),
        *,
        rung: str = "replace",
        reason: str = "",
        n: int = -1,
        step: int = -1,
    ) -> SyntheticRun:
        """Give seats new workers, spares first. `n`, `step`: target of a restart."""
        if n >= 0:
            self.n, self.step = n, step
        self.wait(2)
        replaced: list[tuple[int, str, str]] = []
        for seat in seats:
            worker = self.warm.pop(0) if self.warm else self.spawn(seat)
            replaced.append((seat, self.seats[seat], worker))
            self.seats[seat] = worker
        self._decided(rung, self.n, self.step, tuple(replaced), reason)
        self.generation += 1
        for seat in seats:
            self._seated(self.seats[seat], seat)
        return self

    def _decided(
        self,
        rung: str,
        n: int,
        step: int,
        replaced: tuple[tuple[int, str, str], ...] = (),
        reason: str = "",
    ) -> None:
        self.say(
            events.Decided(
                t_ns=self.t_ns,
                incident=self.incident,
                generation=self.generation + 1,
                verdict="redo",
                rung=rung,
                n=n,
                step=step,
                replaced=replaced,
                reason=reason or f"a {rung} is the cheapest rung that works",
            )
        )

    def give_up(self, seats: tuple[int, ...]) -> SyntheticRun:
        """Stop the run: no rung is left, and no survivor of `seats` has the position."""
        self.wait(2)
        self._decided("stop", 0, 0, tuple((seat, self.seats[seat], "") for seat in seats))
        return self

    def restart(self, *, n: int, step: int, start_ms: float = 3000) -> SyntheticRun:
        """Kill all workers and start new ones from a checkpoint."""
        self.n, self.step = n, step
        self.wait(2)
        self._decided("restart", n, step, tuple((s, w, "") for s, w in enumerate(self.seats)))
        self.generation += 1
        self.wait(start_ms)
        self.seats = [self.spawn(seat) for seat in range(self.world)]
        for seat, worker in enumerate(self.seats):
            self._seated(worker, seat)
        return self.heal()

    def drained(self) -> SyntheticRun:
        """Drain after SIGTERM: the generation closes, all ranks save, the run ends."""
        self.incident += 1
        detail = "SIGTERM to the launcher"
        cause = events.Fault(kind="requested", detail=detail, t_ns=self.t_ns)
        self.notice(cause, how="report")
        self.closed()
        self.decide(rung="retry").heal()
        self.phase("checkpoint", ms=200)
        place = {"n": self.n, "step": self.step, "path": "checkpoints/newest"}
        self.say(
            events.CheckpointSaved(t_ns=self.t_ns, **place, size_bytes=104_000_000, seconds=0.2)
        )
        return self.end("interrupted", 4, cause)

    def heal(
        self, seats: tuple[int, ...] = (), *, join_ms: float = 400, copy_ms: float = 90
    ) -> SyntheticRun:
        """Reopen the generation: joiners get ready, groups connect, state moves."""
        for seat in seats:
            self.wait(join_ms)
            self.say(
                events.JoinerReady(
                    t_ns=self.t_ns, incident=self.incident, worker=self.seats[seat], seat=seat
                )
            )
        self.wait(10 + (copy_ms if seats else 0))
        for seat in seats:
            self.say(
                events.Transferred(
                    t_ns=self.t_ns,
                    incident=self.incident,
                    generation=self.generation,
                    donor=(seat + 1) % self.world,
                    joiner=seat,
                    size_bytes=104_000_000,
                    seconds=copy_ms / 1e3,
                    digest="1f2e3d4c5b6a7988",
                )
            )
        self.say(
            events.Connected(t_ns=self.t_ns, incident=self.incident, generation=self.generation)
        )
        self.say(
            events.GenerationOpened(
                t_ns=self.t_ns, incident=self.incident, generation=self.generation, n=self.n
            )
        )
        return self

    def killed(self, seat: int, signal: int = 9) -> SyntheticRun:
        """Kill a worker and heal the run: the next phase is the redone one."""
        self.broken(seat, self.fault("killed", seat, signal=signal))
        return self.decide((seat,), reason="a warm spare is there").heal((seat,))

    def fault(self, kind: events.FaultKind, seat: int, /, **more: object) -> events.Fault:
        """Return a fault of a seat at the present position."""
        fields: dict[str, object] = {
            "worker": self.seats[seat],
            "seat": seat,
            "detail": f"rank {seat} was {kind}",
            "n": self.n,
            "step": self.step + 1,
            "state": "running",
            "t_ns": 0,
            **more,
        }
        return events.Fault(
            kind=kind,
            host=self.host,
            **fields,  # type: ignore[arg-type]
        )

    def end(
        self, outcome: str = "done", exit_code: int = 0, cause: events.Fault | None = None
    ) -> SyntheticRun:
        """End the run and close its files."""
        self.wait(55)
        self.say(
            events.RunEnded(
                t_ns=self.t_ns,
                outcome=outcome,
                exit_code=exit_code,
                n=self.n,
                step=self.step,
                cause=cause,
            )
        )
        self.close()
        return self

    def _seated(self, worker: str, seat: int) -> None:
        self.say(
            events.WorkerSeated(
                t_ns=self.t_ns, worker=worker, seat=seat, generation=self.generation
            )
        )
