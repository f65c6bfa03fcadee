"""`outlast drain` where nothing can be requested."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.cli.main import main
from outlast.errors import EXIT_DONE, EXIT_USER_ERROR
from outlast.events import WorkerSpawned
from outlast.telemetry.event_store import EventClock, EventWriter


def write_run(folder: Path, *events: WorkerSpawned) -> None:
    writer = EventWriter(folder / "events", "agent-n2-000001", EventClock())
    for event in events:
        writer.emit(event)
    writer.close()


SPAWNED = WorkerSpawned(t_ns=1, worker="w1-0", seat=0, pid=7, host="n2")


def test_a_directory_without_a_controllers_events_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """That of a host of several, each of which has its own."""
    write_run(tmp_path, SPAWNED)
    assert main(["drain", str(tmp_path), "--rank", "0"]) == EXIT_USER_ERROR
    output = " ".join(capfd.readouterr().err.replace("│", " ").split())
    assert "use the host that has the controller; nothing was requested" in output
    assert not (tmp_path / "notices").exists()


def test_a_withdrawal_is_told_as_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, SPAWNED)
    assert main(["drain", str(tmp_path), "--host", "n2", "--cancel", "--json"]) == EXIT_DONE
    assert '"outcome":"withdrawn"' in capfd.readouterr().out
