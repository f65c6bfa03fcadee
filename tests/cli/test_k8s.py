"""`outlast k8s`: what it prints and refuses, and what its probes find."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest
from tests.end_to_end.conftest import wait_for

from outlast.cli.main import main
from outlast.errors import EXIT_DONE, EXIT_USAGE, EXIT_USER_ERROR
from outlast.launch.nodes.node_state import NodeState, StateFile

OURS = ("--image=example/train:1", "--claim=runs")


def render(*words: str, kind: str = "jobset") -> int:
    return main(["k8s", "render", f"--kind={kind}", *OURS, "--", *words])


def test_manifests_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert render("--nnodes=2:3", "--limit=stop_s=100", "Train_Me.py", "--lr=1") == EXIT_DONE
    text = capsys.readouterr().out
    assert "name: train-me\n" in text and "name: train-me-token\n" in text
    assert "terminationGracePeriodSeconds: 130\n" in text
    assert "--notice-signal=TERM" in text and "--notice-time=115s" in text
    assert render("--nnodes=2", "--notice-signal=USR2", "a.py") == EXIT_DONE
    assert "TERM" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes=3:2", "a.py"], "--nnodes 3:2"),
        (["--nnodes=1", "a.py"], "--nnodes 1"),
        (["--nnodes=2", "--rdzv-endpoint=n1", "a.py"], "--rdzv-endpoint is set by the manifests"),
        (["--nnodes=2", "--node-rank=1", "a.py"], "--node-rank is set by the manifests"),
        (["--nnodes=2", "--token-file=t", "a.py"], "--token-file is set by the manifests"),
        (["--nnodes=2", "--run-dir=r", "a.py"], "the claim is mounted at /runs"),
        (["--nnodes=2"], "no training script was given"),
    ],
)
def test_what_cannot_run_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert render(*words) == EXIT_USAGE
    printed = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in printed


def test_an_image_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["k8s", "render", "--kind=jobset", "--claim=a", "--", "a.py"]) == EXIT_USAGE
    assert "--image" in capsys.readouterr().err


def probe(path: Path) -> tuple[int, int]:
    """Return the exit codes of both probes."""
    return main(["k8s", "alive", str(path)]), main(["k8s", "ready", str(path)])


BOTH, NONE = (EXIT_DONE, EXIT_DONE), (EXIT_USER_ERROR, EXIT_USER_ERROR)
ALIVE = (EXIT_DONE, EXIT_USER_ERROR)


def test_a_node_is_ready_while_its_controller_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    monkeypatch.setenv("OUTLAST_NODE_STATE", str(path))
    assert probe(path) == ALIVE, "nothing serves yet"

    async def keep(silence_s: float) -> None:
        keeping = asyncio.create_task(StateFile("n1", "run1", 10.0).keep(lambda: silence_s))
        await asyncio.to_thread(wait_for, path.exists, "the state file")
        assert probe(path) == (BOTH if silence_s < 10 else ALIVE)
        keeping.cancel()
        await asyncio.wait([keeping])

    for silence_s in (0.5, 30.0):
        asyncio.run(keep(silence_s))
        assert not path.exists(), "it is removed at the end"


def test_a_stuck_launcher_is_not_alive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "state.json"
    old_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - 100 * 10**9
    state = NodeState(host="n1", run="run1", beat_ns=old_ns, silence_s=0.0, lease_s=10.0)
    path.write_bytes(msgspec.json.encode(state))
    assert probe(path) == NONE
    assert "the launcher of n1 is stuck for 100 s" in capsys.readouterr().out
    path.write_text("{")
    assert probe(path) == NONE
