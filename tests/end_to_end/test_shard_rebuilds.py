"""Ranks without a replica, lost at any moment: rebuilt from keepers' memory, or rolled back."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import Outcome, Runner, wait_for
from tests.end_to_end.test_failure_recovery import keepers_of

from outlast import events

pytestmark = pytest.mark.process
JOB = Path(__file__).with_name("jobs") / "unreplicated_job.py"
KEPT = ("--snapshot-every=1", "--copies=2")


def run(folder: Path, *flags: str, job: tuple[str, ...] = ()) -> Outcome:
    folder.mkdir()
    outcome = Runner(folder).run("--spares=1", *KEPT, *flags, job=job, script=JOB)
    assert outcome.code == 0, outcome.output
    assert "did not strike" not in outcome.output, outcome.output
    return outcome


def rungs(outcome: Outcome) -> list[str]:
    return [e.rung for e in outcome.events if isinstance(e, events.Decided)]


def stayed(outcome: Outcome) -> int:
    """Return the number of ranks that one worker has had throughout."""
    seated = [e.seat for e in outcome.events if isinstance(e, events.WorkerSeated)]
    return sum(seated.count(seat) == 1 for seat in range(outcome.world))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("undisturbed") / "run").ranks


def test_a_step_that_others_have_applied_is_taken_back(
    tmp_path: Path, expected: list[dict[str, Any]]
) -> None:
    outcome = run(tmp_path / "killed", "--fault=kill:rank=1,step=6,phase=apply")
    assert outcome.ranks == expected
    assert outcome.summary["committed_steps_lost"] == 0
    assert rungs(outcome) == ["rebuild"] and stayed(outcome) == 3


BEHIND_THE_STEP = {
    "in the vote of the save": ("kill:rank=0,step=5,phase=vote", 1),
    "before the save": ("kill:rank=3,step=5,phase=between", 1),
    "before it returns": ("kill:rank=1,step=5,phase=done", 0),
    "by an exception while it applies": ("raise:rank=1,step=5,phase=apply", 0),
}


@pytest.mark.extended
@pytest.mark.parametrize("when", BEHIND_THE_STEP)
def test_a_rank_is_lost_behind_its_step(
    tmp_path: Path, expected: list[dict[str, Any]], when: str
) -> None:
    """A step that every rank had completed counts as lost, since it is trained again."""
    fault, lost = BEHIND_THE_STEP[when]
    outcome = run(tmp_path / "killed", f"--fault={fault}")
    assert outcome.ranks == expected
    assert outcome.summary["committed_steps_lost"] <= lost
    assert rungs(outcome) == ["rebuild"] and stayed(outcome) == 3


@pytest.mark.extended
def test_weights_that_the_loop_changes_behind_the_step_roll_all_ranks_back(tmp_path: Path) -> None:
    job = ("--scale-after", "5")
    expected = run(tmp_path / "undisturbed", job=job).ranks
    outcome = run(tmp_path / "killed", "--fault=kill:rank=2,step=5,phase=between", job=job)
    assert outcome.ranks == expected
    assert rungs(outcome) == ["rebuild", "rollback"] and stayed(outcome) == 0
    assert "step 5 was taken back and redone" in outcome.output


RATES = {
    "before the step": ("--fault=kill:rank=0,step=6,phase=backward", ()),
    "in apply": ("--fault=kill:rank=2,step=6,phase=apply", ()),
    "behind a draw": ("--plain", ("--die-at", "5")),
}


@pytest.mark.extended
@pytest.mark.parametrize("when", RATES)
def test_a_learning_rate_that_the_loop_sets(tmp_path: Path, when: str) -> None:
    flag, more = RATES[when]
    expected = run(tmp_path / "undisturbed", job=("--rates",)).ranks
    outcome = run(tmp_path / "killed", flag, job=("--rates", *more))
    assert outcome.ranks == expected
    assert outcome.summary["committed_steps_lost"] == 0
    assert rungs(outcome) == ["rebuild"] and stayed(outcome) == 3


def are_copied(pid: int) -> bool:
    """Whether a keeper has mapped its worker's two arenas and two for others, and nothing is on its
    way: its sockets are those that it, its readers and its worker listen with."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    arenas = {line.split()[4] for line in maps.splitlines() if "outlast-arena" in line}
    sockets = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            sockets += "socket:" in str(entry.readlink())
    return (len(arenas), sockets) == (4, 4)


MEMORIES = {"its own": (1,), "two": (1, 2), "all others": (0, 2, 3), "all": (0, 1, 2, 3)}


