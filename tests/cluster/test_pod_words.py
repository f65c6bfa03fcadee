"""Words of Kubernetes manifests, executed on hosts: pods with names and indexes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.conftest import ON_HOSTS
from tests.cluster.hosts import Hosts
from tests.end_to_end.conftest import wait_for

from outlast.cli.main import main
from outlast.errors import EXIT_DONE
from outlast.events import AnyEvent, Note, PhaseDone
from outlast.launch.nodes.node_state import why_not_alive, why_not_ready
from outlast.telemetry.event_store import read_events

pytestmark = ON_HOSTS
JOB = Path(__file__).with_name("steady_job.py")
KINDS = ["jobset", "trainjob", "leaderworkerset"]
STEPS = "60"
yaml = pytest.importorskip("yaml", reason="a YAML parser: pip install pyyaml")


def words(kind: str, folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[str]:
    """Return the command of the pods, with the claim at `folder`."""
    ours = ("--name=train", "--image=a", "--claim=runs", f"--kind={kind}", "--")
    run = ("--nnodes=1:2", "--nproc-per-node=1", "--plain", str(JOB), str(folder / "out"), STEPS)
    assert main(["k8s", "render", *ours, *run, *more]) == EXIT_DONE
    found: Any = list(yaml.safe_load_all(capsys.readouterr().out))[-1]["spec"]
    if kind == "trainjob":
        trainer = found["trainer"]
    elif kind == "jobset":
        pod = found["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        trainer = pod["containers"][0]
    else:
        trainer = found["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]
    return [each.replace("/runs/", f"{folder}/") for each in trainer["command"] + trainer["args"]]


class Pods:
    """Two pods of a manifest, each on a host of its own; pod 0 is the first node."""

    def __init__(self, kind: str, folder: Path, hosts: Hosts, command: list[str]) -> None:
        self._folder, self._hosts, self._command = folder, hosts, command
        (folder / "outlast").write_text(f'#!/bin/sh\nexec {sys.executable} -m outlast "$@"\n')
        (folder / "outlast").chmod(0o755)
        with (folder / "hosts").open("a") as names:
            print("10.78.0.1 train-node-0-0.train train-0.train.team", file=names)
        self._environment = {
            **os.environ,
            "OUTLAST_TOKEN": "a secret of these tests",
            "LWS_LEADER_ADDRESS": "train-0.train.team",
            "PATH": f"{folder}:{os.environ['PATH']}",
        }
        if kind == "trainjob":
            trainer = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_PORT": "29500"}
            self._environment |= trainer | {"PET_MASTER_ADDR": "train-node-0-0.train"}
        self.running = [self.start(index) for index in range(2)]

    def state(self, index: int) -> Path:
        return self._folder / f"state-{index}"

    def start(self, index: int) -> subprocess.Popen[str]:
        own = {"PET_NODE_RANK": str(index), "OUTLAST_NODE_STATE": str(self.state(index))}
        return subprocess.Popen(
            self._hosts.command(self._hosts.names[index], *self._command),
            env={**self._environment, **own},
            stdout=subprocess.PIPE,
            text=True,
        )

    def kill(self, index: int) -> None:
        """End a pod as Kubernetes does behind its grace period: all processes at once."""
        self._hosts.power_off(self._hosts.names[index])
        self.running[index].communicate(timeout=20)
        self._hosts.boot(self._hosts.names[index])
        self.state(index).unlink(missing_ok=True)  # a file of the container

    def wait_until_they_serve(self) -> None:
        for index in range(2):
            wait_for(self.state(index).exists, "a node that serves", 100.0)
            assert why_not_alive(self.state(index)) == "" == why_not_ready(self.state(index))

    def must_end_well(self, kind: str) -> None:
        for pod in self.running:
            if kind == "leaderworkerset":
                assert pod.stdout is not None
                lines = iter(pod.stdout.readline, "")
                assert any("has ended with exit code 0" in line for line in lines)
                assert pod.poll() is None
            else:
                pod.communicate(timeout=100)
                assert pod.returncode == EXIT_DONE
        assert not any(self.state(index).exists() for index in range(2))


@pytest.fixture
def start_pods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Pods]]:
    """Return what starts the pods of a kind, with words more for the script."""
    started: list[Pods] = []
    with Hosts(tmp_path, 2) as hosts:

        def start(kind: str, *more: str) -> Pods:
            started.append(Pods(kind, tmp_path, hosts, words(kind, tmp_path, capsys, *more)))
            return started[-1]

        yield start
    for pod in [pod for pods in started for pod in pods.running]:
        pod.communicate(timeout=20)


@pytest.mark.parametrize("kind", KINDS)
def test_the_pods_of_a_manifest_run_the_script(start_pods: Callable[..., Pods], kind: str) -> None:
    pods = start_pods(kind)
    pods.wait_until_they_serve()
    pods.must_end_well(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_that_dies_comes_back_into_the_run(
    tmp_path: Path, start_pods: Callable[..., Pods], kind: str
) -> None:
    """The one that dies has the endpoint, the controller and the only rank."""
    hold = tmp_path / "hold"
    hold.touch()
    pods = start_pods(kind, "ddp", str(hold))
    pods.wait_until_they_serve()
    run = tmp_path / "train"

    def has(kind: type[AnyEvent], text: str = "") -> bool:
        return any(isinstance(one, kind) and text in repr(one) for one in read_events(run))

    wait_for(lambda: has(PhaseDone), "a first step", 100.0)
    pods.kill(0)
    pods.running[0] = pods.start(0)
    wait_for(lambda: has(Note, "n1 joins the run as a spare node"), "its return", 100.0)
    pods.wait_until_they_serve()
    hold.unlink()
    pods.must_end_well(kind)
    assert json.loads((tmp_path / "out" / "0.json").read_text())[0] == int(STEPS)
