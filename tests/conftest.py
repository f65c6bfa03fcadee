"""Signal handlers, hypothesis profile and PYTHONPATH of all tests.

A shell that runs the tests in the background ignores SIGINT, and launchers inherit that; the
default handler is restored. Child processes import `children/sitecustomize.py`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from hypothesis import settings

CHILDREN = str(Path(__file__).with_name("children"))

settings.register_profile("outlast", deadline=None)  # a busy machine takes its time
settings.load_profile("outlast")
signal.signal(signal.SIGINT, signal.default_int_handler)
paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if CHILDREN not in paths:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [CHILDREN, *paths]))
