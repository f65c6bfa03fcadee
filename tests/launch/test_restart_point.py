"""Restart inside a run whose newest checkpoint was damaged or lost."""

from __future__ import annotations

import subprocess

import pytest
from tests.launch.conftest import TRAINER, Stage

pytestmark = pytest.mark.process
KEEPERS = """
import glob

def said(path, what):
    try:
        return what in open(path).read()
    except OSError:
        return False

def kill_keepers():
    for status in glob.glob("/proc/[0-9]*/status"):
        pid = status.split("/")[2]
        child = said(status, f"PPid:\\t{os.getppid()}")
        if child and said(f"/proc/{pid}/cmdline", "keeper"):
            os.kill(int(pid), signal.SIGKILL)

"""
# Both ranks die after step 8, and the keepers with their copies before them; the checkpoint of
# step 6 is spoilt, the one of step 3 is not.
SPOILING = (
    KEEPERS
    + """
once = f"{ROOT}/once"
second_life = os.path.exists(once)
"""
    + TRAINER
    + """
for batch in session.batches(loader, until=10):
    if session.step_index == 4 and second_life:
        tell(f"again{session.rank}")
    session.run(step, batch)
    if session.step_index == 8 and not second_life:
        if session.rank == 0:
            newest = f"{ROOT}/run/checkpoints/step-000000006-*"
            wait_for(lambda: glob.glob(f"{newest}/commit.json"))
            kill_keepers()
            for path in glob.glob(f"{newest}/*"):
                with open(path, "r+b") as file:
                    file.seek(os.path.getsize(path) // 2)
                    file.write(b"spoilt")
            tell("once")
        wait_for(lambda: os.path.exists(once))
        os.kill(os.getpid(), signal.SIGKILL)
"""
)

# Both ranks die after step 8. The next ones are started because step 6 was found in memory, and the
# keepers that hold it die before anybody has a seat.
FORGETTING = (
    KEEPERS
    + """
rank = os.environ["RANK"]
first = not os.path.exists(f"{ROOT}/died{rank}")
def met(what):
    tell(f"{what}{rank}")
    wait_for(lambda: len(glob.glob(f"{ROOT}/{what}[01]")) == 2)
if not first and not os.path.exists(f"{ROOT}/second{rank}"):
    if rank == "0":
        kill_keepers()
    met("second")
"""
    + TRAINER
    + """
for batch in session.batches(loader, until=10):
    session.run(step, batch)
    if session.step_index == 8 and first:
        if rank == "0":
            wait_for(lambda: glob.glob(f"{ROOT}/run/checkpoints/step-000000006-*/commit.json"))
        met("died")
        os.kill(os.getpid(), signal.SIGKILL)
"""
)


def finished(stage: Stage, script: str, *flags: str) -> str:
    flags = ("--nproc-per-node=2", "--plain", *flags)
    with stage.launch(stage.script(script), *flags, stderr=subprocess.STDOUT) as launcher:
        try:
            out, _ = launcher.communicate(timeout=120)
        finally:
            launcher.kill()
    said = " ".join(out.replace("│", " ").split())
    assert launcher.returncode == 0, said
    return said


def test_it_begins_at_the_newest_that_is_whole(stage: Stage) -> None:
    said = finished(stage, SPOILING, "--checkpoint-every=3")
    assert "is skipped" in said and "is not whole: all ranks start from" in said
    assert stage.pid_in("again0") and stage.pid_in("again1")


@pytest.mark.long
def test_a_copy_that_is_gone_before_the_start_sends_all_to_the_disk(stage: Stage) -> None:
    said = finished(stage, FORGETTING, "--checkpoint-every=3")
    assert "CorruptionError: memory/step-000000006" in said
    assert "(step 6) is not whole: all ranks start from the checkpoint" in said
    assert stage.pid_in("second0") and stage.pid_in("second1")
