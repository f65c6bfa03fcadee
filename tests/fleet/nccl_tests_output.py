"""Output of nccl-tests, written by hand from the printf lines of its sources.

No machine here has a GPU. `nccl-tests` 1.0 (2017), 2.11 (2021), 2.13 to 2.17 (2022 to 2025) and
2.19 (2026) differ in their headers; rccl-tests has the lines of 2.13 and its own version.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

SIZES = (1 << 20, 1 << 26, 1 << 30)
OUT_IN = "out-of-place                       in-place"


def ranks(hosts: Sequence[str], gpus: int = 8, style: str = "2.13") -> str:
    lines = []
    for rank in range(len(hosts) * gpus):
        host = hosts[rank // gpus]
        device = rank % gpus
        where = {"1.0": "", "2.11": f"Pid {4000 + rank:6d} "}.get(
            style, f"Group  0 Pid {4000 + rank:6d} "
        )
        bus = f"[0x{device:02x}]" if style < "2.13" else f"[0000:{device:02x}:00]"
        lines.append(
            f"#  Rank {rank:2d} {where}on {host:>10s} device {device:2d} {bus} NVIDIA H100\n"
        )
    return "".join(lines)


def row(
    size: int, bus: float, *, wrong: object = 0, op: str = "   sum      -1", in_place: object = None
) -> str:
    us = size / bus / 1e3
    out = f"  {us:7.1f}  {bus / 2:6.2f}  {bus:6.2f}  {wrong!s:>5}"
    again = (
        out if in_place is None else f"  {us:7.1f}  {bus / 2:6.2f}  {in_place!s:>6}  {wrong!s:>5}"
    )
    return f"{size:12d}  {size // 4:12d}  {'float':>8}  {op}{out}{again}\n"


def header(names: str = "size count type redop root", wrong: str = "#wrong") -> str:
    block = f"time algbw busbw {wrong}"
    return (
        f"#\n#   {OUT_IN}\n#   {names} {block} {block}\n"
        "#   (B) (elements) (us) (GB/s) (GB/s) (us) (GB/s) (GB/s)\n"
    )


def run(
    hosts: Sequence[str],
    bus: float = 400.0,
    *,
    sizes: Sequence[int] = SIZES,
    wrong: object = 0,
    collective: str = "all_reduce",
    cycles: int = 1,
) -> str:
    """Text of a run of nccl-tests 2.17: small sizes have less bandwidth."""
    rows = "".join(row(size, bus * min(1, size / (1 << 26)), wrong=wrong) for size in sizes)
    return (
        f"# Collective test starting: {collective}_perf\n"
        "# nThread 1 nGpus 1 minBytes 1048576 maxBytes 1073741824 step: 2(factor) warmup iters: 5"
        " iters: 20 agg iters: 1 validation: 1 graph: 0\n#\n# Using devices\n"
        f"{ranks(hosts)}{header()}{rows * cycles}"
        f"# Out of bounds values : 0 OK\n# Avg bus bandwidth    : {bus:g} \n#\n"
        f"# Collective test concluded: {collective}_perf\n"
    )


def report(hosts: Sequence[str], bus: float = 400.0, **more: Any) -> str:
    """JSON of a run of nccl-tests 2.19, as its writer has it: numbers with six decimals."""
    timing = {"time": 100.0, "alg_bw": bus / 2, "bus_bw": bus, "nwrong": 0.0}
    found = {
        "version": 3,
        "start_time": "2026-05-17 10:00:00",
        "args": ["/opt/all_reduce_perf", "-b", "1M"],
        "env": ["HOME=/root", "NCCL_IB_ADAPTIVE_ROUTING=1"],
        "nccl_version": 22903,
        "config": {
            "nthreads": 1,
            "ngpus": 8,
            "devices": [
                {"rank": 8 * at, "group": 0, "pid": 4, "hostname": host, "device": 0}
                for at, host in enumerate(hosts)
            ],
        },
        "results": [
            {
                "size": size, "count": size // 4, "type": "float", "redop": "sum",
                "root": "    -1", "out_of_place": timing, "in_place": timing,
                "actual_iterations": 20, "experiment_name": "",
            }
            for size in SIZES
        ],
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": bus, "okay": "unchecked"},
        "errors": [],
        "end_time": "2026-05-17 10:05:00",
    }  # fmt: skip
    return json.dumps(found | more, separators=(",", ":"))
