"""Run directories for the benchmark of the page, written by the writers of real runs."""

from __future__ import annotations

import random
from pathlib import Path

from outlast import events
from outlast.telemetry.event_store import DIRECTORY, EventWriter

T0_NS = 1_760_000_000_000_000_000
_MS = 1_000_000


class WrittenRun:
    """Events of a run of `ranks`, as its launcher and workers write them.

    Each rank has a file, in which each step is a PhaseDone and a Metrics with a loss.
    `is_one_file`: one file for all, as simulated runs have it, without metrics.
    """

    def __init__(self, run_dir: Path, ranks: int, *, is_one_file: bool = False) -> None:
        self._directory, self._ranks = run_dir / DIRECTORY, ranks
        self._is_one_file = is_one_file
        self._writers: dict[str, EventWriter] = {}
        self._random = random.Random(1)
        self.t_ns, self._n, self._step, self._generation = T0_NS, 0, 0, 1
        self._workers: list[str] = []
        self._incident = 0
        self._start()

    def _write(self, writer: str, event: events.AnyEvent) -> None:
        name = "story" if self._is_one_file else writer
        if name not in self._writers:
            self._writers[name] = EventWriter(self._directory, name)
        self._writers[name].emit(event)

    def say(self, event: events.AnyEvent) -> None:
        """Write an event of the launcher."""
        self._write("launcher", event)

    def _start(self) -> None:
        self.say(
            events.RunStarted(
                t_ns=self.t_ns,
                run="view",
                term=1,
                world=self._ranks,
                spares=0,
                script="train.py",
                args=(),
            )
        )
        for seat in range(self._ranks):
            self._join(seat)
        self.t_ns += 9_000 * _MS
        self.say(events.GenerationOpened(t_ns=self.t_ns, incident=0, generation=1, n=0))

    def _join(self, seat: int) -> None:
        worker = f"w1-{len(self._workers)}"
        if seat < len(self._workers):
            worker = f"w1-{self._ranks + self._incident}"
            self._workers[seat] = worker
        else:
            self._workers.append(worker)
        t_ns, host = self.t_ns, f"node-{seat // 8}"
        self.say(events.WorkerSpawned(t_ns=t_ns, worker=worker, seat=seat, pid=seat + 9, host=host))
        self.say(events.WorkerWarm(t_ns=t_ns, worker=worker))
        generation = self._generation
        self.say(events.WorkerSeated(t_ns=t_ns, worker=worker, seat=seat, generation=generation))

    def phase(self, kind: events.PhaseKind = "step", *, ms: float = 90, steps: int = 1) -> None:
        """Commit a phase on all ranks; `steps`: equal steps as one event."""
        begin_ns = self.t_ns + round(_MS * (2 + self._random.random()))
        self.t_ns = begin_ns + round(_MS * steps * ms * (1 + self._random.random() / 5))
        self._n += steps
        self._step += steps * (kind == "step")
        for seat, worker in enumerate(self._workers):
            done = events.PhaseDone(
                t_ns=self.t_ns,
                worker=worker,
                seat=seat,
                generation=self._generation,
                n=self._n,
                step=self._step,
                kind=kind,
                t_begin_ns=begin_ns,
                t_vote_ns=self.t_ns - 3 * _MS,
                steps=steps,
            )
            self._write(worker, done)
            if kind == "step" and not self._is_one_file:
                values = {"loss": 4.0 / (1 + 1e-4 * self._step) + self._random.random() / 50}
                self._write(
                    worker,
                    events.Metrics(
                        t_ns=self.t_ns, worker=worker, seat=seat, step=self._step, values=values
                    ),
                )

    def save(self) -> None:
        """Write a checkpoint."""
        self.phase("checkpoint", ms=300)
        self.say(
            events.CheckpointSaved(
                t_ns=self.t_ns,
                n=self._n,
                step=self._step,
                path=f"checkpoints/step-{self._step:06d}",
                size_bytes=1 << 30,
                seconds=0.3,
            )
        )

    def kill(self) -> None:
        """Replace a rank that was killed."""
        seat = self._random.randrange(self._ranks)
        self._incident += 1
        number, generation, old = self._incident, self._generation, self._workers[seat]
        fault = events.Fault(
            kind="killed",
            worker=old,
            seat=seat,
            host=f"node-{seat // 8}",
            detail="SIGKILL",
            n=self._n,
            step=self._step + 1,
            state="running",
        )
        self.t_ns += 20 * _MS
        closed = {"t_ns": self.t_ns, "incident": number, "generation": generation}
        self.say(events.Noticed(**closed, how="pidfd", fault=fault))
        self.say(events.GenerationClosed(**closed))
        self.say(events.WorkerLost(t_ns=self.t_ns, worker=old, seat=seat, fault=fault))
        self._generation += 1
        self.t_ns += 50 * _MS
        self._join(seat)
        self.say(
            events.Decided(
                t_ns=self.t_ns,
                incident=number,
                generation=self._generation,
                verdict="redo",
                rung="replace",
                n=self._n,
                step=self._step,
                replaced=((seat, old, self._workers[seat]),),
                reason="a spare is there",
            )
        )
        self.t_ns += 500 * _MS
        opened = {"t_ns": self.t_ns, "incident": number, "generation": self._generation}
        self.say(events.Connected(**opened))
        self.say(events.GenerationOpened(**opened, n=self._n))

    def end(self) -> None:
        """End the run."""
        self.t_ns += 50 * _MS
        self.say(
            events.RunEnded(t_ns=self.t_ns, outcome="done", exit_code=0, n=self._n, step=self._step)
        )
        self.close()

    def close(self) -> None:
        """Close the files; without `end` before it, the run is not over."""
        for writer in self._writers.values():
            writer.close()


def write_long_run(run_dir: Path, count: int, *, ranks: int = 8) -> WrittenRun:
    """Write about `count` events: a save each 500 steps, a kill each 5,000. The run goes on."""
    run = WrittenRun(run_dir, ranks)
    for step in range(1, count // (2 * ranks) + 1):
        run.phase()
        if step % 500 == 0:
            run.save()
        if step % 5_000 == 0:
            run.kill()
    return run


def write_large_run(run_dir: Path, ranks: int) -> None:
    """Write a run of many ranks: 24 stretches of 300 steps, each with a save, and 3 incidents."""
    run = WrittenRun(run_dir, ranks, is_one_file=True)
    for stretch in range(24):
        run.phase(ms=12_000, steps=300)
        run.save()
        if stretch in (5, 11, 17):
            run.kill()
    run.end()
