"""Words of Kubernetes manifests, executed on hosts: pods with names and indexes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.hosts import Hosts, missing_requirement
from tests.end_to_end.conftest import wait_for

from outlast.cli.main import main
from outlast.errors import EXIT_DONE
from outlast.launch.nodes.node_state import why_not_alive, why_not_ready

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.process,
    pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement()),
]
JOB = Path(__file__).with_name("steady_job.py")
yaml = pytest.importorskip("yaml", reason="a YAML parser: pip install pyyaml")


def words(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the command of the pods, with the claim at `folder`."""
    ours = ("--name=train", "--image=a", "--claim=runs", f"--kind={kind}", "--")
    run = ("--nnodes=1:2", "--nproc-per-node=1", "--plain", str(JOB), str(folder / "out"), "60")
    assert main(["k8s", "render", *ours, *run]) == EXIT_DONE
    found: Any = list(yaml.safe_load_all(capsys.readouterr().out))[-1]["spec"]
    if kind == "trainjob":
        trainer = found["trainer"]
    elif kind == "jobset":
        pod = found["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        trainer = pod["containers"][0]
    else:
        trainer = found["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]
    return [each.replace("/runs/", f"{folder}/") for each in trainer["command"] + trainer["args"]]


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "leaderworkerset"])
def test_the_pods_of_a_manifest_run_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    command = words(kind, tmp_path, capsys)
    (tmp_path / "outlast").write_text(f'#!/bin/sh\nexec {sys.executable} -m outlast "$@"\n')
    (tmp_path / "outlast").chmod(0o755)
    common = {
        "OUTLAST_TOKEN": "a secret of these tests",
        "LWS_LEADER_ADDRESS": "train-0.train.team",
    }
    if kind == "trainjob":
        common |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_PORT": "29500"}
        common |= {"PET_MASTER_ADDR": "train-node-0-0.train"}
    states = [tmp_path / f"state-{index}" for index in range(2)]
    with Hosts(tmp_path, 2) as hosts:
        with (tmp_path / "hosts").open("a") as names:
            print("10.78.0.1 train-node-0-0.train train-0.train.team", file=names)
        pods = []
        for index, name in enumerate(hosts.names):
            own = {"PET_NODE_RANK": str(index), "OUTLAST_NODE_STATE": str(states[index])}
            own |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
            pod = hosts.command(name, *command)
            environment = {**os.environ, **common, **own}
            pods.append(subprocess.Popen(pod, env=environment, stdout=subprocess.PIPE, text=True))
        for state in states:
            wait_for(state.exists, "a node that serves", 100.0)
            assert why_not_alive(state) == "" == why_not_ready(state)
        for pod in pods:
            if kind == "leaderworkerset":
                assert pod.stdout is not None
                lines = iter(pod.stdout.readline, "")
                assert any("has ended with exit code 0" in line for line in lines)
                assert pod.poll() is None
            else:
                pod.communicate(timeout=100)
                assert pod.returncode == EXIT_DONE
        assert not any(state.exists() for state in states)
    for pod in pods:
        pod.communicate(timeout=20)
