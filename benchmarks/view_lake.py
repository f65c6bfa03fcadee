"""Cost of the page of a lake: failure rates, the whole report, a node, another window."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import load, table, verdict

from outlast.cli.main import main as outlast

ANSWER_S = 1.0


def timed(work: Callable[[], object]) -> float:
    """Return the processor seconds of a function."""
    begin_s = time.process_time()
    work()
    return time.process_time() - begin_s


def measure(lake: Path) -> dict[str, float]:
    """Answer queries as a server does, from its start on."""
    from outlast.fleet.report.report_sections import rate_headlines
    from outlast.web.lake.lake_query import LakeQuery
    from outlast.web.lake.lake_reading import LakeReading
    from outlast.web.lake.node_history import node_history

    reading = LakeReading(lake)
    first, size = LakeQuery(), LakeQuery(above_gpus=16)
    found = {"read_s": timed(lambda: reading.answer(first))}
    for name, query in (("first", first), ("size", size)):
        answer = reading.answer(query)
        found[f"{name}_rates_s"] = timed(lambda answer=answer: rate_headlines(answer.facts))
        found[f"{name}_rest_s"] = timed(lambda answer=answer: list(reading.sections(answer)))
    facts = reading.answer(first).facts
    node = facts.ranking["node"][0]
    found["node_s"] = timed(lambda: node_history(facts, node, reading.answer(first).cluster))
    found["again_s"] = timed(lambda: list(reading.sections(reading.answer(first))))
    return found


def main() -> int:
    """Measure, print, and compare with the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=130, help="of a synthetic cluster")
    parser.add_argument("--lake", type=Path, help="measure this lake")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lake = given.lake
        if lake is None:
            logs, lake = Path(folder) / "logs", Path(folder) / "lake"
            outlast(["fleet", "synth", str(logs), f"--days={given.days}"])
            paths = sorted(
                path for path in logs.iterdir() if path.suffix in (".txt", ".csv", ".jsonl")
            )
            outlast(["fleet", "ingest", str(lake), *map(str, paths)])
        figures = measure(lake)
    table(("figure", "processor s"), [(key, f"{value:.3g}") for key, value in figures.items()])
    bars = {
        "failure rates of a lake, read before (processor s)": (figures["first_rates_s"], ANSWER_S),
        "failure rates of another size (processor s)": (figures["size_rates_s"], ANSWER_S),
        "page of a node (processor s)": (figures["node_s"], ANSWER_S),
        "whole report of another size (processor s)": (
            figures["size_rates_s"] + figures["size_rest_s"],
            ANSWER_S,
        ),
    }
    return verdict("view_lake", {**figures, "load": load()}, bars)


if __name__ == "__main__":
    sys.exit(main())
