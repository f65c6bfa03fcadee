"""Import cost of node logs: no heavy module is loaded."""

from __future__ import annotations

import subprocess
import sys


def test_importing_it_loads_nothing_heavy() -> None:
    code = (
        "import sys; import outlast.node_logs.kernel_log, outlast.node_logs.dcgm,"
        " outlast.node_logs.nvidia_smi, outlast.node_logs.nvidia_smi,"
        " outlast.node_logs.ipmi_events,"
        " outlast.node_logs.log_readings;"
        " heavy = {'polars', 'torch', 'numpy', 'pandas', 'xml.etree.ElementTree', 'asyncio'};"
        " print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
