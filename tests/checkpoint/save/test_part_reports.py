"""Parts that cannot come: named within seconds, with what each rank gave. Real ranks and mounts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.save.part_reports import PartReport, SaveCall, WatchedSave, agreed_call
from outlast.errors import StorageError, UsageError

REPOSITORY = Path(__file__).parents[3]

SAVE_S = 120.0  # of reporting_ranks: what is told after it was told by the deadline
SOON_S = 60.0  # on a loaded machine


def hear(tmp_path: Path, case: str) -> list[tuple[float, list[str]]]:
    """Run both ranks; return for each the seconds and the lines of what it was told."""
    root, mount = tmp_path / "root", tmp_path / "mount"
    root.mkdir()
    mount.mkdir()
    rank = [sys.executable, "-m", "tests.checkpoint.save.reporting_ranks", case]
    own = f"mount --bind {root} {mount} && exec " + '"$@"'
    commands = [[*rank, str(root), str(tmp_path / "store"), "0"]]
    commands += [[*rank, str(root), str(tmp_path / "store"), "1"]]
    if case == "unmounted":
        commands[1][4] = str(mount)
        commands[1] = ["unshare", "--mount", "sh", "-c", own, "sh", *commands[1]]
    with contextlib.ExitStack() as stack:
        ranks: list[subprocess.Popen[str]] = []
        for number, each in enumerate(commands):
            log = stack.enter_context((tmp_path / f"log-{number}").open("w"))
            ranks.append(subprocess.Popen(each, cwd=REPOSITORY, stdout=log, stderr=log, text=True))
            stack.enter_context(ranks[-1])
            stack.callback(ranks[-1].kill)
        codes = [each.wait(SAVE_S + 30) for each in ranks]
    logs = [(tmp_path / f"log-{number}").read_text() for number in range(2)]
    assert codes == [0, 0], "\n".join(logs)
    heard = [(tmp_path / f"rank-{number}").read_text().splitlines() for number in range(2)]
    return [(float(lines[0]), lines[1:]) for lines in heard]


@pytest.mark.process
def test_ranks_that_give_one_save_different_steps(tmp_path: Path) -> None:
    (took_s, first), (_, second) = hear(tmp_path, "steps")
    assert took_s < SOON_S
    assert "rank 1 gave this save step 101, rank 0 step 100" in first[0]
    assert "rank 1 gave this save step 101, rank 0 step 100" in " ".join(second)


@pytest.mark.process
def test_a_mount_that_vanishes_on_one_rank(tmp_path: Path) -> None:
    case = "moved" if os.geteuid() else "unmounted"  # mounts need root
    (took_s, first), (_, second) = hear(tmp_path, case)
    assert took_s < SOON_S
    assert "step 100" in first[0] and "rank 1: " in first[0] and "owner.json" in first[0]
    assert "is not the directory that rank 0 saves to" in second[0]


@pytest.mark.extended
@pytest.mark.process
def test_a_rank_that_writes_into_another_directory(tmp_path: Path) -> None:
    (took_s, first), _ = hear(tmp_path, "another")
    assert took_s < SAVE_S
    assert "rank 1: it reported" in first[0] and "see different directories" in first[0]
    assert any("rank 1 (wrote it on " in line for line in first[1:]), first


@pytest.mark.process
def test_a_rank_whose_save_fails_before_it_has_a_place(tmp_path: Path) -> None:
    (took_s, first), (_, second) = hear(tmp_path, "raising")
    assert took_s < SOON_S
    assert "rank 1: " in first[0] and second[0] in first[0]


@pytest.mark.extended
@pytest.mark.process
def test_a_rank_that_does_not_save_is_named_before_the_deadline(tmp_path: Path) -> None:
    (took_s, first), _ = hear(tmp_path, "silent")
    assert took_s < SAVE_S
    lack = "the save of step 100 lacks the parts of rank 1 (has not called save)"
    assert lack in first[0] and lack in first[2:], first
    assert "rank 1 gave this save step 150, rank 0 step 100" in first[1], first


def test_a_part_counts_as_lost_only_after_it_was_reported_and_not_found_for_long() -> None:
    save = WatchedSave(3, SavePoint(100, 100, "a3"), lambda: (None, False), due_s=1e9)
    assert save.judge(1, None, 0.0, 75.0) == ""
    assert save.judge(1, PartReport(2, 99, "failed", "h", "of an earlier call"), 0.0, 75.0) == ""
    assert save.judge(1, PartReport(3, 100, "begun", "h"), 1000.0, 75.0) == ""
    written = PartReport(3, 100, "written", "host-b")
    assert save.judge(1, written, 1000.0, 75.0) == ""
    assert save.judge(1, written, 1074.0, 75.0) == ""
    assert "written on host-b" in save.judge(1, written, 1076.0, 75.0)
    assert save.judge(2, PartReport(3, 100, "failed", "h", "disk full"), 0.0, 75.0) == "disk full"


def test_ranks_of_a_run_agree_on_each_save_or_all_fail_with_its_cause() -> None:
    assert agreed_call([SaveCall(3, 100, True), SaveCall(5, 100, True)]) == 5  # after a redo
    with pytest.raises(StorageError, match="rank 1: disk full; nothing was saved"):
        agreed_call([SaveCall(3, 100), SaveCall(3, -1, failure="disk full")])
    with pytest.raises(UsageError, match="rank 1 gave this save step 101, rank 0 step 100"):
        agreed_call([SaveCall(3, 100), SaveCall(3, 101)])
    with pytest.raises(UsageError, match=r"rank 1 was replaced since .* first save"):
        agreed_call([SaveCall(3, 100, True), SaveCall(1, 100)])


@pytest.mark.extended
@pytest.mark.process
def test_lost_parts_are_reported_to_all_ranks_of_a_run(tmp_path: Path) -> None:
    job = Path(__file__).with_name("reporting_job.py")
    flags = ["--plain", f"--run-dir={tmp_path / 'run'}", "--nproc-per-node=2", "--spares=1"]
    fault = "--fault=kill:rank=1,step=6,phase=forward"
    command = [sys.executable, "-m", "outlast", "run", *flags, fault, str(job), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2))
    assert first["1"][:2] == ["", ""]
    differ = "rank 1 gave this save step 3, rank 0 step 2"
    assert differ in first["2"][0]
    assert first["3"][0].startswith("rank 1: ") and first["3"][0].endswith("; nothing was saved")
    assert first["4"][0] == "" and "rank 1: " in first["4"][1] and "step 4" in first["4"][1]
    assert float(first["4"][2]) < SOON_S
    joined = "rank 1 was replaced since this Checkpointer's first save"
    assert joined in first["6"][0] and joined in second["6"][0]
