"""A served page, as a user starts it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(path: Path | str, *flags: str) -> Iterator[str]:
    """Yield the link that `outlast view` prints; the server ends with the block, by Ctrl-C."""
    words = [sys.executable, "-m", "outlast", "view", str(path), "--port=0", *flags]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as it:
        try:
            assert it.stdout is not None
            text = ""
            while not (found := re.search(r"http://\S+", text)):
                line = it.stdout.readline()
                assert line, text
                text += line
            yield found[0]
        finally:
            it.send_signal(signal.SIGINT)
            rest, _ = it.communicate(timeout=30)
        assert it.returncode in (0, 130) and "Traceback" not in rest, rest
