"""`outlast bundle`: what a run has left behind, in one file without secrets."""

from __future__ import annotations

from pathlib import Path

import msgspec

from outlast.cli.newest_run import chosen_run
from outlast.cli.output_stream import echo, print_json
from outlast.errors import EXIT_DONE, UsageError
from outlast.launch.bundles.bundle_format import SUFFIX
from outlast.launch.bundles.bundle_writer import write_bundle
from outlast.text_formatting import size

DEADLINE_S = 600.0  # nobody waits for the end of a run


class BundleWritten(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`."""

    version: int = 1
    path: str
    size_bytes: int


def bundle(run_dir: Path | None = None, *, out: Path | None = None, json: bool = False) -> int:
    """Write a forensic bundle of a run: what it left behind, without secrets.

    A run that stops in failure has written one (`RUN_DIR/bundles`); this command
    writes one of any run, dead or alive. `outlast replay` takes it.

    Parameters
    ----------
    run_dir
        Run directory, which `outlast run` printed at its start (default: the newest).
    out
        File to write, which ends in `.tar.zst` (default: in the run directory).
    json
        Print one JSON object.
    """
    if out is not None and not out.name.endswith(SUFFIX):
        raise UsageError(f"--out {out}: a bundle's name ends in {SUFFIX}; nothing was written")
    if out is not None and out.exists():
        raise UsageError(f"--out {out} exists; nothing was written; give another name")
    run_dir = chosen_run(run_dir)
    path = write_bundle(run_dir, target=out, deadline_s=DEADLINE_S)
    written = BundleWritten(path=str(path), size_bytes=path.stat().st_size)
    if json:
        print_json(written)
    else:
        echo(f"{path}: {size(written.size_bytes)}; names of what was left out: bundle.json")
    return EXIT_DONE
