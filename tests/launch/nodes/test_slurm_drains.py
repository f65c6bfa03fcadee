"""Drains of Slurm nodes: what scontrol prints, and scontrol programs that fail."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from outlast.events import Warned
from outlast.launch.nodes import slurm_drains

# As Slurm 22.05 prints it.
IDLE = "NodeName=n1 Arch=x86_64 NodeHostName=n1 State=IDLE ThreadsPerCore=1 Comment=a b"
DRAINS = (
    "NodeName=gpu2 Arch=x86_64 CoresPerSocket=4 NodeAddr=10.0.0.2 NodeHostName=n2 Version=22.05.8"
    " State=MIXED+DRAIN ThreadsPerCore=1 Reason=XID 79 on GPU 2 [root@2026-11-28T00:12:00]"
)
HURT = "NodeName=n3 NodeHostName=n3 State=DOWN*+DRAIN+NOT_RESPONDING Reason=no answer"


def test_draining_nodes_are_named_with_reason_and_author() -> None:
    second, third = slurm_drains.draining_nodes("\n".join((IDLE, DRAINS, HURT, "", "garbage")))
    assert (second.host, second.severity, second.code) == (
        "n2",
        "drain",
        "root@2026-11-28T00:12:00",
    )
    assert second.detail.startswith("Slurm drains gpu2 (State=MIXED+DRAIN): XID 79 on GPU 2 [root")
    assert (third.host, third.code) == ("n3", "")
    assert slurm_drains.draining_nodes("State=UNDRAIN\nNodeName=n4 State=POWERED_DOWN") == ()


def test_fields_in_free_text_count_for_nothing() -> None:
    """Slurm 22.05 shows the second line of a reason behind its author, and a comment last."""
    plain = " Reason=a bad fan [root@2026-11-28T01:13:56]"
    (drain,) = slurm_drains.draining_nodes(
        f"NodeName=n2 State=IDLE+DRAIN{plain} Comment=c State=DOWN"
    )
    assert drain.host == "n2" and drain.detail.endswith("a bad fan [root@2026-11-28T01:13:56]")
    odd = f"{plain}        NodeName=n1 NodeHostName=n1 State=IDLE Reason=x [me@2026-11-28T09:00:00]"
    (drain,) = slurm_drains.draining_nodes(f"NodeName=n2 State=IDLE+DRAIN{odd}")
    assert (drain.host, drain.code) == ("n2", "root@2026-11-28T01:13:56")
    assert not slurm_drains.draining_nodes(f"NodeName=n1 State=IDLE{plain} State=IDLE+DRAIN")


def watch_once(
    folder: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[Warned, ...]], list[str]]:
    """Return what is reported and noted before the second look."""
    if script:
        (folder / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin" if script else str(folder))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setattr(slurm_drains, "ANSWER_S", 0.5)
    found: list[tuple[Warned, ...]] = []
    notes: list[str] = []

    async def play() -> None:
        looked = asyncio.Event()
        watching = asyncio.create_task(
            slurm_drains.watch(
                lambda one: (found.append(one), looked.set())[0],
                lambda text: (notes.append(text), looked.set())[0],
            )
        )
        looking = asyncio.create_task(looked.wait())
        await asyncio.wait({watching, looking}, timeout=20, return_when="FIRST_COMPLETED")
        watching.cancel()
        looking.cancel()

    asyncio.run(play())
    return found, notes


def test_one_question_is_about_all_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"echo \"$*\" > {tmp_path}/words; echo '{DRAINS}'"
    found, notes = watch_once(tmp_path, script, monkeypatch)
    assert [one.host for one in found[0]] == ["n2"] and not notes
    assert (tmp_path / "words").read_text() == "--oneliner show node n[1-2]\n"


@pytest.mark.parametrize("script", ["exit 1", "exec sleep 100"], ids=["fails", "hangs"])
def test_a_scontrol_without_an_answer_is_noted(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, notes = watch_once(tmp_path, script, monkeypatch)
    assert not found and "scontrol gives no answer" in notes[0]


def test_an_absent_scontrol_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch_once(tmp_path, "", monkeypatch) == ([], [])
