"""It runs on every node every five minutes: it loads nothing that is heavy."""

from __future__ import annotations

import subprocess
import sys


def test_importing_it_loads_nothing_heavy() -> None:
    code = (
        "import sys; import outlast.symptoms.kernel_log, outlast.symptoms.dcgm,"
        " outlast.symptoms.nvidia_smi, outlast.symptoms.smi_links, outlast.symptoms.ipmi,"
        " outlast.symptoms.storms, outlast.symptoms.taxonomy;"
        " heavy = {'polars', 'torch', 'numpy', 'pandas', 'xml.etree.ElementTree', 'asyncio'};"
        " print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
