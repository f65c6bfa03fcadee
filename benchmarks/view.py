"""Cost of the page of a run: the first screen, updates, viewers, the index, the exported file;
and of the planner's page: answers to sliders."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from view_runs import write_large_run, write_long_run

FIRST_S, LARGE_S, MEMORY_MB, EXPORT_MB, VIEWERS = 1.0, 2.0, 300.0, 3.0, 50
ANSWER_MS = 50.0
WATCHED_S = 15.0
UPDATES, UPDATE_MS = 41, 10.0  # one a second: 1 % of a core
_TICKS = os.sysconf("SC_CLK_TCK")


def open_page(run_dir: Path, into: str) -> dict[str, float]:
    """Read a run and render its page, as the first request does, in this process."""
    from outlast.web.run_content import RunReading
    from outlast.web.run_page import render_page

    begin_s = time.process_time()
    reading = RunReading(run_dir)
    content = reading.refresh()
    read_s = time.process_time() - begin_s
    assert content is not None
    page = render_page(content, run_dir.name)
    spent_s = time.process_time() - begin_s
    Path(into).write_text(page)
    status = Path("/proc/self/status").read_text()
    peak_mb = int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024
    return {
        "events": content.events,
        "processor_s": spent_s,
        "of_it_reading_and_summaries_s": read_s,
        "peak_mb": peak_mb,
        "page_mb": len(page.encode()) / 1e6,
    }


def update(events: int) -> dict[str, float]:
    """Measure a page of a long run that is refreshed after each step, with its parts rendered."""
    from outlast.web import run_content
    from outlast.web.run_page import render_parts

    run_content.life_of = lambda *_: "running"  # though no launcher holds the run's lock
    run_content.REFRESH_S, run_content.SHARE = 0.0, 0
    spent_s = []
    with tempfile.TemporaryDirectory() as name:
        run = write_long_run(Path(name), events)
        reading = run_content.RunReading(Path(name))
        for _ in range(UPDATES):
            begin_s = time.process_time()
            content = reading.refresh()
            assert content is not None
            render_parts(content)
            spent_s.append(time.process_time() - begin_s)
            run.phase()
        run.close()
    ordered = sorted(spent_s[1:])
    middle, high = ordered[len(ordered) // 2], ordered[len(ordered) * 95 // 100]
    return {"events": events, "update_50_ms": 1e3 * middle, "update_95_ms": 1e3 * high}


def in_child(*words: str) -> dict[str, float]:
    """Return what this program prints with these words, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def overviews(path: Path) -> dict[str, float]:
    """Compute the lines of an index twice."""
    from outlast.web.run_content import RunReading

    readings = [RunReading(each) for each in sorted(path.iterdir())]
    spent_s = []
    for _ in range(2):
        begin_s = time.process_time()
        for reading in readings:
            assert reading.overview() is not None
        spent_s.append(time.process_time() - begin_s)
    return {"runs": len(readings), "first_s": spent_s[0], "again_s": spent_s[1]}


