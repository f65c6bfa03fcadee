"""Public names for training scripts: few, lazily imported, and documented."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys

import pytest

PUBLIC = ["OutlastError", "Replicated", "Session", "SplitDataset", "__version__", "init"]
SESSION = [
    "batches", "device", "local_rank", "protect", "rank", "report", "run",
    "run_with_undo", "shared", "state", "step_index", "world_size",
]  # fmt: skip


def test_the_facade_is_frozen() -> None:
    import outlast

    assert outlast.__all__ == PUBLIC


def test_importing_the_facade_imports_no_torch() -> None:
    code = "import sys, outlast, outlast.events; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_as_it_was(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It pauses while the façade imports, also where that fails; left off, a script's memory would
    grow without end."""
    import outlast

    was = gc.isenabled()
    monkeypatch.setitem(outlast._HOMES, "Gone", "outlast.is_not_there")
    try:
        (gc.enable if collects else gc.disable)()
        assert outlast.OutlastError
        assert gc.isenabled() == collects
        with pytest.raises(ModuleNotFoundError):
            _ = outlast.Gone
        assert gc.isenabled() == collects
    finally:
        (gc.enable if was else gc.disable)()


def test_everything_public_is_documented() -> None:
    pytest.importorskip("torch")
    import outlast

    silent = [name for name in PUBLIC if not inspect.getdoc(getattr(outlast, name))]
    for name, member in inspect.getmembers(outlast.Session):
        public = not name.startswith("_") and (callable(member) or isinstance(member, property))
        if public and not inspect.getdoc(member):
            silent.append(f"Session.{name}")
    assert silent == []


def test_the_session_has_its_documented_members() -> None:
    pytest.importorskip("torch")
    import outlast

    members = {name for name in dir(outlast.Session) if not name.startswith("_")}
    members |= {"state"} if "self.state:" in inspect.getsource(outlast.Session) else set()
    assert members >= set(SESSION)
