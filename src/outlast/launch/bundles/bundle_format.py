"""Layout of a bundle, `RUN_DIR/bundles/TERM.tar.zst`: a tar file, compressed by zstd.

Its only top directory has the layout of a run directory (`run.json`, `plan.json`, `summary.json`,
`events/`, `journal/`, `logs/`, `traces/`, `nonfinite/`, `checkpoints/`), and besides:

bundle.json       what the bundle is of, its files, what was left out and why
explanation.txt   output of `outlast explain`
script.py         the training script
"""

from __future__ import annotations

import msgspec

from outlast.events import Fault

VERSION = 1
FOLDER = "bundles"
SUFFIX = ".tar.zst"
MANIFEST = "bundle.json"
SCRIPT = "script.py"
BYTES_MAX = 256 << 20  # of all files
UNPACKED_MAX = 2 << 30  # that a reader unpacks
FILES_MAX = 20_000


class BundledCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Newest checkpoint of the run. `is_inside`: its files are in the bundle; else `path` has
    them, on the run's own storage."""

    path: str
    step: int
    size_bytes: int
    is_inside: bool


class BundleManifest(msgspec.Struct, frozen=True, kw_only=True):
    """bundle.json. `versions`: of installed packages; `settings`: environment variables that change
    what a job computes; `omitted`: what was left out, with the reason."""

    version: int
    run: str
    term: int
    outcome: str  # as of RunEnded; "": the run has not ended
    cause: Fault | None
    step: int
    ended_ns: int  # the newest event
    host: str
    python: str
    outlast: str
    versions: dict[str, str]
    settings: dict[str, str]
    checkpoint: BundledCheckpoint | None
    omitted: list[str]
    redacted: int  # values
    files: dict[str, int]  # sizes in bytes
