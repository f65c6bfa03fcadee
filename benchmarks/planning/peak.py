"""Simulates so many replications, and says how many MB this process had at the most."""

from __future__ import annotations

import sys
from pathlib import Path

from planning.jobs import restarting

from outlast.plan.simulate.replications import simulate

if __name__ == "__main__":
    rows = simulate(restarting(16_384, 54), int(sys.argv[1]))
    # getrusage would count the process that started this one, too.
    lines = Path("/proc/self/status").read_text().splitlines()
    peak_kb = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
    print(int(peak_kb) / 1024)
