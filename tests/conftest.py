"""Signals as a terminal leaves them: a shell that runs the tests in the background ignores SIGINT,
and every launcher under test would inherit that. And children that end sooner."""

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
