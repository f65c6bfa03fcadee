"""Flags of several nodes: what they mean, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.errors import OutlastError
from outlast.launch import torchrun_arguments
from outlast.launch.nodes import node_flags
from outlast.launch.nodes.node_facts import NodeIdentity, NodePlaces, identify
from outlast.launch.nodes.node_meeting import difference
from outlast.launch.torchrun_arguments import RunPlan

BASE = ("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-endpoint", "n1:29401", "--run-dir", "run")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("OUTLAST_TOKEN_FILE", "PET_NODE_RANK", "PET_NNODES"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


@pytest.mark.parametrize(
    ("text", "code"), [("4", 4), ("", 0), ("x", 0), ("-1", 0), ("256", 0), ("255", 255), ("٣", 0)]
)
def test_the_code_of_a_launcher_that_leaves(
    text: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(node_flags.RELEASE_VARIABLE, text)
    assert node_flags.release_code(0) == code


def plan(script: str, *flags: str) -> RunPlan:
    return torchrun_arguments.parse([*BASE, *flags, script])


def test_ranks_of_all_nodes_are_one_world(script: str) -> None:
    found = plan(script)
    assert (found.world, found.ranks_per_node, found.spares) == (4, 2, 0)
    assert (found.node.total, found.node.node_rank) == (2, -1)
    assert found.node.endpoint == "n1:29401"


def test_spare_nodes_have_room_for_the_ranks_of_one_node_each(script: str) -> None:
    found = plan(script, "--nnodes", "2:3", "--spares", "1")
    assert (found.world, found.spares, found.node.spare_nodes) == (4, 3, 1)


def test_an_endpoint_without_a_port_has_that_of_torchrun(script: str) -> None:
    assert plan(script, "--rdzv-endpoint", "n1").node.endpoint == "n1:29400"


def test_the_endpoint_may_have_torchruns_static_form(script: str) -> None:
    flags = ("--rdzv-endpoint", "", "--master-addr", "n1", "--node-rank", "1")
    assert plan(script, *flags).node.endpoint == "n1:29500"
    found = plan(script, *flags, "--master-port", "7000")
    assert (found.node.endpoint, found.node.node_rank, found.master_port) == ("n1:7000", 1, 7000)


def test_variables_of_torchrun_count(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NODE_RANK", "0")
    monkeypatch.setenv("OUTLAST_TOKEN_FILE", "secret")
    found = plan(script)
    assert (found.node.node_rank, found.node.token_file) == (0, "secret")


def test_displayed_streams_are_those_of_local_ranks(script: str) -> None:
    found = plan(script, "--local-ranks-filter", "1")
    assert found.streams == {0: 0, 1: 3, 2: 0, 3: 3}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--nnodes", "2:1"], "--nnodes 2:1"),
        (["--nnodes", "two"], "--nnodes two"),
        (["--node-rank", "2"], "--node-rank 2: this run has the node ranks 0 to 1"),
        (["--rdzv-endpoint", ""], "needs --rdzv-endpoint"),
        (["--rdzv-endpoint", "n1:port"], "--rdzv-endpoint n1:port"),
        (["--local-addr", "n1"], "--local-addr n1: give an IPv4 address"),
        (["--rdzv-backend", "etcd"], "--rdzv-backend etcd"),
        (["--run-dir", ""], "needs --run-dir"),
        (["--standalone"], "--standalone"),
    ],
)
def test_what_needs_one_host_is_refused_by_name(script: str, flags: list[str], says: str) -> None:
    with pytest.raises(OutlastError) as caught:
        plan(script, *flags)
    assert says in str(caught.value)


def test_all_nodes_have_one_policy(script: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef")
    flags = ("--rdzv-endpoint", "127.0.0.1", f"--token-file={tmp_path / 'token'}")

    def node(*more: str) -> NodeIdentity:
        return identify(plan(script, *flags, *more))

    exact = node("--policy=exact")
    wrong = difference(exact, node("--policy=fastest").hello(NodePlaces("")))
    assert wrong.startswith("its recovery policy (--policy) is fastest, digest ")
    assert "and that of the controller's node exact, digest " in wrong
    assert difference(exact, node("--policy=exact").hello(NodePlaces(""))) == ""
