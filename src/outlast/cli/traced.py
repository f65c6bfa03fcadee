"""What the flight recorders of a run's hangs say, beside its incidents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from outlast.errors import OutlastError
from outlast.telemetry.incidents import Incident

_FILES_MAX = 64  # more take seconds to read: then the command that reads them is named alone


def traced(run_dir: Path, incidents: Iterable[Incident]) -> Iterator[str]:
    """A line for each of these incidents of which there are dumps."""
    folders = [each for each in run_dir.glob("traces/*") if each.is_dir()]
    for incident in incidents:
        said = " ".join(fault.detail for fault in incident.faults)
        for folder in sorted(folders):
            if folder.name in said:
                yield f"incident {incident.number}: {_verdict(folder)}"


def _verdict(folder: Path) -> str:
    more = f"(`outlast fleet trace {folder}`)"
    if sum(1 for _ in folder.iterdir()) > _FILES_MAX:
        return f"the flight recorders of its ranks are in {folder} {more}"
    try:
        from outlast.fleet.trace.files import read
        from outlast.fleet.trace.report import analyse

        return f"{analyse(read([folder])).verdict} {more}"
    except ModuleNotFoundError:
        return (
            f"flight recorders are in {folder}: pip install 'outlast[fleet]' adds what reads them"
        )
    except OutlastError as error:
        return f"the flight recorders in {folder} do not tell: {error}"
