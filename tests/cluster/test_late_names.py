"""Names of hosts that resolve only after the start, or lead to an earlier host at first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.conftest import ON_HOSTS
from tests.cluster.hosts import Hosts

from outlast.errors import EXIT_DONE

pytestmark = ON_HOSTS
JOB = Path(__file__).with_name("steady_job.py")


@pytest.mark.parametrize("first", ["", "10.78.0.9 n1\n"], ids=["missing", "of an earlier host"])
def test_the_meeting_waits_for_names(tmp_path: Path, first: str) -> None:
    token, names = tmp_path / "token", tmp_path / "hosts"
    token.write_text("a secret of these tests")
    environment = {**os.environ, "OUTLAST_TOKEN_FILE": str(token)}
    flags = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-endpoint=n1:29400", "--plain"]
    with Hosts(tmp_path, 2) as hosts:
        right = names.read_text()
        names.write_text("127.0.0.1 localhost\n" + first)
        launchers = []
        for rank, name in enumerate(hosts.names):
            words = [
                "outlast",
                "run",
                *flags,
                f"--node-rank={rank}",
                f"--run-dir={tmp_path / 'run'}",
                str(JOB),
            ]
            launchers.append(
                subprocess.Popen(
                    hosts.command(name, sys.executable, "-m", *words, str(tmp_path / "out"), "10"),
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        for launcher in launchers:
            assert launcher.stdout is not None
            lines = iter(launcher.stdout.readline, "")
            assert any("does not lead here yet" in one or "waiting for the" in one for one in lines)
        names.write_text(right)
        outputs = [launcher.communicate(timeout=100)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [EXIT_DONE] * 2, outputs
