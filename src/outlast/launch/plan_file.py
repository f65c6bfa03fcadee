"""plan.json: the command of a run's newest launcher, kept for replays."""

from __future__ import annotations

from pathlib import Path

import msgspec

from outlast.errors import RunDirError
from outlast.launch.run_directory import RunDir, write
from outlast.launch.torchrun_arguments import RunPlan

VERSION = 1
_NAME = "plan.json"


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """A launcher's plan, and the directory that its workers were started in."""

    version: int = VERSION
    cwd: str
    plan: RunPlan


class _Version(msgspec.Struct):
    version: int


def keep(run_dir: RunDir, plan: RunPlan) -> None:
    """Write it down. Raises RunDirError when that fails."""
    planned = PlanFile(cwd=str(Path.cwd()), plan=plan)
    try:
        write(run_dir.room(_NAME), msgspec.json.format(msgspec.json.encode(planned), indent=2))
    except OSError as error:
        raise RunDirError(
            f"{run_dir.room(_NAME)} cannot be written: {error.strerror}; nothing was started"
        ) from error


def read(run_dir: Path) -> PlanFile:
    """Return the plan kept in `run_dir`. Raises RunDirError if it is missing or unreadable."""
    path = run_dir / _NAME
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=_Version).version
        if version != VERSION:
            raise RunDirError(f"{path} is of version {version}, and this Outlast reads {VERSION}")
        return msgspec.json.decode(data, type=PlanFile)
    except OSError as error:
        raise RunDirError(
            f"{path} cannot be read ({error.strerror}): how this run was started is not known; give"
            " the directory that `outlast run` printed at its start"
        ) from error
    except msgspec.DecodeError as error:
        raise RunDirError(f"{path} is damaged or of another version ({error})") from error
