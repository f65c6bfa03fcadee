"""A restart inside a run, when the newest checkpoint has been damaged since it was written."""

from __future__ import annotations

import subprocess

import pytest
from tests.launch.conftest import TRAINER, Stage

pytestmark = pytest.mark.process
# Both ranks die after step 8, and the keepers with their copies before them; the checkpoint of
# step 6 is spoilt, the one of step 3 is not.
SPOILING = (
    """
import glob
once = f"{ROOT}/once"
second_life = os.path.exists(once)
"""
    + TRAINER
    + """
def said(path, what):
    try:
        return what in open(path).read()
    except OSError:
        return False
for batch in session.batches(loader, until=10):
    if session.step_index == 4 and second_life:
        tell(f"again{session.rank}")
    session.run(step, batch)
    if session.step_index == 8 and not second_life:
        if session.rank == 0:
            newest = f"{ROOT}/run/checkpoints/step-000000006-*"
            wait_for(lambda: glob.glob(f"{newest}/commit.json"))
            for status in glob.glob("/proc/[0-9]*/status"):
                pid = status.split("/")[2]
                child = said(status, f"PPid:\\t{os.getppid()}")
                if child and said(f"/proc/{pid}/cmdline", "keeper"):
                    os.kill(int(pid), signal.SIGKILL)
            for path in glob.glob(f"{newest}/*"):
                with open(path, "r+b") as file:
                    file.seek(os.path.getsize(path) // 2)
                    file.write(b"spoilt")
            tell("once")
        wait_for(lambda: os.path.exists(once))
        os.kill(os.getpid(), signal.SIGKILL)
"""
)


def test_it_begins_at_the_newest_that_is_whole(stage: Stage) -> None:
    flags = ("--nproc-per-node=2", "--checkpoint-every=3", "--plain")
    with stage.launch(stage.script(SPOILING), *flags, stderr=subprocess.STDOUT) as launcher:
        try:
            out, _ = launcher.communicate(timeout=120)
        finally:
            launcher.kill()
    said = " ".join(out.replace("│", " ").split())
    assert launcher.returncode == 0, said
    assert "is passed over" in said and "is not whole: everybody starts from" in said
    assert stage.pid_in("again0") and stage.pid_in("again1")