def slide(moves: int) -> dict[str, float]:
    """Move the planner's sliders, each to a stop beside its last one, and time the answers."""
    from outlast.web.planner_form import sliders
    from outlast.web.planner_pages import answer_response, curves_response

    chance = random.Random(0)
    texts: dict[str, str] = {}
    spent_s: dict[str, list[float]] = {"answer": [], "with_curves": []}
    while len(spent_s["answer"]) < moves:
        one = chance.choice(sliders(texts))
        at = min(max(0, one.at + chance.choice((-1, 1))), len(one.stops) - 1)
        moved = {**texts, one.key: one.stops[at]}
        begin_s = time.process_time()
        if answer_response([*moved.items()]).status_code != 200:
            continue  # a refusal costs nothing
        texts = moved
        spent_s["answer"].append(time.process_time() - begin_s)
        curves_response([*texts.items()])
        spent_s["with_curves"].append(time.process_time() - begin_s)
    found = {"moves": float(moves)}
    for name, each in spent_s.items():
        ordered = sorted(each)
        found |= {f"{name}_{p}_ms": 1e3 * ordered[moves * p // 100] for p in (50, 95)}
        found[f"{name}_worst_ms"] = 1e3 * ordered[-1]
    return found


@contextmanager
def serving(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the link of a page's server, and its process id."""
    words = [sys.executable, "-m", "outlast", "view", str(path), "--port=0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found
        try:
            yield found[0], server.pid
        finally:
            server.send_signal(signal.SIGINT)


def processor_s(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def viewer(link: str, name: str, until_s: float) -> int:
    """Follow a page until a time; return the number of messages."""
    address = urlsplit(link)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 24)
    writer.write(f"GET /runs/{name}/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    messages = 0
    try:
        async with asyncio.timeout_at(until_s):
            while line := await reader.readline():
                messages += line.startswith(b"data:")
    except TimeoutError:
        pass
    writer.close()
    return messages


async def watch(link: str, name: str, viewers: int, run: object) -> list[int]:
    """Let viewers follow a run that commits a step a second."""
    until_s = asyncio.get_running_loop().time() + WATCHED_S
    following = [asyncio.create_task(viewer(link, name, until_s)) for _ in range(viewers)]
    while asyncio.get_running_loop().time() < until_s:
        run.phase(ms=900)  # type: ignore[attr-defined]
        await asyncio.sleep(1.0)
    return await asyncio.gather(*following)


def follow(folder: Path) -> dict[str, float]:
    """Measure the server under one and under many viewers of a run that goes on."""
    found: dict[str, float] = {}
    run = write_long_run(folder / "live", 20_000)
    with serving(folder / "live") as (link, pid):
        for viewers in (1, VIEWERS):
            begin_s = processor_s(pid)
            counts = asyncio.run(watch(link, "live", viewers, run))
            found[f"core_of_server_{viewers}"] = (processor_s(pid) - begin_s) / WATCHED_S
            found[f"fewest_messages_{viewers}"] = min(counts)
    run.close()
    return found


def main() -> int:
    """Print the bars; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--update", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--index", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--moves", type=int, default=1000, help="of the planner's sliders")
    parser.add_argument("--slide", action="store_true", help="only the planner's sliders")
    given = parser.parse_args()
    if given.slide:
        print(json.dumps(slide(given.moves)))
        return 0
    if given.update:
        print(json.dumps(update(given.update)))
        return 0
    if given.open or given.index:
        page = f"{given.open}.html"
        print(json.dumps(overviews(given.index) if given.index else open_page(given.open, page)))
        return 0
    from harness import load, table, verdict  # imports torch, whose memory is not the page's

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_long_run(folder / "long", given.events).end()
        write_large_run(folder / "large", given.ranks)
        for number in range(20):
            write_long_run(folder / "runs" / f"run-{number}", 10_000).end()
        long, large = (in_child("--open", str(folder / each)) for each in ("long", "large"))
        index = in_child("--index", str(folder / "runs"))
        live = follow(folder)
    updates = in_child("--update", str(given.events))
    sliders = in_child("--slide", f"--moves={given.moves}")
    measured = {
        "long": long,
        "large": large,
        "index": index,
        "live": live,
        "updates": updates,
        "sliders": sliders,
    }
    figures = {**measured, "load": load()}
    rows = [
        (part, key, f"{value:.4g}")
        for part, each in measured.items()
        for key, value in each.items()
    ]
    table(("part", "figure", ""), rows)
    bars = {
        f"first screen of {given.events:,} events (processor s)": (long["processor_s"], FIRST_S),
        f"peak memory of {given.events:,} events (MB)": (long["peak_mb"], MEMORY_MB),
        f"first screen of {given.ranks:,} ranks (processor s)": (large["processor_s"], LARGE_S),
        "exported page (MB)": (max(long["page_mb"], large["page_mb"]), EXPORT_MB),
        f"seconds between messages of {VIEWERS} viewers": (
            WATCHED_S / max(1.0, live[f"fewest_messages_{VIEWERS}"]),
            2.0,
        ),
        f"update of a page of {given.events:,} events (processor ms)": (
            updates["update_50_ms"],
            UPDATE_MS,
        ),
        "answer to a slider, p95 (processor ms)": (sliders["answer_95_ms"], ANSWER_MS),
        "answer and curves to a slider, p95 (processor ms)": (
            sliders["with_curves_95_ms"],
            ANSWER_MS,
        ),
    }
    return verdict("view", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