@pytest.mark.extended
@pytest.mark.parametrize("lost", MEMORIES)
def test_a_rank_is_lost_together_with_keepers(
    runner: Runner, tmp_path: Path, expected: list[dict[str, Any]], lost: str
) -> None:
    """Each part of a copy is in two memories, and a keeper's successor begins without copies. Where
    no copy in memory is whole, all ranks start from the disk."""
    hold = tmp_path / "hold"
    job = ("--hold", str(hold))
    process = runner.start("--spares=1", "--checkpoint-every=2", *KEPT, job=job, script=JOB)
    wait_for(lambda: all(hold.with_suffix(f".{r}").exists() for r in range(4)), "step 4")
    keepers = keepers_of(process.pid)
    wait_for(lambda: all(map(are_copied, keepers)), "step 4 with peers")
    process.send_signal(signal.SIGSTOP)
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in keepers}
    for rank in MEMORIES[lost]:
        os.kill(next(p for p in keepers if b"rank %d" % rank in names[p]), signal.SIGKILL)
    os.kill(int(hold.with_suffix(".1").read_text()), signal.SIGKILL)
    hold.touch()
    process.send_signal(signal.SIGCONT)
    outcome = runner.end(process)
    assert outcome.code == 0, outcome.output
    assert outcome.ranks == expected
    assert outcome.summary["committed_steps_lost"] == 0
    if lost.startswith("all"):
        assert rungs(outcome) == ["rebuild", "rollback", "restart"] and stayed(outcome) == 0
    else:
        assert rungs(outcome) == ["rebuild"] and stayed(outcome) == 3


MATRIX = {
    "tensor parallel, forward": ("tensor", ("kill:rank=1,step=6,phase=forward",)),
    "both, backward": ("both", ("kill:rank=3,step=5,phase=backward",)),
    "two ranks": (
        "fsdp",
        ("kill:rank=1,step=5,phase=backward", "kill:rank=2,step=5,phase=backward"),
    ),
    "joiner that reads": ("fsdp", ("kill:rank=1,step=5,phase=backward", "kill:phase=receive")),
    "stop": ("fsdp", ("stop:rank=2,step=5,phase=backward",)),
}
APPLIED = {
    "tensor parallel": ("tensor", ("kill:rank=2,step=4,phase=apply",)),
    "both": ("both", ("kill:rank=0,step=4,phase=apply",)),
    "two ranks": ("fsdp", ("kill:rank=1,step=5,phase=apply", "kill:rank=3,step=5,phase=apply")),
    "joiner that reads": ("fsdp", ("kill:rank=1,step=5,phase=apply", "kill:phase=receive")),
    "at the last step": ("fsdp", ("kill:rank=2,step=9,phase=apply",)),
}


@pytest.mark.extended
@pytest.mark.parametrize("case", MATRIX)
def test_before_anybody_applies(
    tmp_path: Path, layouts: dict[str, list[dict[str, Any]]], case: str
) -> None:
    must_rebuild(tmp_path / "killed", layouts, *MATRIX[case])


@pytest.mark.extended
@pytest.mark.parametrize("case", APPLIED)
def test_after_others_have_applied(
    tmp_path: Path, layouts: dict[str, list[dict[str, Any]]], case: str
) -> None:
    must_rebuild(tmp_path / "killed", layouts, *APPLIED[case])


@pytest.mark.extended
@pytest.mark.parametrize("phase", ["backward", "apply"])
def test_one_copy_in_the_ranks_own_keeper(
    tmp_path: Path, layouts: dict[str, list[dict[str, Any]]], phase: str
) -> None:
    fault = f"kill:rank=1,step=5,phase={phase}"
    must_rebuild(tmp_path / "killed", layouts, "fsdp", (fault,), "--copies=1")


@pytest.fixture(scope="module")
def layouts(
    tmp_path_factory: pytest.TempPathFactory, expected: list[dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("layouts")
    others = {
        layout: run(folder / layout, job=("--layout", layout)).ranks
        for layout in ("tensor", "both")
    }
    return {"fsdp": expected, **others}


def must_rebuild(
    folder: Path, layouts: dict[str, list[dict[str, Any]]], layout: str, faults: tuple[str, ...],
    *flags: str,
) -> None:  # fmt: skip
    """Run with these faults; assert equal ranks, no lost step, and that the other ranks stayed."""
    given = [f"--fault={each}" for each in faults]
    outcome = run(folder, *flags, *given, job=("--layout", layout))
    assert outcome.ranks == layouts[layout]
    assert outcome.summary["committed_steps_lost"] == 0
    assert set(rungs(outcome)) == {"rebuild"}
    lost = {each.partition("rank=")[2][:1] for each in faults if "rank=" in each}
    assert stayed(outcome) == 4 - len(lost)
