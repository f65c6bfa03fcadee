"""Costs of control as ranks grow: the real controller, real frames over loopback, simulated agents.

A run is started and loses ranks, one at a time; warm spares take them. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import multiprocessing
import resource
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from harness import load, median, table, verdict
from msgspec.structs import replace
from scaling.agents import Fleet, Job, Report

from outlast import events
from outlast.config import Limits
from outlast.launch import run_directory
from outlast.launch.controller_shell import ControllerShell
from outlast.launch.run_display import DisplayRecord
from outlast.launch.start_point import CheckpointSearch
from outlast.launch.torchrun_arguments import parse
from outlast.telemetry.event_store import EventWriter

WORLDS = (512, 2048, 16384)
BAR_WORLD = 16384
CPU_S_MAX = 1.0
MB_MAX = 100.0
IDLE_S = 2.0
PATIENT = Limits(connect_s=600.0, status_s=600.0)  # one process is two thousand agents
DEADLINE_S = 900.0
SPAWNED = multiprocessing.get_context("spawn")


class Silent:
    """A display that shows nothing: terminals are not measured."""

    def event(self, event: events.AnyEvent) -> None: ...

    def beats(self, beats: object) -> None: ...

    def line(self, text: str, *, is_error: bool) -> None: ...

    def close(self) -> None: ...


class Span(NamedTuple):
    """What control cost between two moments."""

    cpu_s: float
    wall_s: float
    sent_bytes: int
    received_bytes: int
    frames: int


class Moment(NamedTuple):
    """The agents' report, and the controller's processor time when it came."""

    report: Report
    cpu_s: float

    def until(self, later: Moment) -> Span:
        a, b = self.report, later.report
        return Span(
            later.cpu_s - self.cpu_s,
            b.wall_s - a.wall_s,
            b.sent_bytes - a.sent_bytes,
            b.received_bytes - a.received_bytes,
            b.frames - a.frames,
        )


async def play(job: Job, incidents: int, folder: Path) -> dict[str, Any]:
    """Run one job, and return its figures."""
    plan = parse(
        [f"--run-dir={folder}/run", f"--nproc-per-node={job.world}", f"--spares={job.spares}",
         str(Path(__file__).with_name("plain_job.py"))]
    )  # fmt: skip
    plan = replace(plan, limits=PATIENT)
    run_dir = run_directory.take(Path(plan.run_dir), plan.script, plan.args, plan.world)
    record = DisplayRecord(EventWriter(run_dir.room("events"), "controller"), Silent())
    token = secrets.token_bytes(32)
    origins = CheckpointSearch(run_dir.room("checkpoints"), run_dir.job.run, (), "")
    controller = ControllerShell(plan, run_dir, token, record, None, origins)
    ours, theirs = SPAWNED.Pipe()
    arguments = (job, controller.address, run_dir.job.run, token, theirs)
    agents = SPAWNED.Process(target=serve, args=arguments, daemon=True)
    agents.start()
    moments: asyncio.Queue[Moment] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(
        ours.fileno(), lambda: moments.put_nowait(Moment(ours.recv(), time.process_time()))
    )

    async def reach(what: str) -> Moment:
        while True:
            getter = asyncio.ensure_future(moments.get())
            done, _ = await asyncio.wait(
                [getter, controller.ended], timeout=DEADLINE_S, return_when="FIRST_COMPLETED"
            )
            if getter not in done:
                end = controller.ended.result() if controller.ended.done() else "no news"
                raise SystemExit(f"no {what} of {job}: {end}")
            if (moment := getter.result()).report.what == what:
                return moment

    begun = Moment(Report("begun", time.monotonic(), 0, 0, 0), time.process_time())
    controller.begin()
    start = begun.until(await reach("opened"))
    await reach("settled")
    spans: list[tuple[Span, Span]] = []
    for number in range(incidents):
        await asyncio.sleep(IDLE_S)  # refills of spares, renewals
        ours.send((number * 7919 + 3) % job.world)
        struck = await reach("struck")
        opened = await reach("opened")
        spans.append((struck.until(opened), struck.until(await reach("settled"))))
    await asyncio.sleep(IDLE_S)
    before = time.process_time()
    await asyncio.sleep(IDLE_S)
    idle = (time.process_time() - before) / IDLE_S
    asyncio.get_running_loop().remove_reader(ours.fileno())
    ours.send(None)
    agents.join(30)
    controller.close()
    record.close()
    run_dir.release()
    return {
        "world": job.world,
        "mesh": job.mesh,
        "start": start._asdict(),
        "to_open_s": median([to_open.wall_s for to_open, _ in spans]),
        "incident": {
            name: median([getattr(whole, name) for _, whole in spans]) for name in Span._fields
        },
        "idle_share": idle,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def serve(job: Job, address: tuple[str, int], run: str, token: bytes, line: Connection) -> None:
    """Be all agents, until told to end."""
    Fleet(job, address, run, token, line).serve()


def measure(job: Job, incidents: int, line: Connection) -> None:
    """Send the figures of one job, whose controller has this process for itself."""
    with tempfile.TemporaryDirectory(prefix="outlast-scale-") as folder:
        line.send(asyncio.run(play(job, incidents, Path(folder))))


def figures_of(job: Job, incidents: int) -> dict[str, Any]:
    ours, theirs = SPAWNED.Pipe(duplex=False)
    process = SPAWNED.Process(target=measure, args=(job, incidents, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise SystemExit(f"{job} has failed") from None
    finally:
        process.join()


def exponents(values: Sequence[tuple[int, float]]) -> list[float]:
    """Return the exponents of growth between neighbouring sizes."""
    return [
        math.log(after / before) / math.log(more / fewer)
        for (fewer, before), (more, after) in itertools.pairwise(values)
    ]


def show(found: list[dict[str, Any]]) -> None:
    table(
        ("ranks", "start CPU s", "start s", "start MB", "incident CPU s", "to Open s", "MB out",
         "MB in", "frames in", "idle CPU", "peak MB"),
        [
            (
                str(each["world"]),
                f"{each['start']['cpu_s']:.2f}",
                f"{each['start']['wall_s']:.2f}",
                f"{(each['start']['sent_bytes'] + each['start']['received_bytes']) / 1e6:.1f}",
                f"{each['incident']['cpu_s']:.3f}",
                f"{each['to_open_s']:.3f}",
                f"{each['incident']['sent_bytes'] / 1e6:.2f}",
                f"{each['incident']['received_bytes'] / 1e6:.2f}",
                f"{each['incident']['frames']:.0f}",
                f"{100 * each['idle_share']:.1f} %",
                f"{each['peak_mb']:.0f}",
            )
            for each in found
        ],
    )  # fmt: skip


def bars_of(found: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """Return the growth between the sizes, and the bars that these sizes reach."""
    by_world = {each["world"]: each["incident"] for each in found}
    traffic = [(w, one["sent_bytes"] + one["received_bytes"]) for w, one in by_world.items()]
    growth = {
        "cpu": exponents([(world, one["cpu_s"]) for world, one in by_world.items()]),
        "bytes": exponents(traffic),
    }
    bars: dict[str, tuple[float, float]] = {}
    if BAR_WORLD in by_world:
        total = dict(traffic)[BAR_WORLD]
        bars[f"processor time of an incident, {BAR_WORLD} ranks (s)"] = (
            by_world[BAR_WORLD]["cpu_s"], CPU_S_MAX,
        )  # fmt: skip
        bars[f"traffic of an incident, {BAR_WORLD} ranks (MB)"] = (total / 1e6, MB_MAX)
    worlds = sorted(by_world)
    for name in growth:
        if len(worlds) > 1:
            fewer, more = worlds[-2:]
            limit = math.log(more * math.log(more) / (fewer * math.log(fewer)))
            bars[f"exponent of growth, {name}, {fewer} to {more} ranks"] = (
                growth[name][-1], limit / math.log(more / fewer),
            )  # fmt: skip
    return growth, bars


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--per-host", type=int, default=8)
    parser.add_argument("--incidents", type=int, default=3)
    parser.add_argument("--mesh", choices=("id", "gloo"), default="id", help="groups of replicas")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    asked = parser.parse_args()
    found = []
    for world in asked.worlds:
        job = Job(world, min(asked.per_host, world), asked.per_host, asked.mesh)
        found.append(figures_of(job, asked.incidents))
        print(f"{world} ranks measured, load {load():.1f}", file=sys.stderr)
    show(found)
    growth, bars = bars_of(found)
    figures = {"worlds": found, "growth": growth, "load": load()}
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=1))
    return verdict("scale", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
