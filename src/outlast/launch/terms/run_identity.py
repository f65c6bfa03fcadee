"""Identity of a job, in the file run.json of its run directory."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import msgspec

from outlast.errors import RunDirError

VERSION = 1
FILE = "run.json"
CHECKPOINTS = "checkpoints"


class RunningJob(msgspec.Struct, frozen=True, kw_only=True):
    """run.json: the job's identity. Later launchers must have the same script and world size.

    `home`: shared directory with the checkpoints and the journal's copy, if each host of the run
    has its own run directory; "" if the run directory has them.
    """

    version: int
    run: str
    script: str
    args: tuple[str, ...]
    world: int
    created_ns: int
    term: int  # number of launchers
    home: str = ""


class _Home(msgspec.Struct):
    """Part of run.json, also of one that this version cannot resume."""

    home: str = ""


def checkpoints_of(run_dir: Path) -> Path:
    """Return the directory of a run's checkpoints: in the run directory, unless run.json names
    another one."""
    try:
        home = msgspec.json.decode((run_dir / FILE).read_bytes(), type=_Home).home
    except (OSError, msgspec.DecodeError):
        home = ""
    return Path(home) if home else run_dir / CHECKPOINTS


def identify(
    path: Path, script: str, args: tuple[str, ...], world: int
) -> tuple[RunningJob, tuple[str, ...]]:
    """Return the job of a run directory in its next term, and notes about the change.

    Raises RunDirError if the directory belongs to another job.
    """
    try:
        old = msgspec.json.decode((path / "run.json").read_bytes(), type=RunningJob)
    except FileNotFoundError:
        job = RunningJob(
            version=VERSION,
            run=secrets.token_hex(8),
            script=script,
            args=args,
            world=world,
            created_ns=time.time_ns(),
            term=1,
        )
        return job, ()
    except msgspec.DecodeError as error:
        raise RunDirError(
            f"{path / 'run.json'} cannot be read ({error}); nothing was started or changed;"
            " restore it or choose another --run-dir"
        ) from error
    for name, before, now in (
        ("format version", old.version, VERSION),
        ("script", old.script, script),
        ("world size", old.world, world),
    ):
        if before != now:
            raise RunDirError(
                f"run directory {path} belongs to another job: its {name} is {before}, not {now};"
                " nothing was changed; give that again, or choose another --run-dir"
            )
    notes: tuple[str, ...] = ()
    if old.args != args:
        notes = (
            f"resuming {path} with other script arguments: {' '.join(args) or '(none)'}"
            f" instead of {' '.join(old.args) or '(none)'}",
        )
    return msgspec.structs.replace(old, term=old.term + 1, args=args), notes
